"""Arguments of a unit's forward: its recompute must find them as the forward did."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedError
from .guard import tensors_in


class Arguments:
    """The versions of all tensors among the arguments of one forward, also of those in tuples, lists and dicts.

    Parameters change by steps, which stale graphs are refused for; tensors of inference mode have no version.

    Args:
        name: the unit's name.
        module: the unit's module, whose signature names positional arguments.
        args: positional arguments.
        kwargs: keyword arguments.
    """

    def __init__(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._name = name
        self._kind = type(module)
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        self._versions = [
            (key, tensor, tensor._version)
            for key, value in given
            for tensor in tensors_in(value)
            if not (isinstance(tensor, nn.Parameter) or tensor.is_inference())
        ]

    def let_go(self, tensor: torch.Tensor) -> None:
        """Follow the version of ``tensor`` without keeping its memory: an alias shares the counter, then loses all
        else."""
        follower = tensor.detach()
        follower.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._versions = [(key, follower if kept is tensor else kept, version) for key, kept, version in self._versions]

    def check_forward(self, output: object) -> None:
        """After the forward: raises UnsupportedError if it changed an argument and a recompute would use that."""
        changed = self._changed()
        if changed is None:
            return
        key, tensor = changed
        if tensor.requires_grad or any(found.requires_grad for found in tensors_in(output)):
            raise UnsupportedError(
                f"{self._name} changes its argument {self._label(key)} in place. SlideFormer runs the layer again in"
                " backward, which would begin with the changed values.",
                remedy="let the layer make a new tensor: x = x + y instead of x += y",
            )

    def check_recompute(self) -> None:
        """Before the recompute: raises UnsupportedError if anybody changed an argument since the forward."""
        changed = self._changed()
        if changed is not None:
            label = self._label(changed[0])
            raise UnsupportedError(
                f"The argument {label} of {self._name} has been modified by an inplace operation after the layer's"
                " forward. SlideFormer runs the layer again in backward, with the argument as the forward had it.",
                remedy=f"give the layer a copy ({label}.clone()), change the tensor after backward, or make a new one:"
                " x = x + layer(x) instead of x += layer(x)",
            )

    def _changed(self) -> tuple[int | str, torch.Tensor] | None:
        for key, tensor, version in self._versions:
            if tensor._version != version:
                return key, tensor
        return None

    def _label(self, key: int | str) -> str:
        if isinstance(key, str):
            return key
        names = list(inspect.signature(self._kind.forward).parameters)[1:]
        return names[key] if key < len(names) else f"number {key + 1}"
