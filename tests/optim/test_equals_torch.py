"""The rules against the optimizers they replace, over several steps, on fp32 parameters: bit for bit.

Tolerances, and why:

* ``exp_avg_sq`` (Adam) and ``momentum_buffer`` (SGD) of torch's *fused* kernels: in the last ``n % 16`` elements its
  compiler contracts another product than in its vector loop. One rounding differs per step, so the relative
  difference is at most 1.5 ulp per step. Everywhere else, and always for p in these runs, the bits are equal.
* Adam and AdamW with ``foreach`` or single-tensor: their fp32 square root is not correctly rounded and they order the
  products differently. One step then moves p by at most 4 ulp of the step and 1 ulp of p.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from optim_cases import F32, assert_same

from slideformer_backend.optim import numba_kernels as kernels
from slideformer_backend.optim.lion import Lion
from slideformer_backend.optim.rules import rule_for

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch's CPU kernels contract products where they were compiled for FMA; elsewhere they round twice",
)
AdamW, Adam, SGD = torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD
WHOLE_VECTORS, ODD = 4096, 1003
STEPS = 4


def run(make, n, *, steps=STEPS, gradient=1e-3, first_step=1):
    """(torch's p and states, ours, state names) after the same steps from the same start."""
    generator = torch.Generator().manual_seed(n)
    parameter = torch.nn.Parameter(torch.randn(n, generator=generator) * 0.05)
    optimizer = make([parameter])
    rule, group = rule_for(optimizer), optimizer.param_groups[0]
    p, names = parameter.detach().clone().numpy(), rule.states_used(group)
    states = tuple(np.zeros(n, F32) for _ in names)
    if first_step > 1:
        optimizer.state[parameter] = {name: torch.zeros(n) for name in names}
        optimizer.state[parameter]["step"] = torch.tensor(float(first_step - 1))
    for step in range(first_step, first_step + steps):
        parameter.grad = torch.randn(n, generator=generator) * gradient
        kernels.commit(rule, p, states, parameter.grad.numpy().copy(), "fp32", F32(1), rule.scalars(group, step))
        optimizer.step()
    torchs = [parameter.detach().numpy(), *(optimizer.state[parameter][name].numpy() for name in names)]
    return torchs, [p, *states], names


@pytest.mark.parametrize("cls", [AdamW, Adam])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.0},
        {"weight_decay": 0.1, "maximize": True},
        {"weight_decay": 0.1, "lr": torch.tensor(3e-3)},
        {"betas": (0.5, 0.95), "eps": 1e-3},
        {"betas": (0.3, 0.9)},
        {"betas": (0.0, 0.99)},
        {"lr": 1e6},
        {"lr": 1e-30, "weight_decay": 0.3},
        {"lr": 0.0},
    ],
)
def test_fused_adam(cls, options):
    torchs, ours, _ = run(lambda p: cls(p, fused=True, **options), WHOLE_VECTORS)
    for a, b in zip(ours, torchs, strict=True):
        assert_same(a, b)


def test_decoupled_adam_is_adamw():
    torchs, ours, _ = run(lambda p: Adam(p, fused=True, weight_decay=0.1, decoupled_weight_decay=True), WHOLE_VECTORS)
    for a, b in zip(ours, torchs, strict=True):
        assert_same(a, b)


