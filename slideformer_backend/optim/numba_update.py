"""Kernels that apply an update rule to a slice: one loop body per kernel, the rule itself from arithmetic.py.

All arrays are 1-D, contiguous and of equal length n, and must not overlap. Kernels release the GIL. ``states`` are the
float32 arrays that ``rule.states_used(group)`` names, in that order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numba import njit, types

from slideformer_backend.optim.arithmetic import Scalars, definition
from slideformer_backend.optim.numba_bits import (
    INNER,
    OPERATIONS,
    STORAGE,
    Numba,
    join_fp32,
    scaled_load,
    split_hi,
    split_lo,
)
from slideformer_backend.optim.numba_compile import FP32, U16, Array, Built, KernelCache, array_type, check, check_fp32
from slideformer_backend.optim.rules import GradientKind, Pending, Rule, WeightKind

States = tuple[Array, ...]
"""float32 arrays of n elements each."""

_SCALARS = {"adamw": 9, "adam": 9, "sgd": 7, "lion": 7}


def commit(rule: Rule, p: Array, states: States, g: Array, g_kind: GradientKind, c: np.float32, s: Scalars) -> None:
    """Update p (float32[n]) and states with g·c, rounded to the gradient's dtype first."""
    _check(p, states, g, g_kind)
    kernels("commit", rule.name, len(states), g_kind)(p, states, g, np.float32(c), s)


def peek(
    rule: Rule,
    p: Array,
    states: States,
    g: Array,
    g_kind: GradientKind,
    c: np.float32,
    s: Scalars,
    w: Array,
    w_kind: WeightKind,
) -> None:
    """Write into w what :func:`commit` would make of p, rounded to ``w_kind``; p and states stay."""
    _check(p, states, g, g_kind)
    check(w, w_kind, p.size, "w")
    kernels("peek", rule.name, len(states), g_kind, w_kind)(p, states, g, np.float32(c), s, w)


def advance(rule: Rule, p: Array, states: States, old: Pending, new: Pending, w: Array, w_kind: WeightKind) -> None:
    """``commit(old)``, then ``peek(new)`` into w, in one pass over memory (DESIGN 4.1)."""
    _check(p, states, old.g, old.g_kind)
    check(new.g, new.g_kind, p.size, "new gradient")
    check(w, w_kind, p.size, "w")
    kernel = kernels("advance", rule.name, len(states), old.g_kind, new.g_kind, w_kind)
    kernel(p, states, old.g, np.float32(old.c), old.s, new.g, np.float32(new.c), new.s, w)


def update(
    rule: Rule,
    p: Array,
    states: States,
    g: Array,
    g_kind: GradientKind,
    c: np.float32,
    s: Scalars,
    w: Array,
    w_kind: WeightKind,
) -> None:
    """:func:`commit`, and write p rounded to ``w_kind`` into w in the same pass. w may be p itself when fp32."""
    if w is p or (w_kind == "fp32" and np.may_share_memory(w, p)):
        commit(rule, p, states, g, g_kind, c, s)
        return
    _check(p, states, g, g_kind)
    check(w, w_kind, p.size, "w")
    kernels("update", rule.name, len(states), g_kind, w_kind)(p, states, g, np.float32(c), s, w)


def update_split(
    rule: Rule, hi: Array, lo: Array, states: States, g: Array, g_kind: GradientKind, c: np.float32, s: Scalars
) -> None:
    """:func:`commit` on a master kept as uint16[n] ``hi``, the bf16 weight, and ``lo``: see ``numba_convert.split``."""
    check(hi, "bf16", hi.size, "hi")
    check(lo, "bf16", hi.size, "lo")
    check_fp32(hi.size, states)
    check(g, g_kind, hi.size, "gradient")
    kernels("update_split", rule.name, len(states), g_kind)(hi, lo, states, g, np.float32(c), s)


