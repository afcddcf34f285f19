"""How far ahead a drive reads: as far as it has time, as there are waits, and as memory holds."""

import pytest

from slideformer_backend.plan.depth import rooms_for
from slideformer_backend.plan.planner import make_plan
from slideformer_backend.plan.words import paragraph

GIB = 1 << 30


@pytest.mark.parametrize(
    ("expected", "changed"),
    [
        (7, {}),
        (3, {"waited": 0.0}),
        (4, {"waited": 0.6}),
        (5, {"idle": 2.9}),
        (3, {"idle": 0.0}),
        (4, {"memory": 199}),
        (3, {"memory": -5}),
        (6, {"units": 6}),
        (3, {"units": 2}),
        (3, {"rate": 0.0}),
        (3, {"size": 0}),
    ],
)
def test_the_least_of_time_waits_memory_and_units_counts(expected, changed):
    facts = {"units": 40, "size": 100, "rate": 100.0, "idle": 4.0, "waited": 9.0, "memory": 10_000}
    assert rooms_for(3, **{**facts, **changed}) == expected


def test_a_plan_reads_further_ahead_where_the_drive_is_behind_and_memory_is_left(request_for, machine):
    slow = {**machine().rates, "nvme_read": 200e9, "nvme_write": 60e9}
    on = machine(host=400 * GIB, nvme=4000 * GIB, rates=slow)
    choices = {"optimizer_states": "nvme", "weights": "nvme"}
    plan = make_plan(request_for("llama-8b", 8, on=on, **choices))
    assert (plan.time.resources["nvme"] > 0.75 * plan.time.resources["compute"]) == (plan.terms.staged > 3)
    assert f"{plan.terms.staged} at a time in host memory" in paragraph(plan)
    assert plan.host <= 400 * GIB


def test_weights_go_when_states_are_not_enough_and_as_few_as_must(request_for, machine):
    def planned(host, **choices):
        return make_plan(request_for("llama-8b", 8, on=machine(host=host * GIB, nvme=2000 * GIB), **choices))

    assert not planned(60).terms.filed, "states are enough"
    plan, less = planned(33), planned(30)
    assert plan.verdict != "does not fit"
    assert len(plan.terms.spilled) >= 32
    assert 0 < len(plan.terms.filed) < len(less.terms.filed) <= 32
    assert plan.host <= 33 * GIB
    assert planned(33, weights="host").shortages
    more = [planned(host) for host in (26, 29, 32, 35, 38)]
    assert not any(plan.shortages for plan in more)
    counts = [len(plan.terms.filed) for plan in more]
    assert counts == sorted(counts, reverse=True), "more memory, fewer weights in files"
    assert plan.time.resources["nvme"] > planned(60).time.resources["nvme"], "weights are read, and that takes time"
    assert f"the weights of {len(plan.terms.filed)} units" in paragraph(plan)


def test_a_share_of_weights(request_for, machine):
    on = machine(host=200 * GIB, nvme=2000 * GIB)
    half = make_plan(request_for("llama-8b", 8, on=on, weights="nvme", optimizer_states="host", nvme_fraction=0.5))
    everything = make_plan(request_for("llama-8b", 8, on=on, weights="nvme"))
    assert (len(half.terms.filed), len(half.terms.spilled)) == (16, 0)
    assert (len(everything.terms.filed), len(everything.terms.spilled)) == (32, 0)
    assert everything.first.host_weights < half.first.host_weights
    assert everything.first.nvme_weights == pytest.approx(2 * half.first.nvme_weights)
