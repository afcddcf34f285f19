"""The asynchronous schedule equals the synchronous one bit for bit, whatever the timing; each wait is needed."""

from __future__ import annotations

import random
import threading
from collections import defaultdict

import pytest
import torch

from slideformer_backend.engine import core_sums
from slideformer_backend.errors import UnsupportedError
from slideformer_backend.transfer import Monitor
from tests.race.waits import Wait, WaitMonitor, names_in_source

from .toy import EngineSide, Event, PlainSide, loss_of, make_model

LOOP = [Event("backward", (0, True)), Event("step"), Event("zero")]


def loop(steps, *, clip=None, reads=False):
    """An ordinary training loop."""
    events = []
    for number in range(steps):
        events.append(Event("backward", (number, True)))
        if clip is not None:
            events.append(Event("clip", clip))
        events += [Event("step"), Event("zero")]
        if reads:
            events.append(Event("read"))
    return [*events, Event("read")]


def wild(seed, length=24):
    """Whatever a script may do: accumulate, step twice, drop gradients, change hyper-parameters, clip now and then."""
    chance, events, micro = random.Random(seed), [], 0
    for _ in range(length):
        name = chance.choice(["backward", "backward", "step", "step", "zero", "lr", "read", "clip"])
        if name == "backward":
            micro += 1
            events.append(Event(name, (chance.randrange(100), chance.random() < 0.7)))
        elif name == "clip":
            if micro == 1:
                events.append(Event(name, chance.choice([0.05, 0.5, 100.0])))
        elif name == "lr":
            events.append(Event(name, chance.choice([1e-3, 1e-2])))
        else:
            events.append(Event(name))
            micro = 0 if name == "zero" else micro
    return [*events, Event("read")]


def same(expected, found):
    assert len(expected) == len(found)
    for number, (right, value) in enumerate(zip(expected, found, strict=True)):
        assert torch.equal(right, value), f"value {number}"


def compare(events, dtype, monitor=None, rule="adamw", **lsp):
    """Runs both sides; gives one core and the number of repairs."""
    expected = PlainSide(dtype, rule, **lsp).run(events)
    side = EngineSide(dtype, rule, monitor, **lsp)
    try:
        same(expected, side.run(events))
        return side.core("blocks.0.up.weight"), side.engine.report().repairs
    finally:
        side.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("projector", ["lsp", "orthonormal"])
@pytest.mark.parametrize("clip", [None, 0.2, 100.0])
def test_a_loop(dtype, projector, clip):
    core, repairs = compare(loop(8, clip=clip), dtype, Monitor(max_delay=2e-3, seed=3), projector=projector)
    assert len(core.errors) == 3
    assert core.learned
    assert repairs == (12 if clip == 0.2 else 0)  # of the first step; after it clipping is expected


@pytest.mark.parametrize("projector", ["lsp", "orthonormal"])
def test_autocast_is_for_the_forward_alone(projector):
    """A weight gets its update inside the autocast region of the forward that uses it first."""
    compare(loop(5, clip=100.0), torch.float32, Monitor(max_delay=1e-3), projector=projector, autocasts=True)


def test_sgd():
    compare(loop(5), torch.float32, Monitor(max_delay=2e-3), rule="sgd")


@pytest.mark.parametrize("seed", range(12))
def test_whatever_a_script_may_do(seed):
    dtype = torch.bfloat16 if seed % 2 else torch.float32
    projector = "orthonormal" if seed % 3 == 2 else "lsp"
    compare(wild(seed), dtype, Monitor(max_delay=1e-3, seed=seed), projector=projector)


@pytest.mark.parametrize("seed", range(2))
def test_edges_on_the_host_change_no_bit(edges_on_host, seed):
    dtype = torch.bfloat16 if seed % 2 else torch.float32
    compare(wild(seed + 20), dtype, Monitor(max_delay=1e-3, seed=seed))
    compare(sums(seed), dtype, Monitor(max_delay=1e-3, seed=seed))


def test_edges_on_the_host_have_their_states_there(edges_on_host):
    side = EngineSide(torch.bfloat16)
    side.run(LOOP)
    side.engine.settle()
    for name in ("inp.weight", "head.bias"):
        record = side.engine.record_of(side.model.get_parameter(name))
        assert not record.device_states
        assert set(record.unit.states) == {"master", "exp_avg", "exp_avg_sq"}
    inner = side.engine.record_of(side.model.get_parameter("blocks.0.norm.weight"))
    assert set(inner.device_states) == {"master", "exp_avg", "exp_avg_sq"}
    side.close()


