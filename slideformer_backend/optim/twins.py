"""The same operations as numba_kernels.py in plain torch, on any device: same names and arguments, same bits.

bf16, fp16 and fp32 are tensors of that dtype; ``lo`` of the split master is int16 bits. Tensors are 1-D, contiguous and
equally long. What the numba functions document holds here too. Work is done in chunks, so temporaries stay below
100 MB on a host and 1 GB on a device, however large the slice is.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from slideformer_backend.errors import StateError
from slideformer_backend.optim.arithmetic import Operations, Scalars, definition
from slideformer_backend.optim.norm import BLOCK, LANES, block_count
from slideformer_backend.optim.rules import GradientKind, Pending, Rule, WeightKind

States = tuple[Tensor, ...]
"""fp32 tensors of n elements each."""

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "bf16_as_fp32": torch.bfloat16,
    "fp16_as_fp32": torch.float16,
}
_CANONICAL_NAN = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
_CHUNK = 16 * BLOCK
_DEVICE_CHUNKS = 8
"""A device spends longer on starting so small an operation than on doing it."""


@torch.no_grad()
def commit(rule: Rule, p: Tensor, states: States, g: Tensor, g_kind: GradientKind, c: np.float32, s: Scalars) -> None:
    """Update p and states with g·c, rounded to the gradient's dtype first."""
    _check_all(p, states, g, g_kind)
    for part in _chunks(p):
        new_p, new = _apply(rule, p[part], tuple(state[part] for state in states), g[part], g_kind, c, s)
        p[part] = new_p
        for state, value in zip(states, new, strict=True):
            state[part] = value


@torch.no_grad()
def peek(
    rule: Rule,
    p: Tensor,
    states: States,
    g: Tensor,
    g_kind: GradientKind,
    c: np.float32,
    s: Scalars,
    w: Tensor,
    w_kind: WeightKind,
) -> None:
    """Write into w what :func:`commit` would make of p, rounded to ``w_kind``; p and states stay."""
    _check_all(p, states, g, g_kind)
    _check(w, w_kind, p.numel(), "w")
    for part in _chunks(p):
        new_p, _ = _apply(rule, p[part], tuple(state[part] for state in states), g[part], g_kind, c, s)
        w[part] = _rounded(new_p, w.dtype)


def advance(rule: Rule, p: Tensor, states: States, old: Pending, new: Pending, w: Tensor, w_kind: WeightKind) -> None:
    """``commit(old)``, then ``peek(new)`` into w."""
    commit(rule, p, states, *old)
    peek(rule, p, states, *new, w, w_kind)


def update(
    rule: Rule,
    p: Tensor,
    states: States,
    g: Tensor,
    g_kind: GradientKind,
    c: np.float32,
    s: Scalars,
    w: Tensor,
    w_kind: WeightKind,
) -> None:
    """:func:`commit`, and write p rounded to ``w_kind`` into w. w may be p itself when fp32."""
    commit(rule, p, states, g, g_kind, c, s)
    round_into(p, w, w_kind)


@torch.no_grad()
def update_split(
    rule: Rule, hi: Tensor, lo: Tensor, states: States, g: Tensor, g_kind: GradientKind, c: np.float32, s: Scalars
) -> None:
    """:func:`commit` on a master kept as ``hi``, the bf16 weight, and ``lo``."""
    _check(hi, "bf16", hi.numel(), "hi")
    for part in _chunks(hi):
        p = torch.empty(part.stop - part.start, dtype=torch.float32, device=hi.device)
        join(hi[part], lo[part], p)
        commit(rule, p, tuple(state[part] for state in states), g[part], g_kind, c, s)
        split(p, hi[part], lo[part])


@torch.no_grad()
def round_into(p: Tensor, w: Tensor, w_kind: WeightKind) -> None:
    """w = p rounded to nearest even; NaN becomes the canonical one."""
    _check(p, "fp32", p.numel(), "p")
    _check(w, w_kind, p.numel(), "w")
    for part in _chunks(p):
        w[part] = _rounded(p[part], w.dtype)


