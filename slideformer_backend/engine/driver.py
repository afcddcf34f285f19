"""The driver of a unit: its forward with weights fetched, recomputed in backward (DESIGN 3.3, D2)."""

from __future__ import annotations

import contextlib
import copy
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..errors import UnsupportedError
from .backward import PostBackward, Visit
from .effects import Effects
from .guard import tensors_in
from .unit import Unit, Where

if TYPE_CHECKING:
    from .engine import Engine


class UnitForward:
    """Takes the place of a unit's ``forward``; ``undo`` puts the original back.

    A deep copy of the module carries this bound to the copy; the copy is not managed and runs the original forward.
    """

    def __init__(self, engine: Engine, unit: Unit, module: nn.Module) -> None:
        self._engine = weakref.ref(engine)
        self._unit = unit
        self._module = weakref.ref(module)
        self._own = module.__dict__.get("forward")
        self.__name__ = "forward"
        self.__doc__ = type(module).forward.__doc__
        self.__signature__ = inspect.signature(type(module).forward)
        module.forward = types.MethodType(self, module)

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine()
        if engine is None or module is not self._module():
            return self._original(module)(*args, **kwargs)
        if torch.is_grad_enabled():
            return self._with_graph(engine, module, args, kwargs)
        unit = self._unit
        if unit.is_resident:
            return self._original(module)(*args, **kwargs)
        engine.enter(unit, Where.FORWARD, is_wide=engine.is_wide(unit))
        try:
            with _unit_context(module):
                return self._original(module)(*args, **kwargs)
        finally:
            engine.leave(unit)

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitForward:
        return self

    def undo(self) -> None:
        """Put the original forward back."""
        module = self._module()
        if module is None:
            return
        module.__dict__.pop("forward", None)
        if self._own is not None:
            module.__dict__["forward"] = self._own

    def _original(self, module: nn.Module) -> Callable[..., Any]:
        if self._own is None:
            return types.MethodType(type(module).forward, module)
        function = getattr(self._own, "__func__", None)
        return self._own if function is None else types.MethodType(function, module)

    def _resident(self, engine: Engine, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A unit that lives on the device: no window; recomputed only where the placement says so."""
        forward, backend, name = self._original(module), engine.backend, self._unit.name
        is_traced = backend.recorder is not None
        if is_traced:
            args, kwargs = _map_inputs(lambda: backend.end("backward", name), args, kwargs)
            backend.begin("forward", name)
        if engine.recomputes(self._unit):
            run = _Runner(forward, module, args, kwargs, autocast_cache=True)
            output = checkpoint(run, *args, use_reentrant=False, **kwargs)
        else:
            with _hf_checkpointing_off(module):
                output = forward(*args, **kwargs)
        if is_traced:
            backend.end("forward", name)
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: backend.begin("backward", name))
        return output

    def _with_graph(self, engine: Engine, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = self._unit
        if unit.is_resident:
            return self._resident(engine, module, args, kwargs)
        visit = Visit(unit, is_wide=engine.is_wide(unit))
        backward = engine.backward
        args, kwargs = _map_inputs(lambda: backward.close(visit), args, kwargs)
        run = _Runner(self._original(module), module, args, kwargs)
        with _autocast_cache_off():
            output = checkpoint(
                run,
                *args,
                use_reentrant=False,
                context_fn=lambda: (engine.window_open(visit), _Repeated(lambda: engine.window_reopen(visit))),
                **kwargs,
            )
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(_OpenHook(backward.open, visit))
        return output


class _OpenHook:
    """Gradient hook on a unit's output: the backward of the unit begins."""

    def __init__(self, open_visit: Callable[[Visit], None], visit: Visit) -> None:
        self._open = open_visit
        self._visit = visit

    def __call__(self, gradient: torch.Tensor) -> None:
        self._open(self._visit)


class _Repeated(contextlib.AbstractContextManager[None]):
    """A context entered anew each time: with ``retain_graph=True`` a graph is recomputed by every backward."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *exception: Any) -> bool | None:
        return self._entered.pop().__exit__(*exception)


class _Runner:
    """Runs the original forward; the recompute sees key-value caches as the forward found them.

    A cache is appended to by the forward. The recompute gets a shallow copy of the cache from before, so that nothing
    is appended twice and a prefix (prefix tuning) still takes part.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        autocast_cache: bool = False,
    ) -> None:
        self._context = _hf_checkpointing_off if autocast_cache else _unit_context
        self._forward = forward
        self._module = module
        self._before = {id(value): _snapshot(value) for value in (*args, *kwargs.values()) if _is_cache(value)}
        self._versions = [(state, state._version) for cache in self._before.values() for state in _states(cache)]
        self._effects = Effects(module)
        self._is_first = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_first:
            self._is_first = False
            with self._context(self._module):
                output = self._forward(*args, **kwargs)
            if any(state._version != version for state, version in self._versions):
                raise UnsupportedError(
                    f"A {type(self._module).__name__} overwrote the recurrent state that it was given in a cache, which"
                    " its recompute needs again.",
                    remedy="train with use_cache=False, or without a cache that already holds tokens",
                )
            return output
        if self._before:
            args = tuple(self._restored(value) for value in args)
            kwargs = {name: self._restored(value) for name, value in kwargs.items()}
        with self._effects.replayed(), self._context(self._module):
            return self._forward(*args, **kwargs)

    def _restored(self, value: Any) -> Any:
        return _snapshot(self._before[id(value)]) if id(value) in self._before else value


