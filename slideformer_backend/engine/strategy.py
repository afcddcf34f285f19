"""What the strategies of an engine differ in: the plan, where units are built, who updates what is on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from ..config import SlideFormerConfig
from ..errors import ConfigError
from ..optim.workers import WorkerPool
from ..plan import Partition, Terms
from ..storage import HostMemory
from ..transfer import Backend
from .build import build_units, resident_units
from .core_units import CoreUnits
from .device_units import DeviceUnits
from .immediate import Immediate
from .lsp_preflight import LspPreflight
from .norms import Norms
from .policy import UpdatePolicy
from .preflight import Preflight
from .spill import Spill
from .unit import Unit


def check_strategy(config: SlideFormerConfig) -> None:
    """Raise ConfigError for settings that the strategy does not go together with."""
    if config.strategy != "lsp":
        if config.lsp is not None:
            raise ConfigError(
                "lsp: these are the settings of another strategy.",
                found=f"strategy: {config.strategy}",
                remedy="set strategy: lsp, or remove lsp",
            )
        return
    refused = {
        "update": (config.update, "exact", "updates wait for step() and overlap the backward all the same"),
        "weights": (config.weights == "nvme", False, "they stay on the GPU"),
        "optimizer_states": (config.optimizer_states == "nvme", False, "the states of cores are small"),
        "nvme_path": (
            config.nvme_path if config.activations != "nvme" else None,
            None,
            "the states of cores are small",
        ),
    }
    for key, (found, expected, reason) in refused.items():
        if found != expected:
            raise ConfigError(f"{key}: strategy lsp does without it, since {reason}.", remedy=f"remove {key}")


def preflight_for(
    model: nn.Module,
    parts: Partition,
    config: SlideFormerConfig,
    device: torch.device,
    autocast_dtype: torch.dtype | None,
    optimizers: Sequence[Optimizer],
) -> Preflight | LspPreflight:
    """The plan before anything is allocated."""
    if config.strategy == "lsp":
        return LspPreflight(model, parts, config, device, autocast_dtype, optimizers)
    return Preflight(model, parts, config, device, optimizers)


def units_for(
    config: SlideFormerConfig,
    parts: Partition,
    device: torch.device,
    model: nn.Module,
    memory: HostMemory,
    spill: Spill,
    terms: Terms,
) -> list[Unit]:
    """The units of the model, with their weights where they live."""
    if config.strategy == "lsp":
        return resident_units(parts, device, model, memory, with_edges=terms.edges_update_on_device)
    return build_units(parts, device, model, memory, spill)


def device_units_for(
    config: SlideFormerConfig,
    backend: Backend,
    norms: Norms,
    memory: HostMemory,
    workers: WorkerPool,
    policy: UpdatePolicy,
    units: Sequence[Unit],
) -> DeviceUnits:
    """Who updates what is on the device."""
    if config.strategy != "lsp":
        return DeviceUnits(norms, in_place=isinstance(policy, Immediate))
    cores = CoreUnits(config, backend, norms, memory, workers, policy)
    for unit in units:
        if unit.updates_on_device and unit.module is not None:
            cores.take(unit)
    return cores
