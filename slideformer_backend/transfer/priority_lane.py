"""The update lane: what the next forward needs first goes first."""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..storage import Tracked
from .lane import Job, Lane, Waits
from .monitor import Monitor
from .ticket import Ticket


class _Board:
    """Queued work, one FIFO per line; shared by a lane and its thread, so that neither keeps the other alive."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.lines: dict[int, collections.deque[tuple[int, Job]]] = {}
        self.count = 0
        self.is_closed = False

    def put(self, line: int, job: Job) -> None:
        with self.changed:
            self.count += 1
            self.lines.setdefault(line, collections.deque()).append((self.count, job))
            self.changed.notify()

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify()

    def take(self) -> Job | None:
        """The next piece of work; blocks while there is none. None once closed and empty."""
        with self.changed:
            while not self.lines:
                if self.is_closed:
                    return None
                self.changed.wait()
            ready = [line for line, queued in self.lines.items() if _is_ready(queued[0][1])]
            # With nothing ready, waiting for the oldest cannot deadlock: what it waits for was submitted before it.
            line = min(ready) if ready else min(self.lines, key=lambda line: self.lines[line][0][0])
            queued = self.lines[line]
            _, job = queued.popleft()
            if not queued:
                del self.lines[line]
            return job


class PriorityLane(Lane):
    """A host lane that runs, among the work whose waits are over, that of the smallest line first.

    A line is a unit: its own work stays in order; between units the order is that of the next forward, so that the
    forward follows the updates instead of waiting for all of them. Only one thread runs the lane.
    """

    def __init__(self, name: str, *, monitor: Monitor | None = None) -> None:
        super().__init__(name, monitor=monitor)

    def _begin(self) -> None:
        self._board = _Board()
        self._stop = weakref.finalize(self, self._board.close)
        self._stop.atexit = False

    def submit(
        self,
        name: str,
        run: Callable[[], None],
        *,
        submitter: str = "main",
        after: Waits | None = None,
        reads: Sequence[Tracked] = (),
        writes: Sequence[Tracked] = (),
        keep: Any = None,
        line: int = 0,
    ) -> Ticket:
        """Queue ``run`` on ``line``; everything else as in ``Lane.submit``."""
        ticket = Ticket(name)
        ticket.keep = keep
        origin = self.monitor.fork(submitter) if self.monitor is not None else None
        self._board.put(line, Job(run, ticket, after or {}, reads, writes, origin))
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(weakref.ref(self), self._board), name=f"slideformer-{self.name}", daemon=True
            )
            self._thread.start()
        return ticket

    def close(self) -> None:
        """Finish what is queued, then end the thread. Work submitted later starts a new one."""
        thread, self._thread = self._thread, None
        self._board.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._stop.detach()
        self._begin()


def _is_ready(job: Job) -> bool:
    return all(ticket is None or ticket.is_complete for ticket in job.after.values())


def _serve(lane_ref: weakref.ref[PriorityLane], board: _Board) -> None:
    torch.set_num_threads(1)  # of this thread: its work is spread over the workers
    while (job := board.take()) is not None:
        lane = lane_ref()
        if lane is None:
            return
        lane.execute(job)
        del job, lane
