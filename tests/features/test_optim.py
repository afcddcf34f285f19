"""Every value of Trainer's ``--optim``: a fused rule, the optimizer as itself, or refused by name."""

import importlib.util

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from slideformer_backend import UnsupportedError, api
from slideformer_backend.optim.rules import rule_for
from tests.parity.harness import run_managed
from tests.parity.models import batch, language_loss, stack, steps

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 64}
LOW_RANK = {"optim_target_modules": ["q_proj", "mlp"], "optim_args": "rank=4,update_proj_gap=2"}
APOLLO = {"optim_target_modules": ["q_proj", "mlp"], "optim_args": "rank=4,update_proj_gap=2,proj=random"}
# value -> (the rule, "itself" or "refused"; the package it comes from; what else Trainer wants)
VALUES = {
    "adamw_torch": ("adamw", "torch", {}),
    "adamw_torch_fused": ("adamw", "torch", {}),
    "sgd": ("sgd", "torch", {}),
    "adagrad": ("itself", "torch", {}),
    "rmsprop": ("itself", "torch", {}),
    "adafactor": ("itself", "transformers", {}),
    "grokadamw": ("itself", "grokadamw", {}),
    "stable_adamw": ("itself", "optimi", {}),
    "schedule_free_adamw": ("itself", "schedulefree", {"lr_scheduler_type": "constant"}),
    "schedule_free_radam": ("itself", "schedulefree", {"lr_scheduler_type": "constant"}),
    "schedule_free_sgd": ("itself", "schedulefree", {"lr_scheduler_type": "constant"}),
    "galore_adamw": ("itself", "galore_torch", LOW_RANK),
    "galore_adafactor": ("itself", "galore_torch", LOW_RANK),
    "apollo_adamw": ("itself", "apollo_torch", APOLLO),
    "galore_adamw_layerwise": ("refused", "galore_torch", LOW_RANK),
    "galore_adafactor_layerwise": ("refused", "galore_torch", LOW_RANK),
    "apollo_adamw_layerwise": ("refused", "apollo_torch", APOLLO),
    "lomo": ("refused", "lomo_optim", {}),
    "adalomo": ("refused", "lomo_optim", {}),
    "adamw_torch_4bit": ("refused", "torchao", {}),
    "adamw_torch_8bit": ("refused", "torchao", {}),
    "galore_adamw_8bit": ("refused", "bitsandbytes", LOW_RANK),
    "galore_adamw_8bit_layerwise": ("refused", "bitsandbytes", LOW_RANK),
    **{
        value: ("refused", "bitsandbytes", {})
        for value in (
            "adamw_bnb_8bit", "adamw_8bit", "ademamix", "ademamix_8bit", "lion_8bit", "lion_32bit",
            "paged_adamw_32bit", "paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit",
            "paged_lion_8bit", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit",
        )
    },
    # of other hardware, or of an archived package: transformers itself says what is missing
    "adamw_torch_xla": ("refused", "torch_xla", {}),
    "adamw_torch_npu_fused": ("refused", "torch_npu", {}),
    "adamw_anyprecision": ("itself", "torchdistx", {}),
}  # fmt: skip


def test_every_value_is_decided():
    assert VALUES.keys() == {name.value for name in OptimizerNames}


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = batch(index, rows=1, length=12)[0]
        return {"input_ids": ids, "labels": ids}


@pytest.fixture
def train(clean, tmp_path):
    from accelerate.state import AcceleratorState, GradientState

    def run(managed, optim, more):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        clean.setenv("ACCELERATE_USE_SLIDEFORMER", "true" if managed else "false")
        clean.setenv("SLIDEFORMER_STATUS", "off")
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        settings = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "save_strategy": "no"}
        settings |= {"max_steps": 4, "learning_rate": 1e-3, "per_device_train_batch_size": 2, "disable_tqdm": True}
        trainer = Trainer(model=model, args=TrainingArguments(**settings, optim=optim, **more), train_dataset=Rows())
        trainer.train()
        if managed:
            (engine,) = api.engines()
            engine.settle()
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        for engine in api.engines():
            engine.detach()
        return trainer, weights

    yield run
    for engine in api.engines():
        engine.detach()


