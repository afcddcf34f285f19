"""The mutable containers that a module's forward can reach, and what is in them at one moment.

Reached are the attributes of the module and its submodules; what lists, dicts, deques, sets and plain objects in them
hold; what functions among them (forwards, hooks) close over; and lists, dicts and random generators among the globals
that these name and the attributes of the classes.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import random
import sys
import threading
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from itertools import chain, pairwise
from operator import is_
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..errors import StateError

_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type})
"""Types of objects that nobody changes."""
_DICTS = frozenset({dict, OrderedDict, defaultdict, Counter})
CONTAINERS = _DICTS | {list, deque, set}
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
STATELESS = (
    nn.Module, torch.Tensor, type, ModuleType, BuiltinFunctionType, enum.Enum, threading.local, random.SystemRandom,
)  # fmt: skip
"""Objects that hold no state of a layer, or whose state is looked after elsewhere."""
_OF_OTHERS = frozenset({
    "accelerate", "asyncio", "concurrent", "logging", "multiprocessing", "queue", "slideformer_backend", "threading",
    "torch", "typing",
})  # fmt: skip
"""Packages whose objects hold no state of a layer, or what other threads write to."""
_NOT_IN_FORWARD = frozenset({
    "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
})  # fmt: skip
_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules"})
_LENGTHS = (sys.maxsize, 1024, 1024, 1024, 1024)
"""How many entries a container may have that is so many steps from a module: tables and registries are longer, and
looking at them would cost more than the layer. Of a longer list the recompute's entries are cut off again."""
_ENTRIES = 4096
"""How many entries the containers of a module may have in all, its own attributes not counted."""
_ATTEMPTS = 8
"""Looks that another thread's writes may spoil, one after the other, before only attributes are looked at."""
_BYTES = 1 << 20
"""How much of tensors and arrays in containers is copied, nearest first. State is small; what is large is a table,
or is replaced as a whole."""


class Picture(NamedTuple):
    """Containers, and the objects in them one after the other: of a dict its keys, then its values."""

    reach: Reach
    flat: list[Any]


class Viewer:
    """Looks at a module again and again. Where nothing changed, which is the rule, all looks share one picture."""

    def __init__(self) -> None:
        self._last: Picture | None = None

    def look(self, module: nn.Module) -> Picture:
        """What the forward of ``module`` can reach now; tensors with a graph are aliases without it."""
        reach, flat = None, None
        if self._last is not None:
            reach, last = self._last
            flat = reach.read() if reach.is_bound() else None
            if flat is not None:
                if all(map(is_, flat, last)):
                    return self._last
                if not reach.fits(last, flat):
                    flat = None
        if reach is None or flat is None:
            reach, flat = _read_anew(module)
        has_graph = False
        for position in reach.tensors:
            tensor = flat[position]
            if tensor.grad_fn is not None:
                has_graph, flat[position] = True, tensor.detach().requires_grad_()
        for position in reach.parameters:  # those of a functional call lead to a graph, which the recompute needs
            has_graph = has_graph or not isinstance(flat[position], (nn.Parameter, type(None)))
        picture = Picture(reach, flat)
        self._last = None if has_graph else picture
        return picture


def _read_anew(module: nn.Module) -> tuple[Reach, list[Any]]:
    for attempt in range(_ATTEMPTS + 1):
        try:
            reach = Reach(module, is_deep=attempt < _ATTEMPTS)
            flat = reach.read()
        except RuntimeError:  # a container has changed its size while it was looked at
            flat = None
        if flat is not None:
            return reach, flat
    raise StateError(f"attributes of a {type(module).__name__} change while they are looked at")


