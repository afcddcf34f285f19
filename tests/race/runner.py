"""Run a sequence of events on both sides, compare what they show, and shorten what fails."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import torch

from slideformer_backend.engine import engine as engine_module
from slideformer_backend.engine import file_shelf, spilling
from slideformer_backend.engine.file_shelf import DirectShelf
from slideformer_backend.engine.residency import Residency
from slideformer_backend.engine.spilling import begin_spill, open_spill
from slideformer_backend.transfer import Monitor

from . import freezing  # noqa: F401  # registers its events
from .events import EVENTS, Seen, everything, weights_and_gradients
from .sides import START, EngineSide, PlainSide, Start
from .simulation import simulated

SHARED = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where spill files are: memory, since these tests are not about disks."""
INPUTS = (("host", "staged"), ("gpu", "direct"), ("gpu", "staged"))
Events = tuple[tuple[str, int], ...]


class Difference(AssertionError):
    """The engine and sequential torch disagree."""


@dataclass(frozen=True)
class Setting:
    """How a sequence is run."""

    kind: str = "bfloat16"
    optimizers: int = 1
    rule: str = "adamw"
    eagerness: float | None = 0.5
    """Of the simulated lanes; None: real threads."""
    seed: int = 0
    poison: bool = False
    max_delay: float = 0.0
    nonfinite: str = "skip"
    update: str = "exact"
    rooms: int = 0
    """Units whose optimizer states are in memory at once, the others' are in files; 0: all are in memory."""
    frames: int = 0
    """The same of working weights."""
    prefetch: int = 2
    inputs: str = "gpu"
    """Where inputs of units wait; in files they are "staged" in host memory, or move "direct" from the device."""
    reads_all: bool = True
    """Whether everything is read before the engine is detached, or only afterwards."""
    start: Start = START


STARTS = (
    Start(holds_frozen=True),
    Start(("blocks",)),
    Start(("blocks.0", "blocks.2.linear.weight"), holds_frozen=True),
    Start(("inp.bias", "out", "blocks.1")),
    Start(("out", "blocks.0.scale"), holds_frozen=True),
)
IMMEDIATE = ("train", "train", "evaluate", "read", "write_weights", "save", "load", "discard", "explode_forward",
             "hyperparameters", "save_optimizers", "load_optimizers", "unfreeze", "freeze")  # fmt: skip
"""Events that mean the same under ``update: immediate``: every backward is followed by its steps."""


def random_events(seed: int, length: int, names: Sequence[str] = tuple(EVENTS)) -> Events:
    """A sequence in which about every third event is an ordinary step."""
    random = Random(seed)
    return tuple(
        (
            random.choice([name for name in ("train", "backward", "step_all") if name in names])
            if random.random() < 0.3
            else random.choice(names),
            random.randrange(1 << 30),
        )
        for _ in range(length)
    )


