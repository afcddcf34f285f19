"""Fused kernels in place of a model's own layers: RMSNorm, gated activations, rotary embedding.

A layer is swapped only where the kernel gives what the layer's own code gives, which is tried on small random inputs,
forward and backward, when the model is prepared. Only methods are taken over, never parameters or modules: names in the
state dict, hooks and wrappers (PEFT) stay, and ``engine.detach`` puts everything back.
"""

from __future__ import annotations

import collections
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slideformer_backend.config import KERNELS
from slideformer_backend.engine.engine import Engine
from slideformer_backend.integrations import swap_gated, swap_norm, swap_rotary
from slideformer_backend.integrations.bound_method import BoundMethod, is_own
from slideformer_backend.integrations.kernel_check import facts_of
from slideformer_backend.kernels.runtime import HAS_TRITON

__all__ = ["install", "wanted"]

logger = logging.getLogger(__name__)


def wanted(kernels: str | tuple[str, ...], device: torch.device) -> tuple[str, ...]:
    """The kernels that the key ``kernels`` asks for; ``auto``: all on a GPU with Triton, none elsewhere."""
    if kernels == "auto":
        return KERNELS if device.type == "cuda" and HAS_TRITON else ()
    return () if isinstance(kernels, str) else kernels


def install(engine: Engine, autocast: torch.dtype | None = None) -> list[BoundMethod]:
    """Swap the layers of the engine's model that its configuration asks for. Undone when the engine is detached.

    Args:
        engine: of the model.
        autocast: the dtype of the autocast region that wraps the model's forward, if one does.

    Returns:
        One handle per layer; none where Liger's kernels are in the model: they are the user's choice.
    """
    names = wanted(engine.config.kernels, engine.device)
    if names and (liger := _liger_layer(engine.model)):
        logger.info("SlideFormer leaves the layers of this model alone: %s runs Liger's code.", liger)
        return []
    swap = _Swap(engine, autocast)
    for name in names:
        for path, module in engine.model.named_modules():
            swap.consider(name, path, module)
    swap.report(names)
    for handle in swap.handles:
        engine.add_hook(handle)
    return swap.handles


class _Swap:
    """One installation: what was recognised, by what tells layers apart, and what was swapped."""

    def __init__(self, engine: Engine, autocast: torch.dtype | None) -> None:
        self.handles: list[BoundMethod] = []
        self._engine = engine
        self._autocast = autocast
        self._found: dict[Any, tuple[Any, str]] = {}
        self._counts: collections.Counter[str] = collections.Counter()
        self._dtypes = list(dict.fromkeys(p.dtype for p in engine.model.parameters() if p.is_floating_point()))
        if autocast is not None and autocast not in self._dtypes:
            self._dtypes.append(autocast)

    def consider(self, name: str, path: str, module: nn.Module) -> None:
        """Swap ``module`` if it is a layer of kernel ``name``."""
        if name == "rms_norm":
            self._norm(path, module)
        elif name == "gated":
            self._gated(path, module)
        else:
            self._rotary(path, module)

    def report(self, names: tuple[str, ...]) -> None:
        """One line in the log."""
        if names:
            words = ", ".join(f"{name} in {self._counts[name]} layers" for name in names)
            logger.info("SlideFormer's kernels in %s: %s", type(self._engine.model).__name__, words)

    def _norm(self, path: str, module: nn.Module) -> None:
        if not is_own(module) or not swap_norm.is_candidate(module):
            return
        device, autocast = self._engine.device, self._autocast
        found = self._recognised(path, module, lambda: swap_norm.recognise(module, device, autocast))
        if found is not None:
            self._add("rms_norm", swap_norm.NormForward(self._engine, module, *found))

    def _gated(self, path: str, module: nn.Module) -> None:
        device, autocast = self._engine.device, self._autocast
        if is_own(module) and swap_gated.is_candidate(module):
            found = self._recognised(path, module, lambda: swap_gated.recognise(module, device, autocast))
            if found is not None:
                self._add("gated", swap_gated.GatedForward(self._engine, module, found))
        elif is_own(module, "_apply_gate") and swap_gated.is_experts(module):
            found = self._recognised(path, module, lambda: swap_gated.recognise_experts(module, device, autocast))
            if found is not None:
                self._add("gated", swap_gated.ExpertGate(self._engine, module, found))

    def _rotary(self, path: str, module: nn.Module) -> None:
        if not is_own(module):
            return
        turns = {}
        for name, function in swap_rotary.functions_of(module):
            if function not in self._found:
                self._found[function] = swap_rotary.recognise(function, self._dtypes, self._engine.device)
                self._explain(f"{name} of {path}", self._found[function][1])
            if (turn := self._found[function][0]) is not None:
                turns[name] = turn
        if turns:
            self._add("rotary", swap_rotary.AttentionForward(self._engine, module, turns))

    def _recognised(self, path: str, module: nn.Module, recognise: Callable[[], tuple[Any, str]]) -> Any:
        key = facts_of(module)
        if key not in self._found:
            self._found[key] = recognise()
            self._explain(path, self._found[key][1])
        return self._found[key][0]

    def _explain(self, path: str, reason: str) -> None:
        if reason:
            logger.info("%s, and all layers like it, keep their own code: no kernel reproduces it (%s)", path, reason)

    def _add(self, name: str, handle: BoundMethod) -> None:
        self._counts[name] += 1
        self.handles.append(handle)


def _liger_layer(model: nn.Module) -> str:
    """A module of the model in which the user's own Liger is at work; empty if there is none."""
    for path, module in model.named_modules():
        forward = inspect.unwrap(getattr(module.forward, "__func__", module.forward))
        functions = [module_function for _, module_function in swap_rotary.functions_of(module)]
        for part in (type(module), forward, *functions):
            if getattr(part, "__module__", "").split(".")[0] == "liger_kernel":
                return path or type(module).__name__
    return ""
