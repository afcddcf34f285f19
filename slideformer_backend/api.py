"""Attach an engine to a model: the composition root, for integrations and for use without Accelerate."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from .checkpoint import install_state_hooks
from .config import SlideFormerConfig
from .engine import Engine, EngineReport
from .transfer import Monitor

__all__ = ["Engine", "EngineReport", "attach", "engine_of", "engines"]

_ENGINES: WeakIdKeyDictionary = WeakIdKeyDictionary()


def attach(
    model: nn.Module,
    config: SlideFormerConfig | None = None,
    *,
    device: torch.device | None = None,
    autocast_dtype: torch.dtype | None = None,
    monitor: Monitor | None = None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> Engine:
    """Let an engine manage ``model``; the existing engine when there is one.

    Args:
        model: any ``nn.Module`` whose weights are in host memory (or on the device, if they fit). The same object stays
            in use: identity of the model, its modules and its parameters is kept.
        config: defaults to ``SlideFormerConfig()``.
        device: where compute runs; the current CUDA device, or the CPU where there is none.
        autocast_dtype: the dtype of the autocast region that wraps the model's forward, if one does.
        monitor: the test harness's observer.
        optimizers: that will be bound, if known: a plan that their states cannot fit is refused at once.

    Raises:
        UnsupportedError: the model cannot be managed; nothing was changed.
        PlanError: it cannot fit this machine; nothing was changed.
    """
    found = engine_of(model)
    if found is not None:
        return found
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    engine = Engine(model, config or SlideFormerConfig(), device, autocast_dtype, monitor, optimizers)
    install_state_hooks(engine)
    _ENGINES[model] = weakref.ref(engine)  # the model holds its engine: both go together
    return engine


def engine_of(module: nn.Module) -> Engine | None:
    """The engine that manages ``module``, or a model inside ``module`` (a wrapper)."""
    for child in module.modules():
        reference = _ENGINES.get(child)
        engine: Engine | None = reference() if reference is not None else None
        if engine is not None and not engine.is_detached:
            return engine
    return None


def engines() -> list[Engine]:
    """All engines that are attached."""
    found = [reference() for reference in _ENGINES.values()]
    return [engine for engine in found if engine is not None and not engine.is_detached]
