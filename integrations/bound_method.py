"""A module's method taken over, with an undo; what a fused way of computing needs to be legal."""

from __future__ import annotations

import inspect
import types
import weakref
from typing import Any

import torch
from torch import nn

from slideformer_backend.engine.engine import Engine

__all__ = ["BoundMethod", "is_eager", "is_own"]


class BoundMethod:
    """Takes the place of a module's method while an engine drives the model; ``remove`` puts the original back.

    A deep copy of the module carries this bound to the copy, which runs the original method. A method that somebody has
    replaced on the module already must not be taken over (:func:`is_own`).
    """

    def __init__(self, engine: Engine, module: nn.Module, name: str = "forward") -> None:
        self._engine = weakref.ref(engine)
        self._module = weakref.ref(module)
        original = getattr(type(module), name)
        self.__name__ = name
        self.__doc__ = original.__doc__
        self.__signature__ = inspect.signature(original)
        setattr(module, name, types.MethodType(self, module))

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The method of the module's class; subclasses compute in another way what they can."""
        # called as a function: torch.compile cannot trace the making of a bound method
        return getattr(type(module), self.__name__)(module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundMethod:
        return self

    def is_in_charge(self, module: nn.Module) -> bool:
        """Whether ``module`` is ours (no copy) and still driven by the engine."""
        engine = self._engine()
        return engine is not None and not engine.is_detached and module is self._module()

    def remove(self) -> None:
        """Put the original back, unless somebody has put theirs over ours since: then ours stays and passes through."""
        module = self._module()
        if module is None or getattr(module.__dict__.get(self.__name__), "__func__", None) is not self:
            return
        del module.__dict__[self.__name__]


def is_own(module: nn.Module, name: str = "forward") -> bool:
    """Whether the method is the one of the module's class: nobody has replaced it on this module."""
    return name not in module.__dict__


def is_eager() -> bool:
    """Whether plain eager PyTorch runs: nothing traces, compiles or maps over the operations."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    return torch._C._functorch.peek_interpreter_stack() is None
