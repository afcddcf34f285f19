"""Kernel swap: which layers are recognised, what they compute, and that all else stays as it was."""

from __future__ import annotations

import collections
import copy
import logging
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slideformer_backend.api import attach
from slideformer_backend.config import KERNELS
from slideformer_backend.integrations import kernel_swap, swap_gated, swap_norm, swap_rotary
from slideformer_backend.kernels import gated, rms_norm, rotary
from tests.kernels.families import make, managed
from tests.kernels.truth import DEVICE, error
from tests.parity.models import batch, llama
from tests.tolerances import KERNELS as TOLERANCE

# layers swapped per kernel, of three blocks
COUNTS = {
    "Llama": (7, 3, 3),
    "Qwen3": (13, 3, 3),
    "Gemma": (7, 3, 3),
    "Gemma2": (13, 3, 3),
    "Gemma3": (19, 3, 3),
    "Phi3": (7, 3, 3),
    "Phi": (0, 0, 3),
    "GPTNeoX": (0, 0, 3),
    "StableLm": (0, 3, 3),
    "Cohere": (0, 3, 3),
    "Glm4": (13, 3, 3),
    "Olmo2": (13, 3, 3),
    "Mixtral": (7, 3, 3),
    "Qwen2Moe": (7, 6, 3),
    "GptOss": (7, 0, 0),
    "NanoChat": (13, 0, 0),
    "GPT2": (0, 0, 0),
}
KINDS = {"NormForward": "rms_norm", "GatedForward": "gated", "ExpertGate": "gated", "AttentionForward": "rotary"}


@pytest.fixture
def interpreted():
    """Kernels run in Triton's interpreter where there is no GPU."""


@pytest.fixture(autouse=True)
def _twins(request, monkeypatch):
    """Elsewhere their twins do: the interpreter takes seconds per model."""
    if DEVICE.type == "cpu" and "interpreted" not in request.fixturenames:
        for module in (rms_norm, gated, rotary):
            monkeypatch.setattr(module, "runs_triton", lambda tensor: False)


def results(model, ids, autocast=None):
    """Loss and all gradients of one step."""
    with torch.autocast(DEVICE.type, dtype=autocast, enabled=autocast is not None):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    for parameter in model.parameters():
        parameter.grad = None
    return [tensor.cpu() for tensor in found]


def gradient_error(found, truth):
    """Relative error of all gradients together."""
    flat = [torch.cat([tensor.double().flatten() for tensor in tensors[1:]]) for tensors in (found, truth)]
    return error(*flat)


@pytest.mark.filterwarnings("ignore:`loss_type=None`")
@pytest.mark.parametrize("family", COUNTS)
def test_families(family):
    """What is recognised, and that a step gives the plain model's loss and gradients."""
    torch.manual_seed(0)
    model = make(family)
    ids = batch(0, device=DEVICE)
    plain = results(copy.deepcopy(model).to(DEVICE), ids)
    with managed(model) as (_, handles):
        counts = collections.Counter(KINDS[type(handle).__name__] for handle in handles)
        assert tuple(counts[name] for name in KERNELS) == COUNTS[family]
        found = results(model, ids)
    torch.testing.assert_close(found[0], plain[0], rtol=1e-6, atol=1e-6)
    assert gradient_error(found, plain) < 1e-5


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("family", ["Gemma2", "Mixtral"])
def test_bf16_is_as_near_to_the_truth_as_the_plain_model(family):
    torch.manual_seed(0)
    model = make(family, torch.bfloat16)
    ids = batch(0, device=DEVICE)
    truth = results(copy.deepcopy(model).float().to(DEVICE), ids)
    plain = results(copy.deepcopy(model).to(DEVICE), ids)
    with managed(model):
        found = results(model, ids)
    assert gradient_error(found, truth) <= gradient_error(plain, truth) + TOLERANCE[torch.bfloat16]


