"""Working dtype per parameter under autocast (DESIGN 4.6).

A fp32 weight that only autocast ops read reaches the device as its autocast copy: the op would cast it anyway, so the
result is the same bit for bit and half the bytes slide. Everything else keeps its own dtype.
"""

from __future__ import annotations

import torch
from torch import nn

_AUTOCAST_FORWARDS = tuple(
    cls.forward for cls in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
)


def autocast_weights(block: nn.Module, autocast_dtype: torch.dtype | None) -> set[int]:
    """``id`` of the fp32 parameters of ``block`` that only autocast ops read.

    These are the weights and biases of modules whose forward is exactly that of a torch linear or convolution layer
    without hooks or parametrizations of their own, and which no other module of the block shares.
    """
    if autocast_dtype is None:
        return set()
    readers: dict[int, list[bool]] = {}
    for module in block.modules():
        casts = _is_autocast_module(module)
        for parameter in module._parameters.values():
            if parameter is not None and parameter.dtype == torch.float32:
                readers.setdefault(id(parameter), []).append(casts)
    return {key for key, casts in readers.items() if casts == [True]}


def _is_autocast_module(module: nn.Module) -> bool:
    if "forward" in module.__dict__ or module._forward_pre_hooks:
        return False
    return type(module).forward in _AUTOCAST_FORWARDS
