"""What the kernel benchmarks share: timing, rows, inputs of a head. On a CPU sizes shrink: a smoke test."""

from __future__ import annotations

import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_REAL = DEVICE.type == "cuda"
TOKENS = 32768 if IS_REAL else 8
VOCABULARY = 128256 if IS_REAL else 640
BF16 = torch.bfloat16
START = time.perf_counter()
TURN = 4
"""Calls in a row of one of the functions that are compared."""


@dataclass
class Row:
    """One line of the table. Times in ms, bandwidths in TB/s, memory in GiB, the fewest bytes to move in MB."""

    what: str
    who: str
    ms: float | None = None
    share: float | None = None
    gib: float | None = None
    error: float | None = None
    tokens: int = 0
    hidden: int = 0
    note: str = ""
    moved: float | None = None

    def set_share(self, fewest: int, copy: float) -> None:
        """Bandwidth of the fewest possible bytes in the time measured, as a share of ``copy`` (TB/s)."""
        self.moved = fewest / 1e6
        self.share = fewest / self.ms / 1e9 / copy if self.ms else None

    def set_time(self, of: Callable[[int], object]) -> None:
        """The median time of ``of(i)``."""
        self.ms = median_ms(of, 9)

    def set_note(self, text: str) -> None:
        """Words in place of figures."""
        self.note = text


@dataclass
class Bench:
    """Collects rows; a failure becomes the note of its row."""

    budget: float
    rows: list[Row] = field(default_factory=list)
    copy: float = 0.0

    def is_over(self) -> bool:
        """Whether nothing more should be begun."""
        return time.perf_counter() - START > self.budget

    def add(self, what: str, who: str, measure: Callable[[Row], None]) -> Row:
        row = Row(what, who)
        if self.is_over():
            row.note = "left out: time is up"
        else:
            try:
                measure(row)
            except ImportError as error:
                row.note = f"not installed: {error.name}"
            except Exception as error:  # a row that fails is reported in its place; the others still count
                row.note = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
                traceback.print_exc(file=sys.stderr)
            if IS_REAL:
                torch.cuda.empty_cache()
        self.rows.append(row)
        print(line(row), flush=True)
        return row


def line(row: Row) -> str:
    """One row as text."""
    ms = f"{row.ms:9.3f} ms" if row.ms is not None else " " * 12
    share = f"{row.share:6.3f}" if row.share is not None else " " * 6
    gib = f"{row.gib:7.2f} GiB" if row.gib is not None else " " * 11
    error = f"{row.error:.1e}" if row.error is not None else " " * 7
    moved = f"{row.moved:7.2f} MB" if row.moved is not None else " " * 10
    who = f"{row.what:34s} {row.who:26s}"
    return f"{time.perf_counter() - START:5.0f}s {who} {ms} {share} {moved} {gib} {error} {row.note}"


def median_ms(function: Callable[[int], object], repeats: int = 15, pause: int = 4_000_000) -> float:
    """Median device time of ``function(i)``; ``pause``: clock cycles the device waits while the host queues."""
    return medians_ms([function], repeats, pause)[0]


def medians_ms(functions: Sequence[Callable[[int], object]], repeats: int = 15, pause: int = 4_000_000) -> list[float]:
    """As ``median_ms`` for several functions that take turns, so that clocks and heat are the same for all. A turn is
    several calls, the first of them not counted: each function then meets in the cache what it leaves there itself, and
    pays for writing that back."""
    for function in functions:
        for number in range(2):
            function(number)
    if not IS_REAL:
        return [_host_ms(function) for function in functions]
    pairs: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in functions]
    for start in range(0, repeats, TURN):
        for function, found in zip(functions, pairs, strict=True):
            function(start + 1)
            for number in range(start, min(start + TURN, repeats)):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(pause)
                begin.record()
                function(number)
                end.record()
                found.append((begin, end))
            torch.cuda.synchronize()
    return [float(statistics.median(begin.elapsed_time(end) for begin, end in found)) for found in pairs]


def _host_ms(function: Callable[[int], object]) -> float:
    started = time.perf_counter()
    function(0)
    return (time.perf_counter() - started) * 1e3


def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Fresh random values on the device."""
    return torch.randn(*shape, device=DEVICE, dtype=dtype).mul_(scale)


def relative_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference over norm of the truth."""
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def copy_bandwidth() -> float:
    """TB/s of a device-to-device copy, bytes read plus bytes written."""
    source = torch.randint(0, 2**31, (1 << (29 if IS_REAL else 10),), device=DEVICE, dtype=torch.int32)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda _: target.copy_(source)) / 1e9


class Head:
    """Two sets of inputs, used in turn."""

    def __init__(self, tokens: int, hidden: int) -> None:
        self.h = [randn(tokens, hidden).requires_grad_() for _ in range(2)]
        self.w = randn(VOCABULARY, hidden, scale=hidden**-0.5).requires_grad_()
        self.t = [torch.randint(0, VOCABULARY, (tokens,), device=DEVICE) for _ in range(2)]
        self.tokens, self.hidden = tokens, hidden

    def step(self, loss_of: Callable[..., torch.Tensor], number: int) -> None:
        """Forward and backward with gradients as autograd returns them."""
        h = self.h[number % 2]
        torch.autograd.grad(loss_of(h, self.w, self.t[number % 2]), (h, self.w))

    def products(self, number: int) -> None:
        """The three matrix products alone."""
        h, w = self.h[number % 2].detach(), self.w.detach()
        logits = h @ w.t()
        _ = logits @ w
        _ = logits.t() @ h

    def measure(self, row: Row, function: Callable[[int], object], base: float | None, repeats: int) -> None:
        """Time, its ratio to ``base``, and peak memory beyond inputs, gradients and the fp32 accumulator."""
        row.tokens, row.hidden = self.tokens, self.hidden
        row.ms = median_ms(function, repeats, 8_000_000)
        row.share = row.ms / base if base else None
        if not IS_REAL:
            return
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function(0)
        own = self.h[0].nbytes + self.w.nbytes + 4 * self.w.numel()
        row.gib = (torch.cuda.max_memory_allocated() - before - own) / 2**30
