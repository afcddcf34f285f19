"""The same scripts with and without SlideFormer, over the real engine: equal losses, norms, rates, weights, files.

The plain side uses torch's fused AdamW, whose arithmetic the engine's rule follows; sizes are multiples of the vector
width, where the two agree bit for bit.
"""

import copy
import gc
import inspect
import types

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import AutocastKwargs
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from slideformer_backend import ConfigError, SlideFormerPlugin, UnsupportedError, api

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "use_cache": False,
}


@pytest.fixture(autouse=True)
def detached():
    """No engine outlives its test."""
    yield
    for engine in api.engines():
        engine.detach()


def tiny(dtype=torch.float32):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY)).to(dtype)


def batches(count=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 64, (2, length), generator=generator) for length in (12, 8) * (count // 2)]
    return [{"input_ids": row, "labels": row} for row in rows]


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(one, two):
    assert one.keys() == two.keys()
    different = [name for name in one if not torch.equal(one[name], two[name])]
    assert different == []


class Script:
    """An ordinary Accelerate script. ``managed`` turns SlideFormer on; nothing in it differs otherwise."""

    def __init__(self, clean, managed, precision="no", accumulation=1, clip=1.0, dtype=torch.float32, **settings):
        clean.delenv("ACCELERATE_USE_SLIDEFORMER", raising=False)
        handlers = [SlideFormerPlugin(status="off", **settings)] if managed else None
        self.accelerator = Accelerator(
            mixed_precision=precision, gradient_accumulation_steps=accumulation, kwargs_handlers=handlers, cpu=True
        )
        self.clip = clip
        self.model = tiny(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, 8)
        self.log = []

    def prepare(self):
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            self.model, self.optimizer, self.scheduler
        )
        return self

    def clip_gradients(self):
        """As any script does."""
        return self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)

    def train(self, data):
        for batch in data:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                norm = None
                if self.accelerator.sync_gradients and self.clip is not None:
                    norm = self.clip_gradients().item()
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.log.append((loss.item(), norm, self.scheduler.get_last_lr()[0]))
        return self


@pytest.fixture
def scripts(clean):
    """Makes the plain and the managed script of the same arguments, one after the other."""
    from accelerate.state import AcceleratorState, GradientState

    from slideformer_backend.integrations.session import session

    def make(managed, **arguments):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        session.reset()
        return Script(clean, managed, **arguments)

    return make


