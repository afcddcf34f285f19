"""What a forward does besides computing its output: buffers, attributes, random numbers.

A recompute runs the user's forward a second time. It must see what the first run saw and leave nothing behind: running
statistics are updated once per step, a layer drops the same inputs again, whoever draws the random numbers.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

_NUMBERS = (bool, int, float, type(None))
_Items = dict[str, Any]


class Effects:
    """The state of a module, and of random generators that torch's own checkpoint does not restore, at one moment.

    Holds copies of the module's buffers, of its numbers, its tensors and its ``torch.Generator`` attributes (submodules
    included), and the states of Python's and numpy's global generators.
    """

    def __init__(self, module: nn.Module) -> None:
        self._then = [(owner, {name: _kept(value) for name, value in items.items()}) for owner, items in _items(module)]
        self._generators = [
            (value, value.get_state())
            for child in module.modules()
            for value in child.__dict__.values()
            if isinstance(value, torch.Generator)
        ]
        self._python = random.getstate()
        self._numpy = np.random.get_state()

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """The module is as it was then; afterwards it is as it is now, whatever the code inside did."""
        now = [(owner, _restorable(owner)) for owner, _ in self._then]
        generators = [(generator, generator.get_state()) for generator, _ in self._generators]
        python, numpy = random.getstate(), np.random.get_state()
        self._set([(owner, {name: _kept(value) for name, value in items.items()}) for owner, items in self._then])
        self._set_generators(self._generators, self._python, self._numpy)
        try:
            yield
        finally:
            self._set(now)
            self._set_generators(generators, python, numpy)

    @staticmethod
    def _set(state: Iterable[tuple[_Items, _Items]]) -> None:
        for owner, items in state:
            for name in _restorable(owner).keys() - items.keys():
                del owner[name]  # the forward made this attribute
            owner.update(items)

    @staticmethod
    def _set_generators(generators: list[tuple[torch.Generator, torch.Tensor]], python: Any, numpy: Any) -> None:
        for generator, state in generators:
            generator.set_state(state)
        random.setstate(python)
        np.random.set_state(numpy)


def _items(module: nn.Module) -> Iterator[tuple[_Items, _Items]]:
    for child in module.modules():
        for owner in (child.__dict__, child._buffers):
            yield owner, _restorable(owner)


def _restorable(owner: _Items) -> _Items:
    return {name: value for name, value in owner.items() if type(value) in _NUMBERS or _is_tensor(value)}


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)


def _kept(value: Any) -> Any:
    """A copy; of a tensor with a graph an alias without it, which keeps no earlier graph alive."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone() if value.grad_fn is None else value.detach()
