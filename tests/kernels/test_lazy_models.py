"""Lazy logits in whole models under an engine: losses of transformers and of users, PEFT, generation, Accelerate."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch.nn import functional as F

from slideformer_backend.api import attach
from slideformer_backend.errors import StaleGraphError
from slideformer_backend.integrations import lazy_logits
from slideformer_backend.integrations.lazy_logits_tensor import LazyLogits, Source
from tests.kernels.truth import DEVICE
from tests.parity.models import VOCABULARY, batch, hugging_face, llama

FAMILIES = {
    "Llama": {},
    "Llama tied": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "Granite": {"logits_scaling": 4.0},
    "Cohere": {"logit_scale": 0.25},
    "Phi": {},
    "GPT2": {"suffix": "LMHeadModel", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "Mixtral": {"num_local_experts": 4, "output_router_logits": True},
}


@pytest.fixture(autouse=True)
def _always_lazy(monkeypatch):
    """Also for the few logits of these models."""
    monkeypatch.setattr(lazy_logits, "CPU_BYTES", 0)
    monkeypatch.setattr(lazy_logits, "GPU_ELEMENTS", 0)


@pytest.fixture
def computed(monkeypatch):
    calls = []
    real = Source.compute
    monkeypatch.setattr(Source, "compute", lambda self: (calls.append(self), real(self))[1])
    return calls


@contextlib.contextmanager
def managed(model):
    """An engine with lazy logits, detached at the end."""
    engine = attach(model, device=DEVICE)
    assert lazy_logits.install(engine) != []
    try:
        yield engine
    finally:
        engine.detach()


def train(model, loss_of, engine=None, steps=3):
    """Losses and gradients of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if engine is not None:
        engine.bind(optimizer)
    seen = []
    for number in range(steps):
        loss = loss_of(model, batch(number, device=DEVICE))
        loss.backward()
        seen.append([loss.detach().cpu(), *(None if p.grad is None else p.grad.cpu() for p in model.parameters())])
        optimizer.step()
        optimizer.zero_grad()
    return seen


def compare(make, loss_of, **tolerance):
    torch.manual_seed(0)
    model = make()
    plain = train(copy.deepcopy(model).to(DEVICE), loss_of)
    with managed(model) as engine:
        lazy = train(model, loss_of, engine)
    tolerance = tolerance or {"rtol": 1e-4, "atol": 5e-5}
    for number, (expected, found) in enumerate(zip(plain, lazy, strict=True)):
        for a, b in zip(found, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, **tolerance, msg=lambda text, n=number: f"step {n}: {text}")


def own_loss(model, ids):
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, computed):
    compare(lambda: hugging_face(name.split()[0], **FAMILIES[name]), own_loss)
    assert computed == []


def num_items(model, ids):
    return model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(11)).loss


def by_hand(model, ids):
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY).float(), ids[:, 1:].reshape(-1))


def some_logits(model, ids):
    logits = model(input_ids=ids, logits_to_keep=3).logits
    assert logits.shape[1] == 3
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, -3:].reshape(-1))


def smoothed(model, ids):
    from transformers.trainer_pt_utils import LabelSmoother

    labels = ids.clone()
    labels[:, :2] = -100
    return LabelSmoother(0.1)(model(input_ids=ids), labels, shift_labels=True)


def preference(model, ids):
    """Log-probabilities of tokens, as preference optimisation takes them."""
    logits = model(input_ids=ids).logits[:, :-1]
    logps = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2).sum(-1)
    return -F.logsigmoid(logps[0] - logps[1])


LOSSES = [num_items, by_hand, some_logits, smoothed, preference]


@pytest.mark.parametrize("loss_of", LOSSES, ids=lambda loss: loss.__name__)
def test_losses(loss_of, computed):
    compare(llama(), loss_of)
    assert computed == []


def test_bf16(computed):
    compare(llama(torch.bfloat16), own_loss, rtol=2e-2, atol=4e-3)
    assert computed == []


def test_accumulation_adds_once(computed):
    def twice(model, ids):
        (own_loss(model, ids) / 2).backward()
        return own_loss(model, ids.flip(0)) / 2

    compare(llama(), twice)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_lora(computed):
    peft = pytest.importorskip("peft", reason="PEFT is a dependency of the package")

    def make():
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(llama()(), config)

    compare(make, own_loss)

    def with_copied_head():
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
        return peft.get_peft_model(llama()(), config)

    compare(with_copied_head, own_loss)
    assert computed == []


def test_generation_and_evaluation_are_those_of_the_plain_model():
    model = llama()().eval()
    ids = batch(0, device=DEVICE)
    plain = copy.deepcopy(model).to(DEVICE)
    expected = plain.generate(ids, max_new_tokens=5, do_sample=False)
    with torch.no_grad():
        wanted = plain(input_ids=ids, labels=ids)
    with managed(model), torch.no_grad():
        found = model(input_ids=ids, labels=ids)
        assert isinstance(found.logits, LazyLogits)
        torch.testing.assert_close(found.loss, wanted.loss)
        assert torch.equal(found.logits, wanted.logits)
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)
    with torch.inference_mode():
        assert type(model(input_ids=ids).logits) is torch.Tensor


def test_logits_read_after_the_step_raise():
    model = llama()()
    with managed(model) as engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.bind(optimizer)
        ids = batch(0, device=DEVICE)
        early, late = model(input_ids=ids, labels=ids), model(input_ids=ids, labels=ids)
        kept = early.logits.sum()
        late.loss.backward()
        optimizer.step()
        assert torch.equal(early.logits.sum(), kept), "computed before the step: still there"
        with pytest.raises(StaleGraphError, match=r"optimizer\.step"):
            late.logits.sum()


def test_undo():
    model = llama()()
    with managed(model):
        assert "forward" in model.lm_head.__dict__
        clone = copy.deepcopy(model)
    assert "forward" not in model.lm_head.__dict__
    ids = batch(0)
    assert type(model(input_ids=ids).logits) is torch.Tensor
    assert type(clone(input_ids=ids).logits) is torch.Tensor


def test_small_logits_on_a_cpu_are_computed_at_once(monkeypatch):
    """So that small runs on a CPU stay equal to plain PyTorch bit for bit."""
    monkeypatch.undo()
    cpu = torch.device("cpu")
    hidden, weight = torch.randn(2, 8, 4, device=cpu), torch.randn(64, 4, device=cpu)
    assert not lazy_logits.is_worthwhile(hidden, weight)


def test_accelerator_makes_logits_lazy_unless_told_otherwise(computed):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from slideformer_backend import SlideFormerPlugin
    from slideformer_backend.integrations import hooks
    from slideformer_backend.integrations.session import session

    for wanted in (True, False):
        hooks.install()
        try:
            accelerator = Accelerator(
                cpu=DEVICE.type == "cpu", kwargs_handlers=[SlideFormerPlugin(lazy_logits=wanted, status="off")]
            )
            model = llama()()
            optimizer = torch.optim.AdamW(model.parameters())
            model, optimizer = accelerator.prepare(model, optimizer)
            ids = batch(0, device=accelerator.device)
            output = model(input_ids=ids, labels=ids)
            assert isinstance(output.logits, LazyLogits) == wanted
            accelerator.backward(output.loss)
            optimizer.step()
            accelerator.free_memory()
        finally:
            hooks.uninstall()
            session.reset()
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
    assert computed == []
