"""If a plan does not fit: the smallest changes that would make it fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..config import keys
from .activations import UnitActivity
from .ledger import STAGED_UNITS, spillable_bytes
from .machine import Machine
from .planner import Plan, make_plan
from .request import MOMENT_BYTES, Choices, Request

MOST = 6
"""Changes that are named."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One way to make a plan fit.

    Attributes:
        text: in words.
        settings: keys of the configuration that it sets.
        is_built: whether this version can do it.
        request: with the change made.
    """

    text: str
    settings: Mapping[str, object] = field(default_factory=dict)
    is_built: bool = True
    request: Request


def smallest_changes(plan: Plan) -> list[Change]:
    """Single changes that make ``plan`` fit, then, if no setting does it alone, pairs of settings; hardware last.

    Changes that this version cannot make yet come after those that it can.
    """
    if not plan.shortages:
        return []
    settings = list(_settings(plan))
    found = [change for change in settings if _fits(change)]
    if not found:
        found = list(_pairs(plan, settings))
    found = sorted(found, key=lambda change: not change.is_built)
    return [*found[: MOST - 1], *(change for change in [_hardware(plan)] if change is not None)]


def scaled(activity: Sequence[UnitActivity], share: float) -> tuple[UnitActivity, ...]:
    """The activity at a batch ``share`` times as large: everything grows with its tokens."""
    return tuple(
        unit._replace(
            boundary=int(unit.boundary * share),
            saved=int(unit.saved * share),
            peak=int(unit.peak * share),
            operations=unit.operations * share,
            again=unit.again * share,
        )
        for unit in activity
    )


def _fits(change: Change) -> bool:
    return not make_plan(change.request).shortages


def _holds(tier: str, request: Request) -> bool:
    return tier not in make_plan(request).shortages


def is_built(*names: str) -> bool:
    """Whether this version can do what these keys of the configuration ask for."""
    built = {key.name for key in keys() if key.metadata["built"]}
    return set(names) <= built


def _settings(plan: Plan) -> Iterator[Change]:
    """Changes of batch and configuration that could help, whether or not they suffice."""
    request, choices, short = plan.request, plan.request.choices, plan.shortages
    if "gpu" in short:
        yield from _batches(request)
        if not choices.lazy_logits:
            yield _with(request, "lazy_logits", True, "fuse the head with the loss (lazy_logits: true)")
        if choices.activations in ("auto", "gpu") and request.activity:
            yield _with(request, "activations", "host", "keep the inputs of units in host memory (activations: host)")
            if request.machine.nvme_free:
                yield _with(request, "activations", "nvme", "keep the inputs of units on NVMe (activations: nvme)")
        if choices.prefetch not in (None, 0):
            yield _with(request, "prefetch", 0, "fetch no units ahead (prefetch: 0)", value=0)
    if "host" in short:
        if "gpu" not in short and choices.activations in ("auto", "gpu") and request.activity:
            text = "make room on the GPU for states of embedding and head (activations: host)"
            yield _with(request, "activations", "host", text)
        if choices.activations == "host" and request.activity:
            yield _with(request, "activations", "gpu", "keep the inputs of units on the GPU (activations: gpu)")
            if request.machine.nvme_free:
                yield _with(request, "activations", "nvme", "keep the inputs of units on NVMe (activations: nvme)")
        if choices.update == "exact":
            text = "update during backward (update: immediate, which cannot clip by norm)"
            yield _with(request, "update", "immediate", text)
        if choices.optimizer_states == "host" and request.machine.nvme_free:
            text = "keep optimizer states that do not fit on NVMe (optimizer_states: auto)"
            yield _with(request, "optimizer_states", "auto", text)
        if choices.weights == "host" and request.machine.nvme_free:
            yield _with(request, "weights", "auto", "keep weights that do not fit on NVMe (weights: auto)")
        for name, size in MOMENT_BYTES.items():
            if size < choices.moment_bytes:
                changed = replace(request, choices=replace(choices, moment_bytes=size))
                yield Change(
                    text=f"keep moments in {name} (state_dtype: {name})",
                    settings={"state_dtype": name},
                    is_built=is_built("state_dtype"),
                    request=changed,
                )
    if "nvme" in short and plan.nvme_activations:
        if "gpu" not in short:
            yield from _batches(request, "nvme")
        yield _with(request, "activations", "host", "keep the inputs of units in host memory (activations: host)")
        yield _with(request, "activations", "gpu", "keep the inputs of units on the GPU (activations: gpu)")
    if "nvme" in short and plan.first.nvme:
        yield from _fewer_files(plan)
    for tier, budget in (("gpu", choices.gpu_memory), ("host", choices.host_memory)):
        if tier in short and budget is not None:
            yield _cap(request, tier, budget + short[tier])
    if "host" in short and not request.machine.nvme_free and choices.optimizer_states != "nvme":
        changed = replace(
            request,
            machine=replace(request.machine, nvme_free=1 << 62),
            choices=replace(choices, optimizer_states="auto"),
        )
        spilled = make_plan(changed)
        if spilled.first.nvme:
            what = "optimizer states and weights" if spilled.terms.filed else "optimizer states"
            yield Change(
                text=f"an NVMe folder with {_room(spilled.first.nvme)} for {what} (nvme_path)",
                settings={"nvme_path": "FOLDER"},
                is_built=is_built("nvme_path", "optimizer_states"),
                request=changed,
            )


def _fewer_files(plan: Plan) -> Iterator[Change]:
    """More states and weights in host memory: a smaller share, where all or a share was asked for; else a cap."""
    request, choices = plan.request, plan.request.choices
    count = len(request.parts.sliding)
    if "nvme" in (choices.optimizer_states, choices.weights) or choices.nvme_fraction is not None:
        word = "set" if choices.nvme_fraction is None else "lower"
        for number in range(min(count, max(len(plan.terms.spilled), len(plan.terms.filed))) - 1, 0, -1):
            share = math.floor(1000 * number / count) / 1000
            change = _with(request, "nvme_fraction", share, f"{word} nvme_fraction to {share:g}")
            if _fits(change):
                yield change
                break
        if choices.weights == "nvme":
            yield _with(request, "weights", "host", "keep weights in host memory (weights: host)")
        changed = replace(request, choices=replace(choices, optimizer_states="host", nvme_fraction=None))
        text = "keep all states in host memory (optimizer_states: host, without nvme_fraction)"
        yield Change(text=text, settings={"optimizer_states": "host", "nvme_fraction": None}, request=changed)
    elif choices.host_memory is not None:
        largest = max((spillable_bytes(part, plan.terms) for part in request.parts.sliding), default=0)
        caps = [
            _cap(request, "host", choices.host_memory + plan.shortages["nvme"] + largest * more)
            for more in range(STAGED_UNITS + 2)
        ]
        yield from [change for change in caps if _fits(change)][:1]
    if choices.update == "exact" and "host" not in plan.shortages:
        text = "update during backward (update: immediate, which cannot clip by norm)"
        yield _with(request, "update", "immediate", text)


def _with(request: Request, key: str, setting: object, text: str, *, value: object = None) -> Change:
    values: dict[str, object] = {key: setting if value is None else value}
    choices: Choices = replace(request.choices, **values)  # type: ignore[arg-type]  # one key, of its own type
    return Change(
        text=text, settings={key: setting}, is_built=is_built(key), request=replace(request, choices=choices)
    )  # fmt: skip


def _cap(request: Request, tier: str, size: int) -> Change:
    step = 1 << 28 if size > 1 << 30 else 1 << 20
    size = -(-size // step) * step
    key = f"{tier}_memory"
    choices: Choices = replace(request.choices, **{key: size})  # type: ignore[arg-type]  # one of two int fields
    return Change(
        text=f"raise {key} to {gib(size)}", settings={key: size}, request=replace(request, choices=choices)
    )  # fmt: skip


def _batches(request: Request, tier: str = "gpu") -> Iterator[Change]:
    """The largest smaller micro-batch that ``tier`` holds, with the tokens of a step kept by accumulation; else shorter
    ones."""
    load = request.load
    if load is None:
        return
    for count in range(load.sequences - 1, 0, -1):
        if load.sequences % count == 0 or count == 1:
            times = load.sequences // count
            smaller = replace(load, sequences=count, accumulate=load.accumulate * times)
            changed = replace(request, load=smaller, activity=scaled(request.activity, count / load.sequences))
            if _holds(tier, changed):
                yield Change(text=f"micro-batches of {count}, {smaller.accumulate} per step", request=changed)
                return
    length = load.length
    while length > 128:
        length //= 2
        share = length / load.length / load.sequences
        changed = replace(
            request,
            load=replace(load, sequences=1, length=length, accumulate=load.accumulate * load.sequences),
            activity=scaled(request.activity, share),
        )
        if _holds(tier, changed):
            yield Change(text=f"one sequence of {length} tokens per micro-batch", request=changed)
            return


def _pairs(plan: Plan, settings: Sequence[Change]) -> Iterator[Change]:
    for first, second in itertools.combinations(settings, 2):
        if set(first.settings) & set(second.settings):
            continue
        merged = _merge(plan.request, first.request, second.request)
        change = Change(
            text=f"{first.text}, and {second.text}",
            settings={**first.settings, **second.settings},
            is_built=first.is_built and second.is_built,
            request=merged,
        )
        if _fits(change):
            yield change


def _merge(base: Request, first: Request, second: Request) -> Request:
    def pick(owner: object, one: object, other: object, names: Sequence[str]) -> dict[str, object]:
        return {
            name: getattr(one, name) if getattr(one, name) != getattr(owner, name) else getattr(other, name)
            for name in names
        }

    choices = pick(base.choices, first.choices, second.choices, list(Choices.__dataclass_fields__))
    rest = pick(base, first, second, ("load", "activity", "machine"))
    return replace(base, choices=Choices(**choices), **rest)  # type: ignore[arg-type]  # the same fields


def _hardware(plan: Plan) -> Change | None:
    """A larger machine; None where the machine would do and only a cap of the user's is in the way."""
    request, choices = plan.request, replace(plan.request.choices, gpu_memory=None, host_memory=None)
    short = replace(plan, request=replace(request, choices=choices)).shortages
    lacking = set(short)
    machine, larger = request.machine, replace(request, choices=choices)
    while short:
        larger = replace(larger, machine=_grown(larger, plan, short))
        plan = make_plan(larger)
        short = plan.shortages  # with more room some things are placed otherwise, and others are short
        lacking |= set(short)
    grown, words = larger.machine, []
    if "gpu" in lacking:
        words.append(f"{_room(grown.gpu_free + machine.gpu_kept)} of GPU memory")
    if "host" in lacking:
        words.append(f"{_room(grown.host.available + machine.host_kept)} of host memory")
    if lacking == {"nvme"}:
        more = _room(grown.nvme_free - machine.nvme_free)
        return Change(text=f"{_room(grown.nvme_free)} of free space for spill files ({more} more than now)",
                      request=larger)  # fmt: skip
    if "nvme" in lacking:
        words.append(f"{_room(grown.nvme_free)} of NVMe")
    return Change(text=f"a machine with {' and '.join(words)}", request=larger) if words else None


def _grown(request: Request, plan: Plan, short: Mapping[str, int]) -> Machine:
    """The machine of ``request`` with all that ``plan`` takes where it is short."""
    machine = request.machine
    if "gpu" in short:
        machine = replace(machine, gpu_total=plan.device + machine.gpu_kept, gpu_free=plan.device)
    if "host" in short:
        available = plan.host + request.host_base
        host = machine.host._replace(total=available + machine.host_kept, available=available)
        machine = replace(machine, host=host)
    if "nvme" in short:
        machine = replace(machine, nvme_free=machine.nvme_free + short["nvme"])
    return machine


def _room(nbytes: int) -> str:
    """Memory, or space on a disk, that holds so many bytes and what a file system keeps about them, rounded up to what
    is shown: who takes it at its word must have enough."""
    nbytes += 1 << 20
    step = (1 << 30 if nbytes >= 1 << 30 else 1 << 20) / 10
    return gib(math.ceil(nbytes / step) * step)


def gib(nbytes: float) -> str:
    """Bytes in words."""
    return f"{nbytes / 2**30:,.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.1f} MiB"
