"""Faults that other systems shipped (HAZARDS), errors on lanes, and the end of an engine."""

from __future__ import annotations

import gc
import mmap
import os
import re
import signal
import threading
import weakref

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from slideformer_backend.api import attach
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.engine.unit import Where
from slideformer_backend.errors import StateError
from slideformer_backend.storage import HostMemory
from slideformer_backend.transfer import GradientPool, Monitor, Ticket

from .toy import Toy, make_toy

CPU = torch.device("cpu")
LANES = ("h2d", "d2h", "norms", "update")


class DiskOnFire(OSError):
    pass


def _managed(monitor: Monitor | None = None, kind: str = "bfloat16", blocks: int = 3, lr: float = 1e-2, **config):
    model = make_toy(kind, 0, blocks=blocks)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    engine = attach(model, SlideFormerConfig(cpu_threads=1, **config), device=CPU, monitor=monitor)
    engine.bind(optimizer)
    return model, optimizer, engine


def _step(model: Toy, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)).to(model.inp.weight.dtype)
    model(x).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("slideformer")}


@pytest.mark.parametrize("update", ["exact", "immediate"])
@pytest.mark.parametrize("lane", LANES)
def test_exception_on_a_lane_reaches_the_training_thread(lane, update):
    """With its own type, within the same step; no later update is applied (DESIGN 7)."""
    model, optimizer, engine = _managed(update=update)
    _step(model, optimizer)
    engine.settle()
    target = getattr(engine.backend, lane)
    submit = target.submit

    def failing(name, run, **options):
        def fail() -> None:
            raise DiskOnFire(28, name)

        return submit(name, fail, **options)

    target.submit = failing

    def step_and_settle(seed: int) -> None:
        _step(model, optimizer, seed)
        engine.settle()

    with pytest.raises(DiskOnFire):
        step_and_settle(1)
    with pytest.raises(DiskOnFire):  # it stays an error: weights of two steps are never mixed
        step_and_settle(2)
    with pytest.raises(DiskOnFire):
        engine.detach()
    assert engine.is_detached
    optimizer.zero_grad()
    _plain_step(model, optimizer)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_detach_leaves_no_thread():
    before = _threads()
    model, optimizer, engine = _managed()
    _step(model, optimizer)
    assert _threads() - before
    engine.detach()
    assert _threads() - before == set()
    _plain_step(model, optimizer)


def _plain_step(model: Toy, optimizer: torch.optim.Optimizer) -> None:
    weight = model.blocks[0].linear.weight.clone()
    _step(model, optimizer, 3)
    assert not torch.equal(weight, model.blocks[0].linear.weight)


def test_an_abandoned_engine_ends_its_threads():
    before = _threads()
    model, optimizer, engine = _managed()
    _step(model, optimizer)
    gone = weakref.ref(engine)
    threads = _threads() - before
    del model, optimizer, engine
    for _ in range(3):
        gc.collect()
    for thread in threads:
        thread.join(5)
    assert gone() is None
    assert not any(thread.is_alive() for thread in threads)


