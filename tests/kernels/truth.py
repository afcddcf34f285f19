"""Comparison with float64 truth: a kernel may err as much as plain torch does in the same dtype, plus a tolerance."""

from __future__ import annotations

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Relative error (norm of the difference over norm of the truth) allowed beyond plain torch's own, by dtype. fp32: sums
# in another order. bf16, fp16: one unit roundoff (2^-8, 2^-11): in a small case few values carry the norm, and how each
# of them happens to round differs where an upstream gradient is applied after the rounding instead of before. That the
# error is not larger on average has its own tests.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``truth`` (or over 1 for a truth of zeros), in float64."""
    assert found.shape == truth.shape
    scale = truth.double().norm().item()
    return (found.double() - truth.double()).norm().item() / (scale if scale > 0 else 1.0)


def check(name: str, found: torch.Tensor | None, plain: torch.Tensor | None, truth: torch.Tensor | None) -> None:
    """``found`` is as near to ``truth`` as ``plain`` is, plus the tolerance of the dtype of ``plain``."""
    if truth is None:
        assert found is None, f"{name}: a gradient where there is none"
        return
    assert found is not None, f"{name}: no result"
    assert plain is not None
    assert found.dtype == plain.dtype, f"{name}: {found.dtype}, expected {plain.dtype}"
    mine, torchs = error(found, truth), error(plain, truth)
    allowed = torchs + TOLERANCE[plain.dtype]
    assert mine <= allowed, f"{name}: relative error {mine:.2e}, plain torch's {torchs:.2e}, allowed {allowed:.2e}"
