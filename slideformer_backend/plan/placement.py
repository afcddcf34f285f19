"""Placement: which units live on the device altogether, and which of those keep their activations (DESIGN 6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

MARGIN = 1 << 29
"""Device bytes left free, beside 2 % of the budget, for what varies between steps."""
EDGE_SHARE = 4
"""Edge units update on the device when one in so many parts of the budget holds them all."""
MANY_MICRO_BATCHES = 8
"""From so many on a step should win more by a forward saved in each than by an update saved once: by the times of a
3B layer at 32,768 tokens on an H200, 9 ms and 4 GiB against 29 ms and 1.5 GiB. Not measured as a whole."""
GRADIENTS_FIRST = 3
"""From so many micro-batches on gradient slots come before what spares the GPU work. One saves in each but the first a
transfer to the device that compute waits for: 21 ms for each GiB of slots at 50 GB/s, by that rate; a unit on the
device saves a step's update, 19 ms for each GiB by the times above, recompute less. On an H200 at 3B, 16 micro-batches
of 2,048 tokens, compute waited for such transfers for a quarter of the time, with five slots and three units on the
device."""
LAYER_SHARE = 0.8
"""What layers compute of a step, at least; a quarter of that is recompute, half backward."""
LEAST_MOVED = 2
"""Units on the device behind whose backward and next forward the last update of a step hides."""
WAITED_SHARE = 0.75
"""Share of such a step from which they must be what it waits for: forward and updates then take all of it in turn."""


def edges_may_update_on_device(nbytes: int, budget: int) -> bool:
    """Whether edge units keep their states on the device, where they take ``nbytes`` with weights and gradients.

    Their gradients arrive last and their weights are needed first, so their update is exposed in every step.
    """
    return 0 < nbytes <= budget // EDGE_SHARE


def spare_device_bytes(budget: int, peak: int) -> int:
    """What units may take in, beside a peak that was measured or predicted."""
    return budget - peak - MARGIN - budget // 50


def begin_away(nbytes: int, room: int, host_room: int) -> bool:
    """Whether inputs of units, which take ``nbytes``, wait in host memory from the first step on: where the device has
    ``room`` when a forward begins, half of it is for the loss and the backward of a unit, which are not known yet."""
    return nbytes > room // 2 and nbytes <= host_room // 2


Where = Literal["gpu", "host", "nvme"]
"""Where inputs of units wait for the backward."""


class UnitCost(NamedTuple):
    """What moving one sliding unit to the device takes, in bytes.

    ``resident``: weights, gradient, master and moments. ``activations``: what its forward saves when nothing is
    recomputed, beyond its input; 0 when unknown. ``slot``: a weight slot; ``gradient``: a gradient slot. ``boundary``:
    its input, which stays with its activations where those of others leave.
    """

    unit: int
    resident: int
    activations: int
    slot: int = 0
    gradient: int = 0
    boundary: int = 0


class Steps(NamedTuple):
    """How steps use the units. ``micro_batches`` of one step; ``slots``: weight slots that the window has already;
    ``busiest``: the share of a step in which host or link, whichever is busier, works while no unit is on the device
    and no update has to be repeated; None: not known. ``recomputed``: device bytes of a recompute by which the peak of
    a step lies above what it held until its backward reached the first unit."""

    micro_batches: int = 1
    slots: int = 0
    busiest: float | None = None
    recomputed: int = 0


class Placement(NamedTuple):
    """The decision: units to move to the device, units of those that skip recompute, where the inputs of units wait for
    the backward, weight slots to add to the window's, and why, in one paragraph; gradient slots to add."""

    resident: tuple[int, ...]
    kept_activations: tuple[int, ...]
    activations: Where
    slots: int
    reason: str
    gradients: int = 0


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

    Inputs of units leave, for host memory or where else ``away`` says, which frees ``boundaries`` bytes, where they
    have no room, or when that takes in more units: a unit on the device saves its transfers and its update on the host
    in every step, a boundary costs one transfer each way beside compute that takes several times as long.

    First units from the front: theirs are the updates exposed at the tail of a step, and each one moved takes its
    transfers and its share of the host's update away. Where the GPU is what a step waits for, only as many as host and
    link need to keep pace with it; then units from the back keep their activations, each in a weight slot of its own
    from forward to backward, which takes a recompute out of the GPU's work; then more move.

    The first unit that keeps its activations takes what its recompute would have taken at the same moment, the others'
    come on top.

    What is left becomes weight slots: weights that stay in one are not sent again before they change. Once every unit
    is on the device or has a slot, recompute is skipped with what is still left, from the last unit backwards, whose
    activations live shortest.

    A step of several micro-batches sends weights twice in each and updates them once, so that there slots for all
    come first: they take an eighth of the memory that moving units takes. Its gradients go to the host and back for
    each further micro-batch: where host or link is what it waits for, or with more than two micro-batches, gradient
    slots come next, in which they stay; else they come last. It recomputes in each, too: with many, or with small ones,
    skipping that comes next.
    """
    if activations != "auto":
        where: Where = activations
    else:
        near = _fill(_all_stay(units), spare_bytes, recompute, steps)
        far = _fill(units, spare_bytes + boundaries, recompute, steps)
        is_short = spare_bytes < 0 < boundaries
        where = away if is_short or _worth(far, units, steps) > _worth(near, units, steps) else "gpu"
    if where == "gpu":
        units = _all_stay(units)
    else:
        spare_bytes += boundaries
    filled = _fill(units, spare_bytes, recompute, steps)
    resident = [cost.unit for cost in units[: filled.moved]]
    kept = [cost.unit for cost in reversed(units[len(units) - filled.kept :])]
    moved = sum(cost.resident for cost in units[: filled.moved])
    reason = (
        f"{_gib(spare_bytes)} GiB of device memory were free beside the measured peak{_pace(steps)}:"
        f" {len(resident)} of {len(units)} units now live on the device with their states and updates"
        f" ({_gib(moved)} GiB)"
    )
    if where != "gpu":
        reason += f", inputs of units wait for the backward {'in host memory' if where == 'host' else 'on NVMe'}"
    if filled.slots:
        reason += f", {filled.slots} more weight slots let weights stay until they change"
    if filled.gradients:
        reason += f", {filled.gradients} more gradient slots let gradients wait for the next micro-batch"
    if kept:
        reason += f", {len(kept)} units keep their activations and skip recompute"
    reason += f"; {_gib(filled.left)} GiB stay free."
    return Placement(tuple(resident), tuple(kept), where, filled.slots, reason, filled.gradients)


class _Filling:
    """Device memory as it is given out: units from the front that move, weight and gradient slots added for the others,
    units from the back that skip recompute, and bytes left."""

    def __init__(self, units: Sequence[UnitCost], spare_bytes: int, steps: Steps) -> None:
        self.moved = self.slots = self.gradients = self.kept = 0
        self.left = max(0, spare_bytes)
        self._units = units
        self._slot = max((cost.slot for cost in units), default=0)
        self._gradient = max((cost.gradient for cost in units), default=0)
        self._own = steps.slots
        self._recomputed = steps.recomputed

    @property
    def lacking(self) -> int:
        """Slots that would still give every unit that slides one of its own."""
        return max(0, len(self._units) - self.moved - self._own - self.slots)

    def add_slots(self) -> None:
        """As many as lack."""
        if self._slot:
            more = min(self.lacking, self.left // self._slot)
            self.slots += more
            self.left -= more * self._slot

    def add_gradients(self) -> None:
        """As many gradient slots as units that slide could leave their gradients in."""
        if self._gradient:
            more = min(len(self._units) - self.moved - self.gradients, self.left // self._gradient)
            self.gradients += more
            self.left -= more * self._gradient

    def move(self, most: int) -> None:
        """Up to ``most`` units in all."""
        for cost in self._units[self.moved : most]:
            sliding = len(self._units) - self.moved
            needless = bool(self.slots) and self.slots == sliding - self._own
            empty = bool(self.gradients) and self.gradients == sliding
            freed = needless * self._slot + empty * self._gradient  # a unit that moves needs no slots
            if cost.resident > self.left + freed:
                break
            self.left -= cost.resident - freed
            self.slots -= needless
            self.gradients -= empty
            self.moved += 1

    def keep(self, most: int) -> None:
        """Up to ``most`` units in all, each with a slot that it holds from forward to backward."""
        count = len(self._units)
        for cost in reversed(self._units[count - most : count - self.kept]):
            lacks = self.lacking > 0
            counted = 0 if self.kept else min(cost.activations, self._recomputed)  # in the peak already
            needed = cost.activations - counted + cost.boundary + (self._slot if lacks else 0)
            if cost.activations == 0 or needed > self.left:
                break
            self.left -= needed
            self.slots += lacks
            self.kept += 1


def _fill(units: Sequence[UnitCost], spare_bytes: int, recompute: Literal["auto", "always"], steps: Steps) -> _Filling:
    filling, count = _Filling(units, spare_bytes, steps), len(units)
    repeats, may_keep = steps.micro_batches > 1, recompute != "always"
    if repeats:
        filling.add_slots()
        if filling.lacking:
            return filling
        if steps.micro_batches >= GRADIENTS_FIRST or (steps.busiest or math.inf) > WAITED_SHARE:
            filling.add_gradients()
    if may_keep and repeats and _keep_first(units, steps):
        filling.keep(count)
    if may_keep and _enough(units, steps) < count:
        for kept in range(filling.kept + 1, count + 1):
            filling.move(_enough(units, steps, kept))
            if filling.moved >= _enough(units, steps, kept):
                filling.keep(kept)
            if filling.kept < kept:
                break
    filling.move(count)
    filling.add_slots()
    if may_keep and not filling.lacking:
        filling.keep(count)
    if repeats:
        filling.add_gradients()
    return filling


def _all_stay(units: Sequence[UnitCost]) -> Sequence[UnitCost]:
    """Where inputs do not leave, all of them are in the peak already."""
    return [cost._replace(boundary=0) for cost in units]


def _enough(units: Sequence[UnitCost], steps: Steps, kept: int = 0) -> int:
    """Units that must be on the device for host and link to keep pace with the GPU where ``kept`` units recompute
    nothing. All, if the pace is not known, if host or link hold the GPU up, or if a unit saves less than moving it
    takes: a step that was slow for another reason would look as if the GPU had much to do."""
    count, share = len(units), (steps.busiest or math.inf) * steps.micro_batches
    if not units or share > WAITED_SHARE or any(cost.activations < cost.resident for cost in units):
        return count
    # what works beside the backward of the last micro-batch and the forward of units that have moved
    beside = LAYER_SHARE * (3 - kept / count) / 4
    return min(count, max(LEAST_MOVED, math.ceil(count * (1 - beside / share))))


def _worth(filling: _Filling, units: Sequence[UnitCost], steps: Steps) -> tuple[int, ...]:
    """What inputs of units may leave for; that alone is not reason enough for slots that save transfers once, nor for a
    recompute where it is not what a step waits for."""
    enough = _enough(units, steps)
    kept = filling.kept if enough < len(units) else 0
    slots = filling.slots + filling.gradients if steps.micro_batches > 1 else 0
    return min(filling.moved, enough), kept, filling.moved, slots


def _keep_first(units: Sequence[UnitCost], steps: Steps) -> bool:
    """Whether memory is better spent on activations than on moving units: these save one forward per micro-batch, whose
    time goes with their size, or that of launching it; those an update per step."""
    small = all(MANY_MICRO_BATCHES * cost.activations <= cost.resident for cost in units)
    return steps.micro_batches >= MANY_MICRO_BATCHES or small


def _pace(steps: Steps) -> str:
    return "" if steps.busiest is None else f", and host or link worked {steps.busiest:.0%} of a step"


def _gib(nbytes: int) -> str:
    return f"{max(0, nbytes) / 2**30:.1f}"
