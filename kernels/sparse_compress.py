"""The core of a gradient, C = PᵀGQ, with sparse factors: gathered by column, no atomics, the same bits every time."""

from __future__ import annotations

import torch

from slideformer_backend.kernels import sparse_twins as twins
from slideformer_backend.kernels.runtime import on_device_of, runs_triton, tl, triton
from slideformer_backend.kernels.sparse_factor import SparseFactor

__all__ = ["gather_columns", "sparse_compress"]

_BLOCK = 512


@triton.jit
def gather_columns_kernel(
    source_ptr: tl.tensor,
    out_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    entries_ptr: tl.tensor,
    values_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    out_row_stride: tl.tensor,
    out_column_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program per column of the factor and BLOCK columns of the source."""
    target = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros([BLOCK], dtype=tl.float32)
    begin = tl.load(starts_ptr + target)
    end = tl.load(starts_ptr + target + 1)
    for at in range(begin, end):
        entry = tl.load(entries_ptr + at)
        value = tl.load(values_ptr + entry)
        row = (entry % rows).to(tl.int64)
        total += value * tl.load(source_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    out = out_ptr + target * out_row_stride + column * out_column_stride
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)


def _launch(factor: SparseFactor, source: torch.Tensor, out: torch.Tensor) -> None:
    """``out`` [rank, columns], of any strides, becomes ``factorᵀ · source``."""
    rows, columns = source.shape
    with on_device_of(source):
        gather_columns_kernel[(factor.rank, triton.cdiv(columns, _BLOCK))](
            source,
            out,
            factor.starts,
            factor.entries,
            factor.values,
            rows,
            columns,
            out.stride(0),
            out.stride(1),
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )


def gather_columns(factor: SparseFactor, source: torch.Tensor) -> torch.Tensor:
    """``factorᵀ · source``.

    Args:
        factor: [rows, rank].
        source: [rows, columns], contiguous, fp32 or bf16.

    Returns:
        fp32 [rank, columns], summed in fp32 in the order of rows.
    """
    if not runs_triton(source):
        return twins.gather_columns(factor, source)
    out = source.new_empty(factor.rank, source.shape[1], dtype=torch.float32)
    _launch(factor, source, out)
    return out


def sparse_compress(gradient: torch.Tensor, left: SparseFactor, right: SparseFactor) -> torch.Tensor:
    """The core PᵀGQ (arXiv 2406.10181, section 3).

    Args:
        gradient: G, [m, n], contiguous, fp32 or bf16.
        left: P, [m, p].
        right: Q, [n, q].

    Returns:
        [p, q] in the dtype of ``gradient``, contiguous; summed in fp32, rounded once.
    """
    if not runs_triton(gradient):
        return twins.sparse_compress(gradient, left, right).contiguous()
    n = gradient.shape[1]
    half = gradient.new_empty(n, left.rank, dtype=torch.float32)  # (PᵀG)ᵀ: the second gather reads rows again
    _launch(left, gradient, half.t())
    core = gradient.new_empty(left.rank, right.rank)
    _launch(right, half, core.t())
    return core
