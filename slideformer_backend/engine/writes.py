"""What a unit's forward writes into the unit's own parameters: clipped weights, running statistics, a first init.

While a unit is leased its parameters show device memory that others get next, so such a write is carried over to the
host afterwards, the way a user's write outside a forward goes. The recompute begins with what was there before the
write and repeats it on memory of its own, which nobody carries over.

Seen are writes to the parameter or to tensors that share its version, and writes to ``parameter.data``, which are
followed (``leased_class``). Not seen is what bumps no version of either: ``p.data.data``, numpy, raw storage.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..errors import UnsupportedError
from .access import check_data, record_of
from .guard import access_of, plain
from .unit import Before, ParamRecord, Unit

if TYPE_CHECKING:
    from .engine import Engine
    from .visit import Visit

_DATA: Any = torch.Tensor.data


class Write(NamedTuple):
    """A parameter that was written, and a copy on the host of what it holds; ``is_replaced``: by ``p.data = value``."""

    record: ParamRecord
    value: torch.Tensor
    is_replaced: bool


class Watch:
    """The versions of a leased unit's parameters at one moment, and what has been handed out until then."""

    __slots__ = ("_lent", "_unit", "_versions")

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._versions = [record.parameter._version for record in unit.records]
        self._lent = len(unit.lent)

    def written(self) -> list[ParamRecord]:
        """The parameters that were written since; the unit must be leased still."""
        unit = self._unit
        versions = [record.parameter._version for record in unit.records]
        if versions == self._versions and len(unit.lent) == self._lent:
            return []
        found = {id(record) for record, alias in unit.lent[self._lent :] if alias is None or _is_written(alias)}
        pairs = zip(unit.records, self._versions, versions, strict=True)
        return [record for record, before, now in pairs if before != now or id(record) in found]

    def take(self) -> list[Write]:
        """What was written, before the unit leaves the window."""
        written = self.written()
        if not written:
            return []
        replaced = {id(record) for record, alias in self._unit.lent[self._lent :] if alias is None}
        return [Write(r, plain(r.parameter).to("cpu", copy=True), id(r) in replaced) for r in written]


