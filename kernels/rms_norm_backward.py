"""Gradients of RMSNorm: of its input, of the residual stream and of its weight, in one pass over rows."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slideformer_backend.kernels.column_sum import column_sum
from slideformer_backend.kernels.runtime import as_rows, on_device_of, processors, tl, triton

__all__ = ["NormConfig", "backward_config", "launch_backward"]

_PIPELINE_BYTES = 1 << 16  # of shared memory, for rows that are loaded ahead


class NormConfig(NamedTuple):
    """Rows that one program holds at a time, warps per program; for backward also programs per multiprocessor and how
    many groups of rows are loaded ahead of the one that is used, plus one."""

    rows: int
    warps: int
    programs: int = 1
    stages: int = 1


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


@triton.jit
def tl_row(
    ptr: tl.tensor, row: tl.tensor, stride: tl.tensor, column: tl.tensor, end: tl.tensor, EVEN: tl.constexpr
) -> tl.tensor:
    """Part of a row in fp32; EVEN: all of its columns exist."""
    at = ptr + row * stride + column
    if EVEN:
        return tl.load(at).to(tl.float32)
    return tl.load(at, mask=column < end, other=0.0).to(tl.float32)


@triton.jit
def rms_norm_backward_wide_kernel(
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
    STAGES: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    EVEN: tl.constexpr,
) -> None:
    """As ``rms_norm_backward_kernel``, a row at a time: its first HEAD columns, all of which exist, and TAIL more (0:
    none), so that a row of 3,072 is no row of 4,096 lanes."""
    head = tl.arange(0, HEAD)
    tail = HEAD + tl.arange(0, TAIL if TAIL else HEAD)
    has_tail = tail < columns
    program = tl.program_id(0)
    step = tl.num_programs(0)
    weight, weight2 = tl.full([HEAD], 1.0, tl.float32), tl.full([TAIL if TAIL else HEAD], 1.0, tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + head).to(tl.float32) + offset
        if TAIL:
            weight2 = tl.load(weight_ptr + tail, mask=has_tail, other=0.0).to(tl.float32) + offset
    dweight, dweight2 = tl.zeros_like(weight), tl.zeros_like(weight2)
    following = tl.load(rstd_ptr + program)
    zero = tl.full([], 0, tl.int64)
    for line in tl.range(program, rows, step, num_stages=STAGES):
        row = line + zero
        x = tl_row(x_ptr, row, x_stride, head, columns, True)
        dy = tl_row(dy_ptr, row, dy_stride, head, columns, True)
        if TAIL:
            x2 = tl_row(x_ptr, row, x_stride, tail, columns, EVEN)
            dy2 = tl_row(dy_ptr, row, dy_stride, tail, columns, EVEN)
        rstd = following
        following = tl.load(rstd_ptr + line + step, mask=line + step < rows, other=0.0)
        x *= rstd
        if WRITE_DWEIGHT:
            dweight += dy * x
        mean = tl.sum(dy * weight * x, 0)
        if TAIL:
            x2 *= rstd
            if WRITE_DWEIGHT:
                dweight2 += dy2 * x2
            mean += tl.sum(dy2 * weight2 * x2, 0)
        mean /= columns
        if WRITE_DX:
            dx = (dy * weight - x * mean) * rstd
            if HAS_SUM:
                dx += tl_row(dsum_ptr, row, dsum_stride, head, columns, True)
            tl.store(dx_ptr + row * columns + head, dx.to(dx_ptr.dtype.element_ty))
            if TAIL:
                dx2 = (dy2 * weight2 - x2 * mean) * rstd
                if HAS_SUM:
                    dx2 += tl_row(dsum_ptr, row, dsum_stride, tail, columns, EVEN)
                tl.store(dx_ptr + row * columns + tail, dx2.to(dx_ptr.dtype.element_ty), mask=has_tail)
    if WRITE_DWEIGHT:
        at = dweight_ptr + program.to(tl.int64) * columns
        tl.store(at + head, dweight)
        if TAIL:
            tl.store(at + tail, dweight2, mask=has_tail)


def backward_config(columns: int, row_bytes: int) -> NormConfig:
    """As in forward, with programs that stay on the device all the time.

    Their number must not be more than the registers of a multiprocessor hold at once: those that wait would run alone
    at the end. On an H200 that is 16 warps, and 24 for rows of 4,096; loading two rows ahead keeps memory busy with so
    few.

    Args:
        columns: of a row.
        row_bytes: what is loaded per row.
    """
    block = triton.next_power_of_2(columns)
    rows = max(1, min(16, 2048 // block))
    head, tail = _parts(columns)
    warps = max(1, min(16, rows * (block if rows > 1 else head) // 512))
    ahead = min(2, _PIPELINE_BYTES // max(1, rows * row_bytes))
    return NormConfig(rows, warps, programs=max(1, (24 if warps == 8 and not tail else 16) // warps), stages=1 + ahead)


def _parts(columns: int) -> tuple[int, int]:
    """The largest power of two that a row has, and the power of two that covers the rest (0: none)."""
    head = triton.next_power_of_2(columns + 1) // 2
    return head, triton.next_power_of_2(columns - head) if columns > head else 0


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
    head, tail = _parts(columns)
    config = config or backward_config(columns, (head + tail) * x.element_size() * (2 if dsum is None else 3))
    dy = as_rows(dy)
    dsum = None if dsum is None else as_rows(dsum)
    programs = min(triton.cdiv(rows, config.rows), processors(x) * config.programs)
    partial = torch.empty(programs if wants_dweight else 0, columns, dtype=torch.float32, device=x.device)
    layout = (
        {"HEAD": head, "TAIL": tail, "EVEN": columns == head + tail}
        if config.rows == 1
        else {"ROWS": config.rows, "BLOCK": triton.next_power_of_2(columns)}
    )
    kernel = rms_norm_backward_wide_kernel if config.rows == 1 else rms_norm_backward_kernel
    with on_device_of(x):
        kernel[(programs,)](
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
            STAGES=config.stages,
            num_warps=config.warps,
            **layout,
        )
    return dx, column_sum(partial, weight.dtype) if wants_dweight and weight is not None else None
