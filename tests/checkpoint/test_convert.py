"""``slideformer convert``: DeepSpeed configurations as people have them."""

import json

import pytest
import yaml
from transformers import HfArgumentParser, TrainingArguments

from slideformer_backend.cli import main
from slideformer_backend.config import SlideFormerConfig, keys
from slideformer_backend.errors import ConfigError
from slideformer_backend.integrations.deepspeed_config import as_yaml, convert

# The files that transformers' own documentation and tests give for stages 2 and 3.
STAGE_3 = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def test_all_auto():
    result = convert(STAGE_3)
    assert result.settings == {"update": "exact"}
    assert "mixed_precision" not in result.launch
    assert result.script == {"optim": "adamw_torch_fused", "lr_scheduler_type": "constant_with_warmup"}
    assert "has no counterpart" not in " ".join(
        text for name, text in result.notes.items() if not name.startswith(("fp16", "scheduler"))
    )
    assert "wall_clock_breakdown" not in result.notes


def test_every_value_goes_somewhere():
    """No key of the input is lost: it is in the settings, a flag, or a note."""
    config = {
        "bf16": {"enabled": True},
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.7,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "betas": [0.8, 0.95], "eps": 1e-9, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 7, "total_num_steps": 99}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zero_quantized_weights": True},
        "elasticity": {"enabled": True},
        "tensorboard": {"enabled": True, "output_path": "x"},
    }
    result = convert(config)
    assert result.launch["mixed_precision"] == "bf16"
    assert result.script == {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 16,
        "max_grad_norm": 0.7,
        "optim": "adamw_torch_fused",
        "learning_rate": 3e-5,
        "adam_epsilon": 1e-9,
        "weight_decay": 0.1,
        "adam_beta1": 0.8,
        "adam_beta2": 0.95,
        "lr_scheduler_type": "linear",
        "warmup_steps": 7,
    }
    assert result.notes["gradient_accumulation_steps"] == "16, not 2: one GPU does what 8 did"
    assert result.notes["elasticity.enabled"] == "has no counterpart"
    assert result.notes["zero_optimization.zero_quantized_weights"] == "has no counterpart"
    assert "log_with" in result.notes["tensorboard"]


def test_the_flags_are_trainers(tmp_path):
    config = {**STAGE_3, "gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.99], "weight_decay": 0.01}}
    words = [word for name, value in convert(config).script.items() for word in (f"--{name}", str(value))]
    arguments = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        [*words, "--output_dir", str(tmp_path), "--use_cpu", "true"]
    )[0]
    assert (arguments.max_grad_norm, arguments.learning_rate, arguments.adam_beta2) == (1.0, 1e-5, 0.99)


def test_nvme_becomes_our_keys_where_they_are_built():
    built = {key.name for key in keys() if key.metadata["built"]}
    config = {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
            "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
        },
        "activation_checkpointing": {"cpu_checkpointing": True},
    }
    result = convert(config)
    for key, value, source in (
        ("optimizer_states", "nvme", "zero_optimization.offload_optimizer.device"),
        ("weights", "nvme", "zero_optimization.offload_param.device"),
        ("activations", "host", "activation_checkpointing.cpu_checkpointing"),
    ):
        if key in built:
            assert result.settings[key] == value
        else:
            assert result.notes[source] == f"{key}: {value} is not built yet and left out"
    if {"optimizer_states", "nvme_path"} <= built:
        assert result.settings["nvme_path"] == "/nvme"


def test_others():
    assert convert({"fp16": {"enabled": True, "loss_scale": 128}}).launch["mixed_precision"] == "fp16"
    assert "fixed" in convert({"fp16": {"enabled": True, "loss_scale": 128}}).notes["fp16.loss_scale"]
    assert convert({}).launch["mixed_precision"] == "no"
    assert "OneBitAdam" in convert({"optimizer": {"type": "OneBitAdam"}}).notes["optimizer.type"]
    assert "Lion" in convert({"optimizer": {"type": "Lion"}}).notes["optimizer.type"]
    assert (
        "torch.optim.Adam"
        in convert({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}).notes["optimizer.type"]
    )
    pinned = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}}
    assert convert(pinned).settings["pin_memory"] is False
    with pytest.raises(ConfigError, match="both enabled"):
        convert({"fp16": {"enabled": True}, "bf16": {"enabled": True}})
    with pytest.raises(ConfigError, match="zero_optimization must be a section"):
        convert({"zero_optimization": 3})


def test_the_command(tmp_path, capsys):
    source, target = tmp_path / "ds_config.json", tmp_path / "slideformer.yaml"
    source.write_text(json.dumps({**STAGE_3, "gradient_clipping": 1.0}))
    main(["convert", str(source)])
    shown = capsys.readouterr().out
    assert shown == as_yaml(convert(json.loads(source.read_text())))
    main(["convert", str(source), "-o", str(target)])
    assert target.read_text() == shown
    content = yaml.safe_load(shown)
    assert content["distributed_type"] == "SLIDEFORMER"
    SlideFormerConfig.from_mapping(content["slideformer_config"])
    source.write_text("{")
    for words, reason in (
        ([source], f"{source} is no JSON: Expecting"),
        ([tmp_path / "none.json"], "none.json"),
        ([source, "-o", tmp_path / "none" / "x.yaml"], "there is no folder"),
    ):
        with pytest.raises(SystemExit) as error:
            main(["convert", *map(str, words)])
        assert error.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("slideformer convert: ")
        assert reason in line