def test_fused_adamw_late_in_training():
    torchs, ours, _ = run(lambda p: AdamW(p, fused=True, weight_decay=0.1), WHOLE_VECTORS, first_step=100_000)
    for a, b in zip(ours, torchs, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("gradient", [1e-40, 1e-20, 1e18, 1e30])
def test_fused_adamw_extreme_gradients(gradient):
    torchs, ours, _ = run(lambda p: AdamW(p, fused=True, weight_decay=0.1), WHOLE_VECTORS, gradient=gradient)
    for a, b in zip(ours, torchs, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("cls", [AdamW, Adam])
def test_fused_adam_odd_length(cls):
    torchs, ours, _ = run(lambda p: cls(p, fused=True, weight_decay=0.1), ODD)
    assert_same(ours[0], torchs[0])
    assert_same(ours[1], torchs[1])
    vectors = ODD // 16 * 16
    assert_same(ours[2][:vectors], torchs[2][:vectors])
    np.testing.assert_allclose(ours[2][vectors:], torchs[2][vectors:], rtol=1.5 * STEPS * 2**-23, atol=0)


@pytest.mark.parametrize("cls", [AdamW, Adam])
@pytest.mark.parametrize("foreach", [True, False])
def test_other_adam_implementations_differ_by_rounding_only(cls, foreach):
    lr = 1e-3
    torchs, ours, _ = run(lambda p: cls(p, lr=lr, foreach=foreach, weight_decay=0.1), WHOLE_VECTORS, steps=1)
    error = np.abs(ours[0] - torchs[0])
    assert (error <= 4 * 2**-23 * lr + np.spacing(np.abs(torchs[0]))).all()
    assert (ours[0] != torchs[0]).mean() < 0.1


@pytest.mark.parametrize("implementation", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
        {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.3, "maximize": True},
        {"momentum": 0.9, "lr": torch.tensor(0.1)},
        {"momentum": 1e-30, "lr": 1e20},
    ],
)
@pytest.mark.parametrize("n", [WHOLE_VECTORS, ODD])
def test_sgd(implementation, options, n):
    torchs, ours, names = run(lambda p: SGD(p, **{"lr": 0.1, **options, **implementation}), n)
    assert names == (("momentum_buffer",) if "momentum" in options else ())
    whole = n // 16 * 16 if "fused" in implementation else n
    for a, b in zip(ours, torchs, strict=True):
        assert_same(a[:whole], b[:whole])
        np.testing.assert_allclose(a[whole:], b[whole:], rtol=1.5 * STEPS * 2**-23, atol=1e-7 * 1e-3)


@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1}, {"maximize": True, "betas": (0.95, 0.98)}, {"lr": 1e10}]
)
@pytest.mark.parametrize("n", [WHOLE_VECTORS, ODD])
def test_lion(options, n):
    torchs, ours, names = run(lambda p: Lion(p, **options), n)
    assert names == ("exp_avg",)
    for a, b in zip(ours, torchs, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}])
def test_lion_of_lion_pytorch(options):
    lion_pytorch = pytest.importorskip("lion_pytorch", reason="lion_pytorch is optional: its users bring it")
    torchs, ours, _ = run(lambda p: lion_pytorch.Lion(p, **options), ODD)
    for a, b in zip(ours, torchs, strict=True):
        assert_same(a, b)


def test_lion_closure_and_arguments():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = Lion([p], lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = (p * 2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 6.0
    assert torch.equal(p.detach(), torch.full((3,), 0.5))
    for bad in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match="Invalid"):
            Lion([p], **bad)


def test_zero_weight_decay_keeps_signed_zeros_and_infinities():
    """0·p must not be added: it would turn inf into NaN and -0 into 0, which torch does not."""
    start = np.array([np.inf, -np.inf, -0.0, 1.0], F32)
    for make in (lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: Adam(p, lr=0.1, fused=True, betas=(0.0, 0.9))):
        parameter = torch.nn.Parameter(torch.from_numpy(np.tile(start, 16)))
        parameter.grad = torch.from_numpy(np.tile(np.array([1.0, -1.0, -0.0, -0.0], F32), 16))
        optimizer = make([parameter])
        rule, group = rule_for(optimizer), optimizer.param_groups[0]
        p, names = parameter.detach().clone().numpy(), rule.states_used(group)
        states = tuple(np.zeros(64, F32) for _ in names)
        kernels.commit(rule, p, states, parameter.grad.numpy().copy(), "fp32", F32(1), rule.scalars(group, 1))
        optimizer.step()
        assert_same(p, parameter.detach().numpy())
        for name, state in zip(names, states, strict=True):
            assert_same(state, optimizer.state[parameter][name].numpy())
