"""Which units keep their optimizer states on NVMe: no more than must, spread evenly over the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .ledger import STAGED_UNITS


class Spill(NamedTuple):
    """The decision.

    Attributes:
        units: numbers of the units, ascending.
        host: bytes of states that stay on the host.
        staged: units whose states are on their way through host memory at once; ``staging``: bytes of that.
        nvme: bytes on NVMe.
        host_missing, nvme_missing: bytes that lack even so; 0 when it fits.
    """

    units: tuple[int, ...]
    host: int
    staged: int
    staging: int
    nvme: int
    host_missing: int
    nvme_missing: int

    @property
    def fits(self) -> bool:
        """Whether all states have a place."""
        return self.host_missing == 0 and self.nvme_missing == 0


def spill_states(
    sizes: Sequence[int], host: int, nvme: int, *, edges: Sequence[int] = (), staged: int = STAGED_UNITS
) -> Spill:
    """The fewest units whose states must go so that the others' fit.

    They are spread evenly: reads and writes then go on through the whole backward, beside updates of units that need
    none, where neighbours would queue for the drive and leave it idle later. Edge units go last: their update is the
    one that a step waits for. Where all of that is not enough, fewer units are on their way at once.

    Args:
        sizes: bytes of states of each sliding unit, in forward order.
        host: host bytes for states, staging included.
        nvme: bytes free on NVMe.
        edges: sizes of edge units, which count on from the sliding ones.
        staged: units whose spilled states are in host memory at once.
    """
    everything = (*sizes, *edges)
    choices = [spread(count, len(sizes)) for count in range(len(sizes) + 1)]
    choices += [tuple(range(len(sizes) + count)) for count in range(1, len(edges) + 1)]
    for at_once in range(staged, 0, -1):
        for units in choices:
            found = _spill(everything, units, host, nvme, at_once)
            if found.host_missing == 0:
                return found
    return _spill(everything, choices[-1], host, nvme, 1)


def spill_share(
    sizes: Sequence[int], share: float, host: int, nvme: int, *, edges: Sequence[int] = (), staged: int = STAGED_UNITS
) -> Spill:
    """As :func:`spill_states`, for a share (0 to 1) of the units that somebody has chosen."""
    count = min(len(sizes), math.ceil(share * len(sizes) - 1e-9))
    units = spread(count, len(sizes))
    if count == len(sizes):
        units = tuple(range(len(sizes) + len(edges)))
    found = [_spill((*sizes, *edges), units, host, nvme, at_once) for at_once in range(staged, 0, -1)]
    return next((spill for spill in found if spill.host_missing == 0), found[-1])


def spread(count: int, total: int) -> tuple[int, ...]:
    """``count`` of ``total`` positions, evenly spaced."""
    return tuple((2 * number + 1) * total // (2 * count) for number in range(count))


def _spill(sizes: Sequence[int], units: tuple[int, ...], host: int, nvme: int, staged: int) -> Spill:
    chosen = set(units)
    away = [size for number, size in enumerate(sizes) if number in chosen]
    kept = sum(sizes) - sum(away)
    staging = max(away, default=0) * min(staged, len(away))
    return Spill(units, kept, staged, staging, sum(away), max(0, kept + staging - host), max(0, sum(away) - nvme))
