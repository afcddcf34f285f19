"""Whether this process trains with SlideFormer, and with which configuration."""

from __future__ import annotations

import importlib.metadata
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

from slideformer_backend.config import (
    DISABLE_VARIABLE,
    ENABLE_VARIABLE,
    SlideFormerConfig,
    environment_settings,
    is_true,
)
from slideformer_backend.errors import ConfigError
from slideformer_backend.integrations.patches import registry
from slideformer_backend.integrations.plugin import SlideFormerPlugin

# The versions whose sources the patches were written against and tested with: at least the first, below the second.
_TESTED = {"accelerate": ((1, 15), (1, 16)), "transformers": ((5, 17), (5, 25))}


@dataclass
class Session:
    """What was asked for in this process: by the launcher (environment) or by the script (a plugin).

    Attributes:
        plugin: the plugin given to the latest ``Accelerator`` that got one. It stays: a later ``Accelerator()`` or a
            ``Trainer`` in the same process uses it too, as with Accelerate's other plugins.
    """

    plugin: SlideFormerPlugin | None = None
    _said: set[str] = field(default_factory=set)

    def is_active(self) -> bool:
        """Whether SlideFormer was asked for and is not switched off. Cheap: called on hot paths of other libraries."""
        if is_true(os.environ.get(DISABLE_VARIABLE)):
            return False
        return self.plugin is not None or is_true(os.environ.get(ENABLE_VARIABLE))

    def config(self) -> SlideFormerConfig | None:
        """The configuration to train with; None when SlideFormer is not active.

        Raises:
            ConfigError: a bad key or value, or the script and the launcher set the same key differently.
        """
        if not self.is_active():
            return None
        from_launcher = environment_settings()
        if self.plugin is None:
            return SlideFormerConfig.from_mapping(from_launcher, source="the environment")
        launched = SlideFormerConfig.from_mapping(from_launcher, source="the environment").to_mapping()
        scripted = self.plugin.config.to_mapping()
        for key in sorted(from_launcher.keys() & self.plugin.settings.keys()):
            if launched[key] != scripted[key]:
                raise ConfigError(
                    f"{key}: the script and the launcher disagree.",
                    found=f"{scripted[key]!r} in SlideFormerPlugin, {launched[key]!r} in the environment",
                    remedy=f"set {key} in one of the two places",
                )
        return SlideFormerConfig.from_mapping({**from_launcher, **self.plugin.settings}, source="SlideFormerPlugin")

    def report_problems(self) -> None:
        """Warns, once each, of libraries outside the tested versions and of patch targets that were not found."""
        for library, (low, high) in _TESTED.items():
            version = _version(library)
            if version is not None and not low <= version < high:
                self.say_once(
                    f"SlideFormer was tested with {library} {_text(low)} to {_text(high)} (exclusive) and this is "
                    f"{importlib.metadata.version(library)}. It may work; if not, install a tested version."
                )
        for problem in registry.problems:
            self.say_once(f"SlideFormer could not hook into {problem}. Install a tested version of that library.")

    def say_once(self, message: str) -> None:
        """Warns the user, once per process and message."""
        if message not in self._said:
            self._said.add(message)
            warnings.warn(message, UserWarning, stacklevel=3)

    def reset(self) -> None:
        """Forgets the plugin and what was said."""
        self.plugin = None
        self._said.clear()


def disabled(environ: Mapping[str, str]) -> bool:
    """Whether everything is switched off (``SLIDEFORMER_DISABLE=1``)."""
    return is_true(environ.get(DISABLE_VARIABLE))


def _version(library: str) -> tuple[int, ...] | None:
    try:
        text = importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def _text(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


session = Session()
