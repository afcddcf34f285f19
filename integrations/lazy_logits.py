"""Lazy logits for the head of a managed model: no patch of any model class (DESIGN: the loss)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import slideformer_backend.integrations.lazy_logits_loss  # noqa: F401 - registers the fused losses
from slideformer_backend.engine.engine import Engine
from slideformer_backend.engine.guard import access_of
from slideformer_backend.integrations.bound_method import BoundMethod, is_eager, is_own
from slideformer_backend.integrations.lazy_logits_autograd import lazy_logits

__all__ = ["LazyHead", "install"]

CPU_BYTES = 1 << 28
"""On a CPU, logits smaller than this are computed at once: nothing is saved, and results stay plain PyTorch's bits."""

GPU_ELEMENTS = 1 << 22
"""On a GPU, fewer logits than this (the next token of a few sequences) are computed at once."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LazyHead(BoundMethod):
    """The forward of a head whose logits are lazy where that is worthwhile."""

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine()
        if engine is None or not isinstance(module, nn.Linear) or not self.is_in_charge(module):
            return super().__call__(module, *args, **kwargs)
        if len(args) != 1 or kwargs or not is_worthwhile(args[0], module.weight):
            return super().__call__(module, *args, **kwargs)
        weight, bias = module.weight, module.bias
        return lazy_logits(args[0], weight, bias, _settle(weight, bias), _stale(engine, weight, bias))


def is_worthwhile(hidden: object, weight: torch.Tensor) -> bool:
    """Whether logits of ``hidden`` should be lazy: plain tensors, enough of them, and nothing that traces or maps."""
    if type(hidden) is not torch.Tensor or hidden.dim() < 2 or hidden.dtype not in _DTYPES:
        return False
    if not is_eager() or torch.is_inference_mode_enabled() or hidden.device != weight.device:
        return False
    if weight.dtype not in _DTYPES:
        return False
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        return False
    count = hidden.shape[:-1].numel() * weight.shape[0]
    if hidden.device.type == "cuda":
        return count >= GPU_ELEMENTS
    return count * hidden.element_size() > CPU_BYTES


def install(engine: Engine) -> list[LazyHead]:
    """Make the logits of the engine's model lazy. Undone when the engine is detached.

    Returns:
        One handle per head; none where the head is not a plain linear layer.
    """
    heads = [
        LazyHead(engine, module)
        for module in _heads(engine.model)
        if isinstance(module, nn.Linear) and _is_plain(module)
    ]
    for head in heads:
        engine.add_hook(head)
    return heads


def _heads(model: nn.Module) -> Iterator[nn.Module]:
    """Output embeddings of the model, or of a model that it wraps; also as PEFT wraps them to train copies."""
    seen: set[int] = set()
    for module in model.modules():
        getter = getattr(module, "get_output_embeddings", None)
        if not callable(getter):
            continue
        try:
            head = getter()
        except (AttributeError, NotImplementedError):  # models without a head raise one or the other
            continue
        inner = getattr(head, "modules_to_save", None)
        for candidate in (head, *(inner.values() if isinstance(inner, nn.ModuleDict) else ())):
            if isinstance(candidate, nn.Module) and id(candidate) not in seen:
                seen.add(id(candidate))
                yield candidate


def _is_plain(module: nn.Module) -> bool:
    """A linear layer with the forward that torch gave it."""
    return type(module) is nn.Linear and is_own(module)


def _settle(*tensors: torch.Tensor | None) -> Callable[[], None]:
    found = [access for tensor in tensors if tensor is not None and (access := access_of(tensor)) is not None]

    def settle() -> None:
        for access in found:
            access.before(writes=False)

    return settle


def _stale(engine: Engine, *tensors: torch.Tensor | None) -> Callable[[], bool]:
    """Whether a tensor was updated since now: by a step of the engine, or for others in place."""
    counts = [_count(engine, tensor) for tensor in tensors if tensor is not None]
    before = [count() for count in counts]
    return lambda: [count() for count in counts] != before


def _count(engine: Engine, tensor: torch.Tensor) -> Callable[[], int]:
    record = engine.record_of(tensor)
    if record is None:
        return lambda: tensor._version
    unit = record.unit
    return lambda: unit.steps
