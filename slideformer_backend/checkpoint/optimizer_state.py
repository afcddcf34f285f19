"""Optimizer state dicts: step counts, fp32 moments and fp32 masters survive bit for bit (HAZARDS 17)."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim import Optimizer

from ..engine import Engine
from ..engine.binding import Binding
from ..engine.states import moment_of
from ..engine.unit import ParamRecord

MASTER = "master"
"""Key of the fp32 master weights in an optimizer state, beside torch's own keys; absent where the parameter is fp32."""


def install_optimizer_hooks(engine: Engine, binding: Binding) -> None:
    """State-dict hooks on the user's optimizer: states live in slabs, torch's format leaves and enters.

    An optimizer that runs as itself keeps its own states; they gain the masters, and keep their dtype when loaded.
    """
    hooks = _StateHooks(engine, binding) if binding.rule is not None else _OwnStateHooks(engine, binding)
    optimizer = binding.optimizer
    engine.on_detach(hooks.leave)
    engine.add_hook(optimizer.register_state_dict_pre_hook(hooks.export))
    engine.add_hook(optimizer.register_state_dict_post_hook(hooks.forget))
    engine.add_hook(optimizer.register_load_state_dict_pre_hook(hooks.remember))
    engine.add_hook(optimizer.register_load_state_dict_post_hook(hooks.take))


class _StateHooks:
    """Moves states between slabs and ``optimizer.state`` around ``state_dict`` and ``load_state_dict``."""

    def __init__(self, engine: Engine, binding: Binding) -> None:
        self._engine = weakref.ref(engine)
        self._binding = binding
        self._loaded: dict[int, dict[str, Any]] = {}
        self._own: dict[torch.Tensor, dict[str, Any]] = {}

    def _records(self) -> list[ParamRecord]:
        """The optimizer's records, but for those that a later optimizer has taken over, states included."""
        return [record for record, _ in self._binding.records() if record.binding is self._binding]

    def export(self, optimizer: Optimizer) -> None:
        """Before ``state_dict``: fill ``optimizer.state`` from the slabs."""
        engine = self._engine()
        if engine is None:
            return
        engine.settle()
        for record in self._records():
            if record.steps:
                optimizer.state[record.parameter] = self._state_of(engine, record)

    def forget(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """After ``state_dict``: the copies leave with it."""
        for record in self._records():
            optimizer.state.pop(record.parameter, None)

    def leave(self) -> None:
        """At the end of management: plain torch goes on with the moments, in its own dtype (the parameter's)."""
        engine = self._engine()
        if engine is None or not self._binding.is_alive:
            return
        optimizer = self._binding.optimizer
        for record in self._records():
            if record.steps:
                state = self._state_of(engine, record)
                optimizer.state[record.parameter] = {
                    name: value.to(record.spec.dtype) if name != "step" and value is not None else value
                    for name, value in state.items()
                    if name != MASTER
                }

    def remember(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Before ``load_state_dict`` casts states to the parameter's dtype: keep the originals."""
        ours = {id(record.parameter) for record in self._records()}
        current = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        saved = [number for group in state["param_groups"] for number in group["params"]]
        self._loaded = {
            id(parameter): state["state"][number]
            for parameter, number in zip(current, saved, strict=False)
            if number in state["state"] and id(parameter) in ours
        }

    def take(self, optimizer: Optimizer) -> None:
        """After ``load_state_dict``: the slabs take the originals."""
        engine = self._engine()
        loaded, self._loaded = self._loaded, {}
        if engine is None:
            return
        engine.settle()
        self._binding.assign()
        for record in self._records():
            optimizer.state.pop(record.parameter, None)
            state = loaded.get(id(record.parameter))
            engine.load_state(record, state or {})

    def _state_of(self, engine: Engine, record: ParamRecord) -> dict[str, Any]:
        names = self._binding.rule.states_used(record.group or {}) if self._binding.rule is not None else ()
        exported: dict[str, Any] = {}
        if self._binding.rule is not None and self._binding.rule.name != "sgd":
            exported["step"] = torch.tensor(float(record.steps))
        for name in names:
            exported[name] = moment_of(record, name).to("cpu", copy=True)
        master = engine.master_of(record)
        if master is not None:
            exported[MASTER] = master
        if self._binding.rule is not None and self._binding.rule.name == "sgd" and not names:
            exported.setdefault("momentum_buffer", None)
        return exported


class _OwnStateHooks(_StateHooks):
    """For an optimizer that runs as itself."""

    def leave(self) -> None:
        """Its states are its own already."""

    def export(self, optimizer: Optimizer) -> None:
        """Before ``state_dict``: show the masters beside the optimizer's own states."""
        engine = self._engine()
        if engine is None:
            return
        engine.settle()
        self._own = {}
        for record in self._records():
            state = optimizer.state.get(record.parameter)
            master = engine.master_of(record)
            if state and master is not None:
                self._own[record.parameter] = state
                optimizer.state[record.parameter] = {**state, MASTER: master}

    def forget(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """After ``state_dict``: the optimizer's own states again."""
        optimizer.state.update(self._own)
        self._own = {}

    def take(self, optimizer: Optimizer) -> None:
        """After ``load_state_dict``: states as they were saved, and the masters."""
        engine = self._engine()
        loaded, self._loaded = self._loaded, {}
        if engine is None:
            return
        engine.settle()
        self._binding.assign()
        for record in self._records():
            saved = loaded.get(id(record.parameter))
            if saved is None:
                continue
            engine.load_state(record, {name: saved[name] for name in (MASTER,) if name in saved})
            current = optimizer.state[record.parameter]
            current.pop(MASTER, None)
            for name, value in saved.items():
                if name != MASTER and isinstance(value, torch.Tensor):
                    current[name] = value.to(current[name].device, copy=True)
