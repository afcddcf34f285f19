"""Before anything is allocated: the plan of ``strategy: lsp``, and the refusal of one that cannot work."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from ..config import SlideFormerConfig
from ..errors import PlanError, UnsupportedError
from ..lsp_settings import LspSettings
from ..plan import Part, Partition, Terms
from ..plan.host_budget import probe_host_budget
from ..plan.ledger import device_state_bytes
from ..plan.lsp_plan import lsp_changes, lsp_ledger, lsp_paragraph, make_lsp_plan
from ..plan.remedies import gib
from ..plan.request import Choices, Request
from .preflight import USUAL_MOMENTS, Room, host_bytes, machine_of, moments_of
from .unit import ParamRecord

if TYPE_CHECKING:
    from .engine import Engine

logger = logging.getLogger(__name__)


class LspPreflight:
    """The plan of ``strategy: lsp``: what must fit whatever the batch.

    Args:
        model: nothing of it has been moved.
        parts: its units.
        config: ``gpu_memory`` and ``host_memory`` cap the plan.
        device: where compute runs.
        autocast_dtype: of the autocast region around the forward.
        optimizers: that will train it, where the caller knows them already.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Partition,
        config: SlideFormerConfig,
        device: torch.device,
        autocast_dtype: torch.dtype | None,
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        self._device = device
        self._cap = config.gpu_memory
        self._held = host_bytes(model)
        self._is_fp16 = autocast_dtype is torch.float16 or any(
            parameter.requires_grad and parameter.dtype is torch.float16 for parameter in model.parameters()
        )
        choices = Choices.of(config, moments=moments_of(optimizers) if optimizers else USUAL_MOMENTS)
        request = Request(parts=parts, machine=machine_of(device, None), choices=choices, host_base=-self._held)
        self.plan = make_lsp_plan(request, LspSettings.from_section(config.lsp))

    def check(self) -> Terms:
        """Say what the plan is, and return what it decides.

        Raises:
            UnsupportedError: the model trains in fp16.
            PlanError: the least that must be on the device, or on the host, is more than it has.
        """
        if self._is_fp16:
            raise UnsupportedError(
                "strategy: lsp does not train in fp16, whose gradients need a loss scale.", remedy="take bf16 or fp32"
            )
        plan = self.plan
        logger.info("SlideFormer: %s", lsp_paragraph(plan))
        if not plan.ledger.matrices:
            logger.warning(
                "SlideFormer: strategy lsp compresses nothing: no trained matrix of a repeated block has a core of at"
                " most half its size at rank %d. All is updated exactly on the device; lower lsp.rank.",
                plan.settings.rank,
            )
        self._check_device()
        self._check_host()
        return plan.terms

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
        needed = gradients + device_state_bytes(specs, self.plan.terms.moments)
        room = engine.residency.room
        if room is not None and needed > room:
            raise self._refusal(
                "Parameters that were frozen at prepare() train now, and the GPU has no room for their gradients and"
                " states.",
                f"{gib(needed)} more needed",
                f"{gib(room)}",
            )
        return Room(spilled=frozenset(), returning=frozenset())

    def _check_device(self) -> None:
        request = self.plan.request
        if not request.machine.has_gpu:
            return
        least = replace(self.plan.terms, edges_update_on_device=False)
        ledger = lsp_ledger(request.parts, self.plan.settings, least)
        needed = ledger.device - ledger.device_work  # what comes at once for certain
        if needed > request.gpu_budget:
            raise self._refusal(
                "strategy: lsp keeps all weights on the GPU, which has no room for them.",
                f"at least {gib(needed)} needed before any activation (weights {gib(ledger.device_weights)}, exact"
                f" gradients and states {gib(ledger.device_gradients + ledger.device_states)}, projectors"
                f" {gib(ledger.device_projectors)}, updates {gib(ledger.device_updates)})",
                f"at most {gib(request.gpu_budget)}",
            )

    def _check_host(self) -> None:
        plan, request = self.plan, self.plan.request
        needed, cap = plan.ledger.host, request.choices.host_memory
        host = probe_host_budget()
        limit = host.available + host.swap + self._held  # weights leave the host as they are moved
        is_capped = cap is not None and needed > cap
        if is_capped or needed > limit:
            raise self._refusal(
                "strategy: lsp keeps cores and their moments in host memory, which has no room for them.",
                f"at least {gib(needed)} needed (moments {gib(plan.ledger.host_moments)}, cores"
                f" {gib(plan.ledger.host_cores)}, embeddings and head {gib(plan.ledger.host_edges)})",
                f"at most {gib(cap)} (host_memory)" if cap is not None and is_capped else f"at most {gib(limit)}",
            )

    def _refusal(self, what: str, found: str, expected: str) -> PlanError:
        changes = [change.text for change in lsp_changes(self.plan)]
        usual = "a smaller lsp.rank, or strategy: slide, which needs room for a few layers only"
        return PlanError(what, found=found, expected=expected, remedy="; or ".join(changes[:3]) or usual)
