"""A plan on a terminal, and as a mapping for JSON."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..plan.lsp_plan import LspPlan, lsp_changes
from ..plan.planner import Plan
from ..plan.remedies import Change, gib, is_built, smallest_changes
from ..plan.words import nothing_left

WIDTH = 40
"""Columns of a bar."""
COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
MARKS = "█▓▒░▚▞"
RESOURCES = {
    "compute": "GPU compute",
    "h2d": "host to GPU",
    "d2h": "GPU to host",
    "host": "CPU update",
    "nvme": "NVMe",
}


def contents(plan: Plan | LspPlan) -> dict[str, dict[str, int]]:
    """Bytes of each tier by what they hold at its peak: the host's comes before units move to the GPU."""
    if isinstance(plan, LspPlan):
        return lsp_contents(plan)
    ledger, first, parts = plan.ledger, plan.first, plan.request.parts
    tiers: dict[str, dict[str, int]] = {}
    if plan.request.machine.has_gpu:
        tiers["GPU"] = {
            "window": ledger.device_slots,
            "embeddings, head": ledger.device_edges,
            "their states": ledger.device_states,
            f"{len(plan.terms.resident)} of {len(parts.sliding)} layers": ledger.device_resident,
            "activations": plan.activations,
        }
    tiers["host"] = {
        "weights": first.host_weights + first.host_frames,
        "states": first.host_states + first.host_staging,
        "gradients": first.host_gradients,
        "activations": plan.host_activations,
    }
    if plan.nvme:
        tiers["NVMe"] = {
            "states": first.nvme_states,
            "weights": first.nvme_weights,
            "activations": plan.nvme_activations,
        }
    return tiers


def lsp_contents(plan: LspPlan) -> dict[str, dict[str, int]]:
    """The same under ``strategy: lsp``."""
    ledger = plan.ledger
    sums = {"sums of gradients": ledger.sums}
    passing = {"sums on their way": ledger.sum_stages} if ledger.sum_stages else {}
    tiers: dict[str, dict[str, int]] = {}
    if plan.request.machine.has_gpu:
        tiers["GPU"] = {
            "weights": ledger.device_weights,
            "exact gradients, states": ledger.device_gradients + ledger.device_states,
            "projectors": ledger.device_projectors,
            "updates, compressing": ledger.device_updates + ledger.device_work,
            "activations": plan.activations.device,
            **(sums if plan.sums_on_device else passing),
        }
    tiers["host"] = {
        "moments of cores": ledger.host_moments,
        "cores": ledger.host_cores,
        "embeddings, head": ledger.host_edges,
        "activations": plan.activations.host,
        **({} if plan.sums_on_device else sums),
    }
    if plan.nvme:
        tiers["NVMe"] = {"activations": plan.nvme}
    return tiers


def changes_of(plan: Plan | LspPlan) -> list[Change]:
    """What would make it fit."""
    return lsp_changes(plan) if isinstance(plan, LspPlan) else smallest_changes(plan)


def budgets(plan: Plan | LspPlan) -> dict[str, int]:
    """What each tier may hold."""
    request = plan.request
    return {"GPU": request.gpu_budget, "host": request.host_budget, "NVMe": request.machine.nvme_free}


def show(plan: Plan | LspPlan, name: str, console: Console | None = None) -> None:
    """Print tables, bars, the verdict and what would help."""
    console = console or Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    request = plan.request
    load = request.load
    console.print(_headline(plan, name), style="bold", soft_wrap=True)
    console.print(_tiers(plan))
    if plan.time is not None and load is not None:
        console.print(_resources(plan))
        time = plan.time
        console.print(
            f"A step of {load.tokens * load.accumulate:,} tokens: [bold]{time.total:.2f} s[/bold],"
            f" {time.tokens_per_second:,.0f} tokens/s; the limit is {RESOURCES[time.bottleneck]}.",
            soft_wrap=True,
        )
    elif request.machine.has_gpu:
        console.print("No step time: the machine's rates are not known.", soft_wrap=True)
    if not request.machine.has_gpu:
        console.print("There is no GPU here: name one to plan for with --gpu-memory.", soft_wrap=True)
    for line in [*_notes(plan), *nothing_left(request)]:
        console.print(line, soft_wrap=True)
    style = {"fits": "bold green", "tight": "bold yellow", "does not fit": "bold red"}[plan.verdict]
    console.print(Text(_verdict(plan), style=style), soft_wrap=True)
    for change in changes_of(plan):
        console.print(f"  - {change.text}" + ("" if change.is_built else " (not built yet)"), soft_wrap=True)


