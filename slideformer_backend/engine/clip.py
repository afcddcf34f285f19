"""Norms and clips of gradients that lie on the host (DESIGN 4.2, 4.5)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..optim.norm import clip_coefficient
from .unit import ONE, ParamRecord


def total_norm(records: Sequence[ParamRecord]) -> float:
    """2-norm of these gradients as they are (recorded clips applied), partial sums added in unit order, fp64."""
    total = 0.0
    for record in sorted(records, key=lambda record: record.unit.index):
        if record.square_sum is not None and record.square_sum.value is not None:
            total += record.square_sum.value
    return float(np.sqrt(total))


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
