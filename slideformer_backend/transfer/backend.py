"""The two devices the one engine runs on: a CUDA device with streams, or host memory with threads."""

from __future__ import annotations

import time
from collections import Counter
from typing import Protocol, cast

import torch

from ..errors import UnsupportedError
from ..storage import Ticket, Tracked
from ..trace import Recorder
from .lane import Lane
from .monitor import Monitor
from .timer import StreamTimer

HOST = "main"
COMPUTE = "compute"
HOST_TRACK = "training thread"


class Backend(Protocol):
    """What the engine needs of a device. All lanes of an engine are created here.

    Lanes, with the overlap each buys:
        h2d: working weights and pending gradients host -> device, beside compute.
        d2h: gradients device -> host, beside h2d (PCIe is full duplex) and compute.
        out: boundary activations device -> host, beside the forward; they do not wait behind gradients.
        back: boundary activations host -> device, ahead of the backward; they do not wait behind weights.
        file_out: boundary activations to files, beside the copies of ``out`` and whatever ``store`` writes.
        file_back: boundary activations from files, beside the copies of ``back``.
        norms: sums of squares of arrived gradients, so that a clip does not wait behind queued updates.
        update: optimizer arithmetic on the host, beside the backward of earlier units.
        load: optimizer states from files, beside the updates of other units.
        store: optimizer states to files, beside both (a disk reads and writes at once).
        weights_in: working weights from files, ahead of ``h2d``; they do not wait behind states.
        weights_out: working weights to files; they do not wait behind states.
    """

    device: torch.device
    h2d: Lane
    d2h: Lane
    out: Lane
    back: Lane
    file_out: Lane
    file_back: Lane
    norms: Lane
    update: Lane
    load: Lane
    store: Lane
    weights_in: Lane
    weights_out: Lane
    monitor: Monitor | None
    waited: Counter[str]
    recorder: Recorder | None

    def record(self, recorder: Recorder | None) -> None:
        """Trace what is done from now on; None: no more."""

    def begin(self, what: str, unit: str) -> None:
        """For the trace: compute issued from now on is ``what`` (forward, recompute, backward) of ``unit``."""

    def end(self, what: str, unit: str) -> None:
        """See ``begin``."""

    def step(self) -> None:
        """For the trace: ``optimizer.step()`` is called now."""

    def mark(self, name: str) -> Ticket:
        """A ticket for all compute issued so far on the caller's current stream."""

    def order(self, wait_name: str, ticket: Ticket | None) -> None:
        """Compute issued from now on runs behind ``ticket``."""

    def synchronize(self, wait_name: str, ticket: Ticket | None) -> None:
        """Block the host until ``ticket`` is over."""

    def touch(self, what: str, *, reads: tuple[Tracked, ...] = (), writes: tuple[Tracked, ...] = ()) -> None:
        """Tell the monitor that compute accesses these buffers."""

    def touch_host(self, what: str, *, reads: tuple[Tracked, ...] = (), writes: tuple[Tracked, ...] = ()) -> None:
        """Tell the monitor that the training thread accesses these host buffers."""

    def busy(self) -> dict[str, float]:
        """Seconds that each lane has worked."""

    def stalls(self) -> dict[str, float]:
        """Seconds that compute has stood still, by what it waited for."""

    def close(self) -> None:
        """Finish and end all lanes."""


