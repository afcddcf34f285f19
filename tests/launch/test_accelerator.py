"""`Accelerator` in the training process, over a stand-in engine: what is attached, bound, clipped, skipped, freed."""

import copy
import importlib
import inspect
import warnings

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import AutocastKwargs, GradientAccumulationPlugin, TorchDynamoPlugin
from torch import nn

from slideformer_backend import ConfigError, SlideFormerPlugin, UnsupportedError
from slideformer_backend.integrations.patches import registry
from slideformer_backend.integrations.session import session

pytestmark = pytest.mark.usefixtures("fake_api")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def made(model=None):
    model = Model() if model is None else model
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def one_step(accelerator, model, optimizer):
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()


class TestAskingForIt:
    def test_by_the_launcher(self, active):
        accelerator = Accelerator()
        assert type(accelerator).__name__ == "SlideFormerAccelerator"
        assert isinstance(accelerator, Accelerator)
        assert accelerator.slideformer_config.update == "exact"

    def test_not_at_all(self, fake_api):
        accelerator = Accelerator()
        assert type(accelerator) is Accelerator
        _, optimizer = accelerator.prepare(*made())
        assert type(optimizer) is AcceleratedOptimizer
        assert fake_api.made == []

    def test_by_a_plugin_in_the_script(self, fake_api):
        handlers = [SlideFormerPlugin(update="immediate"), AutocastKwargs(cache_enabled=False)]
        accelerator = Accelerator(kwargs_handlers=handlers)
        assert accelerator.slideformer_config.update == "immediate"
        assert accelerator.autocast_handler is handlers[1]
        assert len(handlers) == 2  # the user's list is theirs
        accelerator.prepare(Model())
        assert fake_api.made[0].config.update == "immediate"

    def test_by_a_plugin_among_positional_arguments(self):
        names = list(inspect.signature(Accelerator.__init__).parameters)[1:]
        defaults = [inspect.signature(Accelerator.__init__).parameters[name].default for name in names]
        place = names.index("kwargs_handlers")
        accelerator = Accelerator(*defaults[:place], [SlideFormerPlugin()])
        assert type(accelerator).__name__ == "SlideFormerAccelerator"

    def test_a_later_accelerator_of_the_process_uses_the_plugin_too(self):
        Accelerator(kwargs_handlers=[SlideFormerPlugin(prefetch=3)])
        assert Accelerator().slideformer_config.prefetch == 3

    def test_script_and_launcher_complete_each_other(self, active):
        active.setenv("SLIDEFORMER_CONFIG", '{"prefetch": 3, "update": "immediate"}')
        accelerator = Accelerator(kwargs_handlers=[SlideFormerPlugin(cpu_threads=2, update="immediate")])
        config = accelerator.slideformer_config
        assert (config.prefetch, config.cpu_threads, config.update) == (3, 2, "immediate")

    def test_script_and_launcher_that_contradict_each_other(self, active):
        active.setenv("SLIDEFORMER_CONFIG", '{"update": "exact"}')
        with pytest.raises(ConfigError, match="update: the script and the launcher disagree"):
            Accelerator(kwargs_handlers=[SlideFormerPlugin(update="immediate")])

    def test_a_wrong_plugin(self):
        with pytest.raises(ConfigError, match="did you mean 'update'"):
            SlideFormerPlugin(updat="exact")
        with pytest.raises(ConfigError, match="only one SlideFormerPlugin"):
            Accelerator(kwargs_handlers=[SlideFormerPlugin(), SlideFormerPlugin()])

    def test_a_wrong_call_is_still_the_stock_error(self, active):
        with pytest.raises(TypeError, match="nonsense"):
            Accelerator(nonsense=1)

    def test_a_subclass_of_the_users_keeps_its_methods(self, active, fake_api):
        class Mine(Accelerator):
            def prepare(self, *args, **kwargs):
                self.seen = len(args)
                return super().prepare(*args, **kwargs)

        accelerator = Mine()
        accelerator.prepare(*made())
        assert isinstance(accelerator, Mine)
        assert accelerator.seen == 2
        assert len(fake_api.made) == 1

    def test_switched_off_the_same_script_runs_without_it(self, active):
        active.setenv("SLIDEFORMER_DISABLE", "1")
        assert type(Accelerator(kwargs_handlers=[SlideFormerPlugin()])) is Accelerator


