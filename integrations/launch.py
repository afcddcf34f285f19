"""Launch side: what `accelerate launch` and `accelerate config` learn about SlideFormer."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slideformer_backend.config import check_keys, keys
from slideformer_backend.errors import ConfigError
from slideformer_backend.integrations.launch_request import (
    FLAG,
    SECTION,
    TYPE_NAME,
    Section,
    flag_of,
    refuse_others,
    settings_of,
    show_one_gpu,
    write_environment,
)
from slideformer_backend.integrations.patches import Patch
from slideformer_backend.integrations.session import disabled, session

RUNNER = "slideformer_backend.run"


def wrap_cluster_config(original: Any) -> Any:
    """A ``ClusterConfig`` that knows the section and the distributed type, and writes both back."""

    @dataclasses.dataclass
    class ClusterConfig(original):  # type: ignore[misc]  # the base is only known at run time
        slideformer_config: Any = None

        @staticmethod
        def process_config(config_dict: dict[str, Any]) -> Any:
            if _is_ours(config_dict.get("distributed_type")) or config_dict.get(SECTION) is not None:
                config_dict.setdefault("num_processes", 1)
            return original.process_config(config_dict)

        def __post_init__(self) -> None:
            settings = self.slideformer_config
            if isinstance(settings, Section):
                settings = settings.settings
            if settings is not None and not isinstance(settings, Mapping):
                raise ConfigError(f"{SECTION} must be a section of keys and values.", found=repr(settings))
            named = _is_ours(vars(self)["distributed_type"])
            asked = named or settings is not None
            if named:
                self.distributed_type = "NO"  # one process, as far as Accelerate is concerned
            super().__post_init__()
            self.slideformer_config = Section(dict(settings or {})) if asked else None
            if asked:
                self._refuse_contradictions()

        def _refuse_contradictions(self) -> None:
            kind = str(getattr(self.distributed_type, "value", self.distributed_type))
            if kind != "NO":
                raise ConfigError(
                    f"{SECTION} and distributed_type: {kind} contradict each other.",
                    expected=f"distributed_type: {TYPE_NAME}",
                    remedy=f"remove {SECTION}, or change distributed_type",
                )
            for section in ("deepspeed_config", "fsdp_config", "megatron_lm_config", "parallelism_config"):
                if getattr(self, section, None):
                    raise ConfigError(f"{SECTION} and {section} contradict each other.", remedy="remove one of them")
            values = argparse.Namespace(**{name: getattr(self, name, None) for name in _CHECKED})
            refuse_others(values)
            args = argparse.Namespace(**{FLAG: True, SECTION: self.slideformer_config})
            settings_of(args, {})  # unknown keys and bad values are named before anything is launched

        def to_dict(self) -> Any:
            section, self.slideformer_config = self.slideformer_config, None
            try:
                result = dict(super().to_dict())
            finally:
                self.slideformer_config = section
            if section is not None:
                result["distributed_type"] = TYPE_NAME
                result[SECTION] = dict(section.settings)
            return result

    ClusterConfig.__module__ = original.__module__
    ClusterConfig.__qualname__ = original.__qualname__
    return ClusterConfig


_CHECKED = ("num_processes", "num_machines", "gpu_ids")


def _is_ours(distributed_type: object) -> bool:
    return isinstance(distributed_type, str) and distributed_type.upper() == TYPE_NAME


def wrap_parse_known_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Adds our flags to a launch parser when it is about to parse.

    The parser class is the one place that `accelerate launch`, `accelerate-launch` and `python -m
    accelerate.commands.launch` share (in the last, the launch module runs as ``__main__`` and cannot be patched).
    """

    @functools.wraps(original)
    def parse_known_args(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        ours = _is_launch_parser(self)
        if ours:
            add_flags(self)
        result = original(self, args, namespace)
        if ours:
            _refuse_unknown(self, result[1])
        if ours and getattr(result[0], FLAG, False) and result[0].num_processes is None:
            # Otherwise Accelerate counts the GPUs and starts one process for each of them.
            result[0].num_processes = 1
        return result

    return parse_known_args


def _refuse_unknown(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    prefix = flag_of("")
    for word in words:
        name = word.split("=")[0].lstrip("-").replace("-", "_")
        if name.startswith(prefix):
            try:
                check_keys([name[len(prefix) :]], source=word.split("=")[0])
            except ConfigError as error:
                parser.error(str(error))


def _is_launch_parser(parser: argparse.ArgumentParser) -> bool:
    return {"training_script", "config_file", "num_processes"} <= {action.dest for action in parser._actions}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds ``--use_slideformer``, ``--slideformer_<key>`` and ``--config`` to a launch parser, once."""
    options = parser._option_string_actions
    if f"--{FLAG}" in options:
        return
    if "--config" not in options:  # abbreviations are off in this parser, so this is an error without the alias
        action = options["--config"] = options["--config_file"]
        action.option_strings = [*action.option_strings, "--config"]
    group = parser.add_argument_group("SlideFormer Arguments", "Arguments related to SlideFormer.")
    group.add_argument(f"--{FLAG}", default=False, action="store_true", help="Whether to use SlideFormer.")
    for key in keys():
        if key.metadata["built"]:
            text = f"{key.metadata['doc']} ({key.metadata['kind'].text}; default {key.default})".replace("%", "%%")
        else:
            text = argparse.SUPPRESS  # known, so that it is refused by name
        group.add_argument(f"--{flag_of(key.name)}", type=str, default=None, help=text)


def wrap_validate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses other strategies before one of them is started, or asks for a package that is not installed."""

    @functools.wraps(original)
    def validate(args: argparse.Namespace) -> Any:
        result = original(args)
        settings_of(args, os.environ)
        return result

    return validate


def wrap_other_launcher(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses to start a strategy of many processes together with SlideFormer."""

    @functools.wraps(original)
    def prepare(args: argparse.Namespace, *rest: Any, **named: Any) -> Any:
        settings_of(args, os.environ)
        return original(args, *rest, **named)

    return prepare


def wrap_simple_launcher(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hands the configuration to the training process, and undoes what would slow it down or split it."""

    @functools.wraps(original)
    def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> Any:
        settings = settings_of(args, os.environ)
        command, environ = original(args)
        if settings is None:
            return command, environ
        session.report_problems()
        write_environment(environ, settings)
        asked_threads = "num_cpu_threads_per_process" in getattr(args, "nondefault", ())
        if "OMP_NUM_THREADS" not in os.environ and not asked_threads:
            environ.pop("OMP_NUM_THREADS", None)  # Accelerate's default is 1, and the optimizer runs on the CPU
        show_one_gpu(environ, _gpu_count)
        if not reaches_child(environ):
            command = through_runner(command, args)
        return command, environ

    return prepare_simple_launcher_cmd_env


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def reaches_child(environ: Mapping[str, str]) -> bool:
    """Whether torch will call our entry point in a child process with this environment."""
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return False
    return any(point.name == "slideformer_backend" for point in importlib.metadata.entry_points(group="torch.backends"))


def through_runner(command: list[str], args: argparse.Namespace) -> list[str]:
    """The command with ``python`` replaced by ``python -m slideformer_backend.run``.

    Raises:
        ConfigError: the command does not start Python, so SlideFormer cannot reach it.
    """
    if RUNNER in command:
        return command
    if sys.executable not in command:
        raise ConfigError(
            "SlideFormer cannot reach a program started with --no_python while torch's autoload is off.",
            remedy="unset TORCH_DEVICE_BACKEND_AUTOLOAD, or start the script without --no_python",
        )
    place = command.index(sys.executable) + 1
    return [*command[:place], "-m", RUNNER, *command[place:]]


def add_help_group(original: dict[str, str]) -> dict[str, str]:
    """Makes ``--use_slideformer --help`` show our arguments, as Accelerate does for its own strategies."""
    return {**original, FLAG: "SlideFormer Arguments"}


def patches() -> tuple[Patch, ...]:
    """The patches of the launching process."""
    utils, launch = "accelerate.utils.launch", "accelerate.commands.launch"
    return (
        Patch(
            "accelerate.commands.config.config_args",
            "ClusterConfig",
            wrap_cluster_config,
            f"the {SECTION} section of a config file",
        ),
        Patch(
            "accelerate.commands.utils",
            "CustomArgumentParser.parse_known_args",
            wrap_parse_known_args,
            f"--{FLAG}",
            ("args", "namespace"),
        ),
        Patch(utils, "prepare_simple_launcher_cmd_env", wrap_simple_launcher, "launching", ("args",)),
        Patch(utils, "prepare_multi_gpu_env", wrap_other_launcher, "refusing several GPUs", ("args",)),
        Patch(utils, "prepare_deepspeed_cmd_env", wrap_other_launcher, "refusing DeepSpeed", ("args",)),
        Patch(launch, "_validate_launch_command", wrap_validate, "refusing other strategies", ("args",)),
        Patch(launch, "options_to_group", add_help_group, f"the help of --{FLAG}"),
    )


def start(arguments: Sequence[str]) -> None:
    """Runs Accelerate's launcher in this process with SlideFormer switched on (unless ``SLIDEFORMER_DISABLE=1``)."""
    from slideformer_backend.integrations.hooks import install

    switch: list[str] = []
    if not disabled(os.environ):
        install()
        switch = [f"--{FLAG}"]
    from accelerate.commands.launch import main

    sys.argv = ["accelerate-launch", *switch, *arguments]
    main()
