"""Visits of units: what ties a forward, and the graph that it leaves, to the window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .unit import Before, Unit

Reach = Callable[["Visit", torch.Tensor], torch.Tensor | None]
Leave = Callable[[Iterable[torch.Tensor | None]], None]


class Visit:
    """One forward of a unit with gradients. Alive while its graph is.

    ``holds_slot``: it is not recomputed, and its graph has saved views of the weight slot it ran with.
    """

    __slots__ = ("__weakref__", "before", "holds_slot", "is_done", "is_open", "is_wide", "steps", "unit")

    def __init__(self, unit: Unit, *, is_wide: bool, holds_slot: bool) -> None:
        self.unit = unit
        self.holds_slot = holds_slot
        self.steps = unit.steps
        self.is_wide = is_wide
        self.is_open = False
        self.is_done = False
        self.before: dict[int, Before] = {}
        """Of parameters that a forward wrote, by ``id`` of their records."""
        unit.visits.add(self)


class Second(Visit):
    """One backward of a unit with ``create_graph=True``: its graph, which another pass goes back through.

    That pass enters by a gradient of an input or of a weight and leaves by the gradients of the outputs, which is where
    the hooks that hold this are. The graph has saved views of the slot.

    Args:
        unit: whose backward it is.
        of: visits of which it is the backward.
    """

    __slots__ = ("_exits", "_left", "kept")

    def __init__(self, unit: Unit, of: Sequence[Visit]) -> None:
        super().__init__(unit, is_wide=any(visit.is_wide for visit in of), holds_slot=True)
        self.kept: list[Visit] = []
        """Forwards that are not recomputed. Their graphs have saved the parameters themselves, and in that pass may get
        gradients for activations inside only, which no hook announces."""
        for visit in of:
            self.kept += visit.kept if isinstance(visit, Second) else [visit] if visit.holds_slot else []
        self._exits = self._left = 0

    def begin(self) -> None:
        """A pass has entered."""
        self._left = 0

    def exit_by(self, gradient: torch.Tensor, leave: Callable[[Visit, Iterable[torch.Tensor | None]], None]) -> Any:
        """The gradient of an output, to be gone on with; the pass that comes back through the last such one leaves."""
        self._exits += 1

        def left(gradients: Iterable[torch.Tensor | None]) -> None:
            self._left += 1
            if self._left == self._exits:
                leave(self, gradients)

        return PostBackward.apply(left, gradient)[0]  # type: ignore[no-untyped-call]  # torch leaves it untyped


class OpenHook:
    """Gradient hook on what a unit has put out: the backward of the visit begins."""

    def __init__(self, reach: Reach, visit: Visit) -> None:
        self._reach = reach
        self._visit = visit

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return self._reach(self._visit, gradient)


class PostBackward(torch.autograd.Function):
    """Identity on a unit's inputs whose backward closes the visit."""

    @staticmethod
    def forward(ctx: Any, leave: Leave, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.leave = leave
        # as aliases: inputs returned as they are would be views that autograd lets nobody change in place, with a
        # message about this class. What a change breaks is said by ``Arguments``, which sees the shared version.
        return tuple(tensor.detach() for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.leave(gradients)
        return (None, *gradients)
