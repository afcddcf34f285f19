"""Flat layouts: where each parameter of a unit lies in the unit's host slabs and device slots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

ALIGN_BYTES = 256
SIZE_TOLERANCE = 1.25
"""A buffer serves sizes down to its own divided by this."""


class ParamSpec(NamedTuple):
    """What the layout needs of one parameter.

    ``dtype`` is the user's dtype (and that of the gradient), ``working`` what the device computes with.
    ``is_trainable``: it has a place for a gradient and states, which it keeps when it is frozen again.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    working: torch.dtype
    is_trainable: bool


class Place(NamedTuple):
    """Where one parameter lies: byte offsets of its working weights and gradient, element offset of its states.

    ``gradient`` and ``state`` are -1 for a frozen parameter, which owns neither.
    """

    weight: int
    gradient: int
    state: int


class UnitLayout(NamedTuple):
    """The flat layout of a unit. Sizes in bytes, except ``state_elements`` (fp32 elements per state array)."""

    places: tuple[Place, ...]
    weight_bytes: int
    gradient_bytes: int
    state_elements: int

    @classmethod
    def of(cls, specs: Iterable[ParamSpec]) -> UnitLayout:
        """Lay parameters out one after another, each aligned, in the order given."""
        places: list[Place] = []
        weight = gradient = state = 0
        for spec in specs:
            numel = spec.shape.numel()
            trains = spec.is_trainable
            places.append(Place(weight, gradient if trains else -1, state if trains else -1))
            weight += _aligned(numel * spec.working.itemsize)
            if trains:
                gradient += _aligned(numel * spec.dtype.itemsize)
                state += _aligned(numel * 4) // 4
        return cls(tuple(places), weight, gradient, state)


def size_classes(sizes: Iterable[int], tolerance: float = SIZE_TOLERANCE) -> dict[int, int]:
    """Map each size to its class: the largest size within ``tolerance`` of it, so that slots are interchangeable
    without a vocabulary-sized unit setting the size of a layer's slot (DESIGN 2)."""
    classes: dict[int, int] = {}
    current = 0
    for size in sorted(set(sizes), reverse=True):
        if current == 0 or size * tolerance < current:
            current = size
        classes[size] = current
    return classes


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
