"""Host memory of a process: its peak beyond what it held before."""

from __future__ import annotations

import threading
from pathlib import Path

INTERVAL = 0.1  # seconds between two looks at the machine's memory


def meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes; empty where there is none."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def used() -> int:
    """Bytes of the machine that processes hold: page cache is not counted, shared and pinned memory is."""
    info = meminfo()
    if not info:
        return 0
    return info["MemTotal"] - info["MemFree"] - info["Buffers"] - info["Cached"] + info["Shmem"]


def available() -> int:
    """Bytes that can still be had; very large where the system does not tell."""
    return meminfo().get("MemAvailable", 1 << 62)


def resident(field: str = "VmRSS") -> int:
    """``VmRSS`` or its peak ``VmHWM`` of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


class HostPeak:
    """The peak of host memory beyond that at construction.

    Two ways, and the larger counts: the process's own resident memory, and the machine's used memory. Memory that a
    driver allocated and pinned does not show in the former; other processes disturb the latter.

    Args:
        whole_machine: look at the machine too (wrong on a machine that others use at the same time).
    """

    def __init__(self, *, whole_machine: bool) -> None:
        self._base = resident()
        self._machine_base = used()
        self._machine_peak = 0
        self._whole = whole_machine
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="host-memory", daemon=True)
        if whole_machine:
            self._thread.start()

    def restart(self) -> None:
        """Forget the peak so far."""
        self._machine_peak = 0
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        except OSError:
            return

    def bytes(self) -> int:
        """The peak so far."""
        own = resident("VmHWM") - self._base
        machine = max(self._machine_peak, used()) - self._machine_base if self._whole else 0
        return max(own, machine, 0)

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL):
            self._machine_peak = max(self._machine_peak, used())