class TestRefusals:
    @pytest.mark.parametrize(
        ("variable", "value", "words"),
        [
            ("ACCELERATE_USE_DEEPSPEED", "true", "DeepSpeed"),
            ("ACCELERATE_USE_FSDP", "true", "FSDP"),
            ("ACCELERATE_USE_MEGATRON_LM", "true", "Megatron"),
            ("WORLD_SIZE", "2", "one GPU with one process.*WORLD_SIZE=2"),
        ],
    )
    def test_other_strategies(self, active, variable, value, words):
        active.setenv(variable, value)
        with pytest.raises(ConfigError, match=words):
            Accelerator()

    def test_a_plugin_of_another_strategy(self, active):
        with pytest.raises(ConfigError, match="DeepSpeed"):
            Accelerator(deepspeed_plugin=object())

    def test_immediate_with_a_scaled_loss(self, active):
        active.setenv("SLIDEFORMER_CONFIG", '{"update": "immediate"}')
        accelerator = Accelerator()
        accelerator.scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(ConfigError, match="immediate.*fp16.*exact, or bf16"):
            accelerator.prepare(Model())

    def test_models_that_others_have_wrapped(self, active):
        accelerator = Accelerator()
        compiled = torch.compile(Model(), backend="eager")
        with pytest.raises(UnsupportedError, match=r"torch\.compile.*pass the model itself"):
            accelerator.prepare(compiled)
        spread = Model()
        spread.hf_device_map = {"blocks.0": 0, "blocks.1": "cpu"}
        with pytest.raises(UnsupportedError, match="device_map"):
            accelerator.prepare(spread)
        with pytest.raises(UnsupportedError, match="DataParallel"):
            accelerator.prepare(nn.DataParallel(Model()))

    def test_an_optimizer_over_copies_would_train_nothing(self, active):
        model, _ = made()
        _, stale = made(copy.deepcopy(model))
        with pytest.raises(ConfigError, match="holds copies of the parameters of Model"):
            Accelerator().prepare(model, stale)

    def test_an_optimizer_over_something_else_is_none_of_our_business(self, active):
        prompt = nn.Parameter(torch.zeros(7))
        Accelerator().prepare(Model(), torch.optim.SGD([prompt], lr=1.0))

    def test_one_optimizer_over_two_models(self, active):
        one, two = Model(), Model()
        optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
        with pytest.raises(UnsupportedError, match="holds parameters of 2 models"):
            Accelerator().prepare(one, two, optimizer)


