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

_LINE = 64
"""Rows of P D that one program reads together: two cache lines of fp32 values."""
_BLOCK = 64
_COLUMNS = 32


@triton.jit
def gather_rows_kernel(
    source_ptr: tl.tensor,
    out_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    values_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    NONZEROS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per ROWS rows of the factor and BLOCK columns of the source; ``out`` is [columns, rows]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = row < rows
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    has_column = column < columns
    inside = known[:, None] & has_column[None, :]
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for slot in tl.static_range(NONZEROS):
        value = tl.load(values_ptr + slot * rows + row, mask=known, other=0.0)[:, None]
        at = tl.load(positions_ptr + slot * rows + row, mask=known, other=0).to(tl.int64)[:, None]
        found = tl.load(source_ptr + at * columns + column[None, :], mask=inside, other=0.0)
        total += value * found.to(tl.float32)
    out = out_ptr + column[:, None] * rows + row[None, :]
    tl.store(out, tl.trans(total), mask=has_column[:, None] & known[None, :])


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
    decay: tl.tensor,
    seed: tl.tensor,
    NONZEROS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program per ROWS x COLUMNS of the weight.

    ``half`` is (P D)ᵀ, [rank, rows]: what a column needs from it lies together for all rows of the program. Programs
    of the same rows are neighbours, so that what they read stays in the cache.
    """
    line = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    has_row = line < rows
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < columns
    total = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
    for slot in tl.static_range(NONZEROS):
        value = tl.load(values_ptr + slot * columns + column, mask=known, other=0.0)[:, None]
        at = tl.load(positions_ptr + slot * columns + column, mask=known, other=0).to(tl.int64)[:, None]
        mask = known[:, None] & has_row[None, :]
        total += value * tl.load(half_ptr + at * rows + line[None, :], mask=mask, other=0.0)
    row = line.to(tl.int64)[:, None]
    inside = has_row[:, None] & known[None, :]
    number = row * columns + column[None, :]
    target = tl.load(weight_ptr + number, mask=inside, other=0.0).to(tl.float32) * decay + tl.trans(total)
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
    half = weight.new_empty(q, m, dtype=torch.float32)
    blocks = triton.cdiv(m, _LINE)
    with on_device_of(weight):
        gather_rows_kernel[(blocks, triton.cdiv(q, _BLOCK))](
            core,
            half,
            left.positions,
            left.values,
            m,
            q,
            NONZEROS=left.nonzeros,
            ROWS=_LINE,
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
        apply_kernel[(triton.cdiv(n, _COLUMNS), blocks)](
            weight,
            half,
            right.positions,
            right.values,
            m,
            n,
            float(decay),
            twins.spread(seed),
            NONZEROS=right.nonzeros,
            STOCHASTIC=weight.dtype == torch.bfloat16,
            ROWS=_LINE,
            COLUMNS=_COLUMNS,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return weight
