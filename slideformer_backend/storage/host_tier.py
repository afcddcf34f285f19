"""Host memory as a tier: pinned slabs, or pageable ones."""

from __future__ import annotations

from functools import partial

import torch

from .memory import HostMemory, Slab
from .ticket import Ticket
from .tier import Piece, Region, Tier, flat_bytes

PIECE = 8 << 20
"""Bytes that one thread copies at a time."""


class HostRegion(Region):
    """A region that is a slab."""

    def __init__(self, slab: Slab) -> None:
        super().__init__(slab.name, slab.nbytes)
        self.slab: Slab | None = slab

    def part(self, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes of the slab."""
        if self.slab is None:
            raise ValueError(f"{self.name} has been freed")
        return self.slab.flat[offset : offset + nbytes]


class HostTier(Tier):
    """Slabs of host memory.

    Args:
        memory: allocates; pins where it is told to and can.
        pinned: whether slabs are for DMA.
        threads: copying threads.
    """

    def __init__(self, memory: HostMemory, *, pinned: bool, threads: int = 4) -> None:
        super().__init__(threads)
        self.name = "pinned host memory" if pinned else "pageable host memory"
        self._memory = memory
        self._pinned = pinned

    def allocate(self, name: str, nbytes: int) -> HostRegion:
        """See ``Tier``."""
        region = HostRegion(self._memory.allocate(name, nbytes, dma=self._pinned))
        self._regions.add(region)
        return region

    def read(self, region: Region, offset: int, target: torch.Tensor) -> Ticket:
        """See ``Tier``."""
        flat = flat_bytes(region, offset, target)
        return self._copies(region, offset, flat, is_read=True)

    def write(self, region: Region, offset: int, source: torch.Tensor) -> Ticket:
        """See ``Tier``."""
        flat = flat_bytes(region, offset, source)
        return self._copies(region, offset, flat, is_read=False)

    def renew(self, region: Region, nbytes: int) -> None:
        """See ``Tier``."""
        region.resize(nbytes)
        _of(region).part(0, nbytes).zero_()

    def free(self, region: Region) -> None:
        """See ``Tier``."""
        _of(region).slab = None
        self._regions.discard(region)

    def _copies(self, region: Region, offset: int, flat: torch.Tensor, *, is_read: bool) -> Ticket:
        stored = _of(region).part(offset, flat.numel())
        target, source = (flat, stored) if is_read else (stored, flat)
        pieces: list[Piece] = [
            partial(target[start : start + PIECE].copy_, source[start : start + PIECE])
            for start in range(0, flat.numel(), PIECE)
        ]
        return self._start(f"{'read' if is_read else 'write'} of {region.name}", pieces, (target, source))


def _of(region: Region) -> HostRegion:
    if not isinstance(region, HostRegion):
        raise TypeError(f"{region!r} belongs to another tier")
    return region
