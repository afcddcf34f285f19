"""Softmax cross-entropy of a chunk of logits: losses out, and the gradient written over the logits.

One program per row. It reads the row once for the statistics (online softmax) and once more for the gradient; with few
rows in flight the second read comes from the cache, so that device memory sees one read and one write.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from slideformer_backend.kernels import twins
from slideformer_backend.kernels.loss import ChunkResult, LossOptions
from slideformer_backend.kernels.runtime import on_device_of, runs_triton, tl, triton

__all__ = ["LaunchConfig", "launch_config", "padded_columns", "softmax_gradient_"]


class LaunchConfig(NamedTuple):
    """Columns per step, warps per program, and two ways to be faster that depend on the device.

    ``hints``: loads tell the cache what will be read again. ``ahead``: the next step is loaded before this one is used.
    """

    block: int
    warps: int
    hints: bool = True
    ahead: bool = True


@triton.jit
def tl_tanh(x: tl.tensor) -> tl.tensor:
    """tanh to fp32 accuracy, near 0 as well: a series there, because 1 - exp(-2x) cancels."""
    a = tl.abs(x)
    e = tl.exp(-2.0 * a)
    far = (1.0 - e) / (1.0 + e)
    far = tl.where(x < 0, -far, far)
    s = x * x
    near = x * (1.0 + s * (-1.0 / 3.0 + s * (2.0 / 15.0 + s * (-17.0 / 315.0 + s * (62.0 / 2835.0)))))
    return tl.where(a < 0.3, near, far)


@triton.jit
def tl_shape_logits(logits: tl.tensor, scale: tl.tensor, softcap: tl.tensor, HAS_SOFTCAP: tl.constexpr) -> tl.tensor:
    """z from the stored logits."""
    z = logits.to(tl.float32) * scale
    if HAS_SOFTCAP:
        z = softcap * tl_tanh(z / softcap)
    return z


@triton.jit
def softmax_gradient_kernel(
    logits_ptr: tl.tensor,
    target_ptr: tl.tensor,
    class_weight_ptr: tl.tensor,
    class_weight_sum_ptr: tl.tensor,
    upstream_ptr: tl.tensor,
    loss_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    entropy_ptr: tl.tensor,
    top_ptr: tl.tensor,
    row_stride: tl.tensor,
    upstream_stride: tl.tensor,
    vocabulary: tl.tensor,
    columns: tl.tensor,
    ignore_index: tl.tensor,
    smoothing: tl.tensor,
    z_loss: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    gradient_scale: tl.tensor,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_UPSTREAM: tl.constexpr,
    KNOWN_LSE: tl.constexpr,
    WITH_STATISTICS: tl.constexpr,
    WRITE_GRADIENT: tl.constexpr,
    HINTS: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Rows are ``row_stride`` apart; ``columns`` (a multiple of 64) may be read and written, ``vocabulary`` count."""
    first_read: tl.constexpr = "evict_last" if HINTS and WRITE_GRADIENT else ""
    last_read: tl.constexpr = "evict_first" if HINTS else ""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    offsets = tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row)
    if target == ignore_index:
        if not KNOWN_LSE:
            tl.store(loss_ptr + row, 0.0)
            tl.store(lse_ptr + row, 0.0)
        if WITH_STATISTICS:
            tl.store(entropy_ptr + row, 0.0)
            tl.store(top_ptr + row, 0.0)
        if WRITE_GRADIENT:
            zeros = tl.zeros([BLOCK], dtype=logits_ptr.dtype.element_ty)
            for start in range(0, columns, BLOCK):
                column = start + offsets
                tl.store(logits_ptr + column, zeros, mask=column < columns)
    else:
        is_valid = (target >= 0) & (target < vocabulary)
        target_weight = 1.0
        weight_sum = 1.0 * vocabulary
        if HAS_CLASS_WEIGHT:
            target_weight = tl.load(class_weight_ptr + target, mask=is_valid, other=0.0)
            weight_sum = tl.load(class_weight_sum_ptr)
        if KNOWN_LSE:
            lse = tl.load(lse_ptr + row)
        else:
            at_target = tl.load(logits_ptr + target, mask=is_valid, other=float("nan"))
            at_target = tl_shape_logits(at_target, scale, softcap, HAS_SOFTCAP)
            top = float("-inf")
            total = tl.zeros([BLOCK], dtype=tl.float32)
            weighted = tl.zeros([BLOCK], dtype=tl.float32)
            smooth = tl.zeros([BLOCK], dtype=tl.float32)
            loaded = tl.load(logits_ptr + offsets, mask=offsets < columns, other=0.0, eviction_policy=first_read)
            for start in range(0, columns, BLOCK):
                column = start + offsets
                following = column + BLOCK if AHEAD else column
                fetched = tl.load(
                    logits_ptr + following, mask=following < columns, other=0.0, eviction_policy=first_read
                )
                if not AHEAD:
                    loaded = fetched
                shaped = tl_shape_logits(loaded, scale, softcap, HAS_SOFTCAP)
                z = tl.where(column < vocabulary, shaped, float("-inf"))
                new_top = tl.maximum(top, tl.max(z, 0))
                # a row may start with masked classes (-inf): their weight is 0, not exp(-inf + inf)
                reference = tl.where(new_top == float("-inf"), 0.0, new_top)
                shrink = tl.exp(top - reference)
                e = tl.exp(z - reference)
                total = total * shrink + e
                if WITH_STATISTICS:
                    weighted = weighted * shrink + tl.where(e > 0, e * z, 0.0)
                if HAS_SMOOTHING:
                    w = 1.0
                    if HAS_CLASS_WEIGHT:
                        w = tl.load(class_weight_ptr + column, mask=column < vocabulary, other=0.0)
                    smooth += tl.where(column < vocabulary, w * shaped, 0.0)
                top = new_top
                if AHEAD:
                    loaded = fetched
            denominator = tl.sum(total, 0)
            lse = top + tl.log(denominator)
            loss = (1.0 - smoothing) * target_weight * (lse - at_target) + z_loss * lse * lse
            if HAS_SMOOTHING:
                loss += smoothing / vocabulary * (weight_sum * lse - tl.sum(smooth, 0))
            tl.store(loss_ptr + row, loss)
            tl.store(lse_ptr + row, lse)
            if WITH_STATISTICS:
                tl.store(entropy_ptr + row, lse - tl.sum(weighted, 0) / denominator)
                tl.store(top_ptr + row, tl.where(at_target >= top, 1.0, 0.0))
        if WRITE_GRADIENT:
            upstream = gradient_scale
            if HAS_UPSTREAM:
                upstream *= tl.load(upstream_ptr + row * upstream_stride)
            on_target = (1.0 - smoothing) * target_weight * upstream
            everywhere = smoothing / vocabulary * upstream
            of_softmax = on_target + everywhere * weight_sum + 2.0 * z_loss * lse * upstream
            of_softmax = tl.where(is_valid, of_softmax, float("nan"))
            loaded = tl.load(logits_ptr + offsets, mask=offsets < columns, other=0.0, eviction_policy=last_read)
            for start in range(0, columns, BLOCK):
                column = start + offsets
                following = column + BLOCK if AHEAD else column
                fetched = tl.load(
                    logits_ptr + following, mask=following < columns, other=0.0, eviction_policy=last_read
                )
                if not AHEAD:
                    loaded = fetched
                z = tl_shape_logits(loaded, scale, softcap, HAS_SOFTCAP)
                gradient = tl.exp(z - lse) * of_softmax
                gradient = tl.where(column == target, gradient - on_target, gradient)
                if HAS_SMOOTHING:
                    w = 1.0
                    if HAS_CLASS_WEIGHT:
                        w = tl.load(class_weight_ptr + column, mask=column < vocabulary, other=0.0)
                    gradient -= everywhere * w
                if HAS_SOFTCAP:
                    slope = z / softcap
                    gradient *= 1.0 - slope * slope
                gradient = tl.where(column < vocabulary, gradient * scale, 0.0)
                tl.store(
                    logits_ptr + column,
                    gradient.to(logits_ptr.dtype.element_ty),
                    mask=column < columns,
                    eviction_policy=last_read,
                )
                if AHEAD:
                    loaded = fetched


