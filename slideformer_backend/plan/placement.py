"""Placement: which units live on the device altogether, and which of those keep their activations (DESIGN 6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

MARGIN = 1 << 29
"""Device bytes left free, beside 2 % of the budget, for what varies between steps."""
EDGE_SHARE = 4
"""Edge units update on the device when one in so many parts of the budget holds them all."""


def edges_may_update_on_device(nbytes: int, budget: int) -> bool:
    """Whether edge units keep their states on the device, where they take ``nbytes`` with weights and gradients.

    Their gradients arrive last and their weights are needed first, so their update is exposed in every step.
    """
    return 0 < nbytes <= budget // EDGE_SHARE


def spare_device_bytes(budget: int, peak: int) -> int:
    """What units may take in, beside a peak that was measured or predicted."""
    return budget - peak - MARGIN - budget // 50


class UnitCost(NamedTuple):
    """What moving one sliding unit to the device takes, in bytes.

    ``resident``: weights, gradient, master and moments. ``activations``: what its forward saves when nothing is
    recomputed, beyond its input; 0 when unknown.
    """

    unit: int
    resident: int
    activations: int


class Placement(NamedTuple):
    """The decision: units to move to the device, units of those that skip recompute, where the inputs of units wait for
    the backward, and why, in one paragraph."""

    resident: tuple[int, ...]
    kept_activations: tuple[int, ...]
    activations: Literal["gpu", "host"]
    reason: str


def place(
    units: Sequence[UnitCost],
    spare_bytes: int,
    *,
    recompute: Literal["auto", "always"] = "auto",
    activations: Literal["auto", "gpu", "host"] = "auto",
    boundaries: int = 0,
) -> Placement:
    """Fill ``spare_bytes`` of device memory.

    Inputs of units leave for host memory, which frees ``boundaries`` bytes, when that takes in more units: a unit on
    the device saves its transfers and its update on the host in every step, a boundary costs one transfer each way
    beside compute that takes several times as long.

    First units from the front: theirs are the updates exposed at the tail of a step, and each one moved takes its
    transfers and its share of the host's update away. Only when all are on the device is recompute skipped, from the
    last unit backwards, whose activations live shortest.
    """
    if activations != "auto":
        where: Literal["gpu", "host"] = activations
    else:
        where = "host" if _fitting(units, spare_bytes + boundaries) > _fitting(units, spare_bytes) else "gpu"
    if where == "host":
        spare_bytes += boundaries
    count = _fitting(units, spare_bytes)
    resident = [cost.unit for cost in units[:count]]
    left = max(0, spare_bytes) - sum(cost.resident for cost in units[:count])
    kept: list[int] = []
    if len(resident) == len(units) and recompute != "always":
        for cost in reversed(units):
            if cost.activations == 0 or cost.activations > left:
                break
            left -= cost.activations
            kept.append(cost.unit)
    reason = (
        f"{_gib(spare_bytes)} GiB of device memory were free beside the measured peak:"
        f" {len(resident)} of {len(units)} units now live on the device with their states and updates"
        f" ({_gib(sum(cost.resident for cost in units[: len(resident)]))} GiB)"
    )
    if where == "host":
        reason += ", inputs of units wait for the backward in host memory"
    if kept:
        reason += f", {len(kept)} of them keep their activations and skip recompute"
    return Placement(tuple(resident), tuple(kept), where, f"{reason}; {_gib(left)} GiB stay free.")


def _fitting(units: Sequence[UnitCost], spare_bytes: int) -> int:
    """How many units from the front fit."""
    count, left = 0, max(0, spare_bytes)
    for cost in units:
        if cost.resident > left:
            break
        left -= cost.resident
        count += 1
    return count


def _gib(nbytes: int) -> str:
    return f"{max(0, nbytes) / 2**30:.1f}"
