"""What a unit runs twice: its original forward, first with the caller's arguments, then again for the backward."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedError
from .arguments import Arguments
from .boundaries import Boundaries
from .effects import Effects
from .given import caches_in, fresh, states_in
from .guard import found_in
from .reach import GENERATORS, Picture
from .shelf import Boundary
from .visit import PostBackward, Visit


@contextlib.contextmanager
def unit_context(module: nn.Module) -> Iterator[None]:
    """Around the forward of a sliding unit. Autocast casts are not cached, since the cache is keyed by parameters whose
    memory belongs to another unit a moment later (DESIGN 3.3)."""
    with hf_checkpointing_off(module), autocast_cache_off():
        yield


@contextlib.contextmanager
def hf_checkpointing_off(module: nn.Module) -> Iterator[None]:
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
def autocast_cache_off() -> Iterator[None]:
    was = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)


class Runner:
    """Runs the original forward; the recompute sees its arguments as the forward found them.

    A cache is appended to by the forward. The recompute gets a shallow copy of the cache from before, so that nothing
    is appended twice and a prefix (prefix tuning) still takes part; of lists, dicts and other objects likewise.

    Args:
        name: the unit's name.
        forward: the original forward.
        module: whose forward it is.
        args: positional arguments.
        kwargs: keyword arguments.
        picture: what the module holds.
        autocast_cache: autocast keeps its casts of the module's parameters.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        picture: Picture,
        *,
        autocast_cache: bool = False,
    ) -> None:
        self._context = hf_checkpointing_off if autocast_cache else unit_context
        self._forward = forward
        self._module = module
        self._name = name
        self._versions = [(state, state._version) for cache in caches_in(args, kwargs) for state in states_in(cache)]
        self._arguments = Arguments(name, module, args, kwargs)
        self._effects = Effects(picture, found_in((args, kwargs), GENERATORS))
        self._variables = contextvars.copy_context()
        memo: dict[int, Any] = {}
        # the forward's own containers end up with its results, whose graph would hold us and we them
        self._given: tuple[tuple[Any, ...], dict[str, Any]] = args, kwargs
        self._args: tuple[Any, ...] = fresh(args, memo)
        self._kept: tuple[Any, ...] | None = self._args
        self.kwargs: dict[str, Any] = {name: fresh(value, memo) for name, value in kwargs.items()}
        self._writes = bool(memo)
        """Whether some argument is a container that the forward may write to."""
        self._boundaries: Boundaries | None = None
        self._is_first = True
        self.visit: Visit | None = None
        """Lives as long as the graph."""
        self.first: object = None
        """Keeps the alias of a boundary that has left, while the boundary is here for others."""

    def slide(self, boundaries: Boundaries) -> tuple[Any, ...]:
        """Positional arguments for the checkpoint; ``kwargs`` go with them.

        Where the script has hooks for saved tensors (offloading by TRL or torch) they are the unit's own, which the
        hooks then see. Otherwise they are kept here, so that it is us who notice that one was changed, and one of them,
        the boundary, may leave the device.
        """
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            self._kept = None
            boundaries.give_way()
            return self._args
        found = boundaries.find(self._args)
        if found is not None:
            tensor = self._args[found]
            if boundaries.is_on:
                self._boundaries = boundaries
                self._arguments.let_go(tensor)
                self._kept = (*self._args[:found], boundaries.put(self._name, tensor), *self._args[found + 1 :])
            else:
                boundaries.note(tensor)
        # a checkpoint saves the random state of devices it sees among positional arguments
        return (torch.empty(0, device=boundaries.device),)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_first:
            self._is_first = False
            (args, kwargs), self._given, self._args, self.kwargs = self._given, ((), {}), (), {}
            with self._context(self._module):
                output = self._forward(*args, **kwargs)
            self._effects.has_run()
            if any(state._version != version for state, version in self._versions):
                raise UnsupportedError(
                    f"A {type(self._module).__name__} overwrote the recurrent state that it was given in a cache, which"
                    " its recompute needs again.",
                    remedy="train with use_cache=False, or without a cache that already holds tokens",
                )
            self._arguments.check_forward(output)
            return output
        self._arguments.check_recompute()
        args = args if self._kept is None else self._kept
        if self._boundaries is not None:
            args = tuple(self._loaded(self._boundaries, value) for value in args)
        if self._writes:
            memo: dict[int, Any] = {}
            args = fresh(args, memo)
            kwargs = {name: fresh(value, memo) for name, value in kwargs.items()}
        with self._effects.replayed(), self._context(self._module):
            return self._variables.copy().run(self._forward, *args, **kwargs)

    @staticmethod
    def _loaded(boundaries: Boundaries, value: Any) -> Any:
        if not isinstance(value, Boundary):
            return value
        tensor = boundaries.get(value)
        if not value.requires_grad:
            return tensor
        return PostBackward.apply(_nothing, tensor.requires_grad_())  # type: ignore[no-untyped-call]  # no leaf


def _nothing(_: object) -> None:
    """The recompute's own inputs close nothing."""
