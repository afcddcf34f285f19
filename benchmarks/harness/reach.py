"""The rows that decide: which jobs each one needs, and what it asks of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from slideformer_backend.benchmarks.harness.spec import Clip, Contender, Job, Load, Result

Measure = Literal["of ceiling", "of ceiling-all", "of zero2", "of torchao", "of limit", "GPU GiB", "host bytes"]


class Goal(NamedTuple):
    """``ours`` at this clip must be at least (``at_most``: at most) ``value`` by a measure.

    "of X": ratio of tokens/s to contender X in the same run. "of limit": step time over the machine's largest limit.
    """

    clip: Clip
    measure: Measure
    value: float
    at_most: bool = False

    @property
    def words(self) -> str:
        """For tables."""
        sign = "≤" if self.at_most else "≥"
        return f"{sign} {self.value:g} {self.measure}" if not self.measure.startswith("of") else (
            f"{sign} {self.value:g}x {self.measure[3:]}"
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: ours under a budget at one load, and what it is held to.

    Attributes:
        name: as given to ``--rows``.
        shape, sequences, length, accumulate: the load.
        config, label: our configuration and words for it.
        clips: at which ours is timed; one process does them all.
        peers: other contenders needed.
        goals: what is asked.
        check_layers: see ``Job``.
    """

    name: str
    shape: str
    sequences: int
    length: int = 1024
    accumulate: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    clips: tuple[Clip, ...] = ("quiet", "active")
    peers: tuple[Contender, ...] = ("ceiling", "zero2")
    goals: tuple[Goal, ...] = ()
    check_layers: int | None = None

    def load(self, clip: Clip) -> Load:
        """The load with this clip."""
        return Load(sequences=self.sequences, length=self.length, accumulate=self.accumulate, clip=clip)


GB24 = {"gpu_memory": "24GiB"}
LEAST = {"gpu_memory": "8GiB", "recompute": "always", "activations": "host"}

ROWS = (
    Row(
        name="3b-32-24g",
        shape="3b",
        sequences=32,
        config=GB24,
        label="24 GiB",
        peers=("ceiling", "zero2", "zero3", "torchao"),
        goals=(
            Goal("quiet", "of ceiling", 0.98),
            Goal("active", "of ceiling", 0.88),
            Goal("quiet", "of zero2", 2.2),
            Goal("quiet", "host bytes", 16.6, at_most=True),
        ),
    ),
    Row(
        name="3b-32-all",
        shape="3b",
        sequences=32,
        label="all",
        peers=("ceiling", "ceiling-all", "zero2", "torchao"),
        goals=(
            Goal("quiet", "of ceiling", 1.15),
            Goal("active", "of ceiling", 1.12),
            Goal("quiet", "of zero2", 2.6),
            Goal("quiet", "of torchao", 1.25),
        ),
    ),
    Row(
        name="3b-8-24g",
        shape="3b",
        sequences=8,
        config=GB24,
        label="24 GiB",
        goals=(
            Goal("quiet", "of limit", 1.10, at_most=True),
            Goal("quiet", "of zero2", 2.6),
            Goal("active", "of zero2", 2.0),
        ),
    ),
    Row(
        name="3b-8-all",
        shape="3b",
        sequences=8,
        label="all",
        peers=("ceiling", "ceiling-all", "zero2"),
        goals=(Goal("quiet", "of zero2", 5.0), Goal("active", "of zero2", 5.0)),
    ),
    Row(
        name="3b-2x16-24g",
        shape="3b",
        sequences=2,
        accumulate=16,
        config=GB24,
        label="24 GiB",
        clips=("quiet",),
        goals=(Goal("quiet", "of zero2", 2.0),),
    ),
    Row(
        name="8b-32-24g",
        shape="8b",
        sequences=32,
        config={**GB24, "host_memory": "125GiB", "activations": "host"},
        label="24 GiB",
        check_layers=8,
        goals=(Goal("quiet", "of ceiling", 0.97), Goal("active", "of ceiling", 0.78)),
    ),
    Row(
        name="3b-32-least",
        shape="3b",
        sequences=32,
        config=LEAST,
        label="least",
        clips=("quiet",),
        goals=(Goal("quiet", "GPU GiB", 8.5, at_most=True),),
    ),
    Row(
        name="3b-32-immediate",
        shape="3b",
        sequences=32,
        config={**GB24, "update": "immediate"},
        label="24 GiB immediate",
        clips=("off",),
        goals=(Goal("off", "of ceiling", 0.98), Goal("off", "host bytes", 12.5, at_most=True)),
    ),
)
"""What the engine is held to on an H200."""

