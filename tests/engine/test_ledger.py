"""Host memory stays within the ledger's closed form (DESIGN 5)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from slideformer_backend.api import attach
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.optim.lion import Lion
from slideformer_backend.plan import Terms, ledger_of, partition
from tests.budgets import tight

from .test_residency import Net

OPTIMIZERS = {
    "adamw": (2, torch.optim.AdamW),
    "sgd": (1, lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)),
    "lion": (1, Lion),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("dtype", "autocast"), [("bfloat16", None), ("float32", None), ("float32", "bfloat16")])
@pytest.mark.parametrize("update", ["exact", "immediate"])
def test_slabs_are_those_of_the_ledger(update, dtype, autocast, optimizer, accumulate, device):
    model = Net(width=128, layers=6, vocabulary=300).to(getattr(torch, dtype))
    narrow = getattr(torch, autocast) if autocast else None
    parts = partition(model, narrow)
    moments, make = OPTIMIZERS[optimizer]
    config = SlideFormerConfig(update=update, prefetch=2, gpu_memory=tight(model))
    engine = attach(model, config, device=device, autocast_dtype=narrow)
    optimizer = make(model.parameters())
    engine.bind(optimizer)
    for step in range(4 * accumulate):
        engine.last_microbatch = lambda step=step: (step + 1) % accumulate == 0
        tokens = torch.randint(0, 300, (2, 8), device=device)
        with torch.autocast(device.type, narrow, enabled=narrow is not None):
            loss = nn.functional.cross_entropy(model(tokens).float().view(-1, 300), tokens.view(-1))
        loss.backward()
        if engine.last_microbatch():
            optimizer.step()
            optimizer.zero_grad()
    terms = Terms(
        update=update,
        accumulates=accumulate > 1,
        moments=moments,
        prefetch=engine.window.depth,
        spares=engine.policy.spare_buffers,
        edges_update_on_device=any(unit.is_resident and unit.updates_on_device for unit in engine.units),
    )
    ledger = ledger_of(parts, terms)
    assert ledger.device_slots == engine.window.device_bytes
    engine.settle()
    held = engine.memory.allocated
    # gradient buffers in flight come as they are needed
    assert ledger.host - ledger.host_gradients <= held <= 1.05 * ledger.host
    if update == "exact":
        assert held >= 0.95 * ledger.host_least
    engine.window.grow_gradients(engine.sliding, 2)
    assert ledger_of(parts, replace(terms, gradients=2)).device_slots == engine.window.device_bytes
    engine.detach()
