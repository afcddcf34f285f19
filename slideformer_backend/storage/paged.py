"""Host memory whose pages can be given back and asked for again, at the same address."""

from __future__ import annotations

import contextlib
import mmap

import torch

from ..errors import SlideFormerError
from .memory import Slab

NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux (Python names it from 3.13 on): address space is not counted as memory."""


class PagedSlab(Slab):
    """A slab for data that is elsewhere most of the time: zeros at first, and again after ``drop``.

    Its address stays, so that views of it, and whatever holds one, need not know where the data is at the moment. What
    is read while it is elsewhere is zero; the owner orders accesses.

    Raises:
        SlideFormerError: the system has no address space left, or reserves memory for all of it.
    """

    def __init__(self, name: str, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        try:
            self._map = mmap.mmap(-1, max(nbytes, 1), flags=flags)
        except (OSError, ValueError) as error:
            raise SlideFormerError(
                f"The system has no address space for {nbytes} bytes of {name} ({error}).",
                remedy="set vm.overcommit_memory to 0 or 1 and lift limits on address space (ulimit -v)",
            ) from error
        with contextlib.suppress(OSError):  # fewer page faults where the kernel has huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        super().__init__(name, torch.frombuffer(self._map, dtype=torch.uint8)[:nbytes], pinned=False)

    @property
    def own_bytes(self) -> int:
        """Bytes that come with the data and go with it."""
        return self.nbytes

    def enter(self) -> None:
        """The data is coming: whoever needs memory for it takes some now."""

    def drop(self, keep: int = 0) -> None:
        """Give the pages back to the system; the contents are gone. ``keep``: how many others may be kept for later."""
        self._map.madvise(mmap.MADV_DONTNEED)
