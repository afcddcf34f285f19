"""Optimizer states of chosen units wait in files; a ring of rooms in host memory holds those in use (DESIGN 6, 8).

The memory of a spilled unit's states keeps its address and loses its pages while the states are in their file, so
nothing else in the engine knows where they are: whoever uses them says so first. As in the window, all decisions are
made on the thread that trains; the lanes ``load`` and ``store`` execute them, beside the updates of other units.

    backward of a unit opens   -> it and the next ones are read ahead
    its update is queued       -> behind the load
    another unit is staged     -> what changed is written back, behind the update
    its room is needed         -> its pages are given back, behind the write
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import torch

from ..storage import HostMemory, PagedSlab, Region, Slab, Ticket, Tier, Tracked
from ..transfer import Backend
from .operation import follow, has_failed
from .unit import Unit


class States(Enum):
    """Where the states of a spilled unit are."""

    FILED = auto()
    """In the file only; the unit has no room, its memory no pages."""
    STAGED = auto()
    """In memory (or on their way: ``loaded``) and in the file (or on their way: ``stored``)."""
    CHANGED = auto()
    """In memory; the file is out of date."""


class Room(Tracked):
    """The right to have one unit's states in memory. The monitor sees that two units never have it at once."""

    def __init__(self, number: int) -> None:
        super().__init__(f"room {number}", torch.empty(0))
        self.unit: Unit | None = None
        self.last_used = 0


class Part(NamedTuple):
    """One state array: its memory, and its place in a file."""

    slab: PagedSlab
    region: Region


@dataclass(eq=False, slots=True)
class Spilled:
    """What the record of a spilled unit knows of its states.

    Tickets: ``loaded`` is the last read into memory, ``stored`` the last write back or return of pages.
    """

    are: States = States.FILED
    parts: dict[str, Part] = field(default_factory=dict)
    room: Room | None = None
    loaded: Ticket | None = None
    stored: Ticket | None = None
    moves: int = 0
    """Times that the states got other memory and files; files of different times have different names."""
    holds: bool = False
    """Whether memory holds them at this very moment: what the lanes note, and what counts after a failure."""
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


