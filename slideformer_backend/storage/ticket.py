"""Tickets: the only way to the result of an asynchronous operation."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError

if TYPE_CHECKING:
    import torch

_LATCHES = threading.Lock()
"""Held while a ticket is issued or a first thread begins to wait for it; never for long."""


class Ticket:
    """One asynchronous operation: its completion, its exception, and what must stay alive until it is over.

    A ticket is *issued* when its lane has run it: on a host lane the work is then finished; on a CUDA copy lane the
    copy is queued on the stream and ``event`` marks its end. ``keep`` holds the buffers of a queued copy, so that no
    caching allocator hands them out again before the event (the lane drops the ticket once the event has passed).

    Thousands live and die per step, so a ticket is one object: the lock that threads wait at is made when one of them
    has to. (``threading.Event`` is six objects, and the more objects outlive a young collection, the more often Python
    stops everything for a full one.)
    """

    __slots__ = ("__weakref__", "_latch", "clock", "error", "event", "is_issued", "keep", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.event: torch.cuda.Event | None = None
        self.error: BaseException | None = None
        self.keep: Any = None
        self.clock: dict[str, int] | None = None
        self.is_issued = False
        """Whether the lane has run the operation (on CUDA: queued it)."""
        self._latch: threading.Lock | None = None

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "issued" if self.is_issued else "pending"
        return f"<Ticket {self.name} {state}>"

    @property
    def is_complete(self) -> bool:
        """Whether the operation is over, on the device too. Raises nothing; a failed operation is complete."""
        return self.is_issued and (self.event is None or self.event.query())

    @property
    def has_succeeded(self) -> bool:
        """Whether the operation is known to be over, without an error."""
        return self.is_issued and self.error is None and (self.event is None or self.event.query())

    def issue(self, event: torch.cuda.Event | None = None, error: BaseException | None = None) -> None:
        """Called once, by the lane."""
        self.event = event
        self.error = error
        with _LATCHES:
            self.is_issued = True
            latch, self._latch = self._latch, None
        if latch is not None:
            latch.release()

    def wait_issued(self) -> None:
        """Block the host until the lane has run the operation. Raises the operation's own exception."""
        if not self.is_issued:
            self._wait()
        if self.error is not None:
            raise self.error

    def synchronize(self) -> None:
        """Block the host until the operation is over. Raises the operation's own exception."""
        self.wait_issued()
        if self.event is not None:
            self.event.synchronize()

    def _wait(self) -> None:
        with _LATCHES:
            if self.is_issued:
                return
            latch = self._latch
            if latch is None:
                latch = self._latch = threading.Lock()
                latch.acquire()
        with latch:  # opened by issue(); each waiting thread lets the next one through
            return


def forked_while(what: str) -> UnsupportedError:
    """The error of an operation that a forked child waits for and only its parent finishes."""
    return UnsupportedError(
        f"{what}: the process was forked while this was in flight, and only the parent finishes it.",
        remedy="look at the weights in the parent, or before the fork: whoever looks waits for their update",
    )


if hasattr(os, "register_at_fork"):  # a child must not inherit it from a lane that happened to hold it
    os.register_at_fork(before=_LATCHES.acquire, after_in_parent=_LATCHES.release, after_in_child=_LATCHES.release)
