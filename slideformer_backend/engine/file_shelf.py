"""Boundaries in files: straight from the device where its driver can, else through a few slabs of host memory."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable
from functools import partial

import torch

from ..plan.activations import STAGED_INPUTS
from ..storage import HostMemory, Region, Slab, Tier, Tracked
from ..transfer import Backend, Ticket, copy
from .shelf import Block, BlockPool, Boundary, Shelf, is_lost, view

logger = logging.getLogger(__name__)

STAGES = STAGED_INPUTS
"""Slabs of host memory that boundaries pass through."""
SAMPLE = 64 << 20
"""Bytes that a disk is measured with."""


class Extent(Tracked):
    """Room in a file, for the monitor: its contents."""

    def __init__(self, region: Region) -> None:
        super().__init__(region.name, torch.empty(0))
        self.region = region

    @property
    def nbytes(self) -> int:
        """The longest boundary that it holds."""
        return self.region.space


class Stage:
    """A slab; ``drained`` is the last transfer that read or wrote it."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.drained: Ticket | None = None


class Staging:
    """At most ``STAGES`` slabs, in turn; each grows only when a larger boundary comes."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._stages: collections.deque[Stage] = collections.deque()

    def take(self, nbytes: int) -> Stage:
        """A slab of at least ``nbytes``, to be written once its ``drained`` ticket has passed."""
        if len(self._stages) == STAGES:
            stage = self._stages.popleft()
            if stage.slab.nbytes >= nbytes:
                self._stages.append(stage)
                return stage
            is_lost(stage.drained)  # over, however it ended
            del stage  # before the other one takes its place
        stage = Stage(self._memory.allocate("boundaries on their way", nbytes, dma=True))
        self._stages.append(stage)
        return stage

    @property
    def tickets(self) -> list[Ticket | None]:
        """The last transfer of each slab."""
        return [stage.drained for stage in self._stages]

    def mend(self) -> None:
        """Drop slabs whose last transfer has failed: whoever follows it fails too."""
        for stage in [stage for stage in self._stages if stage.drained is not None and stage.drained.error is not None]:
            self._stages.remove(stage)

    def clear(self) -> None:
        """Free the slabs."""
        while self._stages:
            is_lost(self._stages.popleft().drained)


class FileShelf(Shelf):
    """Blocks in files of a tier.

    Args:
        backend: lanes and device.
        tier: of files.
        close: gives up what the tier is in.
    """

    pool: BlockPool[Extent]
    way: str
    """How boundaries travel, in words."""
    device = torch.device("cpu")
    """Where the tier's tensors are."""

    def __init__(self, backend: Backend, tier: Tier, close: Callable[[], None]) -> None:
        super().__init__(backend)
        self.tier = tier
        self.pool = BlockPool(self._extent, lambda extent: tier.free(extent.region))
        self._close = close
        self._raised: list[BaseException] = []

    def seconds(self, nbytes: int) -> float:
        """How long the tier takes to write and read ``nbytes``, measured with a sample of them.

        Raises:
            StorageError: see ``Tier``.
        """
        sample = torch.full((min(nbytes, SAMPLE),), 1, dtype=torch.uint8, device=self.device)
        self.backend.mark("sample").synchronize()
        extent = self._extent(0, sample.numel())
        try:
            start = time.perf_counter()
            self._write(extent, sample)
            self._read(extent, sample)
            return (time.perf_counter() - start) * nbytes / sample.numel()
        finally:
            self.tier.free(extent.region)

    def mend(self, error: BaseException | None = None) -> None:
        """See ``Shelf``."""
        for raised in self._raised:
            raised.__traceback__ = None  # see ``is_lost``
        tickets = self._tickets()
        found = [ticket.error for ticket in tickets if ticket is not None and ticket.error is not None]
        self._raised = [*found, *([] if error is None else [error])]
        if not self._raised:
            return
        logger.warning("SlideFormer: inputs of layers take other files and slabs after this: %s", self._raised[0])
        for ticket in tickets:
            is_lost(ticket)  # also what fails only now, behind it

    def describe(self) -> dict[str, object]:
        """See ``Shelf``."""
        return {**self.tier.describe(), "way": self.way, "bytes": self.pool.nbytes}

    def abandon(self) -> None:
        """See ``Shelf``."""
        self.tier.close()
        self._close()

    def _tickets(self) -> list[Ticket | None]:
        """The last transfers of all that is used again."""
        return []

    def _write(self, extent: Extent, source: torch.Tensor) -> None:
        self.tier.renew(extent.region, source.numel() * source.element_size())
        self.tier.write(extent.region, 0, source).synchronize()

    def _read(self, extent: Extent, target: torch.Tensor) -> None:
        self.tier.read(extent.region, 0, target).synchronize()

    def _extent(self, number: int, nbytes: int) -> Extent:
        return Extent(self.tier.allocate(f"boundary-{number}", nbytes))


