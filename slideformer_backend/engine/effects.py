"""What a forward does besides computing its output: buffers, attributes, random numbers.

A recompute runs the user's forward a second time. It must see what the first run saw and leave nothing behind: running
statistics are updated once per step, a layer drops the same inputs again, whoever draws the random numbers.
"""

from __future__ import annotations

import contextlib
import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

_NUMBERS = frozenset({bool, int, float, type(None)})
_NEVER = frozenset({dict, OrderedDict, set, str, tuple, list, FunctionType, MethodType})
"""Types that are neither tensors nor generators, so that no slower test is needed."""
_Items = dict[str, Any]
_NOTHING: _Items = {}
"""What is found where nothing is; nobody writes into it."""


class Effects:
    """The state of a module, and of random generators that torch's own checkpoint does not restore, at one moment.

    Holds copies of the module's buffers, of its numbers, its tensors and its ``torch.Generator`` attributes (submodules
    included), the states of Python's and numpy's global generators, and which parameters train: one that is frozen or
    unfrozen between forward and backward would change what the recompute saves.
    """

    def __init__(self, module: nn.Module) -> None:
        # lists side by side, not of pairs: every object that lives until the backward brings Python's next full
        # collection nearer, and that stops everything
        self._owners: list[_Items] = []
        self._then: list[_Items] = []
        self._generators = []
        children = list(module.modules())
        with torch._C.DisableTorchFunctionSubclass():
            parameters = (p for child in children for p in child._parameters.values())
            self._parameters = [parameter for parameter in parameters if parameter is not None]
            self._trains = bytes(parameter.requires_grad for parameter in self._parameters)
        for child in children:
            for owner in (child.__dict__, child._buffers):
                found, tensors, generators = _look(owner)
                for name, value in tensors:
                    found[name] = _kept(value)
                self._owners.append(owner)
                self._then.append(found or _NOTHING)
                self._generators += [(generator, generator.get_state()) for generator in generators]
        self._python = random.getstate()
        self._numpy = np.random.get_state()

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """The module is as it was then; afterwards it is as it is now, whatever the code inside did."""
        now = [_look(owner).found for owner in self._owners]
        generators = [(generator, generator.get_state()) for generator, _ in self._generators]
        python, numpy = random.getstate(), np.random.get_state()
        for owner, items, present in zip(self._owners, self._then, now, strict=True):
            self._set(owner, {name: _kept(value) for name, value in items.items()}, present)
        self._set_generators(self._generators, self._python, self._numpy)
        turned = self._turn_to_then()
        try:
            yield
        finally:
            _turn(turned)
            for owner, items in zip(self._owners, now, strict=True):
                self._set(owner, items, _look(owner).found)
            self._set_generators(generators, python, numpy)

    def _turn_to_then(self) -> list[tuple[nn.Parameter, bool]]:
        """Parameters train as they did then. Returns how those were now that did not."""
        with torch._C.DisableTorchFunctionSubclass():
            then = zip(self._parameters, map(bool, self._trains), strict=True)
            turned = [(parameter, trained) for parameter, trained in then if parameter.requires_grad != trained]
        _turn(turned)
        return [(parameter, not trained) for parameter, trained in turned]

    @staticmethod
    def _set(owner: _Items, items: _Items, present: _Items) -> None:
        if present.keys() != items.keys():
            for name in present.keys() - items.keys():
                del owner[name]  # the forward made this attribute
        owner.update(items)

    @staticmethod
    def _set_generators(generators: list[tuple[torch.Generator, torch.Tensor]], python: Any, numpy: Any) -> None:
        for generator, state in generators:
            generator.set_state(state)
        random.setstate(python)
        np.random.set_state(numpy)


class _Found(NamedTuple):
    """What of a module's attributes is put back: all of it by name, and which of it are tensors; generators."""

    found: _Items
    tensors: list[tuple[str, torch.Tensor]]
    generators: list[torch.Generator]


def _turn(parameters: Iterable[tuple[nn.Parameter, bool]]) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        for parameter, trains in parameters:
            parameter.requires_grad_(trains)


def _look(owner: _Items) -> _Found:
    found: _Items = {}
    tensors: list[tuple[str, torch.Tensor]] = []
    generators: list[torch.Generator] = []
    for name, value in owner.items():
        kind = type(value)
        if kind in _NUMBERS:
            found[name] = value
        elif kind not in _NEVER:  # most attributes end here: modules' own dictionaries, names, configurations
            if _is_tensor(value):
                found[name] = value
                tensors.append((name, value))
            elif isinstance(value, torch.Generator):
                generators.append(value)
    return _Found(found, tensors, generators)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)


def _kept(value: Any) -> Any:
    """A copy; of a tensor with a graph an alias without it, which keeps no earlier graph alive."""
    if type(value) in _NUMBERS:
        return value
    return value.detach().clone() if value.grad_fn is None else value.detach()
