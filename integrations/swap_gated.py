"""Gated feed-forward layers and experts, recognised by what they compute, their activation run by the fused kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from slideformer_backend.engine.engine import Engine
from slideformer_backend.integrations.bound_method import BoundMethod, is_eager
from slideformer_backend.integrations.kernel_check import TOLERANCE, Case, generator, mismatch, skeleton
from slideformer_backend.kernels.gated import geglu, swiglu

__all__ = ["ExpertGate", "GatedForward", "Gating", "is_candidate", "is_experts", "recognise", "recognise_experts"]

_WIDTH = 32
_ROWS = 8
_SIZES = (4.0, 100.0)
"""Largest gate in a check: where activations differ in shape, and where one that clamps does."""


def _gelu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return geglu(gate, up, "none")


ACTIVATIONS: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (swiglu, geglu, _gelu)


class Gating(NamedTuple):
    """How a layer gates: the projections by name (``up`` is empty where one projection gives both), the activation,
    whether the gate is the second half of that projection, and the dtypes in which the kernel reproduces it."""

    gate: str
    up: str
    down: str
    activation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    is_swapped: bool
    known: frozenset[torch.dtype]

    def apply(self, children: dict[str, Any], x: torch.Tensor) -> Any:
        """The layer's output."""
        if self.up:
            gate, up = children[self.gate](x), children[self.up](x)
        else:
            gate, up = _halves(children[self.gate](x), self.is_swapped)
        return children[self.down](self.activation(gate, up))


class GatedForward(BoundMethod):
    """The forward of a gated feed-forward layer."""

    def __init__(self, engine: Engine, module: nn.Module, gating: Gating) -> None:
        super().__init__(engine, module)
        self._gating = gating

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_eager() and self.is_in_charge(module) and len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:
            case = Case.of(args[0])
            is_known = (case.autocast or case.dtype) in self._gating.known
            if is_known and not any(_is_watched(child) for child in _rest(module)):
                return self._gating.apply(module._modules, args[0])
        return super().__call__(module, *args, **kwargs)


class ExpertGate(BoundMethod):
    """``_apply_gate`` of a module that holds all experts of a layer."""

    def __init__(self, engine: Engine, module: nn.Module, gating: Gating) -> None:
        super().__init__(engine, module, "_apply_gate")
        self._gating = gating

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_eager() and self.is_in_charge(module) and len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:
            is_known = args[0].dtype in self._gating.known
            if is_known and not any(_is_watched(child) for child in module.children()):
                return self._gating.activation(*_halves(args[0], self._gating.is_swapped))
        return super().__call__(module, *args, **kwargs)


def is_candidate(module: nn.Module) -> bool:
    """A layer without parameters of its own that has two or three projections and takes one tensor."""
    return not module._parameters and next(_layouts(module), None) is not None and _takes_one_tensor(module)


def is_experts(module: nn.Module) -> bool:
    """Transformers' experts of one layer: parameters for all of them, and the gate as a method."""
    return callable(getattr(module, "_apply_gate", None)) and module._parameters.get("gate_up_proj") is not None


def recognise(module: nn.Module, device: torch.device, autocast: torch.dtype | None) -> tuple[Gating | None, str]:
    """How it gates; None and why, if no kernel reproduces it."""
    dtypes = _dtypes(*(parameter.dtype for parameter in module.parameters()), autocast)
    source, reason = generator(), ""
    inputs = _signed(source, _ROWS, _WIDTH)
    for gate, up, down in _layouts(module):
        names = [name for name in (gate, up, down) if name]
        scales = [_signed(source, 2, _WIDTH) for _ in names]
        for activation in ACTIVATIONS:
            for is_swapped in (False,) if up else (False, True):
                gating = Gating(gate, up, down, activation, is_swapped, frozenset())
                own, fused = _ways(module, gating, names)
                known, reason = _known(own, fused, [inputs, *scales], dtypes, device)
                if known:
                    return gating._replace(known=known), ""
    return None, reason


def recognise_experts(
    module: nn.Module, device: torch.device, autocast: torch.dtype | None
) -> tuple[Gating | None, str]:
    """How its ``_apply_gate`` gates; None and why, if no kernel reproduces it."""
    rows = _signed(generator(), _ROWS, 2 * _WIDTH)
    dtypes, reason = _dtypes(*(parameter.dtype for parameter in module.parameters()), autocast), ""
    apply_gate: Callable[..., Any] = type(module)._apply_gate  # type: ignore[attr-defined]  # is_experts

    def own(rows: torch.Tensor) -> Any:
        return apply_gate(skeleton(module), rows)

    for activation in ACTIVATIONS:
        for is_swapped in (False, True):

            def fused(rows: torch.Tensor, activation: Any = activation, is_swapped: bool = is_swapped) -> torch.Tensor:
                return activation(*_halves(rows, is_swapped))  # type: ignore[no-any-return]  # one of ACTIVATIONS

            known, reason = _known(own, fused, [rows], dtypes, device)
            if known:
                return Gating("", "", "", activation, is_swapped, known), ""
    return None, reason


