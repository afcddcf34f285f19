"""Scalar primitives for the numba kernels: fma, and exact conversions between fp32 and the 16-bit kinds.

They are built as LLVM instructions, because numba widens integer arithmetic to 64 bits and would halve the vector
width. Rounding is to nearest even, by integer operations: no library call, the same bits on every CPU. A NaN
rounds to the canonical one (bf16 0x7fc0, fp16 0x7e00): torch's own answer depends on its code path (0xffff, 0x7fff).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from slideformer_backend.optim.arithmetic import Operations

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}
"""How everything is compiled. No contraction: it made two kernels of one rule differ. No cache: it needs a writable
install."""
KERNEL: dict[str, Any] = {**OPTIONS, "no_cfunc_wrapper": True}
"""How kernels are compiled, which Python alone calls."""
INNER: dict[str, Any] = {**OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""How functions are compiled that only kernels call: without entries for Python and C, which cost as much again."""

_F32, _I32, _I16 = ir.FloatType(), ir.IntType(32), ir.IntType(16)
LLVM: TypeAlias = Any
"""An IR builder, or a value that it made."""
Numba: TypeAlias = Any
"""A numba type, an njit function or an intrinsic; in the body of one, a value of the compiled code."""


def _primitive(result: Numba, arguments: tuple[Numba, ...], build: Callable[..., LLVM]) -> Numba:
    """An intrinsic of one or two arguments that emits what ``build(builder, *values)`` returns."""

    def generate(context: Numba, builder: LLVM, signature: Numba, values: LLVM) -> LLVM:
        return build(builder, *values)

    if len(arguments) == 1:

        def unary(typingctx: Numba, x: Numba) -> Numba:
            return result(*arguments), generate

        return intrinsic(unary)

    def binary(typingctx: Numba, x: Numba, y: Numba) -> Numba:
        return result(*arguments), generate

    return intrinsic(binary)


def _fma(typingctx: Numba, a: Numba, b: Numba, c: Numba) -> Numba:
    def generate(context: Numba, builder: LLVM, signature: Numba, values: LLVM) -> LLVM:
        return builder.fma(*values)

    return types.float32(types.float32, types.float32, types.float32), generate


def _is_nan(b: LLVM, x: LLVM) -> LLVM:
    return b.fcmp_unordered("uno", x, x)


def _bf16_to_fp32(b: LLVM, h: LLVM) -> LLVM:
    return b.bitcast(b.shl(b.zext(h, _I32), _I32(16)), _F32)


def _fp32_to_bf16(b: LLVM, x: LLVM) -> LLVM:
    bits = b.bitcast(x, _I32)
    odd = b.and_(b.lshr(bits, _I32(16)), _I32(1))
    rounded = b.lshr(b.add(bits, b.add(odd, _I32(0x7FFF))), _I32(16))
    return b.trunc(b.select(_is_nan(b, x), _I32(0x7FC0), rounded), _I16)


def _fp16_to_fp32(b: LLVM, h: LLVM) -> LLVM:
    bits = b.zext(h, _I32)
    sign = b.shl(b.and_(bits, _I32(0x8000)), _I32(16))
    magnitude = b.and_(bits, _I32(0x7FFF))
    shifted = b.shl(magnitude, _I32(13))
    special = b.icmp_unsigned(">=", magnitude, _I32(0x7C00))
    rebias = b.select(special, _I32((255 - 31) << 23), _I32((127 - 15) << 23))
    # A subnormal has the value 2^-14·(1 + fraction) - 2^-14, which fp32 holds exactly.
    smallest = _I32((127 - 14) << 23)
    subnormal = b.bitcast(b.fsub(b.bitcast(b.or_(shifted, smallest), _F32), b.bitcast(smallest, _F32)), _I32)
    is_subnormal = b.icmp_unsigned("<", magnitude, _I32(0x0400))
    return b.bitcast(b.or_(b.select(is_subnormal, subnormal, b.add(shifted, rebias)), sign), _F32)


def _fp32_to_fp16(b: LLVM, x: LLVM) -> LLVM:
    bits = b.bitcast(x, _I32)
    sign = b.lshr(b.and_(bits, _I32(0x80000000)), _I32(16))
    magnitude = b.and_(bits, _I32(0x7FFFFFFF))
    odd = b.and_(b.lshr(magnitude, _I32(13)), _I32(1))
    # Subtracting the bias wraps; only results in the normal range are taken.
    rebiased = b.add(magnitude, _I32((((15 - 127) << 23) + 0xFFF) & 0xFFFFFFFF))
    normal = b.lshr(b.add(rebiased, odd), _I32(13))
    # Adding 0.5 leaves a subnormal result, rounded to a multiple of 2^-24, in the low bits.
    half = _I32(126 << 23)
    subnormal = b.sub(b.bitcast(b.fadd(b.bitcast(magnitude, _F32), b.bitcast(half, _F32)), _I32), half)
    result = b.select(b.icmp_unsigned("<", magnitude, _I32(113 << 23)), subnormal, normal)
    result = b.select(b.icmp_unsigned(">=", magnitude, _I32(143 << 23)), _I32(0x7C00), result)
    result = b.or_(result, sign)
    return b.trunc(b.select(_is_nan(b, x), _I32(0x7E00), result), _I16)


