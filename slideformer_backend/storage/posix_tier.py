"""Files through ``preadv`` and ``pwritev``, past the page cache where the file system lets us (O_DIRECT)."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable

import torch

from ..errors import StorageError
from .block_tier import BLOCK, REQUEST, BlockTier, FileRegion
from .checksum import block_sums
from .spill import SpillDirectory
from .system import System, file_size_limit, undone, uninterrupted
from .tier import Region

logger = logging.getLogger(__name__)

ALIGNMENTS = (4096, 16384, 65536)
"""Tried in turn: address, offset and length of direct I/O are multiples of what the device asks for (HAZARDS 14)."""
STALLS = 8
"""Calls in a row that may move nothing before we give up."""
NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class PosixRegion(FileRegion):
    """A region with an open file, which is closed with the region.

    Requests hold their region, so that one that is dropped without ``Tier.free`` outlives its last request.
    """

    def __init__(self, name: str, nbytes: int, path: str, block: int, fd: int, system: System) -> None:
        super().__init__(name, nbytes, path, block)
        self.fd = fd
        self._close = weakref.finalize(self, undone, system.close, fd, path)
        self._close.atexit = False  # the process's end closes it, after threads that may still use it

    def close(self) -> None:
        """Close the file. Idempotent; no request may be in flight."""
        self.fd = -1
        self._close()


class PosixTier(BlockTier):
    """Spill files with a thread pool of plain system calls.

    Args:
        directory: where the files are; the tier does not close it.
        threads: requests in flight.
        block: bytes under one checksum.
        request: bytes of one request.
        direct: ask for O_DIRECT. A file system that refuses it is said once, and the page cache used.
        less: what the user can do to have less in files, for the errors of a full disk.

    Raises:
        StorageError: the directory cannot be written.
    """

    name = "posix"

    def __init__(
        self,
        directory: SpillDirectory,
        threads: int = 8,
        *,
        block: int = BLOCK,
        request: int = REQUEST,
        direct: bool = True,
        less: str = "",
    ) -> None:
        super().__init__(threads, block=block, request=request)
        self.directory = directory
        self._system = directory.system
        self._less = less
        self._scratch = threading.local()
        self.alignment = self._probe() if direct else 0
        """What direct I/O is aligned to; 0: through the page cache."""
        block_sums(torch.zeros(4, dtype=torch.uint8))  # compiles the kernel before the first step

    def describe(self) -> dict[str, object]:
        """See ``Tier``."""
        way = f"O_DIRECT, aligned to {self.alignment}" if self.alignment else "page cache"
        return {**super().describe(), "request": self.request, "access": way, "path": self.directory.path}

    def allocate(self, name: str, nbytes: int) -> PosixRegion:
        """See ``Tier``."""
        path = self.directory.file(name)
        fd = self._open(path, is_direct=self.alignment > 0)
        region = PosixRegion(name, nbytes, path, self.block, fd, self._system)
        self._regions.add(region)
        try:
            reserve(self._system, region.fd, region.path, self._padded(nbytes), self._less)
        except BaseException:
            self.free(region)
            raise
        return region

    def free(self, region: Region) -> None:
        """See ``Tier``."""
        if not isinstance(region, PosixRegion) or region.fd < 0:
            return
        self._regions.discard(region)
        undone(self._system.unlink, region.path, region.path)
        region.close()

    def load(self, region: FileRegion, start: int, target: torch.Tensor) -> None:
        """See ``BlockTier``."""
        if self._fits(target):
            self._move(self._system.read_at, "Reading", region, start, _memory_of(target))
            return
        for part, scratch in self._through_scratch(target):
            self._move(self._system.read_at, "Reading", region, start, scratch)
            part.copy_(torch.frombuffer(scratch, dtype=torch.uint8)[: part.numel()])
            start += part.numel()

    def store(self, region: FileRegion, start: int, source: torch.Tensor) -> None:
        """See ``BlockTier``."""
        if self._fits(source):
            self._move(self._system.write_at, "Writing", region, start, _memory_of(source))
            return
        for part, scratch in self._through_scratch(source):
            torch.frombuffer(scratch, dtype=torch.uint8)[: part.numel()].copy_(part)
            self._move(self._system.write_at, "Writing", region, start, scratch)
            start += part.numel()

    def mapped(self, region: FileRegion) -> torch.Tensor:
        """The bytes of a region, flat uint8, as pages of its file, which the system reads when they are looked at and
        gives up when it needs memory. No write may be in flight, and none may begin while it is looked at.

        Raises:
            StorageError: they are not what was written.
        """
        for number, found in enumerate(region.sums):
            if found is None:  # zeros, which are not in the file
                start = number * self.block
                self.store(region, start, torch.zeros(min(self.block, region.nbytes - start), dtype=torch.uint8))
        try:
            pages = mmap.mmap(getattr(region, "fd", -1), region.nbytes, flags=mmap.MAP_PRIVATE)
        except OSError as error:
            raise _failed("Mapping", region.path, None, error) from error
        flat = torch.frombuffer(pages, dtype=torch.uint8)
        self.verify(region, flat)
        return flat

    def _fits(self, flat: torch.Tensor) -> bool:
        """Whether the system can move the tensor's own memory."""
        unit = self.alignment or 1
        return flat.device.type == "cpu" and flat.data_ptr() % unit == 0 and flat.numel() % unit == 0

    def _through_scratch(self, flat: torch.Tensor) -> list[tuple[torch.Tensor, memoryview]]:
        """Parts of ``flat``, each with an aligned buffer of this thread that it fits in, padded to the alignment."""
        if not hasattr(self._scratch, "whole"):
            self._scratch.whole = aligned_buffer(self.request, self.alignment)
        whole: memoryview = self._scratch.whole
        return [(part, whole[: self._padded(part.numel())]) for part in flat.split(self.request)]

    def _padded(self, nbytes: int) -> int:
        unit = self.alignment or 1
        return -(-nbytes // unit) * unit

    def _move(self, call: Callable[..., int], what: str, region: FileRegion, start: int, buffer: memoryview) -> None:
        """Call until the whole buffer is moved. A short count is continued, from an aligned place."""
        fd, done, stalls = getattr(region, "fd", -1), 0, 0
        end = start + len(buffer)
        while done < len(buffer):
            try:
                count = uninterrupted(call, fd, buffer[done:], start + done)
            except OSError as error:
                is_cut = error.errno == errno.EINVAL and _is_cut(what, end)
                told = _too_large() if is_cut else error
                raise _failed(what, region.path, start + done, told, self._less) from error
            count -= count % (self.alignment or 1)
            stalls = 0 if count else stalls + 1
            if stalls == STALLS and _is_cut(what, end):
                raise _failed(what, region.path, start + done, _too_large(), self._less)
            if stalls == STALLS:
                raise StorageError(
                    f"{what} {len(buffer) - done} more bytes at",
                    path=region.path,
                    offset=start + done,
                    found="no progress",
                    remedy="somebody shortened the file, or the disk is full: check it, then restore the last"
                    " checkpoint",
                )
            done += count

    def _open(self, path: str, *, is_direct: bool) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | (os.O_DIRECT if is_direct else 0)
        try:
            return uninterrupted(self._system.open, path, flags)
        except OSError as error:
            raise _failed("Opening", path, None, error) from error

    def _probe(self) -> int:
        """The alignment that direct I/O works with here; 0 and a warning where it does not."""
        for alignment in ALIGNMENTS:
            try:
                if self._works(alignment):
                    return alignment
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise _failed("Trying direct I/O in", self.directory.path, None, error) from error
        logger.warning(
            "SlideFormer: the file system of %s has no direct I/O (O_DIRECT); going on through the page cache, which"
            " takes host memory and CPU time. A local ext4 or XFS on NVMe has it.",
            self.directory.path,
        )
        return 0

    def _works(self, alignment: int) -> bool:
        path = self.directory.file("probe")
        fd = -1
        try:
            fd = self._open_direct(path)
            buffer = aligned_buffer(alignment, alignment)
            moved = [uninterrupted(call, fd, buffer, 0) for call in (self._system.write_at, self._system.read_at)]
            return moved == [alignment, alignment]
        finally:
            if fd >= 0:
                undone(self._system.close, fd, path)
            undone(self._system.unlink, path, path)  # some file systems make the file and then refuse the flag

    def _open_direct(self, path: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_DIRECT
        return uninterrupted(self._system.open, path, flags)


def _memory_of(flat: torch.Tensor) -> memoryview:
    return flat.numpy().data


def reserve(system: System, fd: int, path: str, nbytes: int, less: str = "") -> None:
    """Let the file have its blocks now, so that a full disk is found before the first step. ``less``: see the tier.

    Raises:
        StorageError: there is no room, or files of this process may not be that large.
    """
    if nbytes == 0:
        return
    try:
        if nbytes > file_size_limit():  # not every file system asks before it is written to
            raise _too_large()
        uninterrupted(system.allocate, fd, nbytes)
        return
    except OSError as error:
        if error.errno not in NO_FALLOCATE:
            raise _failed(f"Reserving {nbytes} bytes for", path, None, error, less) from error
    try:
        free = system.free_bytes(os.path.dirname(path))
    except OSError as error:
        raise _failed("Asking for the free space of", path, None, error) from error
    if free < nbytes:
        full = OSError(errno.ENOSPC, f"{free} bytes are free")
        raise _failed(f"Reserving {nbytes} bytes for", path, None, full, less)


def _is_cut(what: str, end: int) -> bool:
    """Whether the limit on file sizes cuts a write that ends at byte ``end``. Where that leaves a length that is not
    aligned, the system calls it invalid, or writes the same unaligned rest again and again."""
    return what == "Writing" and end > file_size_limit()


def _too_large() -> OSError:
    return OSError(errno.EFBIG, os.strerror(errno.EFBIG))


def aligned_buffer(nbytes: int, alignment: int) -> memoryview:
    """Writable memory of ``nbytes`` at an address that is a multiple of ``alignment``."""
    base = memoryview(mmap.mmap(-1, nbytes + alignment))
    address = torch.frombuffer(base, dtype=torch.uint8).data_ptr()
    start = -address % alignment if alignment else 0
    return base[start : start + nbytes]


_REMEDIES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "raise the quota there",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit on open files (sysctl fs.file-max)",
    errno.EROFS: "mount the file system for writing, or change nvme_path",
    errno.EACCES: "change the permissions there, or nvme_path",
    errno.EIO: "the disk fails (see the kernel log): put nvme_path on another one and restore the last checkpoint",
}


def _failed(what: str, path: str, offset: int | None, error: OSError, less: str = "") -> StorageError:
    remedy = _REMEDIES.get(error.errno or 0, "check the disk and the kernel log, then restore the last checkpoint")
    if less and error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = f"{remedy}, or {less}"
    return StorageError(what, path=path, offset=offset, error=error, remedy=remedy)
