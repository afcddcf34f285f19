"""Keeps models off the GPU until it is known what they are for.

Scripts write ``model.to(device)`` before ``prepare`` as a matter of course, and a model that is larger than the GPU
cannot follow. While SlideFormer is active such a move is put off: a model that is then prepared slides instead, and
one that is not (a frozen teacher, a reference model) moves at its first forward, as the script asked.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from slideformer_backend.errors import UnsupportedError
from slideformer_backend.integrations.patches import Patch
from slideformer_backend.integrations.session import session

if TYPE_CHECKING:
    from slideformer_backend.api import Engine

_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}

_pending: WeakKeyDictionary[nn.Module, PendingMove] = WeakKeyDictionary()


class PendingMove:
    """A move that a script asked for and that has not happened.

    Args:
        module: the module; a forward pre-hook on it makes the move when the module turns out to be unmanaged.
        device: where it should go.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.device = device
        self._handle: RemovableHandle = module.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def cancel(self) -> None:
        self._handle.remove()

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        forget(module)
        if engine_around(module) is None:
            module._apply(self._moved)
            # The script may have put its batch where `model.device` was.
            args, kwargs = tree_map(self._moved, (args, kwargs))
        return args, kwargs

    def _moved(self, value: Any) -> Any:
        return value.to(self.device) if isinstance(value, torch.Tensor) else value


def put_off(module: nn.Module, device: torch.device) -> None:
    """Notes that ``module`` should go to ``device`` unless it is prepared for training first."""
    forget(module)
    _pending[module] = PendingMove(module, device)


def forget(module: nn.Module) -> None:
    """Drops the moves put off for ``module`` and its submodules."""
    for part in module.modules():
        move = _pending.pop(part, None)
        if move is not None:
            move.cancel()


def pending_device(module: nn.Module) -> torch.device | None:
    """Where ``module`` is still to go."""
    move = _pending.get(module)
    return None if move is None else move.device


def engine_around(module: nn.Module) -> Engine | None:
    """The engine that drives ``module``, a model that contains it, or one inside it. Never imports the engine."""
    api = sys.modules.get("slideformer_backend.api")
    if api is None:
        return None
    for engine in api.engines():
        if any(part is module for part in engine.model.modules()):
            return cast("Engine", engine)
    return cast("Engine | None", api.engine_of(module))


def slides(module: nn.Module) -> bool:
    """Whether ``module`` is a model of repeated blocks; small things (a loss, a single layer) move as ever."""
    for part in module.modules():
        if isinstance(part, (nn.ModuleList, nn.Sequential)):
            kinds = [type(block) for block in part if next(block.children(), None) is not None]
            if len(kinds) > len(set(kinds)):
                return True
    return False


def is_accelerator(device: torch.device) -> bool:
    """Whether models are kept off this device: a GPU that is there."""
    return device.type == "cuda" and torch.cuda.is_available()


def wrap_to(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Module.to``: changes dtype and memory format at once, and puts off the move to the GPU."""

    @functools.wraps(original)
    def to(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not session.is_active():
            return original(self, *args, **kwargs)
        device, dtype, memory_format = _parse(*args, **kwargs)
        engine = engine_around(self)
        if engine is not None:
            _refuse_cast(self, engine, dtype)
            return self
        if device is None or not is_accelerator(device) or not slides(self):
            if device is not None:
                forget(self)
            return original(self, *args, **kwargs)
        put_off(self, device)
        rest = {"dtype": dtype, "memory_format": memory_format}
        rest = {name: value for name, value in rest.items() if value is not None}
        return original(self, **rest) if rest else self

    return to


def wrap_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Module.cuda``: as ``Module.to``."""

    @functools.wraps(original)
    def cuda(self: nn.Module, device: int | torch.device | None = None) -> Any:
        if not session.is_active():
            return original(self, device)
        return self.to(
            "cuda" if device is None else torch.device("cuda", device) if isinstance(device, int) else device
        )

    return cuda


def wrap_cast(dtype: torch.dtype) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``Module.half`` and its like: as ``Module.to``, for a model that an engine drives."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def cast(self: nn.Module) -> Any:
            drives = session.is_active() and next(self.parameters(), None) is not None
            return self.to(dtype) if drives and engine_around(self) is not None else original(self)

        return cast

    return wrap


def _parse(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, Any]:
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype, memory_format


def _refuse_cast(module: nn.Module, engine: Engine, dtype: torch.dtype | None) -> None:
    """Refuses a cast to another dtype than the user's, which a parameter in the window may not show at the moment."""
    records = {parameter: engine.record_of(parameter) for parameter in module.parameters()}
    kinds = {parameter.dtype if record is None else record.spec.dtype for parameter, record in records.items()}
    found = {kind for kind in kinds if kind.is_floating_point}
    if dtype is not None and found - {dtype}:
        raise UnsupportedError(
            f"The dtype of a {type(module).__name__} that SlideFormer manages cannot be changed.",
            found=", ".join(sorted(str(kind) for kind in found)),
            expected=str(dtype),
            remedy="convert the model before prepare(), or call accelerator.free_memory() first",
        )


def patches() -> tuple[Patch, ...]:
    """The patches of torch, applied only once SlideFormer is asked for."""
    purpose = "keeping the model off the GPU before prepare()"
    return (
        Patch("torch.nn.modules.module", "Module.to", wrap_to, purpose),
        Patch("torch.nn.modules.module", "Module.cuda", wrap_cuda, purpose, ("device",)),
        *(
            Patch("torch.nn.modules.module", f"Module.{name}", wrap_cast(dtype), "refusing to change dtypes that slide")
            for name, dtype in _CASTS.items()
        ),
    )
