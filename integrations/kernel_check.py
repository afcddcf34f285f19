"""Whether a fused way to compute a layer gives what the layer's own code gives, forward and backward."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["TOLERANCE", "Case", "cases", "facts_of", "generator", "mismatch", "skeleton"]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""How much larger the relative error of a result (norm of the difference over norm) may be than that of the layer's own
code, by dtype. fp32: another order of operations. bf16, fp16: one unit roundoff."""

Way = Callable[..., Any]


class Case(NamedTuple):
    """What a layer may meet: the dtype of its input, and the dtype of autocast (None: off)."""

    dtype: torch.dtype
    autocast: torch.dtype | None

    @staticmethod
    def of(tensor: torch.Tensor) -> Case:
        """The case at hand."""
        kind = tensor.device.type
        return Case(tensor.dtype, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)


def cases(dtypes: Sequence[torch.dtype], autocast: torch.dtype | None) -> list[Case]:
    """All cases that a model under ``autocast`` (None: it never is) can have."""
    seen = dict.fromkeys((*dtypes, *(() if autocast is None else (autocast,))))
    return [Case(dtype, cast) for dtype in seen if dtype in TOLERANCE for cast in dict.fromkeys((None, autocast))]


def mismatch(own: Way, fused: Way, inputs: Sequence[torch.Tensor], dtypes: Sequence[Any], case: Case) -> str | None:
    """In what ``fused`` differs from ``own``; None when it reproduces it.

    First in fp32, where every difference in meaning shows, then as the model computes.

    Args:
        own, fused: from tensors to a tensor or a tuple of tensors.
        inputs: fp32 tensors; all get gradients.
        dtypes: of each input in the model.
        case: whether autocast is on.
    """
    rounded = [tensor.to(dtype).float() for tensor, dtype in zip(inputs, dtypes, strict=True)]
    try:
        truth = _run(own, rounded, None)
        problem = _compare(_run(fused, rounded, None), truth, truth)
        if problem is not None or (set(dtypes) == {torch.float32} and case.autocast is None):
            return problem
        cast = [tensor.to(dtype) for tensor, dtype in zip(inputs, dtypes, strict=True)]
        return _compare(_run(fused, cast, case.autocast), _run(own, cast, case.autocast), truth)
    except Exception as error:  # whatever a layer does with inputs that it does not expect: then it keeps its own code
        return f"{type(error).__name__}: {error}"


def _run(way: Way, inputs: Sequence[torch.Tensor], autocast: torch.dtype | None) -> list[torch.Tensor]:
    """Outputs and gradients."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    device = leaves[0].device
    with _undisturbed(device):
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            found = way(*leaves)
        outputs = list(found) if isinstance(found, tuple) else [found]
        source = generator()
        upstream = [torch.randn(output.shape, generator=source).to(output) for output in outputs]
        gradients = torch.autograd.grad(outputs, leaves, upstream)
    return [tensor.detach() for tensor in (*outputs, *gradients)]


def _compare(found: list[torch.Tensor], own: list[torch.Tensor], truth: list[torch.Tensor]) -> str | None:
    for mine, theirs, true in zip(found, own, truth, strict=True):
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            return f"gives {mine.dtype} {tuple(mine.shape)} in place of {theirs.dtype} {tuple(theirs.shape)}"
        allowed = _error(theirs, true) + TOLERANCE[mine.dtype]
        if not math.isfinite(allowed):  # everything would pass
            return f"the layer's own code overflows in {theirs.dtype}: nothing to compare with"
        error = _error(mine, true)
        if not error <= allowed:
            return f"relative error {error:.1e} in {mine.dtype}, at most {allowed:.1e} is allowed"
    return None


def _error(found: torch.Tensor, truth: torch.Tensor) -> float:
    difference, scale = (found.double() - truth.double()).norm(), truth.double().norm()
    return float(difference / scale.clamp(min=1e-30))


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """A check leaves no trace: not in random generators, and not in what the user's code around it records."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
        yield


def generator() -> torch.Generator:
    """A source of random inputs that is not the user's."""
    return torch.Generator().manual_seed(0)


def skeleton(module: nn.Module) -> Any:
    """A module of the same class and attributes whose parameters and children can be replaced; in training mode."""
    made = type(module).__new__(type(module))
    made.__dict__.update(module.__dict__)
    made.__dict__.pop("forward", None)
    for name in ("_parameters", "_buffers", "_modules"):
        made.__dict__[name] = dict(module.__dict__[name])
    made.training = True
    return made


def facts_of(module: nn.Module) -> tuple[Any, ...]:
    """What tells layers of different behaviour apart: class, attributes, shapes, children (and theirs).

    Attributes that are not plain (tensors, configurations) and buffers tell by identity: layers that do not share them
    are checked each on their own.
    """
    internal = nn.Module().__dict__
    own = {name: value for name, value in module.__dict__.items() if name not in internal and name != "layer_idx"}
    kept = tuple((name, _fact(value)) for name, value in own.items())
    tables = tuple((name, value.shape, value.dtype) for name, value in module._parameters.items() if value is not None)
    buffers = tuple((name, id(value)) for name, value in module._buffers.items())
    inner = []
    for name, child in module._modules.items():
        if child is None or next(child.parameters(), None) is None:
            inner.append((name, None if child is None else facts_of(child)))
        else:
            sizes = getattr(child, "in_features", None), getattr(child, "out_features", None)
            inner.append((name, (type(child), sizes)))
    return (type(module), kept, tables, buffers, tuple(inner))


def _fact(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, torch.dtype, type(None))) or hasattr(value, "__code__"):
        return value
    if isinstance(value, (tuple, list)):
        return (type(value), *map(_fact, value))
    return id(value)
