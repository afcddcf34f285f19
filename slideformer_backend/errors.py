"""Exceptions of SlideFormer: one base class, so that callers can tell ours from torch's."""

from __future__ import annotations

import errno


class SlideFormerError(RuntimeError):
    """Base of every exception that SlideFormer raises on purpose.

    Args:
        what: the subject and what is wrong with it, one sentence.
        found: what was there.
        expected: what would have been right.
        remedy: the call, key or flag that fixes it.

    The parts are joined into the message and kept as attributes.
    """

    def __init__(self, what: str, *, found: object = None, expected: object = None, remedy: str | None = None) -> None:
        parts = [what.rstrip()]
        if found is not None:
            parts.append(f"Found: {found}.")
        if expected is not None:
            parts.append(f"Expected: {expected}.")
        if remedy is not None:
            parts.append(f"Remedy: {remedy}" if remedy.endswith((".", "?")) else f"Remedy: {remedy}.")
        super().__init__(" ".join(parts))
        self.found = found
        self.expected = expected
        self.remedy = remedy


class ConfigError(SlideFormerError, ValueError):
    """The user's configuration is wrong: an unknown key, a bad value, two settings that contradict each other."""


class UnsupportedError(SlideFormerError):
    """A model, optimizer or recipe that SlideFormer refuses, with the reason and what to do instead."""


class StateError(SlideFormerError):
    """A broken invariant inside SlideFormer: a defect of ours, never the user's mistake."""


class StaleGraphError(SlideFormerError):
    """A backward pass whose weights were updated after its forward pass."""


class PlanError(SlideFormerError):
    """A plan that cannot fit the machine, refused before anything is allocated, with numbers and what would fit."""


class CheckpointError(SlideFormerError):
    """A checkpoint that is incomplete, damaged, or does not belong to what it is loaded into."""


class StorageError(SlideFormerError):
    """A file of a storage tier failed: it cannot be made, read or written, or it holds other bytes than were written.

    Args:
        what: what was being done.
        path: the file or directory.
        offset: byte in the file, where that says something.
        error: what the system said.
        remedy: what the user can do.
        found: see ``SlideFormerError``.
        expected: see ``SlideFormerError``.

    ``errno`` is that of ``error``, None where the system reported success (a wrong checksum, a short file).
    """

    def __init__(
        self,
        what: str,
        *,
        path: str,
        offset: int | None = None,
        error: BaseException | None = None,
        remedy: str,
        found: object = None,
        expected: object = None,
    ) -> None:
        self.path = path
        self.offset = offset
        self.errno: int | None = getattr(error, "errno", None)
        place = path if offset is None else f"{path} at byte {offset}"
        code = f"[{errno.errorcode.get(self.errno, self.errno)}] " if self.errno is not None else ""
        text = getattr(error, "strerror", None) or error
        cause = f": {code}{text}." if error is not None else "."
        super().__init__(f"{what} {place} failed{cause}", found=found, expected=expected, remedy=remedy)
