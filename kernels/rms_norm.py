"""RMSNorm (1910.07467) with fp32 statistics, optionally of a sum with the residual stream, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from slideformer_backend.kernels import twins
from slideformer_backend.kernels.rms_norm_backward import NormConfig, backward_config, launch_backward
from slideformer_backend.kernels.runtime import as_rows, on_device_of, runs_triton, tl, triton

__all__ = [
    "NormConfig",
    "backward_config",
    "forward_config",
    "launch_backward",
    "launch_forward",
    "rms_norm",
    "rms_norm_add",
]

_WIDEST = 65536


@triton.jit
def rms_norm_forward_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    EARLY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """ROWS rows per program; outputs are contiguous. EARLY: the row fills its program, and the
    weight is read before its sum is known."""
    if ROWS == 1:  # vectors: as a tile, a row of 3,072 takes 6 % longer on an H200
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < columns
    else:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    if HAS_WEIGHT and EARLY:  # under way while the row is reduced
        weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
        # the sum is rounded to the dtype of the stream, as the model's own addition is
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * columns + column, x, mask=inside)
    x = x.to(tl.float32)
    if ROWS == 1:
        rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / columns + eps)
        y = x * rstd
        tl.store(rstd_ptr + row, rstd)
    else:
        lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / columns + eps)
        y = x * rstd[:, None]
        tl.store(rstd_ptr + lane, rstd, mask=lane < rows)
    if HAS_WEIGHT:
        if not EARLY:
            weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0)
        y = y * (weight.to(tl.float32) + offset)
    if EARLY and ROWS == 1 and y_ptr.dtype.element_ty == tl.bfloat16:
        # Rounded one by one, which is slower than in pairs and so spreads a program's stores in time: on an H200 1 %
        # less time at 4,096, but 3 % more at 3,072, whose program has idle lanes, and no less with a residual. A 0 that
        # no compiler foresees forbids pairs; added to the bits it keeps -0.0, inf and NaN.
        zero = tl.where(eps == eps, 0, 1)
        y = (y.to(tl.bfloat16).to(tl.float32).to(tl.int32, bitcast=True) + zero).to(tl.float32, bitcast=True)
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def forward_config(columns: int) -> NormConfig:
    """Rows of 2 Ki elements and more are one program; narrow ones share it. A program with many idle lanes has fewer
    warps to wait for."""
    block = triton.next_power_of_2(columns)
    rows = max(1, min(16, 2048 // block))
    per_warp = 512 if rows > 1 or 4 * columns >= 3 * block else 1024
    return NormConfig(rows, warps=max(1, min(16, rows * block // per_warp)))


class _RMSNorm(torch.autograd.Function):
    """y, and with a residual also the sum that was normalised."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        eps: float,
        offset: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stream, y, rstd = launch_forward(x, residual, weight, eps, offset)
        ctx.save_for_backward(stream if residual is not None else x, weight, rstd)
        ctx.offset, ctx.has_residual = offset, residual is not None
        ctx.set_materialize_grads(False)
        if residual is None:
            ctx.mark_non_differentiable(rstd)
            return y, rstd
        return y, stream

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        if not ctx.has_residual:
            dsum = None
        if dy is None:
            return dsum, dsum, None, None, None
        wants_dx = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        dx, dweight = launch_backward(dy, dsum, x, weight, rstd, ctx.offset, (wants_dx, ctx.needs_input_grad[2]))
        return dx, dx if ctx.has_residual else None, dweight, None, None


_apply: Callable[..., Any] = _RMSNorm.apply  # torch leaves it untyped


def launch_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    config: NormConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum (``x`` itself without residual), y and 1/rms (fp32 [rows]) of rows [rows, columns]."""
    rows, columns = x.shape
    y = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    stream = x if residual is None else torch.empty_like(y)
    if rows == 0 or columns == 0:
        return stream, y, rstd
    config = config or forward_config(columns)
    block = triton.next_power_of_2(columns)
    # H200: 1 % at 4,096; at 3,072, where a quarter of the lanes is idle, it costs 5 %
    early = residual is None and config.rows == 1 and columns == block
    with on_device_of(x):
        rms_norm_forward_kernel[(triton.cdiv(rows, config.rows),)](
            x,
            x if residual is None else residual,
            x if weight is None else weight,
            stream,
            y,
            rstd,
            rows,
            columns,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            eps,
            offset,
            HAS_RESIDUAL=residual is not None,
            HAS_WEIGHT=weight is not None,
            EARLY=early,
            ROWS=config.rows,
            BLOCK=block,
            num_warps=config.warps,
        )
    return stream, y, rstd


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, offset: float = 0.0
) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) · (offset + weight)`` over the last dimension, computed in fp32 and rounded once.

    Args:
        x: [..., H], at most 65,536 wide for the kernel.
        weight: [H] of any floating dtype, or None.
        eps: added to the mean square.
        offset: 0 as in Llama, 1 as in Gemma.

    Returns:
        The shape and dtype of ``x``.
    """
    if not runs_triton(x) or x.shape[-1] > _WIDEST or x.dtype == torch.float64:
        return twins.rms_norm(x, weight, eps, offset)
    y: torch.Tensor = _apply(as_rows(x), None, weight, eps, offset)[0]
    return y.view(x.shape)


def rms_norm_add(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rms_norm(x + residual)`` and ``x + residual`` in one pass; see :func:`rms_norm`.

    ``x`` and ``residual`` have one shape and dtype.
    """
    if not runs_triton(x) or x.shape[-1] > _WIDEST or x.dtype == torch.float64:
        return twins.rms_norm_add(x, residual, weight, eps, offset)
    y, stream = _apply(as_rows(x), as_rows(residual), weight, eps, offset)
    return y.view(x.shape), stream.view(x.shape)
