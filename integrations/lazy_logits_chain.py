"""How a lazy tensor came from the logits, and what a fused loss needs to know of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from slideformer_backend.integrations.lazy_logits_tensor import ROWS, LazyLogits, Source, Step, aten
from slideformer_backend.kernels.chunked_loss import Gradients, HeadTensors
from slideformer_backend.kernels.loss import LossOptions

__all__ = ["Chain", "chain_of"]

_OUTSIDE = (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())


@dataclass(eq=False)
class Chain:
    """How a lazy tensor came from the logits.

    Args:
        start: the tensor whose gradient a fused loss gives: the logits, or a detached leaf of the same rows.
        end: the tensor that the loss reads.
        rows: operations on rows between the two.
        options: scale and softcap of the values.
        is_log: whether ``end`` holds log-probabilities.
        sign: -1 where those are negated.
        has_gradient: whether a loss of it needs gradients.
    """

    start: LazyLogits
    end: LazyLogits
    rows: list[Step]
    options: LossOptions
    is_log: bool
    sign: float
    has_gradient: bool

    @property
    def source(self) -> Source:
        return self.start.node.source

    def hidden_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """The rows of ``hidden`` that the rows of ``end`` belong to, [rows, H]; differentiable."""
        for func, args, kwargs in self.rows:
            if func in (aten.view.default, aten._unsafe_view.default):
                hidden = hidden.reshape(*args[0][:-1], hidden.shape[-1])
            else:
                hidden = func(hidden, *args, **kwargs)
        return hidden.reshape(-1, hidden.shape[-1])

    def head(self, *, with_graph: bool) -> tuple[HeadTensors, torch.Tensor, torch.Tensor]:
        """The head on the rows of ``end``; these rows, and the hidden states that they were taken from."""
        hidden, weight, bias = self.source.head
        with torch.set_grad_enabled(with_graph):
            leaf = hidden.detach().requires_grad_(with_graph)
            rows = self.hidden_rows(leaf)
        return HeadTensors(rows.detach(), weight, bias), rows, leaf

    def to_start(self, gradients: Gradients, rows: torch.Tensor, leaf: torch.Tensor) -> Gradients:
        """Gradients for the head on all rows, from those on the rows of ``end``."""
        of_rows, *others = gradients
        if of_rows is None:
            return gradients
        if not rows.requires_grad:
            return (of_rows.view(leaf.shape), *others)  # type: ignore[return-value]  # two others
        (of_hidden,) = torch.autograd.grad(rows, leaf, of_rows)
        return (of_hidden, *others)  # type: ignore[return-value]  # two others

    def gradient(self, loss_of: Callable[[torch.Tensor], torch.Tensor], upstream: torch.Tensor) -> torch.Tensor:
        """The gradient of ``start`` as plain torch computes it from the logits."""
        # this may be asked for below autograd, from inside an operation
        with torch._C._ForceDispatchKeyGuard(*_OUTSIDE), torch.enable_grad():
            real = self.start.materialize().detach().requires_grad_()
            tensor = real
            path = self.end.path()
            for lazy in path[path.index(self.start) + 1 :]:
                func, args, kwargs = lazy.node.step  # type: ignore[misc]  # all but the first have one
                tensor = func(tensor, *args, **kwargs)
            return torch.autograd.grad(loss_of(tensor), real, upstream)[0]


def chain_of(end: object) -> Chain | None:
    """The chain that led to ``end``; None where a fused loss would not be what the plain one is."""
    if not isinstance(end, LazyLogits):
        return None
    path = end.path()
    if any(lazy.node.real is not None for lazy in path):
        return None
    first = len(path) - 1
    has_gradient = torch.is_grad_enabled() and end.requires_grad
    if has_gradient:
        while first > 0 and not path[first].is_leaf:
            first -= 1
        if any(lazy._backward_hooks or lazy.retains_grad for lazy in path[first + 1 :]):
            return None
    else:
        first = 0
    before, after = _steps(path[: first + 1]), _steps(path[first + 1 :])
    if any(step.func in ROWS for step in before):
        return None
    values = _values([*before, *after])
    if values is None:
        return None
    return Chain(path[first], end, [step for step in after if step.func in ROWS], *values, has_gradient)


def _steps(path: list[LazyLogits]) -> list[Step]:
    return [lazy.node.step for lazy in path if lazy.node.step is not None]


def _values(steps: list[Step]) -> tuple[LossOptions, bool, float] | None:
    """Scale, softcap, log-softmax and sign of recorded value operations; None for orders that no loss here has."""
    inner, outer, is_bounded, is_log, sign = 1.0, 1.0, False, False, 1.0
    for func, args, _ in steps:
        if func in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
            factor = float(args[0]) if func in (aten.mul.Tensor, aten.mul.Scalar) else 1.0 / float(args[0])
            if is_log or factor == 0.0:
                return None
            if is_bounded:
                outer *= factor
            else:
                inner *= factor
        elif func is aten.tanh.default:
            if is_bounded or is_log:
                return None
            is_bounded = True
        elif func is aten._log_softmax.default:
            if is_log:
                return None
            is_log = True
        elif func is aten.neg.default:
            if not is_log:
                return None
            sign = -sign
    if not is_bounded:
        return LossOptions(scale=inner), is_log, sign
    return LossOptions(scale=inner * outer, softcap=outer), is_log, sign
