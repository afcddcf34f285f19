"""What a check of ``slideformer doctor`` reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing about the machine.

    Attributes:
        topic: what was looked at.
        level: ok; note: good to know; warning: works, with less speed or safety; error: training cannot work.
        found: what is the case.
        remedy: what to do about it.
        values: figures for bug reports, in bytes, seconds, bytes per second.
    """

    topic: str
    level: Level
    found: str
    remedy: str | None = None
    values: dict[str, object] = field(default_factory=dict)


Check = Callable[[], Iterator[Finding]]


def run_check(topic: str, check: Check) -> list[Finding]:
    """The findings of ``check``. One that fails itself becomes a warning: the others must still run."""
    found: list[Finding] = []
    try:
        found.extend(check())
    except Exception as error:  # whatever a driver, a library or a file system raises
        found.append(
            Finding(
                topic=topic,
                level="warning",
                found=f"the check itself failed: {type(error).__name__}: {error}",
                remedy="report this with the output of `slideformer doctor --json`",
            )
        )
    return found
