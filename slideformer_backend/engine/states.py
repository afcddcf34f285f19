"""Optimizer states of a unit on the host: allocation, and values in and out for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError
from ..optim import numba_kernels as kernels
from ..optim.rules import Rule
from ..plan.layout import Place
from ..storage import Slab, numpy_view
from .arithmetic import low_array
from .core import Core
from .device_kernels import reconcile
from .guard import plain
from .spill import Spill
from .unit import ParamRecord, Unit, Weights

MASTER = "master"
LOW = "low"
_FACTOR = "projector_"
"""Before the names of a projector's factors, and of what goes with them, in the states of a compressed matrix."""
_RESIDUAL = _FACTOR + "residual"
_STEPS = _FACTOR + "steps"
"""Steps taken: seeds and looks at the projector go by it, and not every rule of torch's counts."""


def can_split(unit: Unit, rule: Rule | None) -> bool:
    """Whether updates in place by ``rule`` keep the masters of ``unit`` split: every weight is its high half."""
    return rule is not None and _has_split_kinds(unit)


def _has_split_kinds(unit: Unit) -> bool:
    return {(r.spec.working, r.spec.dtype) for r in unit.trainable} == {(torch.bfloat16, torch.bfloat16)}


def allocate_states(unit: Unit, rule: Rule | None, spill: Spill, *, in_place: bool) -> None:
    """Allocate masters and moments of ``unit`` for updates by ``rule`` (None: an optimizer that runs as itself).

    Args:
        unit: settled.
        rule: names the moments.
        spill: the allocator; says where the arrays are.
        in_place: working weights are updated in place (``immediate``): bf16 weights then are the high half of a split
            master, fp32 weights their own master.
    """
    trainable = unit.trainable
    elements = unit.layout.state_elements
    kinds = {(record.spec.working, record.spec.dtype) for record in trainable}
    if in_place and can_split(unit, rule) and MASTER not in unit.states:
        unit.rounds_half_up = True
        if LOW not in unit.states:
            unit.states[LOW] = spill.allocate(unit, LOW, elements * 2)
            spill.present(unit, writes=True)
            for record in trainable:
                _split_exact(record)
    elif not unit.states.keys() & {MASTER, LOW} and not (in_place and kinds == {(torch.float32, torch.float32)}):
        unit.states[MASTER] = spill.allocate(unit, MASTER, elements * 4)
        spill.present(unit, writes=True)
        for record in trainable:
            kernels.widen(record.weight_array(), record.weight_kind, record.state_array(MASTER))
    for name in rule.state_names if rule is not None else ():
        if name not in unit.states:
            unit.states[name] = spill.allocate(unit, name, elements * 4)


def move_states(unit: Unit, before: Mapping[ParamRecord, Place], spill: Spill) -> None:
    """States of a settled unit take the places of its new layout; parameters that are new in it have none yet.

    What kind of master the unit keeps depends on all its parameters. A split one that cannot stay split is joined: it
    keeps its bits, and a weight half way between two bf16 numbers follows it, as when a checkpoint of the other policy
    is loaded.

    Args:
        unit: with its new layout and places.
        before: where the parameters lay that have states.
        spill: the allocator.
    """
    spill.present(unit, writes=True)
    old, unit.states = unit.states, {}
    give_back = spill.vacate(unit)
    is_joined = LOW in old and not _has_split_kinds(unit)
    for name, slab in old.items() if before else ():
        target = MASTER if is_joined and name == LOW else name
        stays = target == MASTER and any(record.shows_master for record in before)
        size = unit.layout.state_elements * (2 if target == LOW else 4)
        unit.states[target] = spill.allocate(unit, target, size, stays=stays)
        for record in unit.trainable:
            if record in before:
                _carry(record, slab, before[record], name, target)
            elif target == LOW:
                _split_exact(record)
            elif target == MASTER:
                kernels.widen(record.weight_array(), record.weight_kind, record.state_array(MASTER))
    if is_joined and before:
        unit.rounds_half_up = False
        follow_masters(unit, before)
    give_back()


def _carry(record: ParamRecord, slab: Slab, place: Place, name: str, target: str) -> None:
    """State ``name`` at its old ``place`` in ``slab`` becomes state ``target``."""
    if name != target:
        low = numpy_view(slab.view(record.spec.working, place.state * 2, record.numel))
        kernels.join(record.weight_array(), low, record.state_array(target))
        return
    width = 2 if name == LOW else 4
    new, old, count = record.place.state * width, place.state * width, record.numel * width
    record.unit.states[name].flat[new : new + count].copy_(slab.flat[old : old + count])


