"""Rotary position embedding (2104.09864) of queries and keys in one launch, forward and backward.

A program turns all heads of one token, so that cosines and sines are read once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from slideformer_backend.kernels import twins
from slideformer_backend.kernels.runtime import on_device_of, runs_triton, tl, triton

__all__ = ["RotaryConfig", "launch", "rotary"]


class RotaryConfig(NamedTuple):
    """Warps per program (one token)."""

    warps: int = 4


@triton.jit
def tl_turn(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_head: tl.tensor,
    heads: tl.tensor,
    width: tl.tensor,
    rest: tl.tensor,
    c: tl.tensor,
    s: tl.tensor,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    """Turn the heads of one token; ``y`` has heads of width + rest elements next to each other."""
    head = tl.arange(0, HEADS)[:, None]
    y_head = width + rest
    kind = y_ptr.dtype.element_ty
    if INTERLEAVED:
        column = tl.arange(0, 2 * HALF)[None, :]
        inside = (head < heads) & (column < width)
        x = tl.load(x_ptr + head * x_head + column, mask=inside, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, [HEADS, HALF, 2]))
        y = tl.interleave(a * c - b * s, b * c + a * s)
        tl.store(y_ptr + head * y_head + column, y.to(kind), mask=inside)
    else:
        half = width // 2
        pair = tl.arange(0, HALF)[None, :]
        inside = (head < heads) & (pair < half)
        a = tl.load(x_ptr + head * x_head + pair, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + head * x_head + pair + half, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + head * y_head + pair, (a * c - b * s).to(kind), mask=inside)
        tl.store(y_ptr + head * y_head + pair + half, (b * c + a * s).to(kind), mask=inside)
    if REST > 0:
        column = tl.arange(0, REST)[None, :]
        is_rest = (head < heads) & (column < rest)
        kept = tl.load(x_ptr + head * x_head + width + column, mask=is_rest, other=0.0)
        tl.store(y_ptr + head * y_head + width + column, kept, mask=is_rest)


@triton.jit
def rotary_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_out_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    q_token: tl.tensor,
    k_batch: tl.tensor,
    k_head: tl.tensor,
    k_token: tl.tensor,
    cos_batch: tl.tensor,
    cos_token: tl.tensor,
    length: tl.tensor,
    q_heads: tl.tensor,
    k_heads: tl.tensor,
    width: tl.tensor,
    rest: tl.tensor,
    sign: tl.tensor,
    INTERLEAVED: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    """Program (token, sequence); outputs are contiguous [batch, length, heads, width + rest]."""
    token = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    pair = tl.arange(0, HALF)[None, :]
    at = batch * cos_batch + token * cos_token + pair
    c = tl.load(cos_ptr + at, mask=pair < width // 2, other=0.0).to(tl.float32)
    s = tl.load(sin_ptr + at, mask=pair < width // 2, other=0.0).to(tl.float32) * sign
    line = (batch * length + token) * (width + rest)
    q_ptr += batch * q_batch + token * q_token
    k_ptr += batch * k_batch + token * k_token
    tl_turn(q_ptr, q_out_ptr + line * q_heads, q_head, q_heads, width, rest, c, s, INTERLEAVED, Q_HEADS, HALF, REST)
    tl_turn(k_ptr, k_out_ptr + line * k_heads, k_head, k_heads, width, rest, c, s, INTERLEAVED, K_HEADS, HALF, REST)


def launch_config(elements: int) -> RotaryConfig:
    """``elements``: of all heads of a token."""
    return RotaryConfig(warps=max(1, min(8, triton.next_power_of_2(elements) // 1024)))


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool,
    sign: float = 1.0,
    config: RotaryConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turned copies of q and k, as [batch, heads, length, D] views of memory in the order batch, length, heads, D.

    ``sign=-1`` turns back: the backward.
    """
    batch, q_heads, length, size = q.shape
    k_heads, width = k.shape[1], cos.shape[-1]
    outputs = tuple(
        torch.empty(batch, length, tensor.shape[1], size, dtype=tensor.dtype, device=q.device) for tensor in (q, k)
    )
    if q.numel():
        power = triton.next_power_of_2
        config = config or launch_config((q_heads + k_heads) * size)
        rest = size - width
        with on_device_of(q):
            rotary_kernel[(length, batch)](
                q,
                k,
                cos,
                sin,
                *outputs,
                *q.stride()[:3],
                *k.stride()[:3],
                cos.stride(0) if cos.shape[0] > 1 else 0,
                cos.stride(1),
                length,
                q_heads,
                k_heads,
                width,
                rest,
                sign,
                INTERLEAVED=interleaved,
                Q_HEADS=power(q_heads),
                K_HEADS=power(k_heads),
                HALF=power(width // 2),
                REST=power(rest) if rest else 0,
                num_warps=config.warps,
            )
    return outputs[0].transpose(1, 2), outputs[1].transpose(1, 2)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return launch(q, k, cos, sin, interleaved=interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return (*launch(_rows(dq), _rows(dk), cos, sin, interleaved=ctx.interleaved, sign=-1.0), None, None, None)


_apply: Callable[..., Any] = _Rotary.apply  # torch leaves it untyped


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn queries and keys by their positions, computed in fp32 and rounded once.

    Args:
        q: [batch, heads, length, D], any strides with contiguous D.
        k: [batch, key heads, length, D].
        cos, sin: [batch or 1, length, R], R ≤ D even. The angles of the first half are used, as Hugging Face's models
            repeat them in the second. Elements beyond R pass through. They get no gradient.
        interleaved: pairs are neighbours (GPT-J, Cohere) instead of halves (Llama); the angles are in the first half
            of ``cos`` and ``sin`` all the same.

    Returns:
        New tensors of the shapes of q and k. (In place would save memory but no bytes: each element is read and written
        once; and q may be needed by whoever made it.)
    """
    is_plain = cos.requires_grad or sin.requires_grad or torch.float64 in (q.dtype, cos.dtype)
    if is_plain or not runs_triton(q):
        return twins.rotary(q, k, cos, sin, interleaved)
    cos, sin = _rows(cos), _rows(sin)
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    turned: tuple[torch.Tensor, torch.Tensor] = _apply(_rows(q), _rows(k), cos, sin, interleaved)
    return turned
