"""Lanes without threads: one random interleaving per seed, as late or as early as the waits allow.

Work runs when somebody waits for it, or when the scheduler rolls it. Everything happens on one thread, so a run is
fast and can be repeated exactly; a wait for work that can never run is an error instead of a hang.
"""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

from slideformer_backend.engine import engine as engine_module
from slideformer_backend.transfer import Monitor, Ticket
from slideformer_backend.transfer import backend as backend_module
from slideformer_backend.transfer.board import Job
from slideformer_backend.transfer.lane import Lane


class Scheduler:
    """Decides when queued work runs. ``eagerness`` is the chance that something runs at each submission."""

    def __init__(self, seed: int, eagerness: float) -> None:
        self.random = random.Random(seed)
        self.eagerness = eagerness
        self.lanes: list[SimulatedLane] = []

    def roll(self) -> None:
        """Maybe run some queued work."""
        while self.random.random() < self.eagerness:
            ready = [lane for lane in self.lanes if lane.jobs and not lane.is_busy]
            if not ready:
                return
            self.random.choice(ready).run_one()


class SimulatedTicket(Ticket):
    """A ticket whose wait runs the work."""

    __slots__ = ("_lane",)

    def __init__(self, name: str, lane: SimulatedLane) -> None:
        super().__init__(name)
        self._lane = lane

    @property
    def is_complete(self) -> bool:
        self._lane.scheduler.roll()
        return self.is_issued

    def wait_issued(self) -> None:
        while not self.is_issued:
            self._lane.run_one()
        if self.error is not None:
            raise self.error


class SimulatedLane(Lane):
    """A lane that runs its work on the waiting thread."""

    def __init__(self, name: str, scheduler: Scheduler, monitor: Monitor | None) -> None:
        super().__init__(name, monitor=monitor)
        self.scheduler = scheduler
        self.jobs: collections.deque[Job] = collections.deque()
        self.is_busy = False
        scheduler.lanes.append(self)

    def submit(
        self, name, run, *, submitter="main", after=None, reads=(), writes=(), keep: Any = None, **lines: Any
    ) -> Ticket:
        ticket = SimulatedTicket(name, self)
        ticket.keep = keep
        origin = self.monitor.fork(submitter) if self.monitor is not None else None
        self.jobs.append(Job(run, ticket, after or {}, reads, writes, origin))
        self.scheduler.roll()
        return ticket

    def run_one(self) -> None:
        """Run the oldest piece of work, and first what it waits for."""
        if self.is_busy or not self.jobs:
            raise AssertionError(f"deadlock on lane {self.name}")
        self.is_busy = True
        try:
            self.execute(self.jobs.popleft())
        finally:
            self.is_busy = False

    def close(self) -> None:
        while self.jobs:
            self.run_one()


class InlineWorkers:
    """Stands for the worker pool: runs jobs on the caller."""

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads

    def run(self, jobs) -> None:
        for job in jobs:
            job()

    def close(self) -> None:
        pass


@contextlib.contextmanager
def simulated(seed: int, eagerness: float = 0.5) -> Iterator[Scheduler]:
    """Engines attached inside have simulated lanes."""
    scheduler = Scheduler(seed, eagerness)

    def make_lane(name: str, *, stream: Any = None, monitor: Monitor | None = None) -> Lane:
        return SimulatedLane(name, scheduler, monitor)

    with (
        mock.patch.object(backend_module, "Lane", make_lane),
        mock.patch.object(engine_module, "WorkerPool", InlineWorkers),
    ):
        yield scheduler
