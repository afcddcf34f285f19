"""Checks of the GPU: driver, memory, link, pinning, GPUDirect Storage."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from ..plan.machine import Machine
from ..plan.remedies import gib
from .findings import Finding

LANE_BYTES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}
"""PCIe bytes per second, lane and direction by generation, encoding taken off."""
GOOD_SHARE = 0.6
"""Of the link's nominal rate: protocol takes some 15 %, and both directions at once some more."""
PIN_SIZES = (1 << 30, 1 << 26)


def gpu(proc: Path = Path("/proc")) -> Iterator[Finding]:
    """The device, its driver and its memory. ``proc`` is where the driver shows itself."""
    driver = _driver(proc)
    if not torch.cuda.is_available():
        yield _no_gpu(driver)
        return
    device = torch.cuda.current_device()
    name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    free, total = torch.cuda.mem_get_info(device)
    values: dict[str, object] = {"name": name, "driver": driver, "free": free, "total": total}
    text = f"{name} (compute capability {major}.{minor}), driver {driver}, CUDA {torch.version.cuda}"
    yield Finding(topic="GPU", level="ok", found=text, values=values)
    if major < 8:
        yield Finding(
            topic="GPU",
            level="warning",
            found=f"{name} has no bf16 arithmetic",
            remedy="train in fp16 (mixed_precision: fp16) or fp32",
        )
    used = total - free
    is_shared = used > max(total // 20, 1 << 30)
    yield Finding(
        topic="GPU memory",
        level="warning" if is_shared else "ok",
        found=f"{gib(free)} of {gib(total)} are free",
        remedy="other processes hold the rest (see nvidia-smi): end them, or set gpu_memory" if is_shared else None,
    )
    if torch.cuda.device_count() > 1:
        yield Finding(
            topic="GPU",
            level="note",
            found=f"{torch.cuda.device_count()} GPUs are visible; SlideFormer trains on one",
            remedy="choose it with CUDA_VISIBLE_DEVICES",
        )


def _no_gpu(driver: str | None) -> Finding:
    if driver is None:
        return Finding(
            topic="GPU",
            level="note",
            found="no NVIDIA GPU: everything works on the CPU, which is for tests and for trying things out",
        )
    if torch.version.cuda is None:
        return Finding(
            topic="GPU",
            level="error",
            found=f"driver {driver} is there, but torch {torch.__version__} was built without CUDA",
            remedy="install a CUDA build of torch (https://pytorch.org/get-started)",
        )
    return Finding(
        topic="GPU",
        level="error",
        found=f"driver {driver} is there, but torch (CUDA {torch.version.cuda}) finds no device",
        remedy="check CUDA_VISIBLE_DEVICES, `nvidia-smi`, the container's --gpus, and the driver's age",
    )


def link(machine: Machine) -> Iterator[Finding]:
    """The measured transfer rates against what the link should give."""
    if not machine.has_gpu or "h2d" not in machine.rates:
        return
    up, down = machine.rates["h2d"], machine.rates["d2h"]
    found = _query("pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max")
    text = f"{up / 1e9:.1f} GB/s to the GPU and {down / 1e9:.1f} GB/s back, both at once"
    values: dict[str, object] = {"h2d": up, "d2h": down, **found}
    remedy = judge_link(min(up, down), found)
    if found:
        text += f"; PCIe {found['gen.max']} x{found['width.current']}"
    yield Finding(topic="PCIe", level="warning" if remedy else "ok", found=text, remedy=remedy, values=values)


def judge_link(rate: float, found: Mapping[str, int]) -> str | None:
    """What to do about a measured rate (byte/s) on a link as the driver describes it; None: it is as it should be.

    The generation at rest may be lower than under load, so the highest one counts.
    """
    if not found:
        return None if rate >= 10e9 else "below PCIe 3.0 x16: check the slot, and virtualisation settings"
    if found["width.current"] < found["width.max"]:
        return f"the card has {found['width.max']} lanes and the slot gives {found['width.current']}: use another slot"
    nominal = LANE_BYTES.get(found["gen.max"], 0.0) * found["width.current"]
    if rate < GOOD_SHARE * nominal:
        return (
            f"{nominal / 1e9:.0f} GB/s would be nominal: check that host memory was pinned, that process and GPU are on"
            " one NUMA node (numactl), and that no other process copies"
        )
    return None


def pinning(sizes: tuple[int, ...] = PIN_SIZES) -> Iterator[Finding]:
    """Whether host memory can be page-locked: the limit, and a trial where there is a GPU."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    words = "unlimited" if limit == resource.RLIM_INFINITY else gib(limit)
    if not torch.cuda.is_available():
        yield Finding(topic="pinning", level="ok", found=f"limit (ulimit -l): {words}; there is no GPU to try it with")
        return
    from ..storage import HostMemory

    for size in sizes:
        memory = HostMemory(pin=True)
        slab = memory.allocate("a trial", size, dma=True)
        if slab.pinned:
            is_enough = size == sizes[0]
            yield Finding(
                topic="pinning",
                level="ok" if is_enough else "warning",
                found=f"{gib(size)} could be page-locked; limit (ulimit -l): {words}",
                remedy=None if is_enough else "more could not: raise `ulimit -l`, or the container's memory limit",
            )
            return
    yield Finding(
        topic="pinning",
        level="warning",
        found=f"no host memory could be page-locked; limit (ulimit -l): {words}",
        remedy="raise `ulimit -l`, docker's --ulimit memlock, or WSL's memory setting; transfers are slower so",
    )


def gpu_direct(proc: Path = Path("/proc")) -> Iterator[Finding]:
    """GPUDirect Storage: kvikio and the kernel module."""
    if importlib.util.find_spec("kvikio") is None:
        yield Finding(
            topic="GPUDirect Storage",
            level="note",
            found="kvikio is not installed: spill files go through host memory",
            remedy="pip install 'slideformer-backend[gds]', if the NVMe tier is used",
        )
        return
    if not torch.cuda.is_available():
        yield Finding(
            topic="GPUDirect Storage", level="note", found="kvikio is installed; without a GPU it is not used"
        )  # fmt: skip
        return
    import kvikio.defaults

    is_compatible = str(kvikio.defaults.get("compat_mode"))
    has_module = (proc / "driver/nvidia-fs").exists()
    yield Finding(
        topic="GPUDirect Storage",
        level="ok" if has_module else "note",
        found=f"kvikio compat_mode {is_compatible}; kernel module nvidia_fs {'loaded' if has_module else 'not loaded'}",
        remedy=None
        if has_module
        else "install nvidia-gds on the host for direct transfers; without it kvikio copies through host memory",
    )


def _driver(proc: Path) -> str | None:
    try:
        text = (proc / "driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return match[1] if match else "of unknown version"


def _query(*names: str) -> dict[str, int]:
    """Numbers from nvidia-smi, by the last two words of their names; empty where it gives none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    command = [tool, f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits", "-i", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    parts = [part.strip() for part in done.stdout.strip().split(",")]
    if done.returncode or len(parts) != len(names) or not all(part.isdigit() for part in parts):
        return {}
    return {name.removeprefix("pcie.link."): int(part) for name, part in zip(names, parts, strict=True)}
