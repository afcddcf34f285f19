"""Plain values as JSON: schedulers, scalers, random generators, hyper-parameters. Nothing here is ever executed."""

from __future__ import annotations

import base64
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError

_TAG = "$"
"""Key of the JSON objects that stand for something which JSON does not have."""


def pack(value: Any, where: str = "state") -> Any:
    """``value`` as JSON can hold it; ``unpack`` gives it back equal, types and bits included.

    Plain numbers, texts, lists, tuples, sets and dictionaries, tensors and numpy arrays in any depth; numbers of numpy
    become Python's.

    Raises:
        CheckpointError: something else, with the place where it is.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic):
        return pack(value.item(), where)
    if isinstance(value, torch.Tensor):
        return _tagged("tensor", _bytes(value.detach().cpu()), dtype=str(value.dtype)[6:], shape=list(value.shape))
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return _tagged("array", data, dtype=value.dtype.str, shape=list(value.shape))
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [pack(item, f"{where}[{number}]") for number, item in enumerate(value)]
        return items if type(value) is list else _tagged(_sequence(value), items)
    if isinstance(value, Mapping):
        pairs = [[pack(key, where), pack(item, f"{where}.{key}")] for key, item in value.items()]
        if isinstance(value, Counter):
            return _tagged("counter", pairs)
        is_plain = all(isinstance(key, str) and not key.startswith(_TAG) for key in value)
        return dict(pairs) if is_plain else _tagged("dict", pairs)
    if isinstance(value, (torch.device, torch.dtype)):
        return _tagged(type(value).__name__, str(value))
    if isinstance(value, (str, int, float)):  # an enumeration's member, or the like
        return pack(next(base for base in (bool, str, int, float) if isinstance(value, base))(value), where)
    raise CheckpointError(
        f"{where} cannot be saved: only plain values, tensors and arrays can, since nothing of a checkpoint is executed"
        " when it is loaded.",
        found=f"{type(value).__module__}.{type(value).__qualname__}",
        remedy="leave it out of state_dict()",
    )


def unpack(value: Any) -> Any:
    """The value that ``pack`` was given.

    Raises:
        CheckpointError: ``value`` was not made by ``pack``.
    """
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: unpack(item) for key, item in value.items()}
    data = value["value"]
    if kind == "tensor":
        dtype = getattr(torch, value["dtype"])
        flat = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.view(value["shape"])
    if kind == "array":
        return np.frombuffer(base64.b64decode(data), np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    if kind == "dtype":
        return getattr(torch, data.removeprefix("torch."))
    makers: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "device": torch.device}
    makers |= {"dict": lambda pairs: {_key(k): v for k, v in pairs}, "counter": lambda pairs: Counter(dict(pairs))}
    if kind not in makers:
        raise CheckpointError(f"A checkpoint holds a value of the unknown kind {kind!r}.")
    return makers[kind](unpack(data))


def random_states() -> dict[str, Any]:
    """The states of all random generators that a training script uses without naming them, packed."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return {name: pack(state) for name, state in states.items()}


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Put back what ``random_states`` gave; of GPUs, as many as there are."""
    random.setstate(unpack(states["python"]))
    np.random.set_state(unpack(states["numpy"]))
    torch.set_rng_state(unpack(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        for number, state in enumerate(unpack(states["cuda"])[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, number)


def _tagged(kind: str, value: Any, **more: Any) -> dict[str, Any]:
    return {_TAG: kind, "value": value, **more}


def _bytes(tensor: torch.Tensor) -> str:
    return base64.b64encode(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).decode()


def _sequence(value: Any) -> str:
    return next(kind.__name__ for kind in (tuple, set, frozenset) if isinstance(value, kind))


def _key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key
