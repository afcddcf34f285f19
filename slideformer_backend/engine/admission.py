"""Gradual unfreezing: parameters that come to train after ``prepare`` get a place for their gradient and states.

A frozen parameter owns neither. When it trains (``requires_grad_(True)``), or is given a gradient or states, its unit
is laid out anew before its next use: pending gradient, masters and moments move to their new places, and training goes
on bit for bit. Frozen again, it keeps its place, as torch's optimizers keep the states of such a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import UnsupportedError
from ..plan import Part, UnitLayout
from ..plan.layout import Place
from ..plan.partition import edge_parts
from .access import EdgeAccess, GradientAccess
from .build import edge_unit, refuse_layout, refuse_sparse, refuse_untrainable
from .custody import guard_record, hook_record
from .guard import guard
from .identity import ByIdentity
from .lsp_preflight import LspPreflight
from .moves import move_to_host
from .preflight import Preflight
from .states import MASTER, can_split, follow_masters, move_states
from .unit import ParamRecord, Unit

if TYPE_CHECKING:
    from .engine import Engine


class Admission:
    """Knows which parameters have no place, and gives them one.

    Args:
        engine: complete but for this.
        preflight: accounts for the memory.
        records: finds the record of a managed parameter.
        overlaps: what shares memory with a frozen parameter (by ``id``) since before the engine moved them apart.
    """

    def __init__(
        self,
        engine: Engine,
        preflight: Preflight | LspPreflight,
        records: ByIdentity[ParamRecord],
        overlaps: Mapping[int, str],
    ) -> None:
        self._engine = engine
        self._preflight = preflight
        self._records = records
        self._overlaps = overlaps
        placed = {id(record.parameter) for unit in engine.units for record in unit.trainable}
        self._frozen = [parameter for parameter in engine.model.parameters() if id(parameter) not in placed]

    def look(self) -> None:
        """Before a forward: admit what trains by now."""
        with torch._C.DisableTorchFunctionSubclass():
            found = [parameter for parameter in self._frozen if parameter.requires_grad]
        if found:
            self.admit(found)

    def look_behind(self) -> None:
        """Before gradients are used: admit what has one, though no forward of ours has seen that it trains. Outside the
        blocks nothing guards a frozen parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            found = [parameter for parameter in self._frozen if parameter.grad is not None]
        if found:
            self.admit(found)

    def look_at(self, unit: Unit) -> None:
        """Admit what trains by now of a unit whose forward begins."""
        found = unit.unfrozen
        if found:
            self.admit([record.parameter for record in found])

    def admit(self, parameters: Iterable[torch.Tensor]) -> None:
        """Give these parameters a place, as far as they have none. Whether they train is not changed.

        Raises:
            UnsupportedError: one of them cannot be trained, or not from this moment on; nothing was changed.
            PlanError: memory cannot hold their gradients and states; nothing was changed.
        """
        wanted = {id(parameter) for parameter in parameters}
        found = [parameter for parameter in self._frozen if id(parameter) in wanted]
        if not found:
            return
        engine = self._engine
        engine.backward.finish_outside()
        records = [record for p in found if (record := engine.record_of(p)) is not None]
        edges = edge_parts(engine.model, {id(p) for p in found} - {id(record.parameter) for record in records})
        self._check(records, edges)
        room = self._preflight.before_admit(engine, records, edges)
        by_unit: dict[Unit, list[ParamRecord]] = {}
        for record in records:
            by_unit.setdefault(record.unit, []).append(record)
        for unit, members in by_unit.items():
            if unit.index in room.returning:
                move_to_host(engine, unit)
                self._wait(unit)
            self._lay_out(unit, members, spills=unit.index in room.spilled)
        for part in edges:
            records += self._add_edge(part, room.spilled)
        self._frozen = [parameter for parameter in self._frozen if id(parameter) not in wanted]
        self._bind(records)

    # -- internals -------------------------------------------------------------------------------------------------

    def _check(self, records: Sequence[ParamRecord], edges: Sequence[Part]) -> None:
        members = [(record.name, record.parameter) for record in records]
        members += [(spec.name, p) for part in edges for spec, p in zip(part.specs, part.parameters, strict=True)]
        for name, parameter in members:
            refuse_untrainable(name, parameter)
            other = self._overlaps.get(id(parameter))
            if other is not None:
                raise UnsupportedError(
                    f"{name} was unfrozen, and {other} was over the same memory when the model was prepared.",
                    remedy="tie them by making them one parameter object before accelerator.prepare()",
                )
        for part in edges:
            for spec, parameter in zip(part.specs, part.parameters, strict=True):
                refuse_layout(spec.name, parameter)
        refuse_sparse(self._engine.model, {id(parameter) for _, parameter in members})
        for unit in {record.unit for record in records}:
            _refuse_running(unit)
            self._wait(unit)
            _refuse_held(unit)

    def _wait(self, unit: Unit) -> None:
        """Nothing of ``unit`` is in flight, and all is committed."""
        engine = self._engine
        engine.policy.settle(unit)
        engine.backend.synchronize("host waits for norm", unit.measured)  # it looks places up as it goes
        engine.backend.touch_host(f"new layout of {unit.name}", reads=(unit.norms,))
        if unit.gradient is not None:
            engine.backend.synchronize("host waits for gradient", unit.gradient.filled)
            engine.backend.synchronize("host waits for gradient sent", unit.gradient.sent)

    def _lay_out(self, unit: Unit, members: Sequence[ParamRecord], *, spills: bool) -> None:
        """``members`` get a place in the layout of ``unit``, and all that it has moves there."""
        engine = self._engine
        before = {record: record.place for record in unit.trainable}
        for record in members:
            record.spec = record.spec._replace(is_trainable=True)
        unit.layout = UnitLayout.of(record.spec for record in unit.records)
        for record, place in zip(unit.records, unit.layout.places, strict=True):
            record.place = place
        engine.policy.drop_pools(engine.window.relearn(engine.units))
        if unit.updates_on_device:
            engine.edges.device_units.absorb(unit)
            self._settle_rounding(unit, before)
        else:
            if spills:
                engine.spill.include(unit)
            move_states(unit, before, engine.spill)
            engine.backend.touch_host(f"new layout of {unit.name}", writes=tuple(unit.states.values()))
            _show_masters(unit, before)
            self._move_gradient(unit, before)
        for record in members:
            engine.add_hook(*hook_record(engine, record))

    @staticmethod
    def _settle_rounding(unit: Unit, before: Iterable[ParamRecord]) -> None:
        """As ``move_states`` for masters on the device."""
        rules = [record.binding.rule for record in before if record.binding is not None]
        if unit.rounds_half_up and not any(can_split(unit, rule) for rule in rules):
            unit.rounds_half_up = False
            follow_masters(unit, [record for record in before if MASTER in record.device_states])

    def _move_gradient(self, unit: Unit, before: Mapping[ParamRecord, Place]) -> None:
        """The pending gradient goes to a buffer of the new size; tensors that user code holds of it go with it."""
        engine, old = self._engine, unit.gradient
        if old is None:
            return
        new = engine.policy.take_buffer(unit)
        engine.backend.synchronize("host waits for gradient buffer drained", new.drained)
        engine.backend.touch_host(f"new layout of {unit.name}", writes=(old.slab, new.slab))
        for record in unit.with_gradient:
            dtype, start = record.spec.dtype, before[record].gradient
            target = record.gradient_view(new.slab.flat)
            target.view(-1).copy_(old.slab.view(dtype, start, record.numel))
            reference = old.handles.pop(id(record), None)
            handle = reference() if reference is not None else None
            if reference is not None and handle is not None:
                guarded, handle.__class__ = type(handle), torch.Tensor
                handle.data = target
                handle.__class__ = guarded
                guard(handle, GradientAccess(engine, record, new))
                new.handles[id(record)] = reference
        unit.gradient = new

    def _add_edge(self, part: Part, spilled: frozenset[int]) -> list[ParamRecord]:
        """Parameters outside the blocks get a unit of their own; gradients that they have stay theirs."""
        engine = self._engine
        unit = edge_unit(len(engine.units), part, engine.device, engine.memory)
        engine.units.append(unit)
        edges = [unit, *(other for other in engine.edges.units if other.module is None)]
        if engine.residency.may_start_edges(edges):
            engine.residency.start_edges([unit])
        if unit.index in spilled and not unit.updates_on_device:
            engine.spill.include(unit)
        engine.policy.drop_pools(engine.window.relearn(engine.units))
        engine.edges.units.append(unit)
        for record in unit.records:
            engine.add_hook(*hook_record(engine, record))
            engine.edges.outdate(record)
            guard_record(record, EdgeAccess(engine, record))
            self._records[record.parameter] = record
        return unit.records

    def _bind(self, records: Sequence[ParamRecord]) -> None:
        for binding in self._engine.newest_bindings:
            mine = binding.claim(records)
            if mine:
                self._engine.prepare_states(binding, mine)