def follow_masters(unit: Unit, records: Iterable[ParamRecord]) -> None:
    """Weights of joined masters round to even from now on."""
    for record in records:
        shown = plain(record.parameter).detach().view(-1)
        if unit.updates_on_device:
            _settle_ties(record.device_states[MASTER], shown, half_up=False)
            continue
        working = record.weight_view(unit.weights.flat).view(-1)
        if _settle_ties(torch.from_numpy(record.state_array(MASTER)), working, half_up=False):
            unit.content += 1
            unit.steps += 1  # a graph of before is stale
            if unit.is_resident:
                shown.copy_(working)


def master_of(record: ParamRecord, spill: Spill) -> torch.Tensor | None:
    """A copy of the fp32 master of a settled parameter; None where the shown parameter itself is the master."""
    spill.present(record.unit)
    if record.spec.dtype == torch.float32 or not record.spec.is_trainable:
        return None
    if record.unit.updates_on_device:
        on_device = record.device_states.get(MASTER)
        return None if on_device is None else on_device.to("cpu", copy=True).view(record.spec.shape)
    out = np.empty(record.numel, np.float32)
    if LOW in record.unit.states:
        kernels.join(record.weight_array(), low_array(record), out)
    elif MASTER in record.unit.states:
        out[:] = record.state_array(MASTER)
    else:
        return None
    return torch.from_numpy(out).view(record.spec.shape)


def moment_of(record: ParamRecord, name: str, spill: Spill, *, writes: bool = False) -> torch.Tensor:
    """A moment of a settled parameter, in its shape; the memory is the engine's own, until other states are named."""
    spill.present(record.unit, writes=writes)
    if record.core is not None:
        return record.core.moment(name)
    if record.unit.updates_on_device:
        return record.device_states[name].view(record.spec.shape)
    flat = record.unit.states[name].view(torch.float32, record.place.state * 4, record.numel)
    return flat.view(record.spec.shape)


def moment_names(record: ParamRecord) -> tuple[str, ...]:
    """The moments that are allocated for a parameter."""
    held = record.core.states if record.core is not None else {}
    return tuple({*record.unit.states, *record.device_states, *held} - {MASTER, LOW})


def factors_of(record: ParamRecord) -> dict[str, torch.Tensor]:
    """What the moments of a compressed matrix mean, copied to the host: the factors of its projector; the part of past
    gradients that is still to be fed back; steps taken."""
    core = record.core
    if core is None:
        return {}
    found = {_FACTOR + name: value.to("cpu", copy=True) for name, value in core.projector.state().items()}
    if core.residual is not None:
        found[_RESIDUAL] = core.residual.to("cpu", copy=True)
    found[_STEPS] = torch.tensor(float(record.steps))
    return found


def load_states(record: ParamRecord, state: Mapping[str, Any], names: tuple[str, ...], spill: Spill) -> None:
    """Take over step count, moments and master of a settled parameter; what is missing starts at zero.

    A saved master counts where it rounds to the weight that is loaded now; elsewhere the weight does, as in torch,
    where loading an optimizer never changes a parameter.
    """
    unit = record.unit
    spill.present(unit, writes=True)
    _load_factors(record, state, names)
    counted = state.get("step", state.get(_STEPS))
    record.steps = int(counted) if counted is not None else int(any(state.get(n) is not None for n in names))
    for name in names:
        value = state.get(name)
        target = moment_of(record, name, spill, writes=True)
        if value is None:
            target.zero_()
        else:
            target.copy_(value.detach().view(target.shape))
    master = state.get(MASTER)
    if master is None:
        return
    shown = plain(record.parameter).detach().view(-1)
    if unit.updates_on_device:
        on_device = record.device_states.get(MASTER)
        if on_device is not None:
            on_device.copy_(master.detach().reshape(-1))
            _settle_ties(on_device, shown, half_up=unit.rounds_half_up)
            reconcile(on_device, shown, half_up=unit.rounds_half_up)
        return
    flat = np.ascontiguousarray(master.detach().to("cpu", torch.float32).reshape(-1).numpy())
    working = record.weight_view(unit.weights.flat).view(-1)
    if _settle_ties(torch.from_numpy(flat), working, half_up=unit.rounds_half_up):
        unit.content += 1
        if unit.is_resident:
            shown.copy_(working)
    if LOW in unit.states:
        weights = record.weight_array()
        high = np.empty_like(weights)
        kernels.split(flat, high, low_array(record))
        kernels.reconcile_split(high, weights, low_array(record))
    elif MASTER in unit.states:
        record.state_array(MASTER)[:] = flat
        kernels.reconcile(record.state_array(MASTER), record.weight_array(), record.weight_kind)
        unit.weights_are = Weights.CURRENT


