"""The board of a lane: queued work, what is needed first in front."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..storage import Ticket, Tracked

Waits = Mapping[str, "Ticket | None"]


class Job(NamedTuple):
    """One piece of work of a lane; see ``Lane.submit``."""

    run: Callable[[], None]
    ticket: Ticket
    after: Waits
    reads: Sequence[Tracked]
    writes: Sequence[Tracked]
    origin: dict[str, int] | None

    def is_ready(self) -> bool:
        """Whether everything it waits for is over."""
        return all(ticket is None or ticket.is_complete for ticket in self.after.values())


class Board:
    """Work in lines. A line keeps its order; of the lines whose first work is ready, the smallest goes first.

    Shared by a lane and its thread, so that neither keeps the other alive. One thread takes.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: dict[int, collections.deque[tuple[int, Job]]] = {}
        self._count = 0
        self._is_closed = False
        self._taken: Job | None = None

    def put(self, line: int, job: Job) -> None:
        """Queue ``job`` at the end of ``line``."""
        with self._changed:
            self._count += 1
            self._lines.setdefault(line, collections.deque()).append((self._count, job))
            self._changed.notify()

    def close(self) -> None:
        """No more work will come: ``take`` gives what is queued, then None."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def abandon(self) -> list[Job]:
        """As ``close``, but what is queued is given back and not run."""
        with self._changed:
            left = [job for queued in self._lines.values() for _, job in queued]
            self._lines.clear()
            self._is_closed = True
            self._changed.notify()
        return left

    def unfinished(self) -> list[Ticket]:
        """In a forked child, where nobody takes any more: tickets of what was queued or running in the parent."""
        jobs = [job for queued in self._lines.values() for _, job in queued]
        taken = [self._taken] if self._taken is not None else []
        return [job.ticket for job in [*taken, *jobs] if not job.ticket.is_issued]

    def take(self) -> Job | None:
        """The next piece of work; blocks while there is none. The one taken before is over."""
        with self._changed:
            self._taken = None
            while not self._lines:
                if self._is_closed:
                    return None
                self._changed.wait()
            line = self._choose()
            queued = self._lines[line]
            self._taken = queued[0][1]  # first, so that a fork finds it here or there
            _, job = queued.popleft()
            if not queued:
                del self._lines[line]
            return job

    def _choose(self) -> int:
        if len(self._lines) == 1:
            return next(iter(self._lines))
        for line in sorted(self._lines):  # whether work is ready is asked of the device: no oftener than need be
            if self._lines[line][0][1].is_ready():
                return line
        # Waiting for the oldest cannot deadlock: whatever it waits for was submitted before it.
        return min(self._lines, key=lambda line: self._lines[line][0][0])
