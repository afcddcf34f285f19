"""Norms and clips of gradients that lie on the host (DESIGN 4.2, 4.5)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..optim.norm import clip_coefficient
from .guard import plain
from .unit import ONE, ParamRecord


def total_norm(records: Sequence[ParamRecord]) -> float:
    """2-norm of these gradients as they are (recorded clips applied), partial sums added in unit order, fp64."""
    total = 0.0
    for record in sorted(records, key=lambda record: record.unit.index):
        if record.square_sum is not None and record.square_sum.value is not None:
            total += record.square_sum.value
    return float(np.sqrt(total))


def norm_as_torch(records: Sequence[ParamRecord]) -> torch.Tensor | None:
    """The norm by torch's own function, for fp32 gradients in host memory; None where that is not what is there.

    On a CPU-only machine plain PyTorch measures these very tensors: with the same function, in the order given, a
    managed run takes the same clip as the plain run, bit for bit. Low-precision gradients and GPUs have no such
    reference (torch rounds a bf16 norm to bf16 and sums in an order of the device's), and take ``total_norm``.
    """
    gradients = [_host_gradient(record) for record in records]
    present = [gradient for gradient in gradients if gradient is not None]
    if not present or len(present) < len(gradients) or any(g.dtype != torch.float32 for g in present):
        return None
    return torch.nn.utils.get_total_norm(present)


def _host_gradient(record: ParamRecord) -> torch.Tensor | None:
    unit = record.unit
    if unit.updates_on_device:
        with torch._C.DisableTorchFunctionSubclass():
            gradient = record.parameter.grad
        return None if gradient is None else plain(gradient)
    return None if unit.gradient is None else record.gradient_view(unit.gradient.slab.flat)


def clip_to(records: Sequence[ParamRecord], norm: float, max_norm: float) -> bool:
    """Record the clip that ``torch.nn.utils.clip_grad_norm_`` would do; True when it changes anything."""
    coefficient = clip_coefficient(norm, max_norm)
    if coefficient == ONE:
        return False
    for record in records:
        record.coefficient = coefficient
    return True


def as_tensor(norm: float, device: torch.device) -> torch.Tensor:
    """The norm as torch's function returns it: a 0-dim fp32 tensor."""
    return torch.tensor(norm, dtype=torch.float32, device=device)
