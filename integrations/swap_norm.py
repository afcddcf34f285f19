"""RMSNorm layers, recognised by what they compute, run by the fused kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from slideformer_backend.engine.engine import Engine
from slideformer_backend.engine.guard import access_of
from slideformer_backend.integrations.bound_method import BoundMethod, is_eager
from slideformer_backend.integrations.kernel_check import Case, cases, generator, mismatch, skeleton
from slideformer_backend.kernels.rms_norm import rms_norm

__all__ = ["NormForward", "is_candidate", "recognise"]

_EPSILON = ("variance_epsilon", "eps", "epsilon")
_OFFSETS = (0.0, 1.0)  # Llama's style, Gemma's


class NormForward(BoundMethod):
    """The forward of an RMSNorm."""

    def __init__(self, engine: Engine, module: nn.Module, offset: float, known: frozenset[Case]) -> None:
        super().__init__(engine, module)
        self._offset = offset
        self._known = known
        self._epsilon = _epsilon_name(module)
        self._weight_dtype = None if module._parameters.get("weight") is None else module.weight.dtype

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_eager() and self.is_in_charge(module) and len(args) == 1 and not kwargs:
            x, weight = args[0], module._parameters.get("weight")
            if type(x) is torch.Tensor and Case.of(x) in self._known and self._fits(x, weight):
                return rms_norm(x, weight if weight is None else _as_plain(weight), self._eps(module), self._offset)
        return super().__call__(module, *args, **kwargs)

    def _eps(self, module: nn.Module) -> float:
        return float(getattr(module, self._epsilon))

    def _fits(self, x: torch.Tensor, weight: torch.Tensor | None) -> bool:
        if weight is None:
            return self._weight_dtype is None
        return weight.dtype == self._weight_dtype and weight.device == x.device and weight.shape == x.shape[-1:]


def is_candidate(module: nn.Module) -> bool:
    """A leaf with an epsilon and at most one parameter, a vector called ``weight``."""
    named = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    if module._modules or not _epsilon_name(module) or set(named) - {"weight"} or any(module.buffers()):
        return False
    return all(parameter.dim() == 1 for parameter in named.values())


def recognise(
    module: nn.Module, device: torch.device, autocast: torch.dtype | None
) -> tuple[tuple[float, frozenset[Case]] | None, str]:
    """The offset of its weight and the cases in which the kernel reproduces it; None and why not, if it never does."""
    reasons = []
    for offset in _OFFSETS:
        found, reason = _try(module, offset, device, autocast)
        if found:
            return (offset, found), ""
        reasons.append(reason)
    return None, reasons[0]


def _try(
    module: nn.Module, offset: float, device: torch.device, autocast: torch.dtype | None
) -> tuple[frozenset[Case], str]:
    weight = module._parameters.get("weight")
    width = 64 if weight is None else weight.shape[0]
    kind = torch.get_default_dtype() if weight is None else weight.dtype
    source = generator()
    # rows of all sizes: where they are small, epsilon counts
    x = torch.randn(8, width, generator=source) * torch.logspace(-4, 2, 8)[:, None]
    inputs = [x] if weight is None else [x, torch.randn(width, generator=source)]
    eps = float(getattr(module, _epsilon_name(module)))

    def own(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        made = skeleton(module)
        if weights:
            made._parameters["weight"] = weights[0]
        return made.forward(x)

    def fused(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weights[0] if weights else None, eps, offset)

    # and about as large as this layer's epsilon, however small; in fp32, the other dtypes do not reach down to it
    near = torch.randn(8, width, generator=source) * (max(eps, 1e-20) ** 0.5 * torch.logspace(-1, 1, 8)[:, None])
    problem = _problem(own, fused, [near, *inputs[1:]], [torch.float32] * 2, Case(torch.float32, None), device)
    if problem is not None:
        return frozenset(), problem
    possible = cases((kind,) if weight is not None else (torch.float32, torch.bfloat16, torch.float16), autocast)
    problems = {case: _problem(own, fused, inputs, (case.dtype, kind), case, device) for case in possible}
    found = frozenset(case for case, problem in problems.items() if problem is None)
    return found, next((problem for problem in problems.values() if problem), "a dtype without a kernel")


def _problem(
    own: Any, fused: Any, inputs: list[torch.Tensor], dtypes: Sequence[torch.dtype], case: Case, device: torch.device
) -> str | None:
    return mismatch(own, fused, [tensor.to(device) for tensor in inputs], dtypes[: len(inputs)], case)


def _epsilon_name(module: nn.Module) -> str:
    return next((name for name in _EPSILON if isinstance(getattr(module, name, None), float)), "")


def _as_plain(weight: torch.Tensor) -> torch.Tensor:
    """The weight of a layer that stays on the device is guarded: it settles, and the kernel gets an alias."""
    access = access_of(weight)
    if access is None or type(weight) is nn.Parameter:
        return weight
    access.before(writes=False)
    with torch._C.DisableTorchFunctionSubclass():
        return weight.view_as(weight)
