"""Logits that are not computed until somebody looks, and gradients of logits that need not be either.

:class:`LazyLogits` has shape, dtype, strides and a ``grad_fn``, but no memory. Below autograd, operations that only
rearrange rows, cast, scale or bound give another one; every other operation computes the logits (``materialize``) and
goes on with them, so whatever a program does with logits it gets what the plain model gives. What the few fused losses
need is read off the chain of operations (``lazy_logits_loss``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map

from slideformer_backend.errors import StaleGraphError
from slideformer_backend.kernels.chunked_loss import Gradients, HeadTensors

aten = torch.ops.aten

ROWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.unsqueeze.default,
        aten.transpose.int,
        aten.index.Tensor,
    }
)
"""Operations that rearrange rows of logits, when they leave the last dimension alone."""

SAME = frozenset({aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default})
VALUES = frozenset(
    {
        aten.mul.Tensor,
        aten.mul.Scalar,
        aten.div.Tensor,
        aten.div.Scalar,
        aten.tanh.default,
        aten._log_softmax.default,
        aten.neg.default,
    }
)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(eq=False)
class Source:
    """What logits are made of.

    Args:
        head: hidden states (detached), weight and bias.
        dtype: of the product.
        wanted: which of hidden, weight, bias require a gradient.
        settle: called before the weight is read.
        is_stale: whether the weight was updated since.
    """

    head: HeadTensors
    dtype: torch.dtype
    wanted: tuple[bool, bool, bool]
    settle: Callable[[], None]
    is_stale: Callable[[], bool]

    def check(self) -> None:
        """Raises :class:`StaleGraphError` when the weights are no longer those of the forward."""
        if self.is_stale():
            raise StaleGraphError(
                "logits are read that were not needed before optimizer.step(): the head's weights have changed since,"
                " so they cannot be computed any more.",
                remedy="read them before the step, or set lazy_logits: false",
            )

    def compute(self) -> torch.Tensor:
        """The logits, as the plain head gives them."""
        self.check()
        self.settle()
        with torch._C.DisableTorchFunctionSubclass(), _plain(self.head.hidden):
            return F.linear(*(None if tensor is None else tensor.to(self.dtype) for tensor in self.head))  # type: ignore[arg-type]  # weight is there


class Step(NamedTuple):
    """One recorded operation on logits: ``func(parent, *args, **kwargs)``."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(eq=False)
class Node:
    """The record of one lazy tensor. ``shape_of``: a meta tensor of its geometry; ``real``: its values, if computed."""

    source: Source
    shape_of: torch.Tensor
    parent: LazyLogits | None = None
    step: Step | None = None
    real: torch.Tensor | None = None