def random_setting(seed: int, **given: Any) -> Setting:
    """Settings in turn."""
    random = Random(seed * 7919 + 1)
    chosen = {
        "kind": random.choice(("bfloat16", "bfloat16", "float32", "autocast")),
        "optimizers": random.choice((1, 1, 2)),
        "rule": random.choice(("adamw", "adamw", "adamw", "sgd")),
        "eagerness": random.choice((0.0, 0.3, 0.7)),
        "poison": random.random() < 0.5,
        "reads_all": random.random() < 0.7,
        "nonfinite": random.choice(("skip", "skip", "as_plain")),
        "seed": seed,
        "rooms": random.choice((0, 0, 1, 2, 2, 3)),
        "start": random.choice((START, START, *STARTS)),
        "inputs": INPUTS[seed % 3][seed // 3 % 2],
        "frames": random.choice((0, 0, 1, 2, 4)),
    }
    return Setting(**{**chosen, **given})


def run(events: Events, setting: Setting, monitor: Monitor | None = None) -> None:
    """Raises Difference where the sides disagree (and whatever the engine raises)."""
    basics = (setting.kind, setting.seed, setting.optimizers, setting.rule)
    plain = PlainSide(*basics, setting.nonfinite, setting.update, setting.start)
    if monitor is None:
        monitor = Monitor(poison=setting.poison, max_delay=setting.max_delay, seed=setting.seed)
    is_simulated = setting.eagerness is not None
    with (
        simulated(setting.seed, setting.eagerness or 0.0) if is_simulated else nullcontext(),
        tempfile.TemporaryDirectory(dir=SHARED) as folder,
        mock.patch.object(engine_module, "begin_spill", partial(_begin_spill, setting)),
        mock.patch.object(engine_module, "open_spill", partial(_open_spill, setting)),
        mock.patch.object(Residency, "spare", 0 if setting.seed % 2 else None),  # units come back to the host, or stay
        mock.patch.object(spilling, "StagedShelf", _direct if setting.inputs == "direct" else spilling.StagedShelf),
        mock.patch.object(file_shelf, "STAGES", 2 + 2 * (setting.seed % 2)),
        mock.patch.object(DirectShelf, "exits", 1 + setting.seed % 2),
    ):
        config = {"nonfinite": setting.nonfinite, "update": setting.update, "prefetch": setting.prefetch}
        if setting.rooms:
            config |= {"optimizer_states": "nvme", "nvme_path": folder}
        if setting.frames:
            config |= {"weights": "nvme", "nvme_path": folder}
        is_filed = setting.inputs in ("staged", "direct")
        if is_filed:
            config |= {"activations": "nvme", "nvme_path": folder}
        elif setting.inputs == "host":
            config["activations"] = "host"
        side = EngineSide(*basics, monitor, setting.start, **config)
        try:
            for number, (name, seed) in enumerate(events):
                compare(EVENTS[name](plain, Random(seed)), EVENTS[name](side, Random(seed)), f"{number} {name}")
            if setting.reads_all:
                compare(everything(plain), everything(side), "the end")
            side.engine.detach()
            compare(weights_and_gradients(plain), weights_and_gradients(side), "detach")
        finally:
            side.engine.backend.close()
            side.engine.workers.close()
            side.engine.spill.close()
            side.engine.boundaries.abandon()


def _direct(backend, tier, close, memory) -> DirectShelf:
    """On the CPU, files hold what is the device's memory there."""
    return DirectShelf(backend, tier, close)


def _begin_spill(setting, spill, units, terms) -> None:
    """As the engine's own, with another number of rooms."""
    begin_spill(spill, units, replace(terms, staged=setting.rooms))


def _open_spill(setting, backend, memory, parts, terms, tier):
    """The same for weights."""
    return open_spill(backend, memory, parts, replace(terms, frames=setting.frames), tier)


def compare(expected: Seen, found: Seen, when: str) -> None:
    """Bit for bit; NaN equals NaN."""
    if len(expected) != len(found):
        raise Difference(f"at {when}: {len(found)} values instead of {len(expected)}")
    for number, (right, value) in enumerate(zip(expected, found, strict=True)):
        if (right is None) != (value is None):
            raise Difference(f"at {when}: value {number} is {value}, expected {right}")
        if right is not None and value is not None and not _same(right.detach(), value.detach()):
            raise Difference(f"at {when}: value {number} is {value}, expected {right}")


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(12345.0), b.nan_to_num(12345.0))


def shrink(events: Events, setting: Setting, budget: int = 400) -> tuple[Events, BaseException]:
    """A shorter sequence that fails too, and its failure."""
    failure = _failure(events, setting)
    if failure is None:
        raise AssertionError("the sequence does not fail again")
    size = max(1, len(events) // 2)
    while budget > 0:
        for start in range(0, len(events), size):
            shorter = events[:start] + events[start + size :]
            budget -= 1
            found = _failure(shorter, setting)
            if found is not None:
                events, failure = shorter, found
                break
        else:
            if size == 1:
                break
            size //= 2
    return events, failure


def _failure(events: Events, setting: Setting) -> BaseException | None:
    try:
        run(events, setting)
    except Exception as error:
        return error
    return None


def check(seed: int, length: int, names: Sequence[str] = tuple(EVENTS), **given: Any) -> None:
    """One random sequence; a failure is reported as its shortest form."""
    setting = random_setting(seed, **given)
    events = random_events(seed, length, names)
    if _failure(events, setting) is None:
        return
    shortest, failure = shrink(events, setting)
    raise Difference(f"{type(failure).__name__}: {failure}\nrun({shortest!r}, {setting!r})") from failure