@torch.no_grad()
def widen(w: Tensor, w_kind: WeightKind, p: Tensor) -> None:
    """p = w, exactly."""
    _check(p, "fp32", p.numel(), "p")
    _check(w, w_kind, p.numel(), "w")
    p.copy_(w)


@torch.no_grad()
def split(p: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Encode p as bf16 ``hi``, rounded half away from zero, and ``lo``, its low bits."""
    _check_split(p, hi, lo)
    for part in _chunks(p):
        bits = torch.where(p[part].isnan(), 0x7FC00000, p[part].view(torch.int32))
        # The 16-bit halves of an int32, low one first: every machine that torch runs on is little-endian.
        hi.view(torch.int16)[part] = (bits + 0x8000).view(torch.int16)[1::2]
        lo.view(torch.int16)[part] = bits.view(torch.int16)[0::2]


@torch.no_grad()
def join(hi: Tensor, lo: Tensor, p: Tensor) -> None:
    """Invert :func:`split` exactly, for every bit pattern but NaN, which comes back as 0x7fc00000.

    ``hi`` that was set to zero since gives zero, or a number smaller than any in bf16."""
    _check_split(p, hi, lo)
    for part in _chunks(p):
        low = lo.view(torch.int16)[part].to(torch.int32) & 0xFFFF
        upper = hi.view(torch.int16)[part].to(torch.int32)
        low = torch.where((upper & 0x7FFF == 0) & (low >= 0x8000), 0, low)  # a zero written behind our back
        high = upper - (low >> 15)
        p.view(torch.int32)[part] = (high << 16) | low


@torch.no_grad()
def reconcile(p: Tensor, w: Tensor, w_kind: WeightKind) -> int:
    """Where w is not what p rounds to, bit for bit, set p = w. Returns how many. Two NaNs count as the same."""
    _check(p, "fp32", p.numel(), "p")
    _check(w, w_kind, p.numel(), "w")
    total = 0
    for part in _chunks(p):
        rounded, written = _rounded(p[part], w.dtype).float(), w[part].float()
        differs = rounded.view(torch.int32) != written.view(torch.int32)
        differs &= ~(rounded.isnan() & written.isnan())
        count = int(differs.sum())
        if count:
            p[part] = torch.where(differs, written, p[part])
        total += count
    return total


@torch.no_grad()
def reconcile_split(hi_before: Tensor, hi: Tensor, lo: Tensor) -> int:
    """Where hi is not hi_before, set lo = 0, so that ``join`` gives the weight itself. Returns how many."""
    for name, tensor in (("hi_before", hi_before), ("hi", hi)):
        _check(tensor, "bf16", hi.numel(), name)
    _check_low(lo, hi.numel())
    differs = hi_before.view(torch.int16) != hi.view(torch.int16)
    lo.view(torch.int16).masked_fill_(differs, 0)
    return int(differs.sum())


@torch.no_grad()
def scale(g: Tensor, g_kind: GradientKind, c: np.float32) -> None:
    """g = g·c in place, rounded as torch's ``g.mul_(c)`` with an fp32 CPU tensor c does."""
    if g_kind not in ("bf16", "fp16", "fp32"):
        raise StateError("A gradient kept in 16 bits for an fp32 parameter was scaled in place.", found=g_kind)
    _check(g, g_kind, g.numel(), "gradient")
    for part in _chunks(g):
        g[part] = _rounded(g[part].float() * float(c), g.dtype)


@torch.no_grad()
def sum_squares(g: Tensor, g_kind: GradientKind, out: Tensor) -> None:
    """out (float64[ceil(n/65536)]) = the sum of squares of each 64 Ki-element block of g, in a fixed order."""
    _check(g, g_kind, g.numel(), "gradient")
    if out.dtype != torch.float64 or out.shape != (block_count(g.numel()),):
        raise StateError(
            "sum_squares got the wrong output tensor.",
            found=f"{out.dtype} of shape {tuple(out.shape)}",
            expected=f"float64 of shape ({block_count(g.numel())},)",
        )
    for part in _chunks(g):
        elements = g[part]
        blocks = block_count(elements.numel())
        padded = torch.nn.functional.pad(elements, (0, blocks * BLOCK - elements.numel()))
        rows = padded.view(blocks, BLOCK // LANES, LANES)
        lanes = torch.zeros(blocks, LANES, dtype=torch.float64, device=g.device)
        for row in range(BLOCK // LANES):
            lanes += rows[:, row].double().square()
        while lanes.shape[1] > 1:
            lower, upper = lanes.chunk(2, dim=1)
            lanes = lower + upper
        first = part.start // BLOCK
        out[first : first + blocks] = lanes[:, 0]


def abs_max(g: Tensor, g_kind: GradientKind) -> float:
    """The largest |g|; NaN if there is any NaN, 0 if g is empty."""
    _check(g, g_kind, g.numel(), "gradient")
    return float(g.detach().abs().amax()) if g.numel() else 0.0


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a·b + c with one rounding: the sum in fp64 rounded to odd (Boldo and Melquiond, 2008), then to fp32."""
    product, addend = a.double() * b.double(), c.double()  # the product of two fp32 numbers is exact in fp64
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    inexact = (error != 0) & ((bits & 1) == 0) & total.isfinite()
    outward = (error > 0) == (total > 0)
    bits = bits + torch.where(outward, 1, -1) * inexact
    return bits.view(torch.float64).float()


def _sqrt(x: Tensor) -> Tensor:
    """Correctly rounded: fp64 has more than twice fp32's precision. torch's fp32 root is not, on CPU."""
    return x.double().sqrt().float()


_OPERATIONS = Operations(fma=_fma, sqrt=_sqrt, select=torch.where, sign=torch.sign)


def _apply(
    rule: Rule, p: Tensor, states: States, g: Tensor, g_kind: str, c: np.float32, s: Scalars
) -> tuple[Tensor, States]:
    """The rule on one chunk, out of place."""
    # Scalars are tensors of the device: torch divides by a Python number with a reciprocal on CUDA.
    scalars = torch.tensor([float(value) for value in s], dtype=torch.float32, device=p.device).unbind()
    gradient = g.float() * float(c)
    if not g_kind.endswith("fp32"):
        gradient = gradient.to(g.dtype).float()
    return definition(rule.name, len(states), _OPERATIONS)(p, states, gradient, scalars)


def _rounded(p: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float32:
        return p
    nan = torch.tensor(_CANONICAL_NAN[dtype], dtype=torch.int16, device=p.device).view(dtype)
    return torch.where(p.isnan(), nan, p.to(dtype))


def _chunks(tensor: Tensor) -> Iterator[slice]:
    n, size = tensor.numel(), _CHUNK * (_DEVICE_CHUNKS if tensor.is_cuda else 1)
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def _check_all(p: Tensor, states: States, g: Tensor, g_kind: str) -> None:
    for tensor in (p, *states):
        _check(tensor, "fp32", p.numel(), "master or state")
    _check(g, g_kind, p.numel(), "gradient")


def _check_split(p: Tensor, hi: Tensor, lo: Tensor) -> None:
    _check(p, "fp32", p.numel(), "p")
    _check(hi, "bf16", p.numel(), "hi")
    _check_low(lo, p.numel())


def _check_low(lo: Tensor, size: int) -> None:
    _require(lo, (torch.int16, torch.uint16), size, "lo")


def _check(tensor: Tensor, kind: str, size: int, name: str) -> None:
    _require(tensor, (_DTYPES[kind],), size, name)


def _require(tensor: Tensor, dtypes: tuple[torch.dtype, ...], size: int, name: str) -> None:
    if tensor.dtype not in dtypes or tensor.shape != (size,) or not tensor.is_contiguous():
        raise StateError(
            f"An optimizer rule got a tensor '{name}' that does not fit.",
            found=f"{tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()}",
            expected=f"contiguous {' or '.join(str(dtype) for dtype in dtypes)} of shape ({size},)",
        )
