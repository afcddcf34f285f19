"""How much host memory this process may still take: the least of what the machine and its cgroups leave (HAZARDS 8)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2^63: from here on it is none."""


class HostBudget(NamedTuple):
    """Host memory in bytes.

    Attributes:
        total: of the machine, or the cgroup's limit where that is lower.
        available: what can be had without swapping. Page cache counts as available, as in the kernel's own figure.
        swap: free swap, 0 where a cgroup sets the limit.
        limited_by: what sets ``available``, for messages.
    """

    total: int
    available: int
    swap: int
    limited_by: str


def probe_host_budget(root: Path = Path("/")) -> HostBudget:
    """The host memory of this process. ``root`` is where ``proc`` and ``sys`` are found."""
    info = _meminfo(root)
    total = info.get("MemTotal", 0)
    found = HostBudget(total, info.get("MemAvailable", total), info.get("SwapFree", 0), "MemAvailable of the machine")
    for folder, is_v2 in _cgroups(root):
        limit, left = _limit_v2(folder) if is_v2 else _limit_v1(folder)
        if limit is not None and left is not None and limit < total and left < found.available:
            found = HostBudget(min(limit, found.total), max(0, left), 0, f"the cgroup's limit ({folder})")
    return found


def _meminfo(root: Path) -> dict[str, int]:
    pairs = (line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    return {name: int(value.split()[0]) * 1024 for name, value in pairs if value.split()}


def _cgroups(root: Path) -> Iterator[tuple[Path, bool]]:
    """Folders of the process's memory cgroup and its parents, and whether they are of version 2.

    Inside a container the path may be the host's: the top is then the container's own.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            top = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
        else:
            continue
        folder = top / path.lstrip("/")
        for place in (folder, *folder.parents):
            yield place, hierarchy == "0"
            if place == top:
                break


def _limit_v2(folder: Path) -> tuple[int | None, int | None]:
    limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
    if limit is None or used is None:
        return None, None
    stat = _stat(folder / "memory.stat")
    return limit, limit - used + max(0, stat.get("file", 0) - stat.get("shmem", 0))


def _limit_v1(folder: Path) -> tuple[int | None, int | None]:
    limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    if limit is None or used is None or limit >= UNLIMITED:
        return None, None
    stat = _stat(folder / "memory.stat")
    return limit, limit - used + max(0, stat.get("total_cache", 0) - stat.get("total_shmem", 0))


def _stat(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _number(file: Path) -> int | None:
    text = _read(file).strip()
    return int(text) if text.isdigit() else None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