def _refuse_running(unit: Unit) -> None:
    if unit.leases or unit.opens:
        name = next(record.name for record in unit.records if not record.spec.is_trainable)
        raise UnsupportedError(
            f"{name} was unfrozen inside a forward or backward of its block.",
            remedy="change requires_grad between forwards",
        )


def _refuse_held(unit: Unit) -> None:
    if unit.gradient is not None and not unit.gradient.may_move():
        name = next(record.name for record in unit.with_gradient)
        raise UnsupportedError(
            f"Parameters of {unit.name} were unfrozen while its gradients are being accumulated, and the script holds"
            f" the memory of such a gradient (of {name}, or a neighbour), which would not follow.",
            found="a tensor or array made by .grad.data, .grad.detach() or .grad.numpy() that is still alive",
            remedy="call optimizer.zero_grad() before, or let go of that tensor (keep a clone())",
        )


def _show_masters(unit: Unit, records: Iterable[ParamRecord]) -> None:
    """Parameters that show their master show the one that has moved."""
    for record in records:
        if record.shows_master:
            shown = unit.states[MASTER].view(torch.float32, record.place.state * 4, record.numel)
            record.host = shown.view(record.spec.shape)
            parameter: nn.Parameter = record.parameter
            parameter.__class__ = record.own_class
            parameter.data = record.host
            parameter.__class__ = record.guarded_class
