"""The plan of ``strategy: lsp``: what must fit the device and the host, what travels, and how long a step takes.

The same function serves ``prepare``, which knows the weights and not the batch, and ``slideformer plan``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..lsp_settings import LspSettings
from .activations import KEPT_INPUTS
from .cores import core_elements, factor_bytes, is_compressed, work_bytes
from .layout import ParamSpec
from .ledger import LEAST_SPARES, Terms, device_state_bytes, ledger_of
from .outcome import Outcome
from .partition import Partition
from .planner import UNKNOWN_BATCH_SHARE, Activations, activation_bytes, head_operations, make_plan
from .remedies import Change, gib, scaled
from .request import Request
from .spill import Spill
from .step_time import GEMM_SHARE, HOST_SHARE, StepTime, Work, combine, forward_seconds, update_bytes

SUM_STAGES = 3
"""Device buffers through which sums of gradients on the host pass: one arrives, one is added to, one leaves."""
SUMS_MARGIN = 10
"""Sums of gradients stay on the device if one in so many parts of its memory is left free."""
LEAST_RANK = 64
"""The smallest rank that is proposed."""


@dataclass(frozen=True, kw_only=True)
class LspLedger:
    """Predicted peaks, in bytes, activations not counted.

    Attributes:
        matrices: how many are compressed.
        device_weights: all of them, and buffers.
        device_gradients: of what is updated exactly, until ``step()``.
        device_states: masters and moments of what is updated exactly on the device.
        device_projectors: factors, and the residual of ``projector: orthonormal``.
        device_updates: updates of cores, from their arrival to the next forward.
        device_work: compressing the largest gradient, or learning from it.
        host_cores: buffers of cores and updates.
        host_moments: moments of cores.
        host_edges: weights, states and gradients of embeddings and head that are updated on the host.
        core_bytes: of all cores on the wire.
        edge_bytes: gradients of those edges, and as many weights back.
        sums: gradients of all compressed matrices, which are kept between micro-batches.
        sum_stages: device buffers through which they pass where they are on the host.
    """

    matrices: int
    device_weights: int
    device_gradients: int
    device_states: int
    device_projectors: int
    device_updates: int
    device_work: int
    host_cores: int
    host_moments: int
    host_edges: int
    core_bytes: int
    edge_bytes: int
    sums: int
    sum_stages: int

    @property
    def device(self) -> int:
        """Device bytes without activations and sums."""
        kept = self.device_weights + self.device_gradients + self.device_states
        return kept + self.device_projectors + self.device_updates + self.device_work

    @property
    def host(self) -> int:
        """Host bytes."""
        return self.host_cores + self.host_moments + self.host_edges


def lsp_ledger(parts: Partition, settings: LspSettings, terms: Terms) -> LspLedger:
    """The ledger of a model.

    Args:
        parts: its units.
        settings: of the strategy.
        terms: ``moments`` of the optimizer, ``accumulates``, ``edges_update_on_device``.
    """
    blocks = [spec for part in parts.sliding for spec in part.specs]
    cores = [spec for spec in blocks if spec.is_trainable and is_compressed(spec.shape, settings)]
    chosen = {spec.name for spec in cores}
    edges = [spec for part in parts.edges for spec in part.specs]
    exact = [spec for spec in (*blocks, *edges) if spec.name not in chosen]
    on_device = exact if terms.edges_update_on_device else [spec for spec in blocks if spec.name not in chosen]
    elements = sum(core_elements(spec.shape, settings) for spec in cores)
    core_bytes = sum(core_elements(spec.shape, settings) * spec.dtype.itemsize for spec in cores)
    sums = sum(map(_nbytes, cores))
    away = Partition((), () if terms.edges_update_on_device else parts.edges, 0)
    return LspLedger(
        matrices=len(cores),
        device_weights=sums + sum(map(_nbytes, exact)) + parts.frozen_edges,
        device_gradients=sum(_nbytes(spec) for spec in exact if spec.is_trainable),
        device_states=device_state_bytes(on_device, terms.moments),
        device_projectors=sum(factor_bytes(spec.shape, settings) for spec in cores)
        + (sums if settings.projector == "orthonormal" else 0),
        device_updates=core_bytes,
        device_work=max((work_bytes(spec.shape, spec.dtype.itemsize, settings) for spec in cores), default=0),
        host_cores=core_bytes * (3 if terms.accumulates else 2),
        host_moments=elements * 4 * terms.moments,
        host_edges=ledger_of(away, terms).host,
        core_bytes=core_bytes,
        edge_bytes=sum(part.layout.gradient_bytes for part in away.edges),
        sums=sums if terms.accumulates else 0,
        sum_stages=SUM_STAGES * max(map(_nbytes, cores), default=0) if terms.accumulates else 0,
    )


@dataclass(frozen=True, kw_only=True)
class LspPlan(Outcome):
    """The decision and its consequences. Bytes.

    Attributes:
        request: what it was made from.
        settings: of the strategy.
        terms: what was decided: where edges are updated.
        ledger: what weights, cores, states and projectors take.
        activations: by tier.
        sums_on_device: where sums of gradients are kept, if the batch is accumulated (and clipped).
        time: of a step, where the machine's rates and the batch are known; kernels that compress and apply, bound by
            the GPU's own memory, are not in it, and neither is learning.
    """

    request: Request
    settings: LspSettings
    terms: Terms
    ledger: LspLedger
    activations: Activations
    sums_on_device: bool
    spill: Spill | None = None
    time: StepTime | None

    @property
    def device(self) -> int:
        ledger = self.ledger
        return ledger.device + self.activations.device + (ledger.sums if self.sums_on_device else ledger.sum_stages)

    @property
    def host(self) -> int:
        return self.ledger.host + self.activations.host + (0 if self.sums_on_device else self.ledger.sums)

    @property
    def nvme(self) -> int:
        return self.activations.nvme


def make_lsp_plan(request: Request, settings: LspSettings) -> LspPlan:
    """The plan: edges keep their states on the device where these leave room for activations, else on the host."""
    terms = Terms(
        accumulates=request.load is not None and request.load.accumulate > 1,
        moments=request.choices.moments,
        prefetch=0,
        spares=LEAST_SPARES,
        edges_update_on_device=True,
    )
    budget = request.gpu_budget
    activations = activation_bytes(request)
    ledger = lsp_ledger(request.parts, settings, terms)
    room = activations.device if request.load is not None else budget // UNKNOWN_BATCH_SHARE
    if request.machine.has_gpu and ledger.device + room > budget:
        terms = replace(terms, edges_update_on_device=False)
        ledger = lsp_ledger(request.parts, settings, terms)
    free = budget - ledger.device - activations.device
    sums_on_device = not request.machine.has_gpu or ledger.sums + budget // SUMS_MARGIN <= free
    return LspPlan(
        request=request,
        settings=settings,
        terms=terms,
        ledger=ledger,
        activations=activations,
        sums_on_device=sums_on_device,
        time=_time(request, terms, ledger, ledger.sums if not sums_on_device else 0),
    )


def lsp_changes(plan: LspPlan) -> list[Change]:
    """Single changes that make ``plan`` fit, the smallest of each kind; empty where it fits."""
    if not plan.shortages:
        return []
    request, settings, load = plan.request, plan.settings, plan.request.load
    found: list[Change] = []

    def fits(request: Request, settings: LspSettings) -> bool:
        return not make_lsp_plan(request, settings).shortages

    for rank in (settings.rank >> shift for shift in range(1, settings.rank.bit_length())):
        if rank >= LEAST_RANK and fits(request, replace(settings, rank=rank)):
            text = f"a smaller rank (lsp.rank: {rank})"
            found.append(Change(text=text, settings={"lsp.rank": rank}, request=request))
            break
    if settings.projector == "orthonormal" and fits(request, replace(settings, projector="lsp")):
        text = "the sparse projector (lsp.projector: lsp)"
        found.append(Change(text=text, settings={"lsp.projector": "lsp"}, request=request))
    for sequences in range((load.sequences if load is not None else 1) - 1, 0, -1):
        activity = scaled(request.activity, sequences / load.sequences) if load is not None else ()
        changed = replace(request, load=replace(load, sequences=sequences), activity=activity) if load else request
        if fits(changed, settings):
            found.append(Change(text=f"a smaller batch ({sequences} sequences)", request=changed))
            break
    if request.choices.activations in ("auto", "gpu") and request.activity:
        changed = replace(request, choices=replace(request.choices, activations="host"))
        if fits(changed, settings):
            text = "keep the inputs of units in host memory (activations: host)"
            found.append(Change(text=text, settings={"activations": "host"}, request=changed))
    if not make_plan(request).shortages:
        text = "let weights slide, with exact updates (strategy: slide)"
        found.append(Change(text=text, settings={"strategy": "slide"}, request=request))
    return found


def lsp_paragraph(plan: LspPlan) -> str:
    """What lives where, with the predicted peaks and what travels."""
    request, ledger = plan.request, plan.ledger
    where = "with their states" if plan.terms.edges_update_on_device else "and their states on the host"
    return (
        f"The plan: strategy lsp compresses {ledger.matrices} matrices; embeddings and head live on the device {where}."
        f" On the device {gib(ledger.device)} and activations, which the batch decides: weights"
        f" {gib(ledger.device_weights)}, exact states {gib(ledger.device_states)}, projectors"
        f" {gib(ledger.device_projectors)}, updates {gib(ledger.device_updates)}. Each way and step"
        f" {gib(ledger.core_bytes + ledger.edge_bytes)}. Host: {gib(plan.host)}, of {gib(request.host_budget)}: moments"
        f" of cores {gib(ledger.host_moments)}, cores {gib(ledger.host_cores)}, embeddings and head"
        f" {gib(ledger.host_edges)}."
    )


# -- internals ---------------------------------------------------------------------------------------------------------


def _nbytes(spec: ParamSpec) -> int:
    return spec.shape.numel() * spec.dtype.itemsize


def _time(request: Request, terms: Terms, ledger: LspLedger, sums_away: int) -> StepTime | None:
    load, parts = request.load, request.parts
    if load is None or not request.activity:
        return None
    rates, count = request.machine.rates, load.accumulate
    head = head_operations(request)
    forward = sum(unit.operations for unit in request.activity) + head
    again = sum(unit.again for unit in request.activity)
    leaves = request.choices.activations in ("host", "nvme")
    inputs = sum(unit.boundary for unit in request.activity[:-KEPT_INPUTS]) if leaves else 0
    filed = inputs if request.choices.activations == "nvme" else 0
    edges = 0 if terms.edges_update_on_device else sum(update_bytes(part, terms) for part in parts.edges)
    elements = ledger.host_moments // (4 * terms.moments) if terms.moments else 0
    amounts = {
        "compute": ((3 * forward + again) * count, rates.get("gemm", 0.0) * GEMM_SHARE),
        "h2d": (
            ledger.core_bytes + ledger.edge_bytes + (count - 1) * sums_away + count * inputs,
            rates.get("h2d", 0.0),
        ),
        "d2h": (
            count * ledger.core_bytes + ledger.edge_bytes + (count - 1) * sums_away + count * inputs,
            rates.get("d2h", 0.0),
        ),
        "host": (
            # twice over moments and gradient, once to predict and once to commit; the parameter is a row of zeros
            elements * (12 * terms.moments + 16) + (3 * count) * ledger.core_bytes + edges,
            rates.get("host", 0.0) * HOST_SHARE,
        ),
    }
    if any(amount and not rate for amount, rate in amounts.values()):
        return None
    resources: dict[str, float] = {name: amount / rate if amount else 0.0 for name, (amount, rate) in amounts.items()}
    out = back = 0.0
    if filed:
        if not rates.get("nvme_read") or not rates.get("nvme_write"):
            return None
        out, back = filed / rates["nvme_write"], filed / rates["nvme_read"]
        resources["nvme"] = count * (out + back)
    work = Work(load.tokens, count, head, leaving=inputs, filed=filed)
    one_forward = forward_seconds(resources["compute"] / count, forward, again)
    found = combine(resources, one_forward, parts.sliding, work, terms, (out, back))
    total = found.total + resources["h2d"] / max(1, len(parts.sliding))  # the first unit's update comes back last
    return found._replace(total=total, tokens_per_second=load.tokens * count / total if total else 0.0)