def test_autocast():
    torch.manual_seed(0)
    model = make("Qwen3")
    ids = batch(0, device=DEVICE)
    truth = results(copy.deepcopy(model).to(DEVICE), ids)
    plain = results(copy.deepcopy(model).to(DEVICE), ids, torch.bfloat16)
    with managed(model, autocast=torch.bfloat16):
        found = results(model, ids, torch.bfloat16)
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in plain]
    assert gradient_error(found, truth) <= gradient_error(plain, truth) + TOLERANCE[torch.bfloat16]


@pytest.mark.usefixtures("interpreted")
def test_kernels_run_and_only_those_that_are_named(monkeypatch):
    calls = collections.Counter()
    for module, name in ((rms_norm, "launch_forward"), (gated, "launch_forward"), (rotary, "launch")):
        real = getattr(module, name)
        short = module.__name__.rpartition(".")[2]

        def spy(*args, real=real, short=short, **kwargs):
            calls[short] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, spy)
    ids = batch(0, device=DEVICE)
    for names in (("gated",), ("rotary", "rms_norm")):
        model = llama()()
        with managed(model, *names):
            calls.clear()
            results(model, ids)
            assert set(calls) == set(names)
    calls.clear()
    results(llama()().to(DEVICE), ids)
    assert not calls


# -- what is not reproduced keeps its own code -------------------------------------------------------------------------


class CentredNorm(nn.Module):
    """Looks like an RMSNorm and is none."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = 1e-6

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class OtherEpsilon(CentredNorm):
    """Adds epsilon to the root."""

    def forward(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class Gate(nn.Module):
    def __init__(self, activate, dropout=0.0, width=16):
        super().__init__()
        self.first, self.second = nn.Linear(width, 24), nn.Linear(width, 24)
        self.last = nn.Linear(24, width)
        self.act = activate
        self.dropout = dropout

    def forward(self, x):
        return self.last(F.dropout(self.act(self.second(x)) * self.first(x), self.dropout, self.training))


@pytest.mark.parametrize("kind", [CentredNorm, OtherEpsilon])
def test_norms_that_are_none(kind):
    layer = kind(16)
    assert swap_norm.is_candidate(layer)
    found, reason = swap_norm.recognise(layer, DEVICE, None)
    assert found is None
    assert "error" in reason


@pytest.mark.parametrize("layer", [nn.LayerNorm(16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Dropout()])
def test_no_candidates(layer):
    assert not swap_norm.is_candidate(layer)


@pytest.mark.parametrize(
    ("activate", "expected"),
    [
        (F.silu, "swiglu"),
        (nn.SiLU(), "swiglu"),
        (nn.GELU("tanh"), "geglu"),
        (nn.GELU(), "_gelu"),
        (nn.ReLU(), None),
        (F.mish, None),
        (lambda x: F.silu(x).clamp(max=30.0), None),
    ],
)
def test_activations_are_told_apart(activate, expected):
    gating, reason = swap_gated.recognise(Gate(activate), DEVICE, None)
    assert (gating and gating.activation.__name__) == expected
    assert bool(reason) == (expected is None)
    if gating:
        assert (gating.gate, gating.up, gating.down) == ("second", "first", "last")


def test_dropout_between_is_seen():
    assert swap_gated.recognise(Gate(F.silu, dropout=0.1), DEVICE, None)[0] is None
    assert swap_gated.recognise(Gate(F.silu, dropout=0.0), DEVICE, None)[0] is not None


class Odd(nn.Module):
    """A model with layers that no kernel reproduces."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(CentredNorm(16), Gate(F.relu)) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_such_layers_keep_their_code_and_a_line_says_so(caplog):
    caplog.set_level(logging.INFO)
    with managed(Odd()) as (_, handles):
        assert handles == []
    text = caplog.text
    assert "layers.0.0, and all layers like it, keep their own code" in text
    assert "layers.0.1, and all layers like it, keep their own code" in text
    assert "layers.1" not in text
    assert "rms_norm in 0 layers, gated in 0 layers, rotary in 0 layers" in text


