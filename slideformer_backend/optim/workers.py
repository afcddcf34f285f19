"""A pool of threads for kernels that release the GIL."""

from __future__ import annotations

import math
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from slideformer_backend.errors import StateError

Job = Callable[[], None]


class _Batch:
    """The jobs of one :meth:`WorkerPool.run`: who is still running, and what failed first in job order."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._left = len(jobs)
        self._failed_at = len(jobs)
        self._failure: BaseException | None = None
        self._stopped = False
        self._changed = threading.Condition()

    def run(self, index: int) -> None:
        """Run one job on the calling thread, unless the batch was stopped or an earlier job failed."""
        failure = None
        if not self._stopped:
            try:
                self._jobs[index]()
            except BaseException as error:  # carried to the caller of run(), whatever it is
                failure = error
        with self._changed:
            if failure is not None:
                self._stopped = True
                if index < self._failed_at:
                    self._failed_at, self._failure = index, failure
            self._left -= 1
            if self._left == 0:
                self._changed.notify_all()

    def wait(self) -> None:
        """Return when no job is running or waiting; raise what failed. Buffers of the jobs are free then.

        An interrupt of the waiting thread stops jobs that have not begun and is raised after the running ones ended.
        """
        interrupt: BaseException | None = None
        while True:
            try:
                with self._changed:
                    while self._left:
                        self._changed.wait()
                break
            except BaseException as error:  # KeyboardInterrupt, or whatever a signal handler raised
                interrupt, self._stopped = error, True
        failure = interrupt if interrupt is not None else self._failure
        if failure is not None:
            try:
                raise failure
            finally:
                self._failure = failure = interrupt = None  # the traceback must not keep this frame alive


_Queue = queue.SimpleQueue["tuple[_Batch, int] | None"]


class WorkerPool:
    """Threads that run small batches of jobs. They start at the first :meth:`run` and are daemons.

    A forked child forgets the threads of its parent and starts its own when it needs them.
    """

    def __init__(self, threads: int | None = None, name: str = "slideformer-optim") -> None:
        """``threads``: how many, at least 1; None: :func:`default_threads`."""
        self.threads = default_threads() if threads is None else threads
        if self.threads < 1:
            raise StateError("A worker pool needs threads.", found=threads, expected="1 or more")
        self._name = name
        self._closed = False
        self._begin()
        _pools.add(self)

    def forget_threads(self) -> None:
        """Start from nothing in a forked child, which has neither the threads nor whoever held the locks."""
        self._stop.detach()
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._queue: _Queue = queue.SimpleQueue()
        self._started: list[threading.Thread] = []
        self._stop = weakref.finalize(self, _stop, self._queue, self._started)
        self._stop.atexit = False

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs on the pool and wait for them.

        Raises the exception of the first failing job (in job order) as it is; jobs that have not begun by then are
        dropped. When it returns or raises, no job is running. Several threads may call it at the same time; a job may
        call it too, and then runs its jobs itself.
        """
        if not jobs:
            return
        batch = _Batch(jobs)
        if threading.current_thread() in self._started:
            for index in range(len(jobs)):
                batch.run(index)
        else:
            self._submit(batch, len(jobs))
        batch.wait()

    def _submit(self, batch: _Batch, jobs: int) -> None:
        with self._lock:
            if self._closed:
                raise StateError("A worker pool was used after it had been closed.")
            for number in range(len(self._started), self.threads):
                name = f"{self._name}-{number}"
                thread = threading.Thread(target=_work, args=(self._queue,), name=name, daemon=True)
                thread.start()
                self._started.append(thread)
            for index in range(jobs):
                self._queue.put((batch, index))

    def close(self) -> None:
        """Stop the threads once the queued jobs are done, and wait for them. Closing twice does nothing."""
        with self._lock:
            self._closed = True
            self._stop()
        for thread in self._started:
            if thread is not threading.current_thread():
                thread.join()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _work(jobs: _Queue) -> None:
    while (item := jobs.get()) is not None:
        batch, index = item
        batch.run(index)
        del item, batch  # an idle thread keeps no buffers alive


def _stop(jobs: _Queue, threads: list[threading.Thread]) -> None:
    for _ in threads:
        jobs.put(None)


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


def _after_fork() -> None:
    for pool in list(_pools):
        pool.forget_threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def default_threads(root: Path = Path("/")) -> int:
    """Workers for this process: the cores it may use, less one for the main thread and from 16 cores one for loaders.

    Cores come from the scheduler's affinity mask and the CPU quota of the process's cgroup (v1 or v2) and its parents.
    ``root`` is where ``proc`` and ``sys`` are found. At least 1.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(root)
    if quota is not None:
        cores = min(cores, max(1, math.ceil(quota)))
    return max(1, cores - (2 if cores >= 16 else 1))


def _cgroup_quota(root: Path) -> float | None:
    """The tightest CPU limit, in cores, or None if there is none."""
    quotas: list[float] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            top, read = root / "sys/fs/cgroup", _quota_v2
        elif "cpu" in controllers.split(","):
            top, read = root / "sys/fs/cgroup/cpu", _quota_v1
        else:
            continue
        folder = top / path.lstrip("/")
        # Inside a container the path may be the host's: its folder is then missing, and the top is the container's own.
        for place in (folder, *folder.parents):
            quota = read(place)
            if quota is not None:
                quotas.append(quota)
            if place == top:
                break
    return min(quotas, default=None)


def _quota_v2(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _quota_v1(folder: Path) -> float | None:
    quota, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
