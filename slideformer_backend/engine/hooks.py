"""Hooks of the engine on parameters and on the model. They hold nothing that would keep an abandoned model alive."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import UnsupportedError
from .driver import UnitForward
from .guard import tensors_in
from .unit import ParamRecord

if TYPE_CHECKING:
    from .engine import Engine


class Removable(Protocol):
    """Something that was put in place, with the way to take it away."""

    def remove(self) -> None:
        """Take it away."""


class _ParameterHook:
    """Hook of one parameter. The collector cannot see through a tensor's hooks: they refer to the engine weakly."""

    def __init__(self, engine: Engine, record: ParamRecord) -> None:
        self._engine = weakref.ref(engine)
        self._record = weakref.ref(record)


class BeforeAccumulation(_ParameterHook):
    """Tensor hook; runs before autograd adds to the parameter's gradient, or hands it out."""

    def __call__(self, gradient: torch.Tensor) -> None:
        engine, record = self._engine(), self._record()
        if engine is None or record is None or record.unit.updates_on_device:
            return
        if record.unit.is_resident:
            engine.edges.before_accumulation(record)
        else:
            engine.backward.arriving(record, gradient)


class Accumulated(_ParameterHook):
    """Post-accumulate hook."""

    def __call__(self, parameter: torch.Tensor) -> None:
        engine, record = self._engine(), self._record()
        if engine is None or record is None:
            return
        engine.backward.begin()
        if record.unit.is_resident:
            engine.edges.accumulated(record, is_last=engine.backward.is_last)
        else:
            engine.backward.accumulated(record)


class BeforeForward:
    """Forward pre-hook of the model, through which the model holds its engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._held: Engine | None = engine

    def __call__(self, model: nn.Module, args: object) -> None:
        for module in model.modules():  # units are recomputed by the engine; Hugging Face would recompute them again
            if module.__dict__.get("gradient_checkpointing") and isinstance(
                getattr(module.forward, "__func__", None), UnitForward
            ):
                module.__dict__["gradient_checkpointing"] = False
        engine = self._engine()
        if engine is not None and model is engine.model and torch.is_grad_enabled():
            engine.begin_forward()

    def __deepcopy__(self, memo: dict[int, Any]) -> BeforeForward:
        copied = object.__new__(type(self))
        copied._engine, copied._held = self._engine, None
        return copied

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return NoHook, ()


class AfterForward:
    """Forward hook of the model: a backward through its output is refused before any node of it runs, if it must be.

    Without it the first node would find weights that were updated since, and torch would speak first.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self, model: nn.Module, args: object, output: object) -> None:
        engine = self._engine()
        if engine is None or model is not engine.model or not torch.is_grad_enabled():
            return
        check = engine.backward.check
        for tensor in tensors_in(output):
            if type(tensor) is torch.Tensor and tensor.requires_grad:
                tensor.register_hook(lambda _: check())

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return NoHook, ()


class EngineGone:
    """Tells what an engine left unfinished when it is freed without having been detached."""

    def __init__(self, engine: Engine) -> None:
        self._finalizer = weakref.finalize(engine, engine.policy.report_unconfirmed)
        self._finalizer.atexit = False  # a process that ends loses the weights anyhow

    def remove(self) -> None:
        """Detached: all is said."""
        self._finalizer.detach()


class BeforeAnyStep:
    """Global pre-hook of optimizer steps: refuses one inside backward, whose update would be lost with the slot."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        engine = self._engine()
        if engine is None or not engine.backward.is_inside():
            return
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            record = engine.record_of(parameter)
            if record is not None:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} steps {record.name} inside backward (from a gradient hook).",
                    remedy="call step() after backward; the engine updates each layer during backward by itself",
                )


class NoHook:
    """What a module hook of ours becomes in a pickled model, which is a plain one: it does nothing."""

    def __call__(self, *arguments: object) -> None:
        return
