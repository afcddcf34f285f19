"""What a unit is given: its first tensor that requires a gradient through a node at which the unit's backward ends."""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from .guard import tensors_in
from .identity import ByIdentity
from .visit import Leave, Visit


class Taken:
    """Tensors that units have taken through a node, each with what stands for it in the unit that took it last.

    Autograd adds to the gradient of a tensor use by use, the last use first. A node between a tensor and a unit makes
    one sum of the unit's uses. So that the order stays, later units take the tensor behind that node: their uses are in
    the sum before the unit's are added.
    """

    def __init__(self) -> None:
        self._last: ByIdentity[tuple[TensorWeakRef, object]] = ByIdentity()

    def last(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for ``tensor`` in a graph that is still there; itself if nothing does."""
        entry = self._last.get(tensor)
        if entry is None:
            return tensor
        alias, history = entry[0](), entry[1]
        with torch._C.DisableTorchFunctionSubclass():
            is_same = alias is not None and tensor.grad_fn is history and tensor.is_set_to(alias)
        return alias if is_same else tensor

    def note(self, tensor: torch.Tensor, alias: torch.Tensor) -> None:
        """A unit has taken ``tensor`` as ``alias``, which lives no longer than the unit's graph. Leaves outlive graphs,
        and who uses one must come by its guard: nothing stands for them."""
        if type(alias) is torch.Tensor and alias.layout is torch.strided and tensor.grad_fn is not None:
            self._last[tensor] = TensorWeakRef(alias), tensor.grad_fn


class Inputs:
    """Arguments of a unit with aliases in the place of some tensors: of the first that requires a gradient, and of what
    units before took through a node. All others are what they are, and their gradients add up as autograd does it.

    Lists and dicts with aliases are copies; what the forward writes into those reaches the caller's.

    Args:
        taken: tensors that units have taken.
        args: positional arguments.
        kwargs: keyword arguments.
        visit: which they are for; None for one that ends at no node.
        leave: called in backward at the node (see ``Visit``).
    """

    def __init__(
        self,
        taken: Taken,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        visit: Visit | None = None,
        leave: Leave | None = None,
    ) -> None:
        self.args, self.kwargs = args, kwargs
        self._copies: list[tuple[Any, Any, list[Any]]] = []
        """Of each replaced container: itself, its copy, what was in that."""
        self._originals: dict[int, Any] = {}
        self._passed: dict[int, Any] = {}
        """Aliases and copies by ``id`` of what they stand for."""
        self.given: set[int] = set()
        """The ``id`` of every tensor that requires a gradient, and of every alias."""
        self.first: ByIdentity[torch.Tensor] = ByIdentity()
        """Of the first tensor, while somebody has that: its alias."""
        for tensor in tensors_in((args, kwargs)):
            if not tensor.requires_grad or id(tensor) in self.given:
                continue
            alias = taken.last(tensor)
            if not self.given and visit is not None and leave is not None:
                self.first[tensor] = alias = visit.enter_by(alias, leave)
                taken.note(tensor, alias)
            self.given |= {id(tensor), id(alias)}
            if alias is not tensor:
                self._passed[id(tensor)], self._originals[id(alias)] = alias, tensor
        self.are_aliases = bool(self._passed)
        """Whether some are not what the caller gave."""
        if self.are_aliases:
            self.args, self.kwargs = self._replace(args), {name: self._replace(value) for name, value in kwargs.items()}

    def hand_back(self, output: Any) -> Any:
        """After the forward: the caller's containers hold what it wrote. Returns the output, which may be one; what the
        forward was given and puts out is the caller's tensor there, as in plain torch."""
        for original, copied, given in self._copies:
            now = _values(copied)
            if len(now) == len(given) and all(map(is_, now, given)):
                continue
            own = self._originals
            if isinstance(copied, dict):
                entries = {key: own.get(id(value), value) for key, value in copied.items()}
                original.clear()
                original.update(entries)
            else:
                original[:] = [own.get(id(value), value) for value in copied]
            output = original if output is copied else output
        return self._original(output) if self.are_aliases else output

    def _original(self, output: Any) -> Any:
        found = self._originals.get(id(output)) if isinstance(output, torch.Tensor) else None
        if found is not None:
            return found
        if isinstance(output, tuple) and any(id(tensor) in self._originals for tensor in tensors_in(output)):
            items = map(self._original, output)
            return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
        if isinstance(output, (list, dict)):
            for name, item in list(output.items() if isinstance(output, dict) else enumerate(output)):
                if isinstance(item, torch.Tensor) and id(item) in self._originals:
                    output[name] = self._originals[id(item)]
        return output

    def _replace(self, value: Any) -> Any:
        found = self._passed.get(id(value))
        if found is not None or isinstance(value, torch.Tensor):
            return value if found is None else found
        kind = type(value)
        is_named = isinstance(value, tuple) and hasattr(value, "_fields")
        if not (is_named or kind in (tuple, list, dict)) or all(id(t) not in self._passed for t in tensors_in(value)):
            return value
        if is_named:
            return kind(*map(self._replace, value))
        if kind is tuple:
            return tuple(map(self._replace, value))
        copied = self._passed[id(value)] = kind()  # first of all: it may contain itself
        if kind is dict:
            copied.update((key, self._replace(item)) for key, item in value.items())
        else:
            copied.extend(map(self._replace, value))
        self._copies.append((value, copied, _values(copied)))
        self._originals[id(copied)] = value
        return copied


def _values(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)
