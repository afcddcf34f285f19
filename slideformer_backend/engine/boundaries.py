"""Sliding activation checkpoints: the input of a unit waits in host memory until its recompute (DESIGN 6, 7).

A unit that recomputes keeps one tensor per forward, its input (its *boundary*). With many tokens these are the largest
thing on the device. Here all but the newest few leave for host memory on a lane of their own while the forward goes on,
and come back on another, ahead of the backward that needs them.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Sequence
from functools import partial

import torch

from ..errors import StateError
from ..storage import HostMemory, Slab, Tracked
from ..transfer import Backend, Ticket, copy


class Block:
    """Host memory for one boundary; ``drained`` is the last transfer that read or wrote it."""

    __slots__ = ("drained", "slab")

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.drained: Ticket | None = None


class Boundary:
    """The input of one forward of a unit. On the device while ``tensor`` is set, in ``block`` when that is.

    Lives as long as the graph that will need it; its block returns to the pool with it.
    """

    __slots__ = ("__weakref__", "_pool", "block", "dtype", "loaded", "name", "requires_grad", "shape", "stored",
                 "tensor", "tracked")  # fmt: skip

    def __init__(self, name: str, tensor: torch.Tensor, pool: BlockPool) -> None:
        self.name = name
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.requires_grad = tensor.requires_grad
        self.tensor: torch.Tensor | None = tensor
        self.tracked = Tracked(f"boundary of {name}", torch.empty(0))
        self.block: Block | None = None
        self.stored: Ticket | None = None
        self.loaded: Ticket | None = None
        self._pool = pool

    def __del__(self) -> None:
        block = getattr(self, "block", None)
        if block is not None:
            self._pool.give(block)


class BlockPool:
    """Blocks of host memory. Batches of other lengths reuse them; one grows only when a larger boundary comes."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._free: collections.deque[Block] = collections.deque()
        self._created = 0

    def take(self, nbytes: int) -> Block:
        """A block of at least ``nbytes``, to be written once its ``drained`` ticket has passed."""
        # a copy: a boundary may die, and give its block back, at any point of this
        fitting = [block for block in list(self._free) if block.slab.nbytes >= nbytes]
        if fitting:
            block = min(fitting, key=lambda block: block.slab.nbytes)
            self._free.remove(block)
            return block
        if self._free:
            small = self._free.popleft()
            if small.drained is not None:
                small.drained.synchronize()
            del small  # before the larger one takes its place
        self._created += 1
        return Block(self._memory.allocate(f"boundary block {self._created}", nbytes, dma=True))

    def give(self, block: Block) -> None:
        """Called when a boundary dies, on whatever thread that happens."""
        self._free.append(block)

    def clear(self) -> None:
        """Free what no boundary uses."""
        while self._free:
            drained = self._free.popleft().drained
            if drained is not None:
                drained.synchronize()


