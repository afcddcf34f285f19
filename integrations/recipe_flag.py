"""``--slideformer slideformer.yaml`` in a recipe's own command line, beside ``--deepspeed ds_config.json``.

Understood wherever a recipe parses ``TrainingArguments`` (or a subclass) with ``HfArgumentParser``, and as an argument
of ``TrainingArguments`` itself. It switches SlideFormer on in this process, as a plugin in the script would.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from slideformer_backend.errors import ConfigError
from slideformer_backend.integrations import hooks
from slideformer_backend.integrations.launch_request import SECTION, TYPE_NAME
from slideformer_backend.integrations.patches import Patch
from slideformer_backend.integrations.plugin import SlideFormerPlugin
from slideformer_backend.integrations.session import session

KEY = "slideformer"


def switch_on(value: object) -> None:
    """Trains with SlideFormer from now on.

    Args:
        value: a mapping of keys; the path of a YAML or JSON file of keys, or of a launch configuration with our
            section; None or an empty string for the defaults.

    Raises:
        ConfigError: the file is not there or not a mapping, a key is unknown, a value is bad.
    """
    settings = dict(value) if isinstance(value, Mapping) else _read(str(value)) if value else {}
    session.plugin = SlideFormerPlugin(**settings)
    hooks.keep_off_gpu()


def _read(path: str) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--{KEY}: the configuration cannot be read.", found=f"{path} ({error})") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"--{KEY}: the configuration is not a mapping of keys.", found=path)
    if SECTION not in loaded and "distributed_type" not in loaded:
        return dict(loaded)
    kind = loaded.get("distributed_type", TYPE_NAME)
    if SECTION not in loaded and kind != TYPE_NAME:
        raise ConfigError(
            f"--{KEY}: this is the launch configuration of another strategy.",
            found=f"{path} with distributed_type: {kind}",
            expected=f"distributed_type: {TYPE_NAME}, or {SECTION}",
        )
    return dict(loaded.get(SECTION) or {})


class _SwitchOn(argparse.Action):
    """Acts while the command line is read, before arguments, models and trainers are made; leaves nothing behind."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        try:
            switch_on(values)
        except ConfigError as error:
            parser.error(str(error))


def wrap_parser(original: Callable[..., None]) -> Callable[..., None]:
    """``HfArgumentParser.__init__``: one more option where training arguments are parsed."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if _has_training_arguments(self) and f"--{KEY}" not in self._option_string_actions:
            self.add_argument(
                f"--{KEY}", action=_SwitchOn, nargs="?", dest=argparse.SUPPRESS, default=argparse.SUPPRESS,
                metavar="CONFIG", help="Train with SlideFormer, configured by this YAML file (or by its defaults).",
            )  # fmt: skip

    return __init__


def wrap_parse_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """``HfArgumentParser.parse_dict``, which its JSON and YAML readers call: takes our key out."""

    @functools.wraps(original)
    def parse_dict(self: Any, args: dict[str, Any], *rest: Any, **named: Any) -> Any:
        if KEY in args and _has_training_arguments(self):
            args = dict(args)
            switch_on(args.pop(KEY))
        return original(self, args, *rest, **named)

    return parse_dict


def wrap_training_arguments(original: Callable[..., None]) -> Callable[..., None]:
    """``TrainingArguments.__init__``: accepts ``slideformer=``.

    As ``deepspeed=`` it counts for the process, since recipes make further arguments out of their first ones; False
    switches it off again.
    """

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if KEY in kwargs:
            value = kwargs.pop(KEY)
            if value is False:
                session.plugin = None
            elif value is not None:
                switch_on(value)
        original(self, *args, **kwargs)

    return __init__


def _has_training_arguments(parser: Any) -> bool:
    kinds = getattr(parser, "dataclass_types", ())
    return any(base.__name__ == "TrainingArguments" for kind in kinds for base in kind.__mro__)


def patches() -> tuple[Patch, ...]:
    """The patches of transformers' argument parsing."""
    purpose = f"--{KEY} in a recipe's command line"
    parser = "transformers.hf_argparser"
    return (
        Patch(parser, "HfArgumentParser.__init__", wrap_parser, purpose),
        Patch(parser, "HfArgumentParser.parse_dict", wrap_parse_dict, purpose, ("args",)),
        Patch("transformers.training_args", "TrainingArguments.__init__", wrap_training_arguments, purpose),
    )
