"""The record of data of a unit that waits in files, and the names of the waits around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..storage import PagedSlab, PosixRegion, Ticket, Tracked

if TYPE_CHECKING:
    from .unit import Unit


class Filed(Enum):
    """Where the data of a unit is."""

    FILED = auto()
    """In the file only; the unit has no room, its memory no pages."""
    STAGED = auto()
    """In memory (or on their way: ``loaded``) and in the file (or on their way: ``stored``)."""
    CHANGED = auto()
    """In memory; the file is out of date."""


class Room(Tracked):
    """The right to have one unit's data in memory. The monitor sees that two units never have it at once."""

    def __init__(self, number: int) -> None:
        super().__init__(f"room {number}", torch.empty(0))
        self.unit: Unit | None = None
        self.last_used = 0


class Part(NamedTuple):
    """One array: its memory, and its place in a file."""

    slab: PagedSlab
    region: PosixRegion


@dataclass(eq=False, slots=True)
class Spilled:
    """What the record of a unit knows of its data of one kind.

    Tickets: ``loaded`` is the last read into memory, ``stored`` the last write back or return of pages.
    """

    are: Filed = Filed.FILED
    parts: dict[str, Part] = field(default_factory=dict)
    room: Room | None = None
    loaded: Ticket | None = None
    stored: Ticket | None = None
    moves: int = 0
    """Times that the data got other memory and files; files of different times have different names."""
    holds: bool = False
    """Whether memory holds it at this very moment: what the lanes note, and what counts after a failure."""
    holders: int = 0
    """Operations of user code that run on it now."""
    is_lent: bool = False
    """Whether user code was given a tensor over its memory, and may have it still."""
    is_exposed: bool = False
    """Whether user code may have written through such a tensor."""
    tensors: int = 0
    """Over its memory, those of user code not counted, while the unit is outside the window."""
    pages: torch.Tensor | None = None
    """The file as memory, while it is written to another one."""
    shown: int = 0
    """How many of them are parameters, which show other memory inside the window."""
    file: Tracked = field(default_factory=lambda: Tracked("spill file", torch.empty(0)))
    """Stands for the contents of the files, for the monitor."""

    @property
    def slabs(self) -> tuple[PagedSlab, ...]:
        """The memory of all parts."""
        return tuple(part.slab for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(slab.nbytes for slab in self.slabs)

    @property
    def own_bytes(self) -> int:
        """Bytes of memory that come and go with the data."""
        return sum(slab.own_bytes for slab in self.slabs)


class Waits(NamedTuple):
    """The names of a ring's waits: of an update for both tickets, of the lanes, of the host for both tickets; and of a
    transfer of what was read (``sent_loaded``)."""

    what: str
    update_loaded: str
    update_stored: str
    load: str
    store: str
    drop_updated: str
    drop_loaded: str
    drop_sent: str
    host_loaded: str
    host_stored: str
    sent_loaded: str = ""


STATES = Waits(
    "states",
    update_loaded="update after states loaded",
    update_stored="update after states stored",
    load="load after states dropped",
    store="store after update",
    drop_updated="drop after update",
    drop_loaded="drop after states loaded",
    drop_sent="",
    host_loaded="host waits for states loaded",
    host_stored="host waits for states stored",
)
WEIGHTS = Waits(
    "weights",
    update_loaded="update after weights read",
    update_stored="update after weights written",
    load="read after weights dropped",
    store="write after weights updated",
    drop_updated="drop after weights updated",
    drop_loaded="drop after weights read",
    drop_sent="drop after weights sent",
    host_loaded="host waits for weights read",
    host_stored="host waits for weights written",
    sent_loaded="h2d after weights read",
)
