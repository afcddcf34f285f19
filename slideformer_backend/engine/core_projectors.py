"""The projectors of an engine's cores: made, looked at, and replaced where they lose too much of their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..lsp import Beta, OrthonormalProjector, SparseProjector, carry_moments
from ..lsp_settings import LspSettings
from ..storage import HostMemory
from ..transfer import Backend
from .core import Core
from .unit import KINDS, ParamRecord


class Projectors:
    """Makes cores and keeps their projectors good.

    Args:
        settings: rank, nonzeros, and when to look and learn.
        backend: lanes and device.
        memory: host allocator.
    """

    def __init__(self, settings: LspSettings, backend: Backend, memory: HostMemory) -> None:
        self._settings = settings
        self._backend = backend
        self._memory = memory
        self._cores = 0

    def make(self, record: ParamRecord, shape: Sequence[int]) -> Core:
        """The core of a matrix, with random factors."""
        number, settings, device = self._cores, self._settings, self._backend.device
        self._cores += 1
        projector: SparseProjector | OrthonormalProjector
        if settings.projector == "lsp":
            projector = SparseProjector.random(shape, settings.rank, settings.nonzeros, seed=number, device=device)
        else:
            projector = OrthonormalProjector.random(shape, settings.rank, seed=number, device=device)
        dtype, line = record.spec.dtype, record.unit.index
        core = Core.of(record.name, projector, dtype, KINDS[dtype], line, number, self._memory)
        if projector.keeps_residual:
            core.residual = torch.zeros(shape, dtype=dtype, device=device)
        return core

    def is_due(self, record: ParamRecord) -> bool:
        """Whether the projector should be looked at before the next core."""
        return record.steps % self._settings.check_interval == 0

    @staticmethod
    def compress(core: Core, gradient: torch.Tensor) -> torch.Tensor:
        """The core of a gradient [m, n] (contiguous, on the device) in its dtype; what it leaves is kept, where that is
        fed back."""
        residual = core.residual
        if residual is None:
            return core.projector.compress(gradient)
        whole = gradient + residual
        compressed = core.projector.compress(whole)
        left = whole - core.projector.expand(compressed)
        residual.copy_(torch.where(torch.isfinite(left).all(), left, residual))  # a NaN would stay for good
        return compressed

    def look(self, record: ParamRecord, core: Core, gradient: torch.Tensor) -> None:
        """Estimate the projector's error on this gradient; learn another one where it is too large.

        Between steps of this matrix only: no gradient, no prediction, and no update that its weight has not got.
        """
        settings = self._settings
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float32))
        error = core.projector.error(core.projector.compress(gradient.float()), norm)
        core.errors.append(error)
        if not error > settings.alpha or not math.isfinite(error):
            return
        seed = record.steps * 7919 + core.number
        learned = core.projector.learn([gradient], alpha=settings.alpha, timeout=settings.timeout, seed=seed)
        if not learned.error < error:
            return
        self._backend.synchronize("host waits for core updated", core.updated)
        if record.steps:
            slabs = tuple(core.states.values())
            self._backend.touch_host(f"moments of {core.name}", reads=slabs, writes=slabs)
            device = self._backend.device
            held = {name: core.moment(name).to(device) for name in core.states}
            overlaps = learned.projector.overlaps(core.projector)
            for name, value in carry_moments(held, overlaps, self._beta(record)).items():
                core.moment(name).copy_(value)
        core.projector = learned.projector
        core.learned += 1

    def _beta(self, record: ParamRecord) -> Beta | None:
        betas = (record.group or {}).get("betas")
        if self._settings.projector != "orthonormal" or betas is None:
            return None
        return Beta(float(betas[0]), float(betas[1]), record.steps)
