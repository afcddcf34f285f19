"""Parameters in the engine's custody, from attach to detach: guarded and hooked, then plain CPU parameters again."""

from __future__ import annotations

import collections
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import StorageError
from .access import EdgeAccess, ParameterAccess, give_gradients, take_gradients
from .core_access import CoreAccess
from .driver import UnitForward
from .guard import Access, guard, unguard
from .hooks import Accumulated, AfterForward, BeforeAccumulation, BeforeAnyStep, BeforeForward, EngineGone, Removable
from .identity import ByIdentity
from .immediate import Immediate
from .operation import Operation, has_failed
from .unit import ParamRecord, Unit, Weights
from .user_hooks import UserHooks

if TYPE_CHECKING:
    from .engine import Engine

logger = logging.getLogger(__name__)


def take_parameters(engine: Engine, records: ByIdentity[ParamRecord]) -> tuple[list[Removable], list[UnitForward]]:
    """Guard and hook every parameter of ``engine`` and put the drivers in place of the units' forwards.

    Returns:
        What ends the hooks, and the drivers. ``records`` finds a parameter's record from now on.
    """
    gradients = take_gradients(engine.units)
    hooks: list[Removable] = []
    forwards: list[UnitForward] = []
    for unit in engine.units:
        for record in unit.records:
            records[record.parameter] = record
            if record.spec.is_trainable:
                hooks += hook_record(engine, record)
            guard_record(record, _access_to(engine, record))
        if unit.module is not None:
            forwards.append(UnitForward(engine, unit, unit.module))
    hooks.append(engine.model.register_forward_pre_hook(BeforeForward(engine)))
    if isinstance(engine.policy, Immediate):
        hooks.append(engine.model.register_forward_hook(AfterForward(engine)))
    hooks.append(register_optimizer_step_pre_hook(BeforeAnyStep(engine)))
    hooks.append(EngineGone(engine))
    give_gradients(gradients)
    return hooks, forwards


def hook_record(engine: Engine, record: ParamRecord) -> list[Removable]:
    """The hooks through which gradients of a parameter arrive."""
    parameter = record.parameter
    with torch._C.DisableTorchFunctionSubclass():
        trains = parameter.requires_grad
        parameter.requires_grad_(True)  # torch takes hooks of such a tensor only, and keeps them when it is frozen
        hooks: list[Removable] = [
            parameter.register_hook(BeforeAccumulation(engine, record)),
            parameter.register_post_accumulate_grad_hook(Accumulated(engine, record)),
        ]
        parameter.requires_grad_(trains)
        if record.shows_master:
            hooks.insert(0, UserHooks(engine, record, hooks))
    return hooks


def guard_record(record: ParamRecord, access: Access) -> None:
    """Let ``access`` guard a parameter from now on."""
    guard(record.parameter, access)
    record.parameter.__class__ = record.guarded_class


def _access_to(engine: Engine, record: ParamRecord) -> Access:
    if record.core is not None:
        return CoreAccess(engine, record)
    return EdgeAccess(engine, record) if record.unit.is_resident else ParameterAccess(engine, record)


def release_parameters(engine: Engine, gradients: Mapping[int, torch.Tensor]) -> StorageError | None:
    """Make managed parameters plain ones: copies of their own on the host, with their gradients (by record).

    Returns:
        Why weights of a unit could not be read, if so: they are NaN.
    """
    failure: StorageError | None = None
    for unit in engine.units:
        try:
            engine.spill.weights.present(unit)
        except StorageError:
            try:
                engine.spill.recover()
                _catch_up(engine, unit, ())
            except StorageError as error:
                failure = failure or error
                _lose_weights(engine, unit)
        for record in unit.records:
            _release(engine, record, gradients.get(id(record)))
    return failure


def _lose_weights(engine: Engine, unit: Unit) -> None:
    logger.error("SlideFormer: the weights of %s cannot be read, and are NaN from now on.", unit.name)
    unit.weights = engine.memory.allocate(f"lost weights of {unit.name}", unit.weights.nbytes, dma=False)
    unit.weights.flat.fill_(255)
    for record in unit.records:
        if not record.shows_master:
            record.host = record.weight_view(unit.weights.flat)


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
    lost = [unit.name for unit in engine.units if not _is_restored(engine, unit)]
    if lost:
        logger.error(
            "SlideFormer: after the failure, weights of %d units may be of an earlier step or the unfinished one: %s.",
            len(lost),
            ", ".join(lost),
        )


def _is_restored(engine: Engine, unit: Unit) -> bool:
    failed = [operation for operation in unit.operations if has_failed(operation.ticket)]
    if has_failed(unit.sent):
        unit.sent = None  # it is over, which is all that a write to the weights waits for
    is_shown = not (unit.is_resident and has_failed(unit.refreshed))
    if not is_shown and unit.exposed:
        return False  # what the user wrote is in parameters of an earlier step
    if failed:
        unit.operations.clear()
        unit.updated = unit.made = None
    try:
        _catch_up(engine, unit, failed)
        if not is_shown:
            engine.edges.send_weights(unit, unit.trainable)
            engine.backend.synchronize("host waits for weights sent", unit.sent)
    except Exception:
        return False
    return True


def _catch_up(engine: Engine, unit: Unit, failed: Sequence[Operation]) -> None:
    """Bring the host weights of ``unit`` to its last ``step()``, by as few of its failed operations as that takes."""
    left = collections.deque(failed)
    try:
        while (
            left and left[0].step != unit.steps
        ):  # that one, and what is behind it, was for a step that did not happen
            engine.policy.redo(unit, left[0])
            engine.backend.synchronize("host waits for update", unit.updated)
            left.popleft()
        if not left:
            engine.policy.settle(unit)
        engine.spill.weights.present(unit)
    except StorageError:
        if unit.filed is None or not engine.policy.can_make(unit):
            raise
        unit.operations.clear()
        unit.updated = unit.made = None
        engine.spill.weights.recover()
        for operation in left:  # masters and moments have to come to the last step too
            engine.policy.redo(unit, operation, whole=True)
        unit.weights_are = Weights.STALE
        engine.policy.settle(unit)
        engine.spill.weights.present(unit)
