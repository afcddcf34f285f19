"""``update: exact``: predict the update, verify it at ``step()``, never corrupt (DESIGN 4.1, 4.2).

Host state of a unit is (p, m, v) as of the last committed step, plus a gradient buffer with one log entry per parameter
whose step has been taken and not committed. Working weights are derived from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..storage import Slab
from ..transfer import GradientBuffer
from .arithmetic import Update
from .policy import UpdatePolicy
from .unit import ONE, Entry, ParamRecord, Unit, Weights


class RedoLog(UpdatePolicy):
    """Exact updates that overlap backward; nothing is speculated about a step that is probably clipped."""

    deferred = 1 << 30
    """How many units of a clipped step, the last in forward order, get only their working weights at once (a peek) and
    are committed when their next gradient arrives. The others get both in one pass, which takes longer but saves the
    commit: as many commits are put off as the lane has time for during the backward."""

    tail = 4
    """How many units, the first in forward order, are committed while the next forward runs, where the lane keeps pace
    with the backward and idles in the forward. The forward after that waits for their weights, since their gradients
    come last: with nothing left to commit, those take half as long."""

    def arrive(self, unit: Unit, *, is_last: bool) -> None:
        self.absorb(unit)
        buffer = unit.gradient
        if buffer is None:
            return
        self.void(unit)
        if unit.weights_are is Weights.STALE:
            self.refresh(unit)
        predicted = self._predict(unit, buffer) if is_last and not self.is_clipping else []
        logged_buffer = unit.logged
        logged = self._take_log(unit)
        if predicted:
            self.operate(
                unit,
                f"advance of {unit.name}",
                lambda: self.arithmetic.advance(logged, predicted),
                after={
                    "advance after gradient filled": buffer.filled,
                },
                reads=_slabs(buffer, logged_buffer),
                writes=(unit.weights,),
                states="write",
            )
            unit.weights_are = Weights.SPECULATIVE
        elif logged and logged_buffer is not None:
            self._submit_commit(unit, logged, logged_buffer)
        if logged_buffer is not None and logged_buffer is not buffer:
            self.recycle(unit, logged_buffer)

    def expects_update(self, unit: Unit, *, is_last: bool) -> bool:
        return unit.logged is not None or (is_last and not self.is_clipping)

    def expects_new_weights(self, *, is_last: bool) -> bool:
        return is_last and not self.is_clipping

    def step(self, records: Sequence[ParamRecord], entries: Sequence[Entry]) -> None:
        by_unit: dict[Unit, list[tuple[ParamRecord, Entry]]] = {}
        for record, entry in zip(records, entries, strict=True):
            by_unit.setdefault(record.unit, []).append((record, entry))
        for unit, items in by_unit.items():
            self._log(unit, items)
        if self.is_clipping:
            self._balance(by_unit)
        units = sorted(by_unit, key=lambda unit: unit.index)
        stale = [unit for unit in units if unit.weights_are is Weights.STALE and unit.filed is None]
        deferred = {unit for unit in stale[max(0, len(stale) - self.deferred) :] if unit.spill is None}
        for unit in units:
            buffer = unit.logged
            if unit.weights_are is Weights.STALE and unit.filed is None:  # those in files are made later
                if unit in deferred or buffer is None or "master" not in unit.states:
                    self.refresh(unit)
                else:
                    self._update(unit, buffer)
            if buffer is not None and buffer.is_aliased:
                self.commit(unit)  # user code may write the logged memory at any time from now on
                self.backend.synchronize("host waits for update", unit.updated)
                if unit.gradient is not None:
                    self.backend.synchronize("host waits for norm", unit.measured)
                    self.backend.touch_host("user's alias of a gradient", writes=(unit.gradient.slab,))
        if not stale:
            self._commit_tail(units)

    def commit(self, unit: Unit) -> None:
        buffer = unit.logged
        logged = self._take_log(unit)
        if logged and buffer is not None:
            self._submit_commit(unit, logged, buffer)
        if buffer is not None and buffer is not unit.gradient:
            self.recycle(unit, buffer)

    def _balance(self, units: Iterable[Unit]) -> None:
        """Put off fewer commits when the lane is not done with those of the backward that has just ended."""
        sliding = [unit for unit in units if not unit.is_resident]
        late = sum(unit.updated is not None and not unit.updated.is_complete for unit in sliding)
        self.deferred = max(0, min(self.deferred, len(sliding)) - late) if late else self.deferred + 1

    def _commit_tail(self, units: Sequence[Unit]) -> None:
        """See ``tail``; ``units`` in forward order. Where more of them are late, the lane is behind: it has no time.
        The lane takes first what the forward needs first, so no commit may stand before weights still to be made."""
        sliding = [unit for unit in units if not unit.is_resident and unit.spill is None]
        late = [n for n, unit in enumerate(sliding) if unit.updated is not None and not unit.updated.is_complete]
        if 0 < len(late) <= self.tail:
            for unit in sliding[late[-1] : self.tail]:
                self.commit(unit)

    def _update(self, unit: Unit, buffer: GradientBuffer) -> None:
        """Commit the step just logged and write its working weights, in one pass."""
        updates = self._take_log(unit)
        stepped = {id(update.record) for update in updates}
        rest = [record for record in unit.trainable if id(record) not in stepped]
        for record in unit.records:
            record.predicted = None

        def run() -> None:
            self.arithmetic.update(updates)
            self.arithmetic.restore(rest)

        self.operate(
            unit,
            f"update of {unit.name}",
            run,
            after={**self.before_weights(unit), "update after gradient filled": buffer.filled},
            reads=_slabs(buffer),
            writes=(unit.weights,),
            states="write",
            whole=self.can_make(unit),
        )
        unit.weights_are = Weights.CURRENT
        if buffer is not unit.gradient:
            self.recycle(unit, buffer)

    def refresh(self, unit: Unit) -> None:
        peeks = self._logged_updates(unit)
        ahead = {id(update.record) for update in peeks}
        rest = [record for record in unit.trainable if id(record) not in ahead]
        for record in unit.records:
            record.predicted = None
        if "master" not in unit.states:
            unit.weights_are = Weights.CURRENT
            return

        def run() -> None:
            self.arithmetic.peek(peeks)
            self.arithmetic.restore(rest)

        after = self.before_weights(unit)
        if unit.logged is not None:
            after["peek after gradient filled"] = unit.logged.filled
        self.operate(
            unit,
            f"peek of {unit.name}",
            run,
            after=after,
            reads=_slabs(unit.logged),
            writes=(unit.weights,),
            states="read",
            whole=self.can_make(unit),
        )
        unit.weights_are = Weights.CURRENT

    def make(self, unit: Unit) -> None:
        buffer = unit.logged
        is_due = unit.weights_are is Weights.STALE and "master" in unit.states
        if is_due and buffer is not None and unit.spill is not None:
            self._update(unit, buffer)  # states that are read for it need not be read again for a commit
        else:
            self.refresh(unit)

    def can_make(self, unit: Unit) -> bool:
        return "master" in unit.states and all(record.spec.is_trainable for record in unit.records)

    def void(self, unit: Unit) -> None:
        if unit.weights_are is Weights.SPECULATIVE:
            for record in unit.records:
                record.predicted = None
            unit.weights_are = Weights.STALE

    def adopt(self, unit: Unit) -> None:
        self.void(unit)
        unit.weights_are = Weights.STALE
        unit.content += 1
        unit.steps += 1
        self.refresh(unit)

    def _log(self, unit: Unit, items: Sequence[tuple[ParamRecord, Entry]]) -> None:
        self.absorb(unit)
        again = any(record.entry is not None for record, _ in items)
        if again or (unit.logged is not None and unit.logged is not unit.gradient):
            self.commit(unit)
        is_right = unit.weights_are is Weights.SPECULATIVE
        for record, entry in items:
            is_right = is_right and record.predicted == entry
            record.entry, record.predicted = entry, None
            record.steps += 1
        unit.logged = unit.gradient
        unit.content += 1
        unit.steps += 1
        if not is_right:
            self.repairs += unit.weights_are is Weights.SPECULATIVE
            self.void(unit)
            unit.weights_are = Weights.STALE
        elif all(record.predicted is None for record in unit.records):
            unit.weights_are = Weights.CURRENT

    @staticmethod
    def _predict(unit: Unit, buffer: GradientBuffer) -> list[Update]:
        updates = []
        for record in unit.with_gradient:
            binding, group = record.binding, record.group
            if binding is None or binding.rule is None or group is None:
                continue
            record.predicted = binding.entry(record, ONE)
            updates.append(Update.of(record, record.predicted, buffer.slab))
        return updates

    def _take_log(self, unit: Unit) -> list[Update]:
        updates = self._logged_updates(unit)
        for update in updates:
            update.record.entry = None
        unit.logged = None
        return updates

    @staticmethod
    def _logged_updates(unit: Unit) -> list[Update]:
        if unit.logged is None:
            return []
        slab = unit.logged.slab
        return [Update.of(record, record.entry, slab) for record in unit.records if record.entry is not None]

    def _submit_commit(self, unit: Unit, logged: Sequence[Update], buffer: GradientBuffer) -> None:
        self.operate(
            unit,
            f"commit of {unit.name}",
            lambda: self.arithmetic.commit(logged),
            after={"commit after gradient filled": buffer.filled},  # which weights that are made late have not done yet
            reads=(buffer.slab,),
            states="write",
        )


def _slabs(*buffers: GradientBuffer | None) -> tuple[Slab, ...]:
    return tuple(buffer.slab for buffer in buffers if buffer is not None)