def test_angles_that_are_not_doubled_are_turned_by_the_models_own_function(monkeypatch):
    model = make("Llama")
    embedding = type(model.model.rotary_emb)
    real = embedding.forward

    def uneven(self, *args, **kwargs):
        cos, sin = real(self, *args, **kwargs)
        return cos * torch.linspace(0.5, 1.0, cos.shape[-1], device=cos.device), sin

    monkeypatch.setattr(embedding, "forward", uneven)
    ids = batch(0, device=DEVICE)
    plain = results(copy.deepcopy(model).to(DEVICE), ids)
    with managed(model, "rotary"):
        assert all(torch.equal(a, b) for a, b in zip(results(model, ids), plain, strict=True))


# -- everything else stays ---------------------------------------------------------------------------------------------


def functions():
    module = sys.modules["transformers.models.llama.modeling_llama"]
    return module.apply_rotary_pos_emb


def test_undo():
    model, other = make("Llama"), make("Llama")
    before = functions()
    keys = list(model.state_dict())
    with managed(model):
        with managed(other):
            assert list(model.state_dict()) == keys
            assert isinstance(functions(), swap_rotary.Patched)
        assert isinstance(functions(), swap_rotary.Patched), "another model still needs it"
        assert not any("forward" in module.__dict__ for module in other.modules())
    assert functions() is before
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_copies_and_other_models_run_their_own_code():
    torch.manual_seed(0)
    model = make("Llama", torch.bfloat16)
    ids = batch(0, device=DEVICE)
    other = copy.deepcopy(model).to(DEVICE)
    plain = results(other, ids)
    with managed(model):
        found = results(model, ids)
        clone = copy.deepcopy(model).to(DEVICE)
        for unmanaged in (clone, other):
            assert all(torch.equal(a, b) for a, b in zip(results(unmanaged, ids), plain, strict=True))
    assert not torch.equal(found[0], plain[0]), "kernels round less often: else this test shows nothing"
    assert all(torch.equal(a, b) for a, b in zip(results(model.to(DEVICE), ids), plain, strict=True))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="about machines without a GPU")
def test_auto_changes_nothing_on_a_cpu():
    model = make("Llama")
    engine = attach(model)
    before = functions()
    assert engine.config.kernels == "auto"
    assert kernel_swap.install(engine) == []
    assert functions() is before
    blocks = list(model.model.layers)
    assert not any("forward" in module.__dict__ for module in model.modules() if module not in blocks)
    engine.detach()


def test_what_auto_and_off_mean():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert kernel_swap.wanted("auto", cpu) == kernel_swap.wanted("off", cuda) == kernel_swap.wanted("off", cpu) == ()
    assert kernel_swap.wanted("auto", cuda) == KERNELS
    assert kernel_swap.wanted(("gated",), cpu) == ("gated",)


def test_ligers_layers_are_left_alone(caplog):
    """As Liger puts itself in: its class, its forward on an instance, or its function in the modelling module."""
    caplog.set_level(logging.INFO)
    module = sys.modules["transformers.models.llama.modeling_llama"]

    def by_class(model):
        model.model.norm.__class__ = type("LigerRMSNorm", (type(model.model.norm),), {"__module__": "liger_kernel.x"})

    def by_forward(model):
        def forward(self, x):
            return x

        forward.__module__ = "liger_kernel.transformers.swiglu"
        model.model.layers[0].mlp.forward = forward.__get__(model.model.layers[0].mlp)

    def by_function(model):
        def liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
            return q, k

        liger_rotary_pos_emb.__module__ = "liger_kernel.transformers.rope"
        module.apply_rotary_pos_emb = liger_rotary_pos_emb

    before = functions()
    for put_in in (by_class, by_forward, by_function):
        model = make("Llama")
        put_in(model)
        try:
            with managed(model) as (_, handles):
                assert handles == [], put_in.__name__
        finally:
            module.apply_rotary_pos_emb = before
    assert caplog.text.count("leaves the layers of this model alone") == 3


