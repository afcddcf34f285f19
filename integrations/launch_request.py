"""What `accelerate launch` was asked for: the configuration from file, environment and flags, and what it refuses."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slideformer_backend.config import (
    CONFIG_VARIABLE,
    ENABLE_VARIABLE,
    PREFIX,
    SlideFormerConfig,
    environment_settings,
    is_true,
    keys,
)
from slideformer_backend.errors import ConfigError

SECTION = "slideformer_config"
TYPE_NAME = "SLIDEFORMER"
FLAG = "use_slideformer"

# Launch arguments of other strategies, with the words for them.
_OTHERS = {
    "multi_gpu": "multi-GPU training",
    "tpu": "TPU training",
    "use_deepspeed": "DeepSpeed",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "Megatron-LM",
    "use_parallelism_config": "a parallelism config",
}
_ONE_GPU = "SlideFormer trains on one GPU with one process; to use several GPUs take FSDP or DeepSpeed instead"


@dataclass(frozen=True)
class Section:
    """The ``slideformer_config`` section of a launch configuration.

    Not a dict, because Accelerate spills the entries of dict-valued sections into its own arguments.
    """

    settings: Mapping[str, object]


def flag_of(key: str) -> str:
    """The argument name of a configuration key, such as ``slideformer_update``."""
    return f"slideformer_{key}"


def settings_of(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, object] | None:
    """The settings of a launch, flags over environment over file; None when SlideFormer was not asked for.

    Raises:
        ConfigError: a bad key or value, ``--slideformer_<key>`` without SlideFormer, or a contradicting argument.
    """
    flags = {key.name: getattr(args, flag_of(key.name), None) for key in keys()}
    given = {name: value for name, value in flags.items() if value is not None}
    section: object = getattr(args, SECTION, None)
    in_file = section.settings if isinstance(section, Section) else None
    if not (getattr(args, FLAG, False) or in_file is not None or is_true(environ.get(ENABLE_VARIABLE))):
        if given:
            name = flag_of(next(iter(given)))
            raise ConfigError(
                f"--{name} has no effect: SlideFormer is not switched on.",
                remedy=f"add --{FLAG}, or distributed_type: {TYPE_NAME} in the config file",
            )
        return None
    refuse_others(args)
    merged = {**(in_file or {}), **environment_settings(environ), **given}
    values = SlideFormerConfig.from_mapping(merged, source=SECTION).to_mapping()
    return {name: values[name] for name in merged}


def refuse_others(args: argparse.Namespace) -> None:
    """Refuses what cannot go together with SlideFormer.

    Raises:
        ConfigError: another strategy, several processes, machines or GPUs.
    """
    for name, words in _OTHERS.items():
        if getattr(args, name, False):
            raise ConfigError(
                f"SlideFormer cannot be combined with {words}: {_ONE_GPU}.",
                found=f"--{name}, or the distributed_type of the config file",
                remedy=f"remove it, or take distributed_type: {TYPE_NAME}",
            )
    for name in ("num_processes", "num_machines"):
        value = getattr(args, name, None)
        if value is not None and int(value) > 1:
            raise ConfigError(f"{name}: {_ONE_GPU}.", found=value, expected=1, remedy=f"set {name} to 1")
    gpu_ids = str(getattr(args, "gpu_ids", None) or "all")
    if gpu_ids != "all" and len(gpu_ids.split(",")) > 1:
        raise ConfigError(f"gpu_ids: {_ONE_GPU}.", found=gpu_ids, expected="one id", remedy="choose one of them")


def write_environment(environ: dict[str, str], settings: Mapping[str, object]) -> None:
    """Hands the settings to the child process: everything in ``SLIDEFORMER_CONFIG``, nothing left to override it."""
    for key in keys():
        environ.pop(PREFIX + key.name.upper(), None)
    environ[ENABLE_VARIABLE] = "true"
    environ[CONFIG_VARIABLE] = json.dumps(dict(settings))


def show_one_gpu(environ: dict[str, str], count: Callable[[], int]) -> None:
    """Leaves one GPU visible: with several, ``Trainer`` would wrap the model in ``DataParallel``.

    Args:
        environ: the environment to change; an explicit choice of devices in it is narrowed to its first.
        count: the number of GPUs; asked only where no choice is made.
    """
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        if count() > 1:
            environ["CUDA_VISIBLE_DEVICES"] = "0"
    elif "," in chosen:
        environ["CUDA_VISIBLE_DEVICES"] = chosen.split(",")[0].strip()
