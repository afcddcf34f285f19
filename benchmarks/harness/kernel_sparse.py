"""Rows of the kernel benchmark for ``strategy: lsp``: ours against the torch twins and the product with dense factors.

See ``kernel_command``. A share is the fewest possible bytes over time: the matrix once, the core once, the factors'
positions and values once. Kernels and twins also write and read an fp32 product of one factor, which does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from slideformer_backend.benchmarks.harness.kernel_timing import (
    BF16,
    DEVICE,
    IS_REAL,
    Bench,
    Row,
    median_ms,
    randn,
    relative_error,
)
from slideformer_backend.kernels import sparse_twins as twins
from slideformer_backend.kernels.sparse_apply import sparse_apply_
from slideformer_backend.kernels.sparse_compress import sparse_compress
from slideformer_backend.kernels.sparse_factor import SparseFactor, make_factor

__all__ = ["measure_sparse"]

RANK, NONZEROS = (2048, 8) if IS_REAL else (16, 4)
SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336)] if IS_REAL else [(40, 24)]
"""Attention, up and down projection of an 8B model."""
DECAY, SEED = 0.999, 5

Compress = Callable[[torch.Tensor, "Factors"], torch.Tensor]
Apply = Callable[[torch.Tensor, torch.Tensor, "Factors"], torch.Tensor]


@dataclass(frozen=True)
class Factors:
    """P and Q of one matrix, and the same as dense bf16 matrices."""

    left: SparseFactor
    right: SparseFactor
    dense_left: torch.Tensor
    dense_right: torch.Tensor

    @classmethod
    def random(cls, shape: tuple[int, int]) -> Factors:
        """Normal values at distinct random positions."""
        left, right = (_random_factor(rows) for rows in shape)
        return cls(left, right, left.dense().to(BF16), right.dense().to(BF16))

    @property
    def nbytes(self) -> int:
        """Bytes of positions and values, read once."""
        return sum(8 * factor.values.numel() for factor in (self.left, self.right))


def dense_compress(gradient: torch.Tensor, factors: Factors) -> torch.Tensor:
    """Two matrix products, which need factors of (m + n) · rank."""
    return factors.dense_left.to(gradient.dtype).t() @ gradient @ factors.dense_right.to(gradient.dtype)


def dense_apply(weight: torch.Tensor, core: torch.Tensor, factors: Factors) -> torch.Tensor:
    """Two matrix products and an addition, rounded to nearest."""
    product = factors.dense_left.to(weight.dtype) @ core @ factors.dense_right.to(weight.dtype).t()
    return weight.mul_(DECAY).add_(product)


COMPRESS: dict[str, Compress] = {
    "ours": lambda gradient, f: sparse_compress(gradient, f.left, f.right),
    "torch": lambda gradient, f: twins.sparse_compress(gradient, f.left, f.right),
    "dense product": dense_compress,
}
APPLY: dict[str, Apply] = {
    "ours": lambda weight, core, f: sparse_apply_(weight, core, f.left, f.right, DECAY, SEED),
    "torch": lambda weight, core, f: twins.sparse_apply_(weight, core, f.left, f.right, DECAY, SEED),
    "dense product": dense_apply,
}


def measure_sparse(bench: Bench) -> None:
    """Rows of compressing gradients and of applying updates, bf16."""
    for m, n in SHAPES:
        factors = Factors.random((m, n))
        for who, compress in COMPRESS.items():
            bench.add(f"compress {m} x {n}", who, _compressing(bench, (m, n), factors, compress))
        for who, apply_ in APPLY.items():
            bench.add(f"apply {m} x {n}", who, _applying(bench, (m, n), factors, apply_))


def _compressing(bench: Bench, shape: tuple[int, int], factors: Factors, way: Compress) -> Callable[[Row], None]:
    def measure(row: Row) -> None:
        gradients = [randn(*shape) for _ in range(2)]
        core = way(gradients[0], factors)
        row.ms = median_ms(lambda n: way(gradients[n % 2], factors))
        row.set_share(gradients[0].nbytes + core.nbytes + factors.nbytes, bench.copy)
        truth = factors.left.dense().double().t() @ gradients[0].double() @ factors.right.dense().double()
        row.error = relative_error(core, truth)

    return measure


def _applying(bench: Bench, shape: tuple[int, int], factors: Factors, way: Apply) -> Callable[[Row], None]:
    def measure(row: Row) -> None:
        weights, core = [randn(*shape) for _ in range(2)], randn(factors.left.rank, factors.right.rank, scale=1e-3)
        row.ms = median_ms(lambda n: way(weights[n % 2], core, factors))
        row.set_share(2 * weights[0].nbytes + core.nbytes + factors.nbytes, bench.copy)
        # on fp32 zeros: the update alone, without the noise of rounding the weight
        wide = core.float()
        found = way(torch.zeros(shape, device=DEVICE), wide, factors)
        truth = factors.left.dense().double() @ wide.double() @ factors.right.dense().double().t()
        row.error = relative_error(found, truth)

    return measure


def _random_factor(rows: int) -> SparseFactor:
    positions = torch.rand(rows, RANK, device=DEVICE).topk(NONZEROS, 1).indices.t()
    return make_factor(positions, torch.randn(NONZEROS, rows, device=DEVICE), RANK)
