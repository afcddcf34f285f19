"""How long a step takes: what each resource has to do, and how far they overlap (DESIGN 4.1, 7).

The constants come from runs on an H200 (16 cores, PCIe 5): they are shares that the engine reaches of limits that are
measured on the machine itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .activations import UnitActivity
from .ledger import Terms, filed_parts, spillable_bytes, spilled_parts
from .partition import Part, Partition

GEMM_SHARE = 0.74
"""Operations per second of whole layers (norms, attention and element-wise work included) over those of one large
matrix product. From measured steps: 0.68 at 3B with 8 sequences of 1,024, 0.73 with 32."""
HOST_SHARE = 0.85
"""The CPU update's rate while the GPU copies both ways and the main thread runs, over its rate alone."""


class Work(NamedTuple):
    """A step's shape. ``tokens`` per micro-batch, ``micro_batches`` per step, ``head``: operations of head and loss
    per micro-batch, forward only; ``kept``: numbers of units that skip recompute; ``leaving``: bytes of inputs of units
    that leave the device in a forward and come back in its backward, ``filed``: those of them that go to files."""

    tokens: int
    micro_batches: int
    head: float
    kept: frozenset[int] = frozenset()
    leaving: int = 0
    filed: int = 0


class StepTime(NamedTuple):
    """Seconds.

    Attributes:
        resources: what each of "compute", "h2d", "d2h", "host", "nvme" works; a rate that is not known is missing.
        total: of a step.
        bottleneck: the resource that works longest.
        tokens_per_second: real tokens.
    """

    resources: Mapping[str, float]
    total: float
    bottleneck: str
    tokens_per_second: float


def step_time(
    parts: Partition, activity: Sequence[UnitActivity], terms: Terms, work: Work, rates: Mapping[str, float]
) -> StepTime | None:
    """The prediction; None when a rate that it needs is not known."""
    sliding = [part for number, part in enumerate(parts.sliding) if number not in terms.resident]
    on_device = [part for number, part in enumerate(parts.sliding) if number in terms.resident]
    on_device += parts.edges if terms.edges_update_on_device else ()
    spilled = spilled_parts(parts, terms)
    on_host = [*sliding, *(() if terms.edges_update_on_device else parts.edges)]
    forward = sum(unit.operations for unit in activity) + work.head
    again = sum(unit.again for number, unit in enumerate(activity) if number not in work.kept)
    weights = sum(part.layout.weight_bytes for part in sliding)
    gradients = sum(part.layout.gradient_bytes for part in on_host)
    held = sum(sorted((part.layout.weight_bytes for part in sliding), reverse=True)[: terms.prefetch + 2 + terms.slots])
    waiting = sum(sorted((part.layout.gradient_bytes for part in sliding), reverse=True)[: terms.gradients])
    count = work.micro_batches
    states = sum(spillable_bytes(part, terms) for part in spilled)
    amounts = {
        "compute": ((3 * forward + again) * count, rates.get("gemm", 0.0) * GEMM_SHARE),
        # all of it after an update; before each backward and each further forward what is not in its slot any more
        "h2d": (
            weights + (2 * count - 1) * (weights - held) + (count - 1) * (gradients - waiting) + count * work.leaving,
            rates.get("h2d", 0.0),
        ),
        "d2h": (count * (gradients + work.leaving) - (count - 1) * waiting, rates.get("d2h", 0.0)),
        "host": (sum(update_bytes(part, terms) for part in on_host), rates.get("host", 0.0) * HOST_SHARE),
    }
    resources: dict[str, float] = {}
    for name, (amount, rate) in amounts.items():
        if amount and not rate:
            return None
        resources[name] = amount / rate if amount else 0.0
    one_forward = forward_seconds(resources["compute"] / count, forward, again)
    touched = sum(device_update_bytes(part, terms) for part in on_device)
    if touched and not rates.get("gpu_memory"):
        return None
    resources["compute"] += touched / rates["gpu_memory"] if touched else 0.0
    out = back = 0.0
    reads, writes = _weight_bytes(parts, terms, count, held / weights if weights else 1.0)
    if states or reads or work.filed:
        if not rates.get("nvme_read") or not rates.get("nvme_write"):
            return None
        # one drive serves both directions in turn
        out, back = work.filed / rates["nvme_write"], work.filed / rates["nvme_read"]
        read, write = (states + reads) / rates["nvme_read"], (states + writes) / rates["nvme_write"]
        resources["nvme"] = read + write + count * (out + back)
    return combine(resources, one_forward, sliding, work, terms, (out, back))


