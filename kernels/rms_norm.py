"""RMSNorm (1910.07467) with fp32 statistics, optionally of a sum with the residual stream, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from slideformer_backend.kernels import twins
from slideformer_backend.kernels.column_sum import column_sum
from slideformer_backend.kernels.runtime import on_device_of, processors, runs_triton, tl, triton

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
_PIPELINE_BYTES = 1 << 16  # of shared memory, for rows that are loaded ahead


class NormConfig(NamedTuple):
    """Rows that one program holds at a time, warps per program; for backward also programs per multiprocessor and how
    many groups of rows are loaded ahead of the one that is used, plus one."""

    rows: int
    warps: int
    programs: int = 1
    stages: int = 1


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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """ROWS rows per program; outputs are contiguous."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
        # the sum is rounded to the dtype of the stream, as the model's own addition is
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * columns + column, x, mask=inside)
    x = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / columns + eps)
    y = x * rstd[:, None]
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        y = y * (weight + offset)
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=inside)
    lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(rstd_ptr + lane, rstd, mask=lane < rows)


@triton.jit
def rms_norm_backward_kernel(
    dy_ptr: tl.tensor,
    dsum_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    dweight_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    dy_stride: tl.tensor,
    dsum_stride: tl.tensor,
    x_stride: tl.tensor,
    offset: tl.tensor,
    HAS_SUM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WRITE_DX: tl.constexpr,
    WRITE_DWEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Persistent programs, each over every num_programs-th group of ROWS rows; ``dweight`` is [programs, columns].

    With STAGES above 1 the loads of the next rows are under way while a row is reduced.
    """
    column = tl.arange(0, BLOCK)[None, :]
    has_column = column < columns
    lane = tl.arange(0, ROWS)
    program = tl.program_id(0)
    step = tl.num_programs(0) * ROWS
    scale = tl.full([1, BLOCK], 1.0, tl.float32)
    if HAS_WEIGHT:
        scale = tl.load(weight_ptr + column, mask=has_column, other=0.0).to(tl.float32) + offset
    dweight = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    line = program * ROWS + lane
    following = tl.load(rstd_ptr + line, mask=line < rows, other=0.0)
    for begin in tl.range(program * ROWS, rows, step, num_stages=STAGES):
        line = begin + lane
        row = line.to(tl.int64)[:, None]
        inside = (row < rows) & has_column
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        rstd = following[:, None]
        following = tl.load(rstd_ptr + line + step, mask=line + step < rows, other=0.0)
        normal = x * rstd
        if WRITE_DWEIGHT:
            dweight += dy * normal
        if WRITE_DX:
            scaled = dy * scale
            mean = tl.sum(scaled * normal, 1) / columns
            dx = (scaled - normal * mean[:, None]) * rstd
            if HAS_SUM:
                dx += tl.load(dsum_ptr + row * dsum_stride + column, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if WRITE_DWEIGHT:
        total = tl.sum(dweight, 0)[None, :]
        tl.store(dweight_ptr + program.to(tl.int64) * columns + column, total, mask=has_column)


def forward_config(columns: int) -> NormConfig:
    """Rows of 4 Ki elements and more are one program; narrow ones share it."""
    block = triton.next_power_of_2(columns)
    rows = max(1, min(16, 2048 // block))
    return NormConfig(rows, warps=max(1, min(16, rows * block // 512)))


def backward_config(columns: int, row_bytes: int) -> NormConfig:
    """As in forward, with programs that stay on the device all the time.

    Their number must not be more than the registers of a multiprocessor hold at once: those that wait would run alone
    at the end. 16 elements per thread take 80 to 100 registers, so that 2 programs of 8 warps fit everywhere; loading
    two rows ahead keeps memory busy with so few.

    Args:
        columns: of a row.
        row_bytes: what is loaded per row.
    """
    block = triton.next_power_of_2(columns)
    rows = max(1, min(16, 2048 // block))
    warps = max(1, min(16, rows * block // 512))
    ahead = min(2, _PIPELINE_BYTES // max(1, rows * row_bytes))
    return NormConfig(rows, warps, programs=max(1, 16 // warps), stages=1 + ahead)


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
            ROWS=config.rows,
            BLOCK=triton.next_power_of_2(columns),
            num_warps=config.warps,
        )
    return stream, y, rstd


def launch_backward(
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    wanted: tuple[bool, bool],
    config: NormConfig | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of x (plus ``dsum``) and of the weight, as ``wanted``."""
    rows, columns = x.shape
    wants_dx, wants_dweight = wanted[0], wanted[1] and weight is not None
    dx = torch.empty(rows, columns, dtype=x.dtype, device=x.device) if wants_dx else None
    if rows == 0 or columns == 0:
        return dx, torch.zeros_like(weight) if wants_dweight and weight is not None else None
    block = triton.next_power_of_2(columns)
    config = config or backward_config(columns, block * x.element_size() * (2 if dsum is None else 3))
    dy = _rows(dy)
    dsum = None if dsum is None else _rows(dsum)
    programs = min(triton.cdiv(rows, config.rows), processors(x) * config.programs)
    partial = torch.empty(programs if wants_dweight else 0, columns, dtype=torch.float32, device=x.device)
    with on_device_of(x):
        rms_norm_backward_kernel[(programs,)](
            dy,
            dy if dsum is None else dsum,
            x,
            x if weight is None else weight,
            rstd,
            dy if dx is None else dx,
            partial,
            rows,
            columns,
            dy.stride(0),
            0 if dsum is None else dsum.stride(0),
            x.stride(0),
            offset,
            HAS_SUM=dsum is not None,
            HAS_WEIGHT=weight is not None,
            WRITE_DX=wants_dx,
            WRITE_DWEIGHT=wants_dweight,
            ROWS=config.rows,
            STAGES=config.stages,
            BLOCK=block,
            num_warps=config.warps,
        )
    return dx, column_sum(partial, weight.dtype) if wants_dweight and weight is not None else None


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Two-dimensional with contiguous columns; a copy where that takes one."""
    tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] <= 1 else tensor.contiguous()


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
    y: torch.Tensor = _apply(_rows(x), None, weight, eps, offset)[0]
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
    y, stream = _apply(_rows(x), _rows(residual), weight, eps, offset)
    return y.view(x.shape), stream.view(x.shape)
