"""What a run logs about itself: speed, use of each resource, repairs, dropped steps, memory; and what would help.

Operations are counted as in PaLM (Chowdhery et al. 2022, appendix B): 2 per matrix parameter and token forward, 2 for
the gradient of the input, 2 for that of a trained weight, and 12 times layers, width and sequence length for attention.
Recompute is not counted, so MFU compares with other systems' figures.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import psutil
import torch
from torch import nn

PREFIX = "slideformer/"

logger = logging.getLogger(__name__)

# Dense bf16 tensor-core operations per second, from NVIDIA's data sheets; the first name that occurs counts.
_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 5090": 209e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "RTX A6000": 155e12,
}

_ADVICE_AFTER = 60.0  # seconds and steps that are measured before a bottleneck is named
_ADVICE_STEPS = 10
_WORTH_SAYING = 0.2  # share of the time

# Part of a wait's name -> what is slow, and what helps. The first that occurs counts.
_CAUSES = (
    (
        ("weights updated", "for update", "weights refreshed"),
        "the optimizer on the CPU",
        "more tokens per step (a larger batch, gradient_accumulation_steps) hide it; a larger gpu_memory moves the"
        " updates of more layers to the GPU; cpu_threads gives it more cores",
    ),
    (
        ("weights loaded", "weights sent", "weights pulled", "slot released"),
        "copying weights to the GPU",
        "larger batches compute longer per copy; a larger gpu_memory keeps more layers there; pin_memory: auto makes"
        " copies faster where memory may be locked",
    ),
    (
        ("boundary stored",),
        "moving activations off the GPU",
        "activations: gpu keeps them there if memory allows; of nvme and host, host is the faster one",
    ),
    (
        ("boundary",),
        "bringing activations back to the GPU",
        "activations: gpu keeps them there if memory allows; a larger gpu_memory makes room",
    ),
    (
        ("update on the device",),
        "updates of cores, on the CPU and on their way (strategy: lsp)",
        "a smaller lsp.rank makes them smaller; larger batches hide them; cpu_threads gives the CPU's part more cores",
    ),
    (
        ("gradient sums", "sum of gradients"),
        "sums of gradients, which a clip of accumulated gradients needs (strategy: lsp)",
        "a larger gpu_memory keeps them on the GPU; one larger micro-batch needs none, nor does max_grad_norm: 0",
    ),
    (
        ("norm",),
        "the norm of the gradients",
        "larger batches hide it; cpu_threads gives it more cores; a max_grad_norm that clips rarely costs least",
    ),
    (
        ("gradient",),
        "copying gradients to the host",
        "larger batches compute longer per copy; a larger gpu_memory keeps more layers and their gradients there",
    ),
)


class Report(Protocol):
    """What the figures need of an engine's report; see ``EngineReport``."""

    @property
    def stalls(self) -> Mapping[str, float]:
        """Seconds that compute has stood still, by what it waited for."""

    @property
    def busy(self) -> Mapping[str, float]:
        """Seconds that each lane has worked."""

    @property
    def repairs(self) -> int:
        """Predicted updates that were computed again."""

    @property
    def skipped(self) -> int:
        """Steps dropped because of non-finite gradients."""

    @property
    def gpu_peak_bytes(self) -> int:
        """Peak of the device allocator."""

    @property
    def host_bytes(self) -> int:
        """Host memory of all slabs."""

    @property
    def pinned_bytes(self) -> int:
        """The pinned part of it."""


class Operations(NamedTuple):
    """Floating-point operations of one training step: per token, and per token and position of its sequence."""

    per_token: float
    per_position: float

    @classmethod
    def of(cls, model: nn.Module) -> Operations | None:
        """Those of ``model``: experts by the share that a token visits, embeddings only where the head uses them.

        None where they cannot be told: the configuration has a figure that differs between layers, or lacks one.
        """
        try:
            config = getattr(model, "config", None)
            config = getattr(config, "text_config", config)
            return cls(_per_token(model, config), _per_position(config))
        except Exception as error:  # the model's own code and configuration, of any library; no figure ends a run
            logger.debug("SlideFormer: no MFU for %s: %s", type(model).__name__, error)
            return None


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _per_token(model: nn.Module, config: object) -> float:
    output: Callable[[], object] = getattr(model, "get_output_embeddings", lambda: None)
    head = output()
    tied = id(head.weight) if isinstance(head, nn.Module) and hasattr(head, "weight") else None
    share, total, seen = None, 0.0, set()
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is None or parameter.dim() < 2 or id(parameter) in seen:
                continue
            if isinstance(module, nn.Embedding) and id(parameter) != tied:
                continue
            seen.add(id(parameter))
            visited = 1.0
            if ".experts" in name:
                visited = share = _share(config) if share is None else share
            total += visited * parameter.numel() * (6 if parameter.requires_grad else 4)
    return total


def _share(config: object) -> float:
    experts, visited = _number(config, *_EXPERTS), _number(config, "num_experts_per_tok")
    if not experts or not visited:
        raise ValueError("the configuration does not say how many experts a token visits")
    return min(1.0, visited / experts)


def _per_position(config: object) -> float:
    layers = _number(config, "num_hidden_layers")
    width = _number(config, "num_attention_heads") * _number(config, "head_dim")
    return 12.0 * layers * (width or _number(config, "hidden_size"))


