"""The functions of torch that lazy logits answer without being computed: losses and log-probabilities of classes."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from slideformer_backend.integrations.lazy_logits_autograd import fused_sum, fused_tokens
from slideformer_backend.integrations.lazy_logits_chain import Chain, chain_of
from slideformer_backend.integrations.lazy_logits_tensor import FUSED
from slideformer_backend.kernels.linear_cross_entropy import target_weight


def _cross_entropy(
    input: Any,
    target: Any,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``F.cross_entropy``."""
    chain = chain_of(input)
    is_plain = size_average is None and reduce is None and reduction in ("mean", "sum", "none")
    if chain is None or chain.is_log or not is_plain or not _are_classes(target, input.shape[:-1]) or input.dim() != 2:
        return NotImplemented
    if weight is not None and weight.requires_grad:
        return NotImplemented
    options = chain.options._replace(
        ignore_index=ignore_index,
        smoothing=label_smoothing,
        class_weight=None if weight is None else weight.detach().float().contiguous(),
    )

    def plain(logits: torch.Tensor, reduction: str = reduction) -> torch.Tensor:
        return F.cross_entropy(
            logits, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )

    targets = target.to(torch.int64).contiguous()
    if reduction == "none":
        loss, _ = fused_tokens(chain, targets, options, lambda logits: (plain(logits), logits.logsumexp(-1)))
        return loss.to(input.dtype)
    if reduction == "sum":
        return fused_sum(chain, targets, options, None, plain).to(input.dtype)
    count = target_weight(targets, options)
    divisor = torch.where(count > 0, count, torch.ones_like(count))
    loss = fused_sum(chain, targets, options, divisor, plain)
    # as in torch, the mean of nothing is NaN; its gradient is zero
    return torch.where(count > 0, loss, torch.full_like(loss, torch.nan)).to(input.dtype)


def _gather(input: Any, dim: int, index: torch.Tensor, *, sparse_grad: bool = False) -> Any:
    """``gather`` of one class per row from log-probabilities or logits."""
    chain = chain_of(input)
    if chain is None or sparse_grad or dim % input.dim() != input.dim() - 1:
        return NotImplemented
    if index.shape[-1:] != (1,) or not _are_classes(index[..., 0], input.shape[:-1]):
        return NotImplemented
    loss, lse = _tokens(chain, index.reshape(-1))
    found = -chain.sign * loss if chain.is_log else lse - loss
    return found.view(index.shape).to(input.dtype)


def _logsumexp(input: Any, dim: Any, keepdim: bool = False) -> Any:
    """``logsumexp`` over classes."""
    chain = chain_of(input)
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    if chain is None or chain.is_log or len(dims) != 1 or dims[0] % input.dim() != input.dim() - 1:
        return NotImplemented
    rows = torch.zeros(input.shape[:-1].numel(), dtype=torch.int64, device=input.device)
    lse = _tokens(chain, rows)[1].view(input.shape[:-1]).to(input.dtype)
    return lse.unsqueeze(-1) if keepdim else lse


def _sum(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """``sum`` of log-probabilities over classes: the uniform part of label smoothing."""
    chain = chain_of(input)
    dims = (dim,) if isinstance(dim, int) else tuple(dim or ())
    if chain is None or not chain.is_log or len(dims) != 1 or dims[0] % input.dim() != input.dim() - 1:
        return NotImplemented
    rows = torch.zeros(input.shape[:-1].numel(), dtype=torch.int64, device=input.device)
    loss, _ = _tokens(chain, rows, smoothing=1.0)
    found = (-chain.sign * input.shape[-1] * loss).view(input.shape[:-1]).to(dtype or input.dtype)
    return found.unsqueeze(-1) if keepdim else found


def _unbind(input: Any, dim: int = 0) -> Any:
    """``unbind``, also by iteration, into rows that are lazy themselves."""
    if chain_of(input) is None or not -input.dim() <= dim < input.dim() or dim % input.dim() == input.dim() - 1:
        return NotImplemented
    return tuple(input.select(dim, number) for number in range(input.shape[dim]))


def _tokens(chain: Chain, targets: torch.Tensor, smoothing: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and logsumexp of every row; no target is ignored."""
    options = chain.options._replace(ignore_index=-(2**31), smoothing=smoothing)
    targets = targets.to(torch.int64).contiguous()

    def plain(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = chain.sign * logits.float().reshape(-1, logits.shape[-1])
        loss = F.cross_entropy(wide, targets, reduction="none", label_smoothing=smoothing)
        return loss, torch.logsumexp(wide, -1)

    return fused_tokens(chain, targets, options, plain)


def _are_classes(target: object, shape: torch.Size) -> bool:
    if not isinstance(target, torch.Tensor) or target.shape != shape:
        return False
    return not target.is_floating_point() and target.dtype != torch.bool


FUSED.update(
    {
        F.cross_entropy: _cross_entropy,
        torch.gather: _gather,
        torch.Tensor.gather: _gather,
        torch.logsumexp: _logsumexp,
        torch.Tensor.logsumexp: _logsumexp,
        torch.unbind: _unbind,
        torch.Tensor.unbind: _unbind,
        torch.sum: _sum,
        torch.Tensor.sum: _sum,
    }
)
