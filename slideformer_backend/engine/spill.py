"""What of which units waits in files: optimizer states, working weights (DESIGN 6, 8)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

import torch

from ..storage import FramedSlab, Frames, HostMemory, PagedSlab, PosixRegion, PosixTier, Slab, Ticket
from ..transfer import Backend, tensors_over
from .filed import STATES, WEIGHTS, Filed, Part, Spilled
from .ring import Ring
from .unit import Unit


class Spill:
    """Two rings over one tier; until ``open``, nothing is filed.

    Args:
        backend: lanes and device.
        memory: counts what is in memory.

    Attributes:
        states: masters and moments of units whose ``spill`` is not None.
        weights: working weights of units whose ``filed`` is not None.
    """

    def __init__(self, backend: Backend, memory: HostMemory) -> None:
        self.tier: PosixTier | None = None
        self._is_borrowed = False
        self.states = Ring(STATES, attrgetter("spill"), backend, (backend.load, backend.store), memory)
        lanes = backend.weights_in, backend.weights_out
        self.weights = Ring(WEIGHTS, attrgetter("filed"), backend, lanes, memory)
        self._memory = memory
        self._reserved: dict[int, PosixRegion] = {}
        self._frames: Frames | None = None
        self._close: Callable[[], None] = lambda: None

    @property
    def nbytes(self) -> int:
        """Bytes of all states in files."""
        return self.states.nbytes

    # -- which units -----------------------------------------------------------------------------------------------

    def open(self, tier: PosixTier, close: Callable[[], None]) -> None:
        """Files are in ``tier``; ``close`` gives up what that is in."""
        self.tier = self.states.tier = self.weights.tier = tier
        self._close = close

    def begin(self, units: Sequence[Unit], rooms: int) -> None:
        """From now on states of ``units`` are allocated in the tier, and at most ``rooms`` of them are in memory."""
        for unit in units:
            unit.spill = Spilled()
            self.states.units.append(unit)
        self.states.set_rooms(rooms)

    def include(self, unit: Unit) -> None:
        """States of ``unit`` are allocated in the tier from now on; it has none yet, or they move next."""
        if self.tier is not None and unit.spill is None:
            unit.spill = Spilled()
            self.states.include(unit)

    def reserve(self, weights: Mapping[int, tuple[str, int]], rooms: int) -> None:
        """Have files for the working weights of these units (names and bytes by number), ``rooms`` in memory at once.

        Raises:
            StorageError: there is no room for them; nothing of the model has been touched.
        """
        if self.tier is None or not weights:
            return
        for number, (name, nbytes) in weights.items():
            self._reserved[number] = self.tier.allocate(f"{number}-{name}.weights", nbytes)
        self._frames = Frames(max(nbytes for _, nbytes in weights.values()), self._memory)
        self.weights.set_rooms(rooms)

    def weights_of(self, number: int, name: str, nbytes: int) -> Slab:
        """Memory for the working weights of unit ``number``: in host memory for good, or with the file reserved."""
        if number in self._reserved and self._frames is not None:
            return FramedSlab(f"weights of {name}", nbytes, self._frames)
        return self._memory.allocate(f"weights of {name}", nbytes, dma=True)

    def file_weights(self, unit: Unit) -> bool:
        """Let a unit that was just made have its weights in the file reserved for it, if one is; the caller fills them
        at once."""
        region, slab = self._reserved.pop(unit.index, None), unit.weights
        if region is None or not isinstance(slab, PagedSlab):
            return False
        unit.filed = Spilled(parts={"weights": Part(slab, region)})
        self.weights.include(unit)
        self.weights.present(unit, writes=True)
        return True

    @staticmethod
    def count_tensors(unit: Unit) -> None:
        """The parameters of ``unit`` show its weights now: who else does is user code."""
        if unit.filed is not None:
            address = unit.weights.flat.untyped_storage().data_ptr()
            unit.filed.tensors = tensors_over(unit.weights.flat)
            shown = [record for record in unit.records if record.host.untyped_storage().data_ptr() == address]
            unit.filed.shown = len(shown)

    def release(self, unit: Unit) -> None:
        """States and weights of ``unit``, presented for writing, have moved elsewhere: nothing of it is filed."""
        for ring, spilled in ((self.states, unit.spill), (self.weights, unit.filed)):
            if spilled is not None:
                ring.release(unit, spilled)
        unit.spill = unit.filed = None

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """Inside, user code reads weights and writes none; ``borrow`` gives them."""
        self.weights.write_back()
        self._is_borrowed = True
        try:
            yield
        finally:
            self._is_borrowed = False
            for unit in self.weights.units:
                if unit.filed is not None:
                    unit.filed.pages = None

    def is_only_read(self, unit: Unit) -> bool:
        """Whether what user code gets of the weights of ``unit`` now is read and dropped."""
        return self._is_borrowed and unit.filed is not None and unit.filed.are is Filed.STAGED

    def borrow(self, unit: Unit) -> torch.Tensor | None:
        """The working weights of a unit, flat, as pages of their file; None where they are in host memory for good."""
        filed = unit.filed
        if filed is None or not self._is_borrowed or self.tier is None:
            return None
        if filed.pages is None:
            self.weights.flush(unit, filed)
            filed.pages = self.tier.mapped(filed.parts["weights"].region)
        return filed.pages

    # -- memory of states ------------------------------------------------------------------------------------------

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

    # -- use -------------------------------------------------------------------------------------------------------

    def use(self, unit: Unit, *, writes: bool) -> dict[str, Ticket | None]:
        """What an operation of the update lane, about to be queued, must follow to read or write the states."""
        return self.states.use(unit, writes=writes)

    def present(self, unit: Unit, *, writes: bool = False) -> None:
        """The training thread may access states and weights of a settled unit until it names another one."""
        self.weights.present(unit, writes=writes)
        self.states.present(unit, writes=writes)

    def read_ahead(self, units: Iterable[Unit]) -> None:
        """The states of these units are needed next, in this order."""
        self.states.read_ahead(units)

    def write_back(self) -> None:
        """Start writing what has changed."""
        self.states.write_back()
        self.weights.write_back()

    def check(self) -> None:
        """Raise the first failure of a transfer, whether or not somebody waits for it."""
        failure = self.states.failure or self.weights.failure
        if failure is not None:
            raise failure

    def recover(self) -> None:
        """After a failure: see ``Ring.recover``."""
        self.states.recover()
        self.weights.recover()

    def close(self) -> None:
        """Remove the files; what is only there is gone."""
        if self.tier is not None:
            self.tier.close()
            self._close()
