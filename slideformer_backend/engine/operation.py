"""One piece of host arithmetic of a unit, kept until it has succeeded: what a failure prevented can be made up for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from ..storage import Ticket, Tracked

Use = Literal["", "read", "write"]
"""Whether an operation reads or writes the states of its unit."""


class Operation:
    """What ``UpdatePolicy.operate`` queues.

    Operations of a unit are a chain: each works on what the one before it has left, so none runs behind one that
    failed. Those behind a failure are therefore whole and in order, and can still be executed, on the same inputs.

    Attributes:
        step: the number of the ``step()`` whose weights the host holds for the unit until this operation runs; None if
            they are those of no step, or if what the user sees is not the working weights.
        has_begun: it ran, at least in part; doing it again would not give the same.
        ticket: set as soon as it is queued.
    """

    __slots__ = ("after", "has_begun", "name", "reads", "run", "states", "step", "ticket", "writes")
    ticket: Ticket

    def __init__(
        self,
        name: str,
        run: Callable[[], None],
        *,
        after: Mapping[str, Ticket | None],
        reads: Sequence[Tracked],
        writes: Sequence[Tracked],
        states: Use,
        step: int | None,
    ) -> None:
        self.name = name
        self.run = run
        self.after = after
        self.reads = reads
        self.writes = writes
        self.states: Use = states
        self.step = step
        self.has_begun = False

    def execute(self, before: Ticket | None) -> None:
        """Called by the lane; ``before`` is the operation before this one."""
        follow(before)
        self.has_begun = True
        self.run()
        self.run, self.after, self.reads, self.writes = nothing, {}, (), ()  # they hold gradient buffers


def nothing() -> None:
    """Only the order matters: what follows on the lane runs behind the transfer."""


def follow(before: Ticket | None) -> None:
    """An earlier piece of work of the same lane, which is over: raise what it raised."""
    if before is not None:
        before.wait_issued()


def has_failed(ticket: Ticket | None) -> bool:
    """Waits for it."""
    try:
        if ticket is not None:
            ticket.synchronize()
    except Exception:
        return True
    return False