def test_delays_change_nothing_and_updates_wait_for_their_use():
    """With slow lanes ``step()`` returns before any update is there; reading a weight waits for that weight's."""
    side = EngineSide(torch.float32, monitor=Monitor(max_delay=0.02, seed=1))
    plain = PlainSide(torch.float32)
    try:
        side.run(LOOP)
        plain.run(LOOP)
        waiting = [name for name, _ in side.model.named_parameters() if _is_waiting(side, name)]
        assert len(waiting) == 12
        right = plain.model.blocks[1].up.weight
        assert torch.equal(side.model.blocks[1].up.weight, right)
        assert not _is_waiting(side, "blocks.1.up.weight")
        assert _is_waiting(side, "blocks.2.up.weight")
    finally:
        side.close()


def _is_waiting(side, name):
    core = side.engine.record_of(side.model.get_parameter(name)).core
    return core is not None and core.ready is not None


def test_what_the_next_forward_needs_first_goes_first():
    side = EngineSide(torch.float32)
    lines = [side.core(f"blocks.{number}.up.weight").line for number in range(3)]
    assert lines == [0, 1, 2]
    side.close()


def test_norms_do_not_wait_behind_cores(monkeypatch):
    """What a clip waits for is a few bytes: they pass cores that are queued for the link."""
    side = EngineSide(torch.float32)
    lane, gate, order = side.engine.backend.d2h, threading.Event(), []
    submit = lane.submit

    def noted(name, run, **options):
        return submit(name, lambda: (order.append(name), run()), **options)

    lane.submit = noted
    submit("a busy link", gate.wait)
    side.run(LOOP[:1])  # cores and norms are queued now
    gate.set()
    side.run([Event("clip", 0.2), *LOOP[1:]])
    side.close()
    assert order[0].startswith("norm of")
    assert len(order) > 12


def test_a_step_whose_updates_were_not_predicted_passes_over_memory_once(monkeypatch):
    side = EngineSide(torch.float32)
    arithmetic, seen = side.engine.edges.device_units._arithmetic, []
    for name in ("peek", "commit", "update"):
        monkeypatch.setattr(arithmetic, name, lambda *_, name=name: seen.append(name))
    side.run(loop(3, clip=0.2))
    side.engine.settle()
    assert seen.count("peek") == 12  # the first step did not know that it would be clipped
    assert seen.count("update") == 3 * 12
    assert "commit" not in seen
    side.close()


def test_a_failure_on_a_lane_is_raised_where_the_weight_is_used(monkeypatch):
    side = EngineSide(torch.float32)
    units = side.engine.edges.device_units

    def fail(*_):
        raise ArithmeticError("on the lane")

    monkeypatch.setattr(units._arithmetic, "peek", fail)
    side.run(LOOP)
    with pytest.raises(ArithmeticError, match="on the lane"):
        side.run(LOOP)
    with pytest.raises(ArithmeticError, match="on the lane"):  # once more, when all is undone
        side.close()
    assert side.engine.is_detached


ACCUMULATING = [
    Event("assign", "blocks.2.down.weight"),
    *(Event("backward", (batch, batch == 2)) for batch in range(3)),
    *(Event("clip", 0.1), Event("step"), Event("zero")),
    *(Event("backward", (batch, batch == 1)) for batch in range(2)),
]
WORKLOAD = [
    (loop(4, clip=0.2, reads=True), {}),
    (wild(1), {}),
    (wild(2), {"projector": "orthonormal"}),
    (wild(8), {}),
    (ACCUMULATING, {}),
]


def _run(index, leave_out=None):
    events, lsp = WORKLOAD[index]
    monitor = WaitMonitor(leave_out, seed=index)
    side = EngineSide(torch.float32, monitor=monitor, **lsp)
    side.engine.edges.device_units._sums._where = "in host memory"
    try:
        side.run(events)
        side.optimizer.state_dict()
    finally:
        side.close()
    return monitor


def test_every_wait_is_needed():
    """The checker finds an access that nothing orders as soon as any single wait is left out."""
    seen: dict[Wait, list[int]] = defaultdict(list)
    for index in range(len(WORKLOAD)):
        for wait in _run(index).seen:
            if wait.place.startswith("core"):
                seen[wait].append(index)
    assert {wait.name for wait in seen} >= names_in_source("engine/core*.py") - names_in_source("engine/none")
    assert [str(wait) for wait in sorted(seen) if not any(_is_red(index, wait) for index in seen[wait])] == []


def _is_red(index, wait):
    try:
        _run(index, wait)
    except Exception:
        return True
    return False


PLACES = ["on the device", "in host memory"]


