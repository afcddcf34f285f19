"""What a plan is made from: a model, a batch if it is known, a machine, and what the user has fixed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..config import SlideFormerConfig
from .activations import UnitActivity
from .ledger import Update
from .machine import Machine
from .partition import Partition

MOMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.04}
"""Of one element, by ``state_dtype``; int8 has a scale per block."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The keys of the configuration that the plan obeys, with values of parts that are not built yet too.

    Attributes:
        moments, moment_bytes: arrays of the optimizer beside the master, and bytes of one of their elements.
        prefetch, gpu_memory, host_memory, nvme_fraction: None where the plan decides.
        others: as the keys of those names.
    """

    update: Update = "exact"
    prefetch: int | None = None
    recompute: Literal["auto", "always"] = "auto"
    activations: Literal["auto", "gpu", "host", "nvme"] = "auto"
    optimizer_states: Literal["auto", "host", "nvme"] = "auto"
    weights: Literal["auto", "host", "nvme"] = "auto"
    nvme_fraction: float | None = None
    lazy_logits: bool = True
    gpu_memory: int | None = None
    host_memory: int | None = None
    moments: int = 2
    moment_bytes: float = 4.0

    @classmethod
    def of(cls, config: SlideFormerConfig, *, moments: int = 2) -> Choices:
        """The choices of a configuration."""
        return cls(
            update=config.update,
            prefetch=None if config.prefetch == "auto" else config.prefetch,
            recompute=config.recompute,
            activations=config.activations,
            optimizer_states=config.optimizer_states,
            weights=config.weights,
            nvme_fraction=config.nvme_fraction,
            lazy_logits=config.lazy_logits,
            gpu_memory=None if config.gpu_memory == "auto" else config.gpu_memory,
            host_memory=None if config.host_memory == "auto" else config.host_memory,
            moments=moments,
            moment_bytes=MOMENT_BYTES[config.state_dtype],
        )


@dataclass(frozen=True, kw_only=True)
class Load:
    """The batch. Attributes: sequences per micro-batch, tokens per sequence, micro-batches per step."""

    sequences: int
    length: int
    accumulate: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.sequences * self.length


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a plan is made from.

    Attributes:
        parts: the model.
        activity: of each sliding unit at ``load``; empty when the batch is not known.
        load: the batch; None: not known.
        vocabulary, hidden: of the language head; 0 without one.
        machine: to plan for.
        choices: what the user has fixed.
        host_base: host bytes that the process takes beside the plan (negative: that it gives back).
    """

    parts: Partition
    activity: tuple[UnitActivity, ...] = ()
    load: Load | None = None
    vocabulary: int = 0
    hidden: int = 0
    machine: Machine
    choices: Choices
    host_base: int = 0

    @property
    def gpu_budget(self) -> int:
        """Device bytes that the plan may use."""
        free = max(0, self.machine.gpu_free)
        return min(free, self.choices.gpu_memory or free)

    @property
    def host_budget(self) -> int:
        """Host bytes that the plan may use beside the process's base."""
        available = max(0, self.machine.host.available - self.host_base)
        return min(available, self.choices.host_memory or available)
