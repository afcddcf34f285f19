"""target = source · factor, with a factor on the device and a cast, in one pass over memory."""

from __future__ import annotations

import torch

from slideformer_backend.kernels import twins
from slideformer_backend.kernels.runtime import on_device_of, runs_triton, tl, triton

__all__ = ["scaled_cast"]

_BLOCK = 4096


@triton.jit
def scaled_cast_kernel(
    source_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    target_ptr: tl.tensor,
    count: tl.tensor,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per BLOCK elements; in place, a factor of 1 touches none."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(factor_ptr).to(tl.float32)
    if IN_PLACE:
        count = tl.where(factor == 1.0, 0, count)
    inside = offsets < count
    value = tl.load(source_ptr + offsets, mask=inside, other=0.0).to(tl.float32) * factor
    tl.store(target_ptr + offsets, value.to(target_ptr.dtype.element_ty), mask=inside)


def scaled_cast(source: torch.Tensor, factor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Write ``source * factor``, computed in fp32, into ``target`` (which may be ``source``); returns ``target``.

    Args:
        source: contiguous, any floating dtype.
        factor: one element on the same device; it is not read on the host.
        target: contiguous, of the same shape.
    """
    if not runs_triton(source) or source.numel() == 0:
        return twins.scaled_cast(source, factor, target)
    with on_device_of(source):
        grid = (triton.cdiv(source.numel(), _BLOCK),)
        in_place = source.data_ptr() == target.data_ptr()
        scaled_cast_kernel[grid](source, factor, target, source.numel(), IN_PLACE=in_place, BLOCK=_BLOCK, num_warps=8)
    return target