def padded_columns(vocabulary: int) -> int:
    """Columns of a row of logits in memory: a multiple of 64, so that every row starts on a 128-byte boundary."""
    return -(-vocabulary // 64) * 64


def launch_config(columns: int) -> LaunchConfig:
    """Measured on an H200 with 128,256 columns of bf16; few rows in flight let the second read hit the cache."""
    if columns >= 16384:
        return LaunchConfig(block=16384, warps=32)
    block = min(16384, max(128, triton.next_power_of_2(columns)))
    return LaunchConfig(block, warps=max(1, min(16, block // 256)))


def softmax_gradient_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    vocabulary: int,
    options: LossOptions,
    *,
    gradient_scale: float | None = None,
    upstream: torch.Tensor | None = None,
    known_lse: torch.Tensor | None = None,
    with_statistics: bool = False,
    config: LaunchConfig | None = None,
) -> ChunkResult:
    """Losses of a chunk of tokens; on request the gradient of their sum replaces the logits.

    Args:
        logits: [rows, columns], columns contiguous and at least ``vocabulary``; columns beyond it hold anything.
        targets: int64 [rows].
        vocabulary: number of classes V.
        options: the loss.
        gradient_scale: times this the gradient is written over ``logits`` (0 beyond V); None: logits stay.
        upstream: fp32 [rows] or scalar, gradient of each row's loss; 1 without.
        known_lse: fp32 [rows], ``lse`` of an earlier call for the same logits: saves a read; ``loss`` stays empty.
        with_statistics: whether to fill ``entropy`` and ``is_top``.
        config: launch parameters; measured defaults without.
    """
    if not runs_triton(logits):
        return twins.softmax_gradient_(
            logits,
            targets,
            vocabulary,
            options,
            gradient_scale=gradient_scale,
            upstream=upstream,
            known_lse=known_lse,
            with_statistics=with_statistics,
        )
    rows, columns = logits.shape
    loss = logits.new_empty(rows if known_lse is None else 0, dtype=torch.float32)
    lse = torch.empty(rows, dtype=torch.float32, device=logits.device) if known_lse is None else known_lse
    entropy, is_top = (torch.empty_like(lse), torch.empty_like(lse)) if with_statistics else (None, None)
    result = ChunkResult(loss, lse, entropy, is_top)
    if rows == 0:
        return result
    weight = options.class_weight
    config = config or launch_config(columns)
    with on_device_of(logits):
        softmax_gradient_kernel[(rows,)](
            logits,
            targets,
            weight if weight is not None else lse,
            weight.sum() if weight is not None else lse,
            upstream if upstream is not None else lse,
            loss,
            lse,
            entropy if entropy is not None else lse,
            is_top if is_top is not None else lse,
            logits.stride(0),
            1 if upstream is not None and upstream.dim() else 0,
            vocabulary,
            columns,
            options.ignore_index,
            options.smoothing,
            options.z_loss,
            options.scale,
            options.softcap,
            1.0 if gradient_scale is None else gradient_scale,
            HAS_CLASS_WEIGHT=weight is not None,
            HAS_SMOOTHING=options.smoothing != 0.0,
            HAS_SOFTCAP=options.softcap != 0.0,
            HAS_UPSTREAM=upstream is not None,
            KNOWN_LSE=known_lse is not None,
            WITH_STATISTICS=with_statistics,
            WRITE_GRADIENT=gradient_scale is not None,
            HINTS=config.hints,
            AHEAD=config.ahead,
            BLOCK=config.block,
            num_warps=config.warps,
        )
    return result
