"""What a trace says in a few lines: how busy each track was, and the longest waits by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from slideformer_backend.trace import TRACKS, Timed


class Wait(NamedTuple):
    """All waits of one name on one track, in seconds."""

    track: str
    name: str
    times: int
    total: float
    longest: float


class Summary(NamedTuple):
    """Figures of a stretch of a trace.

    ``busy``: seconds in which a track worked; ``nbytes``: memory it moved; ``waits``: longest first.
    """

    seconds: float
    steps: int
    busy: dict[str, float]
    nbytes: dict[str, int]
    waits: list[Wait]


def summarise(spans: Sequence[Timed]) -> Summary:
    """Figures between the first and the last ``optimizer.step()`` (a whole number of steps); of all, if there are fewer
    than two. Spans that cross a border count with the part inside."""
    marks = [span.start for span in spans if span.kind == "step"]
    if len(marks) >= 2:
        first, last = marks[0], marks[-1]
    else:
        first = min((span.start for span in spans), default=0.0)
        last = max((span.end for span in spans), default=0.0)
    inside = [
        span._replace(start=max(span.start, first), end=min(span.end, last))
        for span in spans
        if span.end > first and span.start < last
    ]
    work: dict[str, list[Timed]] = defaultdict(list)
    waits: dict[tuple[str, str], list[float]] = defaultdict(list)
    for span in inside:
        if span.kind == "work":
            work[span.track].append(span)
        elif span.kind == "wait":
            waits[span.track, span.name].append(span.end - span.start)
    return Summary(
        seconds=last - first,
        steps=max(0, len(marks) - 1),
        busy={
            track: _union(work[track]) for track in [*TRACKS, *sorted(set(work).difference(TRACKS))] if track in work
        },
        nbytes={track: sum(span.nbytes for span in found) for track, found in work.items()},
        waits=sorted(
            (Wait(*key, len(times), sum(times), max(times)) for key, times in waits.items()),
            key=lambda wait: -wait.total,
        ),
    )


def describe(spans: Sequence[Timed], *, longest: int = 12) -> str:
    """The summary as text."""
    summary = summarise(spans)
    seconds = max(summary.seconds, 1e-12)
    steps = f" of {summary.steps} steps" if summary.steps else ""
    lines = [f"{summary.seconds:.3f} s{steps}", "busy:"]
    for track, busy in summary.busy.items():
        moved = f"  {summary.nbytes[track] / 1e9:.2f} GB" if summary.nbytes.get(track) else ""
        rate = f", {summary.nbytes[track] / busy / 1e9:.1f} GB/s while busy" if moved and busy else ""
        lines.append(f"  {track:<16} {busy / seconds:6.1%}{moved}{rate}")
    lines.append("waits (track, share of the time, count, longest):")
    for wait in summary.waits[:longest]:
        lines.append(
            f"  {wait.track:<16} {wait.total / seconds:6.1%} {wait.times:>6} {wait.longest * 1e3:9.2f} ms  {wait.name}"
        )
    return "\n".join(lines if summary.waits else lines[:-1])


def _union(spans: Iterable[Timed]) -> float:
    """Seconds covered by at least one of the spans."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total
