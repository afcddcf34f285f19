"""Losses and gradients of a head, chunk by chunk, outside autograd: what the autograd Functions are made of."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slideformer_backend.kernels.chunks import Projection
from slideformer_backend.kernels.loss import LossOptions
from slideformer_backend.kernels.scaled_cast import scaled_cast
from slideformer_backend.kernels.softmax_gradient import softmax_gradient_

__all__ = [
    "Gradients",
    "HeadTensors",
    "SummedLoss",
    "Upstream",
    "keeps_graph",
    "summed_loss",
    "token_gradients",
    "token_losses",
]

Gradients = tuple["torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]
"""Of hidden, weight and bias; None where not wanted."""


class HeadTensors(NamedTuple):
    """hidden [tokens, H], weight [V, H] and bias [V]."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


class Upstream(NamedTuple):
    """Gradients that flow into losses and logsumexps (None: zero), and the logsumexps themselves; fp32 [tokens]."""

    of_loss: torch.Tensor | None
    of_lse: torch.Tensor | None
    lse: torch.Tensor


class SummedLoss(NamedTuple):
    """A loss (fp32 scalar) with its gradients, up to a late factor, and the dtypes that these must end in."""

    loss: torch.Tensor
    gradients: Gradients
    factor: torch.Tensor | None
    dtypes: tuple[torch.dtype | None, ...]

    def times(self, upstream: torch.Tensor, *, may_reuse: bool) -> Gradients:
        """The gradients times ``upstream`` (a scalar on the device), in their final dtypes.

        ``may_reuse``: results may take the place of the gradients here, which are of no use afterwards.
        """
        if self.factor is not None:
            upstream = upstream * self.factor
        hidden, weight, bias = (
            None if gradient is None or dtype is None else _scaled(gradient, upstream, dtype, may_reuse)
            for gradient, dtype in zip(self.gradients, self.dtypes, strict=True)
        )
        return hidden, weight, bias


def summed_loss(
    head: HeadTensors,
    targets: torch.Tensor,
    options: LossOptions,
    wanted: tuple[bool, ...],
    *,
    divisor: torch.Tensor | None = None,
    tokens: int | None = None,
) -> SummedLoss:
    """Sum of the losses of all tokens over ``divisor``, and the gradients that are ``wanted``.

    The divisor is in the gradients of the logits, so that what is rounded to 16 bits is what plain torch rounds. fp16
    has no room for that: there it is the late factor, as a loss scale is.
    """
    projection = Projection(*head, wanted, tokens=tokens)
    losses = torch.empty(len(targets), dtype=torch.float32, device=targets.device)
    factor = None if divisor is None else divisor.float().reciprocal()
    is_late = projection.dtype == torch.float16
    for begin, end in projection.ranges():
        logits = projection.logits(begin, end)
        result = softmax_gradient_(
            logits,
            targets[begin:end],
            projection.vocabulary,
            options,
            gradient_scale=projection.gradient_scale if any(wanted) else None,
            upstream=None if is_late else factor,
        )
        losses[begin:end] = result.loss
        projection.take_gradient(logits, begin, end)
    loss = losses.sum() if divisor is None else losses.sum() / divisor
    dtypes = tuple(None if tensor is None else tensor.dtype for tensor in head)
    return SummedLoss(loss, projection.gradients, factor if is_late else None, dtypes)


def token_losses(
    head: HeadTensors,
    targets: torch.Tensor,
    options: LossOptions,
    *,
    tokens: int | None = None,
    with_statistics: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Loss and logsumexp of every token, and with statistics entropy and whether the target is on top; fp32 each."""
    projection = Projection(*head, (False, False, False), tokens=tokens)
    count = len(targets)
    outputs = torch.empty(4 if with_statistics else 2, count, dtype=torch.float32, device=targets.device)
    for begin, end in projection.ranges():
        result = softmax_gradient_(
            projection.logits(begin, end),
            targets[begin:end],
            projection.vocabulary,
            options,
            with_statistics=with_statistics,
        )
        for row, value in zip(outputs, result, strict=False):
            if value is not None:
                row[begin:end] = value
    return tuple(row.clone() for row in outputs)


def token_gradients(
    head: HeadTensors,
    targets: torch.Tensor,
    options: LossOptions,
    upstream: Upstream,
    wanted: tuple[bool, ...],
    *,
    dtype: torch.dtype | None = None,
    tokens: int | None = None,
) -> Gradients:
    """Gradients of the losses and logsumexps of :func:`token_losses`; the logits are made again.

    ``dtype``: of the products in the forward.
    """
    projection = Projection(*head, wanted, dtype=dtype, is_scaled=False, tokens=tokens)
    of_loss = torch.zeros_like(upstream.lse) if upstream.of_loss is None else upstream.of_loss.float().contiguous()
    of_lse = None if upstream.of_lse is None else upstream.of_lse.float().contiguous()
    for begin, end in projection.ranges():
        logits = projection.logits(begin, end)
        softmax_gradient_(
            logits,
            targets[begin:end],
            projection.vocabulary,
            options,
            gradient_scale=1.0,
            upstream=of_loss[begin:end],
            upstream_of_lse=None if of_lse is None else of_lse[begin:end],
            known_lse=upstream.lse[begin:end],
        )
        projection.take_gradient(logits, begin, end)
    hidden, weight, bias = (
        None if gradient is None or tensor is None else gradient.to(tensor.dtype)
        for gradient, tensor in zip(projection.gradients, head, strict=True)
    )
    return hidden, weight, bias


def keeps_graph() -> bool:
    """Whether the running backward was asked to keep its graph, so that it may run again."""
    probe = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if probe is None else bool(probe())


def _scaled(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, may_reuse: bool) -> torch.Tensor:
    target = gradient if may_reuse and gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    return scaled_cast(gradient, factor, target)
