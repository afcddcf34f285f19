"""Build the units of a model and move its weights where they live, one unit at a time."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn

from ..errors import StorageError, UnsupportedError
from ..plan import ParamSpec, Part, Partition, UnitLayout, partition
from ..storage import HostMemory
from .guard import guarded_class
from .spill import Spill
from .unit import KINDS, ParamRecord, Unit, Where
from .writes import leased_class


def build_units(
    parts: Partition, device: torch.device, model: nn.Module, memory: HostMemory, spill: Spill
) -> list[Unit]:
    """Lay the weights of all units out in host memory, or in the files that ``spill`` has reserved; resident parameters
    go to ``device``.

    The peak is the plan plus one unit: the originals of a unit are freed as soon as its slab is filled.

    Raises:
        StorageError: a file cannot be written; the model has its weights back.
    """
    units: list[Unit] = []
    try:
        for part in parts.sliding:
            units.append(_sliding_unit(len(units), part, memory, spill))
    except StorageError:
        _give_back(units, spill)
        raise
    for part in parts.edges:
        units.append(edge_unit(len(units), part, device, memory))
    _place_rest(model, {id(parameter) for part in parts.sliding for parameter in part.parameters}, device)
    return units


def resident_units(
    parts: Partition, device: torch.device, model: nn.Module, memory: HostMemory, *, with_edges: bool
) -> list[Unit]:
    """All units on ``device`` for good, one after another; blocks keep their modules. The host keeps no weights, but
    of edges that update there (not ``with_edges``)."""
    units: list[Unit] = []
    for part in (*parts.sliding, *(parts.edges if with_edges else ())):
        specs = tuple(spec._replace(working=spec.dtype) for spec in part.specs)
        layout = UnitLayout.of(specs)
        empty = memory.allocate(f"weights of {part.name}", 0, dma=False)
        unit = Unit(len(units), part.name, part.module, layout, empty, Where.RESIDENT, updates_on_device=True)
        for number, (parameter, spec) in enumerate(zip(part.parameters, specs, strict=True)):
            with torch.no_grad():
                resident = parameter.data.to(device, copy=True).contiguous()
            parameter.data = resident
            unit.records.append(_record(parameter, unit, number, spec, resident))
        units.append(unit)
    for part in () if with_edges else parts.edges:
        units.append(edge_unit(len(units), part, device, memory))
    _place_rest(model, {id(parameter) for part in parts.sliding for parameter in part.parameters}, device)
    return units


def checked_parts(model: nn.Module, autocast_dtype: torch.dtype | None) -> Partition:
    """The units of a model, before anything is changed.

    Raises:
        UnsupportedError: a parameter cannot be managed.
    """
    _check_kinds(model)
    parts = partition(model, autocast_dtype)
    _check(model, {id(parameter) for part in parts.sliding for parameter in part.parameters})
    return parts


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
    refuse_sparse(model, {id(parameter) for parameter in model.parameters() if parameter.requires_grad})


def refuse_sparse(model: nn.Module, trained: set[int]) -> None:
    """Raise UnsupportedError for an embedding with sparse gradients whose weight is among ``trained`` (by ``id``)."""
    for name, module in model.named_modules():
        is_sparse = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        if is_sparse and id(module.weight) in trained:
            raise UnsupportedError(f"{name} has sparse gradients.", remedy="build the embedding with sparse=False")


def refuse_untrainable(name: str, parameter: nn.Parameter) -> None:
    """Raise UnsupportedError for a dtype that has no update rule."""
    if parameter.dtype not in KINDS:
        raise UnsupportedError(
            f"{name} cannot be trained.", found=str(parameter.dtype), expected="float32, bfloat16 or float16"
        )


def refuse_layout(name: str, parameter: nn.Parameter) -> None:
    """Raise UnsupportedError for a parameter whose memory is not one dense tensor."""
    own = type(parameter)
    if parameter.layout is not torch.strided or _has_dispatch(own):
        raise UnsupportedError(
            f"{name} is a {own.__name__}, whose memory SlideFormer cannot lay out.",
            remedy="quantise or wrap weights after training, or use another strategy for this model",
        )


def _check(model: nn.Module, sliding: set[int]) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            refuse_untrainable(name, parameter)
        if id(parameter) in sliding or parameter.requires_grad:
            refuse_layout(name, parameter)


def frozen_overlaps(model: nn.Module) -> dict[int, str]:
    """Frozen parameters over the memory of another one: by ``id``, the name of the other.

    Raises:
        UnsupportedError: one of the two trains. Each would get a master of its own, and one update would be lost.
    """
    spans: dict[torch.device, list[tuple[int, int, str, nn.Parameter]]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.numel() and parameter.layout is torch.strided and not _has_dispatch(type(parameter)):
            last = sum((size - 1) * step for size, step in zip(parameter.shape, parameter.stride(), strict=True))
            start = parameter.data_ptr()
            end = start + (last + 1) * parameter.element_size()
            spans[parameter.device].append((start, end, name, parameter))
    overlaps: dict[int, str] = {}
    for found in spans.values():
        found.sort(key=lambda span: span[:3])
        for (_, end, name, one), (start, _, other_name, other) in itertools.pairwise(found):
            if start >= end:
                continue
            if one.requires_grad or other.requires_grad:
                raise UnsupportedError(
                    f"{name} and {other_name} are two parameters over the same memory.",
                    remedy="tie them by making them one parameter object (PEFT: without ensure_weight_tying)",
                )
            overlaps |= {id(one): other_name, id(other): name}
    return overlaps


def _has_dispatch(own: type) -> bool:
    return getattr(own, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__


def _record(parameter: nn.Parameter, unit: Unit, number: int, spec: ParamSpec, host: torch.Tensor) -> ParamRecord:
    own = type(parameter)
    place = unit.layout.places[number]
    return ParamRecord(spec.name, parameter, unit, spec, place, host, own, guarded_class(own), leased_class(own))


def _sliding_unit(index: int, part: Part, memory: HostMemory, spill: Spill) -> Unit:
    name, module, parameters, specs = part
    layout = part.layout
    weights = spill.weights_of(index, name, layout.weight_bytes)
    unit = Unit(index, name, module, layout, weights, Where.HOST)
    spill.file_weights(unit)
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
    spill.count_tensors(unit)
    return unit


def _give_back(units: Sequence[Unit], spill: Spill) -> None:
    """A disk has failed: parameters of what was built are plain ones again."""
    spill.recover()
    for record in (record for unit in units for record in unit.records):
        spill.present(record.unit)
        record.parameter.data = record.host.clone()
    spill.close()


def edge_unit(index: int, part: Part, device: torch.device, memory: HostMemory) -> Unit:
    """A unit whose parameters live on ``device``, with host memory for what their update needs."""
    name, _, parameters, specs = part
    layout = part.layout
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
