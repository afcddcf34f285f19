"""Checksums of blocks: two sums over 32-bit words, with the same value wherever they are computed.

For a block of n little-endian words w[0..n): plain = sum of w[i], weighted = sum of w[i] * (2i + 1), both modulo 2^64.
A block has at most 2^19 words, so neither sum of one or two changed words can wrap around: any change confined to two
words is found, and so are any two flipped bits; of other changes one in about 2^60 is missed. (A flipped bit b of word
i changes the weighted sum by 2^b (2i + 1); no other bit changes it by as much.) This is Fletcher's construction
(J. G. Fletcher, An arithmetic checksum for serial transmissions, 1982) with odd weights. A library's hash would do on
the host; these sums can also be taken of a buffer on the device, without bringing it over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

MOST_BYTES = 1 << 21
"""Bytes of the largest block."""
Sums = tuple[int, int]
"""``plain`` and ``weighted`` of one block, each in [0, 2^64)."""
ZEROS: Sums = (0, 0)
"""Of a block of zeros of any length."""


def block_sums(block: torch.Tensor) -> Sums:
    """The checksum of one block.

    Args:
        block: 1-D uint8 on any device, at most ``MOST_BYTES``; the last word is filled up with zeros.
    """
    rest = block.numel() % 4
    if rest or block.data_ptr() % 4:
        block = torch.nn.functional.pad(block, (0, -rest % 4))
    if block.device.type != "cpu":
        return _on_device(block)
    out = np.empty(2, np.uint64)
    _kernel()(block.numpy().view(np.uint32), out)
    return int(out[0]), int(out[1])


def _on_device(block: torch.Tensor) -> Sums:
    words = block.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    weights = torch.arange(1, 2 * words.numel() + 1, 2, dtype=torch.int64, device=block.device)
    plain, weighted = torch.stack([words.sum(), (words * weights).sum()]).tolist()
    return plain % 2**64, weighted % 2**64


@functools.cache
def _kernel() -> Callable[..., Any]:
    from numba import njit, types

    def sums(words, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # compiled for one signature
        plain = np.uint64(0)
        weighted = np.uint64(0)
        for i in range(words.size):
            word = np.uint64(words[i])
            weight = np.uint32(np.uint32(2) * np.uint32(i) + np.uint32(1))  # 32 bits: one multiplication per word
            plain += word
            weighted += word * np.uint64(weight)
        out[0] = plain
        out[1] = weighted

    signature = (types.Array(types.uint32, 1, "C"), types.Array(types.uint64, 1, "C"))
    compiled: Callable[..., Any] = njit(signature, nogil=True)(sums)
    return compiled
