"""The settings of ``strategy: lsp``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

PROJECTORS = ("lsp", "orthonormal")
WORDS = "a section with any of rank, nonzeros, check_interval, alpha, timeout, projector"


@dataclass(frozen=True, kw_only=True)
class LspSettings:
    """How gradients are compressed (arXiv 2406.10181).

    Raises:
        ValueError: a value that its key does not take.

    Attributes:
        rank: d, the most rows and columns of a core. Wire, CPU work and moments go with its square.
        nonzeros: r, of each row of a sparse projector; of ``projector: lsp`` only.
        check_interval: steps between two looks at a projector's relative error; the first is at the first step.
        alpha: the relative error above which a projector learns anew, and at which it has learned enough.
        timeout: most optimisation steps of one learning: a count, so that a run can be repeated bit for bit.
        projector: lsp: sparse and learned; orthonormal: dense factors from a randomised SVD, with error feedback.
    """

    rank: int = 2048
    nonzeros: int = 8
    check_interval: int = 200
    alpha: float = 0.3
    timeout: int = 100
    projector: Literal["lsp", "orthonormal"] = "lsp"

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("nonzeros", 1), ("check_interval", 1), ("timeout", 0)):
            object.__setattr__(self, name, _whole(name, getattr(self, name), least))
        alpha = float(self.alpha)
        if isinstance(self.alpha, bool) or not alpha >= 0.0:
            raise ValueError(f"alpha: {self.alpha!r} is no number from 0")
        object.__setattr__(self, "alpha", alpha)
        if self.projector not in PROJECTORS:
            raise ValueError(f"projector: {self.projector!r} is none of {', '.join(PROJECTORS)}")

    @classmethod
    def from_section(cls, section: Mapping[str, object] | None) -> LspSettings:
        """From the configuration's section ``lsp``; None: all defaults."""
        names = [key.name for key in dataclasses.fields(cls)]
        unknown = [name for name in section or {} if name not in names]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(names)}")
        return cls(**cast("dict[str, Any]", dict(section or {})))


def section(value: object) -> Mapping[str, object]:
    """The section ``lsp``, checked: a mapping, or its JSON text (from flags and variables).

    Raises:
        ValueError: it is neither, or has a key or value that is not known.
    """
    given = json.loads(value) if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        raise ValueError
    settings = LspSettings.from_section(given)
    return {str(name): getattr(settings, str(name)) for name in given}


def _whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)) or int(value) < least:
        raise ValueError(f"{name}: {value!r} is no whole number from {least}")
    return int(value)
