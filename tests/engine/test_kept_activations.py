"""Sliding units that skip recompute: their weights stay in a slot from forward to backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from slideformer_backend.api import attach
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.errors import StaleGraphError
from slideformer_backend.plan.placement import Placement
from tests.budgets import tight

from .test_residency import Net

LAYERS = 6


class Dropping(Net):
    """With dropout before the head."""

    def __init__(self):
        super().__init__(layers=LAYERS)
        for layer in self.layers:
            layer.down = nn.Sequential(layer.down, nn.Dropout(0.2))


def keep(engine, count=LAYERS):
    """As the planner does where memory allows: the last ``count``, each of which gets a slot."""
    engine.window.grow(engine.sliding, count)
    kept = tuple(unit.index for unit in engine.sliding[-count:])
    engine.residency.placement = Placement((), kept, "gpu", count, "")


def start(device, *, keeps, dtype=torch.float32, update="exact", narrow=None, **options):
    torch.manual_seed(0)
    model = Dropping().to(dtype).train()
    config = SlideFormerConfig(update=update, prefetch=1, gpu_memory=tight(model), **options)
    engine = attach(model, config, device=device, autocast_dtype=narrow)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine.bind(optimizer)
    if keeps:
        keep(engine, keeps)
    torch.manual_seed(7)
    return model, engine, optimizer


def tokens_of(number, device, length=8):
    return torch.randint(0, 20, (2, length), generator=torch.Generator().manual_seed(number)).to(device)


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens).float().view(-1, 20), tokens.view(-1))


def finish(model, engine, seen):
    engine.settle()
    seen += [value.detach().cpu().clone() for value in model.state_dict().values()]
    engine.detach()
    return seen


def same(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("narrow", [None, torch.bfloat16])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"accumulate": 3},
        {"accumulate": 2, "max_norm": 0.05},
        {"dtype": torch.bfloat16, "accumulate": 2},
        {"update": "immediate"},
        {"update": "immediate", "accumulate": 2},
    ],
    ids=str,
)
def test_training_is_bit_equal(device, case, narrow):
    case = dict(case)
    accumulate, max_norm = case.pop("accumulate", 1), case.pop("max_norm", None)
    if narrow is not None and case.get("dtype") is torch.bfloat16:
        pytest.skip("a bf16 model needs no autocast")

    def train(keeps):
        model, engine, optimizer = start(device, keeps=keeps, narrow=narrow, **case)
        seen = []
        for step in range(4 * accumulate):
            engine.last_microbatch = lambda step=step: (step + 1) % accumulate == 0
            with torch.autocast(device.type, narrow, enabled=narrow is not None):
                loss = loss_of(model, tokens_of(step, device, 5 + step % 3))
            loss.backward()
            seen.append(loss.item())
            if not engine.last_microbatch():
                continue
            seen += [parameter.grad.cpu().clone() for parameter in model.parameters() if case.get("update") is None]
            if max_norm is not None:
                seen.append(engine.clip_grad_norm_(model.parameters(), max_norm).item())
            optimizer.step()
            optimizer.zero_grad()
        return finish(model, engine, seen)

    expected = train(0)
    assert same(expected, train(LAYERS))
    assert same(expected, train(2))


class Calls(list):
    """No plain list, which a recompute would leave as it was."""


def test_nothing_is_recomputed_and_no_slot_is_added(device):
    model, engine, optimizer = start(device, keeps=LAYERS)
    calls = Calls()
    for number, layer in enumerate(model.layers):
        layer.up.register_forward_hook(lambda *_, number=number: calls.append(number))
    size = engine.window.device_bytes
    for step in range(3):
        loss = loss_of(model, tokens_of(step, device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert calls == list(range(LAYERS)) * 3
    assert engine.window.device_bytes == size
    engine.detach()


def test_only_those_that_keep_none_are_recomputed(device):
    model, engine, optimizer = start(device, keeps=2)
    calls = Calls()
    for number, layer in enumerate(model.layers):
        layer.up.register_forward_hook(lambda *_, number=number: calls.append(number))
    size = engine.window.device_bytes
    for step in range(3):
        loss_of(model, tokens_of(step, device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert calls == [*range(LAYERS), 3, 2, 1, 0] * 3
    assert engine.window.device_bytes == size
    engine.detach()


def patterns(model, engine, optimizer, device):
    """Graphs that overlap, are kept, dropped or interrupted."""
    seen = []
    for step in range(4):
        one, two = (loss_of(model, tokens_of(10 * step + number, device)) for number in range(2))
        with torch.no_grad():
            seen.append(loss_of(model.eval(), tokens_of(99, device)).item())
        model.train()
        dropped = loss_of(model, tokens_of(50 + step, device))
        del dropped
        two.backward(retain_graph=True)
        one.backward()
        two.backward()
        seen += [one.item(), two.item()]
        seen += [parameter.grad.cpu().clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        try:
            failing = loss_of(model, tokens_of(70 + step, device))
            handle = model.layers[2].up.weight.register_hook(_fail)
            failing.backward()
        except RuntimeError:
            optimizer.zero_grad()
        handle.remove()
    return seen


def _fail(gradient):
    raise RuntimeError("stop")


def test_graphs_that_overlap_are_kept_dropped_or_interrupted(device):
    found = []
    for keeps in (0, LAYERS, 2):
        model, engine, optimizer = start(device, keeps=keeps)
        found.append(finish(model, engine, patterns(model, engine, optimizer, device)))
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_a_graph_from_before_a_step_is_refused(device):
    model, engine, optimizer = start(device, keeps=LAYERS)
    hidden = model.embed(tokens_of(0, device))
    for layer in model.layers:
        hidden = layer(hidden)
    old = hidden.square().mean()
    loss_of(model, tokens_of(1, device)).backward()
    optimizer.step()
    with pytest.raises(StaleGraphError):
        old.backward()
    engine.detach()


def test_a_slot_in_use_by_a_graph_is_nobody_elses(device):
    """The window is as small as can be, so that every other unit would take the slot."""
    model, engine, optimizer = start(device, keeps=0)
    first = engine.sliding[0]
    engine.residency.placement = Placement((), (first.index,), "gpu", 0, "")
    plain, other, step = start(device, keeps=0)
    for number in range(3):
        results = []
        for net, of, optim in ((model, engine, optimizer), (plain, other, step)):
            torch.manual_seed(number)
            loss = loss_of(net, tokens_of(number, device))
            if of is engine:
                assert first.weight_slot is not None
            loss.backward()
            results.append([loss.item()] + [parameter.grad.cpu().clone() for parameter in net.parameters()])
            optim.step()
            optim.zero_grad()
        assert same(*results)
    engine.detach()
    other.detach()


def test_copies_train_alone(device):
    model, engine, _ = start(device, keeps=LAYERS)
    plain = copy.deepcopy(model).to(device)
    loss_of(plain, tokens_of(0, device)).backward()
    assert all(parameter.grad is not None for parameter in plain.parameters())
    engine.detach()
