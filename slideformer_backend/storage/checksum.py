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
"""Of a block of zeros of any length, and of no other block (the plain sum cannot wrap around)."""


def block_sums(flat: torch.Tensor, block: int = MOST_BYTES) -> list[Sums]:
    """The checksums of the blocks of ``flat``.

    Args:
        flat: 1-D uint8 on any device.
        block: bytes of a block, a multiple of 4 and at most ``MOST_BYTES``; the last one may be shorter, and its last
            word is filled up with zeros.
    """
    rest = flat.numel() % 4
    if rest or flat.data_ptr() % 4:
        flat = torch.nn.functional.pad(flat, (0, -rest % 4))
    if flat.device.type != "cpu":
        return _on_device(flat, block)
    words = flat.numpy().view(np.uint32)
    out = np.empty((-(-flat.numel() // block), 2), np.uint64)
    _kernel()(words, block // 4, out)
    return [(plain, weighted) for plain, weighted in out.tolist()]


def _on_device(flat: torch.Tensor, block: int) -> list[Sums]:
    """A few operations on the current stream for all blocks, and one wait for their sums."""
    if not flat.numel():
        return []
    words = flat.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    weights = torch.arange(1, 2 * min(words.numel(), block // 4) + 1, 2, dtype=torch.int64, device=flat.device)
    found = []
    for part in words.split(block // 4 * max(1, words.numel() // (block // 4))):  # whole blocks, then what is left
        blocks = part.view(-1, min(part.numel(), block // 4))
        found.append(torch.stack([blocks.sum(1), (blocks * weights[: blocks.shape[1]]).sum(1)], 1))
    return [(plain % 2**64, weighted % 2**64) for plain, weighted in torch.cat(found).tolist()]


@functools.cache
def _kernel() -> Callable[..., Any]:
    from numba import njit, types

    def sums(words, per_block, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # compiled for one signature
        for number in range(out.shape[0]):
            block = words[number * per_block : (number + 1) * per_block]
            plain = np.uint64(0)
            weighted = np.uint64(0)
            for i in range(block.size):
                word = np.uint64(block[i])
                weight = np.uint32(np.uint32(2) * np.uint32(i) + np.uint32(1))  # 32 bits: one multiplication per word
                plain += word
                weighted += word * np.uint64(weight)
            out[number, 0] = plain
            out[number, 1] = weighted

    signature = (types.Array(types.uint32, 1, "C"), types.int64, types.Array(types.uint64, 2, "C"))
    compiled: Callable[..., Any] = njit(signature, nogil=True)(sums)
    return compiled
