"""What a forward does besides computing its output: buffers, counters, random numbers.

A recompute runs the user's forward a second time. It must see what the first run saw and leave nothing behind: running
statistics are updated once per step, a layer drops the same inputs again, whoever draws the random numbers.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

_COUNTERS = (bool, int, float)


class Effects:
    """The state of a module, and of random generators that torch's own checkpoint does not restore, at one moment.

    Holds copies of the module's buffers, its numbers and its ``torch.Generator`` attributes (submodules included), and
    the states of Python's and numpy's global generators.
    """

    def __init__(self, module: nn.Module) -> None:
        self._buffers: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []
        self._counters: list[tuple[dict[str, Any], str, Any]] = []
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        for child in module.modules():
            self._buffers += [
                (child._buffers, name, buffer.detach().clone())
                for name, buffer in child._buffers.items()
                if buffer is not None
            ]
            for name, value in child.__dict__.items():
                if type(value) in _COUNTERS:
                    self._counters.append((child.__dict__, name, value))
                elif isinstance(value, torch.Generator):
                    self._generators.append((value, value.get_state()))
        self._python = random.getstate()
        self._numpy = np.random.get_state()

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """The module is as it was then; afterwards it is as it is now, whatever the code inside did."""
        buffers = [(owner, name, owner.get(name)) for owner, name, _ in self._buffers]
        counters = [(owner, name, owner.get(name)) for owner, name, _ in self._counters]
        generators = [(generator, generator.get_state()) for generator, _ in self._generators]
        python, numpy = random.getstate(), np.random.get_state()
        for owner, name, then in self._buffers:
            owner[name] = then.clone()
        self._set(self._counters, self._generators, self._python, self._numpy)
        try:
            yield
        finally:
            for holder, name, buffer in buffers:
                holder[name] = buffer
            self._set(counters, generators, python, numpy)

    @staticmethod
    def _set(
        counters: list[tuple[dict[str, Any], str, Any]],
        generators: list[tuple[torch.Generator, torch.Tensor]],
        python: Any,
        numpy: Any,
    ) -> None:
        for owner, name, value in counters:
            owner[name] = value
        for generator, state in generators:
            generator.set_state(state)
        random.setstate(python)
        np.random.set_state(numpy)
