"""``strategy: lsp``: which matrices get a core, and what core and projector take. Formulas of arXiv 2406.10181."""

from __future__ import annotations

from collections.abc import Sequence

from ..lsp_settings import LspSettings

LEAST_GAIN = 2
"""A matrix is compressed if its core has at most this part of its elements; else the core is not worth an error."""


def is_compressed(shape: Sequence[int], settings: LspSettings) -> bool:
    """Whether a parameter of this shape is a matrix whose core is small enough to be worth it."""
    return len(shape) == 2 and all(shape) and core_elements(shape, settings) * LEAST_GAIN <= shape[0] * shape[1]


def core_elements(shape: Sequence[int], settings: LspSettings) -> int:
    """Elements of the core of a matrix."""
    return min(shape[0], settings.rank) * min(shape[1], settings.rank)


def factor_bytes(shape: Sequence[int], settings: LspSettings) -> int:
    """Device bytes of the two factors of a matrix."""
    total = 0
    for rows in shape:
        rank = min(rows, settings.rank)
        if settings.projector == "orthonormal":
            total += 4 * rows * rank
        else:
            nonzeros = 1 if rows <= settings.rank else min(settings.nonzeros, rank)
            total += 12 * rows * nonzeros + 4 * (rank + 1)
    return total


def work_bytes(shape: Sequence[int], dtype_bytes: int, settings: LspSettings) -> int:
    """Device bytes that compressing a gradient, or learning a projector from it, takes at its peak, the gradient
    included.

    Learning holds the gradient in fp32, both factors dense, one product with a factor, the slopes of these three, and
    matrices of the size of the core; error feedback a few copies of the gradient.
    """
    m, n = shape
    gradient = m * n * dtype_bytes
    if settings.projector == "orthonormal":
        return gradient + 12 * m * n
    rank = settings.rank
    return gradient + 4 * m * n + 8 * rank * (m + n) + 8 * rank * m + 32 * core_elements(shape, settings)