TOY = (
    Row(
        name="toy",
        shape="toy",
        sequences=4,
        length=64,
        peers=("ceiling", "ceiling-all", "plain", "zero2", "zero3", "torchao"),
    ),
    Row(
        name="toy-immediate",
        shape="toy",
        sequences=4,
        length=64,
        config={"update": "immediate"},
        label="immediate",
        clips=("off",),
    ),
)
"""Small enough for a CPU: shows that the harness works, not how fast anything is."""


def jobs_of(
    rows: Iterable[Row],
    contenders: Sequence[str],
    common: Mapping[str, Any],
    overrides: Mapping[str, Any],
    peer_steps: int | None = None,
    clips: Sequence[str] = (),
    peer_warmup: int | None = None,
) -> list[Job]:
    """Every process the rows need, each once: ceilings and peers serve several rows.

    Args:
        rows: which.
        contenders: only these; empty: all that the rows name.
        common: values for every job (device, steps, kernels ...).
        overrides: keys over the configuration of every row of ours.
        peer_steps: timed steps of the others, who end a step before they begin the next one (None: as many as ours);
            ceilings, whose ratio to ours decides, have as many as ours in any case.
        clips: of ours, only these; empty: all that the rows name.
        peer_warmup: steps before the timed ones of all others, whose placement does not follow from them (None: as many
            as ours).
    """
    jobs: dict[str, Job] = {}

    def add(job: Job) -> None:
        if not contenders or job.contender in contenders:
            jobs.setdefault(job.key, job)

    shared: dict[tuple[Contender, str, int], list[Load]] = {}
    for row in rows:
        for peer in row.peers:
            clip: Clip = "active" if peer in ("zero2", "zero3") else "off"
            loads = shared.setdefault((peer, row.shape, row.accumulate), [])
            if row.load(clip) not in loads:
                loads.append(row.load(clip))
    for (peer, shape, _), loads in shared.items():
        ascending = sorted(loads, key=lambda load: load.sequences)
        job = Job(contender=peer, shape=shape, loads=tuple(ascending), **common)
        if peer_warmup is not None:
            job = dataclasses.replace(job, warmup=peer_warmup)
        is_ceiling = peer.startswith("ceiling")
        add(job if peer_steps is None or is_ceiling else dataclasses.replace(job, steps=peer_steps))
    for row in rows:
        loads = [row.load(clip) for clip in row.clips if not clips or clip in clips]
        if not loads:
            continue
        config = {**row.config, **overrides}
        ours = Job(contender="ours", shape=row.shape, loads=tuple(loads), config=config, label=row.label, **common)
        add(dataclasses.replace(ours, check_layers=row.check_layers))
    return list(jobs.values())


class Verdict(NamedTuple):
    """A goal and what was found; ``found`` None: not measured."""

    row: str
    goal: Goal
    found: float | None

    @property
    def reached(self) -> bool | None:
        """None where it was not measured."""
        if self.found is None:
            return None
        return self.found <= self.goal.value if self.goal.at_most else self.found >= self.goal.value


def judge(rows: Iterable[Row], results: Sequence[Result], ratios: Mapping[int, float]) -> list[Verdict]:
    """What became of the rows' goals. ``ratios``: step time over the largest limit, by ``id`` of our result."""
    verdicts = []
    for row in rows:
        for goal in row.goals:
            ours = find(results, "ours", row.shape, row.load(goal.clip), row.label)
            verdicts.append(Verdict(row.name, goal, _measure(goal, row, ours, results, ratios)))
    return verdicts


def find(
    results: Iterable[Result], contender: Contender, shape: str, load: Load, label: str = "", *, any_clip: bool = False
) -> Result | None:
    """The successful result of a contender at a load."""
    for result in results:
        same = dataclasses.replace(result.load, clip=load.clip) if any_clip else result.load
        if (result.contender, result.shape, same, result.label) == (contender, shape, load, label) and not result.error:
            return result
    return None


def _measure(
    goal: Goal, row: Row, ours: Result | None, results: Sequence[Result], ratios: Mapping[int, float]
) -> float | None:
    if ours is None:
        return None
    if goal.measure == "GPU GiB":
        return ours.allocated / 2**30
    if goal.measure == "host bytes":
        return ours.host_per_parameter
    if goal.measure == "of limit":
        return ratios.get(id(ours))
    contender: Any = goal.measure.removeprefix("of ")
    other = find(results, contender, row.shape, row.load("off"), any_clip=True)
    if other is None:
        return None
    return ours.rate / other.rate if other.rate else None
