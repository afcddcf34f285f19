"""transformers and torch: loading, moving, training arguments. ``meta`` plays the GPU where there is none."""

import json
import warnings

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from slideformer_backend import ConfigError, UnsupportedError
from slideformer_backend.integrations import placement
from slideformer_backend.integrations.status import TokenCounter

TINY = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 32}


@pytest.fixture
def model():
    return LlamaForCausalLM(LlamaConfig(**TINY))


@pytest.fixture
def gpu(active, fake_api):
    """``meta`` counts as the GPU, and so does ``cuda`` where a name is all that is needed."""
    active.setattr(placement, "is_accelerator", lambda device: device.type in ("meta", "cuda"))
    return torch.device("meta")


def devices(module):
    return {tensor.device.type for tensor in module.parameters()}


class TestMoving:
    def test_a_move_before_prepare_is_put_off(self, gpu, model):
        assert model.to(gpu) is model
        assert devices(model) == {"cpu"}
        assert placement.pending_device(model) == gpu

    def test_the_dtype_still_changes(self, gpu, model):
        model.to(gpu, torch.bfloat16)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        model.to(torch.float64)
        assert {p.dtype for p in model.parameters()} == {torch.float64}
        assert devices(model) == {"cpu"}
        assert placement.pending_device(model) == gpu

    @pytest.mark.parametrize("how", [(), (0,), (torch.device("cuda", 1),)])
    def test_cuda_is_put_off_too(self, gpu, model, how):
        assert model.cuda(*how) is model
        assert devices(model) == {"cpu"}
        assert placement.pending_device(model).type == "cuda"

    def test_a_prepared_model_forgets_it(self, gpu, model, fake_api):
        from accelerate import Accelerator

        model.to(gpu)
        model.model.layers.to(gpu)
        Accelerator().prepare(model)
        assert placement.pending_device(model) is None
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
        assert devices(model) == {"cpu"}
        model.to(gpu)
        model.cuda()
        model.to("cpu")
        assert devices(model) == {"cpu"}
        left = model._forward_pre_hooks.values()
        assert [type(hook) for hook in left] == [TokenCounter]  # no move: that hook is a method of a PendingMove

    def test_a_teacher_that_is_never_prepared_moves_at_its_first_forward(self, gpu, model):
        model.to(gpu)
        output = model(input_ids=torch.ones(1, 4, dtype=torch.long))
        assert devices(model) == {"meta"}
        assert output.logits.device == gpu
        assert not model._forward_pre_hooks
        assert placement.pending_device(model) is None

    def test_its_inputs_move_with_it(self, gpu):
        """The script may have put the batch where ``model.device`` was when the move was put off."""

        class Teacher(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))

            def forward(self, x, *, more):
                return x.device, more["mask"].device, more["name"]

        teacher = Teacher().to(gpu)
        assert teacher(torch.ones(2), more={"mask": torch.ones(1), "name": "n"}) == (gpu, gpu, "n")

    def test_back_to_the_cpu_forgets_it(self, gpu, model):
        model.to(gpu)
        model.to("cpu")
        assert placement.pending_device(model) is None
        assert not model._forward_pre_hooks

    def test_small_things_move_as_ever(self, gpu):
        head = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        for module in (nn.Linear(2, 2), head, nn.CrossEntropyLoss()):
            assert devices(module.to(gpu)) <= {"meta"}

    def test_any_model_of_blocks_waits(self, gpu):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
        assert devices(model.to(gpu)) == {"cpu"}

    def test_the_dtype_of_a_managed_model_is_not_changed_behind_the_engine(self, gpu, model, fake_api):
        from accelerate import Accelerator

        Accelerator().prepare(model)
        assert model.to(torch.float32) is model
        with pytest.raises(UnsupportedError, match="dtype of a LlamaForCausalLM.*before prepare"):
            model.to(dtype=torch.bfloat16, device=gpu)

    def test_not_asked_for_it_moves(self, clean, model):
        clean.setattr(placement, "is_accelerator", lambda device: True)
        assert devices(model.to("meta")) == {"meta"}


