"""Models by shape, their tokens, and how many operations a token takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder of Llama's architecture.

    Attributes:
        hidden: width of the residual stream.
        intermediate: width of the feed-forward part.
        layers: decoder layers.
        heads: attention heads.
        kv_heads: key-value heads.
        vocabulary: rows of the embedding.
        tied: whether the head shares the embedding's weight.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool

    def with_layers(self, layers: int | None) -> Shape:
        """The same shape with another depth (None: its own)."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return Shape(**{**values, "layers": layers or self.layers})

    @property
    def layer_parameters(self) -> int:
        """Elements of one layer."""
        head = self.hidden // self.heads
        attention = self.hidden * head * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """Elements of the model."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings + self.hidden

    def operations(self, length: int, *, recomputed: float) -> float:
        """Floating-point operations per trained token in sequences of ``length``: 2 per weight and token forward, 4
        backward, causal attention at half of its square, and the forward of the ``recomputed`` share of the layers
        once more, but for its last product, whose output no backward needs. An embedding look-up is no operation; the
        head is a matrix product."""
        layers = self.layers * (2.0 * self.layer_parameters + 2.0 * self.hidden * length)
        last = self.layers * 2.0 * self.hidden * self.intermediate
        head = 2.0 * self.vocabulary * self.hidden
        return layers * 3.0 + (layers - last) * recomputed + head * 3.0


SHAPES = {
    "toy": Shape(hidden=64, intermediate=176, layers=4, heads=4, kv_heads=2, vocabulary=256, tied=True),
    "1b": Shape(hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, vocabulary=128256, tied=True),
    "3b": Shape(hidden=3072, intermediate=8192, layers=28, heads=24, kv_heads=8, vocabulary=128256, tied=True),
    "8b": Shape(hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, vocabulary=128256, tied=False),
    "14b": Shape(hidden=5120, intermediate=13824, layers=48, heads=40, kv_heads=8, vocabulary=152064, tied=False),
}
"""Llama 3.2 1B and 3B, Llama 3.1 8B, and a 14B of Qwen 2.5's measures."""


def make_model(shape: Shape, device: torch.device, *, seed: int = 0) -> nn.Module:
    """A bf16 model with random weights of a fixed seed, made on ``device`` in one pass, in training mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        use_cache=False,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        make: Any = LlamaForCausalLM._from_config  # untyped
        model: nn.Module = make(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.train()


def make_batches(
    shape: Shape, count: int, sequences: int, length: int, device: torch.device, *, seed: int = 1
) -> list[torch.Tensor]:
    """``count`` batches of random tokens of a fixed seed, int64 [sequences, length] on ``device``."""
    generator = torch.Generator().manual_seed(seed)
    size = (count, sequences, length)
    return list(torch.randint(0, shape.vocabulary, size, generator=generator).to(device))


def use_kernels(name: str) -> None:
    """Let Llama models made from now on use these kernels: ``liger``; with other names transformers' own.

    Raises:
        ImportError: Liger is not installed.
    """
    if name == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
