"""The matrix products of a head projection, one chunk of tokens at a time, in one buffer for logits."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from slideformer_backend.kernels.softmax_gradient import padded_columns

__all__ = ["CHUNK_BYTES", "Projection", "chunk_tokens", "product_dtype"]

CHUNK_BYTES = 1 << 30
"""Logits held at a time, at most, beside the memory that the weight's gradient will need when they are gone. Larger
chunks read and write the fp32 sum of that gradient less often."""

_SMALL_BYTES = 1 << 28
_HALF_SCALE = 256.0


class Projection:
    """Products of one head: logits of a chunk, and gradients from the gradient of its logits.

    Args:
        hidden: [tokens, H]; any strides.
        weight: [V, H].
        bias: [V] or None.
        wanted: whether gradients of hidden, weight, bias are made.
        dtype: of the products; the autocast dtype inside autocast and else the dtype of ``hidden`` by default.
        tokens: of a chunk; as many as memory allows by default.

    Attributes:
        gradients: of hidden (its product dtype), weight (fp32 sum over chunks; its own dtype where one chunk is all)
            and bias (fp32); None where not wanted.
        gradient_scale: the gradient of logits must carry this factor: it keeps small probabilities out of the
            subnormal range of fp16. The products take it out again.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        wanted: tuple[bool, ...],
        *,
        dtype: torch.dtype | None = None,
        is_scaled: bool = True,
        tokens: int | None = None,
    ) -> None:
        self.dtype = dtype or product_dtype(hidden)
        # a parameter may be of a class that watches what user code does with it
        with torch._C.DisableTorchFunctionSubclass():
            self.hidden = hidden.detach().to(self.dtype)
            self.weight = weight.detach().to(self.dtype)
            self.bias = None if bias is None else bias.detach().to(self.dtype)
        self.vocabulary = weight.shape[0]
        self.gradient_scale = _HALF_SCALE if is_scaled and self.dtype == torch.float16 else 1.0
        wants_hidden, wants_weight, wants_bias = wanted
        device = hidden.device
        hidden_shape, weight_shape = self.hidden.shape, weight.shape
        # a sum of one product: rounded once, by that product
        narrow = wants_weight and weight.dtype == self.dtype == torch.bfloat16
        self._step = tokens or self._chunk(wants_weight, narrow)
        weight_dtype = self.dtype if narrow and self._step >= hidden.shape[0] else torch.float32
        # every element is written by the first chunk, unless there is none
        make = torch.zeros if hidden.shape[0] == 0 else torch.empty
        self.gradients = (
            make(hidden_shape, dtype=self.dtype, device=device) if wants_hidden else None,
            make(weight_shape, dtype=weight_dtype, device=device) if wants_weight else None,
            torch.zeros(weight_shape[0], dtype=torch.float32, device=device) if wants_bias else None,
        )
        self._buffer: torch.Tensor | None = None

    def _chunk(self, wants_weight: bool, narrow: bool) -> int:
        """Tokens of a chunk."""
        sum_bytes = 4 * self.weight.numel() if wants_weight else 0
        return chunk_tokens(
            self.hidden.shape[0],
            padded_columns(self.vocabulary) * self.dtype.itemsize,
            self.hidden.device,
            spare=self.weight.nbytes if wants_weight else 0,
            unsummed=sum_bytes if narrow else 0,
        )

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Begin and end of each chunk."""
        count = self.hidden.shape[0]
        if count == 0:
            return
        step = min(self._step, count)
        shape = (step, padded_columns(self.vocabulary))
        self._buffer = torch.empty(shape, dtype=self.dtype, device=self.hidden.device)
        for begin in range(0, count, step):
            yield begin, min(begin + step, count)
        self._buffer = None

    def logits(self, begin: int, end: int) -> torch.Tensor:
        """Logits of a chunk, [end - begin, padded columns]: valid until the next call; padding holds anything."""
        if self._buffer is None:
            raise RuntimeError("logits() was called outside ranges()")
        logits = self._buffer[: end - begin]
        target = logits[:, : self.vocabulary]
        with _no_autocast(self.hidden):
            if self.bias is None:
                torch.mm(self.hidden[begin:end], self.weight.t(), out=target)
            else:
                torch.addmm(self.bias, self.hidden[begin:end], self.weight.t(), out=target)
        return logits

    def take_gradient(self, logits: torch.Tensor, begin: int, end: int) -> None:
        """Add what the gradient of a chunk's logits contributes; ``logits`` is that gradient now."""
        gradient = logits[:, : self.vocabulary]
        of_hidden, of_weight, of_bias = self.gradients
        inverse = 1.0 / self.gradient_scale
        with _no_autocast(self.hidden):
            if of_hidden is not None:
                rows = of_hidden[begin:end]
                torch.addmm(rows, gradient, self.weight, beta=0, alpha=inverse, out=rows)
            if of_weight is not None:
                _add_product(of_weight, gradient.t(), self.hidden[begin:end], inverse, is_first=begin == 0)
            if of_bias is not None:
                of_bias.add_(gradient.sum(0, dtype=torch.float32), alpha=inverse)