CASES = {
    "fp32": {},
    "no clip": {"clip": None},
    "no clip, bf16 autocast": {"clip": None, "precision": "bf16"},
    "no clip, accumulation": {"clip": None, "accumulation": 3},
    "bf16 autocast": {"precision": "bf16"},
    "accumulation with an uneven tail": {"accumulation": 3},
    "bf16 autocast and accumulation": {"precision": "bf16", "accumulation": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_losses_norms_rates_and_weights_are_those_of_the_plain_script(scripts, case):
    plain = scripts(False, **CASES[case]).prepare().train(batches())
    expected, log = weights(plain.model), plain.log
    managed = scripts(True, **CASES[case]).prepare().train(batches())
    assert api.engine_of(managed.model) is not None
    assert isinstance(managed.optimizer, AcceleratedOptimizer)
    assert managed.log == log
    assert_same(weights(managed.model), expected)


def test_update_immediate_without_clipping(scripts):
    plain = scripts(False, clip=None).prepare().train(batches())
    expected = weights(plain.model)
    managed = scripts(True, clip=None, update="immediate").prepare().train(batches())
    assert_same(weights(managed.model), expected)


def test_the_optimizer_may_be_prepared_before_the_model(scripts):
    expected = weights(scripts(False, clip=None).prepare().train(batches()).model)
    managed = scripts(True, clip=None)
    managed.optimizer = managed.accelerator.prepare(managed.optimizer)
    managed.scheduler = managed.accelerator.prepare(managed.scheduler)
    managed.model = managed.accelerator.prepare(managed.model)
    assert_same(weights(managed.train(batches()).model), expected)


def test_save_state_holds_every_tensor_and_resumes(scripts, tmp_path):
    """Hazard: parameters that are views of one buffer lose all but one tensor in save_model and save_state."""
    whole = scripts(True, clip=None).prepare().train(batches())
    expected, log = weights(whole.model), whole.log
    first = scripts(True, clip=None).prepare().train(batches()[:4])
    first.accelerator.save_state(str(tmp_path / "state"))
    first.accelerator.save_model(first.model, str(tmp_path / "model"))
    now = weights(first.model)
    assert_same(load_file(tmp_path / "state" / "model.safetensors"), now)
    assert_same(load_file(tmp_path / "model" / "model.safetensors"), now)
    assert_same(dict(first.accelerator.get_state_dict(first.model)), now)
    second = scripts(True, clip=None).prepare()
    second.accelerator.load_state(str(tmp_path / "state"))
    assert_same(weights(second.model), now)
    second.train(batches()[4:])
    assert_same(weights(second.model), expected)
    assert second.log == log[4:]


def test_a_state_saved_with_slideformer_loads_without_and_the_other_way_round(scripts, tmp_path):
    expected = weights(scripts(False, clip=None).prepare().train(batches()).model)
    for source, target in ((True, False), (False, True)):
        saver = scripts(source, clip=None).prepare().train(batches()[:4])
        saver.accelerator.save_state(str(tmp_path / f"{source}"))
        loader = scripts(target, clip=None).prepare()
        loader.accelerator.load_state(str(tmp_path / f"{source}"))
        assert_same(weights(loader.train(batches()[4:]).model), expected)


def test_free_memory_gives_back_a_plain_model_and_a_plain_optimizer(scripts):
    expected = weights(scripts(False, clip=None).prepare().train(batches()).model)
    managed = scripts(True, clip=None)
    raw, stock = managed.optimizer, managed.optimizer.step
    managed.prepare().train(batches()[:4])
    assert raw.step != stock
    managed.accelerator.free_memory()
    assert api.engine_of(managed.model) is None
    assert {type(p) for p in managed.model.parameters()} == {torch.nn.Parameter}
    assert raw.step == stock
    managed.optimizer = raw
    assert_same(weights(managed.train(batches()[4:]).model), expected)


def test_prepared_again_after_free_memory_it_goes_on_where_it_was(scripts):
    expected = weights(scripts(False, clip=None).prepare().train(batches()).model)
    managed = scripts(True, clip=None).prepare().train(batches()[:4])
    managed.accelerator.free_memory()
    managed.accelerator.prepare(managed.model, managed.optimizer, managed.scheduler)
    assert api.engine_of(managed.model) is not None
    assert_same(weights(managed.train(batches()[4:]).model), expected)


def test_moments_of_a_bf16_model_survive_detach_and_another_engine(scripts):
    """Hazard: torch keeps moments in the parameter's dtype; ours are fp32 and must come back bit for bit."""
    expected = weights(scripts(True, clip=None, dtype=torch.bfloat16).prepare().train(batches()).model)
    managed = scripts(True, clip=None, dtype=torch.bfloat16).prepare().train(batches()[:4])
    managed.accelerator.free_memory()
    states = managed.optimizer.state.values()
    assert {value.dtype for state in states for value in state.values() if value.dim()} == {torch.bfloat16}
    managed.accelerator.prepare(managed.model, managed.optimizer, managed.scheduler)
    assert_same(weights(managed.train(batches()[4:]).model), expected)


def test_an_optimizer_that_has_stepped_before_prepare_keeps_its_state(scripts):
    expected = weights(scripts(False, clip=None).prepare().train(batches()).model)
    managed = scripts(True, clip=None).train(batches()[:4]).prepare().train(batches()[4:])
    assert_same(weights(managed.model), expected)


def test_two_optimizers_in_turn_over_the_same_parameters_are_refused(scripts):
    managed = scripts(True).prepare().train(batches()[:2])
    later = managed.accelerator.prepare(torch.optim.SGD(managed.model.parameters(), lr=0.1))
    managed.model(**batches()[2]).loss.backward()
    later.step()
    with pytest.raises(UnsupportedError, match="two optimizers"):
        managed.optimizer.step()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_scaled_loss(scripts, fused, clip):
    """Hazard: a gradient scaler leaves unscaling, and the decision to step, to optimizers that say they can (fused).

    The first steps overflow and are dropped, and the scale comes down; a power of two, so weights are those of a run
    without those steps.
    """

    def run(managed):
        script = scripts(managed, clip=clip)
        script.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
        script.accelerator.native_amp = True
        script.accelerator.state._mixed_precision = "fp16"
        if not fused:
            script.optimizer = torch.optim.AdamW(script.model.parameters(), lr=1e-2, weight_decay=0.1)
            script.scheduler = torch.optim.lr_scheduler.LinearLR(script.optimizer, 1.0, 0.1, 8)
        script.accelerator.autocast_handler = AutocastKwargs(enabled=False)
        if fused and not managed:
            # Accelerate does not see that a fused optimizer has skipped a step, and moves the scheduler on.
            script.optimizer._step_supports_amp_scaling = False
        script.prepare()
        skipped = []
        for batch in batches():
            script.train([batch])
            skipped.append(script.accelerator.optimizer_step_was_skipped)
        return script, skipped

    plain, expected = run(False)
    log, theirs = plain.log, weights(plain.model)
    managed, skipped = run(True)
    assert skipped == expected
    assert 0 < sum(skipped) < len(skipped)
    assert managed.accelerator.scaler.get_scale() == plain.accelerator.scaler.get_scale()
    assert [entry[2] for entry in managed.log] == [entry[2] for entry in log]
    if fused:
        assert_same(weights(managed.model), theirs)
    for name, value in weights(managed.model).items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5)


def test_a_new_optimizer_after_the_first_is_gone(scripts):
    """A second phase, a sweep: the model stays prepared and gets another optimizer."""

    def two_phases(script):
        script.prepare().train(batches()[:4])
        script.accelerator._optimizers.clear()
        script.accelerator._schedulers.clear()
        script.optimizer = script.scheduler = None
        gc.collect()
        script.optimizer = torch.optim.AdamW(script.model.parameters(), lr=1e-3, fused=True)
        script.scheduler = torch.optim.lr_scheduler.ConstantLR(script.optimizer, 1.0)
        script.optimizer, script.scheduler = script.accelerator.prepare(script.optimizer, script.scheduler)
        return weights(script.train(batches()[4:]).model)

    expected = two_phases(scripts(False))
    assert_same(two_phases(scripts(True)), expected)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_unwrap_model_keeps_the_engine(scripts, precision):
    """Hazard: unwrapping the autocast wrapper strips every layer of ``__wrapped__`` that it finds."""
    managed = scripts(True, precision=precision).prepare().train(batches()[:2])
    model = managed.accelerator.unwrap_model(managed.model, keep_fp32_wrapper=False)
    assert model is managed.model
    assert isinstance(model.forward, types.MethodType)
    assert "labels" in inspect.signature(model.forward).parameters
    for unit in model.model.layers:
        assert isinstance(unit.forward, types.MethodType)
        assert not hasattr(unit.forward, "__wrapped__")
        assert list(inspect.signature(unit.forward).parameters)
    before = weights(model)
    model(**batches()[0]).loss.backward()
    managed.optimizer.step()
    assert any(not torch.equal(before[name], value) for name, value in weights(model).items())


def test_a_deepcopy_is_a_plain_model_of_its_own(scripts):
    """Hazard: EMA models and references are deep copies; they must not share the original's weights or engine."""
    managed = scripts(True).prepare().train(batches()[:2])
    copied = copy.deepcopy(managed.model)
    now = weights(managed.model)
    assert_same(weights(copied), now)
    expected = managed.model(**batches()[0]).loss
    managed.train(batches()[2:4])
    assert_same(weights(copied), now)
    assert torch.equal(copied(**batches()[0]).loss, expected)


def test_a_step_with_a_bad_gradient_is_skipped_and_the_scheduler_waits(scripts):
    managed = scripts(True).prepare().train(batches()[:2])
    before, rate = weights(managed.model), managed.scheduler.get_last_lr()
    loss = managed.model(**batches()[2]).loss
    managed.accelerator.backward(loss * float("nan"))
    managed.optimizer.step()
    managed.scheduler.step()
    managed.optimizer.zero_grad()
    assert managed.accelerator.optimizer_step_was_skipped
    assert managed.scheduler.get_last_lr() == rate
    assert_same(weights(managed.model), before)
    managed.train(batches()[3:4])
    assert not managed.accelerator.optimizer_step_was_skipped
    assert managed.scheduler.get_last_lr() != rate


class Rows(torch.utils.data.Dataset):
    def __init__(self, seed=2):
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(0, 64, (24, 12), generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class TestTrainer:
    @pytest.fixture
    def trainer(self, clean, tmp_path):
        from accelerate.state import AcceleratorState, GradientState

        def make(managed, **more):
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            clean.setenv("ACCELERATE_USE_SLIDEFORMER", "true" if managed else "false")
            clean.setenv("SLIDEFORMER_STATUS", "off")
            settings = {
                "output_dir": str(tmp_path / str(managed)),
                "use_cpu": True,
                "report_to": "none",
                "disable_tqdm": True,
                "save_strategy": "no",
                "max_steps": 5,
                "logging_steps": 1,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 2,
                "learning_rate": 1e-2,
                "eval_strategy": "steps",
                "eval_steps": 2,
                "optim": "adamw_torch_fused",
                **more,
            }
            return Trainer(model=tiny(), args=TrainingArguments(**settings), train_dataset=Rows(), eval_dataset=Rows(3))

        return make

    @staticmethod
    def figures(trainer):
        kept = ("loss", "eval_loss", "grad_norm", "learning_rate", "step")
        return [{k: v for k, v in entry.items() if k in kept} for entry in trainer.state.log_history]

    @pytest.mark.parametrize("more", [{}, {"bf16": True}, {"bf16": True, "max_grad_norm": 0.0}, {"max_grad_norm": 0.0}])
    def test_its_logs_are_those_of_the_plain_run(self, trainer, more):
        plain = trainer(False, **more)
        plain.train()
        managed = trainer(True, **more)
        managed.train()
        assert api.engine_of(managed.model) is not None
        ours, theirs = self.figures(managed), self.figures(plain)
        assert len(ours) == len(theirs) >= 7
        assert ours == theirs
        assert_same(weights(managed.model), weights(plain.model))

    def test_evaluate_first_and_train_twice(self, trainer):
        results = []
        for managed in (False, True):
            one = trainer(managed)
            figures = [one.evaluate()["eval_loss"]]
            for _ in range(2):
                one.train()
                figures.append(one.evaluate()["eval_loss"])
            results.append(figures)
        assert results[1] == pytest.approx(results[0], rel=1e-5)

    def test_it_resumes_from_its_checkpoint(self, trainer):
        whole = trainer(True, save_strategy="steps", save_steps=3)
        whole.train()
        again = trainer(True, save_strategy="steps", save_steps=3)
        again.train(resume_from_checkpoint=f"{again.args.output_dir}/checkpoint-3")
        assert_same(weights(again.model), weights(whole.model))

    def test_immediate_is_refused_with_clipping_and_works_without(self, trainer, clean):
        clean.setenv("SLIDEFORMER_UPDATE", "immediate")
        with pytest.raises(ConfigError, match="max_grad_norm=1.0"):
            trainer(True).train()
        more = {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1}
        managed = trainer(True, **more)
        managed.train()
        clean.delenv("SLIDEFORMER_UPDATE")
        plain = trainer(False, **more)
        plain.train()
        assert_same(weights(managed.model), weights(plain.model))