def _load_factors(record: ParamRecord, state: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Take over the projector that the moments in ``state`` belong to.

    Raises:
        CheckpointError: the moments are those of another strategy, rank, number of nonzeros or projector.
    """
    core = record.core
    apart = (_RESIDUAL, _STEPS)
    factors = {name: value for name, value in state.items() if name.startswith(_FACTOR) and name not in apart}
    if not factors and not any(state.get(name) is not None for name in names):
        _load_residual(core, None)
        return
    shape = record.spec.shape if core is None else core.projector.core_shape
    found = [tuple(value.shape) for name in names if (value := state.get(name)) is not None]
    reason = f"moments of shape {found[0]}" if found else "factors of a projector"
    if (core is not None) == bool(factors) and all(value == tuple(shape) for value in found):
        if core is None:
            return
        try:
            given = {name.removeprefix(_FACTOR): value for name, value in factors.items()}
            core.projector = core.projector.restored(given)
            _load_residual(core, state.get(_RESIDUAL))
            return
        except (KeyError, ValueError) as error:
            reason = str(error)
    raise CheckpointError(
        f"The optimizer states of {record.name} do not fit this strategy.",
        found=reason,
        expected=f"moments of shape {tuple(shape)}" + (" with the factors of their projector" if core else ""),
        remedy="resume with the strategy, and under lsp the rank, nonzeros and projector, of the run that saved them",
    )


def _load_residual(core: Core | None, saved: torch.Tensor | None) -> None:
    """What is to be fed back; nothing where a checkpoint has none."""
    if core is not None and core.residual is not None:
        if saved is None:
            core.residual.zero_()
        else:
            core.residual.copy_(saved.detach().view(core.residual.shape))


def _settle_ties(master: torch.Tensor, weights: torch.Tensor, *, half_up: bool) -> bool:
    """Where a master lies in the middle of two bf16 numbers, the high half of a split master is the upper one and a
    rounded working weight the even one. A master that comes from the other kind keeps its bits; the weight follows.

    Returns:
        Whether a weight has changed.
    """
    if weights.dtype != torch.bfloat16:
        return False
    bits = master.view(torch.int32)
    even, upper = master.to(torch.bfloat16), ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    own, other = (upper, even) if half_up else (even, upper)
    is_other = ((bits & 0xFFFF) == 0x8000) & (weights == other) & (own != other)
    weights.copy_(torch.where(is_other, own, weights))
    return bool(is_other.any())


def join_master(record: ParamRecord) -> torch.Tensor:
    """The fp32 master of a settled record as a tensor to step: itself, or the joined halves of a split one."""
    unit = record.unit
    if unit.updates_on_device:
        on_device = record.device_states.get(MASTER)
        return plain(record.parameter) if on_device is None else on_device.view(record.spec.shape)
    if LOW in unit.states:
        joined = np.empty(record.numel, np.float32)
        kernels.join(record.weight_array(), low_array(record), joined)
        return torch.from_numpy(joined).view(record.spec.shape)
    if MASTER in unit.states:
        return unit.states[MASTER].view(torch.float32, record.place.state * 4, record.numel).view(record.spec.shape)
    return record.weight_view(unit.weights.flat)


def split_master(record: ParamRecord, master: torch.Tensor) -> None:
    """Take a stepped tensor of :func:`join_master` back into a split master; others were stepped in place."""
    if LOW in record.unit.states:
        flat = np.ascontiguousarray(master.detach().reshape(-1).numpy())
        kernels.split(flat, record.weight_array(), low_array(record))


def _split_exact(record: ParamRecord) -> None:
    weights = record.weight_array()
    wide = np.empty(record.numel, np.float32)
    kernels.widen(weights, record.weight_kind, wide)
    kernels.split(wide, weights, low_array(record))