def _weight_bytes(parts: Partition, terms: Terms, count: int, held: float) -> tuple[int, int]:
    """Bytes of working weights that a step of ``count`` micro-batches reads from files and writes to them: each forward
    and each backward reads what is not in its slot any more (``held``: the share that is) nor in a frame; an update
    writes once."""
    filed = filed_parts(parts, terms)
    sizes = [part.layout.weight_bytes for part in filed]
    kept = sum(sorted(sizes, reverse=True)[: terms.frames])
    trained = [part.layout.weight_bytes for part in filed if part.layout.state_elements]
    again = max(0, sum(sizes) - max(kept, int(held * sum(sizes))))
    return 2 * count * again, sum(trained)


def update_bytes(part: Part, terms: Terms) -> int:
    """Bytes that the fused update of one unit reads and writes.

    A bf16 model has 30 per parameter under ``exact``, where one pass commits the last step and predicts the next, and
    26 under ``immediate``.
    """
    total = 0.0
    for spec in part.specs:
        if spec.is_trainable:
            gradient, working = spec.dtype.itemsize, spec.working.itemsize
            moments = 2 * terms.moments * terms.moment_bytes
            gradients = 2 * gradient + working if terms.update == "exact" else gradient
            total += spec.shape.numel() * (8 + moments + gradients)
    return int(total)


def device_update_bytes(part: Part, terms: Terms) -> int:
    """Bytes that norm and update of one unit read and write on the device, where states are fp32 (30 per parameter of a
    bf16 model)."""
    total = 0
    for spec in part.specs:
        if spec.is_trainable:
            weights = 0 if spec.dtype.itemsize == 4 else spec.dtype.itemsize
            total += spec.shape.numel() * (8 + 8 * terms.moments + 2 * spec.dtype.itemsize + weights)
    return total


def forward_seconds(compute: float, forward: float, again: float) -> float:
    """Of ``compute`` seconds of a micro-batch those of its forward, which has ``forward`` operations, ``again`` of them
    recomputed; the backward has twice as many."""
    return compute * forward / (3 * forward + again) if forward else 0.0


def combine(
    resources: dict[str, float],
    one_forward: float,
    sliding: Sequence[Part],
    work: Work,
    terms: Terms,
    inputs: tuple[float, float],
) -> StepTime:
    """The time of a step from that of each resource.

    Args:
        resources: seconds of a step by name, "compute", "h2d", "d2h" and "host" at least.
        one_forward: seconds of the forward of a micro-batch.
        sliding: the units with updates on the host.
        work: the step's shape.
        terms: what was decided.
        inputs: seconds in which inputs of units of a micro-batch are written to files, and read.
    """
    count = work.micro_batches
    compute = resources["compute"]
    # Updates begin with the last micro-batch's backward and end before the next forward reaches their units.
    reaching = one_forward * len(sliding) / max(1, len(sliding) + len(terms.resident))
    chains = {
        **resources,
        "host": compute * (count - 1) / count + reaching + resources["host"] if resources["host"] else 0.0,
    }
    if work.filed:  # written beside the forward only, and read beside the backward only
        phases = max(one_forward, inputs[0]) + max(compute / count - one_forward, inputs[1])
        chains["nvme"] = max(resources["nvme"], count * phases)
    bottleneck = max(resources, key=lambda name: resources[name])
    # The first unit's gradient comes last and its weights are needed first; nothing overlaps that but units ahead.
    exposed = 0.0 if 0 in terms.resident or not sliding else 1.0 / len(sliding)
    tail = exposed * sum(resources[name] / (count if name != "host" else 1) for name in ("d2h", "host"))
    total = max(chains.values()) + tail
    return StepTime(resources, total, bottleneck, work.tokens * count / total if total else 0.0)
