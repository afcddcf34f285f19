"""The update of a core put on its weight: W ← W·decay + P D Qᵀ, rounded stochastically where W is bf16.

At lr 5e-5 most updates are below half a bf16 step of their weight: rounded to nearest they would be lost. Rounded up
with the probability of the part that is cut off, they arrive in the mean without a second copy of the weight.
"""

from __future__ import annotations

import torch

from slideformer_backend.kernels import sparse_twins as twins
from slideformer_backend.kernels.runtime import on_device_of, runs_triton, tl, triton
from slideformer_backend.kernels.sparse_factor import SparseFactor

__all__ = ["sparse_apply_"]

_BLOCK = 512
_ROWS = 8
_COLUMNS = 128


@triton.jit
def gather_rows_kernel(
    source_ptr: tl.tensor,
    out_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    values_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    NONZEROS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row of the factor and BLOCK columns of the source."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in tl.static_range(NONZEROS):
        value = tl.load(values_ptr + slot * rows + row)
        at = tl.load(positions_ptr + slot * rows + row).to(tl.int64)
        total += value * tl.load(source_ptr + at * columns + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * columns + column, total, mask=inside)


@triton.jit
def tl_stochastic(value: tl.tensor, number: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """bf16 of fp32 ``value``, with the random bits of the twin."""
    x = (number ^ seed).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    noise = ((x ^ (x >> 16)) & 0xFFFF).to(tl.int32)
    bits = value.to(tl.int32, bitcast=True)
    moved = ((bits + noise) & -0x10000).to(tl.float32, bitcast=True)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(is_finite, moved, value).to(tl.bfloat16)


@triton.jit
def apply_kernel(
    weight_ptr: tl.tensor,
    half_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    values_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    rank: tl.tensor,
    decay: tl.tensor,
    seed: tl.tensor,
    NONZEROS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program per ROWS x COLUMNS of the weight: positions are read once for all its rows, and rows of ``half``
    (P D, [rows, rank]) are short enough to stay near."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < columns
    inside = (row < rows) & known[None, :]
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for slot in tl.static_range(NONZEROS):
        value = tl.load(values_ptr + slot * columns + column, mask=known, other=0.0)[None, :]
        at = tl.load(positions_ptr + slot * columns + column, mask=known, other=0)[None, :]
        total += value * tl.load(half_ptr + row * rank + at, mask=inside, other=0.0)
    number = row * columns + column[None, :]
    target = tl.load(weight_ptr + number, mask=inside, other=0.0).to(tl.float32) * decay + total
    if STOCHASTIC:
        tl.store(weight_ptr + number, tl_stochastic(target, number, seed), mask=inside)
    else:
        tl.store(weight_ptr + number, target.to(weight_ptr.dtype.element_ty), mask=inside)


def sparse_apply_(
    weight: torch.Tensor, core: torch.Tensor, left: SparseFactor, right: SparseFactor, decay: float, seed: int
) -> torch.Tensor:
    """``weight`` · decay + P · core · Qᵀ, in place.

    Args:
        weight: W, [m, n], contiguous; fp32 (rounded to nearest) or bf16 (rounded stochastically, once).
        core: D, [p, q], contiguous, fp32 or bf16; what is added, sign and learning rate included.
        left: P, [m, p].
        right: Q, [n, q].
        decay: factor of the weight, rounded to fp32; 1 without weight decay.
        seed: of the stochastic rounding, 0 up to 2³¹ - 1; equal seeds give equal bits.

    Returns:
        ``weight``.
    """
    if not runs_triton(weight):
        return twins.sparse_apply_(weight, core, left, right, decay, seed)
    (m, n), q = weight.shape, core.shape[1]
    half = weight.new_empty(m, q, dtype=torch.float32)
    with on_device_of(weight):
        gather_rows_kernel[(m, triton.cdiv(q, _BLOCK))](
            core,
            half,
            left.positions,
            left.values,
            m,
            q,
            NONZEROS=left.nonzeros,
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
        apply_kernel[(triton.cdiv(m, _ROWS), triton.cdiv(n, _COLUMNS))](
            weight,
            half,
            right.positions,
            right.values,
            m,
            n,
            q,
            float(decay),
            twins.spread(seed),
            NONZEROS=right.nonzeros,
            STOCHASTIC=weight.dtype == torch.bfloat16,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return weight
