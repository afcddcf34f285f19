"""The plan: what lives where on a machine, what each tier holds at its peak, and how long a step takes.

Pure arithmetic on descriptions: a model cut into units, what a unit's forward and backward take, a machine. The same
function serves ``prepare``, which knows the weights and not the batch, and ``slideformer plan``, which has no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .activations import KEPT_INPUTS, STAGED_INPUTS
from .filing import may_spill, with_depth, with_host_choices
from .layout import size_classes
from .ledger import (
    Ledger,
    Terms,
    in_blocks,
    ledger_of,
    resident_bytes,
    usual_spares,
)
from .outcome import Outcome
from .placement import Placement, Steps, UnitCost, begin_away, edges_may_update_on_device, place, spare_device_bytes
from .request import Request
from .spill import Spill
from .step_time import StepTime, Work, step_time

CHUNK_BYTES = 1 << 30
SMALL_CHUNK_BYTES = 1 << 28
"""Logits that the fused head holds at a time: at most the former, and half of them from the latter on."""
UNKNOWN_BATCH_SHARE = 4
"""One in so many parts of device memory is left to activations where the batch is not known."""


@dataclass(frozen=True, kw_only=True)
class Plan(Outcome):
    """The decision and its consequences. Bytes.

    Attributes:
        request: what it was made from.
        terms: what was decided.
        ledger: what weights, states and gradients take once units have moved to the device.
        first: the same before, in the first steps: host memory peaks then.
        activations: of the device at the worst moment: activations, head and loss, gradients of resident units.
        host_activations: boundaries of units in host memory, or on their way through it.
        nvme_activations: boundaries of units in files.
        kept: units that skip recompute.
        spill: states on NVMe, if any.
        time: of a step, where the machine's rates and the batch are known.
    """

    request: Request
    terms: Terms
    ledger: Ledger
    first: Ledger
    activations: int
    host_activations: int
    nvme_activations: int
    kept: frozenset[int]
    spill: Spill | None
    time: StepTime | None

    @property
    def device(self) -> int:
        """Predicted device peak."""
        return self.ledger.device + self.activations

    @property
    def host(self) -> int:
        """Predicted host peak beside the process's base."""
        return self.first.host + self.host_activations

    @property
    def nvme(self) -> int:
        """Predicted bytes in files."""
        return self.first.nvme + self.nvme_activations


def make_plan(request: Request) -> Plan:
    """The best plan that fits; where none does, the one that lacks least."""
    start = at_start(request)
    terms, spill = _with_choices(start)
    before, after = terms, start
    kept: frozenset[int] = frozenset()
    if request.machine.has_gpu and request.load is not None and _peak(start, terms) <= request.gpu_budget:
        terms, placed = _with_residents(request, start, terms)
        kept = frozenset(placed.kept_activations)
        if request.choices.activations == "auto":
            after = replace(request, choices=replace(request.choices, activations=placed.activations))
    activations = activation_bytes(after, terms.resident, kept)
    time = _time(after, terms, kept)
    if time is not None:
        before, terms = (with_depth(request, found, time, activations) for found in (before, terms))
    return Plan(
        request=request,
        terms=terms,
        ledger=ledger_of(request.parts, terms),
        first=ledger_of(request.parts, before),
        activations=activations.device,
        host_activations=activations.host,
        nvme_activations=activations.nvme,
        kept=kept,
        spill=spill,
        time=time,
    )


class Activations(NamedTuple):
    """Bytes of activations by tier; ``loss``: on the device before the backward of the first unit."""

    device: int
    host: int
    nvme: int
    loss: int = 0


