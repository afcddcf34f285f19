"""Scripts that know nothing of the strategy: an Accelerate loop with checkpoints, and Transformers' Trainer."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from slideformer_backend import api
from slideformer_backend.integrations.plugin import SlideFormerPlugin
from tests.launch.conftest import clean, environ, fresh_state, python, site

__all__ = ["clean", "environ", "fresh_state", "python", "site"]

LSP = {"rank": 16, "nonzeros": 4, "check_interval": 4, "timeout": 3}


@pytest.fixture(autouse=True)
def _detached(clean):
    others = api.engines()  # those that race tests broke are not ours
    yield
    _detach_all_but(others)


def _detach_all_but(others):
    for engine in api.engines():
        if engine not in others:
            engine.detach()


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def rows(count=16):
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(0, 64, (count, 1), generator=generator)
    ids = (start + torch.arange(24)) % 64
    return [{"input_ids": row, "labels": row} for row in ids]


def prepared(**lsp):
    plugin = SlideFormerPlugin(strategy="lsp", lsp={**LSP, **lsp}, cpu_threads=1)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[plugin])
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    return accelerator, *accelerator.prepare(model, optimizer, schedule)


def train(accelerator, model, optimizer, schedule, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        batch = rows()[step % 4 :: 4]
        ids = torch.stack([row["input_ids"] for row in batch])
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("projector", ["lsp", "orthonormal"])
def test_a_loop_goes_on_from_its_checkpoint_bit_for_bit(tmp_path, projector):
    state = prepared(projector=projector)
    early = train(*state, 5)
    state[0].save_state(str(tmp_path / "state"))
    expected = train(*state, 4, first=5)
    assert expected[-1] < early[0] - 0.3
    assert sum(record.core is not None for unit in api.engine_of(state[1]).units for record in unit.records) == 21
    state[0].free_memory(state[1])
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    again = prepared(projector=projector)
    again[0].load_state(str(tmp_path / "state"))
    assert train(*again, 4, first=5) == expected


def trainer(tmp_path, clean, **settings):
    clean.setenv("ACCELERATE_USE_SLIDEFORMER", "true")
    clean.setenv("SLIDEFORMER_STRATEGY", "lsp")
    clean.setenv("SLIDEFORMER_LSP", '{"rank": 16, "nonzeros": 4, "timeout": 3}')
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", logging_steps=1, disable_tqdm=True,
        save_strategy="no", learning_rate=5e-3, per_device_train_batch_size=2, max_steps=6, **settings,
    )  # fmt: skip
    return Trainer(model=llama(), args=arguments, train_dataset=rows())


def test_trainer_with_its_defaults(tmp_path, clean):
    made = trainer(tmp_path, clean)
    made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.3
    assert all(entry["grad_norm"] > 0 for entry in made.state.log_history if "grad_norm" in entry)


def test_trainer_that_accumulates_and_clips(tmp_path, clean):
    made = trainer(tmp_path, clean, gradient_accumulation_steps=2)
    made.train_dataset = rows(4)  # two micro-batches of two: every step has all of it
    made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.3
    norms = [float(entry["grad_norm"]) for entry in made.state.log_history if "grad_norm" in entry]
    plain = llama()
    ids = torch.stack([row["input_ids"] for row in rows(4)])
    plain(input_ids=ids, labels=ids).loss.backward()
    right = torch.nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()])
    assert norms[0] == pytest.approx(float(right), rel=1e-5)
