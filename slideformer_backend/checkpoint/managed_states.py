"""``optimizer.state`` of an optimizer whose states are the engine's."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

States = dict[str, Any]
Copies = Callable[[Tensor], States]


class ManagedStates(defaultdict[Tensor, Any]):
    """Shows states as torch has them, and notes what a script does to them until the next ``step()`` takes it over.

    An entry is copied out of the engine when it is looked at; what is written into it then, and entries that are set,
    removed or cleared, count at the next ``step()`` or ``state_dict()``, as in plain PyTorch. Entries of parameters
    that the engine does not manage are the optimizer's own.

    Args:
        managed: the managed parameters, in the optimizer's order, and whether they have states yet.
        copies: the states of one of them.
    """

    def __init__(self, managed: Callable[[], dict[Tensor, bool]], copies: Copies) -> None:
        super().__init__(dict)
        self._managed = managed
        self._copies = copies
        self._removed: dict[Tensor, None] = {}
        self.is_plain = False
        """Whether only what was put in is there, as for torch's own ``state_dict()``."""

    def changes(self) -> dict[Tensor, States]:
        """States that a script may have written since the last call (none: they were removed), and forget them."""
        if not self._removed and not dict.__len__(self):
            return {}
        managed = self._managed()
        found: dict[Tensor, States] = {parameter: {} for parameter in self._removed}
        found |= {parameter: state for parameter, state in dict.items(self) if parameter in managed}
        for parameter in found:
            dict.pop(self, parameter, None)
        self._removed = {}
        return found

    def _hidden(self) -> dict[Tensor, None]:
        """Managed parameters whose states only the engine has now; as keys, tensors compare by identity."""
        if self.is_plain:
            return {}
        stepped = (parameter for parameter, has_states in self._managed().items() if has_states)
        return {p: None for p in stepped if p not in self._removed and not dict.__contains__(self, p)}

    def _show_all(self) -> None:
        for parameter in self._hidden():
            dict.__setitem__(self, parameter, self._copies(parameter))

    def __missing__(self, parameter: Tensor) -> Any:
        value = self._copies(parameter) if parameter in self._hidden() else {}
        dict.__setitem__(self, parameter, value)
        return value

    def __contains__(self, parameter: object) -> bool:
        return dict.__contains__(self, parameter) or parameter in self._hidden()

    def __len__(self) -> int:
        return dict.__len__(self) + len(self._hidden())

    def __bool__(self) -> bool:
        return len(self) > 0

    def __iter__(self) -> Iterator[Tensor]:
        return iter([*dict.__iter__(self), *self._hidden()])

    def keys(self) -> Any:
        self._show_all()
        return dict.keys(self)

    def values(self) -> Any:
        self._show_all()
        return dict.values(self)

    def items(self) -> Any:
        self._show_all()
        return dict.items(self)

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        if parameter not in self:
            return default
        return self[parameter]

    def pop(self, parameter: Tensor, *default: Any) -> Any:
        if default and parameter not in self:
            return default[0]
        value = self.get(parameter)
        del self[parameter]
        return value

    def __delitem__(self, parameter: Tensor) -> None:
        if parameter not in self:
            raise KeyError(parameter)
        dict.pop(self, parameter, None)
        if not self.is_plain and parameter in self._managed():
            self._removed[parameter] = None

    def clear(self) -> None:
        self._removed |= dict.fromkeys(self._managed())
        dict.clear(self)

    def copy(self) -> Any:
        return defaultdict(dict, self.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.copy(), memo)

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self.items()))
