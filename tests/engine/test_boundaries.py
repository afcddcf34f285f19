"""Inputs of units that wait for the backward in host memory: the same bits, less memory on the device."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from slideformer_backend.api import attach
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.engine import shelf
from slideformer_backend.engine.residency import OBSERVED_STEPS, Residency
from slideformer_backend.plan.host_budget import HostBudget
from slideformer_backend.plan.placement import UnitCost, place
from slideformer_backend.storage import HostMemory
from tests.budgets import tight

WIDTH, ROWS, LAYERS = 64, 300, 6  # 77 KB: large enough to leave


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x, scale=None):
        y = self.dropout(self.down(torch.nn.functional.gelu(self.up(x))))
        return x + (y if scale is None else y * scale)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, scale=None):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, scale)
        return self.head(x)


def managed(device, activations="host", **config):
    torch.manual_seed(0)
    model = Net()
    model.train()
    config = SlideFormerConfig(activations=activations, gpu_memory=tight(model), **config)
    engine = attach(model, config, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine.bind(optimizer)
    return model, engine, optimizer


def batches(device, rows=(ROWS, ROWS, 40, 2 * ROWS, ROWS, 1)):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(count, WIDTH, generator=generator).to(device) for count in rows]


def train(device, activations, *, frozen=False, accumulate=1, **config):
    model, engine, optimizer = managed(device, activations, **config)
    if frozen:
        engine.detach()
        model.embed.requires_grad_(False)
        settings = SlideFormerConfig(activations=activations, gpu_memory=tight(model), **config)
        engine = attach(model, settings, device=device)
        engine.bind(optimizer)
    torch.manual_seed(7)
    seen = []
    for batch in batches(device):
        for number in range(accumulate):
            engine.last_microbatch = lambda number=number: number == accumulate - 1
            loss = model(batch, scale=torch.tensor(0.5, device=device)).square().mean()
            loss.backward()
            seen.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
    engine.settle()
    seen += [parameter.detach().cpu().clone() for parameter in model.parameters()]
    blocks = engine.boundaries.shelf.pool._created
    engine.detach()
    return seen, blocks


@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"accumulate": 2}, {"update": "immediate"}])
def test_training_is_bit_equal(device, options):
    expected, none = train(device, "gpu", **options)
    found, blocks = train(device, "host", **options)
    assert none == 0
    assert blocks > 0
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_they_stay_where_the_host_is_full(device, monkeypatch, caplog):
    """Two blocks, then no more: the kernel would kill the process."""
    expected, _ = train(device, "gpu")
    size = ROWS * WIDTH * 4
    left = [100 * size + 2 * size]

    def probe():
        return HostBudget(5000 * size, left[0], 0, "the test")

    make = shelf.HostShelf._make

    def counted(host_shelf, number, nbytes):
        slab = make(host_shelf, number, nbytes)
        left[0] -= nbytes
        return slab

    monkeypatch.setattr(shelf, "probe_host_budget", probe)
    monkeypatch.setattr(shelf.HostShelf, "_make", counted)
    with caplog.at_level("WARNING"):
        found, blocks = train(device, "host")
    assert blocks == 2
    assert left == [100 * size]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert [message for message in caplog.messages if "host has no room" in message] == [
        f"SlideFormer: inputs of layers stay on the device where the host has no room: {100 * size:,} bytes of host"
        " memory are left (the test)"
    ]


@pytest.mark.parametrize("begin_away", [True, False])
@pytest.mark.parametrize("spare", [-1, 1 << 40])
def test_auto_begins_in_host_memory_where_inputs_would_take_half_of_the_device(device, monkeypatch, begin_away, spare):
    """And comes back if what the first steps have shown leaves room for them; less than none sends them away."""
    expected, _ = train(device, "gpu")
    size = ROWS * WIDTH * 4
    leaving = size * (LAYERS - 3)  # all but the newest two and the one in use
    asked = []

    def room(residency):
        asked.append(residency.placement)
        return 2 * LAYERS * size - begin_away

    monkeypatch.setattr(Residency, "room", property(room))
    monkeypatch.setattr(Residency, "budget", property(lambda residency: 1 << 42))
    monkeypatch.setattr(Residency, "_host_room", lambda residency: 1 << 40)
    # beside inputs that stay: in the peak of steps without them is more
    monkeypatch.setattr(
        "slideformer_backend.engine.residency.spare_device_bytes", lambda *_: spare + begin_away * leaving
    )
    model, engine, optimizer = managed(device, "auto", recompute="always")
    torch.manual_seed(7)
    found, were_on = [], []
    for batch in batches(device):
        loss = model(batch, scale=torch.tensor(0.5, device=device)).square().mean()
        were_on.append(engine.boundaries.is_on)
        loss.backward()
        found.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
    engine.settle()
    found += [parameter.detach().cpu().clone() for parameter in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert were_on == [begin_away] * OBSERVED_STEPS + [spare < 0] * (len(were_on) - OBSERVED_STEPS)
    # what the first steps needed is given back, on the host and on the device
    assert (engine.boundaries.shelf.pool.nbytes > 0) == bool(engine.boundaries._leaving) == (spare < 0)
    assert asked
    assert set(asked) == {None}  # later it is not asked
    engine.detach()


def test_all_but_the_newest_leave_and_their_memory_is_reused(device):
    model, engine, optimizer = managed(device)
    before = engine.memory.allocated
    for batch in batches(device, (ROWS, ROWS, 200, ROWS)):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    size = ROWS * WIDTH * 4
    assert engine.boundaries.shelf.pool._created == LAYERS - 2
    states = engine.memory.allocated - before
    assert states >= (LAYERS - 2) * size
    model(batches(device, (2 * ROWS,))[0]).sum().backward()  # a longer batch: blocks grow one by one
    engine.settle()
    assert sorted(block.room.nbytes for block in engine.boundaries.shelf.pool._free) == [2 * size] * (LAYERS - 2)
    engine.detach()


def test_a_graph_that_is_kept_or_dropped(device):
    model, engine, optimizer = managed(device)
    batch = batches(device)[0]
    torch.manual_seed(3)
    loss = model(batch).sum()
    dropped = model(batch).sum()
    del dropped
    gc.collect()
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in model.parameters()]
    loss.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), first, strict=True))
    optimizer.step()
    engine.detach()


def test_a_boundary_that_was_modified_in_place_is_refused_as_torch_does(device):
    model, engine, _ = managed(device)
    inputs = []
    model.layers[1].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    hook = model.layers[2].register_forward_pre_hook(lambda module, args: [None, inputs[0].detach().mul_(2)][0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(batches(device)[0]).sum().backward()
    hook.remove()
    model.zero_grad()
    model(batches(device)[0]).sum().backward()
    engine.detach()


def test_a_scripts_own_hooks_for_saved_tensors_apply(device):
    model, engine, _ = managed(device)
    packed = []
    pack = lambda tensor: packed.append(tensor.shape) or tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batches(device)[0]).sum().backward()
    assert engine.boundaries.shelf.pool._created == 0
    engine.detach()


def test_resident_units_send_their_inputs_out_too(device):
    expected, _ = train(device, "gpu")
    model, engine, optimizer = managed(device)
    plain = copy.deepcopy(model)
    assert plain is not None
    torch.manual_seed(7)
    seen = []
    for number, batch in enumerate(batches(device)):
        if number == 2:
            engine.settle()
            engine.move_to_device(engine.sliding[0])
        loss = model(batch, scale=torch.tensor(0.5, device=device)).square().mean()
        loss.backward()
        seen.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
    engine.settle()
    assert len(engine.boundaries.shelf.pool._free) == LAYERS - 2
    seen += [parameter.detach().cpu().clone() for parameter in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(expected, seen, strict=True))
    engine.detach()


def test_the_plan_sends_inputs_out_where_that_takes_in_more_units():
    units = [UnitCost(number, 10, 0) for number in range(4)]
    assert place(units, 15, boundaries=3)[:3:2] == ((0,), "gpu")
    assert place(units, 15, boundaries=5)[:3:2] == ((0, 1), "host")
    assert place(units, 40, boundaries=50).activations == "gpu"
    assert place(units, 15, boundaries=5, activations="gpu").resident == (0,)
    assert place(units, 40, boundaries=5, activations="host").activations == "host"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_memory_holds_two_boundaries():
    device = torch.device("cuda")

    def peak(activations):
        model, engine, optimizer = managed(device, activations)
        rows = 100_000
        for batch in batches(device, (rows, rows)):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss = model(batch).sum()
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated() - before
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.detach()
        return held / (rows * WIDTH * 4)

    assert peak("gpu") - peak("host") > LAYERS - 3


def test_a_block_may_come_back_while_one_is_looked_for():
    """The collector may end a boundary at any point."""
    memory = HostMemory(pin=False)
    pool = shelf.BlockPool(lambda number, nbytes: memory.allocate(f"block {number}", nbytes, dma=False))

    class Giving:
        @property
        def nbytes(self):
            pool.give(shelf.Block(other))
            return 8

    other = pool.take(16).room
    pool.give(shelf.Block(Giving()))
    assert isinstance(pool.take(8).room, Giving)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_is_free_although_the_host_runs_ahead():
    """Each block's compute takes 20 ms, so that the host has issued them all before the first has left."""
    device = torch.device("cuda")

    def peak(activations):
        model, engine, optimizer = managed(device, activations)
        for block in model.layers:
            block.register_forward_pre_hook(lambda *_: torch.cuda._sleep(40_000_000))
        rows = 100_000
        for batch in batches(device, (rows, rows, rows)):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(batch).sum().backward()
            highest = torch.cuda.max_memory_allocated() - before
            optimizer.step()
            optimizer.zero_grad()
        engine.detach()
        return highest / (rows * WIDTH * 4)

    assert peak("gpu") - peak("host") > LAYERS - 3.5
