"""The first layers are committed while the next forward runs, where only few are late: the same bits, and half as much
to do for what the forward after that waits for."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from slideformer_backend.api import attach
from slideformer_backend.config import SlideFormerConfig
from tests.budgets import tight

from .test_residency import Net

LAYERS, TAIL, STEPS = 8, 4, 4


def train(device, late, *, tail=TAIL):
    """Train with the updates of the first ``late`` layers not done when a step is taken, and all others done.

    Returns the parameters, and which layers were logged and not committed after each step.
    """
    torch.manual_seed(0)
    model = Net(width=64, layers=LAYERS, vocabulary=50)
    engine = attach(model, SlideFormerConfig(gpu_memory=tight(model)), device=device)
    engine.policy.tail, engine.policy.spare_buffers = tail, 2 * LAYERS
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine.bind(optimizer)
    gate, forwarded, logged = threading.Event(), threading.Event(), []
    advance, commit, arrive = engine.policy.arithmetic.advance, engine.policy.arithmetic.commit, engine.policy.arrive

    def held(old, new):
        assert (new or old)[0].record.unit.index >= late or gate.wait(60)
        advance(old, new)

    def late_commit(updates):
        assert forwarded.wait(60)  # the forward has the weights without it
        commit(updates)

    def in_turn(unit, **options):
        if unit.index < late:
            wait_for_others()  # the lane takes what the forward needs first, and would be held before them
        arrive(unit, **options)

    def wait_for_others():
        for unit in engine.sliding[late:]:
            unit.updated.synchronize()

    engine.policy.arithmetic.advance, engine.policy.arithmetic.commit = held, late_commit
    engine.policy.arrive = in_turn
    for _ in range(STEPS):
        gate.set()
        tokens = torch.randint(0, 50, (2, 8)).to(device)
        loss = nn.functional.cross_entropy(model(tokens).view(-1, 50), tokens.view(-1))
        gate.clear()
        forwarded.set()
        loss.backward()
        wait_for_others()
        forwarded.clear()
        optimizer.step()
        logged.append([unit.logged is not None for unit in engine.sliding])
        optimizer.zero_grad()
    gate.set()
    forwarded.set()
    engine.detach()
    return [parameter.detach().cpu() for parameter in model.parameters()], logged


@pytest.mark.parametrize(
    ("late", "committed"), [(0, ()), (1, (0, 1, 2, 3)), (2, (1, 2, 3)), (4, (3,)), (5, ()), (LAYERS, ())]
)
def test_few_that_are_late_are_committed_at_once(device, late, committed):
    """None of them before weights that the next forward waits for."""
    expected, none = train(device, late, tail=0)
    found, logged = train(device, late)
    assert none == [[True] * LAYERS] * STEPS
    assert logged == [[number not in committed for number in range(LAYERS)]] * STEPS
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
