"""What both update policies share: gradient buffers, host operations of a unit, and what user code touches.

All decisions are made synchronously, on the thread that trains; the lanes only execute them, in submission order. One
update lane owns masters, moments and host working weights, so their order needs no further waits.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch

from ..plan.ledger import usual_spares
from ..storage import HostMemory, Tracked
from ..transfer import Backend, GradientBuffer, GradientPool, Ticket, copy
from .arithmetic import Arithmetic
from .guard import plain
from .norms import Norms
from .operation import Operation, Use, follow, nothing
from .spill import Spill
from .unit import ONE, Entry, ParamRecord, Unit, Weights
from .window import Window

ONLY_ORDER = frozenset({"update after weights sent", "clip after gradient sent"})
"""Waits for transfers that only read what an operation writes."""


class UpdatePolicy(abc.ABC):
    """When and how arrived gradients become weights.

    Args:
        backend: lanes of the engine.
        window: tells the size class of a unit's gradient.
        memory: host allocator.
        arithmetic: the kernels.
        norms: measures gradients.
        spill: brings states that operations need into memory.
    """

    is_clipping = False
    """Whether the last step was clipped, so that the next one probably is; never where a policy cannot clip."""

    def __init__(
        self,
        backend: Backend,
        window: Window,
        memory: HostMemory,
        arithmetic: Arithmetic,
        norms: Norms,
        spill: Spill,
    ) -> None:
        self.backend = backend
        self.window = window
        self.memory = memory
        self.arithmetic = arithmetic
        self.norms = norms
        self.spill = spill
        self.spare_buffers = usual_spares(window.units)
        """Gradient buffers in flight; the plan may have fewer."""
        self.repairs = 0
        """Speculative weights that had to be computed again, in units."""
        self._pools: dict[int, GradientPool] = {}

    @abc.abstractmethod
    def arrive(self, unit: Unit, *, is_last: bool) -> None:
        """The gradient of ``unit`` is on its way into ``unit.gradient``; ``is_last``: a ``step()`` should follow."""

    @abc.abstractmethod
    def expects_update(self, unit: Unit, *, is_last: bool) -> bool:
        """Whether ``arrive`` will use the states of ``unit``."""

    @abc.abstractmethod
    def expects_new_weights(self, *, is_last: bool) -> bool:
        """Whether ``arrive`` will write working weights."""

    @abc.abstractmethod
    def step(self, records: Sequence[ParamRecord], entries: Sequence[Entry]) -> None:
        """``step()``: these updates apply to the gradients as they are."""

    @abc.abstractmethod
    def commit(self, unit: Unit) -> None:
        """Bring masters and moments up to the last ``step()``."""

    @abc.abstractmethod
    def refresh(self, unit: Unit) -> None:
        """Make the host working weights those after the last ``step()``."""

    def make(self, unit: Unit) -> None:
        """As ``refresh``, for weights whose use is near."""
        self.refresh(unit)

    def can_make(self, unit: Unit) -> bool:
        """Whether ``refresh`` makes all working weights of ``unit`` of its masters, whatever they were."""
        return False

    @abc.abstractmethod
    def void(self, unit: Unit) -> None:
        """The gradient changed: what was computed ahead from it no longer counts."""

    @abc.abstractmethod
    def adopt(self, unit: Unit) -> None:
        """Masters of ``unit`` were stepped by an optimizer that ran as itself: the working weights follow them."""

    # -- gradient buffers ------------------------------------------------------------------------------------------

    def target_buffer(self, unit: Unit) -> GradientBuffer:
        """The buffer that the unit's next gradient goes to: its own, unless the log still needs that one's content."""
        if unit.gradient is not None and unit.gradient is unit.logged and unit.gradient.is_held():
            self.commit(unit)  # user code looks at this very memory: autograd adds to it in place
        if unit.gradient is not None and unit.gradient is not unit.logged:
            return unit.gradient
        return self.take_buffer(unit)

    def take_buffer(self, unit: Unit) -> GradientBuffer:
        """A buffer of the unit's size, to be written once its ``drained`` ticket has passed."""
        return self._pool(unit).take(spare=self.spare_buffers)

    def replace_gradient(self, unit: Unit, buffer: GradientBuffer) -> None:
        """``buffer`` now holds the visible gradient of ``unit``."""
        previous, unit.gradient = unit.gradient, buffer
        if previous is not None and previous is not buffer and previous is not unit.logged:
            self.recycle(unit, previous)

    def recycle(self, unit: Unit, buffer: GradientBuffer) -> None:
        """Give a buffer back once everything submitted so far has read it; never if some of that has failed."""
        monitor = self.backend.monitor
        spoils = monitor is not None and monitor.poison and not buffer.is_held()
        slab, before = buffer.slab, unit.updated

        def release() -> None:
            follow(before)  # what was not done is done again from this gradient
            if spoils and monitor is not None:
                monitor.spoil(slab)

        ticket = self.backend.update.submit(
            f"release of a gradient buffer of {unit.name}",
            release,
            after={
                "release after norm": unit.measured,
                "release after gradient filled": buffer.filled,
                "release after gradient sent": buffer.sent,
            },
            writes=(slab,) if spoils else (),
            line=unit.line,
        )
        self._pool(unit).give(buffer, ticket)

    def release_pool(self, unit: Unit) -> None:
        """A unit left for the device: one buffer fewer is needed on the host. The memory that it gave back is worth
        one more in flight, so that fewer arriving gradients wait for updates."""
        if unit.layout.gradient_bytes:
            self.spare_buffers += 1
            self._pool(unit).shrink(keep=self.spare_buffers)

    def reclaim_pool(self, unit: Unit) -> None:
        """A unit comes back from the device."""
        if unit.layout.gradient_bytes:
            self.spare_buffers -= 1

    def drop_pools(self, classes: Iterable[int]) -> None:
        """No unit needs buffers of these size classes any more."""
        for size in classes:
            pool = self._pools.pop(size, None)
            if pool is not None:
                pool.shrink(keep=0)

    def stand_in(self, record: ParamRecord) -> torch.Tensor | None:
        """What ``p.grad`` shows where no gradient is held."""
        return None

    def forget(self, record: ParamRecord) -> None:
        """``grad = None``: the visible gradient of one parameter goes; a logged step keeps its own reference."""
        if not record.has_gradient:
            return
        unit = record.unit
        if record.predicted is not None:
            self.void(unit)
        if record.coefficient != ONE and unit.gradient is not None and unit.gradient.is_held():
            self.apply_coefficients(unit)  # whoever keeps the gradient sees it clipped, as torch leaves it
        record.has_gradient = False
        record.coefficient = ONE
        record.square_sum = None
        if not unit.with_gradient and unit.gradient is not None:
            buffer, unit.gradient = unit.gradient, None
            if buffer is not unit.logged:
                self.recycle(unit, buffer)

    # -- norms and clips -------------------------------------------------------------------------------------------

    def measure(self, unit: Unit) -> None:
        """Start computing the sum of squares of each gradient of ``unit`` (once per content)."""
        buffer = unit.gradient
        is_aliased = buffer is not None and buffer.is_aliased
        records = [record for record in unit.with_gradient if record.square_sum is None or is_aliased]
        if records and buffer is not None:
            self.norms.on_host(unit, records, buffer)

    def apply_coefficients(self, unit: Unit) -> None:
        """Turn recorded clips of ``unit`` into clipped gradients, as torch's in-place clip leaves them."""
        records = [record for record in unit.with_gradient if record.coefficient != ONE]
        buffer = unit.gradient
        if not records or buffer is None:
            return
        if buffer is unit.logged:
            self.commit(unit)
        self.void(unit)
        coefficients = [record.coefficient for record in records]
        self.operate(
            unit,
            f"clip of {unit.name}",
            lambda: self.arithmetic.scale(records, coefficients, buffer.slab),
            after={  # norms of device slots come before the gradient does
                "clip after gradient filled": buffer.filled,
                "clip after gradient sent": buffer.sent,
            },
            writes=(buffer.slab,),
        )
        for record in records:
            record.coefficient = ONE
            record.square_sum = None

    def writable_gradient(self, record: ParamRecord) -> torch.Tensor:
        """Host memory for a gradient that user code assigns to ``record``; idle, in the parameter's shape."""
        unit = record.unit
        if unit.gradient is not None and unit.gradient is unit.logged:
            self.commit(unit)
        self.apply_coefficients(unit)
        self.void(unit)
        buffer = unit.gradient or self.target_buffer(unit)
        unit.gradient = buffer
        record.has_gradient, record.coefficient, record.square_sum = True, ONE, None
        for ticket in (buffer.drained, buffer.filled, buffer.sent, unit.updated, unit.measured):
            self.backend.synchronize("host waits for gradient", ticket)
        self.backend.touch_host(f"user's gradient of {record.name}", writes=(buffer.slab,))
        return record.gradient_view(buffer.slab.flat)

    # -- user code -------------------------------------------------------------------------------------------------

    def remember(self, record: ParamRecord) -> None:
        """User code is about to write ``record``, or to get hold of its memory; it is idle now."""
        return

    def expose(self, record: ParamRecord, *, is_lent: bool = False) -> None:
        """User code wrote ``record``, or got hold of its memory (``is_lent``)."""
        record.is_exposed = True
        record.is_lent |= is_lent

    def check_backward(self) -> None:
        """Called before a backward changes anything."""
        return

    def report_unconfirmed(self) -> None:
        """Called when no ``step()`` will complete the last backward: say what it has updated already."""
        return

    def absorb(self, unit: Unit) -> None:
        """Take over what user code may have written into parameters of ``unit`` since their last use."""
        records = unit.exposed
        if not records:
            return
        for record in records:
            record.is_exposed = record.is_lent = False
        trainable = [record for record in records if record.spec.is_trainable]
        has_master = "master" in unit.states
        if not trainable or not (has_master or unit.is_resident):
            return
        self.commit(unit)
        after: dict[str, Ticket | None] = {}  # user code was let in after all transfers from the weights
        if unit.is_resident:
            after["reconcile after weights pulled"] = self.pull(unit)
            for record in unit.records:
                record.predicted = None
        self.operate(
            unit,
            f"user's writes to {unit.name}",
            (lambda: self.arithmetic.reconcile(trainable)) if has_master else nothing,
            after=after,
            writes=(unit.weights,),
            states="write" if has_master else "",
        )
        if unit.is_resident:
            unit.weights_are = Weights.CURRENT  # resident weights are those of the last step, whatever was predicted

    def pull(self, unit: Unit) -> Ticket:
        """Bring the resident parameters of an edge unit to its host working weights."""
        pairs = [(record.weight_view(unit.weights.flat), plain(record.parameter).detach()) for record in unit.records]

        def run() -> None:
            for target, source in pairs:
                copy(target, source)

        unit.pulled = self.backend.d2h.submit(
            f"weights of {unit.name} to the host",
            run,
            after={
                "pull after compute": self.backend.mark("user's writes"),
                "pull after update": unit.updated,
            },
            reads=(unit.resident,),
            writes=(unit.weights,),
            keep=pairs,
        )
        return unit.pulled

    def settle(self, *units: Unit) -> None:
        """Host weights, masters and moments of ``units`` are final and idle when this returns.

        States and weights that spill may then be in a file: ``spill.present`` brings them.
        """
        on_host = [unit for unit in units if not unit.updates_on_device]
        for unit in on_host:
            self.absorb(unit)
            self.commit(unit)
            if unit.weights_are is not Weights.CURRENT:
                self.refresh(unit)
        for unit in on_host:
            self._wait_idle(unit)

    def _wait_idle(self, unit: Unit) -> None:
        self.backend.synchronize("host waits for update", unit.updated)
        self.backend.synchronize("host waits for weights sent", unit.sent)
        spilled = unit.spill.parts if unit.spill is not None else {}
        stay = [slab for name, slab in unit.states.items() if name not in spilled]
        stay += [unit.weights] if unit.filed is None else []
        self.backend.touch_host(f"settled {unit.name}", writes=tuple(stay))

    # -- lane ------------------------------------------------------------------------------------------------------

    def operate(
        self,
        unit: Unit,
        name: str,
        run: Callable[[], None],
        *,
        after: Mapping[str, Ticket | None],
        reads: Sequence[Tracked] = (),
        writes: Sequence[Tracked] = (),
        states: Use = "",
        whole: bool = False,
    ) -> None:
        """Queue host arithmetic of ``unit`` on the update lane, behind what it did before and only if that succeeded.

        ``states``: whether it reads or writes those too; ``whole``: whether it makes all working weights anew. Call it
        before noting what the weights will be.
        """
        shown = unit.weights_are is Weights.CURRENT and not any(record.shows_master for record in unit.records)
        step = unit.steps if shown else None
        operation = Operation(name, run, after=after, reads=reads, writes=writes, states=states, step=step)
        if states:
            after = {**after, **self.spill.use(unit, writes=states == "write")}
            reads, writes = [*reads], [*writes]
            (writes if states == "write" else reads).extend(unit.states.values())
        if unit.weights in writes or unit.weights in reads:
            after = {**after, **self.spill.weights.use(unit, writes=unit.weights in writes, whole=whole)}
        run = partial(operation.execute, unit.updated)
        ticket = self.backend.update.submit(name, run, after=after, reads=reads, writes=writes, line=unit.line)
        unit.updated = operation.ticket = ticket
        if unit.weights in writes:
            unit.made = ticket
        while unit.operations and unit.operations[0].ticket.has_succeeded:
            del unit.operations[0]
        unit.operations.append(operation)

    def redo(self, unit: Unit, operation: Operation, *, whole: bool = False) -> None:
        """Queue an operation that a failure prevented, as the next of ``unit``. Its inputs must be there by now; a
        transfer that it had to let pass is over, whatever came of it. ``whole``: see ``operate``.

        Raises:
            Exception: what made it fail, where it cannot be done again.
        """
        if operation.has_begun:
            operation.ticket.wait_issued()
        self.operate(
            unit,
            operation.name,
            operation.run,
            after={name: ticket for name, ticket in operation.after.items() if name not in ONLY_ORDER},
            reads=operation.reads,
            writes=operation.writes,
            states=operation.states,
            whole=whole,
        )

    @staticmethod
    def before_weights(unit: Unit) -> dict[str, Ticket | None]:
        """Waits of an operation that writes the host working weights."""
        return {"update after weights sent": unit.sent}

    def _pool(self, unit: Unit) -> GradientPool:
        size = self.window.gradient_class(unit)
        if size not in self._pools:
            self._pools[size] = GradientPool(self.memory, str(size), size)
        return self._pools[size]
