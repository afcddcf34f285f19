"""Triton where there is one, and whether a kernel can run on a tensor."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # other platforms: the kernel files must still import, their twins run
    HAS_TRITON = False

    class _Absent:
        """Stands for triton and its language while a kernel file is imported."""

        def __getattr__(self, name: str) -> Any:
            return _Absent()

        def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
            return function

    triton = _Absent()
    tl = _Absent()

__all__ = ["HAS_TRITON", "as_rows", "on_device_of", "processors", "runs_triton", "tl", "triton"]

_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether kernels can run on ``tensor``: a CUDA or ROCm device, or Triton's interpreter for a CPU tensor.

    The interpreter is on when ``TRITON_INTERPRET=1`` was set before this module was imported.
    """
    return HAS_TRITON and (tensor.device.type == "cuda" or (_INTERPRETED and tensor.device.type == "cpu"))


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device: make it the one of ``tensor``."""
    if tensor.device.type == "cuda" and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


def processors(tensor: torch.Tensor) -> int:
    """Multiprocessors of the device of ``tensor``; 2 for the interpreter, which runs programs one by one."""
    if tensor.device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Two-dimensional with contiguous columns; a copy where that takes one."""
    tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] <= 1 else tensor.contiguous()