def peek_zero(
    rule: Rule, states: States, g: Array, g_kind: GradientKind, c: np.float32, s: Scalars, w: Array, w_kind: WeightKind
) -> None:
    """:func:`peek` for p = 0, which is no array: w becomes the update itself."""
    _check_zero(states, g, g_kind)
    check(w, w_kind, g.size, "w")
    kernels("peek_zero", rule.name, len(states), g_kind, w_kind)(states, g, np.float32(c), s, w)


def commit_zero(rule: Rule, states: States, g: Array, g_kind: GradientKind, c: np.float32, s: Scalars) -> None:
    """:func:`commit` for p = 0, which is no array: states alone are updated."""
    _check_zero(states, g, g_kind)
    kernels("commit_zero", rule.name, len(states), g_kind)(states, g, np.float32(c), s)


def update_zero(
    rule: Rule, states: States, g: Array, g_kind: GradientKind, c: np.float32, s: Scalars, w: Array, w_kind: WeightKind
) -> None:
    """:func:`peek_zero` and :func:`commit_zero` in one pass over memory."""
    _check_zero(states, g, g_kind)
    check(w, w_kind, g.size, "w")
    kernels("update_zero", rule.name, len(states), g_kind, w_kind)(states, g, np.float32(c), s, w)


def _check_zero(states: States, g: Array, g_kind: GradientKind) -> None:
    check(g, g_kind, g.size, "gradient")
    check_fp32(g.size, states)


def _check(p: Array, states: States, g: Array, g_kind: GradientKind) -> None:
    check_fp32(p.size, (p, *states))
    check(g, g_kind, p.size, "gradient")


def _read_none(states: Numba, i: Numba) -> Numba:
    return ()


def _read_one(states: Numba, i: Numba) -> Numba:
    return (states[0][i],)


def _read_two(states: Numba, i: Numba) -> Numba:
    return states[0][i], states[1][i]


def _write_none(states: Numba, i: Numba, new: Numba) -> None:
    pass


def _write_one(states: Numba, i: Numba, new: Numba) -> None:
    states[0][i] = new[0]


def _write_two(states: Numba, i: Numba, new: Numba) -> None:
    states[0][i] = new[0]
    states[1][i] = new[1]


_READ = [njit(**INNER)(f) for f in (_read_none, _read_one, _read_two)]
_WRITE = [njit(**INNER)(f) for f in (_write_none, _write_one, _write_two)]


@functools.cache
def _rule(name: str, count: int) -> tuple[Numba, Numba, Numba]:
    """njit update, read and write of a rule with ``count`` states."""
    return njit(**INNER)(definition(name, count, OPERATIONS)), _READ[count], _WRITE[count]


_tuple: Numba = types.Tuple


def _step_types(name: str, count: int, g_kind: str) -> tuple[Numba, Numba, Numba, Numba]:
    """numba types of states, g, c and s."""
    states = _tuple((FP32,) * count)
    return states, array_type(g_kind), types.float32, _tuple((types.float32,) * _SCALARS[name])


def _build_commit(name: str, count: int, g_kind: str) -> Built:
    apply, read, write = _rule(name, count)
    gradient = scaled_load(g_kind)

    def kernel(p: Numba, states: Numba, g: Numba, c: Numba, s: Numba) -> None:
        for i in range(p.size):
            p[i], new = apply(p[i], read(states, i), gradient(g[i], c), s)
            write(states, i, new)

    return kernel, types.void(FP32, *_step_types(name, count, g_kind))


def _build_peek(name: str, count: int, g_kind: str, w_kind: str) -> Built:
    apply, read, _ = _rule(name, count)
    gradient, store = scaled_load(g_kind), STORAGE[w_kind].store

    def kernel(p: Numba, states: Numba, g: Numba, c: Numba, s: Numba, w: Numba) -> None:
        for i in range(p.size):
            new_p, _ = apply(p[i], read(states, i), gradient(g[i], c), s)
            w[i] = store(new_p)

    return kernel, types.void(FP32, *_step_types(name, count, g_kind), array_type(w_kind))


