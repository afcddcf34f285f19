"""What an engine can tell about itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """A snapshot of memory, waits and counters.

    Attributes:
        parameters: managed parameters, in elements.
        units: sliding units.
        gpu_peak_bytes: peak of the device allocator (0 on a CPU-only machine).
        slot_bytes: device memory of all slots.
        host_bytes: host memory of all slabs, ``pinned_bytes`` of them pinned.
        host_bytes_per_parameter: the same per managed parameter.
        waits: seconds the training threads were blocked, by what they waited for.
        repairs: speculative updates that had to be computed again, in units.
        skipped: steps dropped because of non-finite gradients.
        stalls: seconds compute has stood still, by what it waited for. On a CPU-only machine, the same as ``waits``.
        busy: seconds each lane has worked (copy lanes of a GPU: their streams).
        spilled_bytes: states that wait in files; ``filed_bytes``: working weights that do.
        tier: settings in effect of the tier those files are in; empty without.
        inputs: the same of the tier where inputs of units wait, how they travel, and bytes of their files.
    """

    parameters: int
    units: int
    gpu_peak_bytes: int
    slot_bytes: int
    host_bytes: int
    pinned_bytes: int
    repairs: int
    skipped: int
    spilled_bytes: int = 0
    filed_bytes: int = 0
    tier: dict[str, object] = field(default_factory=dict)
    inputs: dict[str, object] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    stalls: dict[str, float] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)

    @property
    def host_bytes_per_parameter(self) -> float:
        """Host bytes of all slabs per managed parameter."""
        return self.host_bytes / max(1, self.parameters)


def allocated_bytes(device: torch.device) -> int:
    """Bytes that torch's allocator holds on a CUDA device now; 0 on a CPU-only machine."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def make_report(engine: Engine) -> EngineReport:
    """The report of ``engine`` as of now."""
    is_cuda = engine.device.type == "cuda"
    return EngineReport(
        parameters=sum(record.numel for unit in engine.units for record in unit.records),
        units=len(engine.sliding),
        gpu_peak_bytes=torch.cuda.max_memory_allocated(engine.device) if is_cuda else 0,
        slot_bytes=engine.window.device_bytes,
        host_bytes=engine.memory.allocated,
        pinned_bytes=engine.memory.pinned,
        repairs=engine.policy.repairs,
        skipped=engine.stepper.skipped,
        spilled_bytes=engine.spill.nbytes,
        filed_bytes=engine.spill.weights.nbytes,
        tier=engine.spill.tier.describe() if engine.spill.tier is not None else {},
        inputs=engine.boundaries.shelf.describe(),
        waits=dict(engine.backend.waited),
        stalls=engine.backend.stalls(),
        busy=engine.backend.busy(),
    )