class DirectShelf(FileShelf):
    """For a tier that moves tensors of the device itself."""

    way = "straight from the device"
    exits = 2
    """One is written while the next one is computed on: the host waits for a write itself, no stream does it."""

    def __init__(self, backend: Backend, tier: Tier, close: Callable[[], None]) -> None:
        super().__init__(backend, tier, close)
        self.device = backend.device

    def store(self, boundary: Boundary, source: torch.Tensor) -> Ticket:
        """See ``Shelf``."""
        block = boundary.block = self.pool.take(boundary.nbytes)
        self.backend.touch(f"forward into {boundary.name}", writes=(boundary.tracked,))
        gone = boundary.stored = block.drained = self.backend.file_out.submit(
            f"boundary of {boundary.name} from the device to file",
            partial(self._write, block.room, source),
            after={
                "store after compute": self.backend.mark(f"boundary of {boundary.name}"),
                "file after block drained": block.drained,
            },
            reads=(boundary.tracked,),
            writes=(block.room,),
            keep=source,
        )
        return gone

    def load(self, boundary: Boundary, target: torch.Tensor) -> None:
        """See ``Shelf``."""
        block: Block[Extent] | None = boundary.block
        if block is None:
            return
        boundary.loaded = block.drained = self.backend.file_back.submit(
            f"boundary of {boundary.name} from file to the device",
            partial(self._read, block.room, target),
            after={
                "load after boundary stored": boundary.stored,
                "load after compute": self.backend.mark(f"memory for the boundary of {boundary.name}"),
            },
            reads=(block.room,),
            writes=(boundary.tracked,),
            keep=target,
        )


class StagedShelf(FileShelf):
    """Through slabs of host memory, pinned where DMA reads them.

    Args:
        backend, tier, close: see ``FileShelf``.
        memory: host allocator.
    """

    way = "through host memory"

    def __init__(self, backend: Backend, tier: Tier, close: Callable[[], None], memory: HostMemory) -> None:
        super().__init__(backend, tier, close)
        self._staging = Staging(memory)

    def store(self, boundary: Boundary, source: torch.Tensor) -> Ticket:
        """See ``Shelf``."""
        stage = self._staging.take(boundary.nbytes)
        block = boundary.block = self.pool.take(boundary.nbytes)
        staged = view(stage.slab, boundary)
        self.backend.touch(f"forward into {boundary.name}", writes=(boundary.tracked,))
        gone = self.backend.out.submit(
            f"boundary of {boundary.name} to the host",
            partial(copy, staged, source),
            after={
                "store after compute": self.backend.mark(f"boundary of {boundary.name}"),
                "store after staging drained": stage.drained,
            },
            reads=(boundary.tracked,),
            writes=(stage.slab,),
            keep=source,
        )
        boundary.stored = block.drained = stage.drained = self.backend.file_out.submit(
            f"boundary of {boundary.name} to file",
            partial(self._write, block.room, staged),
            after={"file after boundary staged": gone, "file after block drained": block.drained},
            reads=(stage.slab,),
            writes=(block.room,),
        )
        return gone

    def load(self, boundary: Boundary, target: torch.Tensor) -> None:
        """See ``Shelf``."""
        block: Block[Extent] | None = boundary.block
        if block is None:
            return
        stage = self._staging.take(boundary.nbytes)
        staged = view(stage.slab, boundary)
        block.drained = self.backend.file_back.submit(
            f"boundary of {boundary.name} from file",
            partial(self._read, block.room, staged),
            after={"load after boundary stored": boundary.stored, "load after staging drained": stage.drained},
            reads=(block.room,),
            writes=(stage.slab,),
        )
        boundary.loaded = stage.drained = self.backend.back.submit(
            f"boundary of {boundary.name} to the device",
            partial(copy, target, staged),
            after={
                "load after boundary read": block.drained,
                "load after compute": self.backend.mark(f"memory for the boundary of {boundary.name}"),
            },
            reads=(stage.slab,),
            writes=(boundary.tracked,),
            keep=target,
        )

    def mend(self, error: BaseException | None = None) -> None:
        """See ``Shelf``."""
        super().mend(error)
        self._staging.mend()

    def close(self) -> None:
        """See ``Shelf``."""
        super().close()
        self._staging.clear()

    def _tickets(self) -> list[Ticket | None]:
        return [*super()._tickets(), *self._staging.tickets]
