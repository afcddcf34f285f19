"""Build the units of a model and move its weights where they live, one unit at a time."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable

import torch
from torch import nn

from ..errors import UnsupportedError
from ..plan import ParamSpec, UnitLayout, autocast_weights, find_blocks
from ..storage import HostMemory
from .guard import guarded_class
from .unit import KINDS, ParamRecord, Unit, Where

OWN_EDGE_UNIT = 1 << 22
"""Elements from which an edge parameter is a unit of its own; smaller ones share one."""


def build_units(
    model: nn.Module, device: torch.device, autocast_dtype: torch.dtype | None, memory: HostMemory
) -> list[Unit]:
    """Discover units and lay their weights out in host memory; resident parameters go to ``device``.

    The peak is the plan plus one unit: the originals of a unit are freed as soon as its slab is filled.

    Raises:
        UnsupportedError: a parameter cannot be managed (before anything has been changed).
    """
    _check_kinds(model)
    blocks = find_blocks(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: Counter[int] = Counter()
    for block in blocks:
        owners.update({id(parameter) for parameter in block.module.parameters()})
    inside = _inside(model, [block.module for block in blocks])
    sliding = {key for key, count in owners.items() if count == 1 and key not in inside}
    _check(model, sliding)
    _check_overlaps(model)
    units: list[Unit] = []
    for block in blocks:
        parameters = [parameter for parameter in block.module.parameters() if id(parameter) in sliding]
        if not parameters:
            continue
        narrow = autocast_weights(block.module, autocast_dtype)
        specs = [_spec(names[id(p)], p, autocast_dtype if id(p) in narrow else None) for p in parameters]
        units.append(_sliding_unit(len(units), block.name, block.module, parameters, specs, memory))
    for name, members in _edge_groups(model, sliding):
        specs = [_spec(names[id(parameter)], parameter, None) for parameter in members]
        units.append(_edge_unit(len(units), name, members, specs, device, memory))
    _place_rest(model, sliding, device)
    return units


def _inside(model: nn.Module, blocks: Iterable[nn.Module]) -> set[int]:
    """Parameters that a module outside all blocks uses too (tied weights): they cannot slide."""
    covered = {id(module) for block in blocks for module in block.modules()}
    return {
        id(parameter)
        for module in model.modules()
        if id(module) not in covered
        for parameter in module._parameters.values()
        if parameter is not None
    }


def _check_kinds(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UnsupportedError(
                f"{name} has no shape yet: its layer is lazy.", remedy="run one forward before accelerator.prepare()"
            )
        if parameter.is_meta:
            raise UnsupportedError(
                f"{name} is on the meta device.", remedy="load the model's weights before accelerator.prepare()"
            )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            raise UnsupportedError(
                f"{name or 'The model'} was compiled by torch.jit, which keeps its weights to itself.",
                remedy="pass the model without torch.jit.script() or trace()",
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise UnsupportedError(f"{name} has sparse gradients.", remedy="build the embedding with sparse=False")


def _check(model: nn.Module, sliding: set[int]) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in KINDS:
            raise UnsupportedError(
                f"{name} cannot be trained.", found=str(parameter.dtype), expected="float32, bfloat16 or float16"
            )
        own = type(parameter)
        is_laid_out = id(parameter) in sliding or parameter.requires_grad
        if is_laid_out and (parameter.layout is not torch.strided or _has_dispatch(own)):
            raise UnsupportedError(
                f"{name} is a {own.__name__}, whose memory SlideFormer cannot lay out.",
                remedy="quantise or wrap weights after training, or use another strategy for this model",
            )


def _check_overlaps(model: nn.Module) -> None:
    """Two parameters over one memory: each would get a master of its own, and one update would be lost."""
    spans: dict[torch.device, list[tuple[int, int, str, bool]]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.numel() and parameter.layout is torch.strided and not _has_dispatch(type(parameter)):
            last = sum((size - 1) * step for size, step in zip(parameter.shape, parameter.stride(), strict=True))
            start = parameter.data_ptr()
            end = start + (last + 1) * parameter.element_size()
            spans[parameter.device].append((start, end, name, parameter.requires_grad))
    for found in spans.values():
        found.sort()
        for (_, end, name, trains), (start, _, other, also_trains) in itertools.pairwise(found):
            if start < end and (trains or also_trains):
                raise UnsupportedError(
                    f"{name} and {other} are two parameters over the same memory.",
                    remedy="tie them by making them one parameter object (PEFT: without ensure_weight_tying)",
                )


def _has_dispatch(own: type) -> bool:
    return getattr(own, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__


def _spec(name: str, parameter: nn.Parameter, narrow: torch.dtype | None) -> ParamSpec:
    working = narrow if narrow is not None and parameter.requires_grad else parameter.dtype
    return ParamSpec(name, parameter.shape, parameter.dtype, working, parameter.requires_grad)


def _record(parameter: nn.Parameter, unit: Unit, number: int, spec: ParamSpec, host: torch.Tensor) -> ParamRecord:
    own = type(parameter)
    place = unit.layout.places[number]
    return ParamRecord(spec.name, parameter, unit, spec, place, host, own, guarded_class(own))


def _sliding_unit(
    index: int,
    name: str,
    module: nn.Module,
    parameters: list[nn.Parameter],
    specs: list[ParamSpec],
    memory: HostMemory,
) -> Unit:
    layout = UnitLayout.of(specs)
    weights = memory.allocate(f"weights of {name}", layout.weight_bytes, dma=True)
    unit = Unit(index, name, module, layout, weights, Where.HOST)
    if any(spec.working != spec.dtype for spec in specs):
        unit.states["master"] = memory.allocate(f"master of {name}", layout.state_elements * 4, dma=False)
    for number, (parameter, spec) in enumerate(zip(parameters, specs, strict=True)):
        record = _record(parameter, unit, number, spec, parameter.data)
        working = record.weight_view(weights.flat)
        with torch.no_grad():
            working.copy_(parameter.data)
            if spec.is_trainable and "master" in unit.states:
                master = unit.states["master"].view(torch.float32, record.place.state * 4, record.numel)
                master.copy_(parameter.data.reshape(-1))
                record.host = master.view(spec.shape) if record.shows_master else working
            else:
                record.host = working
        parameter.data = record.host
        unit.records.append(record)
    return unit


def _edge_groups(model: nn.Module, sliding: set[int]) -> list[tuple[str, list[nn.Parameter]]]:
    groups: list[tuple[str, list[nn.Parameter]]] = []
    small: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if id(parameter) in sliding or not parameter.requires_grad:
            continue
        if parameter.numel() >= OWN_EDGE_UNIT:
            groups.append((name, [parameter]))
        else:
            small.append(parameter)
    return [*groups, ("small edge parameters", small)] if small else groups


def _edge_unit(
    index: int,
    name: str,
    parameters: list[nn.Parameter],
    specs: list[ParamSpec],
    device: torch.device,
    memory: HostMemory,
) -> Unit:
    layout = UnitLayout.of(specs)
    weights = memory.allocate(f"weights of {name}", layout.weight_bytes, dma=True)
    unit = Unit(index, name, None, layout, weights, Where.RESIDENT)
    for number, (parameter, spec) in enumerate(zip(parameters, specs, strict=True)):
        record = _record(parameter, unit, number, spec, parameter.data)
        with torch.no_grad():
            record.weight_view(weights.flat).copy_(parameter.data)
            resident = parameter.data.to(device).contiguous()
        parameter.data = resident
        record.host = resident
        unit.records.append(record)
    return unit


def _place_rest(model: nn.Module, sliding: set[int], device: torch.device) -> None:
    """Frozen edge parameters and all buffers live on the device."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in sliding and parameter.device != device:
                parameter.data = parameter.data.to(device)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)