class TestPrepare:
    @pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)])
    def test_any_order_of_arguments(self, active, fake_api, order):
        model, optimizer = made()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        given = (model, optimizer, scheduler)
        results = Accelerator().prepare(*(given[i] for i in order))
        by_kind = [results[order.index(i)] for i in range(3)]
        assert by_kind[0] is model
        assert isinstance(by_kind[1], AcceleratedOptimizer)
        assert by_kind[1].optimizer is optimizer
        assert by_kind[2].optimizers == [by_kind[1]]
        assert fake_api.made[0].bound == [optimizer]

    def test_a_refused_model_leaves_nothing_prepared(self, active):
        """All models are attached before anything else, wherever they stand among the arguments."""
        accelerator = Accelerator()
        model, optimizer = made()
        model.refuse = UnsupportedError("no.")
        with pytest.raises(UnsupportedError):
            accelerator.prepare(optimizer, model)
        assert (accelerator._optimizers, accelerator._models) == ([], [])
        assert not hasattr(model, "_is_accelerate_prepared")

    def test_the_optimizer_in_an_earlier_call(self, active, fake_api):
        accelerator = Accelerator()
        model, optimizer = made()
        prepared = accelerator.prepare(optimizer)
        assert accelerator.prepare(model) is model
        assert fake_api.made[0].bound == [optimizer]
        fake_api.made[0].skip = True
        before = copy.deepcopy(model.state_dict())
        one_step(accelerator, model, prepared)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

    def test_the_optimizer_in_an_earlier_call_with_a_scaler(self, active, fake_api):
        """The stock wrapper puts the step method that it saw at construction back after every scaled step."""
        accelerator = Accelerator()
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        model, optimizer = made()
        prepared = accelerator.prepare(optimizer)
        accelerator.prepare(model)
        fake_api.made[0].skip = True
        before = copy.deepcopy(model.state_dict())
        for _ in range(2):
            one_step(accelerator, model, prepared)
            prepared.zero_grad()
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

    def test_again(self, active, fake_api):
        accelerator = Accelerator()
        model, optimizer = accelerator.prepare(*made())
        assert accelerator.prepare(model, optimizer) == (model, optimizer)
        assert len(fake_api.made) == 1
        assert fake_api.made[0].bound == [optimizer.optimizer]

    def test_several_models_with_an_optimizer_each(self, active, fake_api):
        accelerator = Accelerator()
        one, first = made()
        two, second = made()
        accelerator.prepare(first, two, one, second)
        assert {id(engine.model): engine.bound for engine in fake_api.made} == {id(one): [first], id(two): [second]}

    def test_evaluation_first_then_training(self, active, fake_api):
        """`Trainer.evaluate` before `train` prepares the model that will be trained: it must not move whole."""
        accelerator = Accelerator()
        model, optimizer = made()
        assert accelerator.prepare_model(model, evaluation_mode=True) is model
        assert fake_api.made[0].bound == []
        accelerator.prepare(model, optimizer)
        assert len(fake_api.made) == 1
        assert fake_api.made[0].bound == [optimizer]

    def test_a_model_that_cannot_slide_may_be_evaluated_but_not_trained(self, active):
        model = Model()
        model.refuse = UnsupportedError("no repeated blocks.")
        accelerator = Accelerator()
        with pytest.warns(UserWarning, match="evaluated without SlideFormer: no repeated blocks"):
            assert accelerator.prepare_model(model, evaluation_mode=True) is model
        with pytest.raises(UnsupportedError, match="no repeated blocks"):
            accelerator.prepare(model)

    def test_things_without_parameters_and_parts_of_a_managed_model(self, active, fake_api):
        accelerator = Accelerator()
        model = Model()
        accelerator.prepare(nn.MSELoss(), model, model.blocks[1])
        assert [engine.model for engine in fake_api.made] == [model]

    def test_the_model_is_never_moved_whole_and_states_stay(self, active, fake_api):
        """Hazard: the stock wrapper moves the optimizer's whole state dict to the device."""
        accelerator = Accelerator()
        accelerator.state.device = accelerator.device  # what the stock code would move to
        moved = []
        model, optimizer = made()
        active.setattr(nn.Module, "to", lambda self, *args, **kwargs: moved.append(args) or self)
        active.setattr(torch.optim.AdamW, "load_state_dict", lambda *args: moved.append("states"))
        accelerator.prepare(model, optimizer)
        accelerator.prepare(Model(), device_placement=[True])
        assert moved == []

    def test_what_the_engine_is_told(self, active, fake_api):
        active.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model, _ = accelerator.prepare(*made())
        engine = fake_api.made[0]
        assert (engine.device, engine.autocast_dtype) == (accelerator.device, torch.bfloat16)
        seen = []
        for _ in range(4):
            with accelerator.accumulate(model):
                seen.append(engine.last_microbatch())
        assert seen == [False, True, False, True]

    @pytest.mark.parametrize(
        ("precision", "handler", "dtype"),
        [("no", None, None), ("bf16", AutocastKwargs(enabled=False), None), ("bf16", None, torch.bfloat16)],
    )
    def test_autocast_dtype(self, active, fake_api, precision, handler, dtype):
        accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=[handler] if handler else None)
        accelerator.prepare(Model())
        assert fake_api.made[0].autocast_dtype == dtype

    def test_whole_model_compile_is_left_out_and_said_once(self, active):
        accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="eager"))
        with pytest.warns(UserWarning, match="leaves out torch.compile"):
            model = accelerator.prepare(Model())
        assert type(model) is Model
        assert accelerator.state.dynamo_plugin.backend == "EAGER"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            accelerator.prepare(Model())