def to_mapping(plan: Plan | LspPlan, name: str) -> dict[str, object]:
    """All figures, in bytes and seconds."""
    request, time = plan.request, plan.time
    available = budgets(plan)
    tiers = {
        tier.lower(): {"contents": parts, "peak": sum(parts.values()), "budget": available[tier]}
        for tier, parts in contents(plan).items()
    }
    return {
        "model": name,
        "parameters": request.parts.parameters,
        "trained": request.parts.trained,
        "units": len(request.parts.sliding),
        "verdict": plan.verdict,
        "tiers": tiers,
        "missing": plan.shortages,
        "decisions": _decisions(plan),
        "step": None
        if time is None
        else {
            "seconds": time.total,
            "bottleneck": time.bottleneck,
            "tokens_per_second": time.tokens_per_second,
            "resources": dict(time.resources),
        },
        "rates": {
            name: {"value": rate, "source": request.machine.sources[name]}
            for name, rate in request.machine.rates.items()
        },
        "changes": [
            {"text": change.text, "settings": dict(change.settings), "built": change.is_built}
            for change in changes_of(plan)
        ],
    }


def _decisions(plan: Plan | LspPlan) -> dict[str, object]:
    terms = plan.terms
    if isinstance(plan, LspPlan):
        return {
            "strategy": "lsp",
            "compressed_matrices": plan.ledger.matrices,
            "wire_bytes_each_way": plan.ledger.core_bytes + plan.ledger.edge_bytes,
            "edges_update_on_device": terms.edges_update_on_device,
            "sums_of_gradients_on_device": plan.sums_on_device,
            "inputs_on_nvme": plan.nvme > 0,
        }
    return {
        "update": terms.update,
        "prefetch": terms.prefetch,
        "gradient_buffers_in_flight": terms.spares,
        "edges_update_on_device": terms.edges_update_on_device,
        "resident_units": sorted(terms.resident),
        "units_without_recompute": sorted(plan.kept),
        "units_on_nvme": sorted(terms.spilled),
        "units_on_nvme_at_once_in_memory": terms.staged,
        "weights_on_nvme": sorted(terms.filed),
        "weights_on_nvme_at_once_in_memory": terms.frames,
        "inputs_on_nvme": plan.nvme_activations > 0,
    }


def _headline(plan: Plan | LspPlan, name: str) -> str:
    request, load = plan.request, plan.request.load
    size = f"{request.parts.parameters / 1e9:.2f} G parameters, {len(request.parts.sliding)} layers"
    batch = f"{load.accumulate} x {load.sequences} x {load.length} tokens per step" if load else ""
    way = (
        f"strategy: lsp, rank {plan.settings.rank}"
        if isinstance(plan, LspPlan)
        else f"update: {request.choices.update}"
    )
    return f"{name}: {size}; {batch}; {way}"


def _tiers(plan: Plan | LspPlan) -> Table:
    table = Table(box=None, pad_edge=False)
    for title, justify in (("tier", "left"), ("peak", "right"), ("there", "right")):
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]  # rich's literals
    table.add_column("", min_width=WIDTH, no_wrap=True)
    table.add_column("what lives there")
    available = budgets(plan)
    for tier, parts in contents(plan).items():
        total = sum(parts.values())
        words = Text()
        for number, (what, size) in enumerate(parts.items()):
            if size:
                words.append(f"{MARKS[number]} ", COLOURS[number]).append(f"{what} {gib(size)}  ")
        table.add_row(tier, gib(total), gib(available[tier]), _bar(list(parts.values()), available[tier]), words)
    return table


def _bar(sizes: list[int], budget: int) -> Text:
    """Stacked; as wide as the budget, or the need where that is larger, with the budget's end marked."""
    whole = max(sum(sizes), budget, 1)
    bar, drawn, seen = Text(), 0, 0
    for number, size in enumerate(sizes):
        seen += size
        end = round(WIDTH * seen / whole)
        bar.append(MARKS[number] * (end - drawn), COLOURS[number])
        drawn = end
    bar.append("·" * (WIDTH - drawn), "dim")
    if sum(sizes) > budget:
        limit = round(WIDTH * budget / whole)
        bar = bar[:limit] + Text("┃", "bold red") + bar[limit + 1 :]
    return bar


