"""Layers that look like another one on special values or sizes: what is recognised is what they compute, or nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slideformer_backend.integrations import kernel_check, swap_gated, swap_norm, swap_rotary
from slideformer_backend.kernels import gated, rms_norm, rotary
from tests.kernels.families import make, managed
from tests.kernels.truth import DEVICE, error
from tests.parity.models import batch, hugging_face

FP32 = torch.float32


@pytest.fixture(autouse=True)
def _twins(monkeypatch):
    """Triton's interpreter takes seconds per model."""
    if DEVICE.type == "cpu":
        for module in (rms_norm, gated, rotary):
            monkeypatch.setattr(module, "runs_triton", lambda tensor: False)


def results(model, ids):
    """Logits and all gradients of one step."""
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    found = [output.logits.detach().cpu(), *(parameter.grad.clone().cpu() for parameter in model.parameters())]
    model.zero_grad()
    return found


# -- gated: which projection is which ----------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [16, 32, 48, 64])
@pytest.mark.parametrize("family", ["Llama", "Gemma", "Phi3"])
def test_gated_layers_of_all_shapes(family, inner):
    """Square ones too, where all orders of three projections fit."""
    torch.manual_seed(0)
    options = {"head_dim": 16} if family == "Gemma" else {}
    model = hugging_face(family, intermediate_size=inner, **options)
    ids = batch(0, device=DEVICE)
    plain = results(copy.deepcopy(model).to(DEVICE), ids)
    with managed(model, "gated") as (_, handles):
        assert len(handles) == 3
        found = results(model, ids)
    for mine, theirs in zip(found, plain, strict=True):
        assert error(mine, theirs) < 1e-5


class Gate(nn.Module):
    """Square; the projections are registered in an order of one's own."""

    def __init__(self, order, bias=True):
        super().__init__()
        for name in order:
            self.add_module(name, nn.Linear(16, 16, bias=bias))

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("order", ["gate up down", "down gate up", "up down gate", "down up gate"])
def test_the_order_of_square_projections(order):
    gating, reason = swap_gated.recognise(Gate(order.split()), DEVICE, None)
    assert gating is not None, reason
    assert gating[:3] == ("gate", "up", "down")


def test_a_layer_that_two_orders_explain_keeps_its_code(monkeypatch):
    """Stand-ins that cannot be told apart decide nothing."""
    monkeypatch.setattr(swap_gated, "_INNER", swap_gated._OUTER)
    monkeypatch.setattr(torch, "randperm", lambda count, generator: torch.arange(count))
    gating, reason = swap_gated.recognise(Gate(["gate", "up", "down"]), DEVICE, None)
    assert gating is None
    assert "more than one way: gate, down, up or gate, up, down" in reason


class LateBias(Gate):
    """Adds a bias that a projection has, which a stand-in does not, once more."""

    def forward(self, x):
        bias = getattr(self.up, "bias", None)
        up = self.up(x)
        return self.down(F.silu(self.gate(x)) * (up if bias is None else up + bias))


def test_the_layers_own_weights_have_a_say():
    names = ["gate", "up", "down"]
    gating, reason = swap_gated.recognise(LateBias(names), DEVICE, None)
    assert gating is None
    assert "with its own weights: relative error" in reason
    assert swap_gated.recognise(LateBias(names, bias=False), DEVICE, None)[0] is not None


# -- layers that share a verdict ---------------------------------------------------------------------------------------


class Clamped(Gate):
    """Clamps, to limits that are kept in a form of one's own."""

    def __init__(self, limits):
        super().__init__(["gate", "up", "down"])
        if isinstance(limits, torch.Tensor):
            self.register_buffer("limits", limits)
        else:
            self.limits = limits

    def forward(self, x):
        low, high = self.limits.values() if isinstance(self.limits, dict) else self.limits
        return self.down((F.silu(self.gate(x)) * self.up(x)).clamp(low, high))


@pytest.mark.parametrize("form", [tuple, torch.tensor, lambda limits: dict(enumerate(limits))])
def test_layers_of_other_limits_are_other_layers(form):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(Clamped(form((-top, top)))) for top in (1e9, 0.01))

        def forward(self, x):
            return self.layers[1](self.layers[0](x))

    with managed(Two(), "gated") as (engine, handles):
        assert [handle._module() for handle in handles] == [engine.model.layers[0][0]]


def test_layers_alike_share_a_verdict():
    blocks = make("Llama").model.layers
    assert kernel_check.facts_of(blocks[0].mlp) == kernel_check.facts_of(blocks[1].mlp)
    assert kernel_check.facts_of(blocks[0].input_layernorm) == kernel_check.facts_of(blocks[1].input_layernorm)
    other = Gate(["gate", "up", "down"])
    other.down = nn.Linear(16, 8)
    assert kernel_check.facts_of(other) != kernel_check.facts_of(Gate(["gate", "up", "down"]))


