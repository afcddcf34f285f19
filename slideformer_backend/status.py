"""A live status line for a training run: progress, loss, tokens/s, memory, and which part waits for which.

The training script knows nothing of it. The training thread draws it, at most a few times a second, when a micro-batch
or an optimizer step ends: there is no thread here that a fork could catch at a bad moment.
"""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Protocol, TextIO

import psutil
import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

Mode = Literal["off", "auto", "bar", "lines"]

_BAR_INTERVAL = 0.25  # seconds between two drawings
_LINE_INTERVAL = 10.0
_WINDOW = 15.0  # seconds over which waits and tokens are averaged
_WAITS = re.compile(r" (waits for|after) ")
_SMALL = 0.005  # shares of time below this are not worth a word


class Report(Protocol):
    """What the line needs of an engine's report."""

    @property
    def repairs(self) -> int:
        """Predicted updates that were computed again."""

    @property
    def skipped(self) -> int:
        """Steps dropped because of non-finite gradients."""

    @property
    def busy(self) -> Mapping[str, float]:
        """Seconds that each lane has worked since the start."""

    @property
    def slot_bytes(self) -> int:
        """Device memory of all slots."""

    @property
    def waits(self) -> Mapping[str, float]:
        """Seconds waited since the start, by "A waits for B" or "A after B"."""


class Sample(NamedTuple):
    """The counters at one moment."""

    time: float  # seconds
    tokens: float
    waits: Mapping[str, float]
    busy: Mapping[str, float]


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def waiting(first: Sample, last: Sample) -> str:
    """Who waited for whom between two samples, as shares of that time, longest first."""
    span = max(last.time - first.time, 1e-9)
    shares = {reason: (seconds - first.waits.get(reason, 0.0)) / span for reason, seconds in last.waits.items()}
    longest = sorted(shares.items(), key=lambda item: -item[1])
    words = [f"{_WAITS.sub(' on ', reason)} {share:.0%}" for reason, share in longest if share >= _SMALL]
    return ", ".join(words) if words else "none"


def working(first: Sample, last: Sample) -> str:
    """How busy each lane was between two samples, as shares of that time."""
    span = max(last.time - first.time, 1e-9)
    shares = {name: (seconds - first.busy.get(name, 0.0)) / span for name, seconds in last.busy.items()}
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= _SMALL)


class StatusLine:
    """Shows how a run goes on.

    Args:
        report: gives the engine's figures; called on the training thread only.
        device: where the model computes.
        mode: `bar` for a terminal, `lines` for a log file, `auto` picks by what `stream` is.
        stream: where to draw (standard error).
        clock: seconds, monotonic; tests give their own.
        mfu: the share of the device's peak that is used; None where it is unknown.
    """

    def __init__(
        self,
        report: Callable[[], Report],
        device: torch.device,
        mode: Mode = "auto",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        mfu: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._mfu = mfu
        self._report = report
        self._device = device
        self._clock = clock
        self._console = Console(file=stream) if stream is not None else Console(stderr=True)
        if mode == "auto":
            mode = "bar" if self._console.is_terminal else "lines"
        self._mode = mode
        self._total: int | None = None
        self._steps = 0
        self._loss: torch.Tensor | float | None = None
        self._tokens: torch.Tensor | float = 0.0
        self._logged: dict[str, float] = {}
        self._started = clock()
        self._drawn = float("-inf")
        self._shown = 0
        self._is_complete = False
        self._samples: deque[Sample] = deque([Sample(self._started, 0.0, {}, {})])
        self._progress = Progress(
            TextColumn("[bold]training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            expand=True,
        )
        self._task = self._progress.add_task("training", total=None, start=False)
        self._live: Live | None = None

    def expect(self, total: int | None) -> None:
        """Tells how many optimizer steps the run will take (None: unknown)."""
        self._total = total
        self._progress.update(self._task, total=total)

    def micro_batch(self, loss: torch.Tensor | float) -> None:
        """A backward has been called on `loss` (a scalar; read only when the line is drawn)."""
        self._loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
        self._draw(last=False)

    def tokens(self, count: torch.Tensor | int) -> None:
        """`count` more tokens went into a training forward."""
        self._tokens = self._tokens + (count.detach() if isinstance(count, torch.Tensor) else count)

    def step(self) -> None:
        """An optimizer step has been taken."""
        self._steps += 1
        self._draw(last=False)

    def log(self, values: Mapping[str, object]) -> None:
        """Values that the script logged: its own loss and tokens per second are shown in place of ours."""
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                self._logged[name] = value.item()
            elif isinstance(value, (int, float)):
                self._logged[name] = float(value)
        if self._steps == self._total and not self._is_complete:
            # Scripts log a step's values after it: only now is the last step known in full.
            self._is_complete = True
            self._draw(last=True)

    def close(self) -> None:
        """Draws the last state and gives the terminal back; a second call does nothing."""
        if self._mode == "off":
            return
        if self._steps and self._shown != self._steps:
            self._draw(last=True)
        if self._live is not None:
            self._live.stop()
        self._mode = "off"

    def _draw(self, *, last: bool) -> None:
        now = self._clock()
        interval = _BAR_INTERVAL if self._mode == "bar" else _LINE_INTERVAL
        if self._mode == "off" or (now - self._drawn < interval and not last):
            return
        self._drawn, self._shown = now, self._steps
        text = self._words(now)
        if self._mode == "lines":
            of = f"/{self._total}" if self._total else ""
            self._console.print(f"step {self._steps}{of}  {text}", highlight=False, soft_wrap=True)
            return
        if self._live is None:
            self._progress.start_task(self._task)
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
            self._live.start()
        self._progress.update(self._task, completed=self._steps)
        self._live.update(Group(self._progress, Text(text, overflow="fold")), refresh=True)

    def _words(self, now: float) -> str:
        report = self._report()
        last = Sample(now, float(self._tokens), dict(report.waits), dict(report.busy))
        self._samples.append(last)
        while len(self._samples) > 2 and now - self._samples[1].time >= _WINDOW:
            self._samples.popleft()
        first = self._samples[0]
        loss = self._logged.get("loss", self._logged.get("train_loss"))
        if loss is None and self._loss is not None:
            loss = float(self._loss)
        speed = self._logged.get("tokens_per_second", (last.tokens - first.tokens) / max(now - first.time, 1e-9))
        mfu, busy = self._mfu(), working(first, last)
        parts = [
            f"loss {loss:.4f}" if loss is not None else "",
            f"{speed:.0f} tokens/s",
            f"MFU {mfu:.0%}" if mfu is not None else "",
            self._memory(report),
            f"skipped {report.skipped}" if report.skipped else "",
            f"repairs {report.repairs}" if report.repairs else "",
            f"busy: {busy}" if busy else "",
            f"waits: {waiting(first, last)}",
        ]
        return "  ".join(part for part in parts if part)

    def _memory(self, report: Report) -> str:
        host = gigabytes(psutil.Process().memory_info().rss)
        if self._device.type != "cuda":
            return f"window {gigabytes(report.slot_bytes)}  host {host}"
        now, peak = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        return f"GPU {gigabytes(now)} (peak {gigabytes(peak)})  host {host}"
