"""3 steps, save, a fresh process, 3 steps: the bits of 6 steps. (With states in memory nothing begins any later.)"""

import errno
import functools
import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainingArguments

from slideformer_backend.checkpoint import disk_reported
from slideformer_backend.errors import CheckpointError, StorageError
from slideformer_backend.storage.directory import MANIFEST
from tests.checkpoint.scripts import PRECISIONS, Script, assert_same, batch, model_of, weights

FIRST, ALL = 3, 6
RULES = ("adamw", "momentum", "sgd", "lion", "adagrad")


def resumed(folder, source, target=None, clip=0.5):
    saver = Script(**source, clip=clip)
    saver.train(0, FIRST).accelerator.save_state(str(folder))
    torch.manual_seed(99)  # what the loader's process did before
    loader = Script(**{**source, **(target or {})}, seed=7, clip=clip)
    loader.accelerator.load_state(str(folder))
    assert_same(weights(loader.model), weights(saver.model))
    return loader.train(FIRST, ALL - FIRST)


@functools.cache
def uninterrupted(**run):
    """Weights and losses of a run that nothing interrupts; the same for every way to interrupt it."""
    whole = Script(**run).train(0, ALL)
    return weights(whole.model), whole.losses


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("rule", RULES)
def test_exact(tmp_path, precision, rule):
    run = {"precision": precision, "rule": rule}
    whole = Script(**run).train(0, ALL)
    expected, losses = weights(whole.model), whole.losses
    again = resumed(tmp_path / "state", run)
    assert again.losses == losses[FIRST:]
    assert_same(weights(again.model), expected)
    assert again.scheduler.get_last_lr() == whole.scheduler.get_last_lr()


@pytest.mark.parametrize("precision", ["fp32", "bf16 autocast"])
@pytest.mark.parametrize("policies", [("exact", "immediate"), ("immediate", "exact"), ("immediate", "immediate")])
def test_across_policies(tmp_path, precision, policies):
    expected, losses = uninterrupted(precision=precision, clip=None)
    source, target = ({"update": policy, "precision": precision} for policy in policies)
    again = resumed(tmp_path / "state", source, target, clip=None)
    assert again.losses == losses[FIRST:]
    assert_same(weights(again.model), expected)


@pytest.mark.parametrize("policies", [("exact", "immediate"), ("immediate", "exact"), ("immediate", "immediate")])
def test_across_policies_the_masters_of_a_bf16_model_keep_their_bits(tmp_path, policies):
    """Also in the middle of two bf16 numbers, where the two policies' working weights are different ones."""
    source, target = ({"update": policy, "precision": "bf16 model"} for policy in policies)
    saver = Script(**source, clip=None).train(0, 3)
    state = saver.optimizer.state_dict()
    ties = 0
    for number, parameter in enumerate(p for group in saver.optimizer.param_groups for p in group["params"]):
        master = state["state"][number]["master"]
        bits = master.view(torch.int32)
        bits[..., ::2] = (bits[..., ::2] & ~0xFFFF) | 0x8000
        upper = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
        with torch.no_grad():
            parameter.copy_(upper if policies[0] == "immediate" else master.bfloat16())
        ties += int((upper != master.bfloat16()).sum())
    assert ties > 1000
    saver.optimizer.load_state_dict(state)
    saver.accelerator.save_state(str(tmp_path / "one"))
    loader = Script(**target, clip=None, seed=7)
    loader.accelerator.load_state(str(tmp_path / "one"))
    loader.accelerator.save_state(str(tmp_path / "two"))
    for path in (tmp_path / "one" / "optimizer").glob("*.safetensors"):
        assert_same(load_file(path), load_file(tmp_path / "two" / "optimizer" / path.name))
    rounded = saver.optimizer.state_dict()["state"][0]["master"].bfloat16()
    assert torch.equal(loader.optimizer.param_groups[0]["params"][0], rounded) == (policies[1] == "exact")


@pytest.mark.parametrize(("source", "target"), [("exact", None), (None, "exact"), ("immediate", None)])
@pytest.mark.parametrize("rule", RULES)
def test_with_and_without_slideformer(tmp_path, source, target, rule):
    expected, losses = uninterrupted(update=None, rule=rule, clip=None)
    again = resumed(tmp_path / "state", {"update": source, "rule": rule}, {"update": target}, clip=None)
    if rule == "adamw" or not source or not target:
        assert again.losses == pytest.approx(losses[FIRST:], rel=1e-5)
    if rule == "adamw":
        assert_same(weights(again.model), expected)


