"""What is measured, and what comes out: plain records that JSON can hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Contender = Literal["ours", "zero2", "zero3", "torchao", "ceiling", "ceiling-all", "plain"]
Clip = Literal["off", "quiet", "active"]

CONTENDERS: dict[Contender, str] = {
    "ours": "SlideFormer backend",
    "zero2": "DeepSpeed ZeRO-2 offload",
    "zero3": "DeepSpeed ZeRO-3 offload",
    "torchao": "torchao CPUOffloadOptimizer",
    "ceiling": "ceiling: on the GPU, no optimizer, recompute",
    "ceiling-all": "ceiling: on the GPU, no optimizer, no recompute",
    "plain": "plain PyTorch: fp32 master weights and moments on the GPU",
}

MAX_NORMS: dict[Clip, float | None] = {"off": None, "quiet": 1e6, "active": 0.1}
"""Gradient norms of random weights on random tokens lie between these: ``quiet`` never clips, ``active`` always."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """One thing that a contender is timed at.

    Attributes:
        sequences: per micro-batch.
        length: tokens per sequence.
        accumulate: micro-batches per optimizer step.
        clip: whether gradients are clipped by norm, and whether that ever takes effect.
    """

    sequences: int
    length: int = 1024
    accumulate: int = 1
    clip: Clip = "off"

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.sequences * self.length * self.accumulate

    @property
    def batch(self) -> str:
        """Words for its size."""
        return f"{self.sequences} x {self.accumulate}" if self.accumulate > 1 else str(self.sequences)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One process: a contender with one configuration, timed at one or more loads one after the other.

    Attributes:
        contender: who.
        shape: name of the model's shape.
        loads: they differ in ``clip`` or ``sequences`` only.
        config: our configuration, as in the ``slideformer_config`` section; empty for others.
        label: words for ``config`` in tables.
        kernels: ``liger``, ``none``, or ``ours`` (the others then have Liger's).
        device: ``cuda`` or ``cpu``.
        steps: timed steps per load.
        warmup: steps before them.
        check_layers: depth at which exactness is checked (None: that of the shape); 0: no check, nothing is reported.
        timeout: seconds after which the process is stopped.
        threads: of torch on the CPU (None: torch's own choice).
        learning_rate: of every optimizer.
        repeats: train on one batch again and again, so that losses fall and show differences.
    """

    contender: Contender
    shape: str
    loads: tuple[Load, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    kernels: str = "liger"
    device: str = "cuda"
    steps: int = 6
    warmup: int = 5
    check_layers: int | None = None
    timeout: float = 300.0
    threads: int | None = None
    learning_rate: float = 1e-5
    repeats: bool = False

    @property
    def key(self) -> str:
        """Identifies what is measured (not how long), to resume a run."""
        config = ",".join(f"{name}={self.config[name]}" for name in sorted(self.config))
        loads = ";".join(f"{load.sequences}x{load.length}x{load.accumulate}{load.clip}" for load in self.loads)
        return "/".join((self.contender, self.shape, self.device, loads, config))

    @property
    def name(self) -> str:
        """Short words for progress lines."""
        loads = ", ".join(sorted({load.batch for load in self.loads}))
        return " ".join(word for word in (self.contender, self.label, self.shape, f"[{loads}]") if word)

    def to_json(self) -> str:
        """Read back by ``job_from_json``."""
        return json.dumps(dataclasses.asdict(self))


@dataclass(kw_only=True)
class Result:
    """What one process measured at one load.

    Attributes:
        contender, shape, label, load: what ran.
        seconds: per optimizer step, the device and host updates included.
        step_seconds: between the ends of single steps, as the script saw them.
        parameters: elements of the model.
        allocated, reserved: peak bytes of the device allocator over the timed steps.
        host_bytes: peak of the host's memory beyond the process before the model was made.
        losses, norms: of the timed steps.
        clipped: timed steps in which clipping took effect.
        repairs: units whose speculative update had to be computed again; ``repaired``: share of timed steps with any.
        busy: share of the time that each resource worked, by track of the trace (``compute``: not stalled).
        moved: bytes per step and track.
        waits: longest waits, as (track, name, share of the time).
        recomputed: share of the layers whose forward runs again in backward.
        plan: the placement's reason, if any; ``checked``: what exactness check it passed.
        error: why there is no result; then the figures are zero.
        round: which of the interleaved rounds. ``earlier``: taken over from an earlier run.
    """

    contender: Contender
    shape: str
    label: str
    load: Load
    seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    parameters: int = 0
    allocated: int = 0
    reserved: int = 0
    host_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    clipped: int = 0
    repairs: int = 0
    repaired: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    waits: list[tuple[str, str, float]] = field(default_factory=list)
    recomputed: float = 0.0
    plan: str = ""
    checked: str = ""
    error: str = ""
    round: int = 0
    earlier: bool = False

    @property
    def rate(self) -> float:
        """Real tokens per second."""
        return self.load.tokens / self.seconds if self.seconds else 0.0

    @property
    def host_per_parameter(self) -> float:
        """Host bytes per parameter beyond the process's base."""
        return self.host_bytes / self.parameters if self.parameters else 0.0


def job_from_json(text: str) -> Job:
    """The job of ``Job.to_json``."""
    values = json.loads(text)
    values["loads"] = tuple(Load(**load) for load in values["loads"])
    return Job(**values)


def result_to_dict(result: Result) -> dict[str, Any]:
    """For JSON; read back by ``result_from_dict``."""
    return dataclasses.asdict(result)


def result_from_dict(values: Mapping[str, Any]) -> Result:
    """The result of ``result_to_dict``."""
    waits = [(str(track), str(name), float(share)) for track, name, share in values.get("waits", [])]
    return Result(**{**values, "load": Load(**values["load"]), "waits": waits})
