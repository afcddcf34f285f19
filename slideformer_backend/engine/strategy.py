"""What the strategies of an engine differ in: the plan, where units are built, who updates what is on the device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from ..config import SlideFormerConfig
from ..errors import ConfigError, PlanError, UnsupportedError
from ..lsp_settings import LspSettings
from ..optim.workers import WorkerPool
from ..plan import Part, Partition, Terms
from ..plan.ledger import device_state_bytes
from ..plan.remedies import gib
from ..storage import HostMemory
from ..transfer import Backend
from .build import build_units, resident_units
from .core_projectors import is_compressed
from .core_units import CoreUnits
from .device_units import DeviceUnits
from .immediate import Immediate
from .norms import Norms
from .policy import UpdatePolicy
from .preflight import Preflight, Room
from .unit import ParamRecord, Unit

if TYPE_CHECKING:
    from .engine import Engine

logger = logging.getLogger(__name__)


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


class LspPreflight:
    """The plan of ``strategy: lsp``: what must fit the device whatever the batch.

    Args:
        model: nothing of it has been moved.
        parts: its units.
        config: ``gpu_memory`` caps the plan.
        device: where compute runs.
        autocast_dtype: of the autocast region around the forward.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Partition,
        config: SlideFormerConfig,
        device: torch.device,
        autocast_dtype: torch.dtype | None,
    ) -> None:
        self._parts = parts
        self._settings = LspSettings.from_section(config.lsp)
        self._device = device
        self._cap = config.gpu_memory
        self._is_fp16 = autocast_dtype is torch.float16 or any(
            parameter.requires_grad and parameter.dtype is torch.float16 for parameter in model.parameters()
        )

    def check(self) -> Terms:
        """Say what the plan is.

        Raises:
            UnsupportedError: the model trains in fp16.
            PlanError: weights, factors and exact states alone are more than the device has.
        """
        if self._is_fp16:
            raise UnsupportedError(
                "strategy: lsp does not train in fp16, whose gradients need a loss scale.", remedy="take bf16 or fp32"
            )
        settings, parts = self._settings, self._parts
        specs = [spec for part in parts.sliding for spec in part.specs]
        cores = [spec for spec in specs if spec.is_trainable and is_compressed(spec.shape, settings)]
        chosen = {spec.name for spec in cores}
        exact = [spec for part in (*parts.sliding, *parts.edges) for spec in part.specs if spec.name not in chosen]
        weights = sum(spec.shape.numel() * spec.dtype.itemsize for spec in [*cores, *exact]) + parts.frozen_edges
        states = device_state_bytes(exact, 2)
        factors = sum(factor_bytes(spec.shape, settings) for spec in cores)
        if settings.projector == "orthonormal":
            factors += sum(spec.shape.numel() * spec.dtype.itemsize for spec in cores)
        updates = sum(core_elements(spec.shape, settings) * spec.dtype.itemsize for spec in cores)
        logger.info(
            "SlideFormer: strategy lsp compresses %d matrices; on the device: weights %s, exact states %s, projectors"
            " %s, updates %s; each way and step %s; moments on the host %s.",
            len(cores), gib(weights), gib(states), gib(factors), gib(updates), gib(updates),
            gib(sum(core_elements(spec.shape, settings) * 8 for spec in cores)),
        )  # fmt: skip
        if not cores:
            logger.warning(
                "SlideFormer: strategy lsp compresses nothing: no trained matrix of a repeated block has a core of at"
                " most half its size at rank %d. All is updated exactly on the device; lower lsp.rank.",
                settings.rank,
            )
        self._refuse_if_over(weights + states + factors + updates)
        return Terms(prefetch=0, spares=0, edges_update_on_device=True)

    def before_bind(self, optimizer: Optimizer) -> None:
        """States are part of what ``check`` has counted."""

    def before_admit(self, engine: Engine, records: Sequence[ParamRecord], edges: Sequence[Part]) -> Room:
        """Frozen parameters are about to train: they are updated exactly, on the device.

        Raises:
            PlanError: it has no room for their gradients and states.
        """
        specs = [record.spec._replace(is_trainable=True) for record in records]
        specs += [spec._replace(is_trainable=True) for part in edges for spec in part.specs]
        gradients = sum(spec.shape.numel() * spec.dtype.itemsize for spec in specs)
        self._refuse_if_over(gradients + device_state_bytes(specs, 2))
        return Room(spilled=frozenset(), returning=frozenset())

    def _refuse_if_over(self, needed: int) -> None:
        if self._device.type != "cuda":
            return
        free, _ = torch.cuda.mem_get_info(self._device)
        limit = free + torch.cuda.memory_reserved(self._device)
        budget = limit if self._cap == "auto" else min(limit, self._cap)
        if needed > budget:
            raise PlanError(
                "strategy: lsp keeps all weights on the GPU, which has no room for them.",
                found=f"at least {gib(needed)} needed before any activation",
                expected=f"at most {gib(budget)}",
                remedy="a smaller lsp.rank, or strategy: slide, which needs room for a few layers only",
            )


def core_elements(shape: Sequence[int], settings: LspSettings) -> int:
    """Elements of the core of a matrix."""
    return min(shape[0], settings.rank) * min(shape[1], settings.rank)


def factor_bytes(shape: Sequence[int], settings: LspSettings) -> int:
    """Device bytes of the two factors of a matrix."""
    total = 0
    for rows in shape:
        rank = min(rows, settings.rank)
        if settings.projector == "orthonormal":
            total += 4 * rows * rank
        else:
            nonzeros = 1 if rows <= settings.rank else min(settings.nonzeros, rank)
            total += 12 * rows * nonzeros + 4 * (rank + 1)
    return total


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
        return LspPreflight(model, parts, config, device, autocast_dtype)
    return Preflight(model, parts, config, device, optimizers)


def units_for(
    config: SlideFormerConfig, parts: Partition, device: torch.device, model: nn.Module, memory: HostMemory
) -> list[Unit]:
    """The units of the model, with their weights where they live."""
    build = resident_units if config.strategy == "lsp" else build_units
    return build(parts, device, model, memory)


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
        cores.take(unit, is_edge=unit.module is None)
    return cores