def activation_bytes(
    request: Request, resident: frozenset[int] = frozenset(), kept: frozenset[int] = frozenset()
) -> Activations:
    """Bytes of activations, and on the device of gradients of ``resident`` units, at the worst moment.

    Moments are the loss, and the backward of each unit: inputs of the units before it still wait, ``kept`` ones of them
    with all they saved, and gradients of resident units after it are there.
    """
    activity, load = request.activity, request.load
    if not activity or load is None:
        return Activations(0, 0, 0)
    largest = max(unit.boundary for unit in activity)
    waiting = [unit.boundary for unit in activity]
    on_host = on_nvme = 0
    leaving = [size for number, size in enumerate(waiting[:-KEPT_INPUTS]) if number not in kept]
    if request.choices.activations == "nvme":
        sizes = list(map(in_blocks, leaving))
        on_host, on_nvme = largest * min(STAGED_INPUTS, len(sizes)), sum(sizes)
    elif request.choices.activations == "host":
        on_host = sum(size for number, size in enumerate(waiting) if number not in kept)
    if request.choices.activations in ("host", "nvme"):
        waiting = [size if number in kept else 0 for number, size in enumerate(waiting)]
    waiting = [size + (activity[number].saved if number in kept else 0) for number, size in enumerate(waiting)]
    gradients = [
        part.layout.gradient_bytes if number in resident else 0 for number, part in enumerate(request.parts.sliding)
    ]
    held = sum(waiting)
    # beside the loss: what the final norm keeps, and the gradient of its output
    worst = loss = held + head_bytes(request) + 2 * largest
    done = 0
    for number in reversed(range(len(activity))):
        unit = activity[number]
        worst = max(worst, held + done + unit.peak - (unit.saved if number in kept else 0))
        held -= waiting[number]
        done += gradients[number]
    if load.accumulate > 1:
        # gradients of the micro-batch before stay
        worst = max(worst, sum(waiting) + head_bytes(request) + 2 * largest + done)
    # elsewhere than on the device, boundaries pass through it, one used, one arriving
    passing = 2 * largest if on_host else 0
    return Activations(max(worst, done) + passing, on_host, on_nvme, loss + passing)


