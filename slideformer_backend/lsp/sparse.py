"""The projector of LSP-Offload (arXiv 2406.10181): sparse factors at fixed random positions, with learned values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kernels import sparse_twins as twins
from ..kernels.sparse_apply import sparse_apply_
from ..kernels.sparse_compress import sparse_compress
from ..kernels.sparse_factor import SparseFactor, make_factor
from .projector import GradientProjector, Learned, least_squares, relative

RATE = 0.1
"""Learning rate of Adam, as a share of the root mean square of a factor's values."""
BETA = 1e-6
"""Weight of the factors' mean square in what learning minimises."""
_CHUNK = 4096
"""Rows whose positions are drawn at once."""


class SparseProjector(GradientProjector):
    """Sparse factors P and Q, each row with the same number of nonzeros; O((m + n) · r) device memory.

    A side that is no longer than the rank has the identity as its factor: there nothing is lost, and nothing learned.
    """

    keeps_residual = False

    def __init__(self, left: SparseFactor, right: SparseFactor) -> None:
        self.left = left
        self.right = right

    @classmethod
    def random(
        cls, shape: Sequence[int], rank: int, nonzeros: int, *, seed: int, device: torch.device
    ) -> SparseProjector:
        """Random factors with E[PPᵀ] = I for a matrix of ``shape``.

        Args:
            shape: (m, n).
            rank: d, at least 1.
            nonzeros: r per row, at most ``rank`` of them are used.
            seed: equal seeds give equal factors on every device.
            device: of the factors.
        """
        generator = torch.Generator().manual_seed(seed)
        left, right = (_random_factor(rows, rank, nonzeros, generator, device) for rows in shape)
        return cls(left, right)

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.rows, self.right.rows

    @property
    def core_shape(self) -> tuple[int, int]:
        return self.left.rank, self.right.rank

    @property
    def nbytes(self) -> int:
        return self.left.nbytes + self.right.nbytes

    def compress(self, gradient: torch.Tensor) -> torch.Tensor:
        compress = sparse_compress if gradient.is_cuda else twins.sparse_compress
        return compress(gradient, self.left, self.right).contiguous()

    def expand(self, core: torch.Tensor) -> torch.Tensor:
        return twins.gather_rows(self.right, twins.gather_rows(self.left, core).t().contiguous()).t()

    def apply_(self, weight: torch.Tensor, core: torch.Tensor, decay: float, seed: int) -> None:
        apply_ = sparse_apply_ if weight.is_cuda else twins.sparse_apply_
        apply_(weight, core, self.left, self.right, decay, seed)

    def error(self, core: torch.Tensor, norm: float) -> float:
        wide = core.float()
        fitted = _gram(self.left) @ wide @ _gram(self.right)
        # ‖PCQᵀ‖² = ⟨(PᵀP) C (QᵀQ), C⟩ and ⟨PCQᵀ, G⟩ = ‖C‖²
        square = (fitted.double() * wide).sum() - 2.0 * wide.double().square().sum()
        return relative(square.item() + norm**2, norm)

    def learn(self, samples: Sequence[torch.Tensor], *, alpha: float, timeout: int, seed: int) -> Learned:
        with torch.no_grad():
            return _learn(self, [sample.float() for sample in samples], alpha, timeout)

    def overlaps(self, old: GradientProjector) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(old, SparseProjector):
            raise ValueError(f"moments of a {type(old).__name__} cannot be carried to a SparseProjector")
        first = least_squares(_gram(old.left), self.left.dense().t() @ old.left.dense())
        second = least_squares(_gram(old.right), self.right.dense().t() @ old.right.dense())
        return first, second.t().contiguous()

    def state(self) -> dict[str, torch.Tensor]:
        return {
            "left_positions": self.left.positions,
            "left_values": self.left.values,
            "right_positions": self.right.positions,
            "right_values": self.right.values,
        }

    def restored(self, state: dict[str, torch.Tensor]) -> SparseProjector:
        made = []
        for side, own in (("left", self.left), ("right", self.right)):
            positions, values = state[f"{side}_positions"], state[f"{side}_values"]
            if positions.shape != own.positions.shape or int(positions.max()) >= own.rank:
                raise ValueError(f"a {side} factor of {tuple(positions.shape)}, expected {tuple(own.positions.shape)}")
            device = own.values.device
            made.append(make_factor(positions.to(device).long(), values.to(device), own.rank))
        return SparseProjector(*made)


def _random_factor(
    rows: int, rank: int, nonzeros: int, generator: torch.Generator, device: torch.device
) -> SparseFactor:
    if rows <= rank:
        return make_factor(torch.arange(rows, device=device)[None], torch.ones(1, rows, device=device), rows)
    slots = min(nonzeros, rank)
    positions = torch.empty(slots, rows, dtype=torch.int64)
    for begin in range(0, rows, _CHUNK):
        drawn = torch.rand(min(_CHUNK, rows - begin), rank, generator=generator)
        positions[:, begin : begin + _CHUNK] = drawn.topk(slots, 1).indices.t()
    # N(0, 1/√r), each row then of norm 1: the diagonal of PPᵀ is 1 and not only so in the mean, which takes 2/r off
    # each factor of the error
    values = torch.nn.functional.normalize(torch.randn(slots, rows, generator=generator), dim=0)
    return make_factor(positions.to(device), values.to(device), rank)