def product_dtype(hidden: torch.Tensor) -> torch.dtype:
    """The dtype that a linear layer would compute in."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def chunk_tokens(tokens: int, row_bytes: int, device: torch.device, spare: int = 0, unsummed: int = 0) -> int:
    """Tokens of a chunk: at most :data:`CHUNK_BYTES` of logits, half the free memory, and half of all tokens.

    A multiple of 256 where it is that large, as matrix products like it. Chunks are as equal as that allows; the last
    may be shorter. All tokens are one chunk where that takes no more than :data:`CHUNK_BYTES` beyond the sum that it
    saves, and no more than twice that sum: reading and writing sums is then what costs time.

    Args:
        tokens: all of them.
        row_bytes: logits of one.
        device: where.
        spare: bytes that will be needed after the logits are gone; up to :data:`CHUNK_BYTES` of them may be used too.
        unsummed: bytes of sums over chunks that a single chunk does without.
    """
    budget, alone = CHUNK_BYTES + min(spare, CHUNK_BYTES), min(CHUNK_BYTES + unsummed, 2 * unsummed)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        budget, alone = min(budget, (free + cached) // 2), min(alone, (free + cached) // 2)
    if tokens * row_bytes <= alone:
        return tokens
    most = max(1, budget // row_bytes)
    if tokens * row_bytes > _SMALL_BYTES:
        most = min(most, -(-tokens // 2))
    if tokens <= most:
        return tokens
    if most < 256:
        return most
    equal = -(-tokens // -(-tokens // (most // 256 * 256)))
    return -(-equal // 256) * 256


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, alpha: float, *, is_first: bool) -> None:
    """total (fp32) = alpha·left@right, plus total unless it is the first; the product is never rounded to 16 bits.

    A total of the dtype of the factors takes one product only, and is rounded like that."""
    beta = 0 if is_first else 1
    if left.dtype == total.dtype:
        total.addmm_(left, right, beta=beta, alpha=alpha)
    elif total.is_cuda and _has_wide_sum(total.device, left.dtype):
        torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, beta=beta, alpha=alpha, out=total)
    elif total.is_cuda:
        # one more tensor of the size of the weight, and one more pass over it
        product = torch.mm(left, right, out_dtype=torch.float32)
        if is_first:
            torch.mul(product, alpha, out=total)
        else:
            total.add_(product, alpha=alpha)
    else:
        total.addmm_(left.float(), right.float(), beta=beta, alpha=alpha)


@functools.cache
def _has_wide_sum(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether 16-bit matrices can be multiplied into an fp32 sum in place (a matter of library and device)."""
    total = torch.zeros(16, 16, device=device)
    factor = torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        torch.ops.aten.addmm.dtype_out(total, factor, factor, torch.float32, beta=1, alpha=1, out=total)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _no_autocast(tensor: torch.Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)
