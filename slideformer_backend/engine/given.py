"""What a unit's forward is given, once more for its recompute: as it was before the forward wrote to it.

A layer may write into a dict it is given and return it; a cache is appended to. Copies share all tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from .reach import CONTAINERS, GENERATORS, STATELESS, has_attributes

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, bool, int, float, str, type(None), torch.dtype, torch.device})


def is_cache(value: object) -> bool:
    """Whether it is a cache of keys and values, as Transformers has them."""
    return any(base.__name__ == "Cache" for base in type(value).__mro__)


def caches_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The caches among arguments."""
    return [value for value in (*args, *kwargs.values()) if type(value) not in _PLAIN and is_cache(value)]


def fresh(value: Any, memo: dict[int, Any]) -> Any:
    """``value``, with copies of the lists, dicts and objects in it that a forward may write to.

    Args:
        value: arguments; tensors, modules, functions and whatever cannot be copied are themselves.
        memo: the copies of one set of arguments by the original's id, so that what is in two places stays one.
    """
    kind = type(value)
    if kind in _PLAIN or isinstance(value, (*STATELESS, *GENERATORS)):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, tuple) and (kind is tuple or hasattr(kind, "_fields")):
        items = [fresh(item, memo) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return kind(items) if kind is tuple else kind(*items)
    if is_cache(value):
        made = memo[id(value)] = _snapshot(value)
        return made
    if isinstance(value, (dict, list)) or kind in CONTAINERS:
        made = memo[id(value)] = copy.copy(value)
        if kind is not set:
            items = list(value.items() if isinstance(value, dict) else enumerate(value))
            for name, item in items:
                again = fresh(item, memo)
                if again is not item:
                    made[name] = again
        return made
    return _fresh_object(value, memo) if has_attributes(value) else value


def _fresh_object(value: Any, memo: dict[int, Any]) -> Any:
    memo[id(value)] = value
    if hasattr(type(value), "__del__"):  # it owns something that a copy would give back too
        return value
    try:
        made = memo[id(value)] = copy.copy(value)
    except Exception:  # whatever its class raises to say that it has no copies
        return value
    for name, item in list(vars(value).items()):
        if isinstance(item, (dict, list)) or type(item) in CONTAINERS:
            vars(made)[name] = fresh(item, memo)
    return made


def states_in(cache: Any) -> Iterator[torch.Tensor]:
    """Tensors of a cache that recurrent layers overwrite; keys and values are attributes, and are replaced."""
    for value in vars(cache).values():
        if isinstance(value, dict):
            yield from (item for item in value.values() if isinstance(item, torch.Tensor) and not item.is_inference())
        for item in value if isinstance(value, list) else (value,):
            if is_cache(item) or (isinstance(value, list) and _has_parts(item)):
                yield from states_in(item)


def _has_parts(item: object) -> bool:
    return hasattr(item, "__dict__") and not isinstance(item, torch.Tensor)


def _snapshot(cache: Any) -> Any:
    """A copy of a cache, or of a layer of one, that shares only tensors."""
    copied = copy.copy(cache)
    for name, value in vars(cache).items():
        if isinstance(value, list):
            setattr(copied, name, [_snapshot(item) if _has_parts(item) else item for item in value])
        elif isinstance(value, dict):  # which layers are filled, states of recurrent layers
            setattr(copied, name, dict(value))
        elif is_cache(value):
            setattr(copied, name, _snapshot(value))
    return copied
