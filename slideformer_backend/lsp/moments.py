"""Moments of Adam and its kin across a change of projector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

FIRST = ("exp_avg", "momentum_buffer")
SECOND = "exp_avg_sq"


class Beta(NamedTuple):
    """Decay rates of the moments, and how many steps they have seen."""

    first: float
    second: float
    steps: int


def carry_moments(
    states: Mapping[str, torch.Tensor], overlaps: tuple[torch.Tensor, torch.Tensor], beta: Beta | None = None
) -> dict[str, torch.Tensor]:
    """Moments in the coordinates of a new projector.

    Args:
        states: by torch's names, fp32 [p, q]; their step count stays what it is.
        overlaps: A [p', p] and B [q, q'] of :meth:`GradientProjector.overlaps`.
        beta: for the rotation of LDAdam (arXiv 2410.16103, algorithm 2), which takes the variance of each coordinate
            with the mean apart: V ← |A∘² (V - M∘²) B∘² + (A M B)∘²| on bias-corrected moments. None: V ← A∘² V B∘²
            (arXiv 2406.10181, section 3).

    Returns:
        fp32 [p', q'] by the same names: first moments M ← A M B.
    """
    first, second = overlaps
    carried = {name: first @ states[name] @ second for name in FIRST if name in states}
    if SECOND not in states:
        return carried
    squares = first.square(), second.square()
    spread = states[SECOND]
    if beta is None or "exp_avg" not in states or beta.steps < 1:
        carried[SECOND] = squares[0] @ spread @ squares[1]
        return carried
    seen = 1.0 - beta.first**beta.steps, 1.0 - beta.second**beta.steps
    mean = states["exp_avg"] / seen[0]
    spread = squares[0] @ (spread / seen[1] - mean.square()) @ squares[1]
    carried[SECOND] = seen[1] * (spread + (first @ mean @ second).square()).abs()
    return carried