class _Scale(nn.Module):
    """Stands for a projection in a check: elementwise, so that both ways see the same values to the last bit."""

    def __init__(self, scale: torch.Tensor, parts: int) -> None:
        super().__init__()
        self._parameters["weight"] = scale  # type: ignore[assignment]  # a tensor with a graph
        self.scale = scale
        self.parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` scaled, once per part."""
        return torch.cat([x * self.scale[part].to(x.dtype) for part in range(self.parts)], -1)


def _ways(module: nn.Module, gating: Gating, names: list[str]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def stand_ins(scales: tuple[torch.Tensor, ...]) -> dict[str, _Scale]:
        return {
            name: _Scale(scale, 2 if name == gating.gate and not gating.up else 1)
            for name, scale in zip(names, scales, strict=True)
        }

    def own(x: torch.Tensor, *scales: torch.Tensor) -> Any:
        made = skeleton(module)
        made._modules.update(stand_ins(scales))
        return made.forward(x)

    def fused(x: torch.Tensor, *scales: torch.Tensor) -> Any:
        return gating.apply(dict(stand_ins(scales)), x)

    return own, fused


def _known(
    own: Callable[..., Any],
    fused: Callable[..., Any],
    inputs: list[torch.Tensor],
    dtypes: list[torch.dtype],
    device: torch.device,
) -> tuple[frozenset[torch.dtype], str]:
    """The dtypes in which both ways agree; what is between the projections has one dtype, under autocast too."""
    x, *scales = (tensor.to(device) for tensor in inputs)
    known, reason = set(), "a dtype without a kernel"
    for dtype in dtypes:
        kinds = [dtype] * len(inputs)
        problems = [mismatch(own, fused, [x * size, *scales], kinds, Case(dtype, None)) for size in _SIZES]
        if problems == [None] * len(_SIZES):
            known.add(dtype)
        reason = next(filter(None, problems), reason)
    return frozenset(known), reason


def _signed(source: torch.Generator, *shape: int) -> torch.Tensor:
    """Uniform between -1 and 1."""
    return torch.rand(*shape, generator=source) * 2 - 1


def _dtypes(*found: torch.dtype | None) -> list[torch.dtype]:
    return [dtype for dtype in dict.fromkeys(found) if dtype in TOLERANCE]


def _layouts(module: nn.Module) -> Iterator[tuple[str, str, str]]:
    """Possible (gate, up, down) among the projections; ``up`` is empty where the first gives both."""
    sizes = {name: size for name, child in module._modules.items() if (size := _size(child)) is not None}
    others = [child for name, child in module._modules.items() if name not in sizes and child is not None]
    if any(next(child.parameters(), None) is not None for child in others):
        return
    for down, (inner, outer) in sizes.items():
        rest = [name for name in sizes if name != down]
        if len(rest) == 2 and all(sizes[name] == (outer, inner) for name in rest):
            yield rest[0], rest[1], down
            yield rest[1], rest[0], down
        elif len(rest) == 1 and sizes[rest[0]] == (outer, 2 * inner):
            yield rest[0], "", down


def _size(child: nn.Module | None) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer, or of what PEFT or a quantiser has put in its place; None for others."""
    found = getattr(child, "in_features", None), getattr(child, "out_features", None)
    return found if isinstance(found[0], int) and isinstance(found[1], int) else None  # type: ignore[return-value]


def _takes_one_tensor(module: nn.Module) -> bool:
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    empty = inspect.Parameter.empty
    others = (other.default is not empty or other.kind in optional for other in parameters[1:])
    return bool(parameters) and all(others)


def _rest(module: nn.Module) -> Iterator[nn.Module]:
    """Children that are no projections: the activation, dropout."""
    return (child for child in module.children() if _size(child) is None)


def _is_watched(child: nn.Module) -> bool:
    """Whether a user's hook waits for the child to be called."""
    return bool(child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks)


def _halves(both: torch.Tensor, is_swapped: bool) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = both.chunk(2, dim=-1)
    return (second, first) if is_swapped else (first, second)
