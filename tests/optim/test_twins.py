"""numba against the torch twin, bit for bit, on hostile numbers: every rule, kind and option."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim_cases import F32, as_tensor, assert_same, assert_same_case, hostile, make_case, stored

from slideformer_backend.errors import StateError
from slideformer_backend.optim import numba_kernels as kernels
from slideformer_backend.optim import twins
from slideformer_backend.optim.norm import BLOCK, block_count
from slideformer_backend.optim.rules import Pending

VARIANTS = [("adamw", 2), ("adam", 2), ("sgd", 0), ("sgd", 1), ("lion", 1)]
KINDS = [("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("bf16_as_fp32", "bf16"), ("fp16_as_fp32", "fp16")]
COEFFICIENTS = [1.0, 0.3456789, 1e-30, 1e30]

groups = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([1e-3, 0.1, 1e-40, 1e30, 0.0]),
        "betas": st.tuples(st.sampled_from([0.9, 0.3, 0.0, 0.5]), st.sampled_from([0.999, 0.95, 0.0])),
        "eps": st.sampled_from([1e-8, 0.0, 1e-30, 1.0]),
        "weight_decay": st.sampled_from([0.0, 0.1, 1e10]),
        "momentum": st.sampled_from([0.9, 1e-40]),
        "dampening": st.sampled_from([0.0, 0.3]),
        "nesterov": st.booleans(),
        "maximize": st.booleans(),
    }
)
steps = st.sampled_from([1, 2, 100_000])
lengths = st.sampled_from([0, 1, 7, 16, 33, 1003])
coefficients = st.sampled_from(COEFFICIENTS)
seeds = st.integers(0, 1000)
few = settings(max_examples=20, deadline=None, derandomize=True)


@pytest.mark.parametrize(("g_kind", "w_kind"), KINDS)
@pytest.mark.parametrize(("name", "count"), VARIANTS)
@given(group=groups, step=steps, n=lengths, c=coefficients, seed=seeds)
@few
def test_commit_and_peek(name, count, g_kind, w_kind, group, step, n, c, seed):
    ours = make_case(name, count, g_kind, w_kind, n, seed)
    twin, s, c = ours.twin(), ours.rule.scalars(group, step), F32(c)
    for module, case in ((kernels, ours), (twins, twin)):
        module.peek(case.rule, case.p, case.states, case.g, g_kind, c, s, case.w, w_kind)
    assert_same_case(ours, twin)
    for module, case in ((kernels, ours), (twins, twin)):
        module.commit(case.rule, case.p, case.states, case.g, g_kind, c, s)
    assert_same_case(ours, twin)


@pytest.mark.parametrize(
    ("name", "count", "g_kind", "w_kind"),
    [("adamw", 2, *kinds) for kinds in KINDS] + [(*variant, "bf16", "bf16") for variant in VARIANTS[1:]],
)
@given(group=groups, step=steps, n=lengths, c=coefficients, seed=seeds)
@few
def test_one_pass_kernels(name, count, g_kind, w_kind, group, step, n, c, seed):
    start = make_case(name, count, g_kind, w_kind, n, seed)
    rule = start.rule
    old = Pending(start.g, g_kind, F32(c), rule.scalars(group, step))
    new = Pending(stored(hostile(n, seed + 9, 1e-2), g_kind), g_kind, F32(0.7), rule.scalars(group, step + 1))
    ours, twin = start.copy(), start.twin()
    kernels.advance(rule, ours.p, ours.states, old, new, ours.w, w_kind)
    twin_old, twin_new = (pending._replace(g=as_tensor(pending.g, g_kind)) for pending in (old, new))
    twins.advance(rule, twin.p, twin.states, twin_old, twin_new, twin.w, w_kind)
    assert_same_case(ours, twin)

    ours, twin = start.copy(), start.twin()
    kernels.update(rule, ours.p, ours.states, *old, ours.w, w_kind)
    twins.update(rule, twin.p, twin.states, *twin_old, twin.w, w_kind)
    assert_same_case(ours, twin)

    ours, twin = start.copy(), start.twin()
    hi, lo = np.empty(n, np.uint16), np.empty(n, np.uint16)
    kernels.split(ours.p, hi, lo)
    twin_hi, twin_lo = as_tensor(hi, "bf16"), torch.from_numpy(lo.copy()).view(torch.int16)
    kernels.update_split(rule, hi, lo, ours.states, *old)
    twins.update_split(rule, twin_hi, twin_lo, twin.states, *twin_old)
    assert_same_case(ours, twin)
    assert (hi == twin_hi.view(torch.int16).numpy().view(np.uint16)).all()
    assert (lo == twin_lo.numpy().view(np.uint16)).all()


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
@given(n=lengths, c=coefficients, seed=seeds)
@few
def test_conversions(kind, n, c, seed):
    p = hostile(n, seed)
    g = stored(hostile(n, seed + 1), kind)
    w, twin_w = np.zeros_like(g), as_tensor(np.zeros_like(g), kind)
    kernels.round_into(p, w, kind)
    twins.round_into(torch.from_numpy(p), twin_w, kind)
    assert_same(w, twin_w, kind)
    if kind != "fp32":  # NaN is canonical in both
        assert (w == twin_w.view(torch.int16).numpy().view(np.uint16)).all()

    wide, twin_wide = np.empty(n, F32), torch.empty(n)
    kernels.widen(g, kind, wide)
    twins.widen(as_tensor(g, kind), kind, twin_wide)
    assert_same(wide, twin_wide)

    scaled, twin_scaled = g.copy(), as_tensor(g, kind)
    kernels.scale(scaled, kind, F32(c))
    twins.scale(twin_scaled, kind, F32(c))
    assert_same(scaled, twin_scaled, kind)

    written = w.copy()
    rng = np.random.default_rng(seed)
    chosen = rng.random(n) < 0.2
    written[chosen] = g[chosen]
    twin_p = torch.from_numpy(p.copy())
    assert kernels.reconcile(p, written, kind) == twins.reconcile(twin_p, as_tensor(written, kind), kind)
    assert_same(p, twin_p)


@given(n=lengths, seed=seeds)
@few
def test_split_master(n, seed):
    p = hostile(n, seed)
    hi, lo = np.empty(n, np.uint16), np.empty(n, np.uint16)
    kernels.split(p, hi, lo)
    twin_hi, twin_lo = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
    twins.split(torch.from_numpy(p), twin_hi, twin_lo)
    assert (hi == twin_hi.view(torch.int16).numpy().view(np.uint16)).all()
    assert (lo == twin_lo.numpy().view(np.uint16)).all()
    back, twin_back = np.empty(n, F32), torch.empty(n)
    kernels.join(hi, lo, back)
    twins.join(twin_hi, twin_lo, twin_back)
    assert (back.view(np.uint32) == twin_back.numpy().view(np.uint32)).all()
    before = hi.copy()
    hi[::3] ^= 1
    changed = kernels.reconcile_split(before, hi, lo)
    twin_hi_written = as_tensor(hi, "bf16")
    assert changed == twins.reconcile_split(twin_hi, twin_hi_written, twin_lo) == len(range(0, n, 3))
    assert (lo == twin_lo.numpy().view(np.uint16)).all()


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32", "bf16_as_fp32"])
@pytest.mark.parametrize("n", [0, 1, 1023, 1025, BLOCK, 3 * BLOCK + 77])
@pytest.mark.parametrize("special", [False, True])
def test_norms(kind, n, special):
    values = hostile(n, n) if special else np.random.default_rng(n).standard_normal(n).astype(F32)
    g = stored(values, kind)
    out, twin_out = np.empty(block_count(n)), torch.empty(block_count(n), dtype=torch.float64)
    kernels.sum_squares(g, kind, out)
    twins.sum_squares(as_tensor(g, kind), kind, twin_out)
    np.testing.assert_array_equal(out, twin_out.numpy())
    np.testing.assert_array_equal(kernels.abs_max(g, kind), twins.abs_max(as_tensor(g, kind), kind))


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_twins_ignore_the_default_dtype(default):
    case = make_case("adamw", 2, "bf16", "bf16", 33, 0)
    twin = case.twin()
    s = case.rule.scalars({"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}, 3)
    kernels.update(case.rule, case.p, case.states, case.g, "bf16", F32(0.5), s, case.w, "bf16")
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        twins.update(twin.rule, twin.p, twin.states, twin.g, "bf16", F32(0.5), s, twin.w, "bf16")
    finally:
        torch.set_default_dtype(before)
    assert_same_case(case, twin)


def test_twin_is_the_same_in_chunks(monkeypatch):
    case = make_case("adamw", 2, "fp32", "fp32", 1000, 0)
    whole, parts = case.twin(), case.twin()
    s = case.rule.scalars({"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}, 3)
    twins.update(whole.rule, whole.p, whole.states, whole.g, "fp32", F32(0.5), s, whole.w, "fp32")
    monkeypatch.setattr(twins, "_CHUNK", 64)
    twins.update(parts.rule, parts.p, parts.states, parts.g, "fp32", F32(0.5), s, parts.w, "fp32")
    assert_same_case(parts, whole)


def test_wrong_arrays_are_refused():
    case = make_case("adamw", 2, "bf16", "bf16", 8, 0)
    s = case.rule.scalars({"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}, 1)
    for module, arrays in ((kernels, case), (twins, case.twin())):
        with pytest.raises(StateError, match="gradient"):
            module.commit(arrays.rule, arrays.p, arrays.states, arrays.g[:-1], "bf16", F32(1), s)
        with pytest.raises(StateError, match="gradient"):
            module.commit(arrays.rule, arrays.p, arrays.states, arrays.g, "fp32", F32(1), s)
        with pytest.raises(StateError, match="'w'"):
            module.peek(arrays.rule, arrays.p, arrays.states, arrays.g, "bf16", F32(1), s, arrays.p, "bf16")
        with pytest.raises(StateError, match="master"):
            module.commit(arrays.rule, arrays.p, (arrays.states[0], arrays.g), arrays.g, "bf16", F32(1), s)
        with pytest.raises(StateError, match="16 bits"):
            module.scale(arrays.g, "bf16_as_fp32", F32(1))
