"""Access to a matrix under ``strategy: lsp``: its weight is real, its gradient is gone once its core is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnsupportedError
from .access import EdgeAccess, _check_gradient
from .core_units import CoreUnits
from .guard import _METADATA
from .unit import ParamRecord

if TYPE_CHECKING:
    from .engine import Engine


class CompressedGradient(torch.Tensor):
    """Stands for a gradient that has become a core: it is there (``grad is not None``), and nothing reads it."""

    _name: str

    @classmethod
    def of(cls, record: ParamRecord, device: torch.device) -> CompressedGradient:
        """The stand-in for the gradient of ``record``."""
        made: CompressedGradient = torch.Tensor._make_wrapper_subclass(
            cls, record.spec.shape, dtype=record.spec.dtype, device=device
        )
        made._name = record.name
        return made

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]  # torch names its one option
        return f"CompressedGradient({self._name}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _METADATA or func is torch.Tensor.__repr__:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return cls._refuse(getattr(func, "__name__", str(func)), args)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch types it as an ordinary method
        return cls._refuse(str(func), args)

    @classmethod
    def _refuse(cls, operation: str, args: Sequence[Any]) -> Any:
        flat = [item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else [arg])]
        names = [item._name for item in flat if isinstance(item, cls)]
        raise UnsupportedError(
            f"The gradient of {names[0] if names else 'a matrix'} was compressed during backward (strategy: lsp) and"
            f" cannot be used by {operation}.",
            remedy="clip with accelerator.clip_grad_norm_, reset with zero_grad() or grad = None, or use strategy:"
            " slide, where every gradient is real",
        )


class CoreAccess(EdgeAccess):
    """Guards a matrix that has a core."""

    def before(self, writes: bool) -> None:
        engine = self._engine()
        if engine is not None:
            units_of(engine).present(self._record)
        super().before(writes)

    def get_grad(self) -> torch.Tensor | None:
        engine, record = self._engine(), self._record
        if engine is None or engine.backward.is_inside():
            return super().get_grad()
        engine.backward.finish_outside()
        return CompressedGradient.of(record, engine.device) if record.has_gradient else None

    def set_grad(self, value: torch.Tensor | None) -> None:
        engine, record = self._engine(), self._record
        if engine is None or engine.backward.is_inside():
            super().set_grad(value)
            return
        engine.backward.finish_outside()
        if isinstance(value, CompressedGradient):
            return  # `p.grad = p.grad`
        units = units_of(engine)
        units.forget(record)
        engine.policy.forget(record)
        if value is not None:
            _check_gradient(record, value)
            units.assign(record, value)


def units_of(engine: Engine) -> CoreUnits:
    """The device units of an engine with cores."""
    units = engine.edges.device_units
    if not isinstance(units, CoreUnits):
        raise UnsupportedError("This engine has no cores.")
    return units