def sums(seed, steps=3):
    """Steps of several micro-batches, clipped before, between and after them, some dropped, some with gradients that
    user code assigns."""
    chance = random.Random(seed)
    events = [Event("backward", (seed, False)), Event("clip", 0.05), Event("clip", 0.04), Event("backward", (1, True))]
    events += [Event("clip", 0.5), Event("step"), Event("zero")]
    for _ in range(steps):
        if chance.random() < 0.4:
            events.append(Event("assign", f"blocks.{chance.randrange(3)}.up.weight"))
        count = chance.choice([1, 2, 2, 3])
        for micro in range(count):
            events.append(Event("backward", (chance.randrange(100), micro == count - 1)))
            if chance.random() < 0.3:
                events.append(Event("clip", chance.choice([0.05, 100.0])))
        events.append(Event("clip", chance.choice([0.05, 0.5, 100.0])))
        if chance.random() < 0.8:
            events.append(Event("step"))
        events.append(Event("zero"))
    return [*events, Event("read")]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_accumulated_gradients_are_clipped_by_the_norm_of_their_sum(monkeypatch, place, seed):
    """Norms and weights, bit for bit, wherever sums are kept."""
    monkeypatch.setattr(core_sums, "place_of", lambda *_: place)
    dtype = torch.bfloat16 if seed % 2 else torch.float32
    projector = "orthonormal" if seed == 3 else "lsp"
    compare(sums(seed), dtype, Monitor(max_delay=1e-3, seed=seed), projector=projector)


def test_sums_leave_with_the_gradient(monkeypatch):
    monkeypatch.setattr(core_sums, "place_of", lambda *_: "on the device")
    side = EngineSide(torch.float32)
    held = side.engine.edges.device_units._sums._sums
    side.run([Event("backward", (0, False))])
    assert len(held) == 12
    assert torch.is_tensor(next(iter(held.values())).kept)
    side.run([Event("zero")])
    assert not held
    side.close()


@pytest.mark.parametrize("place", PLACES)
def test_the_norm_is_that_of_plain_accumulation(monkeypatch, place):
    monkeypatch.setattr(core_sums, "place_of", lambda *_: place)
    side, plain = EngineSide(torch.float32), make_model()
    for batch in range(3):
        side.run([Event("backward", (batch, batch == 2))])
        loss_of(plain, batch).backward()
    right = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    assert torch.allclose(side.engine.clip_grad_norm_(side.model.parameters(), 1.0), right, rtol=1e-6)
    side.close()


def test_who_does_not_clip_pays_for_one_step(monkeypatch):
    monkeypatch.setattr(core_sums, "place_of", lambda *_: "in host memory")
    side = EngineSide(torch.float32)
    micro = [Event("backward", (0, False)), Event("backward", (1, True)), Event("step"), Event("zero")]
    before = side.engine.memory.allocated
    side.run(micro[:1])
    weights = sum(r.numel * 4 for unit in side.engine.units for r in unit.records if r.core is not None)
    assert side.engine.memory.allocated - before > weights
    side.run(micro[1:])
    side.engine.settle()
    after = side.engine.memory.allocated
    side.run(micro)
    side.engine.settle()
    assert side.engine.memory.allocated == after < before + weights
    side.close()


HAND = [Event("backward", (0, True)), Event("backward", (1, True)), Event("clip", 0.1), Event("step"), Event("zero")]


def test_a_loop_that_accumulates_by_hand():
    """The engine learns from the first step how many micro-batches there are."""
    compare([*HAND * 3, Event("read")], torch.float32)
    side = EngineSide(torch.float32)
    held = side.engine.edges.device_units._sums._sums
    side.run([*LOOP, Event("backward", (1, True))])
    assert not held  # it does not accumulate
    side.close()


def test_the_norm_of_a_sum_that_nobody_announced_is_refused(monkeypatch):
    monkeypatch.setattr(core_sums, "place_of", lambda *_: "in host memory")
    side = EngineSide(torch.float32)
    side.run(HAND[:2])
    assert side.engine.clip_grad_norm_(side.model.parameters(), float("inf")).isnan()
    with pytest.raises(UnsupportedError, match=r"nothing said beforehand.*accelerator\.accumulate"):
        side.run(HAND[2:])
    side.run([Event("step"), Event("zero"), *HAND[:3]])
    side.close()
    monkeypatch.setattr(core_sums, "place_of", lambda *_: "nowhere")
    side = EngineSide(torch.float32)
    side.run([Event("backward", (0, False)), Event("backward", (1, True))])
    with pytest.raises(UnsupportedError, match="has room for the"):
        side.engine.clip_grad_norm_(side.model.parameters(), 1.0)
    side.close()


def test_sums_are_kept_where_there_is_room(monkeypatch):
    device = torch.device("cuda")
    for name, value in (("mem_get_info", (50, 100)), ("memory_allocated", 20), ("memory_reserved", 30)):
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    assert core_sums.place_of(52, device, "auto") == "on the device"
    assert core_sums.place_of(53, device, "auto") == "in host memory"
    assert core_sums.place_of(23, device, 50) == "in host memory"
    assert core_sums.place_of(1 << 60, device, "auto") == "nowhere"