class Reach:
    """Which containers there are: true as long as none changes its length and ``fits`` says so of what changed."""

    def __init__(self, module: nn.Module, *, is_deep: bool = True) -> None:
        walk = _Walk(module, is_deep=is_deep)
        self.containers = walk.containers
        self.tensors = walk.tensors
        """Where tensors are of which a recompute gets a copy."""
        self.arrays = walk.arrays
        self.parameters = walk.parameters
        """Where parameters are, or what stands for them, or None."""
        self.generators = walk.generators
        self.long_lists = walk.long_lists
        """Too long to be looked at: only their lengths are put back."""
        self._names, self._values = walk.names, walk.values
        self._views = walk.views
        self._sizes = walk.sizes
        self._ends = walk.ends

    def is_bound(self) -> bool:
        """Whether names among globals, of classes and of closures mean the objects that they meant."""
        return all(map(is_, [space.get(name) for space, name in self._names], self._values))

    def read(self) -> list[Any] | None:
        """What is in the containers now; None where one has another length."""
        if list(map(len, self.containers)) != self._sizes:
            return None
        flat = list(chain.from_iterable(self._views))
        return flat if not self._ends or len(flat) == self._ends[-1] else None  # a thread has written meanwhile

    def fits(self, before: list[Any], now: list[Any]) -> bool:
        """Whether what changed is of the same kind as it was, so that all positions hold."""
        tensors, arrays, parameters = set(self.tensors), set(self.arrays), set(self.parameters)
        for position, (old, new) in enumerate(zip(before, now, strict=True)):
            if old is new or position in parameters or (type(old) in _ATOMS and type(new) in _ATOMS):
                continue
            if position in tensors and isinstance(new, torch.Tensor) and not isinstance(new, nn.Parameter):
                continue
            if not (position in arrays and isinstance(new, np.ndarray)):
                return False
        return True

    def put(self, flat: list[Any]) -> None:
        """Make the containers hold what is in ``flat``."""
        now = self.read()
        if now is None:
            self.put_contents([flat[begin:end] for begin, end in pairwise((0, *self._ends))])
            return
        if all(map(is_, now, flat)):
            return
        for position in [at for at, (old, new) in enumerate(zip(now, flat, strict=True)) if old is not new]:
            index = bisect_right(self._ends, position)
            begin, end = self._ends[index - 1] if index else 0, self._ends[index]
            container, size = self.containers[index], self._sizes[index]
            if type(container) in _DICTS and position >= begin + size:
                container[flat[position - size]] = flat[position]
            elif type(container) in (list, deque):
                container[position - begin] = flat[position]
            else:
                _write(container, flat[begin:end])

    def contents(self) -> list[list[Any]]:
        """What is in each container now, whatever its length."""
        return [_content(container) for container in self.containers]

    def put_contents(self, contents: list[list[Any]]) -> None:
        """Make the containers hold what ``contents`` gave."""
        for container, wanted in zip(self.containers, contents, strict=True):
            now = _content(container)
            if len(now) != len(wanted) or not all(map(is_, now, wanted)):
                _write(container, wanted)


