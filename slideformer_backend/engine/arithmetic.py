"""Host arithmetic over units: cuts parameters into slices and runs the kernels on the workers.

Every function here runs on the update or norm lane and works on exactly what it is given: which updates apply was
decided on the training thread when the operation was submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..optim import numba_kernels as kernels
from ..optim.norm import BLOCK, block_count
from ..optim.rules import Pending
from ..optim.workers import WorkerPool
from ..storage import Slab, numpy_view
from .unit import Entry, ParamRecord

_OnSlice = Callable[[slice], None]


class Update(NamedTuple):
    """An update of ``elements`` elements from a gradient in a buffer: those of ``record``, and of the parameters that
    follow it in every slab when they take the same update."""

    record: ParamRecord
    entry: Entry
    gradient: Slab
    elements: int

    @classmethod
    def of(cls, record: ParamRecord, entry: Entry, gradient: Slab) -> Update:
        """The update of one parameter."""
        return cls(record, entry, gradient, record.numel)

    def is_followed_by(self, other: Update) -> bool:
        """Whether ``other`` continues this update in memory."""
        mine, next_ = self.record, other.record
        return (
            self.entry == other.entry
            and self.gradient is other.gradient
            and mine.unit is next_.unit
            and mine.spec.dtype == next_.spec.dtype
            and mine.spec.working == next_.spec.working
            and mine.place.state + self.elements == next_.place.state
            and mine.place.weight + self.elements * mine.spec.working.itemsize == next_.place.weight
            and mine.place.gradient + self.elements * mine.spec.dtype.itemsize == next_.place.gradient
        )


class Arithmetic:
    """The kernels of the update rules applied to units, spread over the workers.

    Parameters that lie one after another and take the same update are worked on as one: a decoder layer is then one
    few slices per worker. The GIL is mostly held by the thread that issues device kernels, so what workers do in Python
    is kept to cutting arrays that were made once.
    """

    least_share = 8
    """A slice is half of what each worker would have left, and at least one in so many of its part. Small ones in the
    end even out workers that share a core with somebody: of two halves each, one that is late makes everybody wait for
    half a part. Each costs two turns with the GIL."""

    def __init__(self, workers: WorkerPool) -> None:
        self._workers = workers

    def commit(self, updates: Sequence[Update]) -> None:
        """Bring masters and moments up to the logged step; working weights already hold it."""
        self._run(_commit, [(update,) for update in updates])

    def peek(self, updates: Sequence[Update]) -> None:
        """Working weights after these updates; masters and moments stay."""
        self._run(_peek, [(update,) for update in updates])

    def advance(self, logged: Sequence[Update], predicted: Sequence[Update]) -> None:
        """Commit ``logged`` and write the working weights after ``predicted``, in one pass where both exist."""
        ahead = {id(update.record): update for update in predicted}
        pairs = [(update, ahead.pop(id(update.record), None)) for update in logged]
        self._run(_commit, [(old,) for old, new in pairs if new is None])
        self._run(_advance, [(old, new) for old, new in pairs if new is not None])
        self._run(_peek, [(update,) for update in ahead.values()])

    def update(self, updates: Sequence[Update]) -> None:
        """Masters, moments and working weights in place (``immediate``)."""
        self._run(_update, [(update,) for update in updates])

    def restore(self, records: Sequence[ParamRecord]) -> None:
        """Working weights = rounded masters."""
        jobs = []
        for record in records:
            master, weights = record.state_array("master"), record.weight_array()
            for part in self._slices(record):
                jobs.append(partial(kernels.round_into, master[part], weights[part], record.weight_kind))
        self._workers.run(jobs)

    def reconcile(self, records: Sequence[ParamRecord]) -> None:
        """Take over what user code wrote: into the master, or from the master where that is what it was shown."""
        jobs: list[Callable[[], Any]] = []
        for record in records:
            if "master" not in record.unit.states or not record.spec.is_trainable:
                continue
            master, weights = record.state_array("master"), record.weight_array()
            for part in self._slices(record):
                if record.shows_master:
                    jobs.append(partial(kernels.round_into, master[part], weights[part], record.weight_kind))
                else:
                    jobs.append(partial(kernels.reconcile, master[part], weights[part], record.weight_kind))
        self._workers.run(jobs)

    def reconcile_split(self, records: Sequence[ParamRecord], before: Sequence[np.ndarray]) -> None:
        """Reset the low halves of split masters where the weights differ from what they were ``before``."""
        jobs: list[Callable[[], Any]] = [
            partial(kernels.reconcile_split, old, record.weight_array(), low_array(record))
            for record, old in zip(records, before, strict=True)
        ]
        self._workers.run(jobs)

    def square_sums(self, records: Sequence[ParamRecord], gradient: Slab) -> list[float]:
        """Sum of squares of each parameter's gradient: fp64 partials per block, added in order."""
        partials = [np.zeros(block_count(record.numel), np.float64) for record in records]
        jobs = []
        for record, out in zip(records, partials, strict=True):
            array = gradient_array(record, gradient)
            for part in self._slices(record):
                first = part.start // BLOCK
                count = -(-(part.stop - part.start) // BLOCK)
                jobs.append(partial(kernels.sum_squares, array[part], record.gradient_kind, out[first : first + count]))
        self._workers.run(jobs)
        return [sequential_sum(out) for out in partials]

    def scale(self, records: Sequence[ParamRecord], coefficients: Sequence[np.float32], gradient: Slab) -> None:
        """Multiply gradients in place, rounding to their dtype."""
        jobs = []
        for record, coefficient in zip(records, coefficients, strict=True):
            array = gradient_array(record, gradient)
            for part in self._slices(record):
                jobs.append(partial(kernels.scale, array[part], record.gradient_kind, coefficient))
        self._workers.run(jobs)

    def _run(self, prepare: Callable[..., _OnSlice], items: Sequence[tuple[Update, ...]]) -> None:
        jobs = []
        for item in _merged(items):
            on_slice, count = prepare(*item), item[0].elements
            jobs += [partial(on_slice, part) for part in self._cut(count, count)]
        self._workers.run(jobs)

    def _slices(self, record: ParamRecord) -> Iterator[slice]:
        yield from self._cut(record.numel, record.unit.layout.state_elements)

    def _cut(self, count: int, whole: int) -> Iterator[slice]:
        """Slices of ``count`` elements, the first of ``whole`` that the workers have to do (see ``least_share``)."""
        halves = 2 * BLOCK * self._workers.threads
        least = max(1, whole // (halves // 2 * self.least_share))
        start = 0
        while start < count:
            size = max(least, -(-(whole - start) // halves)) * BLOCK
            yield slice(start, min(start + size, count))
            start += size


def _merged(items: Sequence[tuple[Update, ...]]) -> list[tuple[Update, ...]]:
    merged: list[tuple[Update, ...]] = []
    for item in items:
        last = merged[-1] if merged else None
        if last is not None and all(old.is_followed_by(new) for old, new in zip(last, item, strict=True)):
            merged[-1] = tuple(update._replace(elements=update.elements + item[0].elements) for update in last)
        else:
            merged.append(item)
    return merged


def gradient_array(record: ParamRecord, gradient: Slab, count: int | None = None) -> np.ndarray:
    """The parameter's flat gradient in a buffer; ``count`` elements from there on, when that is more."""
    return numpy_view(gradient.view(record.spec.dtype, record.place.gradient, count or record.numel))


def low_array(record: ParamRecord, count: int | None = None) -> np.ndarray:
    """The low halves of a split master, flat uint16; ``count`` as for ``gradient_array``."""
    low = record.unit.states["low"]
    return numpy_view(low.view(record.spec.working, record.place.state * 2, count or record.numel))


def sequential_sum(partials: np.ndarray) -> float:
    """Left-to-right sum in fp64 (numpy's own sum is pairwise, whose order depends on the length)."""
    total = 0.0
    for value in partials.tolist():
        total += value
    return total


class _Arrays(NamedTuple):
    """What an update works on, whole."""

    master: np.ndarray
    states: tuple[np.ndarray, ...]
    gradient: np.ndarray

    @classmethod
    def of(cls, item: Update) -> _Arrays:
        record, count = item.record, item.elements
        states = tuple(record.state_array(name, count) for name in item.entry.states)
        return cls(record.state_array("master", count), states, gradient_array(record, item.gradient, count))

    def cut(self, part: slice) -> _Arrays:
        return _Arrays(self.master[part], tuple(state[part] for state in self.states), self.gradient[part])


def _commit(item: Update) -> _OnSlice:
    arrays, (rule, _, scalars, coefficient), kind = _Arrays.of(item), item.entry, item.record.gradient_kind

    def on_slice(part: slice) -> None:
        kernels.commit(rule, *arrays.cut(part), kind, coefficient, scalars)

    return on_slice


def _peek(item: Update) -> _OnSlice:
    record = item.record
    arrays, (rule, _, scalars, coefficient) = _Arrays.of(item), item.entry
    weights, kind, weight_kind = record.weight_array(item.elements), record.gradient_kind, record.weight_kind

    def on_slice(part: slice) -> None:
        kernels.peek(rule, *arrays.cut(part), kind, coefficient, scalars, weights[part], weight_kind)

    return on_slice


def _advance(old: Update, new: Update) -> _OnSlice:
    record = old.record
    if old.entry.rule is not new.entry.rule or old.entry.states != new.entry.states:
        commit, peek = _commit(old), _peek(new)

        def one_after_the_other(part: slice) -> None:
            commit(part)
            peek(part)

        return one_after_the_other
    arrays = _Arrays.of(old)
    arrived = gradient_array(record, new.gradient, new.elements)
    weights, kind, weight_kind = record.weight_array(old.elements), record.gradient_kind, record.weight_kind

    def on_slice(part: slice) -> None:
        master, states, logged = arrays.cut(part)
        before = Pending(logged, kind, old.entry.coefficient, old.entry.scalars)
        after = Pending(arrived[part], kind, new.entry.coefficient, new.entry.scalars)
        kernels.advance(old.entry.rule, master, states, before, after, weights[part], weight_kind)

    return on_slice


def _update(item: Update) -> _OnSlice:
    record, count = item.record, item.elements
    rule, names, scalars, coefficient = item.entry
    gradient, kind = gradient_array(record, item.gradient, count), record.gradient_kind
    states = tuple(record.state_array(name, count) for name in names)
    weights, weight_kind = record.weight_array(count), record.weight_kind
    low = low_array(record, count) if "low" in record.unit.states else None
    master = record.state_array("master", count) if "master" in record.unit.states else weights

    def on_slice(part: slice) -> None:
        cut = tuple(state[part] for state in states)
        if low is not None:
            kernels.update_split(rule, weights[part], low[part], cut, gradient[part], kind, coefficient, scalars)
            return
        target = weights[part]
        own = target if master is weights else master[part]
        kernels.update(rule, own, cut, gradient[part], kind, coefficient, scalars, target, weight_kind)

    return on_slice