class TestLoading:
    @pytest.fixture
    def folder(self, tmp_path, model):
        model.save_pretrained(tmp_path)
        return tmp_path

    @pytest.mark.parametrize("kind", [LlamaForCausalLM, AutoModelForCausalLM])
    @pytest.mark.parametrize("device_map", ["auto", {"": "cuda:0"}, {"": 0}, "cuda:0", 0, torch.device("cuda", 0)])
    def test_a_device_map_does_not_move_the_model(self, gpu, folder, kind, device_map):
        """Hazard: TRL loads with device_map="auto" when it sees a GPU."""
        loaded = kind.from_pretrained(folder, device_map=device_map)
        assert devices(loaded) == {"cpu"}
        assert getattr(loaded, "hf_device_map", None) is None
        assert placement.pending_device(loaded).type == "cuda"

    def test_neither_does_a_device_context(self, gpu, folder, active):
        active.setattr(
            "transformers.modeling_utils.get_torch_context_manager_or_global_device", lambda: torch.device("cuda")
        )
        loaded = LlamaForCausalLM.from_pretrained(folder)
        assert devices(loaded) == {"cpu"}

    def test_no_map_leaves_nothing_behind(self, gpu, folder):
        loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        assert placement.pending_device(loaded) is None
        assert loaded.dtype == torch.bfloat16
        assert placement.pending_device(LlamaForCausalLM.from_pretrained(folder, device_map="cpu")) is None

    def test_a_wrong_map_is_still_transformers_error(self, gpu, folder):
        with pytest.raises(ValueError, match="device_map"):
            LlamaForCausalLM.from_pretrained(folder, device_map="nonsense")

    def test_not_asked_for_the_map_is_obeyed(self, clean):
        from transformers import modeling_utils

        assert modeling_utils.check_and_set_device_map("auto") == "auto"
        assert modeling_utils.check_and_set_device_map(0) == {"": 0}


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = torch.arange(6) + index
        return {"input_ids": ids, "labels": ids}


class TestTrainer:
    @pytest.fixture
    def arguments(self, tmp_path):
        def make(**more):
            common = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "max_steps": 2}
            return TrainingArguments(**{**common, "disable_tqdm": True, "save_strategy": "no", **more})

        return make

    def test_it_trains_with_its_default_clipping(self, active, fake_api, arguments, model):
        trainer = Trainer(model=model, args=arguments(gradient_accumulation_steps=2), train_dataset=Numbers())
        assert trainer.args.max_grad_norm == 1.0
        trainer.train()
        (engine,) = fake_api.made
        assert engine.model is model
        assert len(engine.bound) == 1
        assert [clip[1:] for clip in engine.clips] == [(1.0, 2.0)] * 2
        assert all("loss" in entry or "train_loss" in entry for entry in trainer.state.log_history)

    def test_evaluate_before_and_after_and_train_twice(self, active, fake_api, arguments, model):
        trainer = Trainer(model=model, args=arguments(), train_dataset=Numbers(), eval_dataset=Numbers())
        losses = [trainer.evaluate()["eval_loss"]]
        for _ in range(2):
            trainer.train()
            losses.append(trainer.evaluate()["eval_loss"])
        assert losses == sorted(losses, reverse=True)
        assert len(set(losses)) == 3
        assert len(fake_api.made) == 1
        assert fake_api.made[0].bound == [trainer.optimizer.optimizer]

    def test_immediate_with_clipping_is_refused_before_anything_is_changed(self, active, fake_api, arguments, model):
        active.setenv("SLIDEFORMER_CONFIG", json.dumps({"update": "immediate"}))
        trainer = Trainer(model=model, args=arguments(), train_dataset=Numbers())
        before = model.lm_head.weight.clone()
        with pytest.raises(ConfigError, match=r"immediate cannot clip.*max_grad_norm=1\.0.*--max_grad_norm 0"):
            trainer.train()
        assert torch.equal(before, model.lm_head.weight)
        assert fake_api.made == []

    def test_immediate_without_clipping_trains(self, active, fake_api, arguments, model):
        active.setenv("SLIDEFORMER_CONFIG", json.dumps({"update": "immediate"}))
        Trainer(model=model, args=arguments(max_grad_norm=0.0), train_dataset=Numbers()).train()
        assert fake_api.made[0].config.update == "immediate"

    @pytest.mark.parametrize(("asked", "count"), [(True, 1), (False, 4)])
    def test_one_gpu_per_process(self, clean, arguments, asked, count):
        """Hazard: Trainer takes every visible GPU and wraps the model in DataParallel."""
        settings = arguments()
        settings._n_gpu = 4
        if asked:
            clean.setenv("ACCELERATE_USE_SLIDEFORMER", "true")
        assert settings.n_gpu == count

    def test_it_does_not_move_the_model(self, gpu, fake_api, arguments, model):
        trainer = Trainer(model=model, args=arguments(), train_dataset=Numbers())
        trainer._move_model_to_device(model, gpu)
        assert devices(model) == {"cpu"}

    def test_whole_model_compile_is_left_out(self, active, fake_api, arguments, model):
        settings = arguments(torch_compile=True, torch_compile_backend="eager")
        trainer = Trainer(model=model, args=settings, train_dataset=Numbers())
        with pytest.warns(UserWarning, match="leaves out torch.compile"):
            trainer.train()
        assert trainer.model_wrapped is model


def test_nothing_warns_in_a_plain_run(active, fake_api, model):
    from accelerate import Accelerator

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator = Accelerator()
        prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        accelerator.backward(prepared(input_ids=torch.ones(1, 4).long(), labels=torch.ones(1, 4).long()).loss)
        optimizer.step()