class Spill:
    """Moves states of spilled units between memory and files; until ``begin``, no unit spills.

    Args:
        backend: lanes and device.
        memory: counts what is in memory.
    """

    def __init__(self, backend: Backend, memory: HostMemory) -> None:
        self.tier: Tier | None = None
        self._backend = backend
        self._memory = memory
        self._units: list[Unit] = []
        self._rooms: list[Room] = []
        self._most_rooms = 0
        self._dropped: Ticket | None = None
        self._turn = itertools.count(1)
        self._failure: BaseException | None = None
        self._is_failing = False
        self._close: Callable[[], None] = lambda: None

    @property
    def nbytes(self) -> int:
        """Bytes of all spilled states."""
        return sum(unit.spill.nbytes for unit in self._units if unit.spill is not None)

    # -- what the engine calls -------------------------------------------------------------------------------------

    def begin(self, units: Sequence[Unit], tier: Tier, close: Callable[[], None], rooms: int) -> None:
        """From now on states of ``units`` are allocated in ``tier``, and at most ``rooms`` of them are in memory.

        ``close`` gives up what the tier is in.
        """
        self.tier = tier
        self._close = close
        self._units = list(units)
        self._most_rooms = rooms
        self._rooms = [Room(number) for number in range(min(rooms, len(self._units)))]
        for unit in self._units:
            unit.spill = Spilled()

    def include(self, unit: Unit) -> None:
        """States of ``unit`` are allocated in the tier from now on; it has none yet, or they move next."""
        if self.tier is not None and unit.spill is None:
            self._units.append(unit)
            unit.spill = Spilled()
            if len(self._rooms) < self._most_rooms:
                self._rooms.append(Room(len(self._rooms)))

    def allocate(self, unit: Unit, name: str, nbytes: int, *, stays: bool = False) -> Slab:
        """Memory for one state array of a settled unit: zeros, in host memory (``stays``: in any case) or in a file."""
        spilled = unit.spill
        if spilled is None or self.tier is None or stays:
            return self._memory.allocate(f"{name} of {unit.name}", nbytes, dma=False)
        slab = PagedSlab(f"{name} of {unit.name}", nbytes)
        file = f"{unit.index}-{unit.name}.{name}" + f".{spilled.moves}" * (spilled.moves > 0)
        spilled.parts[name] = Part(slab, self.tier.allocate(file, nbytes))
        if spilled.room is not None:
            self._memory.allocated += nbytes
        return slab

    def vacate(self, unit: Unit) -> Callable[[], None]:
        """The states of ``unit``, presented for writing, are about to be allocated anew; the old memory is still there.

        Returns:
            What gives the old files back, when the old memory is no longer needed.
        """
        spilled, tier = unit.spill, self.tier
        if spilled is None or tier is None:
            return lambda: None
        old, spilled.parts = spilled.parts, {}
        spilled.moves += 1
        if spilled.room is not None:
            self._memory.allocated -= sum(part.slab.nbytes for part in old.values())

        def give_back() -> None:
            for part in old.values():
                tier.free(part.region)

        return give_back

    def use(self, unit: Unit, *, writes: bool) -> dict[str, Ticket | None]:
        """What an operation of the update lane, about to be queued, must follow to read or write the states."""
        spilled = unit.spill
        if spilled is None:
            return {}
        self._stage(unit, spilled)
        self.write_back(keep=unit)
        after = {"update after states loaded": spilled.loaded}
        if writes:
            after["update after states stored"] = spilled.stored
            spilled.are = States.CHANGED
        return after

    def present(self, unit: Unit, *, writes: bool = False) -> None:
        """The training thread may access the states of a settled unit until it names another one."""
        spilled = unit.spill
        if spilled is None:
            return
        self._stage(unit, spilled)
        self.write_back(keep=unit)
        self._backend.synchronize("host waits for states loaded", spilled.loaded)
        if writes:
            self._backend.synchronize("host waits for states stored", spilled.stored)
            spilled.are = States.CHANGED
        slabs = spilled.slabs
        self._backend.touch_host(f"states of {unit.name}", reads=slabs, writes=slabs if writes else ())

    def read_ahead(self, units: Iterable[Unit]) -> None:
        """These units' states are needed next, in this order: stage as many as rooms allow, write back the others."""
        wanted = [unit for unit in units if unit.spill is not None][: max(1, len(self._rooms) - 1)]
        for unit in wanted:
            if unit.spill is not None:
                self._stage(unit, unit.spill)
        self.write_back(keep=wanted[0] if wanted else None)

    def write_back(self, keep: Unit | None = None) -> None:
        """Start writing what has changed, of all units but ``keep``."""
        if self._is_failing:
            return
        for unit in [room.unit for room in self._rooms if room.unit is not None and room.unit is not keep]:
            if unit.spill is not None and unit.spill.are is States.CHANGED:
                self._store(unit, unit.spill)

    def release(self, unit: Unit) -> None:
        """The states of ``unit``, presented for writing, have moved elsewhere: it spills no more."""
        spilled, unit.spill = unit.spill, None
        if spilled is None or self.tier is None:
            return
        self._units.remove(unit)
        if spilled.room is not None:
            self._memory.allocated -= spilled.nbytes
            spilled.room.unit = None
        for part in spilled.parts.values():
            self.tier.free(part.region)

    def check(self) -> None:
        """Raise the first failure of a transfer, whether or not somebody waits for it."""
        if self._failure is not None:
            raise self._failure

    def recover(self) -> None:
        """After a failure: forget failed transfers, so that what is still in memory, or readable, can be used. Nothing
        is written any more, nothing leaves memory."""
        self._is_failing = True
        self._rooms.extend(Room(len(self._rooms) + number) for number in range(len(self._units)))
        for unit in self._units:
            spilled = unit.spill
            if spilled is None:
                continue
            for ticket in (spilled.loaded, spilled.stored):
                has_failed(ticket)  # the lanes are done with it
            spilled.are = States.CHANGED if spilled.holds else States.FILED
            if spilled.room is not None:
                spilled.room.unit, spilled.room = None, None
            if spilled.holds:
                spilled.room = self._vacant()
                spilled.room.unit = unit
            spilled.loaded = spilled.stored = None
        self._dropped = self._failure = None

    def close(self) -> None:
        """Remove the files; states are gone."""
        if self.tier is not None:
            self.tier.close()
            self._close()

    # -- internals -------------------------------------------------------------------------------------------------

    def _stage(self, unit: Unit, spilled: Spilled) -> None:
        """The states of ``unit`` are in memory once ``loaded`` has passed; does not block."""
        room = spilled.room
        if room is None:
            room = self._vacant()
            self._load(unit, spilled, room)
        room.last_used = next(self._turn)

    def _vacant(self) -> Room:
        free = next((room for room in self._rooms if room.unit is None), None)
        if free is not None:
            return free
        victim = min(self._rooms, key=lambda room: room.last_used)
        if victim.unit is not None and victim.unit.spill is not None:
            self._drop(victim.unit, victim.unit.spill, victim)
        return victim

    def _load(self, unit: Unit, spilled: Spilled, room: Room) -> None:
        parts, tier = list(spilled.parts.values()), self.tier
        self._memory.allocated += spilled.nbytes
        spilled.are, spilled.room, room.unit = States.STAGED, room, unit

        def run() -> None:
            if tier is not None:
                self._wait([tier.read(part.region, 0, part.slab.flat) for part in parts])
            spilled.holds = True

        spilled.loaded = self._backend.load.submit(
            f"states of {unit.name} from file",
            run,
            # the last drop follows every write back, that of this unit too: the lane keeps its order
            after={"load after states dropped": self._dropped},
            reads=(spilled.file,),
            writes=(*spilled.slabs, room),
        )

    def _store(self, unit: Unit, spilled: Spilled) -> None:
        parts, tier, before = list(spilled.parts.values()), self.tier, spilled.stored

        def run() -> None:
            follow(before)
            if tier is not None:
                self._wait([tier.write(part.region, 0, part.slab.flat) for part in parts])

        spilled.are = States.STAGED
        spilled.stored = self._backend.store.submit(
            f"states of {unit.name} to file",
            run,
            after={"store after update": unit.updated},
            reads=spilled.slabs,
            writes=(spilled.file,),
        )

    def _drop(self, unit: Unit, spilled: Spilled, room: Room) -> None:
        if spilled.are is States.CHANGED:
            self._store(unit, spilled)
        slabs, before, monitor = spilled.slabs, spilled.stored, self._backend.monitor

        def run() -> None:
            follow(before)  # what the file does not hold, memory must
            spilled.holds = False
            for slab in slabs:
                if monitor is not None and monitor.poison:
                    monitor.spoil(slab)
                else:
                    slab.drop()

        self._memory.allocated -= spilled.nbytes
        spilled.are, spilled.room, room.unit = States.FILED, None, None
        self._dropped = spilled.stored = self._backend.store.submit(
            f"return of the memory of {unit.name}",
            run,
            after={"drop after update": unit.updated, "drop after states loaded": spilled.loaded},
            writes=(*slabs, room),
        )

    def _wait(self, transfers: Sequence[Ticket]) -> None:
        """Wait for all of them, also behind one that has failed: their buffers must be idle."""
        errors: list[BaseException] = []
        for transfer in transfers:
            try:
                transfer.synchronize()
            except Exception as error:
                errors.append(error)
        if errors:
            self._failure = self._failure or errors[0]
            raise errors[0]
