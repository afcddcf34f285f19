"""Placement: which units live on the device altogether, and which of those keep their activations (DESIGN 6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

MARGIN = 1 << 29
"""Device bytes left free, beside 2 % of the budget, for what varies between steps."""
EDGE_SHARE = 4
"""Edge units update on the device when one in so many parts of the budget holds them all."""
MANY_MICRO_BATCHES = 8
"""From so many on a step should win more by a forward saved in each than by an update saved once: by the times of a
3B layer at 32,768 tokens on an H200, 9 ms and 4 GiB against 29 ms and 1.5 GiB. Not measured as a whole."""


def edges_may_update_on_device(nbytes: int, budget: int) -> bool:
    """Whether edge units keep their states on the device, where they take ``nbytes`` with weights and gradients.

    Their gradients arrive last and their weights are needed first, so their update is exposed in every step.
    """
    return 0 < nbytes <= budget // EDGE_SHARE


def spare_device_bytes(budget: int, peak: int) -> int:
    """What units may take in, beside a peak that was measured or predicted."""
    return budget - peak - MARGIN - budget // 50


Where = Literal["gpu", "host", "nvme"]
"""Where inputs of units wait for the backward."""


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
    activations: Where
    slots: int
    reason: str


def place(
    units: Sequence[UnitCost],
    spare_bytes: int,
    *,
    recompute: Literal["auto", "always"] = "auto",
    activations: Where | Literal["auto"] = "auto",
    boundaries: int = 0,
    steps: Steps = Steps(),  # noqa: B008  # immutable
    away: Where = "host",
) -> Placement:
    """Fill ``spare_bytes`` of device memory.

    Inputs of units leave, for host memory or where else ``away`` says, which frees ``boundaries`` bytes, when that
    takes in more units: a unit on the device saves its transfers and its update on the host in every step, a boundary
    costs one transfer each way beside compute that takes several times as long.

    First units from the front: theirs are the updates exposed at the tail of a step, and each one moved takes its
    transfers and its share of the host's update away. What is left becomes weight slots: weights that stay in one are
    not sent again before they change. Recompute is skipped where weights stay from forward to backward, that is once
    every unit is on the device or has a slot, from the last unit backwards, whose activations live shortest.

    A step of several micro-batches sends weights twice in each and updates them once, so that there slots for all
    come first: they take an eighth of the memory that moving units takes. It recomputes in each, too: with many, or
    with small ones, skipping that comes next.
    """
    if activations != "auto":
        where: Where = activations
    else:
        near, far = (_fill(units, spare_bytes + more, recompute, steps) for more in (0, boundaries))
        gains = far[:2] > near[:2] and (far.moved > near.moved or steps.micro_batches > 1)
        where = away if gains else "gpu"
    if where != "gpu":
        spare_bytes += boundaries
    filled = _fill(units, spare_bytes, recompute, steps)
    resident = [cost.unit for cost in units[: filled.moved]]
    kept = [cost.unit for cost in reversed(units[len(units) - filled.kept :])]
    moved = sum(cost.resident for cost in units[: filled.moved])
    reason = (
        f"{_gib(spare_bytes)} GiB of device memory were free beside the measured peak:"
        f" {len(resident)} of {len(units)} units now live on the device with their states and updates"
        f" ({_gib(moved)} GiB)"
    )
    if where != "gpu":
        reason += f", inputs of units wait for the backward {'in host memory' if where == 'host' else 'on NVMe'}"
    if filled.slots:
        reason += f", {filled.slots} more weight slots let weights stay until they change"
    if kept:
        reason += f", {len(kept)} units keep their activations and skip recompute"
    return Placement(tuple(resident), tuple(kept), where, filled.slots, f"{reason}; {_gib(filled.left)} GiB stay free.")


class _Filled(NamedTuple):
    """Units from the front that move, weight slots added for the others, units from the back that skip recompute, and
    bytes left."""

    moved: int
    slots: int
    kept: int
    left: int


def _fill(units: Sequence[UnitCost], spare_bytes: int, recompute: Literal["auto", "always"], steps: Steps) -> _Filled:
    left, slot, count = max(0, spare_bytes), _slot(units), len(units)
    moved = slots = kept = 0
    lacking = max(0, count - steps.slots)
    repeats = steps.micro_batches > 1
    if repeats and slot:
        slots = min(lacking, left // slot)
        left -= slots * slot
    if repeats and slots == lacking and recompute != "always" and _keep_first(units, steps):
        kept = _keeping(units, left)
        left -= sum(cost.activations for cost in units[count - kept :])
    for cost in units:
        freed = slot if slots and slots == count - moved - steps.slots else 0  # a unit that moves needs no slot
        if (slots < lacking and repeats) or cost.resident > left + freed:
            break
        left -= cost.resident - freed
        slots -= bool(freed)
        moved += 1
        lacking = max(0, count - moved - steps.slots)
    if slot and slots < lacking:
        more = min(lacking - slots, left // slot)
        slots, left = slots + more, left - more * slot
    if slots == lacking and recompute != "always" and not kept:
        kept = _keeping(units, left)
        left -= sum(cost.activations for cost in units[count - kept :])
    return _Filled(moved, slots, kept, left)


def _keep_first(units: Sequence[UnitCost], steps: Steps) -> bool:
    """Whether memory is better spent on activations than on moving units: these save one forward per micro-batch, whose
    time goes with their size, or that of launching it; those an update per step."""
    small = all(MANY_MICRO_BATCHES * cost.activations <= cost.resident for cost in units)
    return steps.micro_batches >= MANY_MICRO_BATCHES or small


def _keeping(units: Sequence[UnitCost], left: int) -> int:
    """How many units from the back may keep their activations."""
    kept = 0
    for cost in reversed(units):
        if cost.activations == 0 or cost.activations > left:
            break
        left -= cost.activations
        kept += 1
    return kept


def _slot(units: Sequence[UnitCost]) -> int:
    return max((cost.slot for cost in units), default=0)


def _gib(nbytes: int) -> str:
    return f"{max(0, nbytes) / 2**30:.1f}"
