"""How long a CUDA stream works, or waits: pairs of events, added up once the device has passed them."""

from __future__ import annotations

import threading
from collections import Counter, deque

import torch


class StreamTimer:
    """Adds up stretches of streams by name without ever waiting for the device. Safe to call from any thread."""

    def __init__(self) -> None:
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds: Counter[str] = Counter()
        self._lock = threading.Lock()

    @staticmethod
    def mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
        """The moment at which ``stream`` has done what it was given so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def add(self, name: str, begun: torch.cuda.Event, over: torch.cuda.Event) -> None:
        """From one mark to the other the time counts for ``name``."""
        with self._lock:
            self._pending.append((name, begun, over))
            self._collect()

    def seconds(self) -> dict[str, float]:
        """What has been added up so far; stretches that the device has not finished are not in it."""
        with self._lock:
            self._collect()
            return dict(self._seconds)

    def _collect(self) -> None:
        while self._pending and self._pending[0][2].query():
            name, begun, over = self._pending.popleft()
            self._seconds[name] += begun.elapsed_time(over) / 1e3
