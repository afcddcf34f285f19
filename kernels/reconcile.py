"""A working weight that is not what its fp32 master rounds to was written by hand: it becomes the master."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slideformer_backend.kernels.fused_update import tl_rounded

BLOCK = 4096


@triton.jit
def _reconcile_kernel(p_ptr, w_ptr, n, HALF_UP: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    p = tl.load(p_ptr + offset, mask=mask, other=0.0)
    rounded = tl_rounded(p, w_ptr.dtype.element_ty, HALF_UP).to(tl.float32)
    written = tl.load(w_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    differs = rounded.to(tl.int32, bitcast=True) != written.to(tl.int32, bitcast=True)
    differs = differs & ((rounded == rounded) | (written == written))
    tl.store(p_ptr + offset, written, mask=mask & differs)


def reconcile(master: torch.Tensor, weights: torch.Tensor, *, half_up: bool = False) -> None:
    """Set ``master`` to ``weights`` where it does not round to them, bit for bit; two NaNs count as the same.

    Args:
        master: fp32, 1-D, contiguous, n elements; changed in place.
        weights: n elements of fp32, bf16 or fp16.
        half_up: bf16 weights are rounded half away from zero, as the high half of a split master is.
    """
    n = master.numel()
    if n:
        is_half_up = half_up and weights.dtype == torch.bfloat16
        _reconcile_kernel[(triton.cdiv(n, BLOCK),)](master, weights, n, HALF_UP=is_half_up, BLOCK=BLOCK, num_warps=8)
