"""Which unit comes next: learned from the last pass, so that any model's own order is prefetched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum, auto

from .unit import Unit


class Phase(Enum):
    """What a unit is fetched for."""

    INFERENCE = auto()
    """Forward without gradients."""
    FORWARD = auto()
    """Forward with gradients; the backward starts with the last unit again."""
    BACKWARD = auto()
    """Recompute and backward. Nothing follows it: the next forward waits for ``step()``."""


class Schedule:
    """Successor of each visit, as seen last time; at first, registration order."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = list(units)
        self._next: dict[tuple[Phase, int], tuple[Phase, int]] = {}
        self._previous: tuple[Phase, int] | None = None
        self.first: Unit | None = units[0] if units else None
        self._backward_first = len(units) - 1
        last = len(self._units) - 1
        for number in range(last + 1):
            self._next[Phase.INFERENCE, number] = (Phase.INFERENCE, min(number + 1, last))
            self._next[Phase.FORWARD, number] = (
                (Phase.FORWARD, number + 1) if number < last else (Phase.BACKWARD, number)
            )
            if number:
                self._next[Phase.BACKWARD, number] = (Phase.BACKWARD, number - 1)
        self._number = {id(unit): number for number, unit in enumerate(self._units)}

    def visit(self, phase: Phase, unit: Unit) -> None:
        """``unit`` is entered now."""
        current = (phase, self._number[id(unit)])
        previous, self._previous = self._previous, current
        if previous == current:
            return
        starts = phase is not Phase.BACKWARD and (previous is None or previous[0] is not phase)
        if phase is Phase.BACKWARD and (previous is None or previous[0] is not phase):
            self._backward_first = current[1]
        if starts:
            self.first = unit
            if previous is not None and previous[0] is Phase.BACKWARD:
                self._next.pop(previous, None)  # the backward ended there: nothing to fetch ahead
        elif previous is not None:
            self._next[previous] = current

    def backward_order(self) -> Iterator[Unit]:
        """The units that the next backward should open, in that order."""
        if self._units:
            first = self._units[self._backward_first]
            yield first
            yield from self.ahead(Phase.BACKWARD, first, len(self._units) - 1)

    def ahead(self, phase: Phase, unit: Unit, depth: int) -> Iterator[Unit]:
        """The next ``depth`` units after a visit of ``unit``."""
        current: tuple[Phase, int] | None = (phase, self._number[id(unit)])
        for _ in range(depth):
            current = self._next.get(current) if current is not None else None
            if current is None:
                return
            yield self._units[current[1]]
