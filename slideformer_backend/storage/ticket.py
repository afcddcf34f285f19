"""Tickets: the only way to the result of an asynchronous operation."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Ticket:
    """One asynchronous operation: its completion, its exception, and what must stay alive until it is over.

    A ticket is *issued* when its lane has run it: on a host lane the work is then finished; on a CUDA copy lane the
    copy is queued on the stream and ``event`` marks its end. ``keep`` holds the buffers of a queued copy, so that no
    caching allocator hands them out again before the event (the lane drops the ticket once the event has passed).
    """

    __slots__ = ("__weakref__", "_issued", "clock", "error", "event", "keep", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.event: torch.cuda.Event | None = None
        self.error: BaseException | None = None
        self.keep: Any = None
        self.clock: dict[str, int] | None = None
        self._issued = threading.Event()

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "issued" if self._issued.is_set() else "pending"
        return f"<Ticket {self.name} {state}>"

    @property
    def is_issued(self) -> bool:
        """Whether the lane has run the operation (on CUDA: queued it)."""
        return self._issued.is_set()

    @property
    def is_complete(self) -> bool:
        """Whether the operation is over, on the device too. Raises nothing; a failed operation is complete."""
        return self._issued.is_set() and (self.event is None or self.event.query())

    @property
    def has_succeeded(self) -> bool:
        """Whether the operation is known to be over, without an error."""
        return self._issued.is_set() and self.error is None and (self.event is None or self.event.query())

    def issue(self, event: torch.cuda.Event | None = None, error: BaseException | None = None) -> None:
        """Called once, by the lane."""
        self.event = event
        self.error = error
        self._issued.set()

    def wait_issued(self) -> None:
        """Block the host until the lane has run the operation. Raises the operation's own exception."""
        self._issued.wait()
        if self.error is not None:
            raise self.error

    def synchronize(self) -> None:
        """Block the host until the operation is over. Raises the operation's own exception."""
        self.wait_issued()
        if self.event is not None:
            self.event.synchronize()