# -- norms -------------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, weight, eps=1e-6, offset=0.0):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.eps = eps
        self.offset = offset

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (self.offset + self.weight)


class ToTheRoot(Norm):
    """Adds epsilon to the root."""

    def forward(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class Centred(Norm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


@pytest.mark.parametrize("width", [16, 4096])
@pytest.mark.parametrize("eps", [0.0, 1e-14, 1e-6, 1e-2])
def test_the_weight_of_a_norm_says_nothing_about_its_offset(width, eps):
    for offset in (0.0, 1.0):
        for weight in (torch.ones(width), torch.zeros(width)):
            found, reason = swap_norm.recognise(Norm(weight, eps, offset), DEVICE, None)
            assert found is not None, reason
            assert found[0] == offset


@pytest.mark.parametrize("eps", [1e-14, 1e-12, 1e-6])
def test_where_a_small_epsilon_is_added_is_seen(eps):
    assert swap_norm.recognise(ToTheRoot(torch.ones(64), eps), DEVICE, None)[0] is None


def test_that_the_mean_of_a_wide_row_is_subtracted_is_seen():
    assert swap_norm.recognise(Centred(torch.ones(8192)), DEVICE, None)[0] is None


def test_a_dtype_in_which_the_layer_overflows_proves_nothing():
    """Whatever is found is as near to the truth as infinity."""

    def own(x):
        return (x * 300) * 300 / 9e4

    def fused(x):
        return (x * 300) * 300 / 9e4 if x.dtype == FP32 else x * 0 + 7

    x = torch.linspace(1, 2, 8)
    assert "overflows" in kernel_check.mismatch(
        own, fused, [x], [torch.float16], kernel_check.Case(torch.float16, None)
    )


# -- rotary ------------------------------------------------------------------------------------------------------------


def _turn(q, k, cos, sin, pairs=False):
    def rotate(x):
        if pairs:
            return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    width = cos.shape[-1]
    return tuple(torch.cat([x[..., :width] * cos + rotate(x[..., :width]) * sin, x[..., width:]], -1) for x in (q, k))


def halves(q, k, cos, sin):
    return _turn(q, k, cos, sin)


def neighbours(q, k, cos, sin):
    return _turn(q, k, cos, sin, pairs=True)


def neighbours_of_first(q, k, cos, sin):
    cos, sin = (angles[..., : angles.shape[-1] // 2].repeat_interleave(2, -1) for angles in (cos, sin))
    return neighbours(q, k, cos, sin)


def neighbours_of_second(q, k, cos, sin):
    cos, sin = (angles[..., angles.shape[-1] // 2 :].repeat_interleave(2, -1) for angles in (cos, sin))
    return neighbours(q, k, cos, sin)


def swapped(q, k, cos, sin):
    return _turn(q, k, sin, cos)


def backwards(q, k, cos, sin):
    return _turn(q, k, cos, -sin)


def half_of_the_head(q, k, cos, sin):
    """Turns half of the head if it is not given angles for all of it."""
    width = q.shape[-1] if cos.shape[-1] == q.shape[-1] else q.shape[-1] // 2
    cos, sin = (torch.cat([angles, angles], -1)[..., :width] for angles in (cos, sin))
    return _turn(q, k, cos, sin)


@pytest.mark.parametrize(
    ("function", "style"),
    [
        (halves, "halves"),
        (neighbours, "pairs"),
        (neighbours_of_first, "pairs of halves"),
        (neighbours_of_second, None),
        (swapped, None),
        (backwards, None),
    ],
)
def test_what_is_turned_against_what(function, style):
    turn, reason = swap_rotary.recognise(function, [FP32], DEVICE)
    assert (turn and turn.style) == style
    assert bool(reason) == (style is None)


def test_a_part_is_the_width_of_the_angles():
    turn, _ = swap_rotary.recognise(half_of_the_head, [FP32], DEVICE)
    assert turn.known == {(FP32, FP32, False)}
    assert swap_rotary.recognise(halves, [FP32], DEVICE)[0].known == {(FP32, FP32, False), (FP32, FP32, True)}


def test_place_0_does_not_decide_how_angles_lie(monkeypatch):
    """There all cosines are 1 and all sines 0, however the model lays them out."""
    torch.manual_seed(0)
    model = make("Llama")
    real = type(model.model.rotary_emb).forward

    def neighbouring(self, *args, **kwargs):
        half = [angles.chunk(2, -1)[0] for angles in real(self, *args, **kwargs)]
        return tuple(angles.repeat_interleave(2, -1) for angles in half)

    monkeypatch.setattr(type(model.model.rotary_emb), "forward", neighbouring)
    ids = batch(0, device=DEVICE)
    plain = results(copy.deepcopy(model).to(DEVICE), ids)
    with managed(model, "rotary"), torch.no_grad():
        model(input_ids=ids[:, :1])
        with torch.enable_grad():
            found = results(model, ids)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, plain, strict=True))