def head_bytes(request: Request) -> int:
    """What the head and the loss hold beside hidden states: fused, a chunk of logits and an fp32 sum of the weight's
    gradient, or where that is no more, all logits in 16 bits and the gradient; else logits, their fp32 copy,
    probabilities and gradient."""
    if request.load is None or not request.vocabulary:
        return 0
    tokens, classes = request.load.tokens, request.vocabulary
    if not request.choices.lazy_logits:
        return 14 * tokens * classes
    logits, sums = 2 * tokens * classes, 4 * classes * request.hidden
    if logits <= min(CHUNK_BYTES + sums, 2 * sums):
        return logits + sums // 2
    chunk = min(CHUNK_BYTES, logits // 2 if logits > SMALL_CHUNK_BYTES else logits)
    return chunk + sums


def head_operations(request: Request) -> float:
    """Operations of the head's forward per micro-batch."""
    return 2.0 * request.vocabulary * request.hidden * (request.load.tokens if request.load else 0)


def _with_choices(request: Request) -> tuple[Terms, Spill | None]:
    """What device and host hold. Edges that take more than their part of the device keep their states there all the
    same where the host cannot hold them, and no file may, and the device can."""
    activations = activation_bytes(request)
    terms, spill = with_host_choices(request, _with_device_choices(request), activations)
    needed = ledger_of(request.parts, terms).host + activations.host
    if request.load is None and request.choices.activations == "host":
        needed += request.gpu_budget // UNKNOWN_BATCH_SHARE
    is_short = request.machine.has_gpu and needed > request.host_budget
    if is_short and not (terms.edges_update_on_device or may_spill(request)):
        moved = _with_device_choices(request, edges_first=True)
        if moved.edges_update_on_device:
            return with_host_choices(request, moved, activations)
    return terms, spill


def _with_device_choices(request: Request, *, edges_first: bool = False) -> Terms:
    """Where edges are updated, and how far ahead units are fetched: as far as memory allows. ``edges_first``: edges may
    take more than their part of the device."""
    choices, budget = request.choices, request.gpu_budget
    edges = sum(resident_bytes(part.specs, choices.moments) for part in request.parts.edges)
    is_on_device = edges_first or (request.machine.has_gpu and edges_may_update_on_device(edges, budget))
    terms = Terms(
        update=choices.update,
        accumulates=request.load is not None and request.load.accumulate > 1,
        moments=choices.moments,
        moment_bytes=choices.moment_bytes,
        prefetch=2 if choices.prefetch is None else choices.prefetch,
        spares=usual_spares(len(request.parts.sliding)),
        edges_update_on_device=is_on_device,
    )
    if not request.machine.has_gpu:
        return terms
    # A batch that is not known yet gets its share; what it leaves free takes in units later.
    activations = activation_bytes(request).device if request.load is not None else budget // UNKNOWN_BATCH_SHARE
    depths = (2, 1, 0) if choices.prefetch is None else (choices.prefetch,)
    for on_device in sorted({is_on_device, False}, reverse=True):
        for depth in depths:
            terms = replace(terms, prefetch=depth, edges_update_on_device=on_device)
            if ledger_of(request.parts, terms).device + activations <= budget:
                return terms
    return terms


def at_start(request: Request) -> Request:
    """How the first steps are, before units move, in which ``activations: auto`` is what is known then."""
    choices, inputs = request.choices, sum(unit.boundary for unit in request.activity)
    if choices.activations != "auto" or request.load is None or not request.machine.has_gpu:
        return request
    ledger = ledger_of(request.parts, _with_choices(request)[0])
    if begin_away(inputs, request.gpu_budget - ledger.device, request.host_budget - ledger.host):
        return replace(request, choices=replace(choices, activations="host"))
    return request


def _peak(request: Request, terms: Terms) -> int:
    return ledger_of(request.parts, terms).device + activation_bytes(request).device


def _with_residents(request: Request, start: Request, terms: Terms) -> tuple[Terms, Placement]:
    """Units that move to the device after the first steps, which were as ``start`` says, as the engine does it."""
    ledger = ledger_of(request.parts, terms)
    activations, accumulate = activation_bytes(start), request.load.accumulate if request.load else 1
    peak = ledger.device + activations.device
    recomputed = activations.device - activations.loss if accumulate == 1 else 0
    costs = _costs(request)
    leaving = sum(unit.boundary for unit in request.activity[: -KEPT_INPUTS - 1])
    if request.choices.activations != "auto" or leaving > (request.host_budget - ledger.host) // 2:
        leaving = 0
    placed = place(
        costs,
        spare_device_bytes(request.gpu_budget, peak) - (leaving if start is not request else 0),
        recompute=request.choices.recompute,
        activations=request.choices.activations,
        boundaries=leaving,
        steps=Steps(accumulate, terms.prefetch + 2, _busiest(start, terms), recomputed),
    )
    moved = frozenset(placed.resident)
    # the host memory of a unit that moved is worth one gradient buffer more in flight
    spares = terms.spares + len(moved)
    return replace(terms, resident=moved, slots=placed.slots, gradients=placed.gradients, spares=spares), placed


def _busiest(request: Request, terms: Terms) -> float | None:
    """See ``Steps``: before units move, in a step that is not clipped."""
    time = None if terms.spilled or terms.filed else _time(request, terms, frozenset())
    return max(time.resources[name] for name in ("h2d", "d2h", "host")) / time.total if time is not None else None


def _costs(request: Request) -> Sequence[UnitCost]:
    moments = request.choices.moments
    slots = size_classes(part.layout.weight_bytes for part in request.parts.sliding)
    gradients = size_classes(part.layout.gradient_bytes for part in request.parts.sliding)
    return [
        UnitCost(
            number,
            resident_bytes(part.specs, moments),
            unit.saved,
            slots[part.layout.weight_bytes],
            gradients[part.layout.gradient_bytes],
            unit.boundary,
        )
        for number, (part, unit) in enumerate(zip(request.parts.sliding, request.activity, strict=True))
    ]


def _time(request: Request, terms: Terms, kept: frozenset[int]) -> StepTime | None:
    if request.load is None or not request.activity:
        return None
    leave = request.choices.activations in ("host", "nvme")
    leaving = [unit.boundary for number, unit in enumerate(request.activity[:-KEPT_INPUTS]) if number not in kept]
    inputs = sum(leaving) if leave else 0
    work = Work(
        request.load.tokens,
        request.load.accumulate,
        head_operations(request),
        kept,
        leaving=inputs,
        filed=inputs if request.choices.activations == "nvme" else 0,
    )
    return step_time(request.parts, request.activity, terms, work, request.machine.rates)
