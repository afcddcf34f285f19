"""32 steps with all kernels and lazy logits: the loss falls as the plain model's does, within rounding noise.

Kernels run as their twins where there is no GPU: that they are equal has tests of its own.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from slideformer_backend.integrations import lazy_logits
from slideformer_backend.kernels import gated, rms_norm, rotary, scaled_cast, softmax_gradient
from tests.kernels.families import make, managed
from tests.kernels.truth import DEVICE
from tests.parity.models import VOCABULARY, batch
from tests.tolerances import CONVERGENCE

STEPS = 32
# learning rates at which the loss falls fast and rounding noise stays small
FAMILIES = {"Llama": 5e-3, "Qwen3": 5e-3, "Gemma2": 2e-3, "Gemma3": 2e-3, "Phi3": 5e-3, "Mixtral": 5e-3, "GPT2": 5e-3}


@pytest.fixture(autouse=True)
def _always_lazy_and_twins(monkeypatch):
    monkeypatch.setattr(lazy_logits, "CPU_BYTES", 0)
    monkeypatch.setattr(lazy_logits, "GPU_ELEMENTS", 0)
    if DEVICE.type == "cpu":
        for module in (rms_norm, gated, rotary, scaled_cast, softmax_gradient):
            monkeypatch.setattr(module, "runs_triton", lambda tensor: False)


def curve(model, lr, autocast, engine=None, flipped=False):
    """Losses of all steps, on sequences that count up."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    if engine is not None:
        engine.bind(optimizer)
    losses = []
    for number in range(STEPS):
        ids = (batch(number, rows=8, length=1, device=DEVICE) + torch.arange(16, device=DEVICE)) % VOCABULARY
        ids = ids.flip(0) if flipped else ids
        with torch.autocast(DEVICE.type, dtype=autocast, enabled=autocast is not None):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().double().cpu())
    return torch.stack(losses)


def seeded(family):
    torch.manual_seed(0)
    return make(family)


@functools.cache
def plain_curve(family, autocast):
    """Of the plain model, which both precisions look at."""
    return curve(seeded(family).to(DEVICE), FAMILIES[family], autocast)


def one_ulp_away(model):
    """A copy whose weights have all moved to the next number, up or down at random."""
    generator = torch.Generator().manual_seed(5)
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in moved.parameters():
            up = torch.rand(parameter.shape, generator=generator) < 0.5
            target = torch.where(up, torch.inf, -torch.inf).to(parameter.dtype)
            parameter.copy_(torch.nextafter(parameter, target))
    return moved


@pytest.mark.filterwarnings("ignore:`loss_type=None`")
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16 autocast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_curves(family, autocast, record_property):
    model, lr = seeded(family), FAMILIES[family]
    plain = plain_curve(family, autocast)
    others = [
        curve(copy.deepcopy(model).to(DEVICE), lr, autocast, flipped=True),
        curve(one_ulp_away(model).to(DEVICE), lr, autocast),
    ]
    if autocast is not None:
        others.append(plain_curve(family, None))
    noise = max((other - plain).abs().max().item() for other in others)
    with managed(model, autocast=autocast) as (engine, handles):
        assert bool(handles) == (family != "GPT2")
        assert lazy_logits.install(engine)
        found = curve(model, lr, autocast, engine)
    distance = (found - plain).abs().max().item()
    record_property("measured", f"{distance:.1e} from the plain curve, noise {noise:.1e}")
    assert plain[-1] < 0.8 * plain[0], "nothing was learnt"
    assert noise > 0
    assert distance <= CONVERGENCE * noise