class _Numbers(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_forked_dataloader_workers_while_threads_are_warm():
    """HAZARDS 18."""
    model, optimizer, engine = _managed(kind="float32")
    _step(model, optimizer)
    loader = DataLoader(_Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60)
    for batch in loader:
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.detach()


def _in_child(work) -> str:
    """What ``work`` returns, or the error it raises, in a forked child that has ten seconds."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        try:
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        said = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return said


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "config", [{}, {"update": "immediate"}, {"optimizer_states": "nvme"}, {"weights": "nvme"}], ids=str
)
def test_a_forked_child_reads_the_weights_or_is_told_why_not(config, kind, tmp_path):
    """Work in flight at the fork is finished by the parent alone; the child must not wait for it for ever."""
    if "nvme" in config.values():
        config = {**config, "nvme_path": str(tmp_path)}
    model, optimizer, engine = _managed(kind=kind, **config)

    def weights() -> list[list[float]]:
        return [p.detach().float().reshape(-1).tolist() for p in model.parameters()]

    said = []
    for step, is_slow in enumerate([False, False, True]):
        gate = threading.Event()
        model(torch.randn(2, 4).to(model.inp.weight.dtype)).float().square().sum().backward()
        if is_slow:
            engine.backend.update.submit("slow work", gate.wait)
        if config.get("update") != "immediate":
            engine.clip_grad_norm_(model.parameters(), 1e-3)  # a repair
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            continue
        if not is_slow:
            engine.settle()
        said.append(_in_child(weights))
        gate.set()
        said.append(str(weights()))
    before_idle, idle, before_slow, slow = said
    told = "UnsupportedError: .*the process was forked while this was in flight.*look at the weights in the parent"
    assert before_idle == idle or ("nvme" in config.values() and re.match(told, before_idle))
    assert before_slow == slow or re.match(told, before_slow)
    assert slow != idle
    engine.detach()


def test_slots_are_never_read_after_their_release():
    """HAZARDS 1, 3, 4: released slots, drained gradient slots and recycled buffers hold NaN; long transfers."""
    losses = []
    for monitor in (None, Monitor(poison=True, max_delay=0.004, seed=1)):
        model, optimizer, engine = _managed(monitor, blocks=5)
        for seed in range(3):
            _step(model, optimizer, seed)
        losses.append([parameter.detach().clone() for parameter in model.parameters()])
        engine.detach()
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


def test_weights_move():
    """HAZARDS 9: the optimizer's tensors are the model's, made before or after."""
    model, optimizer, engine = _managed()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    _step(model, optimizer)
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved == [parameter.requires_grad for parameter in model.parameters()]
    assert isinstance(optimizer, torch.optim.Optimizer)
    engine.detach()


def test_frozen_parameters_own_no_state():
    """HAZARDS 10."""
    model, optimizer, engine = _managed()
    _step(model, optimizer)
    frozen = next(r for unit in engine.units for r in unit.records if not r.spec.is_trainable)
    assert (frozen.place.gradient, frozen.place.state) == (-1, -1)
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    assert len(optimizer.state_dict()["state"]) == trained
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    _step(model, optimizer, 1)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    engine.detach()


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 3 * 65536 + 5])
def test_slabs_have_exactly_the_size_asked_for(nbytes):
    """HAZARDS 6."""
    memory = HostMemory(pin=False)
    slab = memory.allocate("slab", nbytes, dma=True)
    assert slab.nbytes == memory.allocated == nbytes
    assert slab.flat.data_ptr() % mmap.PAGESIZE == 0
    assert slab.flat.untyped_storage().nbytes() <= nbytes + mmap.PAGESIZE
    assert not slab.flat.any()
    view = slab.view(torch.uint8, 0, 1)
    del slab
    gc.collect()
    assert memory.allocated == nbytes  # the view keeps it
    del view
    gc.collect()
    assert memory.allocated == 0


def test_engine_memory_is_what_the_layouts_say_and_does_not_grow():
    model, optimizer, engine = _managed()
    sizes = []
    for seed in range(6):
        _step(model, optimizer, seed)
        engine.settle()
        sizes.append(engine.memory.allocated)
    assert len(set(sizes[2:])) == 1
    layouts = [unit.layout for unit in engine.units]
    fixed = sum(layout.weight_bytes + 12 * layout.state_elements for layout in layouts)
    gradients = sum(engine.window.gradient_class(unit) for unit in engine.units)
    assert fixed < sizes[-1] <= fixed + 3 * gradients
    engine.detach()


def test_gradient_pool_grows_only_while_buffers_are_in_flight():
    memory = HostMemory(pin=False)
    pool = GradientPool(memory, "pool", 64)
    pending = Ticket("never over")
    buffers = [pool.take(spare=3) for _ in range(3)]
    for buffer in buffers:
        pool.give(buffer, pending)
    # three in flight: waiting beats a fourth; the lane serves the last ones first, and the last has no time left
    assert pool.take(spare=3) is buffers[1]
    assert [pool.take(spare=1) for _ in range(2)] == [buffers[0], buffers[2]]
    done = Ticket("over")
    done.issue()
    pool.give(buffers[1], done)
    assert pool.take(spare=1) is buffers[1]
    assert len({id(buffer) for buffer in buffers}) == 3
    assert memory.allocated == 192


def test_a_buffer_that_user_code_holds_is_not_recycled():
    pool = GradientPool(HostMemory(pin=False), "pool", 64)
    buffer = pool.take(spare=0)
    shown = buffer.slab.view(torch.float32, 0, 4)
    buffer.handles[0] = weakref.ref(shown)
    pool.give(buffer, None)
    assert pool.take(spare=0) is not buffer


def test_window_evicts_the_slot_that_is_needed_last():
    model, optimizer, engine = _managed(blocks=6, prefetch=1)
    window, units = engine.window, engine.sliding
    for unit in units[:3]:
        window.fetch(unit)
        window.lease(unit, Where.FORWARD)
        window.release(unit)
    slots = {unit.index: unit.weight_slot for unit in units[:3]}
    window.fetch(units[3])
    window.lease(units[3], Where.FORWARD)
    assert units[3].weight_slot is slots[0]
    assert units[0].weight_slot is None
    window.fetch(units[1])  # still there: nothing is copied again
    assert units[1].weight_slot is slots[1]
    window.fetch(units[4])  # units[1] is awaited, units[3] leased
    assert units[4].weight_slot is slots[2]
    window.release(units[3])
    count = sum(len(slots) for slots in window._weight_slots.values())
    _step(model, optimizer)
    assert sum(len(slots) for slots in window._weight_slots.values()) == count
    engine.detach()


@pytest.mark.parametrize("skip", [None, "h2d after slot released"])
def test_a_slot_that_is_made_later_is_cleared_before_it_is_filled(skip):
    """By compute, which is behind: on a device the zeros would be written over the weights."""
    model, optimizer, engine = _managed(Monitor(skip=skip), blocks=6, prefetch=0)
    window, unit = engine.window, engine.sliding[-1]
    window.grow(engine.sliding, 6)
    window.fetch(unit)
    if skip is None:
        unit.sent.synchronize()
        _step(model, optimizer)
        engine.detach()
    else:
        with pytest.raises(StateError, match=r"start of weight slot \d+ \(compute\)"):
            unit.sent.synchronize()


def test_window_gradient_slots_do_not_grow():
    model, optimizer, engine = _managed(blocks=6)
    before = engine.window.device_bytes
    for seed in range(3):
        _step(model, optimizer, seed)
    assert engine.window.device_bytes == before
    engine.detach()


def test_schedule_learns_the_order_of_the_model():
    class Backwards(Toy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inp(x)
            for block in reversed(self.blocks):
                x = block(x)
            return self.out(x)

    model = Backwards(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = attach(model, SlideFormerConfig(cpu_threads=1), device=CPU)
    engine.bind(optimizer)
    for seed in range(2):
        _step(model, optimizer, seed)
    units = engine.sliding
    assert engine.schedule.first is units[3]
    from slideformer_backend.engine.schedule import Phase

    ahead = [unit.index for unit in engine.schedule.ahead(Phase.FORWARD, units[3], 5)]
    assert ahead == [2, 1, 0, 0, 1]  # the backward begins with the unit that the forward ended with
    assert list(engine.schedule.ahead(Phase.BACKWARD, units[3], 1)) == []
    engine.detach()
