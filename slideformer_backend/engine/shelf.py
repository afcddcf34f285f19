"""Where boundaries wait while they are off the device, and how they get there: blocks of host memory.

``Boundaries`` decides which of them leave and when they come back; a shelf keeps what has left. ``FileShelf`` is the
other one.
"""

from __future__ import annotations

import abc
import collections
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch

from ..plan.host_budget import probe_host_budget
from ..storage import HostMemory, Slab, Tracked
from ..transfer import Backend, Ticket, copy

RESERVE_SHARE = 50
"""Of host memory, the part that blocks leave free: where it ends, the kernel kills the process with no word."""


class Room(Protocol):
    """What a block is made of; ``nbytes``: the largest boundary that it holds."""

    @property
    def nbytes(self) -> int:
        """In bytes."""


R = TypeVar("R", bound=Room)


def is_lost(ticket: Ticket | None) -> bool:
    """Whether a transfer has failed; waits for it. Its error lets go of the frames that it was raised through: they
    hold the graph of the step that failed, and what is used again would keep that alive."""
    if ticket is not None and ticket.error is None:
        with contextlib.suppress(Exception):
            ticket.synchronize()
    if ticket is None or ticket.error is None:
        return False
    ticket.error.__traceback__ = None
    return True


class Block(Generic[R]):
    """Room for one boundary; ``drained`` is the last transfer that read or wrote it."""

    __slots__ = ("drained", "room")

    def __init__(self, room: R) -> None:
        self.room = room
        self.drained: Ticket | None = None


class BlockPool(Generic[R]):
    """Blocks of one kind. Batches of other lengths reuse them; one grows only when a larger boundary comes.

    Args:
        make: room for a boundary, by number and bytes.
        free: gives room back to where it is from; none of its transfers is in flight.
    """

    def __init__(self, make: Callable[[int, int], R], free: Callable[[R], None] = lambda room: None) -> None:
        self._make = make
        self._give_back = free
        self._free: collections.deque[Block[R]] = collections.deque()
        self._created = 0
        self.nbytes = 0
        """Bytes of all blocks, whether or not a boundary is in them."""

    def take(self, nbytes: int) -> Block[R]:
        """A block of at least ``nbytes``, to be written once its ``drained`` ticket has passed."""
        # a copy: a boundary may die, and give its block back, at any point of this
        for block in list(self._free):
            if block.drained is not None and block.drained.error is not None:
                self._remove(block)  # whoever follows a failed transfer fails
        fitting = [block for block in list(self._free) if block.room.nbytes >= nbytes]
        if fitting:
            block = min(fitting, key=lambda block: block.room.nbytes)
            self._free.remove(block)
            return block
        if self._free:
            self._remove(self._free[0])  # before the larger one takes its place
        block = Block(self._make(self._created + 1, nbytes))
        self._created += 1
        self.nbytes += nbytes
        return block

    def give(self, block: Block[R]) -> None:
        """Called when a boundary dies, on whatever thread that happens."""
        self._free.append(block)

    def clear(self) -> None:
        """Free what no boundary uses."""
        while self._free:
            self._remove(self._free[0])

    def _remove(self, block: Block[R]) -> None:
        self._free.remove(block)
        is_lost(block.drained)  # over, however it ended
        self.nbytes -= block.room.nbytes
        self._give_back(block.room)


class Boundary:
    """The input of one forward of a unit. On the device while ``tensor`` is set, in ``block`` when that is.

    Lives as long as the graph that will need it; its block returns to the shelf with it.
    """

    __slots__ = ("__weakref__", "block", "dtype", "loaded", "name", "requires_grad", "shape", "shelf", "stored",
                 "tensor", "tracked")  # fmt: skip

    def __init__(self, name: str, tensor: torch.Tensor, shelf: Shelf) -> None:
        self.name = name
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.requires_grad = tensor.requires_grad
        self.tensor: torch.Tensor | None = tensor
        self.tracked = Tracked(f"boundary of {name}", torch.empty(0))
        self.block: Block[Any] | None = None
        self.stored: Ticket | None = None
        self.loaded: Ticket | None = None
        self.shelf = shelf

    def __del__(self) -> None:
        block = getattr(self, "block", None)
        if block is not None:
            self.shelf.pool.give(block)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.shape.numel() * self.dtype.itemsize