def _build_advance(name: str, count: int, old_kind: str, new_kind: str, w_kind: str) -> Built:
    apply, read, write = _rule(name, count)
    old_gradient, new_gradient, store = scaled_load(old_kind), scaled_load(new_kind), STORAGE[w_kind].store

    def kernel(
        p: Numba, states: Numba, g: Numba, c: Numba, s: Numba, new_g: Numba, new_c: Numba, new_s: Numba, w: Numba
    ) -> None:
        for i in range(p.size):
            committed, new = apply(p[i], read(states, i), old_gradient(g[i], c), s)
            p[i] = committed
            write(states, i, new)
            peeked, _ = apply(committed, new, new_gradient(new_g[i], new_c), new_s)
            w[i] = store(peeked)

    _, g, c, s = _step_types(name, count, new_kind)
    return kernel, types.void(FP32, *_step_types(name, count, old_kind), g, c, s, array_type(w_kind))


def _build_update(name: str, count: int, g_kind: str, w_kind: str) -> Built:
    apply, read, write = _rule(name, count)
    gradient, store = scaled_load(g_kind), STORAGE[w_kind].store

    def kernel(p: Numba, states: Numba, g: Numba, c: Numba, s: Numba, w: Numba) -> None:
        for i in range(p.size):
            new_p, new = apply(p[i], read(states, i), gradient(g[i], c), s)
            p[i] = new_p
            write(states, i, new)
            w[i] = store(new_p)

    return kernel, types.void(FP32, *_step_types(name, count, g_kind), array_type(w_kind))


def _build_split_update(name: str, count: int, g_kind: str) -> Built:
    apply, read, write = _rule(name, count)
    gradient = scaled_load(g_kind)

    def kernel(hi: Numba, lo: Numba, states: Numba, g: Numba, c: Numba, s: Numba) -> None:
        for i in range(hi.size):
            new_p, new = apply(join_fp32(hi[i], lo[i]), read(states, i), gradient(g[i], c), s)
            hi[i] = split_hi(new_p)
            lo[i] = split_lo(new_p)
            write(states, i, new)

    return kernel, types.void(U16, U16, *_step_types(name, count, g_kind))


_ZERO = np.float32(0.0)


def _build_peek_zero(name: str, count: int, g_kind: str, w_kind: str) -> Built:
    apply, read, _ = _rule(name, count)
    gradient, store = scaled_load(g_kind), STORAGE[w_kind].store

    def kernel(states: Numba, g: Numba, c: Numba, s: Numba, w: Numba) -> None:
        for i in range(g.size):
            step, _ = apply(_ZERO, read(states, i), gradient(g[i], c), s)
            w[i] = store(step)

    return kernel, types.void(*_step_types(name, count, g_kind), array_type(w_kind))


def _build_commit_zero(name: str, count: int, g_kind: str) -> Built:
    apply, read, write = _rule(name, count)
    gradient = scaled_load(g_kind)

    def kernel(states: Numba, g: Numba, c: Numba, s: Numba) -> None:
        for i in range(g.size):
            _, new = apply(_ZERO, read(states, i), gradient(g[i], c), s)
            write(states, i, new)

    return kernel, types.void(*_step_types(name, count, g_kind))


def _build_update_zero(name: str, count: int, g_kind: str, w_kind: str) -> Built:
    apply, read, write = _rule(name, count)
    gradient, store = scaled_load(g_kind), STORAGE[w_kind].store

    def kernel(states: Numba, g: Numba, c: Numba, s: Numba, w: Numba) -> None:
        for i in range(g.size):
            step, new = apply(_ZERO, read(states, i), gradient(g[i], c), s)
            write(states, i, new)
            w[i] = store(step)

    return kernel, types.void(*_step_types(name, count, g_kind), array_type(w_kind))


_BUILDERS: dict[str, Callable[..., Built]] = {
    "commit": _build_commit,
    "peek": _build_peek,
    "advance": _build_advance,
    "update": _build_update,
    "update_split": _build_split_update,
    "peek_zero": _build_peek_zero,
    "commit_zero": _build_commit_zero,
    "update_zero": _build_update_zero,
}
kernels = KernelCache(_BUILDERS)
