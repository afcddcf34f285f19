"""Loss of a head projection and softmax cross-entropy, and its gradients, without ever holding all logits.

Tokens go in chunks: the logits of a chunk are one matrix product, one kernel turns them into losses and their own
gradient in place, and two more products turn that into the gradients of hidden states and weight (as in Liger and Cut
Cross-Entropy, 2411.09009). The weight's gradient is summed over chunks in fp32. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from slideformer_backend.kernels.chunks import Projection, keeps_graph
from slideformer_backend.kernels.loss import LossOptions
from slideformer_backend.kernels.scaled_cast import scaled_cast
from slideformer_backend.kernels.softmax_gradient import softmax_gradient_

__all__ = ["TokenStatistics", "linear_cross_entropy", "linear_token_losses"]


class TokenStatistics(NamedTuple):
    """Per token, fp32 [tokens]: loss (differentiable), logsumexp, entropy, and whether the target is on top (0/1)."""

    loss: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor | None
    is_top: torch.Tensor | None


class _SummedLoss(torch.autograd.Function):
    """Sum of the losses of all tokens over ``divisor``. Gradients are made in forward, where the logits are at hand.

    The divisor is in the gradients of the logits, so that what is rounded to 16 bits is what plain torch rounds. fp16
    has no room for that: it is applied at the end, as a loss scale is.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        options: LossOptions,
        divisor: torch.Tensor | None,
        tokens: int | None,
        with_gradient: bool,
    ) -> torch.Tensor:
        wanted = tuple(ctx.needs_input_grad[:3]) if with_gradient else (False, False, False)
        projection = Projection(hidden, weight, bias, wanted)
        losses = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        factor = None if divisor is None else divisor.reciprocal()
        is_late = projection.dtype == torch.float16
        for begin, end in projection.ranges(tokens):
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
        # saved for torch's own checks: backward twice, and weights changed in between
        ctx.save_for_backward(hidden, weight)
        ctx.gradients = projection.gradients
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.factor = factor if is_late else None
        return losses.sum() if divisor is None else losses.sum() / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors
        may_reuse = not keeps_graph()
        if ctx.factor is not None:
            upstream = upstream * ctx.factor
        found: list[torch.Tensor | None] = []
        for gradient, dtype in zip(ctx.gradients, ctx.dtypes, strict=True):
            if gradient is None:
                found.append(None)
                continue
            target = gradient if may_reuse and gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
            found.append(scaled_cast(gradient, upstream, target))
        if may_reuse:
            ctx.gradients = None
        return (*found, None, None, None, None, None)


