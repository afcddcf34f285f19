"""A timeline of a run: what each lane, the device and the training thread did when, and who waited for what.

The recorder is attached to a running engine (config key ``trace``, or ``Backend.record``); without one, nothing here is
called. Spans are kept as pairs of marks: seconds of the host clock, or CUDA events recorded on the stream that does the
work, so that tracing adds no synchronisation. They are turned into times when the trace is written, as JSON that
chrome://tracing and https://ui.perfetto.dev open.
"""

from __future__ import annotations

import atexit
import gzip
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch

from slideformer_backend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

Kind = Literal["work", "wait", "step"]
Mark: TypeAlias = "float | torch.cuda.Event"

COMPUTE = "compute"
TRACKS = (COMPUTE, "training thread", "h2d", "d2h", "out", "back", "file_out", "file_back", "norms", "update", "load",
          "store", "weights_in", "weights_out")  # fmt: skip
"""Known tracks, in the order in which a viewer shows them; others follow."""

LIMIT = 500_000
"""Spans kept; a trace of more is too large for its viewers."""

_SHORTEST_WAIT = 1e-6
"""Seconds; shorter waits are not waits (the price of two marks)."""


class Span(NamedTuple):
    """One stretch of time on one track. ``nbytes``: memory moved, 0 where unknown."""

    track: str
    name: str
    kind: Kind
    start: Mark
    end: Mark
    nbytes: int = 0


class Timed(NamedTuple):
    """A span with its times known: seconds since the recording began."""

    track: str
    name: str
    kind: Kind
    start: float
    end: float
    nbytes: int


class Recorder:
    """Collects spans of one engine; safe to call from any thread.

    Args:
        device: the engine's device; on CUDA, work of streams is timed by events.
        path: where ``write`` puts the trace, at the latest when Python exits; ``.gz`` compresses. None: nowhere.
    """

    def __init__(self, device: torch.device, path: str | os.PathLike[str] | None = None) -> None:
        self.device = device
        self.path = None if path is None else _unclaimed(Path(path))
        self.dropped = 0
        self._spans: list[Span] = []
        self._open: dict[tuple[str, str], Mark] = {}
        self._pid = os.getpid()
        self._anchors = [self._anchor()]
        if self.path is not None:
            atexit.register(self.close)

    def mark(self, stream: torch.cuda.Stream | None = None) -> Mark:
        """Now, on the host (``stream`` None); else the moment at which ``stream`` has done what it was given so far."""
        if stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def mark_compute(self) -> Mark:
        """Now, as compute sees it: on the caller's current stream, or on the calling thread of a CPU-only machine."""
        return self.mark(torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None)

    def span(self, track: str, name: str, start: Mark, end: Mark, *, kind: Kind = "work", nbytes: int = 0) -> None:
        """Keep one span."""
        if len(self._spans) >= LIMIT:
            self.dropped += 1
            return
        self._spans.append(Span(track, name, kind, start, end, nbytes))

    def begin(self, what: str, unit: str) -> None:
        """Compute issued from now on, until ``end`` with the same arguments, is ``what`` of ``unit``."""
        self._open[what, unit] = self.mark_compute()

    def end(self, what: str, unit: str) -> None:
        """See ``begin``; an end without a beginning (the recording started in between) is ignored."""
        start = self._open.pop((what, unit), None)
        if start is not None:
            self.span(COMPUTE, f"{what} of {unit}", start, self.mark_compute())

    def step(self) -> None:
        """``optimizer.step()`` is called now."""
        now = time.perf_counter()
        self.span("training thread", "optimizer.step", now, now, kind="step")

    def timed(self) -> list[Timed]:
        """All spans with their times, in order of their start. Waits for the device."""
        clock = self._clock()
        times = [
            Timed(span.track, span.name, span.kind, clock(span.start), clock(span.end), span.nbytes)
            for span in list(self._spans)
        ]
        kept = [span for span in times if span.kind != "wait" or span.end - span.start >= _SHORTEST_WAIT]
        return sorted(kept, key=lambda span: span.start)

    def write(self) -> Path | None:
        """Write the trace to ``path``; the path written, or None where there is nothing to write or nowhere."""
        if self.path is None or not self._spans or os.getpid() != self._pid:
            return None
        save(self.timed(), self.path, dropped=self.dropped)
        return self.path

    def close(self) -> None:
        """The engine stops: write the trace, say where and what is in it."""
        atexit.unregister(self.close)
        written = self.write()
        if written is not None:
            self._spans.clear()
            from slideformer_backend.trace_summary import describe

            print(f"[slideformer] trace: {written} (open it in https://ui.perfetto.dev)", file=sys.stderr)
            print(describe(load(written)), file=sys.stderr, flush=True)

    def _anchor(self) -> tuple[float, Mark]:
        """The same moment on the host's clock and on the device's."""
        if self.device.type != "cuda":
            now = time.perf_counter()
            return now, now
        torch.cuda.synchronize(self.device)
        event = self.mark_compute()
        torch.cuda.synchronize(self.device)
        return time.perf_counter(), event

    def _clock(self) -> _Clock:
        self._anchors = [self._anchors[0], self._anchor()]
        return _Clock(self._anchors[0], self._anchors[1])


