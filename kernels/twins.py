"""The kernels in plain torch: the same arguments and results, on any device. They are what the kernels must equal."""

from __future__ import annotations

import torch

from slideformer_backend.kernels.loss import ChunkResult, LossOptions


def softmax_gradient_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    vocabulary: int,
    options: LossOptions,
    *,
    gradient_scale: float | None = None,
    upstream: torch.Tensor | None = None,
    upstream_of_lse: torch.Tensor | None = None,
    known_lse: torch.Tensor | None = None,
    with_statistics: bool = False,
) -> ChunkResult:
    """See :func:`slideformer_backend.kernels.softmax_gradient.softmax_gradient_`."""
    z = logits[:, :vocabulary].float() * options.scale
    if options.softcap:
        z = options.softcap * torch.tanh(z / options.softcap)
    is_counted = targets != options.ignore_index
    is_valid = (targets >= 0) & (targets < vocabulary)
    at = targets.clamp(0, max(vocabulary - 1, 0))[:, None]
    ones = z.new_ones(vocabulary)
    weight = ones if options.class_weight is None else options.class_weight
    target_weight = weight[at[:, 0]]
    weight_sum = weight.sum()
    lse = torch.logsumexp(z, -1) if known_lse is None else known_lse
    share = options.smoothing / vocabulary
    nothing = z.new_zeros(())
    loss = z.new_empty(0)
    entropy = is_top = None
    at_target = z.gather(1, at)[:, 0].masked_fill(~is_valid, torch.nan)
    if known_lse is None:
        loss = (1 - options.smoothing) * target_weight * (lse - at_target) + options.z_loss * lse**2
        if options.smoothing:
            loss = loss + share * (weight_sum * lse - (z * weight).sum(-1))
        loss = torch.where(is_counted, loss, nothing)
    probabilities = torch.exp(z - lse[:, None])
    if with_statistics:
        mean = torch.where(probabilities > 0, probabilities * z, nothing).sum(-1)
        entropy = torch.where(is_counted, lse - mean, nothing)
        is_top = (is_counted & (at_target >= z.amax(-1))).float()
    if gradient_scale is not None:
        factor = torch.full_like(lse, gradient_scale) * (1.0 if upstream is None else upstream)
        on_target = (1 - options.smoothing) * target_weight * factor
        of_softmax = on_target + share * factor * weight_sum + 2 * options.z_loss * lse * factor
        if upstream_of_lse is not None:
            of_softmax = of_softmax + gradient_scale * upstream_of_lse
        gradient = probabilities * of_softmax.masked_fill(~is_valid, torch.nan)[:, None]
        gradient.scatter_add_(1, at, -on_target[:, None])
        gradient -= (share * factor)[:, None] * weight
        if options.softcap:
            gradient *= 1 - (z / options.softcap) ** 2
        gradient *= options.scale
        logits[:, :vocabulary] = torch.where(is_counted[:, None], gradient, nothing).to(logits.dtype)
        logits[:, vocabulary:] = 0
    if known_lse is None:
        lse = torch.where(is_counted, lse, nothing)
    return ChunkResult(loss, lse, entropy, is_top)


def scaled_cast(source: torch.Tensor, factor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """See :func:`slideformer_backend.kernels.scaled_cast.scaled_cast`."""
    return target.copy_(source.float() * factor.float())


def column_sum(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See :func:`slideformer_backend.kernels.column_sum.column_sum`."""
    return source.sum(0).to(dtype)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, offset: float = 0.0
) -> torch.Tensor:
    """See :func:`slideformer_backend.kernels.rms_norm.rms_norm`."""
    wide = _wide(x)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (_wide(weight) + offset)
    return y.to(x.dtype)


def rms_norm_add(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`slideformer_backend.kernels.rms_norm.rms_norm_add`."""
    stream = x + residual
    return rms_norm(stream, weight, eps, offset), stream


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See :func:`slideformer_backend.kernels.gated.swiglu`."""
    return (torch.nn.functional.silu(_wide(gate)) * _wide(up)).to(gate.dtype)


def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """See :func:`slideformer_backend.kernels.gated.geglu`."""
    return (torch.nn.functional.gelu(_wide(gate), approximate=approximate) * _wide(up)).to(gate.dtype)


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`slideformer_backend.kernels.rotary.rotary`."""
    half = cos.shape[-1] // 2
    c, s = (_wide(tensor)[..., :half].unsqueeze(1) for tensor in (cos, sin))
    return _rotate(q, c, s, interleaved), _rotate(k, c, s, interleaved)


def _rotate(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor, interleaved: bool) -> torch.Tensor:
    width = 2 * c.shape[-1]
    turned, rest = _wide(x[..., :width]), x[..., width:]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    parts = (first * c - second * s, second * c + first * s)
    turned = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()
