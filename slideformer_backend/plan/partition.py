"""Cut a model into units: which parameters slide with which block, which ones stay on the device, and their layouts.

Reads names, shapes and dtypes only, so it works on a model whose parameters are on the meta device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from .blocks import Block, find_blocks
from .layout import ParamSpec, UnitLayout
from .working_dtype import autocast_weights

OWN_EDGE_UNIT = 1 << 22
"""Elements from which an edge parameter is a unit of its own; smaller ones share one."""


class Part(NamedTuple):
    """One unit to be: a block with its parameters, or a group of edge parameters (``module`` is None)."""

    name: str
    module: nn.Module | None
    parameters: tuple[nn.Parameter, ...]
    specs: tuple[ParamSpec, ...]

    @property
    def layout(self) -> UnitLayout:
        """Where each parameter lies in the unit's flat buffers."""
        return UnitLayout.of(self.specs)


class Partition(NamedTuple):
    """The units of a model. ``frozen_edges``: bytes of parameters and buffers that stay on the device untrained."""

    sliding: tuple[Part, ...]
    edges: tuple[Part, ...]
    frozen_edges: int

    @property
    def parameters(self) -> int:
        """Managed elements."""
        return sum(spec.shape.numel() for part in (*self.sliding, *self.edges) for spec in part.specs)

    @property
    def trained(self) -> int:
        """Elements that own a gradient and states."""
        parts = (*self.sliding, *self.edges)
        return sum(spec.shape.numel() for part in parts for spec in part.specs if spec.is_trainable)


def partition(model: nn.Module, autocast_dtype: torch.dtype | None = None) -> Partition:
    """The units of ``model``, in registration order. ``autocast_dtype``: of the region that wraps its forward."""
    blocks = find_blocks(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    keys = sliding_parameters(model, blocks)
    sliding: list[Part] = []
    for block in blocks:
        parameters = tuple(parameter for parameter in block.module.parameters() if id(parameter) in keys)
        if not parameters:
            continue
        narrow = autocast_weights(block.module, autocast_dtype)
        specs = tuple(_spec(names[id(p)], p, autocast_dtype if id(p) in narrow else None) for p in parameters)
        sliding.append(Part(block.name, block.module, parameters, specs))
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    return Partition(tuple(sliding), edge_parts(model, trained - keys), _frozen_bytes(model, keys))


def edge_parts(model: nn.Module, chosen: set[int]) -> tuple[Part, ...]:
    """Edge units of the chosen parameters (by ``id``), which have places for gradients and states."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return tuple(
        Part(
            name,
            None,
            tuple(members),
            tuple(ParamSpec(names[id(p)], p.shape, p.dtype, p.dtype, is_trainable=True) for p in members),
        )
        for name, members in _edge_groups(model, chosen)
    )


def sliding_parameters(model: nn.Module, blocks: Sequence[Block]) -> set[int]:
    """``id`` of the parameters that one block alone uses."""
    owners: Counter[int] = Counter()
    for block in blocks:
        owners.update({id(parameter) for parameter in block.module.parameters()})
    inside = _shared_outside(model, [block.module for block in blocks])
    return {key for key, count in owners.items() if count == 1 and key not in inside}


def _shared_outside(model: nn.Module, blocks: Iterable[nn.Module]) -> set[int]:
    """Parameters that a module outside all blocks uses too (tied weights): they cannot slide."""
    covered = {id(module) for block in blocks for module in block.modules()}
    return {
        id(parameter)
        for module in model.modules()
        if id(module) not in covered
        for parameter in module._parameters.values()
        if parameter is not None
    }


def _edge_groups(model: nn.Module, chosen: set[int]) -> list[tuple[str, list[nn.Parameter]]]:
    groups: list[tuple[str, list[nn.Parameter]]] = []
    small: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if id(parameter) not in chosen:
            continue
        if parameter.numel() >= OWN_EDGE_UNIT:
            groups.append((name, [parameter]))
        else:
            small.append(parameter)
    return [*groups, ("small edge parameters", small)] if small else groups


def _frozen_bytes(model: nn.Module, sliding: set[int]) -> int:
    frozen = [p for p in model.parameters() if id(p) not in sliding and not p.requires_grad]
    return sum(tensor.numel() * tensor.element_size() for tensor in (*frozen, *model.buffers()))


def _spec(name: str, parameter: nn.Parameter, narrow: torch.dtype | None) -> ParamSpec:
    working = narrow if narrow is not None and parameter.requires_grad else parameter.dtype
    return ParamSpec(name, parameter.shape, parameter.dtype, working, parameter.requires_grad)
