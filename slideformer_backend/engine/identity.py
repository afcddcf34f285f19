"""What is known of a tensor object, found by the object itself."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch

Value = TypeVar("Value")


class ByIdentity(Generic[Value]):
    """Values of tensor objects, which it does not keep alive: a tensor's ``==`` is elementwise, and its hash its id.

    torch's ``WeakIdKeyDictionary`` makes and compares a Python object per look-up. Here the address is the key: an
    entry goes before its tensor's memory does, so that no other object can have that address. No reference is ever
    turned back into a tensor, which torch objects would need help with.
    """

    def __init__(self) -> None:
        self._values: dict[int, Value] = {}
        self._ends: dict[int, weakref.ref[torch.Tensor]] = {}

    def __setitem__(self, tensor: torch.Tensor, value: Value) -> None:
        key, owner = id(tensor), weakref.ref(self)  # which is no part of a cycle: it goes with whoever has it

        def end(_: object) -> None:
            found = owner()
            if found is not None:
                found._values.pop(key, None)
                found._ends.pop(key, None)

        self._values[key] = value
        self._ends[key] = weakref.ref(tensor, end)

    def get(self, tensor: torch.Tensor) -> Value | None:
        """The value of this very object, or None."""
        return self._values.get(id(tensor))

    def pop(self, tensor: torch.Tensor) -> None:
        """Forget it."""
        self._ends.pop(id(tensor), None)
        self._values.pop(id(tensor), None)

    def clear(self) -> None:
        """Forget all."""
        self._ends.clear()
        self._values.clear()

    def __len__(self) -> int:
        return len(self._values)
