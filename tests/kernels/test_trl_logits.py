"""TRL under lazy logits: its trainer logs what it logs without us, and none of its losses computes the logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from slideformer_backend.integrations import hooks, lazy_logits
from slideformer_backend.integrations.lazy_logits_autograd import lazy_logits as lazy_head
from slideformer_backend.integrations.lazy_logits_tensor import LazyLogits, Source
from slideformer_backend.integrations.session import session
from slideformer_backend.integrations.trl_ import wrap_selective_log_softmax
from tests.kernels.truth import DEVICE
from tests.parity.models import llama

trl = pytest.importorskip("trl", reason="trl is part of the extra [test]")
datasets = pytest.importorskip("datasets", reason="datasets is part of the extra [test]")

STEPS = 3
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # TRL's own deprecations
]


@pytest.fixture
def computed(monkeypatch):
    """How often logits were computed; lazy ones are made also for these few."""
    monkeypatch.setattr(lazy_logits, "CPU_BYTES", 0)
    monkeypatch.setattr(lazy_logits, "GPU_ELEMENTS", 0)
    calls = []
    real = Source.compute
    monkeypatch.setattr(Source, "compute", lambda self: (calls.append(self), real(self))[1])
    return calls


@pytest.fixture
def train(monkeypatch, tmp_path):
    """Runs ``SFTTrainer``; its logs and the weights that it leaves."""
    from accelerate.state import AcceleratorState, GradientState
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<eos>": 1, "<pad>": 2, **{f"w{n}": n for n in range(3, 64)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>")
    rows = [
        {"prompt": f"w{3 + n} w{n % 7 + 9}", "completion": " w5 w6" + f" w{20 + n % 5}" * (n % 4 + 1)}
        for n in range(12)
    ]

    def run(managed, compute_loss_func=None, **options):
        torch.manual_seed(0)
        model = llama()()
        if managed:
            monkeypatch.setenv("ACCELERATE_USE_SLIDEFORMER", "true")
            hooks.install()
        try:
            arguments = trl.SFTConfig(
                str(tmp_path / str(managed)), max_steps=STEPS, logging_steps=1, report_to="none", save_strategy="no",
                disable_tqdm=True, bf16=False, use_cpu=DEVICE.type == "cpu", per_device_train_batch_size=2,
                gradient_accumulation_steps=2, learning_rate=1e-2, eval_strategy="steps", eval_steps=STEPS, **options,
            )  # fmt: skip
            trainer = trl.SFTTrainer(
                model, arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer,
                eval_dataset=datasets.Dataset.from_list(rows[:4]), compute_loss_func=compute_loss_func,
            )  # fmt: skip
            trainer.train()
            return trainer.state.log_history, [p.detach().cpu().clone() for p in model.parameters()]
        finally:
            monkeypatch.delenv("ACCELERATE_USE_SLIDEFORMER", raising=False)
            hooks.uninstall()
            session.reset()
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()

    return run


def chain(outputs, labels, num_items_in_batch=None):
    """A user's own loss."""
    assert torch.is_grad_enabled() is outputs.logits.requires_grad
    logits = outputs.logits[:, :-1].reshape(-1, outputs.logits.shape[-1]).float()
    loss = F.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="sum", ignore_index=-100)
    return (
        loss / (labels[:, 1:] != -100).sum().clamp(min=1) if num_items_in_batch is None else loss / num_items_in_batch
    )


WAYS = {
    "its own fused head": {},
    "dft": {"loss_type": "dft"},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "own loss": {"compute_loss_func": chain},
    "packed": {"packing": True, "max_length": 16},
}


@pytest.mark.parametrize("way", WAYS)
def test_what_it_logs_is_what_it_logs_without_us(way, train, computed, monkeypatch):
    made = []
    real = lazy_logits.lazy_logits
    monkeypatch.setattr(lazy_logits, "lazy_logits", lambda *args: (made.append(args), real(*args))[1])
    plain, expected = train(False, **WAYS[way])
    assert made == []
    logs, weights = train(True, **WAYS[way])
    assert bool(made) == (way in ("label smoothing", "own loss")), "the others use TRL's own fused head"
    assert computed == []
    assert len(logs) == len(plain) == STEPS + 2
    for ours, theirs in zip(logs, plain, strict=True):
        kept = {key for key in theirs if not key.endswith(("runtime", "per_second", "_flos"))}
        assert kept <= ours.keys()
        for key in kept:
            assert ours[key] == pytest.approx(theirs[key], rel=2e-4, abs=1e-6), (key, ours, theirs)
    assert {"entropy", "mean_token_accuracy", "loss", "grad_norm"} <= logs[0].keys()
    assert {"eval_entropy", "eval_mean_token_accuracy", "eval_loss"} <= logs[STEPS].keys()
    for ours, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"row_mask": True}], ids=str)
def test_log_probabilities_where_trl_has_a_kernel_of_its_own(options, computed):
    """On a GPU TRL's function reads all logits; ours answers for lazy ones."""

    def original(*args, **kwargs):
        raise AssertionError("the logits were handed on")

    function = wrap_selective_log_softmax(original)
    generator = torch.Generator().manual_seed(0)
    h, w = torch.randn(2, 5, 8, generator=generator), torch.randn(33, 8, generator=generator)
    ids = torch.randint(0, 33, (2, 5), generator=generator).to(DEVICE)
    if options.get("row_mask"):
        options = {"row_mask": (ids % 2).to(torch.int64)}
    results = []
    for head, call in ((F.linear, trl.trainer.utils.selective_log_softmax), (lazy_head, function)):
        leaves = [t.to(DEVICE, copy=True).requires_grad_() for t in (h, w)]
        found = call(head(*leaves, None), ids, **options)
        found.square().sum().backward()
        results.append([found.detach(), *(leaf.grad for leaf in leaves)])
    for plain, lazy in zip(*results, strict=True):
        torch.testing.assert_close(lazy, plain, rtol=5e-5, atol=1e-5)
    assert computed == []


def test_other_calls_are_trls():
    calls = []
    function = wrap_selective_log_softmax(lambda *args, **kwargs: calls.append((args, kwargs)))
    logits, ids = torch.randn(2, 3, 7), torch.zeros(2, 3, dtype=torch.int64)
    lazy = lazy_head(torch.randn(2, 3, 4), torch.randn(7, 4), None)
    assert type(lazy) is LazyLogits
    function(logits, ids)
    function(lazy, ids[..., None].expand(2, 3, 2))
    function(lazy, ids, something=1)
    function(lazy, ids, temperature=0.0)
    assert len(calls) == 4


def test_the_function_is_replaced_and_put_back():
    from trl.trainer import utils

    before = utils.selective_log_softmax
    hooks.install()
    try:
        assert utils.selective_log_softmax is not before
        assert utils.selective_log_softmax.__wrapped__ is before
    finally:
        hooks.uninstall()
    assert utils.selective_log_softmax is before
