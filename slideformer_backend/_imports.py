"""Post-import hooks: call back as soon as a module has been imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, cast

Callback = Callable[[ModuleType], None]


class PostImportFinder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: wraps the loader of the modules that somebody waits for.

    A callback runs once, right after the module body. It must not raise: it runs inside somebody else's ``import``.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, list[Callback]] = {}

    def register(self, name: str, callback: Callback) -> None:
        """Calls ``callback(module)`` once module ``name`` is imported; at once if it is already."""
        module = sys.modules.get(name)
        if module is None:
            self._waiting.setdefault(name, []).append(callback)
        elif getattr(module.__spec__, "_initializing", False):
            _call_when_complete(module, callback)
        else:
            callback(module)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        callbacks = self._waiting.pop(fullname, None)
        if callbacks is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if find is None or finder is self else find(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = cast("importlib.abc.Loader", _Loader(spec.loader, callbacks))
                return cast("importlib.machinery.ModuleSpec", spec)
        self._waiting[fullname] = callbacks  # not importable now; it may be later
        return None

    def install(self) -> None:
        """Puts the finder in front of the others, once."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Takes the finder out and forgets what was waited for."""
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader:
    """Stands in for a loader during one import and runs the callbacks after the module body."""

    def __init__(self, inner: importlib.abc.Loader, callbacks: list[Callback]) -> None:
        self._inner = inner
        self._callbacks = callbacks

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module gets its own loader back before its body runs: inspect, pkgutil and importlib.resources look at it.
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        for callback in self._callbacks:
            callback(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _call_when_complete(module: ModuleType, callback: Callback) -> None:
    """Runs ``callback`` at the first look at ``module`` after its body, which is running now, has ended.

    ``import accelerate`` as a program's first import ends up here: accelerate.accelerator imports torch, torch calls
    us, and by then it is too late to wrap the loader. The import system itself looks at a module when its body has
    ended, so the callback runs before anybody can use what the module defines.
    """
    own_class = type(module)

    class Pending(own_class):  # type: ignore[misc, valid-type]  # the base is only known at run time
        def __getattribute__(self, name: str) -> Any:
            spec = own_class.__getattribute__(self, "__spec__")
            if not getattr(spec, "_initializing", False) and type(self) is Pending:
                object.__setattr__(self, "__class__", own_class)
                callback(self)
            return own_class.__getattribute__(self, name)

    Pending.__name__ = own_class.__name__
    module.__class__ = Pending


finder = PostImportFinder()