class LazyLogits(torch.Tensor):
    """Logits of a head. See the module."""

    node: Node

    @staticmethod
    def __new__(cls: type, node: Node) -> LazyLogits:
        made: LazyLogits = _wrapper(cls, node.shape_of, node.source.head.hidden.device)
        made.node = node
        return made

    def materialize(self) -> torch.Tensor:
        """The values, without a graph, computed once; views of other lazy logits are views of their values."""
        node = self.node
        if node.real is None:
            with torch.no_grad():
                if node.parent is None or node.step is None:
                    node.real = node.source.compute()
                else:
                    func, args, kwargs = node.step
                    node.real = func(node.parent.materialize(), *args, **kwargs)
        return node.real

    def path(self) -> list[LazyLogits]:
        """From the logits as the head gave them to this tensor."""
        found = [self]
        while (parent := found[-1].node.parent) is not None:
            found.append(parent)
        return found[::-1]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return cast("torch.Tensor", memo.setdefault(id(self), self.materialize().detach().clone()))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if any(not issubclass(kind, (LazyLogits, LazyGradient)) and _watches(kind) for kind in types):
            return NotImplemented  # that class first; it comes back here below autograd
        kwargs = kwargs or {}
        fused = FUSED.get(func)
        if fused is not None:
            result = fused(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func in _HOST:
            args = tree_map(_without_lazy, args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch types it as an ordinary method
        kwargs = kwargs or {}
        derived = _derive(func, args, kwargs)
        return _on_values(func, args, kwargs) if derived is None else derived


@dataclass(eq=False)
class Payload:
    """Gradients of a head that were made without the gradient of its logits, and how to make that one after all."""

    source: Source
    gradients: Gradients
    recompute: Callable[[], torch.Tensor]


class LazyGradient(torch.Tensor):
    """The gradient of :class:`LazyLogits` as a fused loss returns it: its head takes what it holds, anybody else sees
    the full gradient."""

    payload: Payload
    computed: torch.Tensor | None

    @staticmethod
    def __new__(cls: type, shape_of: torch.Tensor, payload: Payload) -> LazyGradient:
        made: LazyGradient = _wrapper(cls, shape_of, payload.source.head.hidden.device)
        made.payload = payload
        made.computed = None
        return made

    def materialize(self) -> torch.Tensor:
        """The gradient of the logits, as plain torch computes it."""
        if self.computed is None:
            self.computed = self.payload.recompute()
        return self.computed

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch documents it

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch types it as an ordinary method
        first = args[0] if args else None
        if isinstance(first, LazyGradient) and first.computed is None:
            if func in (aten.detach.default, aten.alias.default):
                return LazyGradient(_geometry(first), first.payload)
            if func is aten.add.Tensor and len(args) == 2 and not kwargs:
                joined = _joined(first, args[1])
                if joined is not None:
                    return joined
        return _on_values(func, args, kwargs or {})


FUSED: dict[Any, Callable[..., Any]] = {}
"""Functions of torch that are answered without logits: each returns NotImplemented where it cannot."""

_HOST = frozenset(
    getattr(torch.Tensor, name)
    for name in ("numpy", "tolist", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__", "__repr__")
)


def _wrapper(cls: type, shape_of: torch.Tensor, device: torch.device) -> Any:
    return torch.Tensor._make_wrapper_subclass(
        cls,
        shape_of.shape,
        strides=shape_of.stride(),
        storage_offset=shape_of.storage_offset(),
        dtype=shape_of.dtype,
        device=device,
    )


def _geometry(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _watches(kind: type) -> bool:
    function = getattr(kind, "__torch_function__", None)
    return function not in (torch.Tensor.__torch_function__, torch._C._disabled_torch_function_impl)


def _derive(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> LazyLogits | None:
    """The lazy result of a recorded operation; None when it needs values."""
    if func not in ROWS and func not in SAME and func not in VALUES:
        return None
    lazy, *rest = args
    if not isinstance(lazy, LazyLogits) or lazy.node.real is not None:
        return None
    step = Step(func, tuple(rest), kwargs)
    shape_of = _result_geometry(lazy.node.shape_of, lazy.node.source.head.hidden.device, step)
    return None if shape_of is None else LazyLogits(Node(lazy.node.source, shape_of, lazy, step))


def _result_geometry(parent: torch.Tensor, device: torch.device, step: Step) -> torch.Tensor | None:
    func, args, kwargs = step
    if func is aten._to_copy.default:
        if kwargs.get("dtype", parent.dtype) not in _FLOATS or kwargs.get("device", device) != device:
            return None
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    elif func in VALUES:
        if any(isinstance(value, torch.Tensor) for value in args):
            return None
        if func is aten._log_softmax.default and args[0] % parent.dim() != parent.dim() - 1:
            return None
    elif func in ROWS and not _keeps_columns(parent, func, args):
        return None
    if func is aten.index.Tensor:
        rows = torch.empty(1, dtype=torch.bool, device=device).expand(*parent.shape[:-1], 1)
        shape = (*func(rows, *args).shape[:-1], parent.shape[-1])
        return torch.empty(shape, dtype=parent.dtype, device="meta")
    made: torch.Tensor = func(parent, *args, **kwargs)
    return None if func in ROWS and made.shape[-1:] != parent.shape[-1:] else made


def _keeps_columns(parent: torch.Tensor, func: Any, args: tuple[Any, ...]) -> bool:
    last = parent.dim() - 1
    if func in (aten.view.default, aten._unsafe_view.default):
        return len(args[0]) > 0
    if func is aten.index.Tensor:
        used = sum(1 if index is None or index.dtype != torch.bool else index.dim() for index in args[0])
        return used <= last
    if func is aten.unsqueeze.default:
        return bool(args[0] % (last + 2) != last + 1)
    dims = args[:2] if func is aten.transpose.int else args[:1] or (0,)
    return all(dim % (last + 1) != last for dim in dims)


def _on_values(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The operation on computed values; in-place operations give back the lazy tensor that they changed."""
    lazies = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, (LazyLogits, LazyGradient))]
    result = func(*tree_map(_without_lazy, args), **tree_map(_without_lazy, kwargs))
    for lazy in lazies:
        real = lazy.node.real if isinstance(lazy, LazyLogits) else lazy.computed
        if result is real:
            return lazy
    return result


def _without_lazy(item: Any) -> Any:
    return item.materialize() if isinstance(item, (LazyLogits, LazyGradient)) else item


def _joined(left: LazyGradient, right: Any) -> LazyGradient | None:
    """Sum of two lazy gradients of the same logits."""
    if not isinstance(right, LazyGradient) or right.computed is not None:
        return None
    if right.payload.source is not left.payload.source or right.shape != left.shape:
        return None
    pairs = zip(left.payload.gradients, right.payload.gradients, strict=True)
    hidden, weight, bias = (None if a is None or b is None else a + b for a, b in pairs)
    first, second = left.payload.recompute, right.payload.recompute
    payload = Payload(left.payload.source, (hidden, weight, bias), lambda: first() + second())
    return LazyGradient(_geometry(left), payload)


def _plain(tensor: torch.Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)
