"""Files through kvikio: GPUDirect Storage between device buffers and disk where the driver has it.

kvikio is optional (extra ``[gds]``). It can be imported without a GPU, but its I/O needs the CUDA driver library.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from ..errors import StorageError
from .block_tier import BLOCK, REQUEST, BlockTier, FileRegion
from .checksum import block_sums
from .posix_tier import PosixTier, reserve
from .spill import SpillDirectory
from .system import undone, uninterrupted
from .ticket import Ticket
from .tier import Piece, Region, Tier

logger = logging.getLogger(__name__)

REMEDY = "see the kernel log and kvikio's own message; `compat_mode: on` or the POSIX tier go without GPUDirect Storage"


class KvikioRegion(FileRegion):
    """A region with kvikio's handle of its file."""

    handle: Any = None


class KvikioTier(BlockTier):
    """Spill files that device tensors are written to and read from directly; host tensors go the same way.

    Args:
        directory: where the files are; the tier does not close it.
        threads: kvikio's threads, and requests in flight.
        compat_mode: ``auto`` (GPUDirect Storage where it works), ``on`` (never), ``off`` (always; fails without it).
        task_size: bytes of one of kvikio's tasks.
        block: bytes under one checksum.
        request: bytes of one request.
        less: what the user can do to have less in files, for the errors of a full disk.

    kvikio's settings are the process's: they are put back by ``close``.

    Raises:
        ImportError: kvikio is not installed.
    """

    name = "kvikio"

    def __init__(
        self,
        directory: SpillDirectory,
        threads: int = 8,
        *,
        compat_mode: Literal["auto", "on", "off"] = "auto",
        task_size: int = REQUEST,
        block: int = BLOCK,
        request: int = REQUEST,
        less: str = "",
    ) -> None:
        super().__init__(threads, block=block, request=request)
        self.directory = directory
        self._system = directory.system
        self._less = less
        self._streams = threading.local()
        self._kvikio = importlib.import_module("kvikio")
        self._defaults = importlib.import_module("kvikio.defaults")
        wanted = {
            "compat_mode": getattr(self._kvikio.CompatMode, compat_mode.upper()),
            "num_threads": threads,
            "task_size": task_size,
            "auto_direct_io_read": True,
            "auto_direct_io_write": True,
        }
        self._settings = contextlib.ExitStack()
        self._settings.enter_context(self._defaults.set(wanted))
        block_sums(torch.zeros(4, dtype=torch.uint8))

    def describe(self) -> dict[str, object]:
        """See ``Tier``: what kvikio says is in effect, not what it was asked for."""
        get = self._defaults.get
        driver = importlib.import_module("kvikio.cufile_driver")
        return {
            "tier": self.name,
            "threads": int(get("num_threads")),
            "task_size": int(get("task_size")),
            "compat_mode": self._kvikio.CompatMode(get("compat_mode")).name.lower(),
            "uses_posix": bool(self._defaults.is_compat_mode_preferred()),
            "gds_available": bool(driver.get("is_gds_available")),
            "direct_io": bool(get("auto_direct_io_read")),
            "request": self.request,
            "path": self.directory.path,
        }

    def allocate(self, name: str, nbytes: int) -> KvikioRegion:
        """See ``Tier``."""
        region = KvikioRegion(name, nbytes, self.directory.file(name), self.block)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            fd = uninterrupted(self._system.open, region.path, flags)
        except OSError as error:
            raise StorageError("Opening", path=region.path, error=error, remedy=REMEDY) from error
        try:
            reserve(self._system, fd, region.path, nbytes, self._less)
            region.handle = self._kvikio.CuFile(region.path, "r+")
        except (OSError, RuntimeError) as error:
            undone(self._system.unlink, region.path, region.path)
            if isinstance(error, StorageError):
                raise
            raise StorageError("Opening", path=region.path, error=error, remedy=REMEDY) from error
        finally:
            undone(self._system.close, fd, region.path)
        self._regions.add(region)
        return region

    def free(self, region: Region) -> None:
        """See ``Tier``."""
        if not isinstance(region, KvikioRegion) or region.handle is None:
            return
        self._regions.discard(region)
        handle, region.handle = region.handle, None
        handle.close()
        undone(self._system.unlink, region.path, region.path)

    def load(self, region: FileRegion, start: int, target: torch.Tensor) -> None:
        """See ``BlockTier``."""
        self._move("pread", "Reading", region, start, target)

    def store(self, region: FileRegion, start: int, source: torch.Tensor) -> None:
        """See ``BlockTier``."""
        self._move("pwrite", "Writing", region, start, source)

    def close(self) -> None:
        """See ``Tier``."""
        super().close()
        self._settings.close()

    def _start(self, name: str, pieces: Sequence[Piece], keep: object) -> Ticket:
        if isinstance(keep, torch.Tensor) and keep.device.type == "cuda":
            pieces = [partial(self._beside_compute, keep.device, piece) for piece in pieces]
        return super()._start(name, pieces, keep)

    def _beside_compute(self, device: torch.device, piece: Piece) -> None:
        """Device work of a piece (checksums) goes to a stream of this thread: on the default one it would wait for all
        compute that is queued. It is over when the piece is."""
        if not hasattr(self._streams, "own"):
            self._streams.own = torch.cuda.Stream(device)
        stream: torch.cuda.Stream = self._streams.own
        with torch.cuda.stream(stream):
            piece()
        stream.synchronize()

    @staticmethod
    def _move(call: str, what: str, region: FileRegion, start: int, flat: torch.Tensor) -> None:
        buffer: torch.Tensor | np.ndarray[Any, Any] = flat if flat.device.type == "cuda" else flat.numpy()
        handle = getattr(region, "handle", None)
        try:
            count = getattr(handle, call)(buffer, flat.numel(), start).get()
        except (OSError, RuntimeError) as error:
            raise StorageError(what, path=region.path, offset=start, error=error, remedy=REMEDY) from error
        if count != flat.numel():
            raise StorageError(
                what,
                path=region.path,
                offset=start + count,
                found=f"{count} bytes moved",
                expected=f"{flat.numel()}",
                remedy="somebody shortened the file, or the disk is full",
            )


