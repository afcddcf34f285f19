"""Trainer's features, with and without SlideFormer: equal figures and weights, bit for bit."""

import pytest
import torch
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from slideformer_backend import api
from tests.parity.models import batch

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 64}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
FIGURES = ("loss", "eval_loss", "grad_norm", "learning_rate", "step", "eval_length")


class Rows(torch.utils.data.Dataset):
    """Texts of different lengths, most of each ignored by the loss."""

    def __init__(self, count=24, seed=0):
        self.rows = [batch(seed + number, rows=1, length=6 + 5 * (number % 3))[0] for number in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        ids = self.rows[index]
        labels = ids.clone()
        labels[: len(ids) // 2] = -100
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def padded(rows):
    names = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        name: pad([row[name] for row in rows], batch_first=True, padding_value=fill) for name, fill in names.items()
    }


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def t5():
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(**T5, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0))


class Both:
    """Runs one recipe plainly and managed."""

    def __init__(self, clean, folder):
        self.clean, self.folder = clean, folder

    def run(self, managed, make, arguments=TrainingArguments, **settings):
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.clean.setenv("ACCELERATE_USE_SLIDEFORMER", "true" if managed else "false")
        self.clean.setenv("SLIDEFORMER_STATUS", "off")
        common = {
            "output_dir": str(self.folder / str(managed)), "use_cpu": True, "report_to": "none", "logging_steps": 1,
            "disable_tqdm": True, "save_strategy": "no", "learning_rate": 1e-2, "optim": "adamw_torch_fused",
            "per_device_train_batch_size": 2, "max_steps": 4,
        }  # fmt: skip
        trainer = make(arguments(**{**common, **settings}))
        trainer.train()
        figures = [{k: v for k, v in entry.items() if k in FIGURES} for entry in trainer.state.log_history]
        weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
        return trainer, figures, weights

    def compare(self, make, arguments=TrainingArguments, **settings):
        """The managed trainer, after its figures and weights were found to be the plain ones."""
        _, expected, theirs = self.run(False, make, arguments, **settings)
        trainer, found, ours = self.run(True, make, arguments, **settings)
        assert api.engine_of(trainer.model) is not None
        assert len(expected) > 2
        assert found == expected
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
        return trainer


@pytest.fixture
def both(clean, tmp_path):
    yield Both(clean, tmp_path)
    for engine in api.engines():
        engine.detach()


def ordinary(arguments, **more):
    return Trainer(
        model=llama(), args=arguments, train_dataset=Rows(), eval_dataset=Rows(6, 50), data_collator=padded, **more
    )


@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"average_tokens_across_devices": False}])
def test_tokens_count_alike_over_an_accumulated_batch(both, settings):
    """``num_items_in_batch``: micro-batches of unequal length weigh by their tokens."""
    both.compare(ordinary, gradient_accumulation_steps=3, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": True},
        {"neftune_noise_alpha": 5.0},
        {"label_smoothing_factor": 0.1},
        {"lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"train_sampling_strategy": "group_by_length"},
        {"dataloader_num_workers": 2},
    ],
    ids=lambda settings: next(iter(settings)),
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_settings(both, settings):
    both.compare(ordinary, **settings)


class Averaging(TrainerCallback):
    """An exponential average of the weights, and a look at gradients before every step."""

    def __init__(self):
        self.average, self.norms = {}, []

    def on_pre_optimizer_step(self, args, state, control, model=None, **more):
        self.norms.append([None if p.grad is None else float(p.grad.norm()) for p in model.parameters()])

    def on_step_end(self, args, state, control, model=None, **more):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in self.average:
                    self.average[name].lerp_(parameter, 0.5)
                else:
                    self.average[name] = parameter.detach().clone()


def test_callbacks_see_the_plain_values(both):
    made = []

    def make(arguments):
        made.append(Averaging())
        return ordinary(arguments, callbacks=[made[-1]])

    both.compare(make, gradient_accumulation_steps=2)
    plain, managed = made
    assert managed.norms == plain.norms
    assert len(plain.average) > 10
    assert all(torch.equal(managed.average[name], value) for name, value in plain.average.items())


class Unfreezing(TrainerCallback):
    """One more layer trains with every step, from the last one on; the head rests in the last step."""

    def on_step_begin(self, args, state, control, model=None, **more):
        if 0 < state.global_step <= len(model.model.layers):
            model.model.layers[-state.global_step].requires_grad_(True)
        model.lm_head.requires_grad_(state.global_step < args.max_steps - 1)


@pytest.mark.parametrize("settings", [{"gradient_accumulation_steps": 2}, {"bf16": True}])
def test_layers_that_a_callback_unfreezes(both, settings):
    def make(arguments):
        model = llama()
        model.model.requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        return Trainer(
            model=model, args=arguments, train_dataset=Rows(), data_collator=padded, callbacks=[Unfreezing()],
            optimizers=(optimizer, None),
        )  # fmt: skip

    both.compare(make, max_steps=6, **settings)


def test_early_stopping_and_the_best_model_at_the_end(both):
    def make(arguments):
        return ordinary(arguments, callbacks=[EarlyStoppingCallback(2)])

    trainer = both.compare(
        make,
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, save_total_limit=1,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", max_steps=30, learning_rate=0.1,
    )  # fmt: skip
    assert trainer.state.global_step < 30, "stopped early"
    assert trainer.state.best_global_step < trainer.state.global_step
    figures = trainer.evaluate()
    assert figures["eval_loss"] == trainer.state.best_metric, "the best weights are loaded, and are what is evaluated"


class Small(Trainer):
    """Runs out of memory in the backward of batches of more than two rows."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        rows = len(inputs["input_ids"])
        if rows > 2 and self.state.global_step == 1:
            parameter = next(model.model.layers[1].parameters())
            handle = parameter.register_hook(self.out_of_memory)
            try:
                return super().training_step(model, inputs, num_items_in_batch)
            finally:
                handle.remove()
        return super().training_step(model, inputs, num_items_in_batch)

    @staticmethod
    def out_of_memory(gradient):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")


def test_auto_find_batch_size(both):
    """A backward that ends in the middle, and everything prepared again with a smaller batch."""

    def make(arguments):
        return Small(model=llama(), args=arguments, train_dataset=Rows(), data_collator=padded)

    trainer = both.compare(make, auto_find_batch_size=True, per_device_train_batch_size=4)
    assert trainer._train_batch_size == 2


@pytest.mark.filterwarnings("ignore")
def test_predict_with_generate(both):
    """Evaluation generates; training goes on as if it had not."""

    def make(arguments):
        model = t5()

        def length(prediction):
            return {"length": float((prediction.predictions > 0).sum())}

        return Seq2SeqTrainer(
            model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows(6, 50), data_collator=padded,
            compute_metrics=length,
        )  # fmt: skip

    generating = {"predict_with_generate": True, "generation_max_length": 6, "eval_strategy": "steps", "eval_steps": 1}
    _, figures, with_it = both.run(True, make, Seq2SeqTrainingArguments, **generating)
    _, _, without = both.run(True, make, Seq2SeqTrainingArguments)
    assert any("eval_length" in entry for entry in figures)
    assert [name for name in without if not torch.equal(with_it[name], without[name])] == []
