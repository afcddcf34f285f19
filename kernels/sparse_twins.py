"""The sparse-projector kernels in plain torch: the same arguments and results, on any device."""

from __future__ import annotations

import torch

from slideformer_backend.kernels.sparse_factor import SparseFactor

__all__ = [
    "gather_columns",
    "gather_rows",
    "random_bits",
    "sparse_apply_",
    "sparse_compress",
    "spread",
    "stochastic_round",
]

_LOW = 0xFFFFFFFF


def gather_columns(factor: SparseFactor, source: torch.Tensor) -> torch.Tensor:
    """``factorᵀ · source``: fp32 [rank, columns] from [rows, columns]."""
    rows = factor.entries % factor.rows
    weights = factor.values.view(-1)[factor.entries.long()]
    return torch.nn.functional.embedding_bag(
        rows, source.float(), factor.starts[:-1], mode="sum", per_sample_weights=weights
    )


def gather_rows(factor: SparseFactor, source: torch.Tensor) -> torch.Tensor:
    """``factor · source``: fp32 [rows, columns] from [rank, columns]."""
    return torch.nn.functional.embedding_bag(
        factor.positions.t().contiguous(),
        source.float(),
        mode="sum",
        per_sample_weights=factor.values.t().contiguous(),
    )


def sparse_compress(gradient: torch.Tensor, left: SparseFactor, right: SparseFactor) -> torch.Tensor:
    """See :func:`slideformer_backend.kernels.sparse_compress.sparse_compress`."""
    half = gather_columns(left, gradient)
    return gather_columns(right, half.t().contiguous()).t().to(gradient.dtype)


def sparse_apply_(
    weight: torch.Tensor, core: torch.Tensor, left: SparseFactor, right: SparseFactor, decay: float, seed: int
) -> torch.Tensor:
    """See :func:`slideformer_backend.kernels.sparse_apply.sparse_apply_`."""
    half = gather_rows(left, core)
    update = gather_rows(right, half.t().contiguous()).t()
    target = weight.float() * decay + update
    return weight.copy_(stochastic_round(target, seed) if weight.dtype == torch.bfloat16 else target)


def stochastic_round(value: torch.Tensor, seed: int) -> torch.Tensor:
    """bf16 of a contiguous fp32 tensor: up with the probability of the part that is cut off; NaN and infinity stay."""
    value = value.contiguous()
    bits = value.view(torch.int32)
    noise = random_bits(value.numel(), seed, value.device).view(value.shape).to(torch.int32)
    moved = ((bits + noise) & -0x10000).view(torch.float32)
    return torch.where(torch.isfinite(value), moved, value).to(torch.bfloat16)


def spread(seed: int) -> int:
    """31 bits that share nothing with those of neighbouring seeds. (A small seed alone would only reorder the numbers:
    every step would round the same share of a matrix up.)"""
    x = ((seed + 1) * 0x9E3779B1) & _LOW
    x = ((x ^ (x >> 15)) * 0x85EBCA6B) & _LOW
    return (x ^ (x >> 13)) & 0x7FFFFFFF


def random_bits(count: int, seed: int, device: torch.device) -> torch.Tensor:
    """16 random bits (int64) for each of the numbers below ``count``: the finaliser of MurmurHash3 over number and
    seed."""
    x = (torch.arange(count, device=device) & _LOW) ^ spread(seed)
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _LOW
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _LOW
    return (x ^ (x >> 16)) & 0xFFFF
