"""The twins on a GPU give the bits that numba gives on the CPU: where a unit is updated changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from optim_cases import F32, as_tensor, assert_same, assert_same_case, hostile, make_case, stored

from slideformer_backend.optim import numba_kernels as kernels
from slideformer_backend.optim import twins
from slideformer_backend.optim.norm import BLOCK, block_count

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GROUP = {
    "lr": 1e-3,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "momentum": 0.9,
    "dampening": 0.3,
    "nesterov": False,
}
N = 100_003


@pytest.mark.parametrize(("g_kind", "w_kind"), [("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32")])
@pytest.mark.parametrize(("name", "count"), [("adamw", 2), ("adam", 2), ("sgd", 0), ("sgd", 1), ("lion", 1)])
@pytest.mark.parametrize("step", [1, 7])
def test_update(name, count, g_kind, w_kind, step):
    ours = make_case(name, count, g_kind, w_kind, N, seed=step)
    twin, s = ours.twin("cuda"), ours.rule.scalars(GROUP, step)
    for module, case in ((kernels, ours), (twins, twin)):
        module.update(case.rule, case.p, case.states, case.g, g_kind, F32(0.3456789), s, case.w, w_kind)
    assert_same_case(ours, twin)


def test_split_master():
    p = hostile(N, 3)
    hi, lo = np.empty(N, np.uint16), np.empty(N, np.uint16)
    kernels.split(p, hi, lo)
    twin_hi = torch.empty(N, dtype=torch.bfloat16, device="cuda")
    twin_lo, back = torch.empty(N, dtype=torch.int16, device="cuda"), torch.empty(N, device="cuda")
    twins.split(torch.from_numpy(p).cuda(), twin_hi, twin_lo)
    twins.join(twin_hi, twin_lo, back)
    assert (hi == twin_hi.view(torch.int16).cpu().numpy().view(np.uint16)).all()
    assert (lo == twin_lo.cpu().numpy().view(np.uint16)).all()
    assert_same(back, p)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
def test_conversions_and_norms(kind):
    n = 2 * BLOCK + 77
    g = stored(np.random.default_rng(0).standard_normal(n).astype(F32), kind)
    twin = as_tensor(g, kind).cuda()
    out, twin_out = np.empty(block_count(n)), torch.empty(block_count(n), dtype=torch.float64, device="cuda")
    kernels.sum_squares(g, kind, out)
    twins.sum_squares(twin, kind, twin_out)
    np.testing.assert_array_equal(out, twin_out.cpu().numpy())
    assert kernels.abs_max(g, kind) == twins.abs_max(twin, kind)
    kernels.scale(g, kind, F32(0.3456789))
    twins.scale(twin, kind, F32(0.3456789))
    assert_same(g, twin, kind)
    p = hostile(n, 1)
    twin_p, written = torch.from_numpy(p).cuda(), stored(hostile(n, 2), kind)
    assert kernels.reconcile(p, written, kind) == twins.reconcile(twin_p, as_tensor(written, kind).cuda(), kind)
    assert_same(p, twin_p)
