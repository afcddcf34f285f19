"""Which optimizers have a fused rule, and the scalars of one update."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from slideformer_backend.optim.arithmetic import Scalars, adam_scalars, lion_scalars, sgd_scalars

RuleName = Literal["adamw", "adam", "sgd", "lion"]
WeightKind = Literal["bf16", "fp16", "fp32"]
"""How weights are stored: uint16 bits, uint16 bits, float32 (torch: the dtype itself)."""
GradientKind = Literal["bf16", "fp16", "fp32", "bf16_as_fp32", "fp16_as_fp32"]
"""How a gradient is stored, and as what it counts: ``*_as_fp32`` is kept in 16 bits but is the gradient of an fp32
parameter (fp32 model under autocast), so that a clip coefficient rounds to fp32."""


class Pending(NamedTuple):
    """A gradient whose update is not in the states yet."""

    g: Any
    """1-D contiguous array (or tensor, for the twins) of ``g_kind``."""
    g_kind: GradientKind
    c: np.float32
    """Coefficient of the gradient; 1 for the gradient itself."""
    s: Scalars


@dataclass(frozen=True)
class Rule:
    """One update rule: its name, its states and its scalars."""

    name: RuleName
    state_names: tuple[str, ...]
    """The fp32 state arrays, named as torch's optimizer names them in ``state``, in the order kernels take them."""
    _scalars: Callable[[Mapping[str, Any], int], Scalars]

    def scalars(self, group: Mapping[str, Any], step: int) -> Scalars:
        """fp32 scalars of update number ``step`` (from 1) with the hyper-parameters of ``group``.

        For SGD, ``step`` must be 1 exactly when the parameter has no momentum buffer yet.
        """
        return self._scalars(group, step)

    def states_used(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The states that an update with ``group`` reads and writes: SGD without momentum has none."""
        if self.name == "sgd" and float(group["momentum"]) == 0.0:
            return ()
        return self.state_names


RULES: dict[RuleName, Rule] = {
    "adamw": Rule("adamw", ("exp_avg", "exp_avg_sq"), functools.partial(adam_scalars, decoupled=True)),
    "adam": Rule("adam", ("exp_avg", "exp_avg_sq"), functools.partial(adam_scalars, decoupled=False)),
    "sgd": Rule("sgd", ("momentum_buffer",), sgd_scalars),
    "lion": Rule("lion", ("exp_avg",), lion_scalars),
}


def rule_for(optimizer: Optimizer) -> Rule | None:
    """The rule that does what ``optimizer.step`` does to dense real parameters, or None if there is none.

    None means that the optimizer has to run as itself: another class, a subclass with a ``step`` of its own, an option
    without a fused form (amsgrad, capturable, differentiable, tensor betas), sparse or complex parameters, or param
    groups that need different rules. Only classes and param groups are looked at: ``step`` on the instance may have
    been replaced by a scheduler or by the engine itself.
    """
    family = _family(type(optimizer))
    if family is None or not all(_is_dense(p) for group in optimizer.param_groups for p in group["params"]):
        return None
    names = {_name(family, optimizer, group) for group in optimizer.param_groups}
    name = names.pop() if len(names) == 1 else None
    return None if name is None else RULES[name]


_Family = Literal["adam", "sgd", "lion"]
_LIONS = {("slideformer_backend.optim.lion", "Lion"), ("lion_pytorch.lion_pytorch", "Lion")}
"""Classes with Lion's plain arithmetic, by name: lion_pytorch need not be installed."""
_TORCH_WRAPPERS = {"torch.optim.optimizer", "torch.utils._contextlib", "torch._dynamo.eval_frame"}
"""Modules whose wrappers around a method leave its arithmetic alone."""


def _origin(cls: type) -> tuple[_Family, type] | None:
    """The family of a class and the base class that defines its arithmetic."""
    for base in cls.__mro__:
        if base is torch.optim.Adam:
            return "adam", base
        if base is torch.optim.SGD:
            return "sgd", base
        if (base.__module__, base.__qualname__) in _LIONS:
            return "lion", base
    return None


def _family(cls: type) -> _Family | None:
    """The family whose ``step`` the class runs unchanged, or None."""
    origin = _origin(cls)
    if origin is None:
        return None
    family, base = origin
    same = all(_bare(cls, name) is _bare(base, name) for name in ("step", "_init_group"))
    return family if same else None


def _bare(cls: type, name: str) -> object:
    """A method without the wrappers that torch puts around it (profiling, gradient mode); None if absent.

    torch wraps ``step`` of whichever class is instantiated first, so a subclass may own a wrapper of its base's method;
    a first use of torch.compile wraps ``_init_group`` of every class, twice where a class inherits it.
    Wrappers of anybody else stay: they may change what a step does.
    """
    method: Any = getattr(cls, name, None)
    while getattr(method, "__globals__", {}).get("__name__") in _TORCH_WRAPPERS and hasattr(method, "__wrapped__"):
        method = method.__wrapped__
    return method


def _name(family: _Family, optimizer: Optimizer, group: Mapping[str, Any]) -> RuleName | None:
    """The rule of one param group, or None."""
    if any(group.get(option) for option in ("amsgrad", "capturable", "differentiable")):
        return None
    if any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
        return None
    if not all(_is_number(group[key]) for key in ("lr", "weight_decay")):
        return None
    if family == "adam":
        return "adamw" if group.get("decoupled_weight_decay", False) else "adam"
    if family == "lion" and not _is_plain_lion(optimizer, group):
        return None
    return family


def _is_number(value: object) -> bool:
    return not isinstance(value, Tensor) or (value.numel() == 1 and not value.requires_grad)


def _is_plain_lion(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """lion_pytorch can divide the decay by the first lr, run a Triton kernel or mask the update: not the plain rule."""
    if getattr(optimizer, "decoupled_wd", False) or group.get("cautious_factor", 1.0) != 1.0:
        return False
    function = getattr(optimizer, "update_fn", None)
    return function is None or function.__module__ in {module for module, _ in _LIONS}


def _is_dense(p: Tensor) -> bool:
    return p.layout is torch.strided and p.dtype in (torch.float32, torch.bfloat16, torch.float16)
