"""Tiny models of every family, randomly initialised, with inputs of the kind that the family takes.

Sizes are multiples of 16, so that torch's fused AdamW has no sub-vector tail (DESIGN 4.5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import transformers
from torch import nn

from tests.parity.models import HIDDEN, VOCABULARY, Stack, batch, hugging_face

IMAGE_TOKEN = 60


class Family(NamedTuple):
    """One family.

    ``make`` gives a model in training mode for a dtype; ``inputs`` its keyword arguments, labels included, for the
    batch of a number.
    """

    make: Callable[[torch.dtype], nn.Module]
    inputs: Callable[[int], dict[str, torch.Tensor]]


def text(number: int, rows: int = 2) -> dict[str, torch.Tensor]:
    """Token ids with two padded places."""
    ids = batch(number, rows=rows, length=6 + number % 3)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def classified_text(number: int) -> dict[str, torch.Tensor]:
    return {**text(number), "labels": torch.arange(2)}


def translated_text(number: int) -> dict[str, torch.Tensor]:
    return {**text(number), "labels": batch(number + 50)}


def images(number: int, rows: int = 4) -> dict[str, torch.Tensor]:
    return {"pixel_values": _normal(number, rows, 3, 16, 16), "labels": torch.arange(rows)}


def speech(number: int) -> dict[str, torch.Tensor]:
    return {"input_features": _normal(number, 2, 16, 32), "labels": batch(number + 50)}


def text_with_images(number: int, tokens: int = 4) -> dict[str, torch.Tensor]:
    """Each row holds one image, as ``tokens`` places."""
    ids = batch(number, length=tokens + 6).clamp_(max=IMAGE_TOKEN - 3)
    ids[:, 2 : 2 + tokens] = IMAGE_TOKEN
    labels = ids.masked_fill(ids == IMAGE_TOKEN, -100)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def gemma3_inputs(number: int) -> dict[str, torch.Tensor]:
    given = text_with_images(number)
    kinds = (given["input_ids"] == IMAGE_TOKEN).long()
    return {**given, "token_type_ids": kinds, "pixel_values": _normal(number, 2, 3, 16, 16)}


def qwen_vl_inputs(number: int) -> dict[str, torch.Tensor]:
    """Two images of 4 x 4 patches; 2 x 2 patches become one token."""
    given = text_with_images(number)
    kinds = (given["input_ids"] == IMAGE_TOKEN).int()
    grid = torch.tensor([[1, 4, 4]] * 2)
    pixels = _normal(number, 32, 3 * 2 * 4 * 4)
    return {**given, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds}


def _normal(number: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


def decoder(family: str, **options: object) -> Family:
    return Family(lambda dtype: hugging_face(family, dtype, **options), text)


def built(kind: str, config: Callable[[], transformers.PreTrainedConfig]) -> Callable[[torch.dtype], nn.Module]:
    """A factory of a transformers class from its config."""

    def make(dtype: torch.dtype) -> nn.Module:
        made = config()
        made._attn_implementation = "eager"
        return getattr(transformers, kind)(made).to(dtype).train()

    return make


TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    **TOKENS,
}
PARTIAL_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}


def recurrent_gemma() -> transformers.PreTrainedConfig:
    """Its recurrent layers keep their state in attributes of modules."""
    return transformers.RecurrentGemmaConfig(
        **{**SMALL, "pad_token_id": 0},
        lru_width=HIDDEN,
        head_dim=16,
        attention_window_size=4,
        block_types=["recurrent", "attention"],
    )


def olmo_hybrid() -> transformers.PreTrainedConfig:
    """Its linear attention keeps its state in a cache, also in training."""
    sizes = {name: 2 for name in ("linear_num_value_heads", "linear_num_key_heads")}
    sizes |= {name: 16 for name in ("linear_key_head_dim", "linear_value_head_dim")}
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    return transformers.OlmoHybridConfig(**SMALL, **sizes, layer_types=kinds)


def mamba() -> transformers.PreTrainedConfig:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 3}
    return transformers.MambaConfig(**sizes, state_size=16, time_step_rank=16, **TOKENS)


def bert() -> transformers.PreTrainedConfig:
    return transformers.BertConfig(**SMALL, num_labels=16)


def gpt2() -> transformers.PreTrainedConfig:
    return transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=3, n_head=2, n_positions=32, **TOKENS)


def t5() -> transformers.PreTrainedConfig:
    return transformers.T5Config(
        vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
    )


def bart() -> transformers.PreTrainedConfig:
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    return transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        max_position_embeddings=64,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
        encoder_layerdrop=0.3,
        decoder_layerdrop=0.3,
        **heads,
        **layers,
        **TOKENS,
    )


def vit() -> transformers.PreTrainedConfig:
    sizes = {name: value for name, value in SMALL.items() if name.startswith(("hidden", "num_h", "num_a", "interm"))}
    return transformers.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=16)


def whisper() -> transformers.PreTrainedConfig:
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    return transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        num_mel_bins=16,
        max_source_positions=16,
        max_target_positions=32,
        decoder_start_token_id=1,
        dropout=0.1,
        **heads,
        **layers,
        **TOKENS,
    )


def gemma3_text() -> transformers.PreTrainedConfig:
    return transformers.Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=4)


def gemma3n() -> transformers.PreTrainedConfig:
    """The last two layers attend to keys and values of the first two."""
    sizes = {
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY, "altup_num_inputs": 4,
        "laurel_rank": 16, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
    }  # fmt: skip
    return transformers.Gemma3nTextConfig(**{**SMALL, "head_dim": 16, **sizes})


def gemma3() -> transformers.PreTrainedConfig:
    vision = {
        "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 16, "patch_size": 4,
    }  # fmt: skip
    return transformers.Gemma3Config(
        text_config={**SMALL, "head_dim": 16, "sliding_window": 4},
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_id=IMAGE_TOKEN,
        image_token_index=IMAGE_TOKEN,
        boi_token_index=IMAGE_TOKEN + 1,
        eoi_token_index=IMAGE_TOKEN + 2,
    )


def qwen3_vl() -> transformers.PreTrainedConfig:
    vision = {
        "depth": 3, "hidden_size": HIDDEN, "intermediate_size": 64, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": HIDDEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    return transformers.Qwen3VLConfig(
        text_config={**SMALL, "head_dim": 16, "rope_parameters": ROTARY},
        vision_config=vision,
        image_token_id=IMAGE_TOKEN,
        video_token_id=IMAGE_TOKEN + 1,
        vision_start_token_id=IMAGE_TOKEN + 2,
        vision_end_token_id=IMAGE_TOKEN + 3,
    )


def qwen25_vl() -> transformers.PreTrainedConfig:
    vision = {
        "depth": 3, "hidden_size": HIDDEN, "intermediate_size": 64, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": HIDDEN, "window_size": 8, "fullatt_block_indexes": [1], "tokens_per_second": 2,
    }  # fmt: skip
    return transformers.Qwen2_5_VLConfig(
        text_config={**SMALL, "rope_parameters": ROTARY},
        vision_config=vision,
        image_token_id=IMAGE_TOKEN,
        video_token_id=IMAGE_TOKEN + 1,
        vision_start_token_id=IMAGE_TOKEN + 2,
        vision_end_token_id=IMAGE_TOKEN + 3,
    )


class Own(nn.Module):
    """A user's own model with a ``ModuleList``; it answers as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Stack(dropout=0.1)

    def forward(self, input_ids, attention_mask, labels):
        logits = self.inner(input_ids)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