NOT_HERE = {
    "stable_adamw": "optimi asks Triton for a GPU driver when it is imported with Triton",
    "adalomo": "lomo_optim allocates on CUDA when it is made",
    "galore_adafactor_layerwise": "transformers gives it lr and relative_step, which exclude each other",
}
"""Values that fail in the same way without us on a machine without a GPU, or anywhere."""


def skip_if_absent(optim):
    package = VALUES[optim][1]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if optim in NOT_HERE:
        pytest.skip(NOT_HERE[optim])


RUN = [value for value, (how, _, _) in VALUES.items() if how != "refused"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optim", RUN)
def test_it_trains_as_without_us(train, optim):
    """Bit for bit, but for torch's own AdamW implementations without ``fused``, which round differently."""
    skip_if_absent(optim)
    how, _, more = VALUES[optim]
    _, expected = train(False, optim, more)
    trainer, found = train(True, optim, more)
    rule = rule_for(trainer.optimizer.optimizer)
    assert (rule.name if rule is not None else "itself") == how
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if optim == "adamw_torch" else {"rtol": 0, "atol": 0}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optim", [value for value in VALUES if value not in RUN])
def test_it_is_refused_before_anything_is_trained(train, optim):
    skip_if_absent(optim)
    with pytest.raises(UnsupportedError, match=r"runs on GPU tensors only|inside backward"):
        train(True, optim, VALUES[optim][2])


def stand_in(module, name="Fancy8bit"):
    """An optimizer that says it comes from ``module``."""
    return type(name, (torch.optim.SGD,), {"__module__": module})


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("bitsandbytes.optim.adamw", "runs on GPU tensors only"),
        ("torchao.optim.adam", "runs on GPU tensors only"),
        ("apex.optimizers.fused_adam", "runs on GPU tensors only"),
        ("deepspeed.ops.adam.fused_adam", "runs on GPU tensors only"),
        ("lomo_optim.lomo", "updates weights inside backward"),
    ],
)
@pytest.mark.parametrize("inherited", [False, True])
def test_refused_by_name(active, fake_api, module, reason, inherited):
    from accelerate import Accelerator

    kind = stand_in(module)
    if inherited:
        kind = type("Mine", (kind,), {})
    model = stack()()
    optimizer = kind(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=f"{kind.__name__} {reason}.*--optim adamw_torch_fused"):
        Accelerator(cpu=True).prepare(model, optimizer)
    assert fake_api.made == []
    assert optimizer.step.__func__ is not None


def test_the_dummy_of_layerwise_optimizers_is_refused(active, fake_api):
    from accelerate import Accelerator
    from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

    with pytest.raises(UnsupportedError, match="inside backward"):
        Accelerator(cpu=True).prepare(stack()(), LayerWiseDummyOptimizer(optimizer_dict={}))


def test_a_hook_that_steps_inside_backward_is_refused(device):
    """Its update would go into a slot and be lost."""

    def script(run):
        own = {p: torch.optim.SGD([p], lr=0.1) for p in run.model.parameters()}
        handles = [p.register_post_accumulate_grad_hook(lambda p: own[p].step()) for p in own]
        before = [p.detach().clone() for p in run.model.parameters()]
        ids = batch(0, device=run.device)
        with pytest.raises(UnsupportedError, match=r"SGD steps .* inside backward"):
            run.backward(language_loss(run.forward(ids), ids))
        assert all(torch.equal(one, two) for one, two in zip(before, run.model.parameters(), strict=True))
        for handle in handles:
            handle.remove()
        run.model.zero_grad()
        steps(run, run.optimizer(torch.optim.AdamW, lr=1e-2, fused=True))

    run_managed(stack(), script, device)
