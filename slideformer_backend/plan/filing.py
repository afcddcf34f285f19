"""What goes to files where host memory is short, or if asked: states first, then weights, no more than must."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .depth import rooms_for
from .ledger import (
    LEAST_FRAMES,
    LEAST_SPARES,
    Terms,
    filed_parts,
    ledger_of,
    spillable_bytes,
    spilled_parts,
)
from .request import Request
from .spill import Spill, spill_share, spill_states

if TYPE_CHECKING:
    from .planner import Activations
    from .step_time import StepTime


BACKWARD_SHARE = 0.75
"""Of compute, recompute included: states are read and written beside it; a drive that takes longer is waited for."""


def may_spill(request: Request) -> bool:
    """Whether states may go to files."""
    where = request.choices.optimizer_states
    return where == "nvme" or (where == "auto" and request.machine.nvme_free > 0)


def with_host_choices(request: Request, terms: Terms, activations: Activations) -> tuple[Terms, Spill | None]:
    """Fewer gradient buffers in flight where memory is short, in the end one, if no states can go to NVMe; states there
    where it is not enough, or if asked; then working weights.

    Returns:
        The terms, and what was decided about states.
    """
    choices, parts = request.choices, request.parts
    budget, nvme = request.host_budget - activations.host, max(0, request.machine.nvme_free - activations.nvme)
    has_files = may_spill(request)
    if choices.weights == "nvme":  # states take what frames leave
        away = frozenset(range(len(parts.sliding) + len(parts.edges)) if has_files else ())
        found = _with_weights(request, replace(terms, spilled=away), budget, nvme)
        terms = replace(terms, filed=found.filed, frames=found.frames)
    fewer, one = (replace(terms, spares=min(terms.spares, spares)) for spares in (LEAST_SPARES, 1))
    spill = None
    for candidate in (terms, fewer) if has_files else (terms, fewer, one):
        decided, spill = candidate, None
        if choices.optimizer_states == "nvme" or (has_files and ledger_of(parts, fewer).host > budget):
            decided, spill = _with_states(request, candidate, budget, nvme)
        if ledger_of(parts, decided).host <= budget and (spill is None or spill.fits):
            return decided, spill
    if choices.weights == "auto" and request.machine.nvme_free > 0:
        # one unit's states at a time, for the fewest weights to go; with_depth adds what there is room for
        decided = _with_weights(request, replace(decided, staged=1), budget, nvme)
    return decided, spill and _counted(request, decided, spill, budget, nvme)


def with_depth(request: Request, terms: Terms, time: StepTime, activations: Activations) -> Terms:
    """More units on their way at once, where the drive has the time to read ahead and host memory the room."""
    parts, rate = request.parts, request.machine.rates.get("nvme_read", 0.0)
    busy = time.resources.get("nvme", 0.0)
    idle, waited = time.total - busy, max(0.0, busy - BACKWARD_SHARE * time.resources["compute"])
    sizes = [spillable_bytes(part, terms) for part in spilled_parts(parts, terms)]
    weights = [part.layout.weight_bytes for part in filed_parts(parts, terms)]

    def room() -> int:
        return request.host_budget - activations.host - ledger_of(parts, terms).host

    staged = rooms_for(terms.staged, len(sizes), max(sizes, default=0), rate, idle=idle, waited=waited, memory=room())
    terms = replace(terms, staged=staged)
    frames = rooms_for(
        terms.frames, len(weights), max(weights, default=0), rate, idle=idle, waited=waited, memory=room()
    )
    return replace(terms, frames=frames)


def _with_states(request: Request, terms: Terms, budget: int, nvme: int) -> tuple[Terms, Spill]:
    choices, parts = request.choices, request.parts
    sizes = [spillable_bytes(part, terms) for part in parts.sliding]
    edges = [] if terms.edges_update_on_device else [spillable_bytes(part, terms) for part in parts.edges]
    left = budget - (ledger_of(parts, terms).host - sum(sizes) - sum(edges))
    if choices.nvme_fraction is not None:
        spill = spill_share(sizes, choices.nvme_fraction, left, nvme, edges=edges)
    elif choices.optimizer_states == "nvme" and left >= sum(sizes) + sum(edges):
        spill = spill_share(sizes, 1.0, left, nvme, edges=edges)  # asked for, not needed
    else:
        spill = spill_states(sizes, left, nvme, edges=edges)
    decided = replace(terms, spilled=frozenset(spill.units), staged=spill.staged)
    return decided, _counted(request, decided, spill, budget, nvme)


def _with_weights(request: Request, terms: Terms, budget: int, nvme: int) -> Terms:
    """Weights of all or a share of the units where that was asked for, else of as few as must."""
    choices, parts = request.choices, request.parts
    sizes = [part.layout.weight_bytes for part in parts.sliding]
    left, frames = budget - (ledger_of(parts, terms).host - sum(sizes)), terms.prefetch + LEAST_FRAMES
    if choices.weights == "nvme":
        share = 1.0 if choices.nvme_fraction is None else choices.nvme_fraction
        found = spill_share(sizes, share, left, nvme, staged=frames)
    else:
        found = spill_states(sizes, left, nvme, staged=frames)
    return replace(terms, filed=frozenset(found.units), frames=found.staged)


def _counted(request: Request, terms: Terms, spill: Spill, budget: int, nvme: int) -> Spill:
    """``spill`` with what files take, in blocks, and what lacks with all that ``terms`` say."""
    ledger = ledger_of(request.parts, terms)
    host, disk = max(0, ledger.host - budget), max(0, ledger.nvme - nvme)
    return spill._replace(nvme=ledger.nvme_states, staged=terms.staged, host_missing=host, nvme_missing=disk)