class Boundaries:
    """Moves boundaries out and back.

    Args:
        backend: lanes and device.
        memory: host allocator.
        is_on: whether boundaries leave the device; may be changed between steps.
    """

    kept = 2
    """Newest boundaries that stay on the device: their backward comes first."""
    ahead = 2
    """Boundaries that are on their way back before their unit's backward begins."""
    least = 1 << 16
    """Smaller tensors, in bytes, stay: a transfer of a few microseconds buys nothing."""

    def __init__(self, backend: Backend, memory: HostMemory, *, is_on: bool) -> None:
        self.is_on = is_on
        self._backend = backend
        self._pool = BlockPool(memory)
        self._order: list[weakref.ref[Boundary]] = []
        self._leaving: tuple[Ticket, Tracked] | None = None
        self._seen = 0
        self._most_seen = 0

    @property
    def device(self) -> torch.device:
        """Where units compute."""
        return self._backend.device

    def find(self, args: Sequence[object]) -> int | None:
        """Which of the positional arguments of a unit is its boundary: the first tensor, if it is large and dense."""
        for number, value in enumerate(args):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return number if self._may_leave(value) else None
        return None

    def begin_forward(self) -> None:
        """A forward of the whole model begins."""
        self._most_seen, self._seen = max(self._most_seen, self._seen), 0

    def freeable(self, units: int) -> int:
        """Device bytes that leaving would free with ``units`` units: all but the newest and the one in use."""
        staying = min(units, self.kept + 1)
        return 0 if self.is_on else self._most_seen * (units - staying) // max(1, units)

    def put(self, name: str, tensor: torch.Tensor) -> Boundary:
        """Take charge of the input of a forward of unit ``name``; an older one may start to leave."""
        self._let_go()
        boundary = Boundary(name, tensor, self._pool)
        self._order = [ref for ref in self._order if ref() is not None]
        self._order.append(weakref.ref(boundary))
        if len(self._order) > self.kept:
            oldest = self._order[-1 - self.kept]()
            if oldest is not None and oldest.block is None:
                self._store(oldest)
        return boundary

    def note(self, tensor: torch.Tensor) -> None:
        """Count a boundary that stays, so that the plan knows what leaving would free."""
        self._seen += tensor.numel() * tensor.element_size()

    def get(self, boundary: Boundary) -> torch.Tensor:
        """The tensor for compute issued from now on; those needed next are on their way."""
        tensor = self._fetch(boundary)
        position = next(i for i, ref in enumerate(self._order) if ref() is boundary)
        for ref in reversed(self._order[max(0, position - self.ahead) : position]):
            ahead = ref()
            if ahead is not None:
                self._fetch(ahead)
        if boundary.loaded is not None:
            self._backend.order("compute after boundary loaded", boundary.loaded)
            boundary.tensor = boundary.loaded = None  # the recompute holds it from here on
        self._backend.touch(f"recompute of {boundary.name}", reads=(boundary.tracked,))
        return tensor.detach()

    def close(self) -> None:
        """Free the blocks."""
        self._pool.clear()

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.device == self._backend.device
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and tensor.numel() * tensor.element_size() >= self.least
        )

    def _store(self, boundary: Boundary) -> None:
        tensor = boundary.tensor
        if tensor is None:
            return
        source = tensor.detach()
        block = boundary.block = self._pool.take(source.numel() * source.element_size())
        boundary.tensor = None  # not before: the host may have no room
        target = self._view(boundary, block)
        self._backend.touch(f"forward into {boundary.name}", writes=(boundary.tracked,))
        boundary.stored = block.drained = self._backend.out.submit(
            f"boundary of {boundary.name} to the host",
            partial(copy, target, source),
            after={
                "store after compute": self._backend.mark(f"boundary of {boundary.name}"),
                "store after block drained": block.drained,
            },
            reads=(boundary.tracked,),
            writes=(block.slab,),
            keep=source,
        )
        self._leaving = boundary.stored, boundary.tracked

    def _let_go(self) -> None:
        """Compute issued from now on may use the memory of the boundary that left last. The host is layers ahead of the
        device: it would find that memory taken as long as the copy has not been done, and take more."""
        if self._leaving is None:
            return
        (stored, tracked), self._leaving = self._leaving, None
        self._backend.order("compute after boundary stored", stored)
        stored.keep = None
        self._backend.touch(f"memory of {tracked.name}", writes=(tracked,))

    def _fetch(self, boundary: Boundary) -> torch.Tensor:
        """Start loading unless it is here."""
        block = boundary.block
        if boundary.tensor is not None:
            return boundary.tensor
        if block is None:
            raise StateError(f"The boundary of {boundary.name} is neither on the device nor on the host.")
        target = torch.empty(boundary.shape, dtype=boundary.dtype, device=self._backend.device)
        source = self._view(boundary, block)
        boundary.tensor = target
        boundary.tracked = Tracked(f"boundary of {boundary.name}", torch.empty(0))
        self._backend.touch("earlier use of the memory", writes=(boundary.tracked,))
        boundary.loaded = block.drained = self._backend.back.submit(
            f"boundary of {boundary.name} to the device",
            partial(copy, target, source),
            after={
                "load after boundary stored": boundary.stored,
                "load after compute": self._backend.mark(f"memory for the boundary of {boundary.name}"),
            },
            reads=(block.slab,),
            writes=(boundary.tracked,),
            keep=target,
        )
        return target

    @staticmethod
    def _view(boundary: Boundary, block: Block) -> torch.Tensor:
        return block.slab.view(boundary.dtype, 0, boundary.shape.numel()).view(boundary.shape)
