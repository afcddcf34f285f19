"""Tiers of files: regions are cut into blocks, each with a checksum that is kept in memory.

Spill files live no longer than their run, so their checksums need not: what a disk returns is compared with what this
process wrote, and a file that somebody exchanged cannot bring its own checksum along.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from ..errors import StateError, StorageError
from .checksum import MOST_BYTES, ZEROS, Sums, block_sums
from .ticket import Ticket
from .tier import Region, Tier, flat_bytes

BLOCK = 1 << 20
"""Bytes under one checksum."""
REQUEST = 4 << 20
"""Bytes that one thread moves at a time."""
TORN: Sums = (-1, -1)
"""Of a block whose last write did not end: what it holds is unknown."""


class FileRegion(Region):
    """A region that is a file. ``sums`` holds the checksum of each block, None for zeros that are not in the file."""

    def __init__(self, name: str, nbytes: int, path: str, block: int) -> None:
        super().__init__(name, nbytes)
        self.path = path
        self.sums: list[Sums | None] = [None] * -(-nbytes // block)
        self.lock = threading.Lock()
        """Held while a part of a block is read or exchanged."""


class _Span(NamedTuple):
    """Bytes ``start`` to ``end`` of a region: whole blocks, or a part of one."""

    start: int
    end: int
    is_whole: bool


class BlockTier(Tier):
    """What file tiers share; they themselves move whole blocks (the last one of a region may be short).

    Args:
        threads: I/O threads, each with one request in flight.
        block: bytes under one checksum.
        request: bytes of one request, a multiple of ``block``.
    """

    def __init__(self, threads: int, *, block: int = BLOCK, request: int = REQUEST) -> None:
        super().__init__(threads)
        if block > MOST_BYTES or request % block:
            raise StateError("blocks of this size do not fit.", found=(block, request), expected=f"up to {MOST_BYTES}")
        self.block = block
        self.request = request
        self.bytes_read = 0
        self.bytes_written = 0

    @abc.abstractmethod
    def allocate(self, name: str, nbytes: int) -> FileRegion:
        """See ``Tier``."""

    @abc.abstractmethod
    def load(self, region: FileRegion, start: int, target: torch.Tensor) -> None:
        """Read whole blocks from byte ``start`` on into flat ``target``; all of it, or StorageError."""

    @abc.abstractmethod
    def store(self, region: FileRegion, start: int, source: torch.Tensor) -> None:
        """Write whole blocks from flat ``source`` at byte ``start``; all of it, or StorageError."""

    def read(self, region: Region, offset: int, target: torch.Tensor) -> Ticket:
        """See ``Tier``."""
        file, flat = _of(region), flat_bytes(region, offset, target)
        self.bytes_read += flat.numel()
        pieces = [
            partial(
                self._read_whole if span.is_whole else self._read_part,
                file,
                span.start,
                flat[span.start - offset : span.end - offset],
            )
            for span in self._spans(file, offset, offset + flat.numel())
        ]
        return self._start(f"read of {region.name}", pieces, flat)

    def write(self, region: Region, offset: int, source: torch.Tensor) -> Ticket:
        """See ``Tier``."""
        file, flat = _of(region), flat_bytes(region, offset, source)
        self.bytes_written += flat.numel()
        pieces = [
            partial(
                self._write_whole if span.is_whole else self._write_part,
                file,
                span.start,
                flat[span.start - offset : span.end - offset],
            )
            for span in self._spans(file, offset, offset + flat.numel())
        ]
        return self._start(f"write of {region.name}", pieces, flat)

    def verify(self, region: FileRegion, whole: torch.Tensor) -> None:
        """Raise StorageError unless ``whole`` is what the region holds."""
        for number, found in enumerate(block_sums(whole, self.block)):
            _verify(region, number * self.block, region.sums[number], found)

    def renew(self, region: Region, nbytes: int) -> None:
        """See ``Tier``. What a write that failed has left is forgotten too."""
        region.resize(nbytes)
        _of(region).sums = [None] * -(-nbytes // self.block)

    def _spans(self, region: FileRegion, start: int, end: int) -> Iterator[_Span]:
        while start < end:
            first = start - start % self.block
            past = min(first + self.block, region.nbytes)
            is_whole = start == first and end >= past
            if is_whole:
                reach = min(end, first + self.request)
                past = reach if reach == region.nbytes else max(past, reach - reach % self.block)
            stop = min(end, past)
            yield _Span(start, stop, is_whole)
            start = stop

    def _read_whole(self, region: FileRegion, start: int, target: torch.Tensor) -> None:
        blocks = range(start // self.block, -(-(start + target.numel()) // self.block))
        parts = target.split(self.block)
        if all(region.sums[number] is not None for number in blocks):
            self.load(region, start, target)
        else:
            for number, part in zip(blocks, parts, strict=True):
                if region.sums[number] is None:
                    part.zero_()
                else:
                    self.load(region, number * self.block, part)
        for number, found in zip(blocks, block_sums(target, self.block), strict=True):
            _verify(region, number * self.block, region.sums[number], found)

    def _write_whole(self, region: FileRegion, start: int, source: torch.Tensor) -> None:
        first = start // self.block
        sums = block_sums(source, self.block)
        if all(found == ZEROS for found in sums):  # moments before the first step, gradients of unused experts
            region.sums[first : first + len(sums)] = [None] * len(sums)
            return
        region.sums[first : first + len(sums)] = [TORN] * len(sums)
        self.store(region, start, source)
        region.sums[first : first + len(sums)] = sums

    def _read_part(self, region: FileRegion, start: int, target: torch.Tensor) -> None:
        with region.lock:
            whole = self._block_around(region, start)
        target.copy_(whole[start % self.block : start % self.block + target.numel()])

    def _write_part(self, region: FileRegion, start: int, source: torch.Tensor) -> None:
        with region.lock:
            whole = self._block_around(region, start)
            whole[start % self.block : start % self.block + source.numel()].copy_(source)
            self._write_whole(region, start - start % self.block, whole)

    def _block_around(self, region: FileRegion, position: int) -> torch.Tensor:
        first = position - position % self.block
        whole = torch.empty(min(self.block, region.nbytes - first), dtype=torch.uint8)
        self._read_whole(region, first, whole)
        return whole


def _verify(region: FileRegion, start: int, expected: Sums | None, found: Sums) -> None:
    """Raise StorageError unless the block at ``start`` is what was written there last."""
    if found == expected or expected is None:
        return
    if expected == TORN:
        raise StorageError(
            "Reading a block whose last write failed, in",
            path=region.path,
            offset=start,
            remedy="restore the last checkpoint; the error of that write says why it failed",
        )
    raise StorageError(
        "Checking a block read from",
        path=region.path,
        offset=start,
        found="checksum {:x} {:x}".format(*found),
        expected="{:x} {:x}, as written".format(*expected),
        remedy="the disk, or whoever else wrote this file, changed the data: restore the last checkpoint, and put"
        " nvme_path on another disk if the kernel log shows errors of this one",
    )


def _of(region: Region) -> FileRegion:
    if not isinstance(region, FileRegion):
        raise TypeError(f"{region!r} belongs to another tier")
    return region
