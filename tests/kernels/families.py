"""Tiny models of many families, and an engine with kernels around one."""

from __future__ import annotations

import contextlib

import torch
import transformers

from slideformer_backend.api import attach
from slideformer_backend.config import KERNELS, SlideFormerConfig
from slideformer_backend.integrations import kernel_swap
from tests.kernels.truth import DEVICE
from tests.parity.models import _SMALL, hugging_face

__all__ = ["OPTIONS", "make", "managed"]

OPTIONS = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "Gemma3": {"head_dim": 16},
    "Phi3": {},
    "Phi": {},
    "GPTNeoX": {},
    "StableLm": {},
    "Cohere": {},
    "Glm4": {"head_dim": 16},
    "Olmo2": {},
    "Mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "Qwen2Moe": {"num_experts": 4},
    "GptOss": {"num_local_experts": 4, "head_dim": 16},
    "NanoChat": {},
    "GPT2": {"suffix": "LMHeadModel", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
}


def make(family, dtype=torch.float32):
    """A model with random weights, three blocks deep, in training mode."""
    if family != "Gemma3":
        return hugging_face(family, dtype, **OPTIONS[family])
    config = transformers.Gemma3TextConfig(**_SMALL, **OPTIONS[family])  # its causal model takes the text's part
    config._attn_implementation = "eager"
    return transformers.Gemma3ForCausalLM(config).to(dtype).train()


@contextlib.contextmanager
def managed(model, *names, autocast=None):
    """An engine with these kernels (all without names), detached at the end."""
    engine = attach(model, SlideFormerConfig(kernels=names or KERNELS), device=DEVICE, autocast_dtype=autocast)
    try:
        yield engine, kernel_swap.install(engine, autocast)
    finally:
        engine.detach()