class _Clock:
    """Seconds since the first anchor. The device's clock is scaled so that it agrees at the second one too."""

    def __init__(self, first: tuple[float, Mark], last: tuple[float, Mark]) -> None:
        self._origin, self._event = first
        self._scale = 1.0
        if not isinstance(self._event, float) and not isinstance(last[1], float):
            passed = self._event.elapsed_time(last[1]) / 1e3
            if passed > 0.5:  # below, the jitter of an anchor would outweigh the drift of the clocks
                self._scale = (last[0] - self._origin) / passed

    def __call__(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark - self._origin
        if isinstance(self._event, float):
            return 0.0
        return float(self._event.elapsed_time(mark)) / 1e3 * self._scale


def save(spans: Sequence[Timed], path: str | os.PathLike[str], *, dropped: int = 0) -> None:
    """Write spans as a Chrome trace."""
    tracks = [*TRACKS, *sorted({span.track for span in spans}.difference(TRACKS))]
    events: list[dict[str, Any]] = []
    for number, track in enumerate(tracks):
        events.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": track}})
        events.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}})
    for span in spans:
        event: dict[str, Any] = {
            "name": span.name,
            "cat": span.kind,
            "ph": "X",
            "pid": 1,
            "tid": tracks.index(span.track),
            "ts": round(span.start * 1e6, 3),
            "dur": round((span.end - span.start) * 1e6, 3),
        }
        if span.kind == "step":
            event |= {"ph": "i", "s": "g"}
        if span.nbytes:
            event["args"] = {"bytes": span.nbytes}
        events.append(event)
    content = json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"dropped": dropped}})
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(gzip.compress(content.encode()) if target.suffix == ".gz" else content.encode())


def load(path: str | os.PathLike[str]) -> list[Timed]:
    """The spans of a trace written by ``save``.

    Raises:
        OSError: the file cannot be read.
        ConfigError: it holds no such trace.
    """
    raw = Path(path).read_bytes()
    try:
        events = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)["traceEvents"]
        tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        return [
            Timed(
                tracks[event["tid"]],
                event["name"],
                event["cat"],
                event["ts"] / 1e6,
                (event["ts"] + event.get("dur", 0.0)) / 1e6,
                event.get("args", {}).get("bytes", 0),
            )
            for event in events
            if event["ph"] != "M"
        ]
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise ConfigError(f"{path} holds no trace of SlideFormer ({error!r}).") from error


_claimed: set[Path] = set()


def _unclaimed(path: Path) -> Path:
    """``path``, or one like it that no other engine of this process writes to."""
    name, dot, rest = path.name.partition(".")
    number, free = 1, path
    while free.absolute() in _claimed:
        number += 1
        free = path.with_name(f"{name}-{number}{dot}{rest}")
    _claimed.add(free.absolute())
    return free
