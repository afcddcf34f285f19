"""Optimizer states as safetensors files, one per unit, named as ``torch.distributed.checkpoint`` names them.

A tensor ``state.<parameter>.<state>`` is what ``get_optimizer_state_dict`` with ``flatten_optimizer_state_dict`` calls
that state, and ``<parameter>`` is the fp32 master of a 16-bit parameter. ``HuggingFaceStorageReader`` of a folder reads
them all, so a state goes on under FSDP2 as well. What is not a tensor is in ``optimizer.json``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.optim import Optimizer

from ..engine import Engine
from ..engine.binding import Binding
from ..engine.states import factors_of, moment_of
from ..engine.unit import ParamRecord
from ..errors import CheckpointError
from .optimizer_state import MASTER
from .values import pack, unpack

VALUES = "optimizer.json"
_STATE = "state."
_REST = "unmanaged"


class Names(NamedTuple):
    """The parameters of an optimizer by name, in the order of its groups."""

    groups: list[list[str]]
    parameters: dict[str, torch.Tensor]


def save_optimizer(
    optimizer: Optimizer, models: Iterable[torch.nn.Module], folder: Path, engine: Engine | None
) -> None:
    """Write the states of ``optimizer`` and its param groups, unit by unit.

    Args:
        optimizer: the user's own object.
        models: where its parameters get their names from.
        folder: made here.
        engine: the engine that steps it, if one does.

    Raises:
        CheckpointError: a state that is neither tensor nor plain value.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = _names(optimizer, models)
    values: dict[str, Any] = {}
    binding = engine.binding_of(optimizer) if engine is not None else None
    if engine is not None:
        engine.settle()
    for file, members in _files(names, engine).items():
        tensors: dict[str, torch.Tensor] = {}
        for name in members:
            state = _state_of(optimizer, names.parameters[name], engine, binding)
            plain = {}
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    value = value.detach()
                    tensors[name if key == MASTER else f"{_STATE}{name}.{key}"] = value.cpu().contiguous()
                else:
                    plain[key] = pack(value, f"{key} of {name}")
            if state:
                values[name] = plain
        if tensors:
            save_file(tensors, folder / f"{file}.safetensors", metadata={"format": "pt"})
    groups = [
        {"params": members, "values": pack({k: v for k, v in group.items() if k != "params"}, "param_groups")}
        for group, members in zip(optimizer.param_groups, names.groups, strict=True)
    ]
    content = {"class": type(optimizer).__name__, "groups": groups, "values": values}
    (folder / VALUES).write_text(json.dumps(content), encoding="utf-8")


def load_optimizer(
    optimizer: Optimizer, models: Iterable[torch.nn.Module], folder: Path, engine: Engine | None
) -> None:
    """Take over what :func:`save_optimizer` wrote, into an optimizer with or without an engine.

    Raises:
        CheckpointError: the saved optimizer has other parameters or groups.
    """
    content = json.loads((folder / VALUES).read_text(encoding="utf-8"))
    names = _names(optimizer, models)
    saved_groups = [group["params"] for group in content["groups"]]
    if [sorted(group) for group in saved_groups] != [sorted(group) for group in names.groups]:
        raise CheckpointError(
            f"{folder} holds the states of another optimizer.",
            found=_describe(content["class"], saved_groups),
            expected=_describe(type(optimizer).__name__, names.groups),
            remedy="make the optimizer from the same parameters in the same groups as when the checkpoint was saved",
        )
    numbers = {name: number for number, name in enumerate(name for group in names.groups for name in group)}
    groups = [
        {**unpack(group["values"]), "params": [numbers[name] for name in members]}
        for group, members in zip(content["groups"], names.groups, strict=True)
    ]
    binding = engine.binding_of(optimizer) if engine is not None else None
    plain = {name: unpack(value) for name, value in content["values"].items()}
    if engine is not None and binding is not None and binding.rule is not None:
        # The engine's states are reset by this, and taken over one by one, with no copy of all of them in between.
        optimizer.load_state_dict({"state": {}, "param_groups": groups})
        engine.admission.admit(names.parameters[name] for name in plain)  # frozen now, and trained when it was saved
        for name, state in _states(folder, plain):
            record = engine.record_of(names.parameters[name])
            if record is not None:
                engine.load_state(record, state)
            else:
                optimizer.state[names.parameters[name]] = {key: _copied(value) for key, value in state.items()}
        return
    states = {
        numbers[name]: {key: _copied(value) for key, value in state.items() if key != MASTER or engine is not None}
        for name, state in _states(folder, plain)
    }
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _states(folder: Path, plain: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each parameter's state; tensors are pages of the file."""
    seen = set()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            keys: dict[str, dict[str, str]] = defaultdict(dict)
            for key in file.keys():  # noqa: SIM118  # a file object that is no mapping
                is_state = key.startswith(_STATE)
                name, _, state = key.removeprefix(_STATE).rpartition(".") if is_state else (key, "", MASTER)
                keys[name][state] = key
            for name, found in keys.items():
                seen.add(name)
                yield name, {**plain.get(name, {}), **{state: file.get_tensor(key) for state, key in found.items()}}
    for name, values in plain.items():
        if name not in seen and values:
            yield name, dict(values)


def _state_of(
    optimizer: Optimizer, parameter: torch.Tensor, engine: Engine | None, binding: Binding | None
) -> dict[str, Any]:
    record = engine.record_of(parameter) if engine is not None else None
    if engine is None or record is None or binding is None:
        return dict(optimizer.state.get(parameter, {}))
    if binding.rule is None:
        state = dict(optimizer.state.get(parameter, {}))
    elif record.steps and record.binding is binding:
        state = _moments(engine, binding, record)
    else:
        state = {}
    master = engine.master_of(record) if state else None
    return state if master is None else {**state, MASTER: master}


def _moments(engine: Engine, binding: Binding, record: ParamRecord) -> dict[str, Any]:
    rule, group = binding.rule, record.group or {}
    names = rule.states_used(group) if rule else ()
    state: dict[str, Any] = {name: moment_of(record, name, engine.spill) for name in names}  # no copies: one unit's
    state.update(factors_of(record))
    if rule is not None and rule.name != "sgd":
        state["step"] = torch.tensor(float(record.steps))
    elif not state:
        state["momentum_buffer"] = None
    return state


def _names(optimizer: Optimizer, models: Iterable[torch.nn.Module]) -> Names:
    named = [{id(parameter): name for name, parameter in model.named_parameters()} for model in models]
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    own = next((number for number, names in enumerate(named) if any(key in names for key in held)), 0)
    known: dict[int, str] = {}
    for number, names in enumerate(named):
        known |= {key: name if number == own else f"{number}.{name}" for key, name in names.items() if key not in known}
    groups: list[list[str]] = []
    parameters: dict[str, torch.Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        groups.append([known.get(id(p), f"group{number}.{place}") for place, p in enumerate(group["params"])])
        parameters.update(zip(groups[-1], group["params"], strict=True))
    return Names(groups, parameters)


def _files(names: Names, engine: Engine | None) -> dict[str, list[str]]:
    """Which parameters' states go into which file: those of a unit into one."""
    files: dict[str, list[str]] = defaultdict(list)
    for name, parameter in names.parameters.items():
        record = engine.record_of(parameter) if engine is not None else None
        files[_REST if record is None else f"unit-{record.unit.index:05d}"].append(name)
    return files


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _describe(name: str, groups: list[list[str]]) -> str:
    sizes = ", ".join(str(len(group)) for group in groups)
    return f"{name} with {len(groups)} groups of {sizes} parameters"
