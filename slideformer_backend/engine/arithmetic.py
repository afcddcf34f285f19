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
from ..optim.rules import Pending
from ..optim.workers import WorkerPool
from ..storage import Slab, numpy_view
from .unit import Entry, ParamRecord

BLOCK = 65536
"""Elements of one norm partial; slices begin at multiples of it, so no worker count changes a norm (DESIGN 4.5)."""


SLICES_PER_WORKER = 4
"""Slices of a unit per worker: more balance better at the end of a unit, fewer touch the GIL less."""
SMALLEST_SLICE = 4
"""Blocks below which a slice is not worth its call."""


class Update(NamedTuple):
    """One parameter's update from a gradient in a buffer."""

    record: ParamRecord
    entry: Entry
    gradient: Slab


class Arithmetic:
    """The kernels of the update rules applied to units, spread over the workers."""

    def __init__(self, workers: WorkerPool) -> None:
        self._workers = workers

    def commit(self, updates: Sequence[Update]) -> None:
        """Bring masters and moments up to the logged step; working weights already hold it."""
        self._run(updates, _commit)

    def peek(self, updates: Sequence[Update]) -> None:
        """Working weights after these updates; masters and moments stay."""
        self._run(updates, _peek)

    def advance(self, logged: Sequence[Update], predicted: Sequence[Update]) -> None:
        """Commit ``logged`` and write the working weights after ``predicted``, in one pass where both exist."""
        ahead = {id(update.record): update for update in predicted}
        pairs = [(update, ahead.pop(id(update.record), None)) for update in logged]
        self._run([pair[0] for pair in pairs if pair[1] is None], _commit)
        both = {id(old.record): new for old, new in pairs if new is not None}
        self._run(
            [old for old, new in pairs if new is not None],
            lambda old, part: _advance(old, both[id(old.record)], part),
        )
        self.peek(list(ahead.values()))

    def update(self, updates: Sequence[Update]) -> None:
        """Masters, moments and working weights in place (``immediate``)."""
        self._run(updates, _update)

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
        partials = [np.zeros(-(-record.numel // BLOCK), np.float64) for record in records]
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

    def _run(self, updates: Sequence[Update], kernel: Callable[[Update, slice], None]) -> None:
        self._workers.run([partial(kernel, item, part) for item in updates for part in self._slices(item.record)])

    def _slices(self, record: ParamRecord) -> Iterator[slice]:
        blocks = -(-record.unit.layout.state_elements // BLOCK)
        size = max(SMALLEST_SLICE, -(-blocks // (self._workers.threads * SLICES_PER_WORKER))) * BLOCK
        for start in range(0, record.numel, size):
            yield slice(start, min(start + size, record.numel))


def gradient_array(record: ParamRecord, gradient: Slab) -> np.ndarray:
    """The parameter's flat gradient in a buffer."""
    return numpy_view(gradient.view(record.spec.dtype, record.place.gradient, record.numel))


def low_array(record: ParamRecord) -> np.ndarray:
    """The low halves of a split master, flat uint16."""
    return numpy_view(record.unit.states["low"].view(record.spec.working, record.place.state * 2, record.numel))


def sequential_sum(partials: np.ndarray) -> float:
    """Left-to-right sum in fp64 (numpy's own sum is pairwise, whose order depends on the length)."""
    total = 0.0
    for value in partials.tolist():
        total += value
    return total


def _arrays(item: Update, part: slice) -> tuple[np.ndarray, tuple[np.ndarray, ...], np.ndarray]:
    record = item.record
    states = tuple(array[part] for array in record.state_arrays(item.entry.states))
    return record.state_array("master")[part], states, gradient_array(record, item.gradient)[part]


def _commit(item: Update, part: slice) -> None:
    master, states, gradient = _arrays(item, part)
    rule, _, scalars, coefficient = item.entry
    kernels.commit(rule, master, states, gradient, item.record.gradient_kind, coefficient, scalars)


def _peek(item: Update, part: slice) -> None:
    master, states, gradient = _arrays(item, part)
    rule, _, scalars, coefficient = item.entry
    record = item.record
    weights = record.weight_array()[part]
    kernels.peek(
        rule, master, states, gradient, record.gradient_kind, coefficient, scalars, weights, record.weight_kind
    )


def _advance(old: Update, new: Update, part: slice) -> None:
    record = old.record
    if old.entry.rule is not new.entry.rule or old.entry.states != new.entry.states:
        _commit(old, part)
        _peek(new, part)
        return
    master, states, logged = _arrays(old, part)
    arrived = gradient_array(record, new.gradient)[part]
    kernels.advance(
        old.entry.rule,
        master,
        states,
        Pending(logged, record.gradient_kind, old.entry.coefficient, old.entry.scalars),
        Pending(arrived, record.gradient_kind, new.entry.coefficient, new.entry.scalars),
        record.weight_array()[part],
        record.weight_kind,
    )


def _update(item: Update, part: slice) -> None:
    record = item.record
    rule, _, scalars, coefficient = item.entry
    gradient = gradient_array(record, item.gradient)[part]
    states = tuple(array[part] for array in record.state_arrays(item.entry.states))
    weights = record.weight_array()[part]
    if "low" in record.unit.states:
        low = low_array(record)
        kernels.update_split(rule, weights, low[part], states, gradient, record.gradient_kind, coefficient, scalars)
        return
    master = record.state_array("master")[part] if "master" in record.unit.states else weights
    kernels.update(
        rule,
        master,
        states,
        gradient,
        record.gradient_kind,
        coefficient,
        scalars,
        weights,
        record.weight_kind,
    )