def test_a_script_that_saves_goes_on_as_one_that_does_not(tmp_path):
    plain = Script().train(0, ALL)
    expected, losses = weights(plain.model), plain.losses
    saver = Script()
    for number in range(ALL):
        saver.train(number, 1)
        saver.accelerator.save_state(str(tmp_path / "state"))
    assert saver.losses == losses
    assert_same(weights(saver.model), expected)


def test_no_pickle_is_written_or_read(tmp_path, monkeypatch):
    run = Script().train(0, 2)
    run.accelerator.save_state(str(tmp_path / "state"))
    names = sorted(path.relative_to(tmp_path / "state").as_posix() for path in (tmp_path / "state").rglob("*.*"))
    assert all(name.endswith((".safetensors", ".json")) for name in names), names
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("torch.load was called"))
    run.accelerator.load_state(str(tmp_path / "state"))


def test_two_models_with_an_optimizer_each_and_tied_weights(tmp_path):
    """Names in each folder are those of its own model; a tied weight is there once."""

    def make(seed):
        first = Script(clip=None, seed=seed)
        model = model_of(seed=seed + 1, tie_word_embeddings=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        return first, *first.accelerator.prepare(model, optimizer)

    def train(run, steps):
        script, model, optimizer = run
        for step in steps:
            script.train(step, 1)
            script.accelerator.backward(model(**batch(step)).loss)
            optimizer.step()
            optimizer.zero_grad()
        return weights(script.model), weights(model)

    expected = train(make(0), range(6))
    saver = make(0)
    train(saver, range(3))
    saver[0].accelerator.save_state(str(tmp_path / "state"))
    names = {name for path in (tmp_path / "state" / "optimizer_1").glob("*.safetensors") for name in load_file(path)}
    assert names == {
        f"state.{n}.{s}" for n, _ in saver[1].named_parameters() for s in ("exp_avg", "exp_avg_sq", "step")
    }
    assert "lm_head.weight" not in load_file(tmp_path / "state" / "model_1.safetensors")
    loader = make(5)
    loader[0].accelerator.load_state(str(tmp_path / "state"))
    for one, two in zip(expected, train(loader, range(3, 6)), strict=True):
        assert_same(one, two)


def test_hyperparameters_of_the_groups_come_back(tmp_path):
    run = Script().train(0, 1)
    run.optimizer.param_groups[1].update(weight_decay=0.33, betas=(0.8, 0.95))
    run.accelerator.save_state(str(tmp_path / "state"))
    again = Script(seed=1)
    again.accelerator.load_state(str(tmp_path / "state"))
    for saved, loaded in zip(run.optimizer.param_groups, again.optimizer.param_groups, strict=True):
        kept = [{k: v for k, v in group.items() if k != "params"} for group in (saved, loaded)]
        assert kept[0] == kept[1]
        assert type(loaded["betas"]) is tuple


def test_another_optimizer_is_refused(tmp_path):
    run = Script().train(0, 1)
    run.accelerator.save_state(str(tmp_path / "state"))
    again = Script()
    again.optimizer.param_groups[1]["params"].pop()
    with pytest.raises(CheckpointError, match="another optimizer.*Found: AdamW with 2 groups.*Expected"):
        again.accelerator.load_state(str(tmp_path / "state"))


class TestDamage:
    @pytest.fixture
    def state(self, tmp_path):
        Script().train(0, 1).accelerator.save_state(str(tmp_path / "state"))
        return tmp_path / "state"

    @pytest.mark.parametrize("name", ["model.safetensors", "optimizer/unit-00001.safetensors", "training_state.json"])
    def test_one_flipped_bit(self, state, name):
        data = bytearray((state / name).read_bytes())
        data[len(data) - 9] ^= 1
        (state / name).write_bytes(data)
        fresh = Script(seed=1)
        before = weights(fresh.model)
        with pytest.raises(CheckpointError, match=f"{name} is damaged: its checksum"):
            fresh.accelerator.load_state(str(state))
        assert_same(weights(fresh.model), before)

    def test_a_missing_file(self, state):
        (state / "optimizer" / "unit-00001.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"unit-00001.safetensors is damaged. Found: no such file"):
            Script().accelerator.load_state(str(state))

    def test_an_incomplete_directory(self, state):
        (state / MANIFEST).unlink()
        (state / ".slideformer-incomplete").touch()
        with pytest.raises(CheckpointError, match="is incomplete"):
            Script().accelerator.load_state(str(state))


class TestFullDisk:
    """The system refuses in earnest: a file may grow no further than the limit."""

    @pytest.fixture
    def limited(self):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    @pytest.mark.parametrize("nbytes", [20_000, 100_000], ids=["states", "weights"])
    def test_is_said_and_the_checkpoint_before_stays(self, tmp_path, limited, nbytes):
        folder = tmp_path / "state"
        run = Script().train(0, 1)
        run.accelerator.save_state(str(folder))
        saved = {path: path.read_bytes() for path in folder.rglob("*.*")}
        run.train(1, 1)
        limited(nbytes)
        with pytest.raises(StorageError, match=r"EFBIG.*File too large") as caught:
            run.accelerator.save_state(str(folder))
        limited(resource.RLIM_INFINITY)
        assert caught.value.path == str(folder)
        assert "ulimit -f" in caught.value.remedy
        assert {path: path.read_bytes() for path in folder.rglob("*.*")} == saved
        assert [path.name for path in tmp_path.iterdir()] == ["state"]
        run.train(2, 1).accelerator.save_state(str(folder))

    def test_trainer_says_the_same(self, tmp_path, limited):
        run = Script().train(0, 1)
        arguments = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
        trainer = Trainer(model=run.model, args=arguments, train_dataset=[1])
        trainer.optimizer, trainer.lr_scheduler = run.optimizer, run.scheduler
        limited(20_000)
        with pytest.raises(StorageError, match="checkpoint-0 failed"):
            trainer._save_checkpoint(run.model, None)

    def test_a_full_disk_in_the_words_of_safetensors(self):
        with pytest.raises(StorageError, match="ENOSPC") as caught, disk_reported(Path("/somewhere")):
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        assert caught.value.errno == errno.ENOSPC
        assert "free space" in caught.value.remedy

    def test_other_errors_pass(self):
        with pytest.raises(FileNotFoundError), disk_reported(Path("/somewhere")):
            Path("/no/such/file").read_bytes()


class TestDirectories:
    def test_automatic_names_take_the_newest_complete_one(self, tmp_path):
        run = Script(folder=tmp_path)
        for number in range(3):
            run.train(number, 1).accelerator.save_state()
        found = tmp_path / "checkpoints"
        (found / "checkpoint_2" / MANIFEST).unlink()
        (found / "checkpoint_2" / ".slideformer-incomplete").touch()
        again = Script(folder=tmp_path, seed=3)
        again.accelerator.load_state()
        assert again.train(2, 1).losses == run.losses[2:]

    def test_rotation_deletes_after_the_new_one_is_complete(self, tmp_path, monkeypatch):
        run = Script(folder=tmp_path, limit=1)
        run.train(0, 1).accelerator.save_state()
        first = tmp_path / "checkpoints" / "checkpoint_0"
        monkeypatch.setattr(type(run.scheduler), "state_dict", lambda self: pytest.fail("a failure while saving"))
        with pytest.raises(pytest.fail.Exception):
            run.accelerator.save_state()
        assert [path.name for path in first.parent.iterdir()] == ["checkpoint_0"]
        monkeypatch.undo()
        run.accelerator.save_state()
        assert [path.name for path in first.parent.iterdir()] == ["checkpoint_1"]

    def test_other_files_of_the_folder_stay(self, tmp_path):
        folder = tmp_path / "out"
        (folder / "logs").mkdir(parents=True)
        (folder / "logs" / "run.txt").write_text("kept")
        run = Script()
        for number in range(2):
            run.train(number, 1).accelerator.save_state(str(folder))
        assert (folder / "logs" / "run.txt").read_text() == "kept"
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        assert_same(load_file(folder / "model.safetensors"), weights(run.model))

    def test_hooks_of_the_user_get_the_weights_and_the_folder(self, tmp_path):
        run = Script().train(0, 1)

        def save(models, states, folder):
            assert models == [run.model]
            save_file({name: t.clone() for name, t in states.pop().items()}, f"{folder}/mine.safetensors")

        run.accelerator.register_save_state_pre_hook(save)
        run.accelerator.save_state(str(tmp_path / "state"))
        assert not (tmp_path / "state" / "model.safetensors").exists()
        assert_same(load_file(tmp_path / "state" / "mine.safetensors"), weights(run.model))
        assert "mine.safetensors" in json.loads((tmp_path / "state" / MANIFEST).read_text())["files"]
