"""Measure the rates that a plan needs: matrix products, transfers, the CPU update, a drive."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from ..plan.machine import Machine
from ..plan.rates_cache import cache_file, load_rates, save_rates

BLOCK = 8 << 20  # bytes of one request to a drive
THREADS = 4  # requests at once


def calibrated(machine: Machine, *, quick: bool = False, refresh: bool = False) -> Machine:
    """``machine``, which is this one, with its rates: from the cache, or measured (some 20 s) and kept there.

    Args:
        machine: as probed.
        quick: small sizes, for tests; nothing is kept.
        refresh: measure even if the cache has them.
    """
    file = cache_file(machine)
    rates = {} if quick or refresh else load_rates(file)
    needed = {"gemm", "host"} | ({"gpu_memory", "h2d", "d2h"} if machine.has_gpu else set())
    if not needed <= rates.keys():
        rates = measure(machine, quick=quick)
        if not quick:
            save_rates(file, rates)
    return machine.with_rates(rates, "measured")


def measure(machine: Machine, *, quick: bool = False) -> dict[str, float]:
    """The rates of this machine, by the names of ``RATE_UNITS``."""
    from ..benchmarks.harness.limits import BYTES, measure_limits

    device = torch.device("cuda", torch.cuda.current_device()) if machine.has_gpu else torch.device("cpu")
    # a CPU takes minutes for the GPU's sizes; its arrays must still be larger than its caches
    elements = None if quick or machine.has_gpu else 1 << 25
    limits = measure_limits(device, quick=quick or not machine.has_gpu, elements=elements)
    names = {"gemm": "gemm", "gpu_memory": "gpu_memory", "h2d": "h2d_both", "d2h": "d2h_both"}
    rates = {name: limits[found] for name, found in names.items() if found in limits}
    return {**rates, "host": limits["advance"] * BYTES["advance"]}


class Drive(NamedTuple):
    """What was found about the folder of spill files. Rates in byte/s; ``is_direct``: past the page cache."""

    read: float
    write: float
    is_direct: bool
    alignment: int


def measure_drive(folder: Path, nbytes: int = 1 << 30) -> Drive:
    """Write ``nbytes`` to a temporary file in ``folder`` and read them back, with O_DIRECT where it can.

    Args:
        folder: exists; the file in it has no name where the system allows that, and is gone afterwards.
        nbytes: a multiple of ``BLOCK``.

    Raises:
        OSError: no space, no permission, an error of the drive.
    """
    with _file(folder) as handle:
        is_direct = _set_direct(handle)
        alignment = _alignment(handle) if is_direct else 1
        offsets = range(0, nbytes, BLOCK)
        with _blocks() as blocks, ThreadPoolExecutor(THREADS) as pool:
            for block in blocks:
                block[:] = os.urandom(1 << 20) * (BLOCK >> 20)

            def work(call: Callable[[int, memoryview, int], int], number: int) -> None:
                for offset in offsets[number::THREADS]:
                    _whole(call, handle, blocks[number], offset)

            def timed(call: Callable[[int, memoryview, int], int]) -> float:
                start = time.perf_counter()
                for done in [pool.submit(work, call, number) for number in range(THREADS)]:
                    done.result()
                if call is _write:
                    os.fsync(handle)
                return nbytes / (time.perf_counter() - start)

            write = timed(_write)
            if not is_direct:
                with contextlib.suppress(OSError):
                    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            return Drive(timed(_read), write, is_direct, alignment)


@contextlib.contextmanager
def _file(folder: Path) -> Iterator[int]:
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        yield file.fileno()


@contextlib.contextmanager
def _blocks() -> Iterator[list[memoryview]]:
    maps = [mmap.mmap(-1, BLOCK) for _ in range(THREADS)]  # page-aligned, as O_DIRECT asks
    views = [memoryview(part) for part in maps]
    try:
        yield views
    finally:
        for view, part in zip(views, maps, strict=True):
            view.release()
            part.close()


def _set_direct(handle: int) -> bool:
    import fcntl

    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        return False
    try:
        with _blocks() as blocks:
            os.pwrite(handle, blocks[0], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(handle, fcntl.F_SETFL, flags)
        return False
    return True


def _alignment(handle: int) -> int:
    """The least multiple that lengths of direct writes must have."""
    with _blocks() as blocks:
        for size in (512, 4096, 65536):
            try:
                os.pwrite(handle, blocks[0][:size], 0)
            except OSError:
                continue
            return size
    return BLOCK


def _write(handle: int, block: memoryview, offset: int) -> int:
    return os.pwrite(handle, block, offset)


def _read(handle: int, block: memoryview, offset: int) -> int:
    return os.preadv(handle, [block], offset)


def _whole(call: Callable[[int, memoryview, int], int], handle: int, block: memoryview, offset: int) -> None:
    count = call(handle, block, offset)
    if count != len(block):
        raise OSError(errno.EIO, f"{count} of {len(block)} bytes at offset {offset}")
