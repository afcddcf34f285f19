"""Lazy logits for the head of a managed model: no patch of any model class (DESIGN: the loss)."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import slideformer_backend.integrations.lazy_logits_loss  # noqa: F401 - registers the fused losses
from slideformer_backend.engine.engine import Engine
from slideformer_backend.engine.guard import access_of
from slideformer_backend.integrations.lazy_logits_autograd import lazy_logits

__all__ = ["LazyHead", "install"]

CPU_BYTES = 1 << 28
"""On a CPU, logits smaller than this are computed at once: nothing is saved, and results stay plain PyTorch's bits."""

GPU_ELEMENTS = 1 << 22
"""On a GPU, fewer logits than this (the next token of a few sequences) are computed at once."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LazyHead:
    """Takes the place of a head's ``forward``; ``remove`` puts the original back.

    A deep copy of the module carries this bound to the copy, which runs the original forward.
    """

    def __init__(self, engine: Engine, module: nn.Linear) -> None:
        self._engine = weakref.ref(engine)
        self._module = weakref.ref(module)
        self._own = module.__dict__.get("forward")
        self.__name__ = "forward"
        self.__doc__ = nn.Linear.forward.__doc__
        self.__signature__ = inspect.signature(nn.Linear.forward)
        module.forward = types.MethodType(self, module)  # type: ignore[method-assign]  # undone by remove

    def __call__(self, module: nn.Linear, *args: Any, **kwargs: Any) -> torch.Tensor:
        engine = self._engine()
        is_ours = engine is not None and not engine.is_detached and module is self._module()
        if engine is None or not is_ours or len(args) != 1 or kwargs or not is_worthwhile(args[0], module.weight):
            found: torch.Tensor = self._original(module)(*args, **kwargs)
            return found
        weight, bias = module.weight, module.bias
        return lazy_logits(args[0], weight, bias, _settle(weight, bias), _stale(engine, weight, bias))

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyHead:
        return self

    def remove(self) -> None:
        """Put the original forward back."""
        module = self._module()
        if module is None:
            return
        if self._own is not None:
            module.forward = self._own  # type: ignore[method-assign]  # the user's own, put back
        else:
            module.__dict__.pop("forward", None)

    def _original(self, module: nn.Linear) -> Callable[..., Any]:
        if self._own is not None and module is self._module():
            own: Callable[..., Any] = self._own
            return own
        return types.MethodType(type(module).forward, module)


def is_worthwhile(hidden: object, weight: torch.Tensor) -> bool:
    """Whether logits of ``hidden`` should be lazy: plain tensors, enough of them, and nothing that traces or maps."""
    if type(hidden) is not torch.Tensor or hidden.dim() < 2 or hidden.dtype not in _DTYPES:
        return False
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or torch.is_inference_mode_enabled():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or hidden.device != weight.device:
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
    return type(module) is nn.Linear and "forward" not in module.__dict__


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