def _resources(plan: Plan | LspPlan) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("resource", "s/step", "", "rate"):
        table.add_column(title, no_wrap=True)
    times: Mapping[str, float] = plan.time.resources if plan.time is not None else {}
    machine = plan.request.machine
    longest = max(times.values(), default=0.0) or 1.0
    rates = {"compute": "gemm", "h2d": "h2d", "d2h": "d2h", "host": "host", "nvme": "nvme_read"}
    for name, seconds in times.items():
        rate = machine.rates.get(rates[name], 0.0)
        unit = f"{rate / 1e12:.0f} TFLOP/s" if name == "compute" else f"{rate / 1e9:.1f} GB/s"
        source = machine.sources.get(rates[name], "assumed")
        is_limit = plan.time is not None and name == plan.time.bottleneck
        bar = Text("█" * max(round(WIDTH * seconds / longest), 1 if seconds else 0), "red" if is_limit else "cyan")
        table.add_row(RESOURCES[name], f"{seconds:.2f}", bar, f"{unit} ({source})")
    return table


def _notes(plan: Plan | LspPlan) -> list[str]:
    if isinstance(plan, LspPlan):
        return _lsp_notes(plan)
    terms, parts = plan.terms, plan.request.parts
    notes = []
    if terms.spilled:
        notes.append(
            f"Optimizer states of {len(terms.spilled)} of {len(parts.sliding) + len(parts.edges)} units are on NVMe,"
            f" {terms.staged} of them in host memory at once."
            + ("" if is_built("optimizer_states", "nvme_path") else " This version cannot do that yet.")
        )
    if terms.filed:
        notes.append(
            f"Working weights of {len(terms.filed)} of {len(parts.sliding)} layers are on NVMe, {terms.frames} of them"
            " in host memory at once; each forward and each backward reads them."
        )
    if plan.nvme_activations:
        notes.append(
            f"Inputs of layers wait on NVMe: {gib(plan.nvme_activations)} are written in each forward and read in its"
            f" backward, through {gib(plan.host_activations)} of host memory."
        )
    if terms.prefetch < 2 and plan.request.choices.prefetch is None:
        notes.append(f"Units are fetched {terms.prefetch} ahead, since GPU memory is short.")
    if any(unit.is_estimate for unit in plan.request.activity):
        notes.append("Activations are an estimate from the shapes of weights.")
    return notes


def _lsp_notes(plan: LspPlan) -> list[str]:
    ledger, load = plan.ledger, plan.request.load
    notes = [
        f"{ledger.matrices} matrices are compressed: {gib(ledger.core_bytes)} of cores per micro-batch go to the host,"
        f" and as much comes back per step, instead of gradients and weights of {gib(ledger.device_weights)}. It is an"
        " approximation, which does not train as plain PyTorch does."
    ]
    if not plan.terms.edges_update_on_device:
        notes.append(
            "Embeddings and head are updated on the host, since the GPU has no room for their states:"
            f" {gib(ledger.edge_bytes)} more each way."
        )
    if load is not None and load.accumulate > 1:
        where = "on the GPU" if plan.sums_on_device else "in host memory, which costs a copy each way per micro-batch"
        notes.append(f"If the script clips, sums of gradients are kept {where}: {gib(ledger.sums)}.")
    notes.append("Not in the time: kernels that compress and apply, and learning projectors (at the first step).")
    if any(unit.is_estimate for unit in plan.request.activity):
        notes.append("Activations are an estimate from the shapes of weights.")
    return notes


def _verdict(plan: Plan | LspPlan) -> str:
    if plan.verdict == "fits":
        return "It fits."
    if plan.verdict == "tight":
        return "It fits, but by less than predictions may err (5 %)."
    names = {"gpu": "GPU memory", "host": "host memory", "nvme": "NVMe"}
    lacks = ", ".join(f"{gib(size)} of {names[tier]}" for tier, size in plan.shortages.items())
    return f"It does not fit: {lacks} lacking. What would make it fit:"
