"""A ring of rooms in host memory through which one kind of data of units (states, weights) goes to files and back.

The memory of what is filed keeps its address and loses its pages while the data is in its file, so nothing else in the
engine knows where it is: whoever uses it says so first. As in the window, all decisions are made on the thread that
trains; two lanes execute them, beside the updates of other units.

    a use is near              -> it and the next ones are read ahead
    an update is queued        -> behind the read
    another unit is staged     -> what changed is written back, behind the update
    its room is needed         -> its pages are given back, behind the write

What user code looks at stays: during an operation (``hold``), and as long as there is a tensor of it over that memory
(``lend``). Meanwhile there may be more rooms than planned.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from ..storage import HostMemory, Ticket, Tier
from ..transfer import Backend, Lane, tensors_over
from .filed import Filed, Room, Spilled, Waits
from .operation import follow, has_failed
from .unit import Unit, Where


class Ring:
    """Moves the data of one kind between memory and files.

    Args:
        names: of the waits.
        of: the unit's record of this kind; None where it is not filed.
        backend: device and monitor.
        lanes: reads, and writes and returns of pages, each in order.
        memory: counts what is in memory.
    """

    def __init__(
        self,
        names: Waits,
        of: Callable[[Unit], Spilled | None],
        backend: Backend,
        lanes: tuple[Lane, Lane],
        memory: HostMemory,
    ) -> None:
        self.tier: Tier | None = None
        self.failure: BaseException | None = None
        self.units: list[Unit] = []
        self.most_rooms = 0
        self.names = names
        self._of = of
        self._backend = backend
        self._load_lane, self._store_lane = lanes
        self._memory = memory
        self._rooms: list[Room] = []
        self._dropped: Ticket | None = None
        self._turn = itertools.count(1)
        self._is_failing = False

    @property
    def nbytes(self) -> int:
        """Bytes of all that is filed."""
        return sum(spilled.nbytes for unit in self.units if (spilled := self._of(unit)) is not None)

    @property
    def largest(self) -> int:
        """Bytes of the largest unit's data."""
        return max((spilled.nbytes for unit in self.units if (spilled := self._of(unit)) is not None), default=0)

    @property
    def rooms(self) -> int:
        """How many units' data is in memory at once, what user code holds not counted."""
        return min(self.most_rooms, len(self.units))

    def use(self, unit: Unit, *, writes: bool, whole: bool = False) -> dict[str, Ticket | None]:
        """What an operation of the update lane, about to be queued, must follow to read or write the data; ``whole``:
        it writes all of it and reads nothing."""
        spilled = self._of(unit)
        if spilled is None:
            return {}
        after = {self.names.update_loaded: self.stage(unit, reads=not whole)}
        if writes:
            after[self.names.update_stored] = spilled.stored
            spilled.are = Filed.CHANGED
        return after

    def stage(self, unit: Unit, *, reads: bool = True) -> Ticket | None:
        """Have the data of ``unit`` in memory soon, and what has changed of others in files; does not block.

        Returns:
            The ticket behind which it is there.
        """
        spilled = self._of(unit)
        if spilled is None:
            return None
        self._stage(unit, spilled, reads=reads)
        self.write_back(keep=unit)
        return spilled.loaded

    def present(self, unit: Unit, *, writes: bool = False) -> None:
        """The training thread may access the data of a settled unit until it names another one."""
        spilled = self._of(unit)
        if spilled is None:
            return
        self._backend.synchronize(self.names.host_loaded, self.stage(unit))
        if writes:
            self._backend.synchronize(self.names.host_stored, spilled.stored)
            spilled.are = Filed.CHANGED
        slabs = spilled.slabs
        what = f"{self.names.what} of {unit.name}"
        self._backend.touch_host(what, reads=slabs, writes=slabs if writes else ())

    def hold(self, unit: Unit, *, writes: bool) -> None:
        """As ``present``, for an operation of user code: the data stays until ``let_go``."""
        self.present(unit, writes=writes)
        spilled = self._of(unit)
        if spilled is not None:
            spilled.holders += 1

    def let_go(self, unit: Unit) -> None:
        """An operation of user code is over."""
        spilled = self._of(unit)
        if spilled is not None:
            spilled.holders = max(0, spilled.holders - 1)

    def lend(self, unit: Unit, *, writes: bool = True) -> None:
        """User code has got a tensor over the memory of ``unit``: the data stays as long as there is one, and counts as
        changed then if user code may write it."""
        spilled = self._of(unit)
        if spilled is not None:
            spilled.is_lent = True
            spilled.is_exposed |= writes

    def flush(self, unit: Unit, spilled: Spilled) -> None:
        """Block until the file holds the data of a settled unit."""
        if spilled.are is Filed.CHANGED:
            self._store(unit, spilled)
        self._backend.synchronize(self.names.host_stored, spilled.stored)

    def read_ahead(self, units: Iterable[Unit]) -> None:
        """The data of these units is needed next, in this order: stage as many as rooms allow, write back the rest."""
        wanted = [unit for unit in units if self._of(unit) is not None][: max(1, len(self._rooms) - 1)]
        for unit in wanted:
            spilled = self._of(unit)
            if spilled is not None:
                self._stage(unit, spilled)
        self.write_back(keep=wanted[0] if wanted else None)

    def write_back(self, keep: Unit | None = None) -> None:
        """Start writing what has changed, of all units but ``keep``."""
        if self._is_failing:
            return
        for unit in [room.unit for room in self._rooms if room.unit is not None and room.unit is not keep]:
            spilled = self._of(unit)
            if spilled is not None and spilled.are is Filed.CHANGED and not spilled.holders:
                self._store(unit, spilled)

    # -- which units -----------------------------------------------------------------------------------------------

    def include(self, unit: Unit) -> None:
        """``unit`` has a record of this kind from now on."""
        self.units.append(unit)
        if len(self._rooms) < self.most_rooms:
            self._rooms.append(Room(len(self._rooms)))

    def set_rooms(self, most: int) -> None:
        """Have the data of at most so many units in memory."""
        self.most_rooms = most
        while len(self._rooms) < self.rooms:
            self._rooms.append(Room(len(self._rooms)))

    def release(self, unit: Unit, spilled: Spilled) -> None:
        """The data of ``unit``, presented for writing, has moved elsewhere, and its record is gone."""
        self.units.remove(unit)
        if spilled.room is not None:
            self._memory.allocated -= spilled.own_bytes
            spilled.room.unit = None
        for part in spilled.parts.values():
            if self.tier is not None:
                self.tier.free(part.region)

    def recover(self) -> None:
        """After a failure: forget failed transfers, so that what is still in memory, or readable, can be used. Nothing
        is written any more, nothing leaves memory."""
        self._is_failing = True
        self.most_rooms = 2 * len(self.units) + len(self._rooms)
        self._rooms.extend(Room(len(self._rooms) + number) for number in range(len(self.units)))
        for unit in self.units:
            spilled = self._of(unit)
            if spilled is None:
                continue
            for ticket in (spilled.loaded, spilled.stored):
                has_failed(ticket)  # the lanes are done with it
            spilled.are = Filed.CHANGED if spilled.holds else Filed.FILED
            if spilled.room is not None:
                spilled.room.unit, spilled.room = None, None
            if spilled.holds:
                spilled.room = self._vacant()
                spilled.room.unit = unit
            spilled.loaded = spilled.stored = None
        self._dropped = self.failure = None

    # -- internals -------------------------------------------------------------------------------------------------

    def _stage(self, unit: Unit, spilled: Spilled, *, reads: bool = True) -> None:
        """The data of ``unit`` is in memory once ``loaded`` has passed; does not block."""
        room = spilled.room
        if room is None:
            room = self._vacant()
            self._load(unit, spilled, room, reads=reads)
        room.last_used = next(self._turn)
        if len(self._rooms) > self.most_rooms:
            self._trim()

    def _trim(self) -> None:
        """User code has held more than there are rooms for: as many go, if it does no more."""
        by_age = sorted(self._rooms, key=lambda room: room.last_used)
        for room in by_age[: len(by_age) - self.most_rooms]:
            if self._leave(room):
                self._rooms.remove(room)

    def _vacant(self) -> Room:
        free = [room for room in self._rooms if room.unit is None]
        by_age = sorted(self._rooms, key=lambda room: room.last_used)
        vacant = next((room for room in (*free, *by_age) if self._leave(room)), None)
        if vacant is None:
            vacant = Room(len(self._rooms))
            self._rooms.append(vacant)
        return vacant

    def _leave(self, room: Room) -> bool:
        """Let the unit in ``room`` give it up; False if user code holds it."""
        unit = room.unit
        spilled = self._of(unit) if unit is not None else None
        if unit is None or spilled is None:
            return True
        if spilled.holders or self._is_lent(unit, spilled):
            return False
        self._drop(unit, spilled, room)
        return True

    @staticmethod
    def _is_lent(unit: Unit, spilled: Spilled) -> bool:
        """Whether user code has a tensor over the memory. Those of a transfer that runs count too: it stays longer."""
        if not spilled.is_lent:
            return False
        inside = spilled.shown if unit.where in (Where.FORWARD, Where.BACKWARD) else 0
        if any(tensors_over(slab.flat) > spilled.tensors - inside for slab in spilled.slabs):
            return True
        spilled.is_lent = False
        if spilled.is_exposed and spilled.are is Filed.STAGED:
            spilled.are = Filed.CHANGED  # it may have been written at any time
        spilled.is_exposed = False
        return False

    def _load(self, unit: Unit, spilled: Spilled, room: Room, *, reads: bool) -> None:
        parts, tier, before = list(spilled.parts.values()), self.tier if reads else None, spilled.stored
        self._memory.allocated += spilled.own_bytes
        spilled.are, spilled.room, room.unit = Filed.STAGED, room, unit

        def run() -> None:
            follow(before)  # where the file does not hold it, memory does, and must not be read over
            for part in parts:
                part.slab.enter()
            if tier is not None:
                self._wait([tier.read(part.region, 0, part.slab.memory) for part in parts])
            spilled.holds = True

        spilled.loaded = self._load_lane.submit(
            f"{self.names.what} of {unit.name} from file",
            run,
            # the last drop is behind every write back, that of this unit too: the lane keeps its order
            after={self.names.load: self._dropped},
            reads=(spilled.file,) if reads else (),
            writes=(*spilled.slabs, room),
        )

    def _store(self, unit: Unit, spilled: Spilled) -> None:
        parts, tier, before = list(spilled.parts.values()), self.tier, spilled.stored

        def run() -> None:
            follow(before)
            if tier is not None:
                self._wait([tier.write(part.region, 0, part.slab.memory) for part in parts])

        spilled.are = Filed.STAGED
        spilled.stored = self._store_lane.submit(
            f"{self.names.what} of {unit.name} to file",
            run,
            after={self.names.store: unit.updated},
            reads=spilled.slabs,
            writes=(spilled.file,),
        )

    def _drop(self, unit: Unit, spilled: Spilled, room: Room) -> None:
        if spilled.are is Filed.CHANGED:
            self._store(unit, spilled)
        slabs, before, monitor, keep = spilled.slabs, spilled.stored, self._backend.monitor, self.most_rooms

        def run() -> None:
            follow(before)  # what the file does not hold, memory must
            spilled.holds = False
            for slab in slabs:
                if monitor is not None and monitor.poison:
                    monitor.spoil(slab)
                else:
                    slab.drop(keep)

        self._memory.allocated -= spilled.own_bytes
        spilled.are, spilled.room, room.unit = Filed.FILED, None, None
        after = {self.names.drop_updated: unit.updated, self.names.drop_loaded: spilled.loaded}
        if self.names.drop_sent:
            after[self.names.drop_sent] = unit.sent
        self._dropped = spilled.stored = self._store_lane.submit(
            f"return of the memory of {unit.name}", run, after=after, writes=(*slabs, room)
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
            self.failure = self.failure or errors[0]
            raise errors[0]
