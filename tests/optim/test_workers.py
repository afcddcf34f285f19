"""The worker pool: results, failures, forks, and how many threads there should be."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import traceback
import weakref

import pytest

from slideformer_backend.errors import StateError
from slideformer_backend.optim.workers import WorkerPool, default_threads


class OddError(Exception):
    """Something that only user code raises."""


@pytest.fixture
def pool():
    with WorkerPool(3) as pool:
        yield pool


def alive(prefix="slideformer-optim"):
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


def test_runs_everything_and_waits(pool):
    done = []
    for _ in range(50):
        pool.run([lambda i=i: done.append(i) for i in range(7)])
    assert sorted(done) == sorted(list(range(7)) * 50)
    pool.run([])


def test_threads_start_lazily_with_names_and_end():
    pool = WorkerPool(2, name="lazy-threads")
    assert not alive("lazy-threads")
    names = set()
    barrier = threading.Barrier(2, timeout=10)

    def job():
        barrier.wait()
        names.add(threading.current_thread().name)

    pool.run([job, job])
    assert names == {"lazy-threads-0", "lazy-threads-1"}
    assert all(thread.daemon for thread in alive("lazy-threads"))
    pool.close()
    pool.close()
    assert not alive("lazy-threads")
    with pytest.raises(StateError, match="closed"):
        pool.run([lambda: None])


def test_a_dropped_pool_ends_its_threads():
    pool = WorkerPool(2, name="dropped-pool")
    pool.run([lambda: None])
    del pool
    gc.collect()
    for thread in alive("dropped-pool"):
        thread.join(10)
    assert not alive("dropped-pool")


def test_exception_keeps_its_type_and_place(pool):
    def fail():
        raise OddError("here")

    with pytest.raises(OddError, match="here") as caught:
        pool.run([lambda: None, fail])
    assert any(frame.name == "fail" for frame in traceback.extract_tb(caught.value.__traceback__))
    done = []
    pool.run([lambda: done.append(1)])
    assert done == [1], "the pool works on after a failure"


def test_first_failure_in_job_order_wins_and_later_jobs_are_dropped():
    barrier = threading.Barrier(2, timeout=10)
    ran = []

    def first():
        barrier.wait()
        time.sleep(0.05)
        raise OddError("first")

    def second():
        barrier.wait()
        raise ValueError("second")

    with WorkerPool(2) as pool, pytest.raises(OddError, match="first"):
        pool.run([first, second, *[lambda: ran.append(1)] * 20])
    assert not ran


def test_no_job_runs_when_run_has_raised():
    running = threading.Semaphore(0)
    finished = []

    def slow():
        running.release()
        time.sleep(0.1)
        finished.append(1)

    def fail():
        assert running.acquire(timeout=10)
        raise OddError

    with WorkerPool(2) as pool, pytest.raises(OddError):
        pool.run([slow, fail])
    assert finished == [1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_base_exceptions_too(pool, error):
    def fail():
        raise error

    with pytest.raises(error):
        pool.run([fail])


@pytest.fixture
def ctrl_c():
    """Python's own handler, which it does not install where the process was started with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_interrupt_waits_for_running_jobs():
    ended, began, sent = [], threading.Event(), threading.Event()

    def slow():
        began.set()
        sent.wait(10)
        time.sleep(0.5)
        ended.append(1)

    def interrupt():
        began.wait(10)
        os.kill(os.getpid(), signal.SIGINT)
        sent.set()

    sender = threading.Thread(target=interrupt)
    sender.start()
    with WorkerPool(1) as pool:
        with pytest.raises(KeyboardInterrupt):
            pool.run([slow, lambda: ended.append(2)])
        assert ended == [1], "the running job ended first, the other never began"
    sender.join()


def test_several_callers_at_once(pool):
    sums = [0] * 4

    def caller(k):
        for _ in range(50):
            parts = []
            pool.run([lambda i=i, parts=parts: parts.append(i) for i in range(5)])
            sums[k] += sum(parts)

    threads = [threading.Thread(target=caller, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sums == [500] * 4


def test_a_job_may_run_jobs(pool):
    done = []
    pool.run([lambda: pool.run([lambda: done.append(1)] * 3)] * 6)
    assert len(done) == 18


def test_idle_pool_keeps_nothing_alive(pool):
    class Buffer:
        def use(self):
            return None

    buffer = Buffer()
    gone = weakref.ref(buffer)
    pool.run([buffer.use] * 6)
    del buffer
    gc.collect()
    deadline = time.monotonic() + 5
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone() is None


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("use", [True, False])
@pytest.mark.parametrize("busy", [True, False])
def test_fork_with_a_warm_pool(use, busy):
    """A forked child (a dataloader worker) neither hangs nor needs the parent's threads, even mid-run."""
    pool, started, release = WorkerPool(2), threading.Event(), threading.Event()
    pool.run([lambda: None] * 4)

    def hold():
        started.set()
        release.wait(30)

    background = threading.Thread(target=pool.run, args=([hold] * 4,))
    if busy:
        background.start()
        assert started.wait(10)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(20)
            done = []
            if use:
                pool.run([lambda: done.append(1)] * 5)
                pool.close()
            status = 0 if len(done) == (5 if use else 0) else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    release.set()
    if busy:
        background.join(10)
    done = []
    pool.run([lambda: done.append(1)] * 5)
    pool.close()
    assert status == 0
    assert len(done) == 5


def test_no_threads_is_refused():
    with pytest.raises(StateError, match="needs threads"):
        WorkerPool(0)


def place(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("cores", "files", "threads"),
    [
        (16, {}, 14),
        (8, {}, 7),
        (2, {}, 1),
        (1, {}, 1),
        (64, {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 62),
        (64, {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "400000 100000\n"}, 3),
        (64, {"proc/self/cgroup": "0::/host/path\n", "sys/fs/cgroup/cpu.max": "850000 100000\n"}, 8),
        (
            64,
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        (
            4,
            {
                "proc/self/cgroup": "3:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
    ],
)
def test_default_threads(monkeypatch, tmp_path, cores, files, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert default_threads(place(tmp_path, files)) == threads
