"""What ``p.grad`` shows of a gradient that is there and cannot be had: it is not None, and nothing reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from ..errors import UnsupportedError
from .guard import _METADATA
from .unit import ParamRecord

S = TypeVar("S", bound="StandIn")


class StandIn(torch.Tensor):
    """Shape, dtype and device of a gradient. Subclasses say what became of it, and what to do instead."""

    fate: str
    remedy: str
    _name: str
    _reset: Callable[[], None]

    @classmethod
    def of(cls: type[S], record: ParamRecord, device: torch.device, reset: Callable[[], None]) -> S:
        """The stand-in for the gradient of ``record``; ``reset`` is called when the script zeroes it."""
        made: S = torch.Tensor._make_wrapper_subclass(cls, record.spec.shape, dtype=record.spec.dtype, device=device)
        made._name = record.name
        made._reset = reset
        return made

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]  # torch names its one option
        return f"{type(self).__name__}({self._name}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _METADATA or func is torch.Tensor.__repr__:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is torch.Tensor.detach_:
            return args[0]
        if func in (torch.Tensor.zero_, torch._foreach_zero_):
            for stand_in in (item for item in _flat(args) if isinstance(item, cls)):
                stand_in._reset()
            others = [item for item in _flat(args) if not isinstance(item, cls)]
            return torch._foreach_zero_(others) if others else args[0]
        return cls._refuse(getattr(func, "__name__", str(func)), args)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch types it as an ordinary method
        return cls._refuse(str(func), args)

    @classmethod
    def _refuse(cls, operation: str, args: Sequence[Any]) -> Any:
        names = [item._name for item in _flat(args) if isinstance(item, cls)]
        raise UnsupportedError(
            f"The gradient of {names[0] if names else 'a parameter'} {cls.fate} and cannot be used by {operation}.",
            remedy=cls.remedy,
        )


class CompressedGradient(StandIn):
    """Of a matrix whose gradient has become a core."""

    fate = "was compressed during backward (strategy: lsp)"
    remedy = (
        "clip with accelerator.clip_grad_norm_, reset with zero_grad() or grad = None, or use strategy: slide, where"
        " every gradient is real"
    )


class SpentGradient(StandIn):
    """Of a parameter that the backward has updated."""

    fate = "was applied during backward (update: immediate)"
    remedy = (
        "set update: exact to clip, scale, log or edit gradients (the update of this step has been applied without"
        " that), or take no part in them but zero_grad()"
    )


def _flat(args: Sequence[Any]) -> list[Any]:
    return [item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else [arg])]
