"""What a strategy needs of a projector: gradients to cores, cores to updates, an error, and a successor."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Learned(NamedTuple):
    """What learning has found."""

    projector: GradientProjector
    error: float
    """Relative error on what was learned from."""
    rounds: int
    """Optimisation steps taken."""


class GradientProjector(abc.ABC):
    """Two factors, P [m, p] and Q [n, q], between gradients [m, n] and cores [p, q].

    Immutable: learning makes another projector, so that moments can be carried from one to the other.
    """

    keeps_residual: bool
    """Whether what a core leaves of a gradient is added to the next gradient (error feedback)."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int]:
        """(m, n) of the matrix."""

    @property
    @abc.abstractmethod
    def core_shape(self) -> tuple[int, int]:
        """(p, q) of the core."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Device memory of the factors."""

    @abc.abstractmethod
    def compress(self, gradient: torch.Tensor) -> torch.Tensor:
        """C = PᵀGQ, contiguous, in the dtype of ``gradient`` [m, n] (fp32 or bf16), computed in fp32."""

    @abc.abstractmethod
    def expand(self, core: torch.Tensor) -> torch.Tensor:
        """P C Qᵀ, fp32 [m, n]."""

    @abc.abstractmethod
    def apply_(self, weight: torch.Tensor, core: torch.Tensor, decay: float, seed: int) -> None:
        """``weight`` ← ``weight`` · ``decay`` + P ``core`` Qᵀ, in place; bf16 is rounded stochastically by ``seed``."""

    @abc.abstractmethod
    def error(self, core: torch.Tensor, norm: float) -> float:
        """‖P C Qᵀ - G‖ / ‖G‖ of the gradient with this core and this Frobenius norm, without the gradient.

        0 for a gradient of zeros, NaN for one that is not finite.
        """

    @abc.abstractmethod
    def learn(self, samples: Sequence[torch.Tensor], *, alpha: float, timeout: int, seed: int) -> Learned:
        """A projector with a smaller error on ``samples``.

        Args:
            samples: gradients [m, n], finite and not all zeros.
            alpha: the relative error that is good enough.
            timeout: most optimisation steps. A count, not seconds: a run can then be repeated and resumed bit for bit.
            seed: of whatever is drawn.
        """

    @abc.abstractmethod
    def overlaps(self, old: GradientProjector) -> tuple[torch.Tensor, torch.Tensor]:
        """(A, B), fp32 [p', p] and [q, q'], such that A C B is what this projector makes of a core C of ``old``.

        A = PᵀP₀(P₀ᵀP₀)⁻¹ and B = (Q₀ᵀQ₀)⁻¹Q₀ᵀQ: of the gradients that ``old`` maps to C, the smallest one is compressed
        again. For factors with orthonormal columns these are the PᵀP₀ and Q₀ᵀQ of arXiv 2406.10181, which for others
        would change moments even when nothing changes (PᵀP is about m/d times the identity for a random sparse P).
        """

    @abc.abstractmethod
    def state(self) -> dict[str, torch.Tensor]:
        """The factors, for a checkpoint."""

    @abc.abstractmethod
    def restored(self, state: dict[str, torch.Tensor]) -> GradientProjector:
        """The projector of this shape with the factors of :meth:`state`.

        Raises:
            ValueError: they are of another shape.
        """


def least_squares(gram: torch.Tensor, cross: torch.Tensor) -> torch.Tensor:
    """``cross`` · ``gram``⁻¹ for a symmetric positive semidefinite ``gram`` [d, d] and ``cross`` [k, d], both fp32.

    Columns that the old factor leaves empty contribute nothing.
    """
    wide = gram.double()
    diagonal = wide.diagonal()
    is_empty = diagonal == 0
    wide = wide + torch.diag(torch.where(is_empty, torch.ones_like(diagonal), diagonal * 1e-9))
    factor, failed = torch.linalg.cholesky_ex(wide)
    if bool(failed):  # dependent columns
        inverse: torch.Tensor = torch.linalg.pinv(wide, hermitian=True)
        return (cross.double() @ inverse).float()
    solved: torch.Tensor = torch.cholesky_solve(cross.double().t(), factor).t().float().contiguous()
    return solved


def relative(square: float, norm: float) -> float:
    """√square / norm, where rounding may have made a square of nothing negative."""
    if norm == 0.0:
        return 0.0
    return float(max(square, 0.0) ** 0.5 / norm) if square == square else square
