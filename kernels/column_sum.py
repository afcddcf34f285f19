"""Sums of the columns of a few fp32 rows, with a cast: what persistent programs leave of a weight's gradient."""

from __future__ import annotations

import torch

from slideformer_backend.kernels import twins
from slideformer_backend.kernels.runtime import on_device_of, runs_triton, tl, triton

__all__ = ["column_sum"]

_ROWS = 64
_COLUMNS = 32


@triton.jit
def column_sum_kernel(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program per COLUMNS columns: many short ones, since the whole matrix is small."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    lane = tl.arange(0, ROWS)[:, None]
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for begin in range(0, rows, ROWS):
        row = (begin + lane).to(tl.int64)
        inside = (row < rows) & (column < columns)
        total += tl.load(source_ptr + row * columns + column, mask=inside, other=0.0)
    found = tl.sum(total, 0)[None, :]
    tl.store(target_ptr + column, found.to(target_ptr.dtype.element_ty), mask=column < columns)


def column_sum(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum over rows.

    Args:
        source: fp32 [rows, columns], contiguous.
        dtype: of the result.

    Returns:
        [columns]: summed in fp32, rounded once. The order of the sum depends on the shape alone.
    """
    if not runs_triton(source):
        return twins.column_sum(source, dtype)
    rows, columns = source.shape
    target = torch.empty(columns, dtype=dtype, device=source.device)
    if columns:
        with on_device_of(source):
            column_sum_kernel[(triton.cdiv(columns, _COLUMNS),)](
                source, target, rows, columns, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4
            )
    return target
