"""Host memory stays within the ledger's closed form (DESIGN 5)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slideformer_backend.api import attach
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.plan import Terms, ledger_of, partition
from tests.budgets import tight

from .test_residency import Net


@pytest.mark.parametrize("update", ["exact", "immediate"])
def test_slabs_are_those_of_the_ledger(update, device):
    model = Net(width=128, layers=6, vocabulary=300).to(torch.bfloat16)
    parts = partition(model)
    engine = attach(model, SlideFormerConfig(update=update, prefetch=2, gpu_memory=tight(model)), device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    engine.bind(optimizer)
    for _ in range(4):
        tokens = torch.randint(0, 300, (2, 8), device=device)
        nn.functional.cross_entropy(model(tokens).float().view(-1, 300), tokens.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    terms = Terms(
        update=update,
        prefetch=engine.window.depth,
        spares=engine.policy.spare_buffers,
        edges_update_on_device=any(unit.is_resident and unit.updates_on_device for unit in engine.units),
    )
    ledger = ledger_of(parts, terms)
    assert ledger.device_slots == engine.window.device_bytes
    engine.settle()
    held = engine.memory.allocated
    gradients = ledger.host_gradients
    assert ledger.host - gradients <= held <= 1.05 * ledger.host
    if update == "exact":
        assert held >= 0.8 * ledger.host
    engine.detach()
