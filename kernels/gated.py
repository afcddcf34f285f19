"""Gated activations, act(gate)·up (2002.05202): SwiGLU and GeGLU, forward and backward, each in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from slideformer_backend.kernels import twins
from slideformer_backend.kernels.runtime import as_rows, on_device_of, runs_triton, tl, triton

__all__ = ["GateConfig", "geglu", "launch_backward", "launch_forward", "swiglu"]

SILU, GELU_TANH, GELU = 0, 1, 2


class GateConfig(NamedTuple):
    """Elements and warps per program."""

    block: int = 2048
    warps: int = 8


@triton.jit
def tl_activate(x: tl.tensor, ACT: tl.constexpr) -> tl.tensor:
    """The activation and its derivative at fp32 ``x``; gelu(x) with tanh is x·sigmoid(2u)."""
    if ACT == 0:
        s = tl.sigmoid(x)
        value = x * s
        slope = s * (1.0 + x * (1.0 - s))
    elif ACT == 1:
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        s = tl.sigmoid(2.0 * u)
        value = x * s
        slope = s + x * s * (1.0 - s) * 2.0 * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * x * x)
    else:
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * cdf
        slope = cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return value, slope


@triton.jit
def tl_part(columns: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Row and columns of this program; programs that run together read memory that lies together."""
    parts = tl.cdiv(columns, BLOCK)
    row = tl.program_id(0) // parts
    return row.to(tl.int64), (tl.program_id(0) - row * parts) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def gated_forward_kernel(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    columns: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A program per part of a row, one row after another; ``out`` is contiguous."""
    row, column = tl_part(columns, BLOCK)
    inside = column < columns
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    value, _ = tl_activate(gate, ACT)
    tl.store(out_ptr + row * columns + column, (value * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward_kernel(
    dout_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    dgate_ptr: tl.tensor,
    dup_ptr: tl.tensor,
    columns: tl.tensor,
    dout_stride: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    d_stride: tl.tensor,
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """As in forward; rows of both gradients are ``d_stride`` apart."""
    row, column = tl_part(columns, BLOCK)
    inside = column < columns
    dout = tl.load(dout_ptr + row * dout_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    value, slope = tl_activate(gate, ACT)
    at = row * d_stride + column
    tl.store(dgate_ptr + at, (dout * up * slope).to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + at, (dout * value).to(dup_ptr.dtype.element_ty), mask=inside)


def launch_config(columns: int) -> GateConfig:
    """Eight 16-bit elements per thread and access."""
    block = min(2048, max(128, triton.next_power_of_2(columns)))
    return GateConfig(block, warps=max(1, min(8, block // 256)))


def launch_forward(
    gate: torch.Tensor, up: torch.Tensor, activation: int, config: GateConfig | None = None
) -> torch.Tensor:
    """act(gate)·up of [rows, columns] with contiguous columns."""
    rows, columns = gate.shape
    out = torch.empty(rows, columns, dtype=gate.dtype, device=gate.device)
    if out.numel() == 0:
        return out
    config = config or launch_config(columns)
    with on_device_of(gate):
        gated_forward_kernel[(rows * triton.cdiv(columns, config.block),)](
            gate,
            up,
            out,
            columns,
            gate.stride(0),
            up.stride(0),
            ACT=activation,
            BLOCK=config.block,
            num_warps=config.warps,
        )
    return out


def launch_backward(
    dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: int, config: GateConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up. When both lie in one tensor, so do the gradients: joining them then costs no copy."""
    rows, columns = gate.shape
    if _are_halves(gate, up):
        dgate, dup = torch.empty(rows, 2 * columns, dtype=gate.dtype, device=gate.device).chunk(2, 1)
    else:
        dgate, dup = (torch.empty(rows, columns, dtype=gate.dtype, device=gate.device) for _ in range(2))
    if dgate.numel() == 0:
        return dgate, dup
    config = config or launch_config(columns)
    with on_device_of(gate):
        gated_backward_kernel[(rows * triton.cdiv(columns, config.block),)](
            dout,
            gate,
            up,
            dgate,
            dup,
            columns,
            dout.stride(0),
            gate.stride(0),
            up.stride(0),
            dgate.stride(0),
            ACT=activation,
            BLOCK=config.block,
            num_warps=config.warps,
        )
    return dgate, dup


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: int) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return launch_forward(gate, up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return (*launch_backward(as_rows(dout), gate, up, ctx.activation), None)


_apply: Callable[..., Any] = _Gated.apply  # torch leaves it untyped


def _are_halves(gate: torch.Tensor, up: torch.Tensor) -> bool:
    """Whether gate and up are the left and right half of the same rows."""
    apart = gate.shape[1] * gate.element_size()
    same = gate.stride() == up.stride() == (2 * gate.shape[1], 1)
    return same and up.data_ptr() - gate.data_ptr() == apart


def _gated(gate: torch.Tensor, up: torch.Tensor, activation: int) -> torch.Tensor:
    out: torch.Tensor = _apply(as_rows(gate), as_rows(up), activation)
    return out.view(gate.shape)


def _can_run(gate: torch.Tensor, up: torch.Tensor) -> bool:
    return runs_triton(gate) and gate.dtype == up.dtype != torch.float64 and gate.shape == up.shape


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) · up``, computed in fp32 and rounded once.

    Args:
        gate, up: [..., I] of one shape and floating dtype; halves of one tensor are read where they lie.
    """
    return _gated(gate, up, SILU) if _can_run(gate, up) else twins.swiglu(gate, up)


def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """``gelu(gate) · up``; see :func:`swiglu`. ``approximate``: ``tanh`` or ``none``, as in torch."""
    if not _can_run(gate, up):
        return twins.geglu(gate, up, approximate)
    return _gated(gate, up, GELU_TANH if approximate == "tanh" else GELU)
