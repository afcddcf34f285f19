"""Page-locked frames that the memory of a slab can be for a while, at the slab's own address.

What user code holds of a weight is an address; what DMA wants is memory that was page-locked once. A frame is shared
memory with an address of its own, under which it is page-locked; a slab that is given one shows the same pages at the
slab's address, and nothing is copied.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import logging
import mmap
import os
import weakref

import numpy as np
import torch

from .memory import HostMemory, Slab
from .paged import NO_RESERVE, PagedSlab

logger = logging.getLogger(__name__)

_FIXED = 0x10
"""MAP_FIXED of Linux: in place of what is mapped there."""


class Frame:
    """Shared memory of one frame: ``slab`` shows it at its own address, ``fd`` lets it be shown elsewhere too."""

    def __init__(self, name: str, nbytes: int, memory: HostMemory) -> None:
        self.fd = os.memfd_create(name)
        weakref.finalize(self, os.close, self.fd).atexit = False
        os.ftruncate(self.fd, nbytes)
        base = np.frombuffer(mmap.mmap(self.fd, nbytes), np.uint8)
        self.slab: Slab = memory.adopt(name, torch.from_numpy(base), base, dma=True)


class Frames:
    """Frames of one size, made when they are first needed and kept.

    Where the system has no such memory there are none, which is said once: slabs then are pageable.

    Args:
        nbytes: of the largest slab.
        memory: page-locks and counts them.
    """

    def __init__(self, nbytes: int, memory: HostMemory) -> None:
        self.nbytes = -(-max(1, nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = memory
        self._free: collections.deque[Frame] = collections.deque()
        self._made = 0
        self.is_working = self._probe()

    def take(self) -> Frame | None:
        """A frame with whatever it held last; None where there are none."""
        try:
            return self._free.pop()
        except IndexError:
            return self._make() if self.is_working else None

    def give(self, frame: Frame, *, keep: int) -> None:
        """``frame`` is no longer needed; ``keep`` frames stay for the next ones."""
        if len(self._free) < keep:
            self._free.append(frame)

    def _make(self) -> Frame:
        self._made += 1
        return Frame(f"frame {self._made}", self.nbytes, self._memory)

    def _probe(self) -> bool:
        try:
            os.close(os.memfd_create("probe"))
            return True
        except (AttributeError, OSError) as error:
            logger.warning(
                "SlideFormer: no shared memory for frames of %d bytes (%s); weights on their way from NVMe are"
                " pageable, which makes copies to the GPU slower.",
                self.nbytes,
                error,
            )
            return False


class FramedSlab(PagedSlab):
    """A slab whose memory is a frame while its data is there, and no memory at all while it is elsewhere."""

    def __init__(self, name: str, nbytes: int, frames: Frames) -> None:
        super().__init__(name, nbytes)
        self._frames = frames
        self._frame: Frame | None = None

    @property
    def memory(self) -> torch.Tensor:
        """Its bytes where DMA finds them page-locked."""
        return self.flat if self._frame is None else self._frame.slab.flat[: self.nbytes]

    @property
    def own_bytes(self) -> int:
        """Frames are counted by whoever keeps them."""
        return 0 if self._frames.is_working else self.nbytes

    def enter(self) -> None:
        """Give it memory; what is in it is undefined. Idempotent."""
        if self._frame is not None:
            return
        frame = self._frames.take()
        if frame is not None:
            self._show(mmap.MAP_SHARED, frame.fd)
            self._frame = frame

    def drop(self, keep: int = 1 << 30) -> None:
        """Give the memory back; the contents are gone, and it reads as zeros."""
        frame, self._frame = self._frame, None
        if frame is None:
            super().drop(keep)
            return
        self._show(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE, -1)
        self._frames.give(frame, keep=keep)

    def _show(self, flags: int, fd: int) -> None:
        address, nbytes = self.flat.data_ptr(), -(-self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        access = mmap.PROT_READ | mmap.PROT_WRITE
        found = _libc().mmap(address, nbytes, access, flags | _FIXED, fd, 0)
        if found != address:
            code = ctypes.get_errno()
            raise OSError(code, f"{os.strerror(code)} (mapping {nbytes} bytes of {self.name})")


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    sizes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    libc.mmap.argtypes = list(sizes)
    return libc
