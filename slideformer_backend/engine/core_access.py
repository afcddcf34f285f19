"""Access to a matrix under ``strategy: lsp``: its weight is real, its gradient is gone once its core is taken."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from ..errors import UnsupportedError
from .access import EdgeAccess, _check_gradient
from .core_units import CoreUnits
from .stand_in import CompressedGradient

if TYPE_CHECKING:
    from .engine import Engine


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
        if not record.has_gradient:
            return None
        return CompressedGradient.of(record, engine.device, partial(setattr, record.parameter, "grad", None))

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
