"""Random sequences of everything a training script may do, against sequential torch, bit for bit (DESIGN 4).

``RACE_SEQUENCES=9600`` runs that many simulated sequences (600 unless told); those of a shorter search are among them.
"""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

from slideformer_backend.engine.policy import UpdatePolicy
from slideformer_backend.engine.redo_log import RedoLog
from slideformer_backend.engine.unit import ONE, ParamRecord, Unit, Weights

from .events import EVENTS
from .runner import IMMEDIATE, Setting, check, random_events, random_setting, run
from .sides import Start

BATCHES = 16
SEQUENCES = int(os.environ.get("RACE_SEQUENCES", "600"))
THREADED = 120


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level("ERROR")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_simulated_sequences(batch):
    for seed in range(batch, SEQUENCES, BATCHES):
        check(seed, 8 + seed % 5)


@pytest.mark.parametrize("batch", range(4))
def test_immediate_sequences(batch):
    for seed in range(batch * 50, (batch + 1) * 50):
        check(seed, 8, IMMEDIATE, update="immediate", optimizers=1 + seed % 2, nonfinite="as_plain")


@pytest.mark.parametrize("batch", range(6))
def test_sequences_on_threads(batch):
    """The real lanes, every operation delayed at random, buffers poisoned."""
    for seed in range(batch, THREADED, 6):
        run(random_events(seed + 100_000, 9), random_setting(seed, eagerness=None, max_delay=0.001 * (seed % 3)))


def test_every_event_occurs():
    names = {name for seed in range(200) for name, _ in random_events(seed, 10)}
    assert names == set(EVENTS)


FOUND = {
    "a gradient of an edge unit, kept and written later": (
        (
            ("backward", 310622925),
            ("hold_gradient", 1065694118),
            ("step_all", 796631977),
            ("write_held", 271461698),
            ("step_all", 435864092),
        ),
        Setting(kind="float32", eagerness=0.7, seed=32, poison=True, rooms=2),
    ),
    "clip, then accumulate onto an edge gradient before any hook of a unit runs": (
        (("backward", 137070376), ("clip", 470835590), ("late_backward", 63444431)),
        Setting(rule="sgd", eagerness=0.7, seed=64),
    ),
    "a retained graph is recomputed twice": ((("retain", 342308754),), Setting(seed=3, eagerness=0.0)),
    "an optimizer steps a part of an edge unit whose prediction covers all of it": (
        (("backward_last", 1), ("step", 2), ("evaluate", 3), ("train", 4)),
        Setting(optimizers=2, seed=38, kind="float32"),
    ),
    "an edge weight is written while a prediction of it is pending": (
        (("backward", 780351038), ("write_edges", 983314028), ("step_all", 272800532)),
        Setting(seed=110),
    ),
    "an edge weight is written under immediate": (
        (("write_edges", 1002055269), ("train", 565897242)),
        Setting(kind="float32", update="immediate", seed=14),
    ),
    "a frozen weight of a unit that comes back from the device gets a gradient": (
        (("move", 856634435), ("gradient_of_frozen", 473803620)),
        Setting(optimizers=2, seed=795, eagerness=0.0, rooms=3, start=Start(("blocks",))),
    ),
    "a frozen weight beside split masters is written": (
        (("train", 646967375), ("load", 1), ("save", 1), ("load", 1), ("train", 2)),
        Setting(update="immediate", seed=3),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_found_before(name):
    run(*FOUND[name])


def _mutations():
    """Mistakes in the policy: each must be found by a few sequences."""

    def no_void(self: RedoLog, unit: Unit) -> None:
        pass

    def no_absorb(self: UpdatePolicy, unit: Unit) -> None:
        for record in unit.records:
            record.is_exposed = False

    def forgets_log(self: RedoLog, unit: Unit) -> None:
        self._take_log(unit)

    def log_without_commit(self: RedoLog, unit: Unit, items) -> None:
        self.absorb(unit)
        for record, entry in items:
            record.entry, record.predicted = entry, None
            record.steps += 1
        unit.logged = unit.gradient
        unit.content += 1
        unit.steps += 1
        self.void(unit)
        unit.weights_are = Weights.STALE

    def trusts_prediction(self: RedoLog, unit: Unit, items) -> None:
        was = unit.weights_are
        original_log(self, unit, items)
        if was is Weights.SPECULATIVE:
            unit.weights_are = Weights.CURRENT

    def no_clip(self: UpdatePolicy, unit: Unit) -> None:
        for record in unit.with_gradient:
            record.coefficient = ONE

    def forgets_nothing(self: UpdatePolicy, record: ParamRecord) -> None:
        record.has_gradient = False

    def keeps_content(self: RedoLog, unit: Unit, items) -> None:
        content = unit.content
        original_log(self, unit, items)
        unit.content = content

    def no_restore(self: RedoLog, unit: Unit) -> None:
        unit.weights_are = Weights.CURRENT

    original_log = RedoLog._log
    return {
        "a changed gradient does not void its prediction": (RedoLog, "void", no_void),
        "writes to weights are not absorbed": (UpdatePolicy, "absorb", no_absorb),
        "a commit drops the log": (RedoLog, "commit", forgets_log),
        "a second step forgets the first": (RedoLog, "_log", log_without_commit),
        "a wrong prediction is kept": (RedoLog, "_log", trusts_prediction),
        "a recorded clip is dropped": (UpdatePolicy, "apply_coefficients", no_clip),
        "grad = None keeps the prediction": (UpdatePolicy, "forget", forgets_nothing),
        "slots keep old weights after a step": (RedoLog, "_log", keeps_content),
        "weights are not restored": (RedoLog, "refresh", no_restore),
    }


@pytest.mark.parametrize("name", _mutations())
def test_mutation_is_found(name, monkeypatch):
    owner, attribute, wrong = _mutations()[name]
    monkeypatch.setattr(owner, attribute, wrong)
    for seed in range(200):
        with contextlib.suppress(Exception):
            run(random_events(seed, 10), random_setting(seed))
            continue
        return
    pytest.fail("no sequence found the mutation")
