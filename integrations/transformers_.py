"""transformers: loading without moving to the GPU, and one GPU per process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from slideformer_backend.errors import ConfigError
from slideformer_backend.integrations.patches import Patch
from slideformer_backend.integrations.session import session

# Devices asked for by the `from_pretrained` that is running, collected where transformers interprets `device_map`.
_asked: ContextVar[list[object] | None] = ContextVar("slideformer_device_map", default=None)


def wrap_check_and_set_device_map(original: Callable[..., Any]) -> Callable[..., Any]:
    """Drops the device map: the weights load into host memory, from where they slide.

    This is the one place through which every source of a device map goes: the argument (TRL passes "auto"), ``with
    torch.device("cuda")``, and the default device.
    """

    @functools.wraps(original)
    def check_and_set_device_map(device_map: Any) -> Any:
        result = original(device_map)
        if not session.is_active() or result is None or _is_meta(result):
            return result
        asked = _asked.get()
        if asked is not None:
            asked.append(result)
        return None

    return check_and_set_device_map


def _is_meta(device_map: object) -> bool:
    devices = device_map.values() if isinstance(device_map, dict) else [device_map]
    return any(str(device) == "meta" for device in devices)


def wrap_from_pretrained(original: Any) -> Any:
    """Notes where the script wanted the model, for the case that it is never prepared (a teacher)."""
    function = original.__func__

    @functools.wraps(function)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not session.is_active():
            return function(cls, *args, **kwargs)
        token = _asked.set([])
        try:
            model = function(cls, *args, **kwargs)
            asked = _asked.get()
        finally:
            _asked.reset(token)
        for device_map in asked or ():
            _put_off(model, device_map)
        return model

    return classmethod(from_pretrained)


def _put_off(model: Any, device_map: object) -> None:
    import torch

    from slideformer_backend.integrations import placement

    loaded = model[0] if isinstance(model, tuple) else model
    values = list(device_map.values()) if isinstance(device_map, dict) else ["cuda"]  # "auto", "balanced", ...
    devices = [torch.device("cuda", value) if isinstance(value, int) else torch.device(value) for value in values]
    target = next((device for device in devices if placement.is_accelerator(device)), None)
    if target is not None:
        placement.put_off(loaded, target)


def wrap_n_gpu(original: Any) -> Any:
    """``TrainingArguments.n_gpu``: one process trains on one GPU, never in ``DataParallel``."""
    getter = original.fget

    def n_gpu(self: Any) -> int:
        count = int(getter(self))
        return min(count, 1) if session.is_active() else count

    return property(functools.wraps(getter)(n_gpu), original.fset, original.fdel, original.__doc__)


def wrap_train(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Trainer.train``: refuses what can only fail at the first step, after an update has been applied."""

    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = session.config()
        if config is not None and config.update == "immediate":
            if self.args.max_grad_norm is not None and self.args.max_grad_norm > 0:
                raise ConfigError(
                    "update: immediate cannot clip by the global norm, which is known only after the last gradient.",
                    found=f"max_grad_norm={self.args.max_grad_norm} (TrainingArguments)",
                    remedy="take update: exact, or pass --max_grad_norm 0",
                )
            if self.args.fp16:
                raise ConfigError(
                    "update: immediate cannot scale the loss, whose overflow is known only after the last gradient.",
                    found="fp16=True (TrainingArguments)",
                    remedy="take update: exact, or bf16",
                )
        return original(self, *args, **kwargs)

    return train


def patches() -> tuple[Patch, ...]:
    """The patches of transformers."""
    loading = "transformers.modeling_utils"
    return (
        Patch(
            loading,
            "check_and_set_device_map",
            wrap_check_and_set_device_map,
            "loading with a device_map",
            ("device_map",),
        ),
        Patch(loading, "PreTrainedModel.from_pretrained", wrap_from_pretrained, "loading with a device_map"),
        Patch("transformers.training_args", "TrainingArguments.n_gpu", wrap_n_gpu, "Trainer on one of several GPUs"),
        Patch("transformers.trainer", "Trainer.train", wrap_train, "refusing update: immediate with clipping"),
    )