class TestStep:
    def test_a_dropped_step_is_known_and_the_scheduler_waits(self, active, fake_api):
        accelerator = Accelerator()
        model, optimizer = made()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: the stand-in's step does not count for the scheduler
            for skip, rate in ((False, 0.01), (True, 0.01), (False, 0.001)):
                fake_api.made[0].skip = skip
                one_step(accelerator, model, optimizer)
                scheduler.step()
                assert optimizer.step_was_skipped == accelerator.optimizer_step_was_skipped == skip
                assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)

    def test_the_loss_is_divided_and_steps_wait_under_accumulation(self, active):
        plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
        accelerator = Accelerator(gradient_accumulation_plugin=plugin)
        model, optimizer = accelerator.prepare(*made())
        before = model.blocks[0].linear.weight.clone()
        changed = []
        for _ in range(2):
            with accelerator.accumulate(model):
                one_step(accelerator, model, optimizer)
                changed.append(not torch.equal(before, model.blocks[0].linear.weight))
        assert changed == [False, True]


class TestClipping:
    @pytest.fixture
    def ready(self, active, fake_api):
        accelerator = Accelerator()
        model, _ = accelerator.prepare(*made())
        accelerator.backward(model(torch.ones(2, 4)).square().sum())
        return accelerator, model, fake_api.made[0]

    @staticmethod
    def plain(parameters, *how):
        """Gradients and result of torch's own function on copies."""
        copies = [nn.Parameter(p.detach().clone()) for p in parameters]
        for copied, p in zip(copies, parameters, strict=True):
            copied.grad = None if p.grad is None else p.grad.clone()
        total = torch.nn.utils.clip_grad_norm_(copies, *how)
        return total, [copied.grad for copied in copies]

    @pytest.mark.parametrize("max_norm", [0.5, float("inf")])
    def test_all_of_a_managed_model_is_ours(self, ready, max_norm):
        accelerator, model, engine = ready
        total, gradients = self.plain(list(model.parameters()), max_norm)
        assert accelerator.clip_grad_norm_(model.parameters(), max_norm) == total
        assert [(clip[1], clip[2]) for clip in engine.clips] == [(max_norm, 2.0)]
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))

    def test_a_subset_and_a_single_tensor_are_ours(self, ready):
        accelerator, model, engine = ready
        accelerator.clip_grad_norm_(model.blocks[1].parameters(), 0.5)
        accelerator.clip_grad_norm_(model.blocks[0].linear.weight, 0.5)
        assert [len(clip[0]) for clip in engine.clips] == [2, 1]

    def test_another_norm_is_torchs_in_place(self, ready):
        accelerator, model, engine = ready
        total, gradients = self.plain(list(model.parameters()), 0.5, 1.0)
        assert accelerator.clip_grad_norm_(model.parameters(), 0.5, norm_type=1) == total
        assert engine.clips == []
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))

    def test_strangers_without_a_gradient_do_not_matter(self, ready):
        accelerator, model, engine = ready
        stranger = nn.Parameter(torch.ones(3))
        total, _ = self.plain(list(model.parameters()), 0.5)
        assert accelerator.clip_grad_norm_([stranger, *model.parameters()], 0.5) == total
        assert [len(clip[0]) for clip in engine.clips] == [6]

    def test_a_mixed_set_is_clipped_by_its_common_norm(self, ready):
        accelerator, model, engine = ready
        stranger = nn.Parameter(torch.ones(3))
        stranger.grad = torch.full((3,), 50.0)
        mixed = [*model.parameters(), stranger]
        total, gradients = self.plain(mixed, 0.5)
        assert accelerator.clip_grad_norm_(iter(mixed), 0.5) == total
        assert engine.clips == []
        assert all(torch.equal(p.grad, g) for p, g in zip(mixed, gradients, strict=True))

    def test_nothing_and_nothing_of_ours(self, ready):
        accelerator, _, engine = ready
        assert accelerator.clip_grad_norm_([], 1.0) == 0
        assert accelerator.clip_grad_norm_([nn.Parameter(torch.ones(1))], 1.0) == 0
        assert engine.clips == []

    def test_by_value_in_place(self, ready):
        accelerator, model, _ = ready
        accelerator.clip_grad_value_(model.parameters(), 0.01)
        assert max(p.grad.abs().max() for p in model.parameters()) <= 0.01


