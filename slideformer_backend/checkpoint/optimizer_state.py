"""Optimizer state dicts: step counts, fp32 moments and fp32 masters survive bit for bit (HAZARDS 17)."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from ..engine import Engine
from ..engine.binding import Binding
from ..engine.states import factors_of
from ..engine.unit import ParamRecord
from ..errors import UnsupportedError
from .managed_states import ManagedStates

MASTER = "master"
"""Key of the fp32 master weights in an optimizer state, beside torch's own keys; absent where the parameter is fp32."""


_WIDE: WeakKeyDictionary[Optimizer, dict[int, dict[str, Any]]] = WeakKeyDictionary()
"""fp32 moments and masters of low-precision parameters at the last detach, by parameter id: another engine goes on
from them bit for bit, unless the optimizer's own states have changed since."""


def install_optimizer_hooks(engine: Engine, binding: Binding) -> None:
    """State-dict hooks on the user's optimizer: states live in slabs, torch's format leaves and enters.

    States that the optimizer has already (it stepped before it was bound) enter now, and all leave when the engine is
    detached, so that training goes on from there with or without another engine. An optimizer that runs as itself keeps
    its own states; they gain the masters, and keep their dtype when loaded.
    """
    hooks = _StateHooks(engine, binding) if binding.rule is not None else _OwnStateHooks(engine, binding)
    optimizer = binding.optimizer
    engine.on_detach(hooks.leave)
    engine.add_hook(optimizer.register_state_dict_pre_hook(hooks.before_state_dict))
    engine.add_hook(optimizer.register_state_dict_post_hook(hooks.forget))
    engine.add_hook(optimizer.register_load_state_dict_pre_hook(hooks.remember))
    engine.add_hook(optimizer.register_load_state_dict_post_hook(hooks.take))
    engine.add_hook(optimizer.register_step_pre_hook(hooks.before_step))
    hooks.adopt()


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

    def _admit(self, parameters: Iterable[torch.Tensor]) -> None:
        """Frozen parameters that have states: they were trained before, or will be."""
        engine = self._engine()
        if engine is not None:
            engine.admission.admit(parameters)

    def _show(self, optimizer: Optimizer) -> None:
        """Let ``optimizer.state`` show our states, beside those of parameters that are not ours. Not under
        ``update: immediate``, where the next backward would have used them before a step could take them over."""
        engine = self._engine()
        if engine is None or engine.config.update == "immediate":
            return
        ours = {id(record.parameter) for record in self._records()}
        shown = ManagedStates(self._managed, self._copies_of)
        shown.update({p: state for p, state in dict.items(optimizer.state) if id(p) not in ours})
        optimizer.state = shown

    def _managed(self) -> dict[torch.Tensor, bool]:
        if self._engine() is None or not self._binding.is_alive:
            return {}
        self._refuse_lost()
        return {record.parameter: record.steps > 0 for record in self._records()}

    def _copies_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        engine = self._engine()
        record = engine.record_of(parameter) if engine is not None else None
        if engine is None or record is None:
            return {}
        engine.settle()
        state = self._state_of(engine, record)
        state.pop(MASTER, None)  # torch has none there: what the weight shows by then counts
        return state

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Take over what a script has done to ``optimizer.state``."""
        engine, states = self._engine(), optimizer.state
        if engine is None:
            return
        if isinstance(states, ManagedStates):
            changes = states.changes()
        elif engine.config.update == "immediate":
            return
        else:  # another one was assigned: what it holds counts, and nothing else
            changes = {record.parameter: states.pop(record.parameter, {}) for record in self._records()}
            self._show(optimizer)
        if not changes:
            return
        engine.settle()
        for record in self._records():
            if record.parameter in changes:
                engine.load_state(record, changes[record.parameter])

    def before_state_dict(self, optimizer: Optimizer) -> None:
        """As ``export``, but for an optimizer whose states are gone."""
        self._refuse_lost()
        self.export(optimizer)

    def _refuse_lost(self) -> None:
        """Rather than no states where torch would show some."""
        if self._binding.lost is not None:
            raise UnsupportedError(
                f"This {type(self._binding.optimizer).__name__} has no states any more: a later optimizer over the same"
                " parameters was prepared, which began its own in their place.",
                found=f"two optimizers over {self._binding.lost}",
                remedy="call state_dict() before the other one is prepared, and load_state_dict() after that",
            )

    def export(self, optimizer: Optimizer) -> None:
        """Before ``state_dict``: fill ``optimizer.state`` from the slabs."""
        engine = self._engine()
        if engine is None:
            return
        self.before_step(optimizer)
        engine.settle()
        if isinstance(optimizer.state, ManagedStates):
            optimizer.state.is_plain = True
        for record in self._records():
            if record.steps:
                optimizer.state[record.parameter] = self._state_of(engine, record)

    def forget(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """After ``state_dict``: the copies leave with it."""
        for record in self._records():
            dict.pop(optimizer.state, record.parameter, None)
        if isinstance(optimizer.state, ManagedStates):
            optimizer.state.is_plain = False

    def remember(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Before ``load_state_dict`` casts states to the parameter's dtype: keep the originals."""
        current = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        saved = [number for group in state["param_groups"] for number in group["params"]]
        pairs = [pair for pair in zip(current, saved, strict=False) if pair[1] in state["state"]]
        self._admit(parameter for parameter, _ in pairs)
        ours = {id(record.parameter) for record in self._records()}
        self._loaded = {id(p): state["state"][number] for p, number in pairs if id(p) in ours}

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
        self._show(optimizer)  # before anything is refused: what torch has put there is not looked at again
        for record in self._records():
            engine.load_state(record, loaded.get(id(record.parameter)) or {})

    def adopt(self) -> None:
        """Take over the states that the optimizer holds itself."""
        engine, optimizer = self._engine(), self._binding.optimizer
        self._admit(parameter for parameter, state in optimizer.state.items() if state)
        wide = _WIDE.get(optimizer, {})
        held = [(record, optimizer.state.pop(record.parameter, {})) for record in self._records()]
        self._show(optimizer)
        # A record that has been stepped holds the states of an earlier optimizer; this one starts with its own.
        held = [(record, state) for record, state in held if state or record.steps]
        if engine is None or not held:
            return
        engine.settle()
        for record, state in held:
            engine.load_state(record, _widened(state, wide.pop(id(record.parameter), {})))

    def leave(self) -> None:
        """Leave the states to the optimizer as torch's own step needs them, in each parameter's dtype."""
        if not self._binding.is_alive:
            return
        optimizer = self._binding.optimizer
        self.export(optimizer)
        optimizer.state = defaultdict(dict, dict.items(optimizer.state))
        wide = _WIDE.setdefault(optimizer, {})
        for record in self._records():
            state = optimizer.state.get(record.parameter)
            if record.core is not None:  # moments of a core mean nothing to torch's own step, which starts anew
                optimizer.state.pop(record.parameter, None)
            elif state and record.spec.dtype != torch.float32:
                wide[id(record.parameter)] = state
                optimizer.state[record.parameter] = {
                    name: value.to(record.spec.dtype) if _is_moment(name, value) else value
                    for name, value in state.items()
                    if name != MASTER
                }

    def _state_of(self, engine: Engine, record: ParamRecord) -> dict[str, Any]:
        names = self._binding.rule.states_used(record.group or {}) if self._binding.rule is not None else ()
        exported: dict[str, Any] = {}
        if self._binding.rule is not None and self._binding.rule.name != "sgd":
            exported["step"] = torch.tensor(float(record.steps))
        for name in names:
            exported[name] = engine.moment_of(record, name)
        exported.update(factors_of(record))
        master = engine.master_of(record)
        if master is not None:
            exported[MASTER] = master
        if self._binding.rule is not None and self._binding.rule.name == "sgd" and not names:
            exported.setdefault("momentum_buffer", None)
        return exported


class _OwnStateHooks(_StateHooks):
    """For an optimizer that runs as itself."""

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Its states are its own."""

    def adopt(self) -> None:
        """Its states are its own already."""

    def leave(self) -> None:
        """Its states stay its own."""

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


def _is_moment(name: str, value: object) -> bool:
    return name != "step" and isinstance(value, torch.Tensor)


def _widened(state: Mapping[str, Any], wide: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` with the fp32 values of ``wide``, where those still round to it."""
    moments = [name for name, value in state.items() if _is_moment(name, value)]
    same = all(name in wide and torch.equal(wide[name].to(state[name].dtype), state[name]) for name in moments)
    return {**state, **(wide if wide and same else {})}
