"""Norms of gradients that do not depend on how the work was divided.

A slice gives fp64 partial sums over fixed blocks of :data:`BLOCK` elements (:func:`numba_kernels.sum_squares`, or the
twin). They are added in unit order, so neither the number of workers nor where a unit is updated changes a clip.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

BLOCK = 65536
"""Elements per partial sum. A slice boundary inside a gradient must be a multiple of it."""
LANES = 1024
"""Partial sums inside a block: element i goes to lane i % LANES; lanes are then folded in halves. Fixed: it is part of
the definition of the norm."""


def block_count(n: int) -> int:
    """Partial sums that a gradient of ``n`` elements needs."""
    return -(-n // BLOCK)


def total_norm(partials: Iterable[NDArray[np.float64]]) -> float:
    """Euclidean norm of all gradients from their partial sums of squares, in unit order; not finite if any is."""
    total = 0.0
    for sums in partials:
        for value in sums.tolist():
            total += value
    return math.sqrt(total) if total == total else total


def clip_coefficient(norm: float, max_norm: float) -> np.float32:
    """What torch's ``clip_grad_norm_`` multiplies gradients with: min(1, max_norm / (norm + 1e-6)), for an fp32 norm.

    Computed in fp32 with torch's operations (it divides by multiplying with the reciprocal). NaN if the norm is NaN, as
    in torch; 0 if the norm is inf, and then 0·inf is NaN: whether such a step is taken is not decided here.
    """
    with np.errstate(all="ignore"):
        ratio: np.float32 = np.float32(1.0) / (np.float32(norm) + np.float32(1e-6)) * np.float32(max_norm)
    return np.float32(1.0) if float(ratio) > 1.0 else ratio
