"""Visits of units: what ties a forward, and the graph that it leaves, to the window."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .unit import Before, Unit

Reach = Callable[["Visit", torch.Tensor | None], torch.Tensor | None]
Leave = Callable[["Visit", torch.Tensor | None], None]


_numbers = itertools.count()


class Visit:
    """One forward of a unit with gradients. Alive while its graph is.

    ``holds_slot``: it is not recomputed, and its graph has saved views of the weight slot it ran with.
    """

    # fmt: off
    __slots__ = (
        "__weakref__", "_nodes", "awaited", "before", "holds_slot", "is_done", "is_open", "is_wide", "number", "steps",
        "task", "unit",
    )
    # fmt: on

    def __init__(self, unit: Unit, *, is_wide: bool, holds_slot: bool) -> None:
        self.unit = unit
        self.holds_slot = holds_slot
        self.steps = unit.steps
        self.is_wide = is_wide
        self.is_open = False
        self.is_done = False
        self.task = -1
        """The pass that closed it last."""
        self.before: dict[int, Before] = {}
        """Of parameters that a forward wrote, by ``id`` of their records."""
        self._nodes: list[weakref.ref[Any]] = []
        self.awaited = 0
        """By how many of its nodes the running pass has yet to leave."""
        self.number = next(_numbers)
        unit.visits.add(self)

    def enter_by(self, tensor: torch.Tensor, leave: Leave) -> torch.Tensor:
        """An alias of an input behind a node that calls ``leave`` with the visit and the gradient, once complete."""
        alias: torch.Tensor = PostBackward.apply(functools.partial(leave, self), tensor)  # type: ignore[no-untyped-call]
        self._nodes.append(weakref.ref(alias.grad_fn))
        return alias

    def begin(self) -> None:
        """The running pass has reached the visit."""
        self.awaited = self._executed()

    def begin_again(self, task: int) -> None:
        """The running pass, ``task``, has reached the unit, and comes to this visit, if it does, once more."""
        if self.is_done and self.task != task and self._executed():
            self.is_done = False

    def _executed(self) -> int:
        """By how many of its nodes the running pass leaves."""
        nodes = [node for reference in self._nodes if (node := reference()) is not None]
        return sum(map(torch._C._will_engine_execute_node, nodes))

    def left(self) -> bool:
        """The pass leaves by a node. Whether it is the last one of those that the pass comes to."""
        self.awaited -= 1
        return self.awaited == 0


class Second(Visit):
    """One backward of a unit with ``create_graph=True``: its graph, which another pass goes back through.

    That pass enters by a gradient of an input or of a weight and leaves by the gradients of the outputs, which is where
    the hooks that hold this are. The graph has saved views of the slot.

    Args:
        unit: whose backward it is.
        of: visits of which it is the backward.
    """

    __slots__ = ("kept",)

    def __init__(self, unit: Unit, of: Sequence[Visit]) -> None:
        super().__init__(unit, is_wide=any(visit.is_wide for visit in of), holds_slot=True)
        self.kept: list[Visit] = []
        """Forwards that are not recomputed. Their graphs have saved the parameters themselves, and in that pass may get
        gradients for activations inside only, which no hook announces."""
        for visit in of:
            self.kept += visit.kept if isinstance(visit, Second) else [visit] if visit.holds_slot else []


class OpenHook:
    """Gradient hook on what a unit has put out: the backward of the visit begins."""

    def __init__(self, reach: Reach, visit: Visit) -> None:
        self._reach = reach
        self._visit = visit

    def __call__(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return self._reach(self._visit, gradient)


class PostBackward(torch.autograd.Function):
    """Identity on an input of a unit, whose backward tells that all of the unit's has been."""

    @staticmethod
    def forward(ctx: Any, leave: Callable[[torch.Tensor | None], None], tensor: torch.Tensor) -> torch.Tensor:
        ctx.leave = leave
        ctx.set_materialize_grads(False)
        # as an alias: an input returned as it is would be a view that autograd lets nobody change in place, with a
        # message about this class. What a change breaks is said by ``Arguments``, which sees the shared version.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, torch.Tensor | None]:
        ctx.leave(gradient)
        return None, gradient
