"""A system that fails on purpose."""

from __future__ import annotations

import errno
import os
import threading
from random import Random

from slideformer_backend.storage import System

FAULTS = ("ENOSPC", "EIO", "EINTR", "EACCES", "short", "nothing")
MOVES = ("read_at", "write_at")


class FaultySystem(System):
    """Injects ``fault`` into the calls whose numbers are in ``at`` (all calls are counted, from 0).

    ``short`` moves a part of what was asked for, ``nothing`` moves nothing and says so; on other calls than reads and
    writes both do nothing special. ``injected`` lists what happened.
    """

    def __init__(self, at: set[int] = frozenset(), fault: str = "EIO", seed: int = 0) -> None:
        self.at = at
        self.fault = fault
        self.calls: list[str] = []
        self.injected: list[str] = []
        self._random = Random(seed)
        self._lock = threading.Lock()

    def __getattribute__(self, name: str):
        found = super().__getattribute__(name)
        if name not in vars(System) or name.startswith("_"):
            return found

        def call(*arguments):
            return self._call(name, found, arguments)

        call.__name__ = name
        return call

    def _call(self, name, function, arguments):
        with self._lock:
            number = len(self.calls)
            self.calls.append(name)
            is_due = number in self.at and (self.fault not in ("short", "nothing") or name in MOVES)
            if is_due:
                self.injected.append(name)
            part = self._random.random()
        if not is_due:
            return function(*arguments)
        if self.fault == "nothing":
            return 0
        if self.fault == "short":
            fd, buffer, offset = arguments
            return function(fd, buffer[: int(part * len(buffer)) // 512 * 512], offset)
        if name == "close":
            function(*arguments)  # as close(2) does: the descriptor is gone, whatever it says
        code = getattr(errno, self.fault)
        raise OSError(code, os.strerror(code))
