"""Lanes: queues of work on a thread of their own. On CUDA a copy lane issues to its stream."""

from __future__ import annotations

import atexit
import collections
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import StateError
from ..storage import Ticket, Tracked
from ..storage.ticket import forked_while
from ..trace import Recorder
from .board import Board, Job, Waits
from .monitor import Monitor
from .timer import StreamTimer

EXIT_SECONDS = 30.0
"""How long the end of the process waits for work that is running."""


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy without blocking the host; the ticket of the operation says when it is over."""
    target.copy_(source, non_blocking=True)


class Lane:
    """Runs submitted work, each piece behind the tickets it names: in order, or by line (``Board``).

    Work is submitted by the training or the autograd thread, which never blocks here; waiting for other lanes happens
    on the lane's thread (host operations) or on its stream (device operations). The first exception is kept by its
    ticket, and every later piece of work that waits for that ticket fails with it. The thread starts with the first
    submission and is forgotten by a forked child, which gets a fresh one if it ever submits.
    """

    def __init__(self, name: str, *, stream: torch.cuda.Stream | None = None, monitor: Monitor | None = None) -> None:
        self.name = name
        self.stream = stream
        self.monitor = monitor
        self._worked = 0.0
        self.waited: collections.Counter[str] = collections.Counter()
        """Seconds that the lane's thread has waited for others to do or to issue their work."""
        self._timer = StreamTimer() if stream is not None else None
        self.recorder: Recorder | None = None
        self._begin()
        self._thread: threading.Thread | None = None
        self._in_flight: collections.deque[Ticket] = collections.deque()
        _LANES.add(self)

    def _begin(self) -> None:
        self._board = Board()
        # a lane that nobody holds any more ends its thread
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
        """Queue ``run``.

        Args:
            name: for messages and traces.
            run: the work. On a stream lane it is called inside the stream's context and only issues device work.
            submitter: the actor that submits (for the monitor).
            after: named tickets the work must follow; the names are those of the mutation test.
            reads: buffers the work reads.
            writes: buffers the work writes.
            keep: anything that must stay alive until the device has finished.
            line: work of one line stays in order; among lines with ready work the smallest goes first.

        Returns:
            The ticket of the work.
        """
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

    @property
    def busy_seconds(self) -> float:
        """How long the lane has worked: its stream on CUDA, else its thread. Waits do not count."""
        return self._worked if self._timer is None else self._timer.seconds().get(self.name, 0.0)

    def close(self) -> None:
        """Finish what is queued, then end the thread; work submitted later starts another."""
        thread, self._thread = self._thread, None
        self._stop()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._begin()
        self._in_flight.clear()

    def abandon(self) -> threading.Thread | None:
        """The process ends: what has not begun never will. Returns the thread, which ends after its present work."""
        thread, self._thread = self._thread, None
        self._stop.detach()
        for job in self._board.abandon():
            job.ticket.issue(error=StateError(f"{job.ticket.name}: the process ended first"))
        self._begin()
        return thread

    def forget_thread(self) -> None:
        """In a forked child: the thread did not survive, and what was queued is the parent's; whoever waits is told."""
        self._thread = None
        for ticket in self._board.unfinished():
            ticket.issue(error=forked_while(ticket.name))
        self._stop.detach()
        self._begin()
        self._in_flight.clear()

    def execute(self, job: Job) -> None:
        """Run one piece of work; never raises."""
        event = begun = None
        recorder = self.recorder
        try:
            if self.monitor is not None:
                self.monitor.start(self.name, job.origin)
            for wait_name, ticket in job.after.items():
                if ticket is not None:
                    self._follow(wait_name, ticket)
            if self.monitor is not None:
                self.monitor.access(self.name, job.ticket.name, job.reads, job.writes)
            start = time.perf_counter()
            if self.stream is None or self._timer is None:
                job.run()
            else:
                with torch.cuda.stream(self.stream):
                    begun = self._timer.mark(self.stream)
                    job.run()
                    event = torch.cuda.Event(blocking=True, enable_timing=True)
                    event.record(self.stream)
                self._timer.add(self.name, begun, event)
            end = time.perf_counter()
            self._worked += end - start
            if recorder is not None:
                begin, over = (start, end) if event is None or begun is None else (begun, event)
                recorder.span(self.name, job.ticket.name, begin, over, nbytes=_moved(job, is_copy=event is not None))
        except BaseException as error:  # the ticket carries it to whoever waits
            job.ticket.issue(error=error)
            return
        if self.monitor is not None:
            self.monitor.finish(self.name, job.ticket)
        if event is not None:
            self._hold(job.ticket)
        else:
            job.ticket.keep = None
        job.ticket.issue(event)

    def _follow(self, wait_name: str, ticket: Ticket) -> None:
        if self.monitor is not None and not self.monitor.wait(self.name, wait_name, ticket):
            return
        recorder = self.recorder
        start = recorder.mark(self.stream) if recorder is not None else None
        before = time.perf_counter()
        ticket.wait_issued()
        self.waited[wait_name] += time.perf_counter() - before  # type: ignore[assignment]  # a Counter of seconds
        if ticket.event is not None:
            if self.stream is not None:
                self.stream.wait_event(ticket.event)
            else:
                ticket.event.synchronize()
        if recorder is not None and start is not None:
            recorder.span(self.name, wait_name, start, recorder.mark(self.stream), kind="wait")
        if self.monitor is not None:
            self.monitor.merge(self.name, ticket)

    def _hold(self, ticket: Ticket) -> None:
        self._in_flight.append(ticket)
        while len(self._in_flight) > 1 and self._in_flight[0].is_complete:
            self._in_flight.popleft().keep = None


def _moved(job: Job, *, is_copy: bool) -> int:
    """Bytes that a piece of work moves: a copy no more than its smaller side, arithmetic all that it touches."""
    read = sum(buffer.flat.numel() for buffer in job.reads)
    written = sum(buffer.flat.numel() for buffer in job.writes)
    if is_copy:
        return min(read, written) if job.reads and job.writes else max(read, written)
    return read + 2 * written if read else written


_LANES: weakref.WeakSet[Lane] = weakref.WeakSet()


def _serve(lane_ref: weakref.ref[Lane], board: Board) -> None:
    # The thread holds its lane only while it works, so that an abandoned engine can be collected.
    while (job := board.take()) is not None:
        lane = lane_ref()
        if lane is None:
            return
        lane.execute(job)
        del job, lane


def _forget_threads() -> None:
    for lane in list(_LANES):
        lane.forget_thread()


def _end_threads() -> None:
    """Before the interpreter goes: a thread that comes back to it from a kernel later is cut off there, and the process
    aborts."""
    threads = [lane.abandon() for lane in list(_LANES)]
    deadline = time.monotonic() + EXIT_SECONDS
    for thread in threads:
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(_end_threads)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
