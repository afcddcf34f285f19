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
    recomputed, beyond its input; 0 when unknown. ``slot``: a weight slot.
    """

    unit: int
    resident: int
    activations: int
    slot: int = 0


class Steps(NamedTuple):
    """How steps use the units. ``micro_batches`` of one step; ``slots``: weight slots that the window has already."""

    micro_batches: int = 1
    slots: int = 0


class Placement(NamedTuple):
    """The decision: units to move to the device, units of those that skip recompute, where the inputs of units wait for
    the backward, weight slots to add to the window's, and why, in one paragraph."""

    resident: tuple[int, ...]
    kept_activations: tuple[int, ...]
    activations: Literal["gpu", "host"]
    slots: int
    reason: str


def place(
    units: Sequence[UnitCost],
    spare_bytes: int,
    *,
    recompute: Literal["auto", "always"] = "auto",
    activations: Literal["auto", "gpu", "host"] = "auto",
    boundaries: int = 0,
    steps: Steps = Steps(),  # noqa: B008  # immutable
) -> Placement:
    """Fill ``spare_bytes`` of device memory.

    Inputs of units leave for host memory, which frees ``boundaries`` bytes, when that takes in more units: a unit on
    the device saves its transfers and its update on the host in every step, a boundary costs one transfer each way
    beside compute that takes several times as long.

    First units from the front: theirs are the updates exposed at the tail of a step, and each one moved takes its
    transfers and its share of the host's update away. Only when all are on the device is recompute skipped, from the
    last unit backwards, whose activations live shortest. What is left becomes weight slots: weights that stay in one
    are not sent again before they change. A step of several micro-batches sends them twice in each, and updates them
    once, so that there slots for all units come first: they take an eighth of the memory that moving units takes.
    """
    if activations != "auto":
        where: Literal["gpu", "host"] = activations
    else:
        near, far = (_fill(units, spare_bytes + more, steps) for more in (0, boundaries))
        where = "host" if far > near and (far[0] > near[0] or steps.micro_batches > 1) else "gpu"
    if where == "host":
        spare_bytes += boundaries
    count, slots = _fill(units, spare_bytes, steps)
    resident = [cost.unit for cost in units[:count]]
    moved = sum(cost.resident for cost in units[:count])
    left = max(0, spare_bytes) - moved - slots * _slot(units)
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
        f" ({_gib(moved)} GiB)"
    )
    if where == "host":
        reason += ", inputs of units wait for the backward in host memory"
    if kept:
        reason += f", {len(kept)} of them keep their activations and skip recompute"
    if slots:
        reason += f", {slots} more weight slots let weights stay until they change"
    return Placement(tuple(resident), tuple(kept), where, slots, f"{reason}; {_gib(left)} GiB stay free.")


def _fill(units: Sequence[UnitCost], spare_bytes: int, steps: Steps) -> tuple[int, int]:
    """How many units from the front move, and how many weight slots are added for the others."""
    slot = _slot(units)
    count, left = 0, max(0, spare_bytes)
    if steps.micro_batches > 1:
        left -= slot * max(0, len(units) - steps.slots)
    for cost in units:
        # a unit that moves needs no slot
        freed = slot if steps.micro_batches > 1 and len(units) - count > steps.slots else 0
        if cost.resident > left + freed:
            break
        left -= cost.resident - freed
        count += 1
    left = max(0, spare_bytes) - sum(cost.resident for cost in units[:count])
    lacking = max(0, len(units) - count - steps.slots)
    return count, min(lacking, left // slot) if slot else 0


def _slot(units: Sequence[UnitCost]) -> int:
    return max((cost.slot for cost in units), default=0)


def _gib(nbytes: int) -> str:
    return f"{max(0, nbytes) / 2**30:.1f}"
