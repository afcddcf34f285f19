"""Kernels without an update rule: conversions, the split master, reconciliation after user writes, gradient norms.

All arrays are 1-D, contiguous and of equal length n unless said otherwise, and must not overlap. The GIL is released.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import types

from slideformer_backend.errors import StateError
from slideformer_backend.optim.norm import BLOCK, LANES, block_count
from slideformer_backend.optim.numba_bits import (
    STORAGE,
    Numba,
    differs,
    fp32_from_bits,
    join_fp32,
    magnitude_bits,
    max_u32,
    split_hi,
    split_lo,
)
from slideformer_backend.optim.numba_compile import FP32, FP64, U16, Array, Built, KernelCache, array_type, check
from slideformer_backend.optim.rules import GradientKind, WeightKind

_CHUNK = 4096
"""Elements that reconcile looks at before it decides whether to write."""


def round_into(p: Array, w: Array, w_kind: WeightKind) -> None:
    """w = p (float32[n]) rounded to nearest even."""
    check(p, "fp32", p.size, "p")
    check(w, w_kind, p.size, "w")
    kernels("round", w_kind)(p, w)


def widen(w: Array, w_kind: WeightKind, p: Array) -> None:
    """p (float32[n]) = w, exactly."""
    check(p, "fp32", p.size, "p")
    check(w, w_kind, p.size, "w")
    kernels("widen", w_kind)(w, p)


def split(p: Array, hi: Array, lo: Array) -> None:
    """Encode p (float32[n]) as bf16 ``hi``, rounded half away from zero, and ``lo``, its low bits (both uint16[n])."""
    _check_split(p, hi, lo)
    kernels("split")(p, hi, lo)


def join(hi: Array, lo: Array, p: Array) -> None:
    """Invert :func:`split` exactly, for every bit pattern but NaN, which comes back as 0x7fc00000.

    ``hi`` that was set to zero since gives zero, or a number smaller than any in bf16."""
    _check_split(p, hi, lo)
    kernels("join")(hi, lo, p)


def reconcile(p: Array, w: Array, w_kind: WeightKind) -> int:
    """Where w is not what p rounds to, bit for bit, set p = w. Returns how many. Two NaNs count as the same."""
    check(p, "fp32", p.size, "p")
    check(w, w_kind, p.size, "w")
    return int(kernels("reconcile", w_kind)(p, w))


def reconcile_split(hi_before: Array, hi: Array, lo: Array) -> int:
    """Where hi (uint16[n]) is not hi_before, set lo = 0, so that ``join`` gives the weight itself. Returns how many."""
    for name, array in (("hi_before", hi_before), ("hi", hi), ("lo", lo)):
        check(array, "bf16", hi.size, name)
    return int(kernels("reconcile_split")(hi_before, hi, lo))


def scale(g: Array, g_kind: GradientKind, c: np.float32) -> None:
    """g = g·c in place, rounded as torch's ``g.mul_(c)`` with an fp32 tensor c does.

    Raises StateError for the ``*_as_fp32`` kinds: the product would not fit into the stored 16 bits.
    """
    if g_kind not in ("bf16", "fp16", "fp32"):
        raise StateError("A gradient kept in 16 bits for an fp32 parameter was scaled in place.", found=g_kind)
    check(g, g_kind, g.size, "gradient")
    kernels("scale", g_kind)(g, np.float32(c))


def sum_squares(g: Array, g_kind: GradientKind, out: Array) -> None:
    """out (float64[ceil(n/65536)]) = the sum of squares of each 64 Ki-element block of g, in a fixed order."""
    check(g, g_kind, g.size, "gradient")
    if out.dtype != np.float64 or out.shape != (block_count(g.size),) or not out.flags.c_contiguous:
        raise StateError(
            "sum_squares got the wrong output array.",
            found=f"{out.dtype} of shape {out.shape}",
            expected=f"contiguous float64 of shape ({block_count(g.size)},)",
        )
    kernels("sum_squares", g_kind)(g, out)


def abs_max(g: Array, g_kind: GradientKind) -> float:
    """The largest |g|; NaN if there is any NaN, 0 if g is empty."""
    check(g, g_kind, g.size, "gradient")
    return float(kernels("abs_max", g_kind)(g))


def _check_split(p: Array, hi: Array, lo: Array) -> None:
    check(p, "fp32", p.size, "p")
    check(hi, "bf16", p.size, "hi")
    check(lo, "bf16", p.size, "lo")


def _build_round(kind: str) -> Built:
    store = STORAGE[kind].store

    def kernel(p: Numba, w: Numba) -> None:
        for i in range(p.size):
            w[i] = store(p[i])

    return kernel, types.void(FP32, array_type(kind))


def _build_widen(kind: str) -> Built:
    load = STORAGE[kind].load

    def kernel(w: Numba, p: Numba) -> None:
        for i in range(p.size):
            p[i] = load(w[i])

    return kernel, types.void(array_type(kind), FP32)


def _build_split() -> Built:
    def kernel(p: Numba, hi: Numba, lo: Numba) -> None:
        for i in range(p.size):
            hi[i] = split_hi(p[i])
            lo[i] = split_lo(p[i])

    return kernel, types.void(FP32, U16, U16)


def _build_join() -> Built:
    def kernel(hi: Numba, lo: Numba, p: Numba) -> None:
        for i in range(p.size):
            p[i] = join_fp32(hi[i], lo[i])

    return kernel, types.void(U16, U16, FP32)


def _build_reconcile(kind: str) -> Built:
    load, store = STORAGE[kind].load, STORAGE[kind].store

    def kernel(p: Numba, w: Numba) -> Numba:
        total = 0
        for start in range(0, p.size, _CHUNK):
            masters, weights = p[start : start + _CHUNK], w[start : start + _CHUNK]
            changed = 0
            for i in range(masters.size):
                changed += differs(load(store(masters[i])), load(weights[i]))
            if changed != 0:
                total += changed
                for i in range(masters.size):
                    if differs(load(store(masters[i])), load(weights[i])) != 0:
                        masters[i] = load(weights[i])
        return total

    return kernel, types.int64(FP32, array_type(kind))


def _build_reconcile_split() -> Built:
    def kernel(before: Numba, hi: Numba, lo: Numba) -> Numba:
        total = 0
        for start in range(0, hi.size, _CHUNK):
            old, new, rest = before[start : start + _CHUNK], hi[start : start + _CHUNK], lo[start : start + _CHUNK]
            changed = 0
            for i in range(new.size):
                changed += np.int64(old[i] != new[i])
            if changed != 0:
                total += changed
                for i in range(new.size):
                    if old[i] != new[i]:
                        rest[i] = 0
        return total

    return kernel, types.int64(U16, U16, U16)


def _build_scale(kind: str) -> Built:
    load, store = STORAGE[kind].load, STORAGE[kind].store

    def kernel(g: Numba, c: Numba) -> None:
        for i in range(g.size):
            g[i] = store(load(g[i]) * c)

    return kernel, types.void(array_type(kind), types.float32)


def _build_sum_squares(kind: str) -> Built:
    load = STORAGE[kind].load

    def kernel(g: Numba, out: Numba) -> None:
        lanes = np.empty(LANES, np.float64)
        for block in range(out.size):
            lanes[:] = 0.0
            elements = g[block * BLOCK : (block + 1) * BLOCK]
            for start in range(0, elements.size, LANES):
                row = elements[start : start + LANES]
                for lane in range(row.size):
                    x = np.float64(load(row[lane]))
                    lanes[lane] += x * x
            width = LANES // 2
            while width > 0:
                upper = lanes[width : 2 * width]
                for lane in range(width):
                    lanes[lane] += upper[lane]
                width //= 2
            out[block] = lanes[0]

    return kernel, types.void(array_type(kind), FP64)


def _build_abs_max(kind: str) -> Built:
    load = STORAGE[kind].load

    def kernel(g: Numba) -> Numba:
        # The bits of |x| order as |x| does, with NaN above inf.
        largest = np.uint32(0)
        for i in range(g.size):
            largest = max_u32(largest, magnitude_bits(load(g[i])))
        return fp32_from_bits(largest)

    return kernel, types.float32(array_type(kind))


_BUILDERS: dict[str, Callable[..., Built]] = {
    "round": _build_round,
    "widen": _build_widen,
    "split": _build_split,
    "join": _build_join,
    "reconcile": _build_reconcile,
    "reconcile_split": _build_reconcile_split,
    "scale": _build_scale,
    "sum_squares": _build_sum_squares,
    "abs_max": _build_abs_max,
}
kernels = KernelCache(_BUILDERS)
