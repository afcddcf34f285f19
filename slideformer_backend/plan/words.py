"""A plan in words: one paragraph for the log, and the reasons of a refusal."""

from __future__ import annotations

from ..errors import PlanError
from .activations import STAGED_INPUTS
from .ledger import Ledger
from .outcome import Outcome
from .planner import Plan
from .remedies import gib, smallest_changes
from .request import Request


def paragraph(plan: Plan) -> str:
    """What lives where and why, with the predicted peak of each tier."""
    request, terms, ledger = plan.request, plan.terms, plan.first
    parts = request.parts
    count = len(parts.sliding)
    edges = "on the device " + ("with their states" if terms.edges_update_on_device else "and their states on the host")
    sentences = [
        f"The plan: {count} units slide through {min(terms.prefetch + 2, count)} weight slots"
        f" ({terms.prefetch} fetched ahead); {len(parts.edges)} edge units live {edges}."
    ]
    if request.machine.has_gpu:
        known = plan.activations > 0
        what = f"{gib(plan.activations)} of activations" if known else "activations, which the batch decides"
        sentences.append(
            f"GPU: {gib(ledger.device)} and {what}, of {gib(request.gpu_budget)}"
            f"{_cap(request.choices.gpu_memory, 'gpu_memory')}; what stays free takes in units after three steps."
        )
    held = host_parts(ledger, ledger.host_gradients, plan.host_activations)
    sentences.append(f"Host: {gib(plan.host)} ({held}), of {gib(request.host_budget)} ({_host_limit(plan)}).")
    if plan.nvme or request.choices.activations == "nvme":
        sentences.append(f"NVMe: {_files(plan)}.")
    if plan.time is not None:
        sentences.append(
            f"A step should take {plan.time.total:.2f} s ({plan.time.tokens_per_second:,.0f} tokens/s); the limit is"
            f" {plan.time.bottleneck}."
        )
    return " ".join(sentences)


def _files(plan: Plan) -> str:
    """What is in files."""
    what = []
    if plan.terms.spilled:
        count = len(plan.terms.spilled)
        what.append(
            f"{gib(plan.first.nvme_states)}, the states of {count} units, {plan.terms.staged} at a time in host memory"
        )
    if plan.terms.filed:
        count, frames = len(plan.terms.filed), plan.terms.frames
        what.append(f"{gib(plan.first.nvme_weights)}, the weights of {count} units, {frames} at a time in host memory")
    if plan.nvme_activations:
        what.append(f"{gib(plan.nvme_activations)}, inputs of layers until their backward (activations: nvme)")
    elif plan.request.choices.activations == "nvme":
        what.append(
            "inputs of layers until their backward, as many bytes as the batch decides; host memory holds at most"
            f" {STAGED_INPUTS} of them on their way"
        )
    return "; and ".join(what)


def host_parts(ledger: Ledger, gradients: int, activations: int = 0) -> str:
    """What host memory is for: parts that add up to the total, which ``gradients`` (bytes) count towards."""
    parts = {
        "weights": ledger.host_weights,
        "states": ledger.host_states,
        "states on their way to or from NVMe": ledger.host_staging,
        "weights on their way": ledger.host_frames,
        "gradients": gradients,
        "inputs of layers": activations,
    }
    return ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)


def shortage(plan: Outcome) -> str:
    """What lacks, in numbers."""
    request = plan.request
    needs = {"gpu": plan.device, "host": plan.host, "nvme": plan.nvme}
    budgets = {"gpu": request.gpu_budget, "host": request.host_budget, "nvme": request.machine.nvme_free}
    names = {"gpu": "GPU", "host": "host", "nvme": "NVMe"}
    return "; ".join(
        f"{names[tier]} memory: {gib(needs[tier])} needed, {gib(budgets[tier])} there" for tier in plan.shortages
    )


def nothing_left(request: Request) -> list[str]:
    """Of tiers whose memory is gone before a plan begins: who has it."""
    machine, base, found = request.machine, request.host_base, []
    if request.machine.has_gpu and request.gpu_budget == 0:
        kept = gib(machine.gpu_total - machine.gpu_free)
        found.append(f"Nothing of {gib(machine.gpu_total)} of GPU memory is left: {kept} are in use or a context's.")
    if request.host_budget == 0:
        kept = gib(machine.host.total - machine.host.available)
        found.append(
            f"Nothing of {gib(machine.host.total)} of host memory is left: {kept} are in use or the system's, and"
            f" {gib(base)} are for Python, its libraries and the script's data."
        )
    return found


def refusal(plan: Plan, what: str, found: str, expected: str) -> PlanError:
    """The error for a plan that cannot fit, with the smallest changes as its remedy."""
    changes = [change.text for change in smallest_changes(plan) if change.is_built]
    return PlanError(what, found=found, expected=expected, remedy="; or ".join(changes[:3]) or None)


def _cap(cap: int | None, key: str) -> str:
    return f" ({key})" if cap is not None else ""


def _host_limit(plan: Plan) -> str:
    cap = plan.request.choices.host_memory
    return "host_memory" if cap == plan.request.host_budget else plan.request.machine.host.limited_by