class _TokenLosses(torch.autograd.Function):
    """Loss of every token. The upstream gradient differs by token, so backward makes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        options: LossOptions,
        tokens: int | None,
        with_statistics: bool,
    ) -> tuple[torch.Tensor, ...]:
        projection = Projection(hidden, weight, bias, (False, False, False))
        count = len(targets)
        outputs = hidden.new_empty((4 if with_statistics else 2, count), dtype=torch.float32)
        for begin, end in projection.ranges(tokens):
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
        loss, *statistics = (row.clone() for row in outputs)
        ctx.save_for_backward(hidden, weight, bias, targets, statistics[0], options.class_weight)
        ctx.options, ctx.tokens, ctx.product = options, tokens, projection.dtype
        ctx.mark_non_differentiable(*statistics)
        return (loss, *statistics)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, lse, _class_weight = ctx.saved_tensors
        projection = Projection(
            hidden, weight, bias, tuple(ctx.needs_input_grad[:3]), dtype=ctx.product, is_scaled=False
        )
        upstream = upstream.float().contiguous()
        for begin, end in projection.ranges(ctx.tokens):
            logits = projection.logits(begin, end)
            softmax_gradient_(
                logits,
                targets[begin:end],
                projection.vocabulary,
                ctx.options,
                gradient_scale=1.0,
                upstream=upstream[begin:end],
                known_lse=lse[begin:end],
            )
            projection.take_gradient(logits, begin, end)
        given = (hidden, weight, bias)
        found = (
            None if gradient is None or tensor is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(projection.gradients, given, strict=True)
        )
        return (*found, None, None, None, None)


_apply_summed_loss: Callable[..., Any] = _SummedLoss.apply  # torch leaves them untyped
_apply_token_losses: Callable[..., Any] = _TokenLosses.apply


def linear_token_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    options: LossOptions | None = None,
    *,
    with_statistics: bool = False,
    tokens: int | None = None,
) -> TokenStatistics:
    """Loss of every token (its negated log-probability with the default options), and statistics from the same pass.

    Args:
        hidden: [..., H], bf16, fp16 or fp32.
        weight: [V, H]; bias: [V]. Under autocast they may have any dtype, else that of ``hidden``.
        targets: whole numbers of the shape of ``hidden`` without H.
        options: what the loss of a token is.
        with_statistics: whether to give entropy and whether the target is the most likely class.
        tokens: tokens per chunk; from free memory without.

    Returns:
        fp32 tensors of the shape of ``targets``; only the loss has gradients.
    """
    options = _checked(hidden, weight, targets, options)
    rows, flat = _flat(hidden, targets)
    found = _apply_token_losses(rows, weight, bias, flat, options, tokens, with_statistics)
    shaped = [tensor.view(targets.shape) for tensor in found]
    return TokenStatistics(shaped[0], shaped[1], *(shaped[2:] or (None, None)))


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    options: LossOptions | None = None,
    *,
    reduction: str = "mean",
    num_items: torch.Tensor | float | None = None,
    tokens: int | None = None,
) -> torch.Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias), targets)`` without holding the logits.

    Args:
        hidden: [..., H], bf16, fp16 or fp32.
        weight: [V, H]; bias: [V]. Under autocast they may have any dtype, else that of ``hidden``.
        targets: whole numbers of the shape of ``hidden`` without H.
        options: label smoothing, class weights, z-loss, logit scale and softcap, ``ignore_index``.
        reduction: ``mean`` (over the weights of the targets that count; 0 when none does), ``sum`` or ``none``.
        num_items: with ``sum`` or ``mean``, the sum is divided by this instead (Hugging Face's
            ``num_items_in_batch``); a tensor is not read on the host.
        tokens: tokens per chunk; from free memory without.

    Returns:
        fp32: a scalar, or with ``none`` a tensor of the shape of ``targets``.

    Raises:
        ValueError: shapes or dtypes do not fit, or an unknown reduction.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction: found {reduction!r}, expected mean, sum or none")
    if reduction == "none":
        return linear_token_losses(hidden, weight, targets, bias, options, tokens=tokens).loss
    options = _checked(hidden, weight, targets, options)
    rows, flat = _flat(hidden, targets)
    divisor: torch.Tensor | None = None
    if num_items is not None:
        divisor = torch.as_tensor(num_items, dtype=torch.float32, device=hidden.device)
    elif reduction == "mean":
        count = target_weight(flat, options)
        divisor = torch.where(count > 0, count, torch.ones_like(count))
    loss: torch.Tensor = _apply_summed_loss(rows, weight, bias, flat, options, divisor, tokens, torch.is_grad_enabled())
    return loss


def target_weight(targets: torch.Tensor, options: LossOptions) -> torch.Tensor:
    """What ``mean`` divides by, fp32 scalar: the number of targets that count, or the sum of their class weights."""
    is_counted = targets != options.ignore_index
    if options.class_weight is None:
        return is_counted.sum(dtype=torch.float32)
    classes = options.class_weight.shape[0]
    return (options.class_weight[targets.clamp(0, classes - 1)] * is_counted).sum()


def _flat(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1).to(torch.int64).contiguous()


def _checked(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, options: LossOptions | None
) -> LossOptions:
    options = options or LossOptions()
    if hidden.shape[:-1] != targets.shape or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"shapes do not fit: hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets "
            f"{tuple(targets.shape)}; expected [..., H], [V, H], [...]"
        )
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise ValueError(f"dtypes differ outside autocast: hidden {hidden.dtype}, weight {weight.dtype}")
    if options.class_weight is not None:
        options = options._replace(class_weight=options.class_weight.detach().float().contiguous())
    return options