class Shelf(abc.ABC):
    """Keeps boundaries off the device.

    Args:
        backend: lanes and device.
    """

    pool: BlockPool[Any]
    exits = 1
    """Boundaries that may be on their way off the device while further compute is issued."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @abc.abstractmethod
    def store(self, boundary: Boundary, source: torch.Tensor) -> Ticket:
        """Start to write ``source``, the boundary's tensor: ``block`` and ``stored`` are set.

        Returns:
            The transfer after which the memory of ``source`` is free.

        Raises:
            MemoryError or StorageError: there is no room; the boundary is as it was.
        """

    @abc.abstractmethod
    def load(self, boundary: Boundary, target: torch.Tensor) -> None:
        """Start to fill ``target``, fresh memory of the device: ``loaded`` is set."""

    def describe(self) -> dict[str, object]:
        """Settings in effect, for reports."""
        return {}

    def mend(self, error: BaseException | None = None) -> None:  # noqa: B027  # copies in memory do not fail and go on
        """Forget transfers that have failed: when a forward begins, and when ``error`` of one of them was met."""

    def close(self) -> None:
        """Free the blocks."""
        self.pool.clear()

    def abandon(self) -> None:  # noqa: B027  # memory goes with the boundaries; files must be told
        """All lanes have ended: free what boundaries still hold."""


class HostShelf(Shelf):
    """Blocks of host memory, pinned where DMA reads them."""

    pool: BlockPool[Slab]

    def __init__(self, backend: Backend, memory: HostMemory) -> None:
        super().__init__(backend)
        self._memory = memory
        self.pool = BlockPool(self._make)

    def _make(self, number: int, nbytes: int) -> Slab:
        host = probe_host_budget()
        if host.available - nbytes < host.total // RESERVE_SHARE:
            raise MemoryError(f"{host.available:,} bytes of host memory are left ({host.limited_by})")
        return self._memory.allocate(f"boundary block {number}", nbytes, dma=True)

    def store(self, boundary: Boundary, source: torch.Tensor) -> Ticket:
        """See ``Shelf``."""
        block = boundary.block = self.pool.take(boundary.nbytes)
        target = view(block.room, boundary)
        self.backend.touch(f"forward into {boundary.name}", writes=(boundary.tracked,))
        gone = boundary.stored = block.drained = self.backend.out.submit(
            f"boundary of {boundary.name} to the host",
            partial(copy, target, source),
            after={
                "store after compute": self.backend.mark(f"boundary of {boundary.name}"),
                "store after block drained": block.drained,
            },
            reads=(boundary.tracked,),
            writes=(block.room,),
            keep=source,
        )
        return gone

    def load(self, boundary: Boundary, target: torch.Tensor) -> None:
        """See ``Shelf``."""
        block: Block[Slab] | None = boundary.block
        if block is None:
            return
        boundary.loaded = block.drained = self.backend.back.submit(
            f"boundary of {boundary.name} to the device",
            partial(copy, target, view(block.room, boundary)),
            after={
                "load after boundary stored": boundary.stored,
                "load after compute": self.backend.mark(f"memory for the boundary of {boundary.name}"),
            },
            reads=(block.room,),
            writes=(boundary.tracked,),
            keep=target,
        )


def view(slab: Slab, boundary: Boundary) -> torch.Tensor:
    """The beginning of ``slab`` in the boundary's shape."""
    return slab.view(boundary.dtype, 0, boundary.shape.numel()).view(boundary.shape)