def _canonical_bits(b: LLVM, x: LLVM) -> LLVM:
    return b.select(_is_nan(b, x), _I32(0x7FC00000), b.bitcast(x, _I32))


def _split_hi(b: LLVM, x: LLVM) -> LLVM:
    return b.trunc(b.lshr(b.add(_canonical_bits(b, x), _I32(0x8000)), _I32(16)), _I16)


def _split_lo(b: LLVM, x: LLVM) -> LLVM:
    return b.trunc(_canonical_bits(b, x), _I16)


def _join(b: LLVM, hi: LLVM, lo: LLVM) -> LLVM:
    low, high = b.zext(lo, _I32), b.zext(hi, _I32)
    # a split never leaves zero above an upper half of low bits: a zero was written by code that nobody saw, such as
    # through an alias kept from an earlier step, and taking the borrow from it would make a NaN
    is_zero = b.icmp_unsigned("==", b.and_(high, _I32(0x7FFF)), _I32(0))
    low = b.select(b.and_(is_zero, b.icmp_unsigned(">=", low, _I32(0x8000))), _I32(0), low)
    high = b.sub(high, b.lshr(low, _I32(15)))
    return b.bitcast(b.or_(b.shl(high, _I32(16)), low), _F32)


def _magnitude_bits(b: LLVM, x: LLVM) -> LLVM:
    return b.and_(b.bitcast(x, _I32), _I32(0x7FFFFFFF))


def _max(b: LLVM, x: LLVM, y: LLVM) -> LLVM:
    return b.select(b.icmp_unsigned(">", x, y), x, y)


def _differs(b: LLVM, x: LLVM, y: LLVM) -> LLVM:
    """1 unless the bits are equal or both are NaN."""
    unequal = b.icmp_unsigned("!=", b.bitcast(x, _I32), b.bitcast(y, _I32))
    both_nan = b.and_(_is_nan(b, x), _is_nan(b, y))
    return b.zext(b.and_(unequal, b.not_(both_nan)), _I32)


def _sign(b: LLVM, x: LLVM) -> LLVM:
    zero = _F32(0.0)
    negative = b.select(b.fcmp_ordered("<", x, zero), _F32(-1.0), zero)
    return b.select(b.fcmp_ordered(">", x, zero), _F32(1.0), negative)


def _sqrt(b: LLVM, x: LLVM) -> LLVM:
    """The instruction, correctly rounded; numba's own ends in a library call for the last elements."""
    return b.call(b.module.declare_intrinsic("llvm.sqrt", [_F32]), [x])


def _select(flag: Numba, a: Numba, b: Numba) -> Numba:
    return a if flag else b


def _identity(x: Numba) -> Numba:
    return x


fma: Numba = intrinsic(_fma)
OPERATIONS = Operations(
    fma=fma,
    sqrt=_primitive(types.float32, (types.float32,), _sqrt),
    select=njit(**INNER)(_select),
    sign=_primitive(types.float32, (types.float32,), _sign),
)
magnitude_bits = _primitive(types.uint32, (types.float32,), _magnitude_bits)
fp32_from_bits = _primitive(types.float32, (types.uint32,), lambda b, bits: b.bitcast(bits, _F32))
max_u32 = _primitive(types.uint32, (types.uint32, types.uint32), _max)
differs = _primitive(types.uint32, (types.float32, types.float32), _differs)
split_hi = _primitive(types.uint16, (types.float32,), _split_hi)
split_lo = _primitive(types.uint16, (types.float32,), _split_lo)
join_fp32 = _primitive(types.float32, (types.uint16, types.uint16), _join)


class Storage(NamedTuple):
    """How numbers of one kind are kept in an array."""

    item: Numba
    """numba type of an element."""
    load: Numba
    """element -> fp32, exact."""
    store: Numba
    """fp32 -> element, rounding to nearest even."""


_BF16 = Storage(
    types.uint16,
    _primitive(types.float32, (types.uint16,), _bf16_to_fp32),
    _primitive(types.uint16, (types.float32,), _fp32_to_bf16),
)
_FP16 = Storage(
    types.uint16,
    _primitive(types.float32, (types.uint16,), _fp16_to_fp32),
    _primitive(types.uint16, (types.float32,), _fp32_to_fp16),
)
_FP32 = Storage(types.float32, njit(**INNER)(_identity), njit(**INNER)(_identity))

STORAGE: dict[str, Storage] = {
    "bf16": _BF16,
    "fp16": _FP16,
    "fp32": _FP32,
    "bf16_as_fp32": _BF16,
    "fp16_as_fp32": _FP16,
}
"""By weight or gradient kind."""


@functools.cache
def scaled_load(kind: str) -> Numba:
    """njit ``(element, c) -> fp32``: element·c rounded to the dtype the gradient counts as, as torch's in-place mul."""
    load, store = STORAGE[kind].load, STORAGE[kind].store
    if kind.endswith("fp32"):

        def scaled(element: Numba, c: Numba) -> Numba:
            return load(element) * c
    else:

        def scaled(element: Numba, c: Numba) -> Numba:
            return load(store(load(element) * c))

    return njit(**INNER)(scaled)
