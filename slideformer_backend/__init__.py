"""SlideFormer: an offload strategy for Hugging Face Accelerate on one GPU.

Importing this package is cheap: it imports neither torch nor Accelerate. The names below load on first use.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slideformer_backend.api import attach
    from slideformer_backend.config import SlideFormerConfig
    from slideformer_backend.errors import (
        ConfigError,
        PlanError,
        SlideFormerError,
        StaleGraphError,
        StateError,
        UnsupportedError,
    )
    from slideformer_backend.integrations.plugin import SlideFormerPlugin

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "PlanError",
    "SlideFormerConfig",
    "SlideFormerError",
    "SlideFormerPlugin",
    "StaleGraphError",
    "StateError",
    "UnsupportedError",
    "__version__",
    "attach",
]

# In a source tree kernels/ and integrations/ are siblings of this package; in a wheel they are inside it. Without
# this an installed wheel (or the default `pip install -e`) fails when Python runs in the repository root, because
# the local directory shadows the installed package.
_root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(_root, "setup.cfg")) and os.path.isdir(os.path.join(_root, "kernels")):
    __path__.append(_root)
del _root

_HOME = {
    "ConfigError": "slideformer_backend.errors",
    "PlanError": "slideformer_backend.errors",
    "SlideFormerConfig": "slideformer_backend.config",
    "SlideFormerError": "slideformer_backend.errors",
    "SlideFormerPlugin": "slideformer_backend.integrations.plugin",
    "StaleGraphError": "slideformer_backend.errors",
    "StateError": "slideformer_backend.errors",
    "UnsupportedError": "slideformer_backend.errors",
    "attach": "slideformer_backend.api",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