def file_tier(directory: SpillDirectory, threads: int = 8, *, from_device: bool) -> Tier:
    """The tier for spill files in ``directory``: kvikio for device buffers where it works, else POSIX.

    A kvikio that is installed and cannot be used is said, with its reason; it is tried by writing and reading a file.
    """
    if from_device and importlib.util.find_spec("kvikio") is not None:
        try:
            return _tried(KvikioTier(directory, threads))
        except (ImportError, OSError, RuntimeError) as error:
            logger.warning(
                "SlideFormer: kvikio cannot be used here (%s); spill files go through POSIX calls and host memory.",
                str(error).splitlines()[0],
            )
    return PosixTier(directory, threads)


def direct_tier(directory: SpillDirectory, threads: int = 8, *, less: str = "") -> KvikioTier | None:
    """The tier whose transfers go from device memory straight to files (GPUDirect Storage); None, with the reason in
    the log, where that does not work: kvikio's compatibility mode would go through host memory, as others do better.
    """
    if importlib.util.find_spec("kvikio") is None:
        logger.info("SlideFormer: no GPUDirect Storage: kvikio is not installed (the extra [gds]).")
        return None
    try:
        tier = _tried(KvikioTier(directory, threads, less=less))
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning("SlideFormer: no GPUDirect Storage: kvikio cannot be used (%s).", str(error).splitlines()[0])
        return None
    found = tier.describe()
    if found["uses_posix"] or not found["gds_available"]:  # cuFile has a compatibility mode of its own
        tier.close()
        logger.info("SlideFormer: no GPUDirect Storage: kvikio finds no driver for it (see `slideformer doctor`).")
        return None
    return tier


def _tried(tier: KvikioTier) -> KvikioTier:
    try:
        region = tier.allocate("probe", 4096)
        try:
            page = torch.arange(4096).to(torch.uint8)
            tier.write(region, 0, page).synchronize()
            tier.read(region, 0, torch.empty_like(page)).synchronize()
        finally:
            tier.free(region)
    except BaseException:
        tier.close()
        raise
    return tier
