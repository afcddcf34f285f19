"""Compile each kernel once for exactly one signature, and check what is handed to it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import FrameType
from typing import Any, TypeAlias

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from slideformer_backend.errors import StateError
from slideformer_backend.optim.numba_bits import KERNEL, STORAGE, Numba

Kernel: TypeAlias = Callable[..., Any]
Array: TypeAlias = NDArray[Any]
Built: TypeAlias = tuple[Callable[..., Any], Numba]
"""A Python function and its numba signature."""

FP32 = types.Array(types.float32, 1, "C")
U16 = types.Array(types.uint16, 1, "C")
FP64 = types.Array(types.float64, 1, "C")
_DTYPES = {"fp32": np.dtype(np.float32)}
_BITS = np.dtype(np.uint16)


def array_type(kind: str) -> Numba:
    """numba type of a contiguous 1-D array of a weight or gradient kind."""
    return types.Array(STORAGE[kind].item, 1, "C")


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until the end: raised inside a callback of the compiler, it would be printed and forgotten."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if caught:
        handler(*caught[0])


class KernelCache:
    """Compiled kernels by name and kinds. Each is compiled once, even when several workers ask for it at once."""

    def __init__(self, builders: Mapping[str, Callable[..., Built]]) -> None:
        """``builders[name](*details)`` returns a Python function and its numba signature."""
        self._builders = builders
        self._kernels: dict[tuple[Hashable, ...], Kernel] = {}
        self._lock = threading.Lock()

    def __call__(self, name: str, *details: Hashable) -> Kernel:
        """The kernel, compiled now if need be (0.1 to 0.5 s)."""
        key = (name, *details)
        kernel = self._kernels.get(key)
        if kernel is None:
            with self._lock:
                kernel = self._kernels.get(key)
                if kernel is None:
                    with _interrupts_held():
                        function, signature = self._builders[name](*details)
                        kernel = self._kernels[key] = njit(signature, **KERNEL)(function)
        return kernel

    def __len__(self) -> int:
        return len(self._kernels)


def check(array: Array, kind: str, size: int, name: str) -> None:
    """Raise StateError unless ``array`` is a 1-D contiguous array of ``size`` elements stored as ``kind``."""
    dtype = _DTYPES.get(kind, _BITS)
    if array.dtype != dtype or array.shape != (size,) or not array.flags.c_contiguous:
        raise StateError(
            f"An optimizer kernel got an array '{name}' that does not fit.",
            found=f"{array.dtype} of shape {array.shape}, strides {array.strides}",
            expected=f"contiguous {dtype} of shape ({size},)",
        )


def check_fp32(size: int, arrays: tuple[Array, ...]) -> None:
    """Raise StateError unless every array is a contiguous float32 array of ``size`` elements."""
    for array in arrays:
        check(array, "fp32", size, "master or state")