def test_forwards_that_somebody_replaced_are_left_alone():
    model = make("Llama")
    model.model.norm.forward = lambda x: x
    with managed(model, "rms_norm") as (_, handles):
        assert len(handles) == 6
    assert model.model.norm.forward(3) == 3


def test_hooks_see_what_they_saw():
    model = make("Llama")
    seen = collections.Counter()
    mlp = model.model.layers[1].mlp
    for name, module in (("act", mlp.act_fn), ("mlp", mlp), ("norm", model.model.norm), ("gate", mlp.gate_proj)):
        module.register_forward_hook(lambda *_, name=name: seen.update([name]))
    with managed(model), torch.no_grad():
        model(input_ids=batch(0, device=DEVICE))
    assert seen["act"] >= 1
    assert {name for name, count in seen.items() if count} == {"act", "mlp", "norm", "gate"}


def test_calls_of_another_form_go_to_the_layer():
    model = make("Llama")
    x = torch.randn(2, 3, 32, device=DEVICE)
    with managed(model):
        norm = model.model.norm
        torch.testing.assert_close(norm(hidden_states=x), norm(x))
        assert norm(x.double()).dtype == torch.float64


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_lora_and_checkpointing():
    peft = pytest.importorskip("peft", reason="PEFT is a dependency of the package")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "gate_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(make("Llama"), config)
    model.base_model.model.activation_checkpointing_enable()
    ids = batch(0, device=DEVICE)
    plain = results(copy.deepcopy(model).to(DEVICE), ids)
    with managed(model) as (_, handles):
        counts = collections.Counter(KINDS[type(handle).__name__] for handle in handles)
        assert tuple(counts[name] for name in KERNELS) == COUNTS["Llama"]
        found = results(model, ids)
    assert len(found) == len(plain)
    assert gradient_error(found, plain) < 1e-5


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # the compiler looks
def test_compiled_layers_are_traced_in_their_own_code():
    torch.manual_seed(0)
    model = make("Llama")
    ids = batch(0, device=DEVICE)
    plain = results(copy.deepcopy(model).to(DEVICE), ids)
    torch._dynamo.reset()
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    with managed(model) as (_, handles):
        assert handles
        for layer in model.model.layers:
            layer.mlp.compile(backend=counter, fullgraph=True)
            layer.input_layernorm.compile(backend=counter, fullgraph=True)
        found = results(model, ids)
    assert counter.frame_count >= 2
    assert gradient_error(found, plain) < 1e-5


def test_per_sample_gradients_run_the_layers_own_code():
    model = make("Llama")
    norm = model.model.norm
    x = torch.randn(4, 3, 32, device=DEVICE)
    with managed(model):
        found = torch.vmap(torch.func.grad(lambda x: norm(x).square().sum()))(x)
        expected = torch.func.grad(lambda x: norm(x).square().sum())(x)
    torch.testing.assert_close(found, expected)


def test_random_numbers_of_the_user_stay():
    model = make("Llama")
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with managed(model):
        assert torch.equal(torch.rand(4), expected)


def test_accelerator_takes_the_key():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from slideformer_backend import SlideFormerPlugin
    from slideformer_backend.integrations import hooks
    from slideformer_backend.integrations.session import session

    for kernels, count in (("off", 0), (["rms_norm"], 7)):
        hooks.install()
        try:
            plugin = SlideFormerPlugin(kernels=kernels, status="off")
            accelerator = Accelerator(cpu=DEVICE.type == "cpu", kwargs_handlers=[plugin])
            model = accelerator.prepare(llama()())
            norms = [module for module in model.modules() if "RMSNorm" in type(module).__name__]
            assert sum("forward" in module.__dict__ for module in norms) == count
            accelerator.free_memory()
            assert not any("forward" in module.__dict__ for module in norms)
        finally:
            hooks.uninstall()
            session.reset()
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
