"""The SlideFormer branch of `accelerate config`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from slideformer_backend.config import SlideFormerConfig, keys
from slideformer_backend.integrations.launch_request import Section
from slideformer_backend.integrations.patches import Patch

_ASKED = ("update", "cpu_threads")


def wrap_get_cluster_input(original: Callable[..., Any]) -> Callable[..., Any]:
    """Asks for SlideFormer after Accelerate's own questions, when those chose one process and no other strategy."""

    @functools.wraps(original)
    def get_cluster_input() -> Any:
        config = original()
        kind = str(getattr(config.distributed_type, "value", config.distributed_type))
        if kind == "NO" and _ask("Do you want to use SlideFormer (offload for one GPU)? [yes/NO]: ", _yes_no, False):
            config.slideformer_config = Section(ask_settings())
        return config

    return get_cluster_input


def ask_settings() -> dict[str, object]:
    """Asks for the keys that most users decide on; returns those that differ from their defaults."""
    settings: dict[str, object] = {}
    for key in keys():
        if key.name not in _ASKED:
            continue
        name, kind = key.name, key.metadata["kind"]
        value = _ask(
            f"{name} ({key.metadata['doc']}), {kind.text}? [{key.default}]: ",
            functools.partial(_value, name),
            key.default,
        )
        if value != key.default:
            settings[name] = value
    return settings


def _value(name: str, text: str) -> object:
    return SlideFormerConfig.from_mapping({name: text}).to_mapping()[name]


def _ask(question: str, convert: Callable[[str], Any], default: object) -> Any:
    while True:
        text = input(question).strip()
        if not text:
            return default
        try:
            return convert(text)
        except (ValueError, KeyError) as error:
            print(f"Not understood: {error}")


def _yes_no(text: str) -> bool:
    return {"yes": True, "y": True, "no": False, "n": False}[text.lower()]


def patches() -> tuple[Patch, ...]:
    """The patch of `accelerate config`."""
    module = "accelerate.commands.config.config"
    return (
        Patch(module, "get_cluster_input", wrap_get_cluster_input, "the SlideFormer branch of `accelerate config`"),
    )
