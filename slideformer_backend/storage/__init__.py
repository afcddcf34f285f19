"""Where bytes live: host slabs, pinned when DMA touches them, and the tiers behind one contract (DESIGN 8)."""

from .block_tier import BlockTier, FileRegion
from .frames import FramedSlab, Frames
from .host_tier import HostTier
from .memory import HostMemory, Slab, numpy_view
from .paged import PagedSlab
from .posix_tier import PosixRegion, PosixTier
from .spill import SpillDirectory
from .system import System
from .ticket import Ticket
from .tier import Region, Tier
from .tracked import Tracked

__all__ = [
    "BlockTier",
    "FileRegion",
    "FramedSlab",
    "Frames",
    "HostMemory",
    "HostTier",
    "PagedSlab",
    "PosixRegion",
    "PosixTier",
    "Region",
    "Slab",
    "SpillDirectory",
    "System",
    "Ticket",
    "Tier",
    "Tracked",
    "numpy_view",
]
