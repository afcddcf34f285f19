"""Checks of the host: memory and cgroup, CPU threads, the cache of measured rates, the folder of spill files."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ..optim.workers import default_threads
from ..plan.host_budget import probe_host_budget
from ..plan.machine import Machine, cores, free_space
from ..plan.rates_cache import cache_file
from ..plan.remedies import gib
from .calibrate import BLOCK, measure_drive
from .findings import Finding

SLOW_DRIVE = 1.5e9
"""Bytes per second below which a drive holds up even small models."""
IN_MEMORY = ("tmpfs", "ramfs")


def memory(root: Path = Path("/")) -> Iterator[Finding]:
    """How much host memory there is, and what limits it."""
    host = probe_host_budget(root)
    values: dict[str, object] = {"total": host.total, "available": host.available, "swap": host.swap}
    is_short = host.available < host.total // 2
    yield Finding(
        topic="host memory",
        level="warning" if is_short else "ok",
        found=f"{gib(host.available)} of {gib(host.total)} available; the limit is {host.limited_by}",
        remedy="other processes hold more than half of it: end them, or plan with host_memory" if is_short else None,
        values=values,
    )
    if "cgroup" in host.limited_by:
        yield Finding(
            topic="host memory",
            level="note",
            found="a container or job limits memory, and what exceeds it is killed without a traceback",
            remedy="plans respect the limit; ask the container (--memory) or the scheduler (--mem) for more",
        )


def processors(machine: Machine) -> Iterator[Finding]:
    """Cores that this process may use, and what the CPU update reaches on them."""
    allowed, there, threads = cores(), os.cpu_count() or 1, default_threads()
    omp = os.environ.get("OMP_NUM_THREADS")
    text = f"{allowed} of {there} cores may be used, {threads} threads update (cpu_threads: auto)"
    if "host" in machine.rates:
        text += f", {machine.rates['host'] / 1e9:.1f} GB/s of the update's own traffic"
    is_bound = allowed * 4 <= there
    remedy = None
    if is_bound:
        remedy = "the process is bound to few cores: check taskset, the container's --cpus, the job's --cpus-per-task"
    elif allowed < 4:
        remedy = "the update runs on the CPU: with fewer than 4 cores it sets the pace"
    yield Finding(
        topic="CPU",
        level="warning" if remedy else "ok",
        found=text,
        remedy=remedy,
        values={"allowed": allowed, "there": there, "threads": threads, "OMP_NUM_THREADS": omp},
    )
    if omp is not None and omp.isdigit() and int(omp) < allowed:
        yield Finding(
            topic="OMP_NUM_THREADS",
            level="note",
            found=f"is {omp}: torch's own CPU work is bound to it; the optimizer's threads are not",
            remedy="unset it, unless it is meant",
        )


def cache(machine: Machine) -> Iterator[Finding]:
    """Whether measured rates can be kept."""
    file = cache_file(machine)
    place = file.parent
    while not place.exists():
        place = place.parent
    is_writable = os.access(place, os.W_OK)
    yield Finding(
        topic="cache",
        level="ok" if is_writable else "note",
        found=f"measured rates are kept in {file}" if is_writable else f"{file} cannot be written",
        remedy=None if is_writable else "set XDG_CACHE_HOME to keep measured rates between runs",
    )


def spill_folder(path: str | None, nbytes: int = 1 << 30) -> Iterator[Finding]:
    """The folder for spill files: is it safe, is it a drive, how fast is it."""
    topic = "NVMe folder"
    if path is None:
        yield Finding(topic=topic, level="note", found="not looked at", remedy="name one with --nvme-path to check it")
        return
    folder = Path(path)
    try:
        about = folder.lstat()
    except OSError as error:
        yield Finding(topic=topic, level="error", found=f"{path}: {error.strerror}", remedy=f"mkdir -p {path}")
        return
    if stat.S_ISLNK(about.st_mode):
        yield Finding(
            topic=topic, level="warning", found=f"{path} is a symbolic link", remedy=f"name {folder.resolve()} itself"
        )  # fmt: skip
        about = folder.stat()
    if not stat.S_ISDIR(about.st_mode) or not os.access(folder, os.W_OK | os.X_OK):
        yield Finding(
            topic=topic,
            level="error",
            found=f"{path} is no folder that this user may write to",
            remedy="name one that is, or change its owner (chown)",
        )
        return
    if about.st_mode & stat.S_IWOTH and not about.st_mode & stat.S_ISVTX:
        yield Finding(
            topic=topic,
            level="warning",
            found=f"every user may write to {path}, and so replace spill files",
            remedy=f"chmod o-w {path}",
        )
    kind = file_system(folder)
    if kind in IN_MEMORY:
        yield Finding(
            topic=topic,
            level="warning",
            found=f"{path} is {kind}: what is written there takes host memory",
            remedy="name a folder on a drive",
        )
    yield from _speed(path, kind, nbytes)


def _speed(path: str, kind: str, nbytes: int) -> Iterator[Finding]:
    topic, free = "NVMe folder", free_space(path)
    if free < 2 * nbytes:
        yield Finding(
            topic=topic, level="error", found=f"{path}: {gib(free)} are free", remedy="free some space or name another"
        )  # fmt: skip
        return
    try:
        drive = measure_drive(Path(path), -(-nbytes // BLOCK) * BLOCK)
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "")
        yield Finding(
            topic=topic,
            level="error",
            found=f"{path}: a trial of {gib(nbytes)} failed: {error} {code}",
            remedy="check the drive (dmesg), quotas and free space",
        )
        return
    values: dict[str, object] = {**drive._asdict(), "free": free, "file_system": kind}
    text = f"{path} ({kind}, {gib(free)} free): {drive.read / 1e9:.1f} GB/s read, {drive.write / 1e9:.1f} GB/s written"
    remedy = None
    if not drive.is_direct:
        text += ", through the page cache"
        remedy = "the file system takes no O_DIRECT, so figures may be those of memory: use ext4 or xfs"
    elif min(drive.read, drive.write) < SLOW_DRIVE:
        remedy = "slow for spill files: expect the drive to set the pace (see `slideformer plan --nvme-path`)"
    if drive.is_direct:
        text += f", O_DIRECT in multiples of {drive.alignment} bytes"
    yield Finding(topic=topic, level="warning" if remedy else "ok", found=text, remedy=remedy, values=values)


def file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The type of the file system that holds ``folder``."""
    place, best, kind = folder.resolve(), "", "unknown"
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        _, mount, found, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        if (place == Path(mount) or Path(mount) in place.parents) and len(mount) >= len(best):
            best, kind = mount, found
    return kind
