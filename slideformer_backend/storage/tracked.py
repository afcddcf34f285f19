"""Buffers whose accesses are ordered by tickets."""

from __future__ import annotations

import torch


class Tracked:
    """A buffer whose accesses the monitor orders. ``flat`` is its memory, a 1-D tensor."""

    def __init__(self, name: str, flat: torch.Tensor) -> None:
        self.name = name
        self.flat = flat
        self.last_write: tuple[str, int, str] | None = None
        self.last_reads: dict[str, tuple[int, str]] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.flat.numel() * self.flat.element_size()} bytes>"
