"""Working dtype per parameter under autocast (DESIGN 4.6).

A fp32 weight that only autocast ops read reaches the device as its autocast copy: the op would cast it anyway, so the
result is the same bit for bit and half the bytes slide. Everything else keeps its own dtype.
"""

from __future__ import annotations

import inspect
from types import CodeType

import torch
from torch import nn

_AUTOCAST_FORWARDS = tuple(
    cls.forward for cls in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
)

_MENTIONS = frozenset({"weight", "bias", "parameters", "named_parameters", "state_dict", "_parameters"})


def autocast_weights(block: nn.Module, autocast_dtype: torch.dtype | None) -> set[int]:
    """``id`` of the fp32 parameters of ``block`` that only autocast ops read.

    These are the weights and biases of modules whose forward is exactly that of a torch linear or convolution layer
    without hooks or parametrizations of their own, which no other module of the block shares, and which no module
    around them reads (adapters cast their inputs to ``lora_A.weight.dtype``).
    """
    if autocast_dtype is None:
        return set()
    readers_of_others = {kind for kind in {type(module) for module in block.modules()} if _reads_weights(kind)}
    read = {id(child) for module in block.modules() if type(module) in readers_of_others for child in module.modules()}
    readers: dict[int, list[bool]] = {}
    for module in block.modules():
        casts = _is_autocast_module(module) and id(module) not in read
        for parameter in module._parameters.values():
            if parameter is not None and parameter.dtype == torch.float32:
                readers.setdefault(id(parameter), []).append(casts)
    return {key for key, casts in readers.items() if casts == [True]}


def _is_autocast_module(module: nn.Module) -> bool:
    if "forward" in module.__dict__ or module._forward_pre_hooks:
        return False
    return type(module).forward in _AUTOCAST_FORWARDS


def _reads_weights(kind: type[nn.Module]) -> bool:
    """Whether the forward of ``kind``, or a method that it names, mentions weights of modules inside."""
    if kind.forward in _AUTOCAST_FORWARDS:
        return False
    seen: set[str] = set()
    names = {"forward"}
    while names - seen:
        name = (names - seen).pop()
        seen.add(name)
        function = inspect.unwrap(found) if callable(found := getattr(kind, name, None)) else None
        if inspect.isfunction(function) and not function.__module__.startswith("torch.nn.modules.module"):
            names |= _names_in(function.__code__)
    return not names.isdisjoint(_MENTIONS)


def _names_in(code: CodeType) -> set[str]:
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
