"""SwiGLU and GeGLU against float64 truth and plain torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from slideformer_backend.kernels import gated
from slideformer_backend.kernels.gated import GateConfig, geglu, swiglu
from tests.kernels.truth import DEVICE, check

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = {
    "swiglu": (swiglu, lambda g, u: F.silu(g) * u),
    "geglu tanh": (geglu, lambda g, u: F.gelu(g, approximate="tanh") * u),
    "geglu erf": (lambda g, u: geglu(g, u, "none"), lambda g, u: F.gelu(g) * u),
}


def run(function, g, u):
    g, u = g.clone().requires_grad_(), u.clone().requires_grad_()
    out = function(g, u)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    out.backward(upstream.to(DEVICE, out.dtype))
    return [out.detach(), g.grad, u.grad]


def compare(kind, g, u):
    ours, torchs = KINDS[kind]
    for name, *values in zip(
        ("out", "gate", "up"), run(ours, g, u), run(torchs, g, u), run(torchs, g.double(), u.double()), strict=True
    ):
        check(f"{kind} {name}", *values)


def inputs(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(*shape, generator=generator) * 3).to(DEVICE, dtype) for _ in range(2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 130), (2, 2100)], ids=str)
def test_equals_truth(shape, kind, dtype):
    compare(kind, *inputs(*shape, dtype=dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_values(kind):
    g = torch.tensor([-torch.inf, -1e4, -20.0, -1e-3, 0.0, 1e-3, 20.0, 1e4], device=DEVICE)
    ours, torchs = KINDS[kind]
    found, base = run(ours, g[1:], torch.ones_like(g[1:])), run(torchs, g[1:], torch.ones_like(g[1:]))
    for mine, plain in zip(found, base, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_halves_of_one_projection(kind):
    """Phi3's gate_up: both halves are read where they lie, and their gradients arrive next to each other."""
    both = torch.randn(3, 4, 80, device=DEVICE)
    ours, torchs = KINDS[kind]
    grads = []
    for function in (ours, torchs):
        leaf = both.clone().requires_grad_()
        function(*leaf.chunk(2, -1)).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


def test_gradients_of_halves_are_halves():
    gate, up = torch.randn(6, 80, device=DEVICE).chunk(2, -1)
    dgate, dup = gated.launch_backward(torch.randn(6, 40, device=DEVICE), gate, up, gated.SILU)
    assert gated._are_halves(dgate, dup)


def test_no_element():
    compare("swiglu", *inputs(0, 8))


def test_configurations(monkeypatch):
    monkeypatch.setattr(gated, "launch_config", lambda columns: GateConfig(64, 1))
    compare("swiglu", *inputs(5, 150))


def test_random_shapes():
    generator = torch.Generator().manual_seed(9)
    for seed in range(60):
        rows, columns = (int(torch.randint(1, most, (), generator=generator)) for most in (9, 400))
        compare(list(KINDS)[seed % 3], *inputs(rows, columns, dtype=DTYPES[seed // 3 % 3], seed=seed))


def test_other_dtypes_take_the_twin():
    g, u = inputs(3, 4)
    assert swiglu(g.double(), u.double()).dtype == torch.float64
    torch.testing.assert_close(swiglu(g, u.bfloat16()), F.silu(g) * u.bfloat16().float())
