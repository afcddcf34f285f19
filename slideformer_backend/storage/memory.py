"""Exact-size, page-aligned host slabs.

torch's pinned allocator rounds every request up to a power of two (HAZARDS 6); here each slab is allocated by numpy,
page-aligned, and registered with the driver, so the overhead is below one page.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .tracked import Tracked

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)


class Slab(Tracked):
    """One host allocation. ``flat`` is its memory as 1-D uint8; ``pinned`` says whether the driver registered it.

    Every tensor viewed from ``flat`` keeps the memory alive; it is unregistered and freed with the last of them.
    """

    def __init__(self, name: str, flat: torch.Tensor, pinned: bool) -> None:
        super().__init__(name, flat)
        self.pinned = pinned

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.flat.numel()

    @property
    def memory(self) -> torch.Tensor:
        """Its bytes as transfers see them; ask when they run."""
        return self.flat

    def view(self, dtype: torch.dtype, offset: int, count: int) -> torch.Tensor:
        """``count`` elements of ``dtype`` from byte ``offset`` as a 1-D tensor that shares the slab's memory."""
        return self.flat[offset : offset + count * dtype.itemsize].view(dtype)


class HostMemory:
    """Allocates slabs and knows how many bytes are alive.

    Args:
        pin: register slabs for DMA. A registration that fails is said once, and the slab stays pageable (HAZARDS 7).
    """

    def __init__(self, *, pin: bool) -> None:
        self.pin = pin
        self.allocated = 0
        self.pinned = 0
        self._warned = False

    def allocate(self, name: str, nbytes: int, *, dma: bool) -> Slab:
        """A zero-filled slab of exactly ``nbytes``; pinned when ``dma`` and pinning is on."""
        page = mmap.PAGESIZE
        base = np.zeros(nbytes + page, np.uint8)
        start = -base.ctypes.data % page
        return self.adopt(name, torch.from_numpy(base[start : start + nbytes]), base, dma=dma)

    def adopt(self, name: str, flat: torch.Tensor, base: NDArray[np.uint8], *, dma: bool) -> Slab:
        """A slab of memory that is there already, for as long as ``base``, of which ``flat`` is a view, is alive."""
        nbytes = flat.numel()
        registered = dma and self.pin and nbytes > 0 and self._register(name, flat)
        self.allocated += nbytes
        self.pinned += nbytes if registered else 0
        weakref.finalize(base, _release, weakref.ref(self), flat.data_ptr(), nbytes, registered).atexit = False
        return Slab(name, flat, registered)

    def _register(self, name: str, flat: torch.Tensor) -> bool:
        error = int(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.numel(), 0))
        if error == 0:
            return True
        if not self._warned:
            self._warned = True
            logger.warning(
                "SlideFormer: pinning %d bytes of host memory for %s failed (CUDA error %d), %d bytes are pinned;"
                " going on with pageable memory, which is slower. Raise the locked-memory limit (`ulimit -l`, the"
                " container's or WSL's memory setting) to avoid this.",
                flat.numel(),
                name,
                error,
                self.pinned,
            )
        return False


def _release(memory_ref: weakref.ref[HostMemory], address: int, nbytes: int, registered: bool) -> None:
    if registered:
        torch.cuda.cudart().cudaHostUnregister(address)
    memory = memory_ref()
    if memory is not None:
        memory.allocated -= nbytes
        memory.pinned -= nbytes if registered else 0


def numpy_view(tensor: torch.Tensor) -> NDArray[Any]:
    """A 1-D contiguous host tensor as numpy: float32 as itself, bfloat16 and float16 as their uint16 bits."""
    if tensor.dtype == torch.float32:
        return tensor.detach().numpy()
    return tensor.detach().view(torch.uint16).numpy()
