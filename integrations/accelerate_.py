"""The constructor of ``Accelerator``: accepts the plugin, refuses contradictions, turns on SlideFormer."""

from __future__ import annotations

import functools
import inspect
import os
import random
from collections.abc import Callable
from typing import Any

from slideformer_backend.errors import ConfigError
from slideformer_backend.integrations.patches import Patch
from slideformer_backend.integrations.plugin import SlideFormerPlugin
from slideformer_backend.integrations.session import session

# Arguments and environment switches of Accelerate's other strategies, with the words for them.
_OTHER_ARGUMENTS = {
    "deepspeed_plugin": "DeepSpeed",
    "deepspeed_plugins": "DeepSpeed",
    "fsdp_plugin": "FSDP",
    "torch_tp_plugin": "tensor parallelism",
    "megatron_lm_plugin": "Megatron-LM",
    "parallelism_config": "a parallelism config",
}
_OTHER_SWITCHES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}


def wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    """``Accelerator.__init__``: the stock constructor, then our subclass's behaviour if SlideFormer was asked for."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        plugin, args, kwargs = take_plugin(signature, self, args, kwargs)
        if plugin is not None:
            session.plugin = plugin
        config = session.config()
        if config is None:
            original(self, *args, **kwargs)
            return
        session.report_problems()
        refuse_others(signature.bind(self, *args, **kwargs).arguments)
        original(self, *args, **kwargs)
        state = random.getstate()  # a library of the status line draws a number when it is imported: not the user's
        from slideformer_backend.integrations.accelerator import enable

        random.setstate(state)

        enable(self, config)

    return __init__


def take_plugin(
    signature: inspect.Signature,
    self: object,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[SlideFormerPlugin | None, tuple[Any, ...], dict[str, Any]]:
    """Takes our plugin out of ``kwargs_handlers``, where Accelerate would not know it. The user's list stays as it is.

    Raises:
        ConfigError: two plugins.
    """
    try:
        bound = signature.bind(self, *args, **kwargs)
    except TypeError:
        return None, args, kwargs  # a wrong call: the stock constructor raises the error its users know
    handlers = bound.arguments.get("kwargs_handlers") or ()
    ours = [handler for handler in handlers if isinstance(handler, SlideFormerPlugin)]
    if not ours:
        return None, args, kwargs
    if len(ours) > 1:
        raise ConfigError("kwargs_handlers: only one SlideFormerPlugin.", found=ours)
    bound.arguments["kwargs_handlers"] = [item for item in handlers if item is not ours[0]] or None
    return ours[0], bound.args[1:], bound.kwargs


def refuse_others(arguments: dict[str, Any]) -> None:
    """Refuses other strategies and several processes.

    Raises:
        ConfigError: names what was found.
    """
    found = [words for name, words in _OTHER_ARGUMENTS.items() if arguments.get(name) is not None]
    found += [words for name, words in _OTHER_SWITCHES.items() if os.environ.get(name, "false").lower() == "true"]
    if found:
        raise ConfigError(
            f"SlideFormer cannot be combined with {found[0]}: it trains on one GPU with one process.",
            remedy="remove one of the two",
        )
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes.isdigit() and int(processes) > 1:
        raise ConfigError(
            "SlideFormer trains on one GPU with one process; to use several GPUs take FSDP or DeepSpeed instead.",
            found=f"WORLD_SIZE={processes}",
            expected=1,
            remedy="launch with --num_processes 1",
        )


def patches() -> tuple[Patch, ...]:
    """The patch of Accelerate in the training process."""
    purpose = "training with SlideFormer through Accelerator"
    return (Patch("accelerate.accelerator", "Accelerator.__init__", wrap_init, purpose, ("kwargs_handlers",)),)
