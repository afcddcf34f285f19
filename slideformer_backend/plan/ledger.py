"""The ledger: a closed form of what each tier holds at its peak (DESIGN 5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from .layout import ParamSpec, size_classes
from .partition import Part, Partition

Update = Literal["exact", "immediate"]

GRADIENT_SLOTS = 2
"""Device gradient slots per size class: one drains to the host while the next unit's gradients are written."""
LEAST_SPARES = 2
"""Gradient buffers in flight, per size class, below which arrivals wait for updates."""
SPARE_SHARE = 4
"""One gradient buffer more per so many units: updates of so many may wait for the next forward to reach them."""
FILE_BLOCK = 4096
"""Files take whole blocks of the file system, and whole pages for direct I/O."""
LEAST_FRAMES = 3
"""Units whose filed weights are in host memory at once, beside those fetched ahead: one read, one sent, one updated."""
STAGED_UNITS = 3
"""Units whose spilled states are in host memory at once: one read, one updated, one written back."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What the plan decides, as far as memory depends on it.

    Attributes:
        update: the policy; ``exact`` keeps one gradient per unit, ``immediate`` only what is in flight.
        accumulates: whether a step has several micro-batches; ``immediate`` then keeps one gradient per unit too.
        moments: fp32 arrays of the optimizer beside the master; ``moment_bytes``: bytes of one of their elements.
        prefetch: units fetched ahead.
        slots: weight slots beside those of the window, in which weights stay until they change; ``gradients``: gradient
            slots beside those, in which gradients wait for the next micro-batch.
        spares: gradient buffers in flight beyond the kept ones, per size class.
        edges_update_on_device: whether edge units keep their states on the device, and nothing on the host.
        resident: numbers of sliding units that moved to the device.
        spilled: numbers of units (edges count on from the sliding ones) whose states are on NVMe.
        staged: how many of those are in host memory at once.
        filed: numbers of sliding units whose working weights are on NVMe.
        frames: how many of those are in host memory at once.
    """

    update: Update = "exact"
    accumulates: bool = False
    moments: int = 2
    moment_bytes: float = 4.0
    prefetch: int = 2
    slots: int = 0
    gradients: int = 0
    spares: int = LEAST_SPARES
    edges_update_on_device: bool = False
    resident: frozenset[int] = frozenset()
    spilled: frozenset[int] = frozenset()
    staged: int = STAGED_UNITS
    filed: frozenset[int] = frozenset()
    frames: int = LEAST_FRAMES


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Predicted peaks, in bytes.

    Attributes:
        host_weights: working weights that stay there.
        host_states: masters and moments.
        host_pending: gradients that are kept until the next update.
        host_spare: gradient buffers in flight, at most.
        host_staging: spilled states on their way; ``host_frames``: filed weights on theirs.
        nvme_states: masters and moments on NVMe, as their files take room there; ``nvme_weights``: working weights.
        device_slots: weight and gradient slots of the window.
        device_edges: edge parameters, their gradients, and what is frozen.
        device_states: masters and moments of edges.
        device_resident: units that moved there: weights, masters, moments. Their gradients come while activations go.
    """

    host_weights: int
    host_states: int
    host_pending: int
    host_spare: int
    host_staging: int
    host_frames: int
    nvme_states: int
    nvme_weights: int
    device_slots: int
    device_edges: int
    device_states: int
    device_resident: int

    @property
    def host_gradients(self) -> int:
        """Pending and arriving gradients."""
        return self.host_pending + self.host_spare

    @property
    def host(self) -> int:
        """Host bytes in total."""
        return self.host_weights + self.host_states + self.host_gradients + self.host_staging + self.host_frames

    @property
    def host_least(self) -> int:
        """Host bytes below which it cannot work: the pool of gradient buffers grows only as far as it must."""
        return self.host - self.host_spare

    @property
    def nvme(self) -> int:
        """Bytes of all files."""
        return self.nvme_states + self.nvme_weights

    @property
    def device(self) -> int:
        """Device bytes in total, activations and the user's own tensors not counted."""
        return self.device_slots + self.device_edges + self.device_states + self.device_resident


def ledger_of(parts: Partition, terms: Terms) -> Ledger:
    """The ledger of a model."""
    sliding = [part for number, part in enumerate(parts.sliding) if number not in terms.resident]
    on_host = [*sliding, *(() if terms.edges_update_on_device else parts.edges)]
    spilled = spilled_parts(parts, terms)
    largest = max((spillable_bytes(part, terms) for part in spilled), default=0)
    spilled_bytes = sum(spillable_bytes(part, terms) for part in spilled)
    filed = [part.layout.weight_bytes for part in filed_parts(parts, terms)]
    pending, spare = _gradient_bytes(parts, on_host, terms)
    return Ledger(
        host_weights=sum(part.layout.weight_bytes for part in on_host) - sum(filed),
        host_states=sum(state_bytes(part, terms) for part in on_host) - spilled_bytes,
        host_pending=pending,
        host_spare=spare,
        host_staging=largest * min(terms.staged, len(spilled)),
        host_frames=max(filed, default=0) * min(terms.frames, len(filed)),
        nvme_states=sum(file_bytes(part, terms) for part in spilled),
        nvme_weights=sum(map(in_blocks, filed)),
        device_slots=slot_bytes(parts, terms),
        device_edges=sum(map(_weights_and_gradient, parts.edges)) + parts.frozen_edges,
        device_states=sum(device_state_bytes(part.specs, terms.moments) for part in parts.edges)
        if terms.edges_update_on_device
        else 0,
        device_resident=sum(
            part.layout.weight_bytes + device_state_bytes(part.specs, terms.moments)
            for number, part in enumerate(parts.sliding)
            if number in terms.resident
        ),
    )


