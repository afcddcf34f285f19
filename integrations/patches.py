"""The registry of everything that SlideFormer replaces in other libraries, each with a check and an undo."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """One attribute of another library that is replaced.

    Args:
        module: the module that holds it; the patch is applied right after that module was imported.
        target: attribute path inside the module, such as ``Accelerator.__init__``.
        wrap: makes the replacement from the original (as stored: a property or classmethod object stays one).
        needs: parameter names of the original that the replacement relies on.
        purpose: what does not work without it, for the warning.
    """

    module: str
    target: str
    wrap: Callable[[Any], Any]
    purpose: str
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.module}.{self.target}"


@dataclass
class PatchRegistry:
    """Applies patches, remembers how to undo them, and collects what could not be patched.

    Attributes:
        problems: what could not be patched, in words.
        waiting: names of the patches whose module is awaited, or was.
    """

    problems: list[str] = field(default_factory=list)
    waiting: set[str] = field(default_factory=set)
    _undo: dict[str, Callable[[], None]] = field(default_factory=dict)

    def apply(self, patch: Patch, module: ModuleType) -> bool:
        """Replaces the target once. A missing or changed target, or any error, becomes an entry of ``problems``.

        It never raises: it runs inside the import of a library in programs that may not use SlideFormer at all.
        """
        if patch.name in self._undo:
            return True
        try:
            problem = self._replace(patch, module)
        except Exception as error:  # whatever goes wrong here must not break the import; it is reported when asked for
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            self.problems.append(f"{patch.name}: {problem}; without it {patch.purpose} does not work")
        return problem is None

    def _replace(self, patch: Patch, module: ModuleType) -> str | None:
        *path, name = patch.target.split(".")
        owner: Any = module
        for part in path:
            owner = getattr(owner, part, None)
        inherited = getattr(owner, name, _MISSING)
        if owner is None or inherited is _MISSING:
            return "not there"
        own = vars(owner).get(name, _MISSING)
        original = inherited if own is _MISSING else own
        missing = _missing_parameters(original, patch.needs)
        if missing:
            return f"has no parameter {', '.join(missing)}"
        replacement = patch.wrap(original)
        setattr(owner, name, replacement)

        def undo() -> None:
            # Somebody else may have wrapped our replacement since; then theirs stays, and ours below it passes through.
            if vars(owner).get(name) is not replacement:
                return
            if own is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        self._undo[patch.name] = undo
        return None

    def applied(self) -> tuple[str, ...]:
        """Names of what is replaced now."""
        return tuple(self._undo)

    def undo(self, name: str) -> None:
        """Puts one original back."""
        handle = self._undo.pop(name, None)
        if handle is not None:
            handle()

    def undo_all(self) -> None:
        """Puts every original back, the latest replacement first."""
        for name in reversed(self.applied()):
            self.undo(name)
        self.problems.clear()
        self.waiting.clear()


def _missing_parameters(target: object, needs: tuple[str, ...]) -> list[str]:
    function = getattr(target, "__func__", target)
    if not needs or not callable(function):
        return []
    parameters = inspect.signature(function).parameters
    return [name for name in needs if name not in parameters]


registry = PatchRegistry()
