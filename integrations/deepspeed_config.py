"""``slideformer convert``: a DeepSpeed configuration as one of ours, and in words what has no counterpart."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slideformer_backend.config import SlideFormerConfig, keys
from slideformer_backend.errors import ConfigError
from slideformer_backend.mistakes import check_output

AUTO = "auto"
_COMMUNICATION = "tunes communication between GPUs; there is one GPU"
_PLANNED = "sizes are planned from the memory that is there (gpu_memory limits it)"
_MONITOR = "pass log_with to Accelerator, or report_to to TrainingArguments"

# Keys that need nothing in their place, and why.
_NOTHING = {
    "steps_per_print": "status: auto shows the progress",
    "wall_clock_breakdown": "trace: FILE writes a timeline",
    "memory_breakdown": "status: auto and the slideformer/... metrics show memory",
    "dump_state": "has no use here",
    "flops_profiler": "the logged slideformer/mfu says it",
    "comms_logger": _COMMUNICATION,
    "communication_data_type": _COMMUNICATION,
    "prescale_gradients": _COMMUNICATION,
    "gradient_predivide_factor": _COMMUNICATION,
    "sparse_gradients": "gradients are dense",
    "tensorboard": _MONITOR,
    "wandb": _MONITOR,
    "comet": _MONITOR,
    "csv_monitor": _MONITOR,
    "zero_allow_untested_optimizer": "every optimizer class runs",
    "zero_force_ds_cpu_optimizer": "every optimizer class runs",
    "zero_optimization.allgather_partitions": _COMMUNICATION,
    "zero_optimization.allgather_bucket_size": _COMMUNICATION,
    "zero_optimization.overlap_comm": _COMMUNICATION,
    "zero_optimization.reduce_scatter": _COMMUNICATION,
    "zero_optimization.reduce_bucket_size": _COMMUNICATION,
    "zero_optimization.contiguous_gradients": "gradients are contiguous",
    "zero_optimization.round_robin_gradients": _COMMUNICATION,
    "zero_optimization.sub_group_size": _PLANNED,
    "zero_optimization.stage3_prefetch_bucket_size": _PLANNED,
    "zero_optimization.stage3_param_persistence_threshold": _PLANNED,
    "zero_optimization.stage3_max_live_parameters": _PLANNED,
    "zero_optimization.stage3_max_reuse_distance": _PLANNED,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "saved weights are always whole",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "saved weights are always whole",
    "zero_optimization.ignore_unused_parameters": "unused parameters are left alone, as in PyTorch",
    "zero_optimization.offload_optimizer.buffer_count": _PLANNED,
    "zero_optimization.offload_optimizer.fast_init": "not needed",
    "zero_optimization.offload_optimizer.pipeline": "reads and writes always overlap",
    "zero_optimization.offload_optimizer.pipeline_read": "reads and writes always overlap",
    "zero_optimization.offload_optimizer.pipeline_write": "reads and writes always overlap",
    "zero_optimization.offload_optimizer.ratio": _PLANNED,
    "zero_optimization.offload_param.buffer_count": _PLANNED,
    "zero_optimization.offload_param.buffer_size": _PLANNED,
    "zero_optimization.offload_param.max_in_cpu": _PLANNED,
    "bf16.immediate_grad_update": "update: immediate is the nearest, without clipping",
    "fp16.auto_cast": "mixed_precision says it",
    "fp16.loss_scale_window": "pass GradScalerKwargs(growth_interval=...) to Accelerator",
    "fp16.initial_scale_power": "pass GradScalerKwargs(init_scale=2**power) to Accelerator",
    "fp16.hysteresis": "has no counterpart in torch's scaler",
    "fp16.consecutive_hysteresis": "has no counterpart in torch's scaler",
    "fp16.min_loss_scale": "has no counterpart in torch's scaler",
}
_OPTIMIZERS: dict[str, tuple[str | None, str]] = {
    "adamw": ("adamw_torch_fused", "torch.optim.AdamW"),
    "adam": ("adamw_torch_fused", "torch.optim.AdamW"),
    "sgd": ("sgd", "torch.optim.SGD"),
    "adagrad": ("adagrad", "torch.optim.Adagrad"),
    "lion": (None, "slideformer_backend.optim.lion.Lion"),
}
_SCHEDULERS = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_OPTIMIZER_FLAGS = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay"}


@dataclass
class Conversion:
    """What a DeepSpeed configuration becomes.

    Attributes:
        launch: a launch configuration of Accelerate with our section.
        script: what the training script has to be told, by argument of ``TrainingArguments``.
        notes: keys that are dropped, with what to do instead.
    """

    launch: dict[str, Any]
    script: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """Our section."""
        section: dict[str, Any] = self.launch["slideformer_config"]
        return section


def convert(config: Mapping[str, Any]) -> Conversion:
    """Translate the content of ``ds_config.json``.

    Raises:
        ConfigError: a section is not what DeepSpeed takes there.
    """
    launch = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "SLIDEFORMER", "num_processes": 1}
    result = Conversion({**launch, "slideformer_config": {"update": "exact"}})
    rest = dict(config)
    steps: tuple[Callable[[Conversion, dict[str, Any]], None], ...] = (
        _precision,
        _zero,
        _batch,
        _optimizer,
        _scheduler,
        _activations,
    )
    for step in steps:
        step(result, rest)
    for name, value in _flat(rest):
        if value not in (None, False, AUTO) and value != {}:
            result.notes.setdefault(name, _NOTHING.get(name, "has no counterpart"))
    SlideFormerConfig.from_mapping(result.settings, source="the converted configuration")
    return result


def as_yaml(result: Conversion) -> str:
    """The launch configuration, with everything else as comments."""
    import yaml

    lines = [yaml.safe_dump(result.launch, sort_keys=False).rstrip()]
    if result.script:
        flags = " ".join(f"--{name} {value}" for name, value in result.script.items())
        lines += [
            "",
            "# Was in the DeepSpeed configuration and belongs to the script (arguments of Trainer):",
            f"#   {flags}",
        ]
    if result.notes:
        lines += ["", "# Dropped:", *(f"#   {name}: {reason}" for name, reason in result.notes.items())]
    return "\n".join(lines) + "\n"


def _precision(result: Conversion, rest: dict[str, Any]) -> None:
    sections = {name: _section(rest, name) for name in ("bf16", "fp16")}
    sections["bf16"] |= _section(rest, "bfloat16")
    enabled = {name: section.pop("enabled", False) for name, section in sections.items()}
    chosen = [name for name, value in enabled.items() if value is True]
    if len(chosen) > 1:
        raise ConfigError("bf16 and fp16 are both enabled.", remedy="leave one of them")
    if AUTO in enabled.values() and not chosen:
        result.notes["bf16.enabled, fp16.enabled"] = "auto: pass --bf16 or --mixed_precision as before"
    elif AUTO not in enabled.values():
        result.launch["mixed_precision"] = chosen[0] if chosen else "no"
    else:
        result.launch["mixed_precision"] = chosen[0]
    scale = sections["fp16"].pop("loss_scale", 0)
    if "fp16" in chosen and scale not in (0, AUTO):
        result.notes["fp16.loss_scale"] = "the scale is dynamic; a fixed one has no counterpart"
    for name, section in sections.items():
        if section and (name in chosen or enabled[name] == AUTO):
            rest[name] = section


def _zero(result: Conversion, rest: dict[str, Any]) -> None:
    zero = _section(rest, "zero_optimization")
    stage = zero.pop("stage", 0)
    result.notes["zero_optimization.stage"] = (
        f"{stage} is for several GPUs; on one, weights slide and states are on the host whatever it is"
    )
    for name, key in (("offload_optimizer", "optimizer_states"), ("offload_param", "weights")):
        section = _section(zero, name)
        where = section.pop("device", "none")
        path, pinned = section.pop("nvme_path", None), section.pop("pin_memory", None)
        if where == "nvme":
            _set(result, key, "nvme", f"zero_optimization.{name}.device")
            if path is not None and key in result.settings:
                _set(result, "nvme_path", str(path), f"zero_optimization.{name}.nvme_path")
        elif where == "none" and stage:
            result.notes[f"zero_optimization.{name}.device"] = (
                "none: what fits stays on the GPU, and the rest of it slides"
            )
        if pinned is False and where != "none":
            result.settings["pin_memory"] = False
        if section:
            zero[name] = section
    if "aio" in rest:
        rest.pop("aio")
        result.notes["aio"] = "the NVMe tier sets its own queue depth and block sizes"
    for old in ("cpu_offload", "cpu_offload_params", "cpu_offload_use_pin_memory"):
        if zero.pop(old, None):
            result.notes[f"zero_optimization.{old}"] = "is how it works anyway"
    if zero:
        rest["zero_optimization"] = zero


def _batch(result: Conversion, rest: dict[str, Any]) -> None:
    whole, micro = rest.pop("train_batch_size", AUTO), rest.pop("train_micro_batch_size_per_gpu", AUTO)
    accumulation, clip = rest.pop("gradient_accumulation_steps", AUTO), rest.pop("gradient_clipping", AUTO)
    if isinstance(whole, int) and isinstance(micro, int):
        given, accumulation = accumulation, max(1, whole // micro)
        if given not in (AUTO, accumulation):
            result.notes["gradient_accumulation_steps"] = (
                f"{accumulation}, not {given}: one GPU does what {accumulation // given} did"
            )
        if whole % micro:
            result.notes["train_batch_size"] = f"{whole} is no multiple of {micro} sequences per step"
    elif isinstance(whole, int):
        result.notes["train_batch_size"] = f"choose per_device_train_batch_size times accumulation to be {whole}"
    values = {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": accumulation,
        "max_grad_norm": clip,
    }
    result.script.update({name: value for name, value in values.items() if value != AUTO})
    if result.script.get("max_grad_norm"):
        result.notes["gradient_clipping"] = (
            "DeepSpeed clips by itself; here the script does, as without either (Trainer: --max_grad_norm, else"
            " accelerator.clip_grad_norm_)"
        )


def _optimizer(result: Conversion, rest: dict[str, Any]) -> None:
    section = _section(rest, "optimizer")
    if not section:
        return
    kind, params = str(section.pop("type", "")), _section(section, "params")
    known = _OPTIMIZERS.get(kind.lower())
    if known is None:
        result.notes["optimizer.type"] = f"{kind} has no counterpart; any optimizer class of PyTorch runs"
        return
    is_plain_adam = kind.lower() == "adam" and params.pop("adam_w_mode", True) is False
    flag, cls = (None, "torch.optim.Adam") if is_plain_adam else known
    if flag is None:
        result.notes["optimizer.type"] = f"Trainer has no flag for {cls}: pass optimizers=({cls}(...), None)"
    else:
        result.script["optim"] = flag
    betas = params.pop("betas", AUTO)
    given = {**params, **(dict(zip(("adam_beta1", "adam_beta2"), betas, strict=True)) if betas != AUTO else {})}
    for name, value in given.items():
        if name in ("torch_adam", "adam_w_mode", "bias_correction") or value == AUTO:
            continue
        if name in _OPTIMIZER_FLAGS or name.startswith("adam_beta"):
            result.script[_OPTIMIZER_FLAGS.get(name, name)] = value
        else:
            result.notes[f"optimizer.params.{name}"] = f"pass {name}={value} to {cls}"
    result.notes["optimizer"] = f"a script with DummyOptim makes {cls} instead"


def _scheduler(result: Conversion, rest: dict[str, Any]) -> None:
    section = _section(rest, "scheduler")
    if not section:
        return
    kind, params = str(section.get("type", "")), _section(section, "params")
    if kind not in _SCHEDULERS:
        result.notes["scheduler.type"] = f"{kind} has no counterpart; any scheduler of PyTorch works"
        return
    result.script["lr_scheduler_type"] = _SCHEDULERS[kind]
    for name, flag in (("warmup_num_steps", "warmup_steps"), ("warmup_max_lr", "learning_rate")):
        value = params.pop(name, AUTO)
        if value != AUTO:
            result.script.setdefault(flag, value)
    params.pop("total_num_steps", None)
    if params.pop("warmup_type", "log") == "log" and kind != "WarmupCosineLR":
        result.notes["scheduler.params.warmup_type"] = "log (DeepSpeed's default) has no counterpart: warmup is linear"
    for name, value in params.items():
        if value not in (0, AUTO):
            result.notes[f"scheduler.params.{name}"] = "has no counterpart"
    result.notes["scheduler"] = "a script with DummyScheduler makes one of transformers.get_scheduler instead"


def _activations(result: Conversion, rest: dict[str, Any]) -> None:
    section = _section(rest, "activation_checkpointing")
    if section.pop("cpu_checkpointing", False):
        _set(result, "activations", "host", "activation_checkpointing.cpu_checkpointing")
    for name, value in section.items():
        if value:
            result.notes[f"activation_checkpointing.{name}"] = (
                "layers recompute by themselves, and keep their activations where they fit (recompute)"
            )


def _set(result: Conversion, key: str, value: object, source: str) -> None:
    """A key of ours, or a note where its part is not built."""
    if any(known.name == key and known.metadata["built"] for known in keys()):
        result.settings[key] = value
    else:
        result.notes[source] = f"{key}: {value} is not built yet and left out"


def _section(mapping: dict[str, Any], name: str) -> dict[str, Any]:
    value = mapping.pop(name, None)
    if value is None or value == AUTO:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a section.", found=repr(value))
    return dict(value)


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in mapping.items():
        if isinstance(value, Mapping) and f"{prefix}{name}" not in _NOTHING:
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def main(arguments: Sequence[str]) -> None:
    """``slideformer convert ds_config.json``.

    Raises:
        ConfigError, OSError: a file cannot be read or written, or holds no such configuration.
    """
    parser = argparse.ArgumentParser(
        prog="slideformer convert",
        description="Turn a DeepSpeed configuration into a launch configuration of SlideFormer.",
    )
    parser.add_argument("config", type=Path, help="ds_config.json")
    parser.add_argument("-o", "--output", type=Path, help="file to write; the terminal, if not given")
    options = parser.parse_args(arguments)
    if options.output is not None:
        check_output(options.output)
    try:
        content = json.loads(options.config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{options.config} is no JSON: {error}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{options.config} must hold a JSON object.", found=type(content).__name__)
    text = as_yaml(convert(content))
    if options.output is None:
        print(text, end="")
    else:
        options.output.write_text(text, encoding="utf-8")
        print(f"Written to {options.output}; its comments say what belongs to the script and what was dropped.")