def spilled_parts(parts: Partition, terms: Terms) -> list[Part]:
    """The units whose states are on NVMe."""
    away = terms.spilled - terms.resident
    if terms.edges_update_on_device:
        away = frozenset(number for number in away if number < len(parts.sliding))
    return [part for number, part in enumerate((*parts.sliding, *parts.edges)) if number in away]


def filed_parts(parts: Partition, terms: Terms) -> list[Part]:
    """The units whose working weights are on NVMe."""
    return [part for number, part in enumerate(parts.sliding) if number in terms.filed - terms.resident]


def slot_bytes(parts: Partition, terms: Terms) -> int:
    """Device memory of all slots for the sliding units."""
    layouts = [part.layout for part in parts.sliding]
    weights = size_classes(layout.weight_bytes for layout in layouts)
    gradients = _gradient_classes(parts)
    sizes = {gradients[layout.gradient_bytes] for layout in layouts if layout.gradient_bytes}
    total = sum(sizes) * GRADIENT_SLOTS + max(sizes, default=0) * terms.gradients
    for size in set(weights.values()):
        members = sum(weights[layout.weight_bytes] == size for layout in layouts)
        total += size * min(terms.prefetch + 2, members)
    return total + max(weights.values(), default=0) * terms.slots


def state_bytes(part: Part, terms: Terms) -> int:
    """Masters and moments of one unit on the host. ``immediate`` splits the master of bf16 weights, whose high half the
    weights are, and needs none for fp32."""
    kinds = {(spec.working, spec.dtype) for spec in part.specs if spec.is_trainable}
    master = _in_place_master(kinds) if terms.update == "immediate" else 4
    return int(part.layout.state_elements * (master + terms.moments * terms.moment_bytes))


def spillable_bytes(part: Part, terms: Terms) -> int:
    """Those that may wait in files: all but a master that is what user code sees (fp32 weights under autocast)."""
    is_shown = any(spec.working != spec.dtype for spec in part.specs)
    return state_bytes(part, terms) - (part.layout.state_elements * 4 if is_shown else 0)


def file_bytes(part: Part, terms: Terms) -> int:
    """What the files of :func:`spillable_bytes` take: one per array, in whole blocks."""
    moment = int(part.layout.state_elements * terms.moment_bytes)
    master = max(0, spillable_bytes(part, terms) - terms.moments * moment)
    return sum(map(in_blocks, (master, *[moment] * terms.moments)))


def in_blocks(nbytes: int) -> int:
    """What a file of ``nbytes`` takes."""
    return -(-nbytes // FILE_BLOCK) * FILE_BLOCK


def device_state_bytes(specs: Iterable[ParamSpec], moments: int = 2) -> int:
    """Masters (of what is not fp32) and moments on the device."""
    trained = [spec for spec in specs if spec.is_trainable]
    return sum(spec.shape.numel() * (4 * moments + (4 if spec.dtype.itemsize < 4 else 0)) for spec in trained)


def resident_bytes(specs: Sequence[ParamSpec], moments: int = 2) -> int:
    """Weights, gradients, masters and moments on the device."""
    trained = sum(spec.shape.numel() * spec.dtype.itemsize for spec in specs if spec.is_trainable)
    weights = sum(spec.shape.numel() * spec.dtype.itemsize for spec in specs)
    return weights + trained + device_state_bytes(specs, moments)


def usual_spares(units: int) -> int:
    """Gradient buffers in flight that let no arrival wait, for a model of so many sliding units."""
    return max(LEAST_SPARES, units // SPARE_SHARE)


def _in_place_master(kinds: set[tuple[torch.dtype, torch.dtype]]) -> int:
    if kinds == {(torch.bfloat16, torch.bfloat16)}:
        return 2
    return 0 if kinds == {(torch.float32, torch.float32)} else 4


def _weights_and_gradient(part: Part) -> int:
    return sum(
        spec.shape.numel() * spec.dtype.itemsize * (2 if spec.is_trainable else 1) for spec in part.specs
    )  # fmt: skip


def _gradient_classes(parts: Partition) -> dict[int, int]:
    layouts = [part.layout for part in (*parts.sliding, *parts.edges)]
    return size_classes(layout.gradient_bytes for layout in layouts if layout.gradient_bytes)


def _gradient_bytes(parts: Partition, on_host: Sequence[Part], terms: Terms) -> tuple[int, int]:
    classes = _gradient_classes(parts)
    sizes = [classes[part.layout.gradient_bytes] for part in on_host if part.layout.gradient_bytes]
    keeps_all = terms.update == "exact" or terms.accumulates
    pending = sum(sizes) if keeps_all else 0
    least = 0 if keeps_all else sum(set(sizes))
    spare = sum(size * min(terms.spares, sizes.count(size)) for size in set(sizes))
    return pending + least, max(0, spare - least)
