"""A unit moves to the device for good, or back to the host to slide again. Training goes on bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..optim import numba_kernels as kernels
from ..plan import UnitLayout
from .access import EdgeAccess, ParameterAccess
from .arithmetic import low_array
from .edges import set_device_gradient
from .guard import guard, plain
from .immediate import Immediate
from .schedule import Schedule
from .states import LOW, MASTER, allocate_states
from .unit import Unit, Weights, Where
from .whole import move_own_states

if TYPE_CHECKING:
    from .engine import Engine


def move_to_device(engine: Engine, unit: Unit) -> None:
    """Make a sliding unit resident: weights, states, updates on the device."""
    engine.settle()
    engine.residency.move_to_device(unit)
    engine.sliding.remove(unit)
    engine.edges.units.append(unit)
    for record in unit.records:
        guard(record.parameter, EdgeAccess(engine, record))
    engine.schedule = Schedule(engine.sliding)


def may_move_to_host(unit: Unit) -> bool:
    """Whether no graph is alive that will compute with the parameters where they are."""
    return all(visit.is_done for visit in unit.visits)


def move_to_host(engine: Engine, unit: Unit) -> None:
    """Let a unit that has moved to the device slide again; its pending gradient comes along."""
    engine.settle()
    engine.policy.reclaim_pool(unit)
    unit.layout = UnitLayout.of(record.spec for record in unit.records)  # weights slide as the user's dtype now
    unit.weights = engine.memory.allocate(f"weights of {unit.name}", unit.layout.weight_bytes, dma=True)
    for record, place in zip(unit.records, unit.layout.places, strict=True):
        record.place = place
        record.weight_view(unit.weights.flat).copy_(plain(record.parameter))
    unit.updates_on_device = False
    engine.policy.drop_pools(engine.window.relearn(engine.units))
    _bring_states(engine, unit)
    engine.edges.copy_gradient(unit, is_last=False)
    for record in unit.records:
        record.host = record.weight_view(unit.weights.flat)
        set_device_gradient(record, None)
        parameter = record.parameter
        parameter.__class__ = record.own_class
        parameter.data = record.host
        parameter.__class__ = record.guarded_class
        guard(parameter, ParameterAccess(engine, record))
    unit.where = Where.HOST
    unit.weights_are = Weights.CURRENT
    unit.content += 1
    engine.edges.units.remove(unit)
    engine.sliding.append(unit)
    engine.sliding.sort(key=lambda other: other.index)
    engine.schedule = Schedule(engine.sliding)
    engine.window.relearn(engine.units)


def _bring_states(engine: Engine, unit: Unit) -> None:
    """Masters and moments come to the host, as the policy keeps them there."""
    in_place = isinstance(engine.policy, Immediate)
    for record in unit.trainable:
        if record.binding is not None:
            allocate_states(unit, record.binding.rule, engine.spill, in_place=in_place)
    for record in unit.trainable:
        for name, state in record.device_states.items():
            value = state.to("cpu")
            if name != MASTER:
                unit.states[name].view(torch.float32, record.place.state * 4, record.numel).copy_(value)
            elif LOW in unit.states:
                kernels.split(value.numpy(), record.weight_array(), low_array(record))
            else:
                record.state_array(MASTER)[:] = value.numpy()
        record.device_states = {}
        move_own_states(record, torch.device("cpu"))
