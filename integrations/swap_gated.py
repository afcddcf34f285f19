"""Gated feed-forward layers and experts, recognised by what they compute, their activation run by the fused kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from slideformer_backend.engine.engine import Engine
from slideformer_backend.integrations.bound_method import BoundMethod, is_eager
from slideformer_backend.integrations.kernel_check import TOLERANCE, Case, generator, mismatch, skeleton
from slideformer_backend.kernels.gated import geglu, swiglu

__all__ = ["ExpertGate", "GatedForward", "Gating", "is_candidate", "is_experts", "recognise", "recognise_experts"]

_OUTER, _INNER = 32, 48
"""Widths in a check. Not the same, whatever the layer's are: a wrong idea of which projection leads back must fail."""
_ROWS = 8
_PART = 128
"""Rows and columns of the layer's own weights that a check computes with, at most."""
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
    source, reason, passed = generator(), "", []
    inputs = _signed(source, _ROWS, _OUTER)
    for gate, up, down in _layouts(module):
        stand_ins = _stand_ins(gate, up, down, source)
        scales = [_signed(source, stand_in.parts, stand_in.outputs) for stand_in in stand_ins.values()]
        for activation in ACTIVATIONS:
            for is_swapped in (False,) if up else (False, True):
                gating = Gating(gate, up, down, activation, is_swapped, frozenset())
                own, fused = _ways(module, gating, stand_ins)
                known, problem = _known(own, fused, [inputs, *scales], dtypes, device)
                if known:
                    passed.append(gating._replace(known=known))
                if not reason or problem.startswith("relative"):  # says more than that widths do not fit
                    reason = problem
    if len(passed) == 1:
        fault = _with_own_weights(module, passed[0], device)
        return (passed[0], "") if fault is None else (None, f"with its own weights: {fault}")
    if passed:
        reason = "it can be read in more than one way: " + " or ".join(
            ", ".join(filter(None, (found.gate, found.up, found.down))) for found in passed
        )
    return None, reason


def recognise_experts(
    module: nn.Module, device: torch.device, autocast: torch.dtype | None
) -> tuple[Gating | None, str]:
    """How its ``_apply_gate`` gates; None and why, if no kernel reproduces it."""
    rows = _signed(generator(), _ROWS, 2 * _INNER)
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


class _StandIn(nn.Module):
    """Stands for a projection in a check: picks elements and scales them, so that both ways see the same values to the
    last bit. No two pick alike, so that their order shows."""

    def __init__(self, inputs: int, outputs: int, parts: int, source: torch.Generator) -> None:
        super().__init__()
        self.inputs, self.outputs, self.parts = inputs, outputs, parts
        self.scale = torch.empty(0)
        spread = [torch.cat([torch.randperm(inputs, generator=source) for _ in range(2)]) for _ in range(parts)]
        self.picked = [order[:outputs] for order in spread]

    def scaled(self, scale: torch.Tensor) -> _StandIn:
        """The same with a scale [parts, outputs]."""
        made: _StandIn = skeleton(self)
        made._parameters["weight"] = scale  # type: ignore[assignment]  # a tensor with a graph
        made.scale = scale
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` with its elements in another order and scaled, once per part."""
        if x.shape[-1] != self.inputs:  # said here: an index outside would end a GPU's context
            raise ValueError(f"{x.shape[-1]} features for a projection of {self.inputs}")
        orders = (order.to(x.device) for order in self.picked)
        return torch.cat([x[..., order] * self.scale[n].to(x.dtype) for n, order in enumerate(orders)], -1)


class _Dense(nn.Module):
    """A part of a projection's own weights, without what hangs on the projection."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the linear layer."""
        return F.linear(x, self.weight, self.bias)


def _stand_ins(gate: str, up: str, down: str, source: torch.Generator) -> dict[str, _StandIn]:
    parts = {gate: 1, up: 1} if up else {gate: 2}
    made = {name: _StandIn(_OUTER, _INNER, count, source) for name, count in parts.items()}
    return {**made, down: _StandIn(_INNER, _OUTER, 1, source)}


def _ways(
    module: nn.Module, gating: Gating, stand_ins: dict[str, _StandIn]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def scaled(scales: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        return {name: found.scaled(scale) for (name, found), scale in zip(stand_ins.items(), scales, strict=True)}

    def own(x: torch.Tensor, *scales: torch.Tensor) -> Any:
        return _with(module, scaled(scales)).forward(x)

    def fused(x: torch.Tensor, *scales: torch.Tensor) -> Any:
        return gating.apply(scaled(scales), x)

    return own, fused


def _with(module: nn.Module, projections: dict[str, Any]) -> Any:
    """The layer with other projections."""
    made = skeleton(module)
    made._modules.update(projections)
    return made


def _with_own_weights(module: nn.Module, gating: Gating, device: torch.device) -> str | None:
    """In what the layer differs from its recognised form with its own weights and biases; None too for weights that
    cannot be read as a matrix (quantised), where the stand-ins alone decide."""
    inner, outer = _size(module._modules[gating.down]) or (0, 0)
    places, features = torch.arange(min(inner, _PART)), torch.arange(min(outer, _PART))
    both = places if gating.up else torch.cat([places, places + inner])
    wanted = {gating.gate: (both, features), gating.down: (features, places)}
    if gating.up:
        wanted[gating.up] = (places, features)
    parts = {name: _part(module._modules[name], *chosen, device) for name, chosen in wanted.items()}
    if any(part is None for part in parts.values()):
        return None
    x = _signed(generator(), _ROWS, len(features)).to(device) * _SIZES[0]
    own = _with(module, parts).forward
    return mismatch(own, lambda x: gating.apply(parts, x), [x], [torch.float32], Case(torch.float32, None))


def _part(child: Any, rows: torch.Tensor, columns: torch.Tensor, device: torch.device) -> _Dense | None:
    weight, bias = getattr(child, "weight", None), getattr(child, "bias", None)
    inputs, outputs = _size(child) or (0, 0)
    if not isinstance(weight, torch.Tensor) or weight.dtype not in TOLERANCE or weight.is_meta:
        return None
    if tuple(weight.shape) != (outputs, inputs):
        return None
    with torch.no_grad():  # copies: an alias of a managed weight would bind it to its place
        rows, columns = rows.to(weight.device), columns.to(weight.device)
        matrix = weight.index_select(0, rows).index_select(1, columns).to(device, torch.float32)
        return _Dense(matrix, None if bias is None else bias.index_select(0, rows).to(device, torch.float32))


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