class TestLater:
    def test_free_memory_detaches_and_the_model_can_be_prepared_again(self, active, fake_api):
        accelerator = Accelerator()
        model, optimizer = made()
        accelerator.prepare(model, optimizer)
        engine = fake_api.made[0]
        accelerator.free_memory()
        assert engine.detached
        assert "step" not in vars(optimizer)
        accelerator.prepare(model, optimizer)
        assert fake_api.made[0] is not engine
        assert fake_api.made[0].bound == [optimizer]

    def test_an_optimizer_prepared_before_free_memory_is_bound_to_the_new_engine(self, active, fake_api):
        """What Trainer does when `train` is called twice: the same model, the same wrapped optimizer."""
        accelerator = Accelerator()
        model, prepared = accelerator.prepare(*made())
        accelerator.free_memory()
        assert accelerator.prepare(model, prepared) == (model, prepared)
        assert fake_api.made[0].bound == [prepared.optimizer]

    def test_unwrap_deepcopy_and_autocast_wrapper(self, active):
        accelerator = Accelerator(mixed_precision="bf16")
        model = Model()
        accelerator.prepare(model)
        assert accelerator.unwrap_model(model) is model
        assert copy.deepcopy(accelerator) is accelerator
        unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        assert unwrapped is model
        assert model(torch.ones(1, 4)).dtype == torch.float32
        assert not hasattr(model.forward, "__wrapped__")

    def test_missing_hooks_and_unknown_versions_are_said_once_and_only_when_asked_for(self, clean, monkeypatch):
        from slideformer_backend.integrations import session as module

        monkeypatch.setattr(module, "_TESTED", {"accelerate": ((0, 1), (0, 2)), "no_such_library": ((1,), (2,))})
        monkeypatch.setattr(registry, "problems", ["accelerate.x.y: not there; without it z does not work"])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Accelerator()
        clean.setenv("ACCELERATE_USE_SLIDEFORMER", "true")
        with pytest.warns(UserWarning, match="SlideFormer") as caught:
            Accelerator()
        assert len(caught) == 2
        assert "tested with accelerate 0.1 to 0.2" in str(caught[0].message)
        assert "accelerate.x.y: not there" in str(caught[1].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Accelerator()

    def test_everything_was_found_in_the_installed_versions(self, active):
        from slideformer_backend.integrations import (
            accelerate_,
            checkpoints,
            launch,
            placement,
            questionnaire,
            recipe_flag,
            trainer,
            transformers_,
            trl_,
        )

        parts = (accelerate_, checkpoints, launch, placement, questionnaire, recipe_flag, trainer, transformers_, trl_)
        expected = [patch for part in parts for patch in part.patches()]
        for patch in expected:
            importlib.import_module(patch.module)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            session.report_problems()
        assert registry.problems == []
        assert set(registry.applied()) == {patch.name for patch in expected}