@functools.cache
def leased_class(own: type) -> type:
    """The class of a parameter of class ``own`` while it is leased: what goes through its ``data`` is followed."""
    is_plain = getattr(own, "__torch_function__", None) is torch._C._disabled_torch_function_impl
    if not is_plain or getattr(own, "data", None) is not _DATA:
        return own  # one that does things its own way

    def copied(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        made: torch.Tensor = own.__deepcopy__(self, memo)  # type: ignore[attr-defined]  # every tensor has it
        made.__class__ = own
        return made

    members = {
        "data": property(_get_data, _set_data),
        "__deepcopy__": copied,
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__slots__": (),
    }
    made: type = type(own)(own.__name__, (own,), members)
    return made


@torch._disable_dynamo  # type: ignore[attr-defined]  # compiled code calls it, and it sees tensors that are real
def _get_data(self: torch.Tensor) -> torch.Tensor:
    alias: torch.Tensor = _DATA.__get__(self)
    record = record_of(self)
    if record is not None:
        record.unit.lent.append((record, alias))
    return alias


@torch._disable_dynamo  # type: ignore[attr-defined]
def _set_data(self: torch.Tensor, value: torch.Tensor) -> None:
    record = record_of(self)
    if record is not None:
        if self.dtype != record.spec.dtype:
            raise _too_narrow(record)
        check_data(record, value)
        record.unit.lent.append((record, None))
    _DATA.__set__(self, value)


def _is_written(alias: torch.Tensor) -> bool:
    return alias.is_inference() or alias._version != 0  # `p.data` begins to count anew


def carry_over(engine: Engine, unit: Unit, writes: list[Write]) -> None:
    """The forward of ``unit`` has left the window and wrote: the host has it too, and graphs keep what was before.

    Raises:
        UnsupportedError: what plain torch would have cannot be had.
    """
    slot, content = unit.weight_slot, unit.content
    try:
        for write in writes:
            _check(unit, write)
    except UnsupportedError:
        if slot is not None:
            slot.content = -1
        raise
    was_held = slot is not None and slot.content == content
    is_in_slot = all(not write.is_replaced and not write.record.shows_master for write in writes)
    for write in writes:
        record = write.record
        before = None
        if not _is_as_before(record, write.value):
            before = record.host.clone()
            access = access_of(record.parameter)
            if access is None:
                continue
            access.before(writes=True)
            try:
                record.host.copy_(write.value)
                access.after(aliased=False)
            finally:
                access.over()
        for visit in unit.visits:
            if not visit.holds_slot:
                keep_before(visit, Before(record, before, write.is_replaced))
    if slot is not None and was_held and is_in_slot:
        slot.content = unit.content


def _check(unit: Unit, write: Write) -> None:
    record = write.record
    if write.value.dtype != record.spec.dtype and not _is_as_before(record, write.value):
        raise _too_narrow(record)
    if unit.leases:
        raise UnsupportedError(
            f"The forward of {unit.name} wrote {record.name} while a backward of the same layer was under way.",
            remedy="write it outside the layer's forward, or run such a forward before or after backward",
        )
    if write.is_replaced and any(visit.holds_slot and not visit.is_done for visit in unit.visits):
        raise UnsupportedError(
            f"The forward of {unit.name} gave {record.name} other memory (parameter.data = value), and its activations"
            " are kept for backward.",
            remedy="write in place (parameter.data.copy_(value)), or set recompute: always",
        )


def _too_narrow(record: ParamRecord) -> UnsupportedError:
    return UnsupportedError(
        f"The forward of {record.unit.name} writes its own weight {record.name}. Under autocast the layer computes with"
        " a copy of it in the narrower dtype, and what is written there cannot become the weight that plain torch has.",
        found=f"{record.spec.working} inside the layer",
        expected=f"a weight that is {record.spec.dtype} there",
        remedy="register hooks that write weights before accelerator.prepare(), which keeps those weights in fp32; or"
        " write them outside the layer's forward (after optimizer.step())",
    )


def _is_as_before(record: ParamRecord, value: torch.Tensor) -> bool:
    """Whether a write changed no bit of what the layer computes with (a clamp that finds nothing to do)."""
    access = access_of(record.parameter)
    if access is None:
        return True
    access.before(writes=False)
    try:
        return torch.equal(_bits(record.host.to(value.dtype)), _bits(value))
    finally:
        access.over()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def keep_before(visit: Visit, before: Before) -> None:
    """The recompute of ``visit`` begins with this, unless an earlier write has changed the parameter already."""
    known = visit.before.get(id(before.record))
    if known is None or known.value is None:
        visit.before[id(before.record)] = before


@contextlib.contextmanager
def replayed(engine: Engine, visit: Visit) -> Iterator[None]:
    """Around a recompute, with the unit in place: what its forward wrote is written again, but to memory apart.

    Raises:
        UnsupportedError: the recompute wrote what the forward did not.
    """
    watch = Watch(visit.unit)
    apart = [_set_apart(kept, engine.device) for kept in visit.before.values()]
    try:
        yield
    finally:
        written = [record for record in watch.written() if id(record) not in visit.before]
        for kept, shown, memory in apart:
            # plain torch has one memory: what the graph saved of it is what the last write left, the recompute may
            # have been stopped before that one
            if not kept.is_replaced:
                memory.copy_(shown)
            show(kept.record.parameter, shown)
        if written:
            _refuse(visit.unit, written)


def _set_apart(kept: Before, device: torch.device) -> tuple[Before, torch.Tensor, torch.Tensor]:
    shown = plain(kept.record.parameter)
    memory = shown.clone() if kept.value is None else kept.value.to(device, shown.dtype, copy=True)
    show(kept.record.parameter, memory)
    return kept, shown, memory


def show(parameter: nn.Parameter, memory: torch.Tensor) -> None:
    """Make ``parameter`` a view of ``memory``; its guard does not notice."""
    with torch._C.DisableTorchFunctionSubclass():
        _DATA.__set__(parameter, memory)


def _refuse(unit: Unit, written: list[ParamRecord]) -> None:
    if unit.weight_slot is not None:
        unit.weight_slot.content = -1
    raise UnsupportedError(
        f"{unit.name} runs again in backward, and wrote {written[0].name} there, which its forward had not done.",
        remedy="let the layer write its weights in every forward alike, or outside of its forward",
    )


@contextlib.contextmanager
def noted(unit: Unit) -> Iterator[None]:
    """Around the forward of a unit that lives on the device: its guards keep what was there before a write."""
    was, unit.notes_writes = unit.notes_writes, True
    try:
        yield
    finally:
        unit.notes_writes = was