DEEPSEEK = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "qk_nope_head_dim": 16, "num_key_value_heads": 2,
}  # fmt: skip
GPT_OSS = {
    "num_local_experts": 16, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 4, "sliding_window": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": decoder("Llama"),
    "qwen2": decoder("Qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": decoder("Qwen3", head_dim=16),
    "mistral": decoder("Mistral", sliding_window=4),
    "ministral": decoder("Ministral", sliding_window=4, head_dim=16),
    "ministral3": decoder("Ministral3", head_dim=16),
    "gemma": decoder("Gemma", head_dim=16),
    "gemma2": decoder("Gemma2", head_dim=16, sliding_window=4),
    "gemma3_text": Family(built("Gemma3ForCausalLM", gemma3_text), text),
    "gemma3": Family(built("Gemma3ForConditionalGeneration", gemma3), gemma3_inputs),
    "gemma3n": Family(built("Gemma3nForCausalLM", gemma3n), text),
    "phi3": decoder("Phi3", attention_dropout=0.1, resid_pdrop=0.1),
    "phi4": decoder("Phi3", rope_parameters=PARTIAL_ROTARY),
    "gpt2": Family(built("GPT2LMHeadModel", gpt2), text),
    "gpt_neox": decoder("GPTNeoX", attention_dropout=0.1, hidden_dropout=0.1),
    "olmo2": decoder("Olmo2"),
    "granite": decoder("Granite", residual_multiplier=0.5, logits_scaling=2.0, embedding_multiplier=3.0),
    "cohere": decoder("Cohere"),
    "smollm3": decoder("SmolLM3", no_rope_layer_interval=2),
    "deepseek_v3": decoder("DeepseekV3", **DEEPSEEK),
    "mixtral": decoder("Mixtral", num_local_experts=4, **EXPERTS),
    "qwen3_moe": decoder("Qwen3Moe", num_experts=4, moe_intermediate_size=32, head_dim=16, **EXPERTS),
    "gpt_oss": decoder("GptOss", **GPT_OSS, **EXPERTS),
    "qwen3_vl": Family(built("Qwen3VLForConditionalGeneration", qwen3_vl), qwen_vl_inputs),
    "qwen2_5_vl": Family(built("Qwen2_5_VLForConditionalGeneration", qwen25_vl), qwen_vl_inputs),
    "recurrent_gemma": Family(built("RecurrentGemmaForCausalLM", recurrent_gemma), text),
    "olmo_hybrid": Family(built("OlmoHybridForCausalLM", olmo_hybrid), text),
    "mamba": Family(built("MambaForCausalLM", mamba), text),
    "bert": Family(built("BertForSequenceClassification", bert), classified_text),
    "t5": Family(built("T5ForConditionalGeneration", t5), translated_text),
    "bart": Family(built("BartForConditionalGeneration", bart), translated_text),
    "vit": Family(built("ViTForImageClassification", vit), images),
    "whisper": Family(built("WhisperForConditionalGeneration", whisper), speech),
    "own": Family(lambda dtype: Own().to(dtype).train(), text),
}
