"""Model state dicts of a managed model: every tensor owns its storage.

Host parameters are views of one slab per unit. Savers that remove tensors sharing a storage would keep one of them
(INTERCEPTION 2), so a state-dict hook replaces views by copies; a parameter that occurs twice (tied) stays tied.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from ..engine import Engine
from ..engine.hooks import NoHook
from .optimizer_state import install_optimizer_hooks


def install_state_hooks(engine: Engine) -> None:
    """Register the model's state-dict hooks, and the optimizer's for every optimizer bound from now on."""
    sliding = {id(record.parameter) for unit in engine.sliding for record in unit.records}
    for module in engine.model.modules():
        names = [name for name, parameter in module._parameters.items() if id(parameter) in sliding]
        if names:
            hook = _OwnStorage(engine, names)
            engine.add_hook(module.register_state_dict_post_hook(hook))
    engine.on_bind(install_optimizer_hooks)


class _OwnStorage:
    """State-dict hook of one module."""

    def __init__(self, engine: Engine, names: list[str]) -> None:
        self._engine = weakref.ref(engine)
        self._names = names

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        for name in self._names:
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                state[prefix + name] = value.clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> _OwnStorage:
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return NoHook, ()