def _gram(factor: SparseFactor) -> torch.Tensor:
    dense = factor.dense()
    return dense.t() @ dense


def _is_identity(factor: SparseFactor) -> bool:
    return factor.nonzeros == 1 and factor.rows == factor.rank


def _learn(projector: SparseProjector, samples: Sequence[torch.Tensor], alpha: float, timeout: int) -> Learned:
    """Minimises the mean square of the relative errors over the values, by Adam; the best found is kept.

    Gradients are written out: small matrices take as long as their launches, of which autograd needs several times as
    many.
    """
    factors = (projector.left, projector.right)
    values = [factor.values.clone() for factor in factors]
    free = [number for number, factor in enumerate(factors) if not _is_identity(factor)]
    squares = [sample.square().sum() for sample in samples]
    _fit_scale(factors, values, free, samples, squares)
    best, lowest, rounds = [value.clone() for value in values], float("inf"), 0
    groups = [{"params": [values[n]], "lr": RATE * float(values[n].square().mean().sqrt())} for n in free]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99), fused=values[0].is_cuda) if groups else None
    while True:
        square, slopes = mean_square_error(factors, values, samples, squares)
        error = relative(float(square), 1.0)
        if error < lowest:
            best, lowest = [value.clone() for value in values], error
        if lowest <= alpha or rounds >= timeout or optimizer is None:
            break
        for number in free:
            value = values[number]
            value.grad = slopes[number].add_(value, alpha=2.0 * BETA / value.numel())
        optimizer.step()
        rounds += 1
    left, right = (factor._replace(values=value) for factor, value in zip(factors, best, strict=True))
    return Learned(SparseProjector(left, right), lowest, rounds)


def _fit_scale(
    factors: Sequence[SparseFactor],
    values: Sequence[torch.Tensor],
    free: Sequence[int],
    samples: Sequence[torch.Tensor],
    squares: Sequence[torch.Tensor],
) -> None:
    """The common factor of all values that is best for ``samples``: random factors start far too large."""
    left, right = (_dense(factor, value) for factor, value in zip(factors, values, strict=True))
    wanted = actual = 0.0
    for sample, norm in zip(samples, squares, strict=True):
        core = left.t() @ sample @ right
        wanted += float(core.square().sum() / norm)
        actual += float(((left.t() @ left) @ core @ (right.t() @ right) * core).sum() / norm)
    if wanted > 0.0 and actual > 0.0 and free:
        for number in free:
            values[number].mul_((wanted / actual) ** (0.5 / len(free)))


def mean_square_error(
    factors: Sequence[SparseFactor],
    values: Sequence[torch.Tensor],
    samples: Sequence[torch.Tensor],
    squares: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Mean of ‖PCQᵀ - G‖² / ‖G‖² over ``samples``, and its gradient by the values of P and of Q.

    With A = PᵀP, B = QᵀQ and C = PᵀGQ it is 1 + f / ‖G‖², f = ⟨ACB, C⟩ - 2‖C‖², whose gradients are
    D = 2ACB - 4C by C, GQDᵀ + 2PCBCᵀ by P and GᵀPD + 2QCᵀAC by Q.

    Args:
        factors: P and Q, whose positions count.
        values: theirs, fp32 [r, m] and [r, n].
        samples: gradients G, fp32 [m, n].
        squares: ‖G‖² of each, fp32 scalars.
    """
    left, right = (_dense(factor, value) for factor, value in zip(factors, values, strict=True))
    first, second = left.t() @ left, right.t() @ right
    total = left.new_zeros(())
    slopes = [torch.zeros_like(left), torch.zeros_like(right)]
    for sample, norm in zip(samples, squares, strict=True):
        scale = 1.0 / (norm * len(samples))
        half = sample @ right
        core = left.t() @ half
        near, far = first @ core, core @ second
        both = near @ second
        total += 1.0 / len(samples) + ((both - 2.0 * core) * core).sum() * scale
        slope = (2.0 * both - 4.0 * core) * scale
        scaled = core * (2.0 * scale)
        slopes[0].addmm_(half, slope.t()).addmm_(left, far @ scaled.t())
        slopes[1].addmm_(sample.t() @ left, slope).addmm_(right, near.t() @ scaled)
    return total, [
        full.gather(1, factor.positions.t().long()).t().contiguous()
        for full, factor in zip(slopes, factors, strict=True)
    ]


def _dense(factor: SparseFactor, values: torch.Tensor) -> torch.Tensor:
    full = values.new_zeros(factor.rows, factor.rank)
    return full.scatter_(1, factor.positions.t().long(), values.t())