def _is_cache(value: Any) -> bool:
    return any(base.__name__ == "Cache" for base in type(value).__mro__)


def _has_parts(item: Any) -> bool:
    return hasattr(item, "__dict__") and not isinstance(item, torch.Tensor)


def _states(cache: Any) -> Iterator[torch.Tensor]:
    """Tensors of a cache that recurrent layers overwrite; keys and values are attributes, and are replaced."""
    for value in vars(cache).values():
        if isinstance(value, dict):
            yield from (item for item in value.values() if isinstance(item, torch.Tensor) and not item.is_inference())
        for item in value if isinstance(value, list) else (value,):
            if _is_cache(item) or (isinstance(value, list) and _has_parts(item)):
                yield from _states(item)


def _snapshot(cache: Any) -> Any:
    """A copy of a cache, or of a layer of one, that shares only tensors."""
    copied = copy.copy(cache)
    for name, value in vars(cache).items():
        if isinstance(value, list):
            setattr(copied, name, [_snapshot(item) if _has_parts(item) else item for item in value])
        elif isinstance(value, dict):  # which layers are filled, states of recurrent layers
            setattr(copied, name, dict(value))
        elif _is_cache(value):
            setattr(copied, name, _snapshot(value))
    return copied


@contextlib.contextmanager
def _unit_context(module: nn.Module) -> Iterator[None]:
    """Around the forward of a sliding unit. Autocast casts are not cached, since the cache is keyed by parameters whose
    memory belongs to another unit a moment later (DESIGN 3.3)."""
    with _hf_checkpointing_off(module), _autocast_cache_off():
        yield


@contextlib.contextmanager
def _hf_checkpointing_off(module: nn.Module) -> Iterator[None]:
    """The engine decides about recompute: Hugging Face's own switch is off inside."""
    had = module.__dict__.get("gradient_checkpointing")
    if had:
        module.__dict__["gradient_checkpointing"] = False
    try:
        yield
    finally:
        if had:
            module.__dict__["gradient_checkpointing"] = had


@contextlib.contextmanager
def _autocast_cache_off() -> Iterator[None]:
    was = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)


def _map_inputs(
    close: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put the post-backward identity on every input tensor that requires a gradient."""
    inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
    if not inputs:
        return args, kwargs
    passed = PostBackward.apply(close, *inputs)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    replaced = {id(tensor): new for tensor, new in zip(inputs, passed, strict=True)}
    return _replace(args, replaced), _replace(kwargs, replaced)


def _replace(value: Any, replaced: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return replaced.get(id(value), value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_replace(item, replaced) for item in value))
    if type(value) in (list, tuple):
        return type(value)(_replace(item, replaced) for item in value)
    if type(value) is dict:
        return {key: _replace(item, replaced) for key, item in value.items()}
    return value
