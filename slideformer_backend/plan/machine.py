"""The machine to plan for: this one, as probed and calibrated, or one that is only described."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from .host_budget import HostBudget, probe_host_budget

Source = Literal["measured", "given", "assumed"]

CONTEXT_BYTES = 600 << 20
"""What a CUDA context and its libraries' workspaces take of a GPU that is only described."""
SYSTEM_BYTES = 2 << 30
"""What the operating system keeps of host memory that is only described."""

RATE_UNITS = {
    "gemm": "FLOP/s of large bf16 matrix products",
    "gpu_memory": "byte/s of the GPU's memory, read and written",
    "h2d": "byte/s from pinned host memory to the GPU, while the other direction is busy",
    "d2h": "byte/s from the GPU to pinned host memory, while the other direction is busy",
    "host": "byte/s of the CPU optimizer's own mix of reads and writes",
    "nvme_read": "byte/s read from the NVMe folder",
    "nvme_write": "byte/s written to the NVMe folder",
}
ASSUMED = {
    "gemm": 150e12, "gpu_memory": 0.9e12, "h2d": 22e9, "d2h": 22e9, "host": 50e9, "nvme_read": 6e9, "nvme_write": 5e9,
}  # fmt: skip
"""Rates of a machine that is only described: a consumer GPU of the RTX 4090's class behind PCIe 4.0 x16, two channels
of DDR5, one PCIe 4.0 drive."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a plan needs to know of a machine. Sizes in bytes.

    Attributes:
        name: words for it.
        gpu_total, gpu_free: device memory, and what of it this process may have; 0 without a GPU.
        host: host memory. Of a small described machine as of a small described GPU, more is kept back than there is:
            what may be had is negative then.
        threads: cores that this process may use.
        nvme_free: free space for spill files; 0 without an NVMe folder.
        rates: by the names of ``RATE_UNITS``; what is not known is missing.
        sources: where each rate comes from.
    """

    name: str
    gpu_total: int
    gpu_free: int
    host: HostBudget
    threads: int
    nvme_free: int = 0
    rates: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, Source] = field(default_factory=dict)

    @property
    def has_gpu(self) -> bool:
        """Whether there is device memory to plan for."""
        return self.gpu_total > 0

    @property
    def gpu_kept(self) -> int:
        """Device memory that others have, or that a context takes; of a larger GPU too."""
        return max(self.gpu_total - self.gpu_free, CONTEXT_BYTES)

    @property
    def host_kept(self) -> int:
        """Host memory that others have, or that the system keeps; of a larger machine too."""
        return max(self.host.total - self.host.available, SYSTEM_BYTES)

    def with_rates(self, rates: Mapping[str, float], source: Source) -> Machine:
        """The same machine with these rates added; rates that it has already stay."""
        new = {name: rate for name, rate in rates.items() if name not in self.rates}
        return replace(
            self, rates={**self.rates, **new}, sources={**self.sources, **dict.fromkeys(new, source)}
        )  # fmt: skip


def probe_machine(device: torch.device | None = None, nvme_path: str | None = None) -> Machine:
    """This machine, without its rates.

    Args:
        device: the GPU to plan for; None: the current one, if there is one.
        nvme_path: the folder for spill files.
    """
    if device is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    name, total, free = "CPU only", 0, 0
    if device is not None and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device)  # this process's own: what is in it is the plan's to use
    return Machine(
        name=name,
        gpu_total=total,
        gpu_free=min(free, total),
        host=probe_host_budget(),
        threads=cores(),
        nvme_free=free_space(nvme_path) if nvme_path else 0,
    )


def describe_machine(
    base: Machine, *, gpu: int | None = None, host: int | None = None, nvme: int | None = None
) -> Machine:
    """``base`` with other sizes; rates of a resource that was replaced are those of ``ASSUMED``.

    Args:
        base: what is not described is taken from here.
        gpu, host: memory in total, of which a context and the system keep their part.
        nvme: free space for spill files.
    """
    dropped: set[str] = set()
    machine = base
    if gpu is not None:
        dropped |= {"gemm", "gpu_memory", "h2d", "d2h"}
        machine = replace(machine, name="described", gpu_total=gpu, gpu_free=gpu - CONTEXT_BYTES)
    if host is not None:
        dropped |= {"host"}
        memory = HostBudget(host, host - SYSTEM_BYTES, 0, "the description")
        machine = replace(machine, name="described", host=memory)
    if nvme is not None:
        dropped |= {"nvme_read", "nvme_write"}
        machine = replace(machine, nvme_free=nvme)
    kept = {name: rate for name, rate in base.rates.items() if name not in dropped}
    return replace(machine, rates=kept, sources={name: base.sources[name] for name in kept})


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_space(path: str) -> int:
    """Free bytes of the file system that holds ``path``, or would hold it."""
    place = Path(path).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free
