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

from .reach import Picture


class Effects:
    """The state of a module, and of whatever else torch's own checkpoint does not restore, at one moment.

    Holds what the module's forward can reach (``reach``): references to it, copies of tensors and arrays, states of
    random generators; the states of Python's and numpy's global generators; torch's choice of attention kernels; and
    which parameters train: one that is frozen or unfrozen between forward and backward would change what the recompute
    saves.

    Args:
        picture: the containers and what is in them.
        generators: further random generators, those among the arguments.
    """

    __slots__ = ("_copies", "_generators", "_numpy", "_python", "_reach", "_states", "_switches", "_then", "_trains")

    def __init__(self, picture: Picture, generators: Iterable[Any] = ()) -> None:
        # lists side by side, not of pairs: every object that lives until the backward brings Python's next full
        # collection nearer, and that stops everything
        self._reach, self._then = picture
        self._copies = self._copied(self._then)
        with torch._C.DisableTorchFunctionSubclass():
            self._trains = bytes(parameter.requires_grad for parameter in self._parameters())
        self._generators = [*self._reach.generators, *generators]
        self._states = [_state(generator) for generator in self._generators]
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._switches = _switches()

    def has_run(self) -> None:
        """The forward is over. Torch decides on its own order of attention kernels in the first attention of a process
        (cuDNN before flash on some GPUs), so that what the forward ran with is known only now."""
        self._switches = _switches()

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """The module is as it was then; afterwards it is as it is now, whatever the code inside did."""
        reach = self._reach
        now = reach.read()
        contents = reach.contents() if now is None else None
        lengths = list(map(len, reach.long_lists))
        states = [_state(generator) for generator in self._generators]
        python, numpy, switches = random.getstate(), np.random.get_state(), _switches()
        then = self._then
        if self._copies:
            then = then.copy()
            for position, value in zip((*reach.tensors, *reach.arrays), self._copies, strict=True):
                then[position] = value
            again = self._copied(then)
            for position, value in zip((*reach.tensors, *reach.arrays), again, strict=True):
                then[position] = value
        reach.put(then)
        self._set_generators(self._states, self._python, self._numpy)
        _switch(self._switches, switches)
        turned = self._turn_to_then()
        try:
            yield
        finally:
            _turn(turned)
            if now is not None:
                reach.put(now)
            elif contents is not None:
                reach.put_contents(contents)
            for entries, length in zip(reach.long_lists, lengths, strict=True):
                del entries[length:]
            self._set_generators(states, python, numpy)
            _switch(switches, self._switches)

    def _copied(self, flat: list[Any]) -> list[Any]:
        """Copies of tensors and arrays; one for both places where one is in two."""
        reach, made = self._reach, dict[int, Any]()
        for position in reach.tensors:
            value = flat[position]
            if id(value) not in made:
                # what had a graph is an alias already
                made[id(value)] = value if value.requires_grad else value.detach().clone()
        for position in reach.arrays:
            made[id(flat[position])] = flat[position].copy()
        return [made[id(flat[position])] for position in (*reach.tensors, *reach.arrays)]

    def _parameters(self) -> list[nn.Parameter]:
        found = (self._then[position] for position in self._reach.parameters)
        return [parameter for parameter in found if parameter is not None]

    def _turn_to_then(self) -> list[tuple[nn.Parameter, bool]]:
        """Parameters train as they did then. Returns how those were now that did not."""
        with torch._C.DisableTorchFunctionSubclass():
            then = zip(self._parameters(), map(bool, self._trains), strict=True)
            turned = [(parameter, trained) for parameter, trained in then if parameter.requires_grad != trained]
        _turn(turned)
        return [(parameter, not trained) for parameter, trained in turned]

    def _set_generators(self, states: list[Any], python: Any, numpy: Any) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            if isinstance(generator, random.Random):
                generator.setstate(state)
            elif isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            else:
                generator.set_state(state)
        random.setstate(python)
        np.random.set_state(numpy)


def _turn(parameters: Iterable[tuple[nn.Parameter, bool]]) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        for parameter, trains in parameters:
            parameter.requires_grad_(trains)


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _switches() -> tuple[Any, ...]:
    """Which kernels ``torch.nn.attention.sdpa_kernel`` and ``torch.backends.cudnn.flags`` let torch choose."""
    found = torch._C
    return (
        found._get_flash_sdp_enabled(),
        found._get_mem_efficient_sdp_enabled(),
        found._get_math_sdp_enabled(),
        found._get_cudnn_sdp_enabled(),
        found._get_cudnn_enabled(),
        found._get_sdp_priority_order(),
    )


def _switch(wanted: tuple[Any, ...], present: tuple[Any, ...]) -> None:
    if wanted == present:
        return
    flash, mem_efficient, math, cudnn_attention, cudnn, order = wanted
    torch._C._set_sdp_use_flash(flash)
    torch._C._set_sdp_use_mem_efficient(mem_efficient)
    torch._C._set_sdp_use_math(math)
    torch._C._set_sdp_use_cudnn(cudnn_attention)
    torch._C._set_cudnn_enabled(cudnn)
    torch._C._set_sdp_priority_order(order)
