"""Access records: what happens when user code touches a parameter or gradient outside the window (DESIGN 4.2)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import StateError, UnsupportedError
from ..storage import Slab
from ..transfer import GradientBuffer
from .edges import device_gradient, set_device_gradient
from .guard import access_of, guard, guarded_class, plain
from .stand_in import StandIn
from .unit import ONE, Before, ParamRecord, Unit, Weights
from .user_hooks import widened_hook

if TYPE_CHECKING:
    from .engine import Engine
    from .policy import UpdatePolicy


class _OfRecord:
    """Refers to engine and record weakly: the access records of all tensors are in one table of the process, which must
    not keep a model alive."""

    def __init__(self, engine: Engine, record: ParamRecord) -> None:
        self._engine = weakref.ref(engine)
        self._weak_record = weakref.ref(record)

    @property
    def _record(self) -> ParamRecord:
        record = self._weak_record()
        if record is None:
            raise StateError("a tensor is still guarded by an engine that is gone")
        return record

    def lent(self, aliases: Sequence[torch.Tensor]) -> None:
        """See ``Access``: nobody has to know where they are."""

    def over(self) -> None:
        """See ``Access``: nothing was kept for the operation."""

    def hooked(self, register: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """See ``Access``: autograd's gradients are those of the parameter."""
        return hook

    def taken(self, gradient: torch.Tensor, is_only: bool) -> torch.Tensor:
        """See ``Access``."""
        return gradient


class _OfParameter(_OfRecord):
    """Knows what was handed out, since ``parameter.data = value`` leaves that behind."""

    def lent(self, aliases: Sequence[torch.Tensor]) -> None:
        record = self._record
        record.aliases = [alias for alias in record.aliases if alias() is not None] + list(map(weakref.ref, aliases))

    def _part(self, held: torch.Tensor) -> None:
        """Tensors that user code holds over the memory of ``held`` get memory of their own, with the same values: in
        torch they keep the storage that the parameter leaves."""
        record = self._record
        for alias in (reference() for reference in record.aliases):
            if alias is not None and _is_over(alias, held):
                alias.data = alias.detach().clone()
        record.aliases = []


