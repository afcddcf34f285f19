"""Every wait of the engine by name and place, so that each can be left out by itself."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

import slideformer_backend
from slideformer_backend.transfer import Monitor, Ticket

SOURCE = Path(slideformer_backend.__file__).parent
WAIT_NAME = re.compile(r'"([a-z0-9]+ (?:after|waits for) [^"{}]+)"')


class Wait(NamedTuple):
    """A wait: its name, and the function of the engine that asks for it."""

    name: str
    place: str

    def __str__(self) -> str:
        return f"{self.name} ({self.place})"


def names_in_source(pattern: str = "engine/*.py") -> set[str]:
    """The names of all waits that the source writes down; those of ``strategy: lsp`` have a workload of their own."""
    found: set[str] = set()
    for path in [*SOURCE.glob(pattern), *SOURCE.glob("transfer/*.py"), *SOURCE.glob("checkpoint/*.py")]:
        if path.name.startswith("core") and "core" not in pattern:
            continue
        found.update(WAIT_NAME.findall(path.read_text()))
    return found


class _Origin(dict):
    """A clock that remembers where it was taken."""

    place = ""


class WaitMonitor(Monitor):
    """A monitor that knows where each wait comes from. ``leave_out`` is the wait to be left out."""

    def __init__(self, leave_out: Wait | None = None, **options) -> None:
        super().__init__(**options)
        self.leave_out = leave_out
        self.seen: set[Wait] = set()
        self._places: dict[str, str] = {}

    def fork(self, actor: str) -> dict[str, int]:
        origin = _Origin(super().fork(actor))
        origin.place = _place()
        return origin

    def start(self, actor: str, origin: dict[str, int] | None) -> None:
        self._places[actor] = origin.place if isinstance(origin, _Origin) else ""
        super().start(actor, origin)

    def wait(self, actor: str, wait_name: str, ticket: Ticket) -> bool:
        place = _place() if actor in ("main", "compute") else self._places[actor]
        wait = Wait(wait_name, place)
        self.seen.add(wait)
        return super().wait(actor, wait_name, ticket) and wait != self.leave_out


def _place() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("slideformer_backend.") and ".transfer" not in name and frame.f_code.co_name != "operate":
            return f"{name.rpartition('.')[2]}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"
