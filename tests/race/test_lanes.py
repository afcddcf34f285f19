"""Tickets, lanes and the monitor by themselves."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from slideformer_backend.errors import StateError
from slideformer_backend.storage import Tracked
from slideformer_backend.transfer import CpuBackend, Monitor, Ticket
from slideformer_backend.transfer.backend import CudaBackend
from slideformer_backend.transfer.lane import Lane

CPU = torch.device("cpu")


class Failed(ArithmeticError):
    pass


def _raise() -> None:
    raise Failed("on the lane")


@pytest.fixture
def lane():
    made = Lane("test")
    yield made
    made.close()


def test_lane_runs_in_order_and_a_ticket_tells_when(lane):
    gate, order = threading.Event(), []
    first = lane.submit("first", lambda: (gate.wait(), order.append(1)))
    second = lane.submit("second", lambda: order.append(2))
    assert not first.is_complete
    assert not second.is_issued
    assert "pending" in repr(second)
    gate.set()
    second.synchronize()
    assert first.is_complete
    assert order == [1, 2]
    assert "issued" in repr(first)


def test_the_smallest_line_whose_work_is_ready_goes_first(lane):
    gate, other, order = threading.Event(), Ticket("other"), []
    lane.submit("busy", gate.wait)
    for line, after in ((3, None), (1, other), (2, None)):
        last = lane.submit("work", partial(order.append, line), line=line, after={"work after other": after})
    assert not last.is_issued
    lane.submit("opens", other.issue, line=4)
    gate.set()
    lane.close()
    assert order == [2, 3, 1]


def test_a_device_that_waits_for_the_host_stands_still(monkeypatch):
    """A host that cannot issue because an update is not there yet is a stall like any other: it counts."""
    backend, ticket = CudaBackend.__new__(CudaBackend), Ticket("update")
    backend.device, backend.monitor, backend.recorder, backend.waited = CPU, None, None, Counter()
    found = []
    timer = SimpleNamespace(mark=lambda stream: time.perf_counter(), add=lambda *span: found.append(span))
    backend._stalls = timer
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    threading.Timer(0.1, ticket.issue).start()
    backend.order("compute after update", ticket)
    ((name, start, end),) = found
    assert name == "compute after update"
    assert end - start > 0.05


def test_lane_waits_for_other_lanes(lane):
    other, gate, order = Lane("other"), threading.Event(), []
    earlier = other.submit("earlier", lambda: (gate.wait(), order.append("earlier")))
    later = lane.submit("later", lambda: order.append("later"), after={"later after earlier": earlier, "none": None})
    gate.set()
    later.synchronize()
    assert order == ["earlier", "later"]
    other.close()


def test_exception_keeps_its_type_and_stops_what_follows(lane):
    ran = []
    failed = lane.submit("failing", _raise)
    follower = lane.submit("follower", lambda: ran.append(1), after={"follower after failing": failed})
    independent = lane.submit("independent", lambda: ran.append(2))
    independent.synchronize()
    for ticket in (failed, follower):
        with pytest.raises(Failed, match="on the lane"):
            ticket.synchronize()
        assert "failed" in repr(ticket)
    assert ran == [2]


def test_a_host_lane_drops_what_it_kept_when_the_work_is_over(lane):
    buffer = torch.zeros(3)
    alive = weakref.ref(buffer)
    ticket = lane.submit("copy", lambda: None, keep=buffer)
    del buffer
    ticket.synchronize()
    gc.collect()
    assert alive() is None


def test_close_finishes_queued_work_and_ends_the_thread(lane):
    done = []
    for number in range(20):
        lane.submit("work", lambda number=number: (time.sleep(0.001), done.append(number)))
    thread = lane._thread
    lane.close()
    lane.close()
    assert done == list(range(20))
    assert not thread.is_alive()


def test_an_abandoned_lane_ends_its_thread():
    lane = Lane("abandoned")
    lane.submit("work", lambda: None).synchronize()
    thread = lane._thread
    del lane
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_a_forked_child_gets_a_fresh_thread(lane):
    lane.submit("warm", lambda: None).synchronize()
    child = os.fork()
    if child == 0:
        lane.submit("in the child", lambda: None).synchronize()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_ticket_of_nothing_is_no_wait():
    backend = CpuBackend(CPU)
    backend.order("x after y", None)
    backend.synchronize("x after y", None)
    backend.close()


class _Checked:
    def __init__(self, **options) -> None:
        self.monitor = Monitor(**options)
        self.backend = CpuBackend(CPU, self.monitor)
        self.buffer = Tracked("buffer", torch.zeros(4))


@pytest.fixture
def checked():
    made = _Checked()
    yield made
    made.backend.close()


def test_reading_before_a_transfer_is_a_race_whatever_the_timing(checked):
    ticket = checked.backend.h2d.submit("transfer", lambda: None, writes=(checked.buffer,))
    ticket.synchronize()  # not through the backend: over in fact, and not ordered
    with pytest.raises(StateError, match=r"race: use \(compute\) uses buffer before transfer \(h2d\)"):
        checked.backend.touch("use", reads=(checked.buffer,))
    checked.backend.order("compute after transfer", ticket)
    checked.backend.touch("use", reads=(checked.buffer,))


def test_a_submission_does_not_order_compute(checked):
    checked.backend.touch("kernel", writes=(checked.buffer,))
    ticket = checked.backend.d2h.submit("transfer", lambda: None, reads=(checked.buffer,))
    with pytest.raises(StateError, match="race: transfer"):
        ticket.synchronize()
    after = {"d2h after compute": checked.backend.mark("kernel")}
    checked.backend.d2h.submit("transfer", lambda: None, after=after, reads=(checked.buffer,)).synchronize()


def test_compute_issued_after_the_mark_is_not_covered_by_it(checked):
    mark = checked.backend.mark("earlier kernels")
    checked.backend.touch("later kernel", writes=(checked.buffer,))
    ticket = checked.backend.d2h.submit("t", lambda: None, after={"d2h after compute": mark}, reads=(checked.buffer,))
    with pytest.raises(StateError, match="race"):
        ticket.synchronize()


def test_host_access_after_a_submission_is_not_covered_by_it(checked):
    ticket = checked.backend.update.submit("update", lambda: None, reads=(checked.buffer,))
    ticket.synchronize()
    with pytest.raises(StateError, match="race"):
        checked.backend.touch_host("user's write", writes=(checked.buffer,))


def test_ordering_compute_does_not_order_the_host(checked):
    ticket = checked.backend.h2d.submit("transfer", lambda: None, writes=(checked.buffer,))
    checked.backend.order("compute after transfer", ticket)
    with pytest.raises(StateError, match="race"):
        checked.backend.touch_host("user's read", reads=(checked.buffer,))
    checked.backend.synchronize("host waits for transfer", ticket)
    checked.backend.touch_host("user's read", reads=(checked.buffer,))


def test_what_the_host_waited_for_is_before_compute_it_issues(checked):
    ticket = checked.backend.h2d.submit("transfer", lambda: None, writes=(checked.buffer,))
    checked.backend.synchronize("host waits for transfer", ticket)
    checked.backend.touch("kernel", reads=(checked.buffer,))


def test_writing_while_another_lane_reads_is_a_race(checked):
    checked.backend.d2h.submit("reader", lambda: None, reads=(checked.buffer,)).synchronize()
    ticket = checked.backend.h2d.submit("writer", lambda: None, writes=(checked.buffer,))
    with pytest.raises(StateError, match=r"race: writer \(h2d\) writes buffer while reader \(d2h\) may still read it"):
        ticket.synchronize()


def test_a_wait_left_out_is_seen(checked):
    checked.monitor.skip = "compute after transfer"
    ticket = checked.backend.h2d.submit("transfer", lambda: None, writes=(checked.buffer,))
    checked.backend.order("compute after transfer", ticket)
    assert checked.monitor.waits_seen == {"compute after transfer"}
    with pytest.raises(StateError, match="race"):
        checked.backend.touch("use", reads=(checked.buffer,))
    ticket.synchronize()


def test_spoiled_buffers_hold_nan(checked):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        buffer = Tracked("buffer", torch.zeros(8, dtype=dtype).view(torch.uint8))
        checked.monitor.spoil(buffer)
        assert buffer.flat.view(dtype).isnan().all()


def test_ticket_error_reaches_every_waiter():
    ticket = Ticket("work")
    ticket.issue(error=Failed("once"))
    for _ in range(2):
        with pytest.raises(Failed):
            ticket.wait_issued()
    assert ticket.is_complete


ENDS = """
import sys, time, torch
from slideformer_backend.transfer.lane import Lane
torch.set_num_threads(1)
lane = Lane("update")
started = []
def work():
    started.append(True)
    print("begun", flush=True)
    for _ in range(3):  # kernels without the GIL, which it asks for again while the interpreter goes
        torch.sort(torch.rand(3_000_000))
tickets = [lane.submit(f"work {number}", work) for number in range(50)]
while not started:
    time.sleep(0.001)
if len(sys.argv) > 1:
    raise SystemExit(3)
"""


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["fails"], 3)])
def test_a_process_ends_while_a_lane_works(arguments, status):
    """A thread cut off inside a kernel aborts the process; work that has not begun is not waited for."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS, *arguments], capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.returncode, done.stderr) == (status, "")
    assert done.stdout.count("begun") < 50