class ParameterAccess(_OfParameter):
    """Guards a sliding parameter while it is its host tensor."""

    def before(self, writes: bool) -> None:
        engine = self._alive()
        record, unit = self._record, self._record.unit
        engine.backward.finish_outside()
        policy = engine.policy
        lent = self._absorb(policy, writes)
        if record.shows_master:
            policy.commit(unit)
        if unit.weights_are is not Weights.CURRENT:
            policy.refresh(unit)
        engine.backend.synchronize("host waits for update", unit.updated)
        if writes:
            engine.backend.synchronize("host waits for weights sent", unit.sent)
        engine.spill.weights.hold(unit, writes=writes)
        for other in lent:
            policy.remember(other)
            policy.expose(other, is_lent=True)
        if writes:
            policy.remember(record)
        shown = (self._shown(),)
        engine.backend.touch_host(f"user's access to {record.name}", reads=shown, writes=shown if writes else ())

    def _absorb(self, policy: UpdatePolicy, writes: bool) -> list[ParamRecord]:
        """What operations wrote is taken over. An alias that was handed out may still be written, until the engine uses
        the unit itself: ``p.data.add_(torch.randn_like(p))`` looks at ``p`` in between. Returns what stays exposed."""
        record, exposed = self._record, self._record.unit.exposed
        lent = [other for other in exposed if other.is_lent]
        if len(lent) == len(exposed) and not (writes and record.is_exposed):
            return []
        policy.absorb(record.unit)
        return lent

    def after(self, aliased: bool) -> None:
        engine = self._alive()
        unit = self._record.unit
        if aliased and engine.spill.is_only_read(unit):
            engine.spill.weights.lend(unit, writes=False)
            return
        if self._record.shows_master:
            engine.policy.commit(unit)
        engine.backend.synchronize("host waits for weights sent", unit.sent)
        engine.spill.weights.present(unit, writes=True)
        if aliased:
            engine.spill.weights.lend(unit)
        engine.backend.touch_host(f"user's alias of {self._record.name}", writes=(self._shown(),))
        engine.policy.remember(self._record)
        engine.policy.expose(self._record, is_lent=aliased)
        unit.content += 1

    def over(self) -> None:
        self._alive().spill.weights.let_go(self._record.unit)

    def get_grad(self) -> torch.Tensor | None:
        engine, record = self._alive(), self._record
        engine.backward.finish_outside()
        buffer = record.unit.gradient
        if not record.has_gradient or buffer is None:
            return engine.policy.stand_in(record)
        reference = buffer.handles.get(id(record))
        handle = reference() if reference is not None else None
        if handle is None:
            handle = record.gradient_view(buffer.slab.flat)
            handle.__class__ = guarded_class(torch.Tensor)
            guard(handle, GradientAccess(engine, record, buffer))
            buffer.handles[id(record)] = weakref.ref(handle)
        return handle

    def set_grad(self, value: torch.Tensor | None) -> None:
        engine, record = self._alive(), self._record
        engine.backward.finish_outside()
        if value is None:
            engine.policy.forget(record)
            return
        if isinstance(value, StandIn):
            return  # `p.grad = p.grad`
        _check_gradient(record, value)
        if value is self.get_grad():
            return
        if not record.spec.is_trainable:
            engine.admission.admit([record.parameter])  # torch lets a frozen parameter have a gradient, and steps it
        target = engine.policy.writable_gradient(record)
        target.copy_(plain_value(value))

    def set_data(self, value: torch.Tensor) -> None:
        record = self._record
        check_data(record, value)
        self.before(writes=True)
        if not _is_same(value, record.host):
            self._part(record.host)
            record.host.copy_(plain_value(value))
        self.after(aliased=False)
        self.over()

    def hooked(self, register: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        return widened_hook(self._alive(), self._record, register, hook)

    def taken(self, gradient: torch.Tensor, is_only: bool) -> torch.Tensor:
        record = self._record
        widened, record.widened = record.widened, None
        return (widened if is_only and widened is not None else gradient).to(record.host.device, record.spec.dtype)

    def _shown(self) -> Slab:
        states = self._record.unit.states
        return states["master"] if self._record.shows_master and "master" in states else self._record.unit.weights

    def _alive(self) -> Engine:
        engine = self._engine()
        if engine is None:
            raise StateError(f"{self._record.name} is still guarded by an engine that is gone")
        return engine


class GradientAccess(_OfRecord):
    """Guards a host gradient that was shown to user code. ``buffer`` is the memory it shows."""

    def __init__(self, engine: Engine, record: ParamRecord, buffer: GradientBuffer) -> None:
        super().__init__(engine, record)
        self._buffer = buffer

    def before(self, writes: bool) -> None:
        engine = self._engine()
        if engine is None:
            return
        engine.backward.finish_outside()
        unit = self._record.unit
        if self._buffer is unit.gradient:
            engine.policy.apply_coefficients(unit)
            if writes:
                self._claim(engine)
        elif writes and self._buffer is unit.logged:
            engine.policy.commit(unit)  # kept past `grad = None`: the log still has to read this memory
        self._wait(engine, writes)

    def after(self, aliased: bool) -> None:
        engine = self._engine()
        if engine is None:
            return
        unit = self._record.unit
        if aliased:
            self._buffer.is_aliased = True
        if self._buffer is unit.gradient:
            self._claim(engine)
            for record in unit.with_gradient:
                record.square_sum = None
        elif self._buffer is unit.logged:
            engine.policy.commit(unit)
        self._wait(engine, True)

    def get_grad(self) -> torch.Tensor | None:
        return None

    def set_grad(self, value: torch.Tensor | None) -> None:
        raise StateError("a gradient has no gradient of its own here")

    def set_data(self, value: torch.Tensor) -> None:
        self.before(writes=True)
        self._record.gradient_view(self._buffer.slab.flat).copy_(plain_value(value))
        self.after(aliased=False)

    def _claim(self, engine: Engine) -> None:
        # the memory is user code's now: what was logged from it commits, what was predicted from it is void
        unit = self._record.unit
        if unit.logged is self._buffer:
            engine.policy.commit(unit)
        engine.policy.void(unit)

    def _wait(self, engine: Engine, writes: bool) -> None:
        unit, slab = self._record.unit, (self._buffer.slab,)
        engine.backend.synchronize("host waits for gradient", self._buffer.filled)
        engine.backend.synchronize("host waits for update", unit.updated)
        if writes:
            engine.backend.synchronize("host waits for norm", unit.measured)
            engine.backend.synchronize("host waits for gradient sent", self._buffer.sent)
        what = f"user's access to a gradient of {unit.name}"
        engine.backend.touch_host(what, reads=slab, writes=slab if writes else ())


class EdgeAccess(_OfParameter):
    """Guards a resident parameter. Its gradient is the tensor autograd holds."""

    def before(self, writes: bool) -> None:
        engine = self._engine()
        if engine is not None:
            unit = self._record.unit
            engine.backend.order("compute after weights refreshed", unit.refreshed)
            if writes:
                engine.backend.order("compute after weights pulled", unit.pulled)
                self._note_write()
            resident = (unit.resident,)
            engine.backend.touch(f"use of {self._record.name}", reads=resident, writes=resident if writes else ())

    def after(self, aliased: bool) -> None:
        engine = self._engine()
        if engine is not None:
            if aliased:
                unit = self._record.unit
                engine.backend.order("compute after weights pulled", unit.pulled)
                self._note_write()
                engine.backend.touch(f"user's alias of {self._record.name}", writes=(unit.resident,))
            engine.policy.expose(self._record)

    def _note_write(self) -> None:
        """In the unit's own forward: its recompute begins with what is there now."""
        record = self._record
        visits = record.unit.visits if record.unit.notes_writes else ()
        unaware = [visit for visit in visits if id(record) not in visit.before]
        if unaware:
            before = Before(record, plain(record.parameter).clone(), False)
            for visit in unaware:
                visit.before[id(record)] = before

    def get_grad(self) -> torch.Tensor | None:
        engine = self._engine()
        if engine is not None and not engine.backward.is_inside():
            engine.backward.finish_outside()
            return engine.edges.show(self._record)
        return device_gradient(self._record)

    def set_grad(self, value: torch.Tensor | None) -> None:
        engine, record = self._engine(), self._record
        if engine is not None and not engine.backward.is_inside():
            engine.backward.finish_outside()
            if value is None:
                engine.policy.forget(record)
            else:
                if not record.spec.is_trainable:
                    engine.admission.admit([record.parameter])
                    if not record.unit.is_resident:  # the device had no room for it
                        record.parameter.grad = value
                        return
                record.coefficient = ONE
                engine.edges.outdate(record)
        set_device_gradient(record, value)

    def set_data(self, value: torch.Tensor) -> None:
        self.before(writes=True)
        record = self._record
        check_data(record, value)
        held = plain(record.parameter)
        if not _is_same(value, held):
            self._part(held)
            held.copy_(plain_value(value))
        self.after(aliased=False)


def record_of(tensor: torch.Tensor) -> ParamRecord | None:
    """The record of a parameter that is in an engine's custody; None of any other tensor."""
    access = access_of(tensor)
    return access._weak_record() if isinstance(access, ParameterAccess | EdgeAccess) else None


def take_gradients(units: Iterable[Unit]) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Gradients that parameters have before they are guarded; the parameters have none afterwards."""
    found = []
    for record in (record for unit in units for record in unit.trainable):
        gradient = record.parameter.grad
        if gradient is not None:
            found.append((record.parameter, gradient))
            record.parameter.grad = None
    return found


def give_gradients(found: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
    """Assign gradients to guarded parameters, as user code does."""
    for parameter, gradient in found:
        parameter.grad = gradient.to(parameter.device)


def plain_value(value: torch.Tensor) -> torch.Tensor:
    """A user's tensor without a graph (its own guard, if it has one, still settles)."""
    return value.detach()


def _is_over(tensor: torch.Tensor, held: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()


def _is_same(value: torch.Tensor, held: torch.Tensor) -> bool:
    """Whether ``value`` is all of ``held`` already."""
    with torch._C.DisableTorchFunctionSubclass():
        where = (value.data_ptr(), value.stride()), (held.data_ptr(), held.stride())
        return where[0] == where[1] and value.device == held.device


def check_data(record: ParamRecord, value: torch.Tensor) -> None:
    if value.shape != record.spec.shape or value.dtype != record.spec.dtype:
        raise UnsupportedError(
            f"{record.name} cannot change its shape or dtype any more: its memory is laid out.",
            found=f"{tuple(value.shape)} {value.dtype}",
            expected=f"{tuple(record.spec.shape)} {record.spec.dtype}",
            remedy="resize_token_embeddings(), half(), to(dtype) and the like before accelerator.prepare(), or after"
            " accelerator.free_memory() (of a Trainer: trainer.accelerator), which makes it a plain model again",
        )


def _check_gradient(record: ParamRecord, value: torch.Tensor) -> None:
    if value.shape != record.spec.shape or value.dtype != record.spec.dtype:
        raise RuntimeError(
            f"assigned grad has shape {tuple(value.shape)} and dtype {value.dtype}, but {record.name} has"
            f" {tuple(record.spec.shape)} and {record.spec.dtype}"
        )
