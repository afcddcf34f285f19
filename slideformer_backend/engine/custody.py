"""Parameters in the engine's custody, from attach to detach: guarded and hooked, then plain CPU parameters again."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .access import EdgeAccess, ParameterAccess, give_gradients, take_gradients
from .driver import UnitForward
from .guard import guard, unguard
from .hooks import Accumulated, AfterForward, BeforeAccumulation, BeforeAnyStep, BeforeForward, EngineGone, Removable
from .immediate import Immediate
from .redo_log import PEEK
from .spill import has_failed
from .unit import ParamRecord, Unit, Weights

if TYPE_CHECKING:
    from .engine import Engine

logger = logging.getLogger(__name__)


def take_parameters(
    engine: Engine, records: MutableMapping[torch.Tensor, ParamRecord]
) -> tuple[list[Removable], list[UnitForward]]:
    """Guard and hook every parameter of ``engine`` and put the drivers in place of the units' forwards.

    Returns:
        What ends the hooks, and the drivers. ``records`` finds a parameter's record from now on.
    """
    gradients = take_gradients(engine.units)
    hooks: list[Removable] = []
    forwards: list[UnitForward] = []
    for unit in engine.units:
        for record in unit.records:
            parameter = record.parameter
            records[parameter] = record
            if record.spec.is_trainable:
                hooks.append(parameter.register_hook(BeforeAccumulation(engine, record)))
                hooks.append(parameter.register_post_accumulate_grad_hook(Accumulated(engine, record)))
            guard(parameter, EdgeAccess(engine, record) if unit.is_resident else ParameterAccess(engine, record))
            parameter.__class__ = record.guarded_class
        if unit.module is not None:
            forwards.append(UnitForward(engine, unit, unit.module))
    hooks.append(engine.model.register_forward_pre_hook(BeforeForward(engine)))
    if isinstance(engine.policy, Immediate):
        hooks.append(engine.model.register_forward_hook(AfterForward(engine)))
    hooks.append(register_optimizer_step_pre_hook(BeforeAnyStep(engine)))
    hooks.append(EngineGone(engine))
    give_gradients(gradients)
    return hooks, forwards


def release_parameters(engine: Engine, gradients: Mapping[int, torch.Tensor]) -> None:
    """Make managed parameters plain ones: copies of their own on the host, with their gradients (by record)."""
    for unit in engine.units:
        for record in unit.records:
            _release(engine, record, gradients.get(id(record)))


def _release(engine: Engine, record: ParamRecord, gradient: torch.Tensor | None) -> None:
    parameter = record.parameter
    engine.backend.touch(f"release of {record.name}", reads=(record.unit.resident,))
    unguard(parameter)
    parameter.__class__ = record.own_class
    with torch.no_grad():
        parameter.grad = None
        shown = parameter.data if record.unit.is_resident else record.host
        parameter.data = shown.to("cpu", copy=True)
        parameter.grad = gradient


def salvage(engine: Engine) -> None:
    """After a failure: bring the weights of each unit back to the last completed step, where that is possible."""
    engine.spill.recover()
    lost = [unit.name for unit in engine.units if not _settles(engine, unit)]
    if lost:
        logger.error(
            "SlideFormer: after the failure, weights of %d units may be those of the unfinished step: %s.",
            len(lost),
            ", ".join(lost),
        )


def _settles(engine: Engine, unit: Unit) -> bool:
    failed = next((operation for operation in unit.operations if has_failed(operation)), None)
    if failed is not None:
        if not failed.name.startswith(PEEK):
            return True  # an update: the weights are still those from before it
        unit.operations.clear()
        unit.updated = None
        unit.weights_are = Weights.STALE
    try:
        engine.policy.settle(unit)
    except Exception:
        return False
    return True