def _number(config: object, *names: str) -> int:
    """The first of these fields that is set; 0 where none is. A list counts where it says the same for all layers."""
    value = next((value for name in names if (value := getattr(config, name, None))), 0)
    if isinstance(value, (list, tuple)):
        (value,) = set(value)
    return int(value)


class Sample(NamedTuple):
    """The counters at one moment."""

    time: float
    steps: int
    tokens: float
    operations: float
    stalls: Mapping[str, float]
    busy: Mapping[str, float]


class Meter:
    """Counts what passes by; read by whoever logs.

    Args:
        operations: of the model; None where they are unknown.
        peak: operations per second of the device; None where it is unknown.
        clock: seconds, monotonic; tests give their own.
    """

    def __init__(
        self, operations: Operations | None, peak: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._operations = operations
        self._peak = peak
        self._clock = clock
        self._report: Callable[[], Report | None] = lambda: None
        self._steps = 0
        self._tokens: torch.Tensor | float = 0.0
        self._positions: torch.Tensor | float = 0.0
        self._last = self._sample(None)
        self._warm: Sample | None = None
        self._has_advised = False

    def follow(self, report: Callable[[], Report | None]) -> None:
        """Read a new engine from now on, for as long as ``report`` has one."""
        self._report, self._warm = report, None
        self._last = self._sample(None)

    def tokens(self, count: torch.Tensor | int, length: int) -> None:
        """``count`` tokens, in sequences of ``length``, went into a training forward. Read only when somebody logs."""
        self._tokens = self._tokens + (count.detach() if isinstance(count, torch.Tensor) else count)
        self._positions = self._positions + (count.detach() if isinstance(count, torch.Tensor) else count) * length

    def step(self) -> None:
        """An optimizer step has been taken."""
        self._steps += 1

    def read(self) -> dict[str, float]:
        """Figures since the last reading (counts: since the start), by name, all with the prefix ``slideformer/``."""
        report = self._report()
        if report is None:
            return {}
        first, last = self._last, self._sample(report)
        self._last = last
        span = max(last.time - first.time, 1e-9)
        figures = {"tokens_per_second": (last.tokens - first.tokens) / span}
        if self._peak is not None and self._operations is not None:
            figures["mfu"] = (last.operations - first.operations) / span / self._peak
        for name, seconds in last.busy.items():
            figures[f"busy_{name}"] = (seconds - first.busy.get(name, 0.0)) / span
        figures["stalled_compute"] = sum(_shares(first, last).values())
        figures |= {"repairs": report.repairs, "skipped_steps": report.skipped}
        figures |= {
            "memory_gpu_peak_gb": report.gpu_peak_bytes / 1e9,
            "memory_host_gb": report.host_bytes / 1e9,
            "memory_pinned_gb": report.pinned_bytes / 1e9,
            "memory_process_gb": psutil.Process().memory_info().rss / 1e9,
        }
        return {f"{PREFIX}{name}": value for name, value in figures.items()}

    def mfu(self) -> float | None:
        """Since the last reading; None where it is unknown."""
        if self._peak is None or self._operations is None:
            return None
        last = self._sample(None)
        return (last.operations - self._last.operations) / max(last.time - self._last.time, 1e-9) / self._peak

    def advice(self) -> str | None:
        """Once, when enough has been measured and the device stands still for long: what it waits for, what helps."""
        report = self._report()
        if self._has_advised or report is None or self._steps < 2:
            return None
        last = self._sample(report)
        if self._warm is None:
            self._warm = last  # the first steps compile and place
        if last.time - self._warm.time < _ADVICE_AFTER or last.steps - self._warm.steps < _ADVICE_STEPS:
            return None
        self._has_advised = True
        return bottleneck(_shares(self._warm, last))

    def _sample(self, report: Report | None) -> Sample:
        tokens, positions = float(self._tokens), float(self._positions)
        work = self._operations or Operations(0.0, 0.0)
        operations = tokens * work.per_token + positions * work.per_position
        stalls, busy = ({}, {}) if report is None else (dict(report.stalls), dict(report.busy))
        return Sample(self._clock(), self._steps, tokens, operations, stalls, busy)


def bottleneck(shares: Mapping[str, float]) -> str | None:
    """A sentence on what the device waits for most, and the settings that help; None when it hardly waits.

    Args:
        shares: of the time, by the names of waits.
    """
    totals: dict[int, float] = {}
    for reason, share in shares.items():
        for number, (parts, _, _) in enumerate(_CAUSES):
            if any(part in reason for part in parts):
                totals[number] = totals.get(number, 0.0) + share
                break
    worst = max(totals, key=lambda number: totals[number], default=None)
    if worst is None or totals[worst] < _WORTH_SAYING:
        return None
    _, what, remedy = _CAUSES[worst]
    return f"SlideFormer: compute stands still {totals[worst]:.0%} of the time because of {what}. What helps: {remedy}."


def peak_of(device: torch.device) -> float | None:
    """Dense bf16 operations per second of a known GPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


def _shares(first: Sample, last: Sample) -> dict[str, float]:
    span = max(last.time - first.time, 1e-9)
    return {reason: (seconds - first.stalls.get(reason, 0.0)) / span for reason, seconds in last.stalls.items()}
