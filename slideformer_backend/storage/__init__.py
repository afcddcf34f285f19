"""Host memory: exact-size slabs, pinned when DMA touches them."""

from .memory import HostMemory, Slab, numpy_view
from .tracked import Tracked

__all__ = ["HostMemory", "Slab", "Tracked", "numpy_view"]
