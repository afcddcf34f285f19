"""Model state dicts of a managed model: every tensor owns its storage.

Host parameters are views of one slab per unit. Savers that remove tensors sharing a storage would keep one of them
(INTERCEPTION 2), so a state-dict hook replaces views by copies; a parameter that occurs twice (tied) stays tied.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from ..engine import Engine
from ..engine.hooks import NoHook
from .optimizer_state import install_optimizer_hooks

_BORROWED: WeakSet[Engine] = WeakSet()
"""Engines whose state dicts are written to a file now."""


def install_state_hooks(engine: Engine) -> None:
    """Register the model's state-dict hooks, and the optimizer's for every optimizer bound from now on."""
    sliding = {id(record.parameter) for unit in engine.sliding for record in unit.records}
    for module in engine.model.modules():
        names = [name for name, parameter in module._parameters.items() if id(parameter) in sliding]
        if names:
            hook = _OwnStorage(engine, names)
            engine.add_hook(module.register_state_dict_post_hook(hook))
    engine.on_bind(install_optimizer_hooks)


@contextlib.contextmanager
def borrowed_state(engine: Engine) -> Iterator[None]:
    """Inside, ``state_dict`` of the model copies nothing: its tensors are the host memory itself, to be written to a
    file and dropped, or pages of the file where it waits. Each still has a storage of its own."""
    engine.settle()
    _BORROWED.add(engine)
    try:
        with engine.spill.borrowed():
            yield
    finally:
        _BORROWED.discard(engine)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous host tensor again, with the same memory and a storage that holds nothing else."""
    return torch.from_numpy(tensor.detach().reshape(-1).view(torch.uint8).numpy()).view(tensor.dtype).view(tensor.shape)


def _in_file(engine: Engine | None, parameter: nn.Parameter | None, value: torch.Tensor) -> torch.Tensor:
    """``value`` of a parameter, or pages of a file with the same where a borrowed weight waits in one."""
    record = engine.record_of(parameter) if engine is not None and parameter is not None else None
    if engine is None or record is None or record.shows_master:
        return value
    pages = engine.spill.borrow(record.unit)
    return value if pages is None else record.weight_view(pages)


class _OwnStorage:
    """State-dict hook of one module."""

    def __init__(self, engine: Engine, names: list[str]) -> None:
        self._engine = weakref.ref(engine)
        self._names = names

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        engine = self._engine()
        own = alias if engine in _BORROWED else torch.clone
        for name in self._names:
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                value = _in_file(engine, module._parameters[name], value)
                state[prefix + name] = own(value) if value.device.type == "cpu" else value.clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> _OwnStorage:
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return NoHook, ()
