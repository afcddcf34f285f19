"""What the kernels promise one another, torch's conversions, and the engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit
from optim_cases import F32, as_tensor, assert_same, assert_same_case, hostile, make_case, numbers, stored

from slideformer_backend.optim import numba_kernels as kernels
from slideformer_backend.optim import twins
from slideformer_backend.optim.norm import BLOCK, block_count, clip_coefficient, total_norm
from slideformer_backend.optim.numba_bits import OPTIONS, join_fp32, split_hi, split_lo
from slideformer_backend.optim.rules import Pending

GROUP = {
    "lr": 1e-3,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "momentum": 0.9,
    "dampening": 0.0,
    "nesterov": True,
}
VARIANTS = [("adamw", 2), ("adam", 2), ("sgd", 0), ("sgd", 1), ("lion", 1)]
KINDS = [("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("bf16_as_fp32", "bf16")]
EVERYTHING = [("adamw", 2, *kinds) for kinds in KINDS] + [(*variant, "bf16", "bf16") for variant in VARIANTS[1:]]
N = 1003


@pytest.mark.parametrize(("name", "count", "g_kind", "w_kind"), EVERYTHING)
def test_one_update_however_it_is_split(name, count, g_kind, w_kind):
    """commit+peek == advance; peek, then commit gives w == round(p); update == commit + round; split == whole."""
    start = make_case(name, count, g_kind, w_kind, N, seed=5)
    rule = start.rule
    old = Pending(start.g, g_kind, F32(0.3), rule.scalars(GROUP, 2))
    new = Pending(stored(hostile(N, 9, 1e-2), g_kind), g_kind, F32(0.7), rule.scalars(GROUP, 3))

    two, one = start.copy(), start.copy()
    kernels.commit(rule, two.p, two.states, *old)
    kernels.peek(rule, two.p, two.states, *new, two.w, w_kind)
    kernels.advance(rule, one.p, one.states, old, new, one.w, w_kind)
    assert_same_case(one, two)

    kernels.commit(rule, one.p, one.states, *new)
    rounded = np.empty_like(one.w)
    kernels.round_into(one.p, rounded, w_kind)
    assert_same(one.w, rounded, w_kind)
    if w_kind != "fp32":
        assert (one.w == rounded).all(), "canonical NaN included"

    updated, committed = start.copy(), start.copy()
    kernels.update(rule, updated.p, updated.states, *old, updated.w, w_kind)
    kernels.commit(rule, committed.p, committed.states, *old)
    kernels.round_into(committed.p, committed.w, w_kind)
    assert_same_case(updated, committed)

    in_halves = start.copy()
    hi, lo = np.empty(N, np.uint16), np.empty(N, np.uint16)
    kernels.split(in_halves.p, hi, lo)
    kernels.update_split(rule, hi, lo, in_halves.states, *old)
    kernels.join(hi, lo, in_halves.p)
    assert_same(in_halves.p, committed.p)


@pytest.mark.parametrize(("name", "count", "g_kind", "w_kind"), EVERYTHING)
def test_a_parameter_of_zeros_needs_no_array(name, count, g_kind, w_kind):
    """The same bits as with zeros, signs of zeros included, in one pass or two, and nothing else is written."""
    case = make_case(name, count, g_kind, w_kind, N, seed=6)
    pending = Pending(case.g, g_kind, F32(0.3), case.rule.scalars(GROUP, 2))
    zeros = case.copy()
    zeros.p.fill(0.0)
    kernels.update(case.rule, zeros.p, zeros.states, *pending, zeros.w, w_kind)

    one, two = case.copy(), case.copy()
    kernels.update_zero(case.rule, one.states, *pending, one.w, w_kind)
    kernels.peek_zero(case.rule, two.states, *pending, two.w, w_kind)
    assert_same_case(two._replace(w=case.w), case)
    kernels.commit_zero(case.rule, two.states, *pending)
    for found in (one, two):
        assert_same_case(found._replace(p=zeros.p), zeros)


def test_peek_changes_nothing_else():
    case = make_case("adamw", 2, "bf16", "bf16", N, seed=1)
    before = case.copy()
    kernels.peek(case.rule, case.p, case.states, case.g, "bf16", F32(0.5), case.rule.scalars(GROUP, 3), case.w, "bf16")
    assert (case.w != before.w).any()
    assert_same_case(case._replace(w=before.w), before)


def test_update_of_an_fp32_weight_that_is_its_own_master():
    case, expected = (make_case("adamw", 2, "fp32", "fp32", N, seed=2) for _ in range(2))
    s = case.rule.scalars(GROUP, 3)
    kernels.update(case.rule, case.p, case.states, case.g, "fp32", F32(0.5), s, case.p, "fp32")
    kernels.commit(case.rule, expected.p, expected.states, expected.g, "fp32", F32(0.5), s)
    assert_same_case(case, expected)


def test_slices_of_a_slice_give_the_same_bits():
    """Where workers cut a unit changes nothing: vector remainders compute what vectors do."""
    whole, parts = (make_case("adamw", 2, "bf16", "bf16", N, seed=3) for _ in range(2))
    s = whole.rule.scalars(GROUP, 3)
    kernels.update(whole.rule, whole.p, whole.states, whole.g, "bf16", F32(0.5), s, whole.w, "bf16")
    for start, stop in ((0, 1), (1, 18), (18, 500), (500, N)):
        part = slice(start, stop)
        states = tuple(state[part] for state in parts.states)
        kernels.update(parts.rule, parts.p[part], states, parts.g[part], "bf16", F32(0.5), s, parts.w[part], "bf16")
    assert_same_case(parts, whole)


def test_sgd_starts_its_buffer_with_the_gradient_whatever_was_there():
    case = make_case("sgd", 1, "fp32", "fp32", 64, seed=4, special=False)
    case.states[0].fill(np.nan)
    group = {**GROUP, "weight_decay": 0.0}
    kernels.commit(case.rule, case.p, case.states, case.g, "fp32", F32(1), case.rule.scalars(group, 1))
    assert_same(case.states[0], case.g)


def some_fp32() -> np.ndarray:
    """Every 16-bit prefix with low halves around the rounding points of bf16 and fp16, and random ones."""
    rng = np.random.default_rng(0)
    lows = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    lows = np.concatenate([lows, rng.integers(0, 2**16, 4).astype(np.uint32)])
    return ((np.arange(2**16, dtype=np.uint32) << 16)[:, None] | lows).ravel().view(F32)


@pytest.mark.parametrize(("kind", "nan"), [("bf16", 0x7FC0), ("fp16", 0x7E00)])
def test_rounding_is_torchs(kind, nan):
    p = some_fp32()
    w = np.empty(p.size, np.uint16)
    kernels.round_into(p, w, kind)
    expected = stored(p, kind)
    numbers_only = ~np.isnan(p)
    assert (w == expected)[numbers_only].all()
    assert (w[~numbers_only] == nan).all(), "torch's NaN depends on its code path, ours does not"


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_widening_is_torchs(kind):
    w = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    expected = as_tensor(w, kind).float().numpy()
    assert_same(numbers(w, kind), expected)
    back = np.empty_like(w)
    kernels.round_into(numbers(w, kind), back, kind)
    assert (back == w)[~np.isnan(expected)].all()


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("c", [0.3456789, 1.0, 1e-6, 3.0])
def test_scaling_is_torchs_clip(kind, c):
    g = stored(hostile(N, 7), kind)
    theirs = [as_tensor(g, kind)]
    torch._foreach_mul_(theirs, torch.tensor(c))
    assert_same(as_tensor(g, kind).mul_(torch.tensor(c)), theirs[0])
    kernels.scale(g, kind, F32(c))
    assert_same(g, theirs[0], kind)


def test_coefficient_is_applied_as_a_clip_before():
    """commit(c) == clip the gradient in place, then commit: rounded to the dtype that the gradient counts as."""
    for kind, as_kind in (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("bf16_as_fp32", "fp32")):
        case = make_case("sgd", 0, kind, "fp32", N, seed=11)
        s, clipped = case.rule.scalars(GROUP, 1), case.copy()
        kernels.commit(case.rule, case.p, (), case.g, kind, F32(0.3456789), s)
        g = numbers(case.g, kind) if as_kind == "fp32" else case.g.copy()
        kernels.scale(g, as_kind, F32(0.3456789))
        kernels.commit(clipped.rule, clipped.p, (), g, as_kind, F32(1), s)
        assert_same(case.p, clipped.p)


def _count_not_inverted(first, last):
    """How many fp32 bit patterns in [first, last) the split master does not give back."""
    bits = np.empty(4096, np.uint32)
    values = bits.view(np.float32)
    bad = 0
    for start in range(first, last, 4096):
        for i in range(bits.size):
            bits[i] = np.uint32(start + i)
        wrong = np.uint32(0)
        for i in range(bits.size):
            x = values[i]
            back = join_fp32(split_hi(x), split_lo(x))
            nan = x != x
            wrong += np.uint32(0 if (nan and back != back) or (not nan and _bits(back) == bits[i]) else 1)
        bad += wrong
    return bad


def _float_bits(x):
    return np.float32(x).view(np.uint32)


_bits = njit(**OPTIONS)(_float_bits)


def test_split_master_inverts_every_pattern():
    """All 2^32 of them; NaN stays NaN."""
    assert njit(**OPTIONS)(_count_not_inverted)(0, 2**32) == 0


def test_a_zero_written_above_low_bits_is_no_nan():
    """Through an alias that was kept: nobody resets what the zero does not cover."""
    low = np.arange(1 << 16, dtype=np.uint16)
    for zero in (0, 0x8000):
        high, found, twin = np.full(len(low), zero, np.uint16), np.empty(len(low), np.float32), torch.empty(len(low))
        kernels.join(high, low, found)
        assert np.abs(found).max() < 1e-38
        twins.join(
            torch.from_numpy(high.view(np.int16)).view(torch.bfloat16), torch.from_numpy(low.view(np.int16)), twin
        )
        assert np.array_equal(found.view(np.int32), twin.numpy().view(np.int32))


def test_split_master_encoding():
    p = np.array([1.0, -1.0, np.nan, np.inf, 3.4028235e38, 1.00390625, 1.001953125], F32)
    hi, lo = np.empty(p.size, np.uint16), np.empty(p.size, np.uint16)
    kernels.split(p, hi, lo)
    assert hi.tolist() == [0x3F80, 0xBF80, 0x7FC0, 0x7F80, 0x7F80, 0x3F81, 0x3F80]
    assert lo.tolist() == [0, 0, 0, 0, 0xFFFF, 0x8000, 0x4000]


def test_nan_patterns_never_become_numbers():
    p = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7FFF8000, 0x7F800001, 0xFF800001], np.uint32).view(F32)
    hi, lo, back = np.empty(p.size, np.uint16), np.empty(p.size, np.uint16), np.empty(p.size, F32)
    kernels.split(p, hi, lo)
    kernels.join(hi, lo, back)
    assert np.isnan(numbers(hi, "bf16")).all()
    assert np.isnan(back).all()


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
def test_reconcile_takes_what_the_user_wrote(kind):
    n = 3 * 4096 + 5
    p = hostile(n, 1)
    w = np.empty(n, F32 if kind == "fp32" else np.uint16)
    kernels.round_into(p, w, kind)
    untouched = p.copy()
    assert kernels.reconcile(p, w, kind) == 0
    assert (p.view(np.uint32) == untouched.view(np.uint32)).all()
    for index in (0, 4095, 4096, n - 1):
        w[index] = stored(np.array([0.7071], F32), kind)[0]
    assert kernels.reconcile(p, w, kind) == 4
    assert p[4096] == numbers(w, kind)[4096] == p[n - 1]
    assert (p.view(np.uint32) == untouched.view(np.uint32)).sum() == n - 4


@pytest.mark.parametrize(("kind", "nan"), [("bf16", 0xFFFF), ("fp16", 0xFFFF)])
def test_reconcile_knows_one_nan(kind, nan):
    p = np.full(3, np.nan, F32)
    assert kernels.reconcile(p, np.full(3, nan, np.uint16), kind) == 0
    w = np.array([nan, 0, nan], np.uint16)
    assert kernels.reconcile(p, w, kind) == 1
    assert p[1] == 0


def test_reconcile_split():
    p = hostile(5000, 2)
    hi, lo = np.empty(p.size, np.uint16), np.empty(p.size, np.uint16)
    kernels.split(p, hi, lo)
    before, old_lo = hi.copy(), lo.copy()
    hi[[3, 4999]] = 0x3F80
    changed = before != hi
    assert kernels.reconcile_split(before, hi, lo) == changed.sum()
    kernels.join(hi, lo, p)
    assert p[3] == p[4999] == 1.0
    assert (lo == np.where(changed, 0, old_lo)).all()


def test_sum_squares_does_not_depend_on_the_cut():
    n = 5 * BLOCK + 123
    g = stored(np.random.default_rng(0).standard_normal(n).astype(F32), "bf16")
    whole = np.empty(block_count(n))
    kernels.sum_squares(g, "bf16", whole)
    for cut in (1, 3, 5):
        parts = np.empty_like(whole)
        kernels.sum_squares(g[: cut * BLOCK], "bf16", parts[:cut])
        kernels.sum_squares(g[cut * BLOCK :], "bf16", parts[cut:])
        assert (parts == whole).all()
    exact = float(np.sum(numbers(g, "bf16").astype(np.longdouble) ** 2))
    assert abs(float(whole.sum()) - exact) <= 1e-13 * exact
    assert total_norm([whole[:2], whole[2:]]) == total_norm([whole])


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
def test_norms_show_non_finite_gradients(bad, kind):
    values = np.ones(2 * BLOCK, F32)
    values[BLOCK + 5] = bad
    out = np.empty(2)
    kernels.sum_squares(stored(values, kind), kind, out)
    assert out[0] == BLOCK
    assert not np.isfinite(out[1])
    assert not np.isfinite(total_norm([out]))
    largest = kernels.abs_max(stored(values, kind), kind)
    assert np.isnan(largest) if np.isnan(bad) else largest == np.inf


def test_huge_finite_gradients_have_a_finite_norm():
    out = np.empty(1)
    kernels.sum_squares(np.full(BLOCK, 3e38, F32), "fp32", out)
    assert np.isfinite(total_norm([out]))


@pytest.mark.parametrize("norm", [0.0, 1e-8, 0.4, 0.99999, 1.0, 7.3, 1e30, np.inf, np.nan])
@pytest.mark.parametrize("max_norm", [1.0, 0.37, 1e-3])
def test_clip_coefficient_is_torchs(norm, max_norm):
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    torch.nn.utils.clip_grads_with_norm_([parameter], max_norm, torch.tensor(norm))
    assert_same(np.array([clip_coefficient(norm, max_norm)], F32), parameter.grad)
