"""What every plan has: predicted peaks by tier, what lacks, and a verdict."""

from __future__ import annotations

import abc
from typing import Literal

from .request import Request

TIGHT = 0.05
"""Share by which the ledger may err: a plan whose peak is nearer than this to its budget is called tight."""


class Outcome(abc.ABC):
    """A decision and its consequences. ``request`` is what it was made from."""

    request: Request

    @property
    @abc.abstractmethod
    def device(self) -> int:
        """Predicted device peak in bytes."""

    @property
    @abc.abstractmethod
    def host(self) -> int:
        """Predicted host peak beside the process's base, in bytes."""

    @property
    @abc.abstractmethod
    def nvme(self) -> int:
        """Predicted bytes in files."""

    @property
    def shortages(self) -> dict[str, int]:
        """Bytes that lack, by tier ("gpu", "host", "nvme"); empty when the plan fits."""
        request = self.request
        found = {"host": self.host - request.host_budget}
        if request.machine.has_gpu:
            found["gpu"] = self.device - request.gpu_budget
        found["nvme"] = self.nvme - request.machine.nvme_free if self.nvme else 0
        return {tier: missing for tier, missing in found.items() if missing > 0}

    @property
    def verdict(self) -> Literal["fits", "tight", "does not fit"]:
        """Whether it fits; tight: by less than the ledger may err."""
        if self.shortages:
            return "does not fit"
        request = self.request
        is_tight = self.host > (1 - TIGHT) * request.host_budget
        if request.machine.has_gpu:
            is_tight |= self.device > (1 - TIGHT) * request.gpu_budget
        return "tight" if is_tight else "fits"
