"""Checkpoints of gradual unfreezing: what trains when one is saved need not be what trains when it is loaded."""

import functools

import pytest
import torch

from tests.checkpoint.scripts import Script, assert_same, weights

FROZEN = ("layers.0", "layers.1.mlp", "embed")
STEPS = 6
PRECISIONS = ("fp32", "bf16 model", "bf16 autocast")


def interrupted(folder, *, unfreeze_at, save_at, prepared_frozen, **run):
    """Six steps in two processes; parameters of ``FROZEN`` train from step ``unfreeze_at`` on."""
    saver = Script(**run, frozen=FROZEN)
    train(saver, 0, save_at, unfreeze_at)
    saver.accelerator.save_state(str(folder))
    torch.manual_seed(99)
    loader = Script(**run, seed=7, frozen=FROZEN if prepared_frozen else ())
    loader.accelerator.load_state(str(folder))
    assert_same(weights(loader.model), weights(saver.model))
    train(loader, save_at, STEPS - save_at, unfreeze_at)
    return loader


def train(script, first, count, unfreeze_at):
    for number in range(first, first + count):
        if number >= unfreeze_at:
            script.model.requires_grad_(True)
        script.train(number, 1)


@functools.cache
def uninterrupted(unfreeze_at, **run):
    """Weights and losses of six steps in one process."""
    whole = Script(**run, frozen=FROZEN)
    train(whole, 0, STEPS, unfreeze_at)
    return weights(whole.model), whole.losses


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("update", ["exact", "immediate"])
@pytest.mark.parametrize(
    ("unfreeze_at", "save_at", "prepared_frozen"),
    [(1, 3, True), (1, 3, False), (3, 3, False), (4, 3, True)],
    ids=["frozen again at prepare", "unfrozen at prepare", "unfrozen in between", "unfrozen later"],
)
def test_resume(tmp_path, precision, update, unfreeze_at, save_at, prepared_frozen):
    run = {"precision": precision, "update": update, "clip": 0.5 if update == "exact" else None}
    expected, losses = uninterrupted(unfreeze_at, **run)
    where = {"unfreeze_at": unfreeze_at, "save_at": save_at, "prepared_frozen": prepared_frozen}
    again = interrupted(tmp_path / "state", **where, **run)
    assert again.losses == losses[save_at:]
    assert_same(weights(again.model), expected)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_frozen_for_longer_than_before(tmp_path, precision):
    """States of parameters that are frozen again wait, and are saved again, until these train."""
    saver = Script(precision=precision)
    saver.train(0, 3).accelerator.save_state(str(tmp_path / "one"))
    before = saver.optimizer.state_dict()["state"]
    loader = Script(precision=precision, seed=7, frozen=FROZEN)
    loader.accelerator.load_state(str(tmp_path / "one"))
    loader.train(3, 2)
    after = loader.optimizer.state_dict()["state"]
    names = {id(p): name for name, p in loader.model.named_parameters()}
    held = [names[id(p)] for group in loader.optimizer.param_groups for p in group["params"]]
    for number, name in enumerate(held):
        is_frozen = any(word in name for word in FROZEN)
        assert int(after[number]["step"]) == (3 if is_frozen else 5)
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(after[number][moment], before[number][moment]) == is_frozen
    loader.accelerator.save_state(str(tmp_path / "two"))
    expected = after
    again = Script(precision=precision, seed=8, frozen=FROZEN)
    again.accelerator.load_state(str(tmp_path / "two"))
    found = again.optimizer.state_dict()["state"]
    assert all(torch.equal(found[n][key], value) for n in expected for key, value in expected[n].items())
