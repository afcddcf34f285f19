"""Checks of versions, the way into ``import torch``, and the configuration in the environment."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator

from .. import __version__
from ..config import DISABLE_VARIABLE, SlideFormerConfig, is_true
from ..errors import ConfigError
from .findings import Finding

PACKAGE = "slideformer-backend"
LIBRARIES = ("torch", "triton", "accelerate", "transformers", "peft", "trl", "numba", "liger-kernel", "kvikio-cu13")
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def versions() -> Iterator[Finding]:
    """Installed libraries against what the package asks for."""
    from packaging.requirements import Requirement

    found: dict[str, object] = {"python": platform.python_version(), PACKAGE: __version__}
    found |= {name: version for name in LIBRARIES if (version := _version(name)) is not None}
    yield Finding(
        topic="versions", level="ok", found=", ".join(f"{name} {value}" for name, value in found.items()), values=found
    )
    try:
        wanted = importlib.metadata.requires(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            topic="package",
            level="warning",
            found=f"{PACKAGE} is not installed; it runs from its source tree",
            remedy="pip install . in the source tree",
        )
        return
    for text in wanted:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            yield Finding(
                topic="versions",
                level="error",
                found=f"{requirement.name} {version or 'is missing'}; {requirement} is needed",
                remedy=f"pip install '{requirement.name}{requirement.specifier}'",
            )


def hook() -> Iterator[Finding]:
    """Whether ``import torch`` calls us, which lets ``accelerate launch`` know SlideFormer."""
    if is_true(os.environ.get(DISABLE_VARIABLE)):
        yield Finding(
            topic="hook",
            level="error",
            found=f"{DISABLE_VARIABLE} is set: SlideFormer is switched off",
            remedy=f"unset {DISABLE_VARIABLE}",
        )
        return
    points = [point for point in importlib.metadata.entry_points(group="torch.backends") if "slideformer" in point.name]
    if not points:
        yield Finding(
            topic="hook",
            level="warning",
            found="torch does not know SlideFormer: no entry point in the group torch.backends",
            remedy="pip install . in the source tree; until then use `slideformer launch`",
        )
        return
    if os.environ.get(AUTOLOAD, "1") == "0":
        yield Finding(
            topic="hook",
            level="warning",
            found=f"{AUTOLOAD}=0: `accelerate launch` does not know SlideFormer",
            remedy=f"unset {AUTOLOAD}, or use `slideformer launch` in place of `accelerate launch`",
        )
        return
    import torch  # noqa: F401  # at the end of its import it calls the entry point

    from .._imports import finder

    if finder not in sys.meta_path:
        yield Finding(
            topic="hook",
            level="error",
            found="torch was imported and did not call SlideFormer's entry point",
            remedy="reinstall the package, and see the warnings of `python -W default -c 'import torch'`",
        )
        return
    yield Finding(topic="hook", level="ok", found="`import torch` registers SlideFormer's hooks")


def environment() -> Iterator[Finding]:
    """The configuration in environment variables."""
    try:
        config = SlideFormerConfig.from_env()
    except ConfigError as error:
        yield Finding(
            topic="configuration",
            level="error",
            found=str(error),
            remedy="correct or unset the SLIDEFORMER_ variables",
        )
        return
    changed = config.to_json()
    text = "no SLIDEFORMER_ variable is set" if changed == "{}" else f"from the environment: {changed}"
    yield Finding(topic="configuration", level="ok", found=text)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
