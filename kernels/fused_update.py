"""One optimizer update of one parameter, fused: states, fp32 master and working weight in one pass.

The arithmetic is written so that a host that rounds every operation the same way gets the same bits: explicit fused
multiply-adds only (``enable_fp_fusion=False``), correctly rounded square root and division, fp32 throughout. The caller
gives the scalars of the rule in the order of its definition.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _tl_scaled(g, c, DTYPE: tl.constexpr):
    """g·c rounded to the gradient's dtype, as an in-place clip leaves it; g itself when c is 1."""
    return tl.where(c == 1.0, g, (g * c).to(DTYPE).to(tl.float32))


@triton.jit
def tl_rounded(p: tl.tensor, DTYPE: tl.constexpr, HALF_UP: tl.constexpr) -> tl.tensor:
    """p in DTYPE: to nearest, ties to even; ``HALF_UP``: the high half of a split bf16 master, ties away from zero."""
    if HALF_UP:
        bits = tl.where(p != p, 0x7FC00000, p.to(tl.int32, bitcast=True))
        return ((bits + 0x8000) >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return p.to(DTYPE)


@triton.jit
def _adam_kernel(
    p_ptr, m_ptr, v_ptr, g_ptr, w_ptr, n, c,
    direction, decay, lerp, towards, beta2, rest2, step, root, eps,
    DECOUPLED: tl.constexpr, HALF_UP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    g = _tl_scaled(tl.load(g_ptr + offset, mask=mask).to(tl.float32), c, g_ptr.dtype.element_ty) * direction
    p = tl.load(p_ptr + offset, mask=mask)
    m = tl.load(m_ptr + offset, mask=mask)
    v = tl.load(v_ptr + offset, mask=mask)
    if DECOUPLED:
        p = p * decay
    else:
        g = tl.where(decay != 0.0, tl.fma(p, tl.zeros_like(p) + decay, g), g)
    m = tl.fma(tl.zeros_like(m) + lerp, g - m, tl.where(towards != 0.0, g, m))
    v = tl.fma(rest2 * g, g, beta2 * v)
    p = p + tl.div_rn(step * m, tl.div_rn(tl.sqrt_rn(v), tl.zeros_like(v) + root) + eps)
    tl.store(m_ptr + offset, m, mask=mask)
    tl.store(v_ptr + offset, v, mask=mask)
    tl.store(p_ptr + offset, p, mask=mask)
    tl.store(w_ptr + offset, tl_rounded(p, w_ptr.dtype.element_ty, HALF_UP), mask=mask)


@triton.jit
def _sgd_kernel(
    p_ptr, m_ptr, g_ptr, w_ptr, n, c,
    direction, decay, step, momentum, fresh, first, nesterov,
    HAS_BUFFER: tl.constexpr, HALF_UP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    g = _tl_scaled(tl.load(g_ptr + offset, mask=mask).to(tl.float32), c, g_ptr.dtype.element_ty) * direction
    p = tl.load(p_ptr + offset, mask=mask)
    g = tl.where(decay != 0.0, tl.fma(p, tl.zeros_like(p) + decay, g), g)
    if HAS_BUFFER:
        buffer = tl.load(m_ptr + offset, mask=mask) * momentum
        buffer = tl.where(first != 0.0, g, tl.fma(g, tl.zeros_like(g) + fresh, buffer))
        tl.store(m_ptr + offset, buffer, mask=mask)
        g = tl.where(nesterov != 0.0, tl.fma(buffer, tl.zeros_like(g) + momentum, g), buffer)
    p = tl.fma(g, tl.zeros_like(g) + step, p)
    tl.store(p_ptr + offset, p, mask=mask)
    tl.store(w_ptr + offset, tl_rounded(p, w_ptr.dtype.element_ty, HALF_UP), mask=mask)


@triton.jit
def _lion_kernel(
    p_ptr, m_ptr, g_ptr, w_ptr, n, c,
    direction, decay, step, beta1, rest1, beta2, rest2,
    HALF_UP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    g = _tl_scaled(tl.load(g_ptr + offset, mask=mask).to(tl.float32), c, g_ptr.dtype.element_ty) * direction
    p = tl.load(p_ptr + offset, mask=mask)
    m = tl.load(m_ptr + offset, mask=mask)
    move = tl.fma(g, tl.zeros_like(g) + rest1, m * beta1)
    move = tl.where(move > 0.0, 1.0, tl.where(move < 0.0, -1.0, 0.0))
    p = tl.fma(move, tl.zeros_like(p) + step, p * decay)
    m = tl.fma(g, tl.zeros_like(g) + rest2, m * beta2)
    tl.store(m_ptr + offset, m, mask=mask)
    tl.store(p_ptr + offset, p, mask=mask)
    tl.store(w_ptr + offset, tl_rounded(p, w_ptr.dtype.element_ty, HALF_UP), mask=mask)


def fused_update(
    rule: str,
    master: torch.Tensor,
    states: Sequence[torch.Tensor],
    gradient: torch.Tensor,
    coefficient: float,
    scalars: Sequence[float],
    weights: torch.Tensor,
    *,
    half_up: bool = False,
) -> None:
    """Update ``master`` and ``states`` in place and write the rounded master to ``weights``.

    Args:
        rule: "adamw", "adam", "sgd" or "lion".
        master: fp32, 1-D, contiguous, n elements.
        states: fp32 arrays like ``master``: two for Adam, one for Lion, one or none for SGD.
        gradient: n elements of fp32, bf16 or fp16.
        coefficient: factor of the gradient, rounded to the gradient's dtype after the product; 1 leaves it alone.
        scalars: the fp32 scalars of the rule.
        weights: n elements of fp32, bf16 or fp16; may be ``master``.
        half_up: round bf16 weights half away from zero, as the high half of a split master is.
    """
    n = master.numel()
    if n == 0:
        return
    grid = (triton.cdiv(n, BLOCK),)
    numbers = [float(value) for value in scalars]
    is_half_up = half_up and weights.dtype == torch.bfloat16
    options = {"HALF_UP": is_half_up, "BLOCK": BLOCK, "num_warps": 4, "enable_fp_fusion": False}
    c = float(coefficient)
    if rule in ("adamw", "adam"):
        first, second = states
        _adam_kernel[grid](
            master, first, second, gradient, weights, n, c, *numbers, DECOUPLED=rule == "adamw", **options
        )
    elif rule == "sgd":
        buffer = states[0] if states else master
        _sgd_kernel[grid](master, buffer, gradient, weights, n, c, *numbers, HAS_BUFFER=bool(states), **options)
    elif rule == "lion":
        _lion_kernel[grid](master, states[0], gradient, weights, n, c, *numbers, **options)
    else:
        raise ValueError(f"no fused update for rule {rule!r}; expected adamw, adam, sgd or lion")