class _Walk:
    """Finds what a module reaches, nearest first."""

    def __init__(self, module: nn.Module, *, is_deep: bool) -> None:
        self.containers: list[Any] = []
        self.views: list[Iterable[Any]] = []
        self.sizes: list[int] = []
        self.ends: list[int] = []
        self.tensors: list[int] = []
        self.arrays: list[int] = []
        self.parameters: list[int] = []
        self.generators: list[Any] = []
        self.long_lists: list[list[Any]] = []
        self.names: list[tuple[Any, Any]] = []
        self.values: list[Any] = []
        self._is_deep = is_deep
        self._entries = _ENTRIES
        self._seen: dict[int, Any] = {}
        self._steps: list[int | None] = []
        self._room = _BYTES
        children = list(module.modules())
        for child in children:
            self._add(child.__dict__, 0)
        for kind in {base: None for child in children for base in type(child).__mro__}:
            if kind.__module__.partition(".")[0] not in _OF_OTHERS:
                self._look_into_class(kind)
        done = 0
        while done < len(self.containers):
            self._enter(self.containers[done], self.ends[done], self._steps[done])
            done += 1

    def _add(self, container: Any, steps: int | None) -> bool:
        """A container so many steps from a module; None: nothing in it needs a look. Returns whether it is new."""
        size, is_dict = len(container), type(container) in _DICTS
        if id(container) in self._seen:
            return False
        if steps:
            if steps >= len(_LENGTHS) or size > _LENGTHS[steps] or size > self._entries:
                if type(container) is list:
                    self._seen[id(container)] = container
                    self.long_lists.append(container)
                return False
            self._entries -= size
        self._seen[id(container)] = container
        self.containers.append(container)
        self.sizes.append(size)
        self.ends.append((self.ends[-1] if self.ends else 0) + (2 * size if is_dict else size))
        self._steps.append(steps)
        if size:
            self.views += [container, container.values()] if is_dict else [container]
        return True

    def _enter(self, container: Any, end: int, steps: int | None) -> None:
        if steps is None:
            return
        if type(container) not in _DICTS:
            for position, value in enumerate(container, end - len(container)):
                self._place(position, value, steps)
            return
        for position, (name, value) in enumerate(container.items(), end - len(container)):
            if steps == 0 and name in _OF_MODULES:
                self._own(name, value)
            elif not (steps == 0 and name in _NOT_IN_FORWARD):
                self._place(position, value, steps)

    def _own(self, name: str, owned: dict[str, Any]) -> None:
        """A module's parameters, buffers or submodules: all of them, whatever their number."""
        if not self._add(owned, None):
            return
        places = range(self.ends[-1] - len(owned), self.ends[-1])
        if name == "_parameters":
            self.parameters += places
        elif name == "_buffers":
            self.tensors += [at for at, buffer in zip(places, owned.values(), strict=True) if buffer is not None]

    def _place(self, position: int, value: Any, steps: int) -> None:
        if isinstance(value, torch.Tensor):
            if isinstance(value, nn.Parameter):
                return
            if steps == 0 or value.grad_fn is not None or self._has_room(value.numel() * value.element_size()):
                self.tensors.append(position)
        elif isinstance(value, np.ndarray):
            if self._has_room(value.nbytes):
                self.arrays.append(position)
        else:
            self._look_into(value, steps)

    def _has_room(self, size: int) -> bool:
        if size > self._room:
            return False
        self._room -= size
        return True

    def _look_into(self, value: Any, steps: int) -> None:
        """Whatever holds something that may change: a container, a generator, a function, an object."""
        kind = type(value)
        if kind in _ATOMS or not self._is_deep:
            return
        if kind in CONTAINERS:
            self._add(value, steps + 1)
        elif isinstance(value, STATELESS) or id(value) in self._seen:
            return
        elif isinstance(value, GENERATORS):
            self._seen[id(value)] = value
            self.generators.append(value)
        elif kind is MethodType:
            self._look_into(value.__func__, steps)
            self._look_into(value.__self__, steps)
        elif kind is functools.partial:
            for part in (value.func, *value.args, *value.keywords.values()):
                self._look_into(part, steps)
        elif kind is FunctionType:
            self._seen[id(value)] = value
            self._look_into_function(value, steps)
        elif isinstance(value, tuple):
            for item in value if len(value) <= _LENGTHS[-1] and steps < len(_LENGTHS) else ():
                self._look_into(item, steps + 1)
        elif steps < 2 and has_attributes(value):
            self._add(value.__dict__, steps + 1)

    def _look_into_class(self, kind: type) -> None:
        for name, value in vars(kind).items():
            if (type(value) in CONTAINERS or isinstance(value, (*GENERATORS, FunctionType))) and name != "__init__":
                self._bind(vars(kind), name, value)
                self._look_into(value, 0)

    def _bind(self, space: Any, name: Any, value: Any) -> None:
        if value is None or type(value) not in _ATOMS:  # a number may change in every step
            self.names.append((space, name))
            self.values.append(value)

    def _look_into_function(self, function: FunctionType, steps: int) -> None:
        if function.__module__.partition(".")[0] in _OF_OTHERS or steps >= len(_LENGTHS):
            return
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                self._bind(_Cell(cell), None, cell.cell_contents)
                self._look_into(cell.cell_contents, steps + 1)
        names = function.__globals__
        for name in _names(function.__code__):
            value = names.get(name)
            if name in names:
                self._bind(names, name, value)
            if type(value) is FunctionType:
                if value.__globals__ is names:
                    self._look_into(value, steps + 1)
            elif type(value) in CONTAINERS or isinstance(value, GENERATORS):
                self._look_into(value, steps + 1)


class _Cell(NamedTuple):
    """A variable of an enclosing function, to be asked like a space of names."""

    cell: CellType

    def get(self, name: None) -> Any:
        """What it holds; None while it is empty."""
        try:
            return self.cell.cell_contents
        except ValueError:
            return None


def has_attributes(value: object) -> bool:
    """Whether it is an object whose attributes may be state of a layer."""
    if type(value).__module__.partition(".")[0] in _OF_OTHERS:
        return False
    try:  # not through a `__getattr__` of its own
        return type(object.__getattribute__(value, "__dict__")) is dict
    except AttributeError:
        return False


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[str, ...]:
    """Names that code looks up among globals, the code inside it too; others are among them."""
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return (*code.co_names, *(name for part in inner for name in _names(part)))


def _content(container: Any) -> list[Any]:
    return [*container, *container.values()] if type(container) in _DICTS else list(container)


def _write(container: Any, content: list[Any]) -> None:
    if type(container) not in _DICTS:
        container.clear()
        (container.update if type(container) is set else container.extend)(content)
        return
    wanted = dict(zip(content[: len(content) // 2], content[len(content) // 2 :], strict=True))
    if type(container) is OrderedDict:  # hooks run in this order
        container.clear()
        container.update(wanted)
        return
    for name in [name for name in container if name not in wanted]:
        del container[name]
    dict.update(container, wanted)  # a Counter's own would add