class _BackendBase:
    def __init__(self, device: torch.device, monitor: Monitor | None = None) -> None:
        self.device = device
        self.monitor = monitor
        self.h2d = self._transfers("h2d")
        self.d2h = self._transfers("d2h")
        self.out = self._transfers("out")
        self.back = self._transfers("back")
        self.file_out = Lane("file_out", monitor=monitor)
        self.file_back = Lane("file_back", monitor=monitor)
        self.norms = Lane("norms", monitor=monitor)
        self.update = Lane("update", monitor=monitor)
        self.load = Lane("load", monitor=monitor)
        self.store = Lane("store", monitor=monitor)
        self.weights_in = Lane("weights_in", monitor=monitor)
        self.weights_out = Lane("weights_out", monitor=monitor)
        self.waited: Counter[str] = Counter()
        self.recorder: Recorder | None = None

    def _transfers(self, name: str) -> Lane:
        """A lane for copies between host and device."""
        return Lane(name, monitor=self.monitor)

    def record(self, recorder: Recorder | None) -> None:
        self.recorder = recorder
        for lane in self._lanes():
            lane.recorder = recorder

    def begin(self, what: str, unit: str) -> None:
        if self.recorder is not None:
            self.recorder.begin(what, unit)

    def end(self, what: str, unit: str) -> None:
        if self.recorder is not None:
            self.recorder.end(what, unit)

    def step(self) -> None:
        if self.recorder is not None:
            self.recorder.step()

    def synchronize(self, wait_name: str, ticket: Ticket | None) -> None:
        if ticket is None or not self._observed(HOST, wait_name, ticket):
            return
        start = time.perf_counter()
        ticket.synchronize()
        end = time.perf_counter()
        self.waited[wait_name] += end - start  # type: ignore[assignment]  # a Counter of seconds
        if self.recorder is not None:
            self.recorder.span(HOST_TRACK, wait_name, start, end, kind="wait")
        if self.monitor is not None:
            self.monitor.merge(HOST, ticket)

    def touch(self, what: str, *, reads: tuple[Tracked, ...] = (), writes: tuple[Tracked, ...] = ()) -> None:
        if self.monitor is not None:
            self.monitor.issue(HOST, COMPUTE)
            self.monitor.access(COMPUTE, what, reads, writes)

    def busy(self) -> dict[str, float]:
        return {lane.name: lane.busy_seconds for lane in self._lanes()}

    def stalls(self) -> dict[str, float]:
        return dict(self.waited)

    def touch_host(self, what: str, *, reads: tuple[Tracked, ...] = (), writes: tuple[Tracked, ...] = ()) -> None:
        if self.monitor is not None:
            self.monitor.access(HOST, what, reads, writes)

    def close(self) -> None:
        for lane in self._lanes():
            lane.close()
        if self.recorder is not None:
            self.recorder.close()

    def _lanes(self) -> tuple[Lane, ...]:
        files = self.file_out, self.file_back, self.load, self.store, self.weights_in, self.weights_out
        return self.h2d, self.d2h, self.out, self.back, self.norms, self.update, *files

    def _observed(self, actor: str, wait_name: str, ticket: Ticket) -> bool:
        return self.monitor is None or self.monitor.wait(actor, wait_name, ticket)


class CudaBackend(_BackendBase):
    """One CUDA device. Compute runs on the stream that is current when it is issued (HAZARDS 5)."""

    def __init__(self, device: torch.device, monitor: Monitor | None = None) -> None:
        super().__init__(device, monitor)
        self._stalls = StreamTimer()

    def stalls(self) -> dict[str, float]:
        return self._stalls.seconds()

    def _transfers(self, name: str) -> Lane:
        return Lane(name, stream=torch.cuda.Stream(self.device), monitor=self.monitor)

    def mark(self, name: str) -> Ticket:
        ticket = Ticket(name)
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        ticket.issue(event)
        return ticket

    def order(self, wait_name: str, ticket: Ticket | None) -> None:
        if ticket is None or not self._observed(COMPUTE, wait_name, ticket):
            return
        recorder = self.recorder
        mark = recorder.mark_compute() if recorder is not None else 0.0
        start = time.perf_counter()
        stream = torch.cuda.current_stream(self.device)
        before = self._stalls.mark(stream)  # while the host waits below, the device has nothing to do
        ticket.wait_issued()
        self.waited[wait_name] += time.perf_counter() - start  # type: ignore[assignment]  # a Counter of seconds
        if ticket.event is not None:
            stream.wait_event(ticket.event)
        self._stalls.add(wait_name, before, self._stalls.mark(stream))
        if recorder is not None:
            recorder.span(COMPUTE, wait_name, mark, recorder.mark_compute(), kind="wait")
        if self.monitor is not None:
            self.monitor.merge(COMPUTE, ticket)


class CpuBackend(_BackendBase):
    """Host memory as the device: compute is the calling thread, so ordering it means blocking it."""

    def mark(self, name: str) -> Ticket:
        ticket = Ticket(name)
        if self.monitor is not None:
            self.monitor.issue(HOST, COMPUTE)
            self.monitor.finish(COMPUTE, ticket)
        ticket.issue()
        return ticket

    def order(self, wait_name: str, ticket: Ticket | None) -> None:
        if ticket is None or not self._observed(COMPUTE, wait_name, ticket):
            return
        start = time.perf_counter()
        ticket.synchronize()
        end = time.perf_counter()
        self.waited[wait_name] += end - start  # type: ignore[assignment]  # a Counter of seconds
        if self.recorder is not None:
            self.recorder.span(HOST_TRACK, wait_name, start, end, kind="wait")
        if self.monitor is not None:  # as on CUDA: compute is behind the ticket, the host is not
            self.monitor.merge(COMPUTE, ticket)


def backend_for(device: torch.device, monitor: Monitor | None = None) -> Backend:
    """The backend of ``device``; raises UnsupportedError for devices other than CUDA (or ROCm) and CPU."""
    if device.type == "cuda":
        index = cast("int | None", device.index)  # annotated as int, but None in torch.device("cuda")
        index = torch.cuda.current_device() if index is None else index
        return CudaBackend(torch.device("cuda", index), monitor)
    if device.type == "cpu":
        return CpuBackend(device, monitor)
    raise UnsupportedError(
        f"SlideFormer runs on one CUDA (or ROCm) device or on the CPU, found {device}; use another strategy there."
    )
