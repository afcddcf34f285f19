"""The fair baseline: a two-sided low-rank core with orthonormal factors from a randomised SVD, and error feedback."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kernels.sparse_twins import stochastic_round
from .projector import GradientProjector, Learned, relative

OVERSAMPLE = 8
"""Directions beyond the rank that the randomised SVD looks at (Halko, Martinsson and Tropp, 2011)."""
POWER_ROUNDS = 2
"""Power iterations of the randomised SVD."""


class OrthonormalProjector(GradientProjector):
    """Factors U [m, p] and V [n, q] with orthonormal columns: fp32, (m + n) · d device memory.

    A side that is no longer than the rank keeps the identity.
    """

    keeps_residual = True

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left = left
        self.right = right

    @classmethod
    def random(cls, shape: Sequence[int], rank: int, *, seed: int, device: torch.device) -> OrthonormalProjector:
        """Random subspaces of dimension ``rank`` for a matrix of ``shape`` (m, n); equal seeds give equal factors."""
        generator = torch.Generator().manual_seed(seed)
        left, right = (_random_basis(rows, rank, generator).to(device) for rows in shape)
        return cls(left, right)

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.left.shape[0]), int(self.right.shape[0])

    @property
    def core_shape(self) -> tuple[int, int]:
        return int(self.left.shape[1]), int(self.right.shape[1])

    @property
    def nbytes(self) -> int:
        return 4 * (self.left.numel() + self.right.numel())

    def compress(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.left.t() @ gradient.float() @ self.right).to(gradient.dtype).contiguous()

    def expand(self, core: torch.Tensor) -> torch.Tensor:
        return self.left @ core.float() @ self.right.t()

    def apply_(self, weight: torch.Tensor, core: torch.Tensor, decay: float, seed: int) -> None:
        target = weight.float() * decay + self.expand(core)
        weight.copy_(stochastic_round(target, seed) if weight.dtype == torch.bfloat16 else target)

    def error(self, core: torch.Tensor, norm: float) -> float:
        return relative(norm**2 - core.double().square().sum().item(), norm)

    def learn(self, samples: Sequence[torch.Tensor], *, alpha: float, timeout: int, seed: int) -> Learned:
        """One randomised SVD of the samples, each scaled to norm 1; a side is refreshed where it loses anything."""
        scaled = [sample.float() / sample.float().norm() for sample in samples]
        left = _leading(scaled, self.left, seed)
        right = _leading([sample.t() for sample in scaled], self.right, seed + 1)
        made = OrthonormalProjector(left, right)
        square = sum(1.0 - (left.t() @ sample @ right).double().square().sum().item() for sample in scaled)
        return Learned(made, relative(square / len(scaled), 1.0), 1)

    def overlaps(self, old: GradientProjector) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(old, OrthonormalProjector):
            raise ValueError(f"moments of a {type(old).__name__} cannot be carried to an OrthonormalProjector")
        return self.left.t() @ old.left, old.right.t() @ self.right

    def state(self) -> dict[str, torch.Tensor]:
        return {"left": self.left, "right": self.right}

    def restored(self, state: dict[str, torch.Tensor]) -> OrthonormalProjector:
        for side, own in (("left", self.left), ("right", self.right)):
            if state[side].shape != own.shape:
                raise ValueError(f"a {side} factor of {tuple(state[side].shape)}, expected {tuple(own.shape)}")
        device = self.left.device
        left, right = (state[side].to(device, torch.float32, copy=True) for side in ("left", "right"))
        return OrthonormalProjector(left, right)


def _random_basis(rows: int, rank: int, generator: torch.Generator) -> torch.Tensor:
    if rows <= rank:
        return torch.eye(rows)
    basis: torch.Tensor = torch.linalg.qr(torch.randn(rows, rank, generator=generator)).Q.contiguous()
    return basis


def _leading(samples: Sequence[torch.Tensor], old: torch.Tensor, seed: int) -> torch.Tensor:
    """The leading left singular vectors of the samples side by side, as many as ``old`` has."""
    rows, rank = old.shape
    if rows == rank:
        return old
    generator = torch.Generator().manual_seed(seed)
    width = min(rows, rank + OVERSAMPLE)
    start = torch.randn(rows, width, generator=generator).to(old.device)
    basis = torch.linalg.qr(_covariance(samples, start)).Q
    for _ in range(POWER_ROUNDS - 1):
        basis = torch.linalg.qr(_covariance(samples, basis)).Q
    small = basis.t() @ _covariance(samples, basis)
    vectors = torch.linalg.eigh((small + small.t()) / 2).eigenvectors  # ascending
    leading: torch.Tensor = (basis @ vectors[:, -rank:].flip(1)).contiguous()
    return leading


def _covariance(samples: Sequence[torch.Tensor], vectors: torch.Tensor) -> torch.Tensor:
    """Σ G Gᵀ · ``vectors``."""
    total = torch.zeros_like(vectors)
    for sample in samples:
        total += sample @ (sample.t() @ vectors)
    return total
