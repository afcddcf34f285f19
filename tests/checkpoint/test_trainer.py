"""``Trainer``: resume bit for bit, only from complete checkpoints, and rotation that never deletes the last of them."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments, trainer_utils

from slideformer_backend.errors import CheckpointError
from slideformer_backend.storage.directory import MANIFEST, MARKER, is_complete
from tests.checkpoint.scripts import assert_same, batch, model_of, weights


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {name: value[0] for name, value in batch(index).items()}


@pytest.fixture
def trainer(clean, tmp_path):
    from accelerate.state import AcceleratorState, GradientState

    def make(managed=True, seed=0, **more):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        clean.setenv("ACCELERATE_USE_SLIDEFORMER", "true" if managed else "false")
        clean.setenv("SLIDEFORMER_STATUS", "off")
        settings = {
            "output_dir": str(tmp_path / "out"),
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "steps",
            "save_steps": 2,
            "max_steps": 10,
            "logging_steps": 1,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "optim": "adamw_torch_fused",
            **more,
        }
        return Trainer(
            model=model_of(seed=seed), args=TrainingArguments(**settings), train_dataset=Rows(), eval_dataset=Rows()
        )

    return make


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("more", [{}, {"bf16": True}, {"lr_scheduler_type": "cosine", "warmup_steps": 3}])
def test_resume_is_bit_for_bit(trainer, more):
    whole = trainer(**more)
    whole.train()
    expected = weights(whole.model)
    folder = whole.args.output_dir
    for step in (6, 8, 10):
        shutil.rmtree(f"{folder}/checkpoint-{step}")
    again = trainer(seed=3, **more)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 10
    assert losses(again) == losses(whole)
    assert_same(weights(again.model), expected)


def test_a_run_goes_on_without_slideformer_and_back(trainer):
    whole = trainer(managed=False)
    whole.train()
    expected = weights(whole.model)
    folder = whole.args.output_dir
    shutil.rmtree(folder)
    trainer(max_steps=10).train()
    for step in (4, 6, 8, 10):
        shutil.rmtree(f"{folder}/checkpoint-{step}")
    plain = trainer(managed=False, seed=3)
    plain.train(resume_from_checkpoint=True)
    assert_same(weights(plain.model), expected)
    for step in (8, 10):
        shutil.rmtree(f"{folder}/checkpoint-{step}")
    assert not (Path(folder) / "checkpoint-6" / MANIFEST).exists()
    managed = trainer(seed=4)
    managed.train(resume_from_checkpoint=True)
    assert_same(weights(managed.model), expected)


def test_true_means_the_newest_complete_one(trainer, tmp_path):
    whole = trainer()
    whole.train()
    expected = weights(whole.model)
    broken = tmp_path / "out" / "checkpoint-10"
    (broken / MANIFEST).unlink()
    (broken / MARKER).touch()
    (tmp_path / "out" / "checkpoint-8" / "optimizer" / "unit-00000.safetensors").unlink()
    assert trainer_utils.get_last_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-6")
    again = trainer(seed=3)
    again.train(resume_from_checkpoint=True)
    assert_same(weights(again.model), expected)
    assert is_complete(broken)
    (tmp_path / "out" / "checkpoint-9").mkdir()
    (tmp_path / "out" / "checkpoint-9" / MARKER).touch()
    with pytest.raises(CheckpointError, match="checkpoint-9 is incomplete"):
        trainer().train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-9"))


def test_rotation_keeps_a_complete_one(trainer, tmp_path, monkeypatch):
    """The stock rotation protects the newest by number: an unfinished leftover would be kept, the good one deleted."""
    left = tmp_path / "out" / "checkpoint-50"
    left.mkdir(parents=True)
    (left / MARKER).touch()
    seen = []

    def rmtree(path, *args, original=shutil.rmtree, **kwargs):
        original(path, *args, **kwargs)
        seen.append([p.name for p in (tmp_path / "out").glob("checkpoint-*") if is_complete(p)])

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    trainer(save_total_limit=1).train()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint-10"]
    assert all(seen[1:]), seen


def test_a_failing_save_does_not_count(trainer, tmp_path, monkeypatch):
    run = trainer(max_steps=4)
    state_dict = torch.optim.lr_scheduler.LambdaLR.state_dict

    def fail(self):
        if self.last_epoch == 4:
            raise RuntimeError("disk full")
        return state_dict(self)

    monkeypatch.setattr(torch.optim.lr_scheduler.LambdaLR, "state_dict", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        run.train()
    assert trainer_utils.get_last_checkpoint(tmp_path / "out").endswith("checkpoint-2")


def test_best_model_and_model_only_checkpoints(trainer, tmp_path):
    from transformers import LlamaForCausalLM

    run = trainer(max_steps=6, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, save_only_model=True)
    run.train()
    best = run.state.best_model_checkpoint
    assert is_complete(tmp_path / "out" / best.rsplit("/")[-1])
    assert_same(weights(run.model), weights(LlamaForCausalLM.from_pretrained(best)))
    assert not (tmp_path / "out" / "checkpoint-2" / "optimizer").exists()
