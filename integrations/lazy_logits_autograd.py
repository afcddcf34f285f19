"""The autograd Functions of lazy logits: the head itself, and the losses that connect to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from slideformer_backend.integrations.lazy_logits_chain import Chain
from slideformer_backend.integrations.lazy_logits_tensor import LazyGradient, LazyLogits, Node, Payload, Source
from slideformer_backend.kernels.chunked_loss import (
    HeadTensors,
    Upstream,
    keeps_graph,
    summed_loss,
    token_gradients,
    token_losses,
)
from slideformer_backend.kernels.loss import LossOptions

__all__ = ["fused_sum", "fused_tokens", "lazy_logits"]


class _Head(torch.autograd.Function):
    """Logits from hidden states, weight and bias; they are computed if and when somebody looks."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, source: Source
    ) -> LazyLogits:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.source = source
        shape_of = torch.empty(*hidden.shape[:-1], weight.shape[0], dtype=source.dtype, device="meta")
        return LazyLogits(Node(source, shape_of))

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        source: Source = ctx.source
        if isinstance(upstream, LazyGradient) and upstream.computed is None and upstream.payload.source is source:
            return (*upstream.payload.gradients, None)
        if isinstance(upstream, (LazyGradient, LazyLogits)):
            upstream = upstream.materialize()
        # as the plain linear layer: products in its dtype, results in that of the inputs
        with torch._C.DisableTorchFunctionSubclass(), torch.autocast(hidden.device.type, enabled=False):
            flat = upstream.reshape(-1, upstream.shape[-1])
            found: list[torch.Tensor | None] = [None, None, None]
            if ctx.needs_input_grad[0]:
                found[0] = (flat @ weight.to(source.dtype)).view(hidden.shape).to(hidden.dtype)
            if ctx.needs_input_grad[1]:
                rows = hidden.to(source.dtype).reshape(-1, hidden.shape[-1])
                found[1] = (flat.t() @ rows).to(weight.dtype)
            if ctx.needs_input_grad[2]:
                found[2] = flat.sum(0).to(bias.dtype)
        return (*found, None)


class _FusedSum(torch.autograd.Function):
    """A summed or mean loss over a chain; gradients are made in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        start: LazyLogits,
        chain: Chain,
        targets: torch.Tensor,
        options: LossOptions,
        divisor: torch.Tensor | None,
        plain: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        source = chain.source
        source.check()
        source.settle()
        wanted = source.wanted if chain.has_gradient else (False, False, False)
        head, rows, leaf = chain.head(with_graph=wanted[0] and bool(chain.rows))
        with _product_dtype(source):
            made = summed_loss(head, targets, options, wanted, divisor=divisor)
        ctx.sum = made._replace(gradients=chain.to_start(made.gradients, rows, leaf))
        ctx.chain, ctx.plain = chain, plain
        return made.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:
        chain: Chain = ctx.chain
        chain.source.check()
        if ctx.sum is None:
            raise RuntimeError("Trying to backward through the graph a second time (a fused loss): retain_graph=True")
        may_reuse = not keeps_graph()
        gradients = ctx.sum.times(upstream, may_reuse=may_reuse)
        if may_reuse:
            ctx.sum = None
        plain = ctx.plain
        payload = Payload(chain.source, gradients, lambda: chain.gradient(plain, upstream))
        return (LazyGradient(chain.start.node.shape_of, payload), None, None, None, None, None)


class _FusedTokens(torch.autograd.Function):
    """Loss and logsumexp of every row of a chain; backward makes the logits again, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        start: LazyLogits,
        chain: Chain,
        targets: torch.Tensor,
        options: LossOptions,
        plain: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        source = chain.source
        source.check()
        source.settle()
        head, _, _ = chain.head(with_graph=False)
        with _product_dtype(source):
            loss, lse = token_losses(head, targets, options)
        ctx.save_for_backward(targets, lse)
        ctx.chain, ctx.options, ctx.plain = chain, options, plain
        ctx.set_materialize_grads(False)
        return loss, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: torch.Tensor | None, of_lse: torch.Tensor | None) -> tuple[Any, ...]:
        chain: Chain = ctx.chain
        source = chain.source
        source.check()
        targets, lse = ctx.saved_tensors
        head, rows, leaf = chain.head(with_graph=source.wanted[0] and bool(chain.rows))
        upstream = Upstream(of_loss, of_lse, lse)
        found = token_gradients(head, targets, ctx.options, upstream, source.wanted, dtype=source.dtype)
        plain = ctx.plain

        def recompute() -> torch.Tensor:
            def weighted(logits: torch.Tensor) -> torch.Tensor:
                pairs = zip(plain(logits), (of_loss, of_lse), strict=True)
                return torch.stack([(value * given).sum() for value, given in pairs if given is not None]).sum()

            return chain.gradient(weighted, torch.ones((), device=targets.device))

        payload = Payload(source, chain.to_start(found, rows, leaf), recompute)
        return (LazyGradient(chain.start.node.shape_of, payload), None, None, None, None)


_apply_head: Callable[..., Any] = _Head.apply  # torch leaves them untyped
_apply_sum: Callable[..., Any] = _FusedSum.apply
_apply_tokens: Callable[..., Any] = _FusedTokens.apply


def lazy_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    settle: Callable[[], None] = lambda: None,
    is_stale: Callable[[], bool] = lambda: False,
) -> torch.Tensor:
    """``F.linear(hidden, weight, bias)``, computed if and when somebody looks; see :class:`Source` for the rest."""
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    tensors = (hidden, weight, bias)
    wanted = tuple(tensor is not None and tensor.requires_grad for tensor in tensors)
    with torch._C.DisableTorchFunctionSubclass():
        source = Source(HeadTensors(hidden.detach(), weight, bias), dtype, wanted, settle, is_stale)  # type: ignore[arg-type]  # three of them
        made: torch.Tensor = _apply_head(hidden, weight, bias, source)
    return made


def fused_sum(
    chain: Chain,
    targets: torch.Tensor,
    options: LossOptions,
    divisor: torch.Tensor | None,
    plain: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The sum of the losses of a chain's rows over ``divisor``; ``plain`` is the same loss from logits, in torch."""
    with torch.set_grad_enabled(chain.has_gradient):
        loss: torch.Tensor = _apply_sum(chain.start, chain, targets, options, divisor, plain)
    return loss


def fused_tokens(
    chain: Chain,
    targets: torch.Tensor,
    options: LossOptions,
    plain: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and logsumexp of each of a chain's rows; ``plain`` is the same from logits, in torch."""
    with torch.set_grad_enabled(chain.has_gradient):
        loss, lse = _apply_tokens(chain.start, chain, targets, options, plain)
    return loss, lse


def _product_dtype(source: Source) -> torch.autocast:
    """The products of a fused loss have the dtype that the logits would have had."""
    is_cast = source.dtype != source.head.hidden.dtype or source.dtype != source.head.weight.dtype
    return torch.autocast(source.head.hidden.device.type, dtype=source.dtype if is_cast else None, enabled=is_cast)
