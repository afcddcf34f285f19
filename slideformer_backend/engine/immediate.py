"""``update: immediate``: the paper's mode. Weights change while the backward still runs (DESIGN 4.3)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from ..errors import UnsupportedError
from .arithmetic import Update
from .policy import UpdatePolicy
from .stand_in import SpentGradient
from .unit import ONE, Entry, ParamRecord, Unit, Weights

logger = logging.getLogger(__name__)


class Immediate(UpdatePolicy):
    """Updates in place as gradients arrive; least host memory.

    ``applied`` holds the parameters whose update has been applied and whose ``step()`` has not been called, ``_spent``
    those whose gradient it took and the script has not reset since.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]  # the base's own parameters
        self.applied: set[int] = set()
        self._spent: set[int] = set()
        self._before: dict[int, np.ndarray] = {}
        self._remembered: Unit | None = None
        self._updated: set[str] = set()
        self._is_reported = False

    def arrive(self, unit: Unit, *, is_last: bool) -> None:
        self.absorb(unit)
        if not is_last:
            return
        records, entries = [], []
        for record in unit.with_gradient:
            if record.binding is not None and record.binding.rule is not None and record.group is not None:
                records.append(record)
                entries.append(record.binding.entry(record, ONE))
        self._apply(unit, records, entries)
        self.applied.update(id(record) for record in records)
        self._spent.update(id(record) for record in records)
        if records:
            self._updated.add(unit.name)

    def stand_in(self, record: ParamRecord) -> torch.Tensor | None:
        if id(record) not in self._spent:
            return None
        return SpentGradient.of(record, record.host.device, partial(self.forget, record))

    def forget(self, record: ParamRecord) -> None:
        self._spent.discard(id(record))
        super().forget(record)

    def expects_update(self, unit: Unit, *, is_last: bool) -> bool:
        return is_last

    def expects_new_weights(self, *, is_last: bool) -> bool:
        return is_last

    def step(self, records: Sequence[ParamRecord], entries: Sequence[Entry]) -> None:
        by_unit: dict[Unit, tuple[list[ParamRecord], list[Entry]]] = {}
        for record, entry in zip(records, entries, strict=True):
            batch = by_unit.setdefault(record.unit, ([], []))
            batch[0].append(record)
            batch[1].append(entry)
        for unit in sorted(by_unit, key=lambda unit: unit.index):
            self.absorb(unit)
            self._apply(unit, *by_unit[unit])

    def confirm(self, records: Sequence[ParamRecord]) -> None:
        """``step()`` was called for these parameters."""
        self.applied.difference_update(id(record) for record in records)
        if not self.applied:
            self._updated.clear()
            self._is_reported = False

    def check_backward(self) -> None:
        """Before a backward changes anything: raises UnsupportedError when the last update was not confirmed."""
        if self.applied:
            raise UnsupportedError(
                "update: immediate has already applied the gradients of the previous backward, and optimizer.step() was"
                " not called before this one.",
                remedy="accumulate through accelerator.accumulate(), or set update: exact, which needs no such care",
            )

    def report_unconfirmed(self) -> None:
        if not self.applied or self._is_reported:
            return
        self._is_reported = True
        logger.error(
            "SlideFormer: a backward has updated %d layers (update: immediate) and no optimizer.step() completed it, as"
            " after an exception inside backward: weights and optimizer states of two steps are mixed. Remedy: load the"
            " last checkpoint, or set update: exact, under which such a backward changes nothing.",
            len(self._updated),
        )

    def commit(self, unit: Unit) -> None:
        """Nothing is ever uncommitted."""

    def refresh(self, unit: Unit) -> None:
        """Working weights are never stale."""

    def void(self, unit: Unit) -> None:
        """Nothing is computed ahead."""

    def remember(self, record: ParamRecord) -> None:
        unit = record.unit
        if "low" not in unit.states or not record.spec.is_trainable or id(record) in self._before:
            return
        if self._remembered is not unit:  # copies of one unit at a time: to look at all weights must not double them
            if self._remembered is not None:
                self.absorb(self._remembered)
            self._remembered = unit
        self._before[id(record)] = record.weight_array().copy()

    def absorb(self, unit: Unit) -> None:
        """A write resets the low half of a split master, exactly where it changed the weight (DESIGN 5)."""
        if "master" in unit.states or unit.updates_on_device:
            super().absorb(unit)
            return
        records = [record for record in unit.exposed if record.spec.is_trainable]
        for record in unit.exposed:
            record.is_exposed = record.is_lent = False
        if not records:
            return
        if unit.is_resident:
            self._absorb_resident(unit, records)
        elif "low" in unit.states:
            written = [record for record in records if id(record) in self._before]
            before = [self._before.pop(id(record)) for record in written]
            self.operate(
                unit,
                f"user's writes to {unit.name}",
                lambda: self.arithmetic.reconcile_split(written, before),
                after={},  # user code was let in after all transfers from the weights
                reads=(unit.weights,),
                states="write",
            )

    def _absorb_resident(self, unit: Unit, records: Sequence[ParamRecord]) -> None:
        # the host weights are those from before the writes until the resident ones are brought over
        before: list[np.ndarray] = []
        is_split = "low" in unit.states
        if is_split:
            self.operate(
                unit,
                f"weights of {unit.name} before user's writes",
                lambda: before.extend(record.weight_array().copy() for record in records),
                after={},
                reads=(unit.weights,),
            )

        def run() -> None:
            if is_split:
                self.arithmetic.reconcile_split(records, before)

        self.operate(
            unit,
            f"user's writes to {unit.name}",
            run,
            after={"reconcile after weights pulled": self.pull(unit)},
            reads=(unit.weights,),
            states="write" if is_split else "",
        )

    def adopt(self, unit: Unit) -> None:
        records = unit.trainable
        if records and "master" in unit.states:
            self.operate(
                unit,
                f"weights of {unit.name}",
                lambda: self.arithmetic.restore(records),
                after=self.before_weights(unit),
                writes=(unit.weights,),
                states="read",
            )
        unit.content += 1
        unit.steps += 1

    def _apply(self, unit: Unit, records: Sequence[ParamRecord], entries: Sequence[Entry]) -> None:
        buffer = unit.gradient
        if not records or buffer is None:
            return
        if any(record.square_sum is None for record in records):
            self.measure(unit)
        updates = [Update.of(record, entry, buffer.slab) for record, entry in zip(records, entries, strict=True)]
        self.operate(
            unit,
            f"update of {unit.name}",
            lambda: self.arithmetic.update(updates),
            after={"update after gradient filled": buffer.filled, **self.before_weights(unit)},
            reads=(buffer.slab,),
            writes=(unit.weights,),
            states="write",
        )
        for record in records:
            record.steps += 1
            record.has_gradient = False
        unit.content += 1
        unit.steps += 1
        unit.weights_are = Weights.CURRENT
        if not unit.with_gradient:
            unit.gradient = None
            self.recycle(unit, buffer)
