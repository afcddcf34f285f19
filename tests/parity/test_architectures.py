"""Model families of transformers with their own losses: decoders, encoders, encoder-decoders, vision."""

import pytest
import torch
import transformers

from tests.parity.harness import POLICIES, PRECISIONS, check
from tests.parity.models import HIDDEN, VOCABULARY, batch, hugging_face

ADAMW = {"lr": 1e-2, "fused": True}


def decoder(family, **options):
    return lambda dtype: hugging_face(family, dtype, **options)


def gpt2(dtype):
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=3, n_head=2, n_positions=32, resid_pdrop=0.1, attn_pdrop=0.1
    )
    return transformers.GPT2LMHeadModel(config).to(dtype).train()


def t5(dtype):
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.1,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config).to(dtype).train()


def bart(dtype):
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    return transformers.BartForConditionalGeneration(config).to(dtype).train()


def bert(dtype):
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        num_labels=16,
    )
    return transformers.BertForSequenceClassification(config).to(dtype).train()


def vit(dtype):
    config = transformers.ViTConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=16,
    )
    return transformers.ViTForImageClassification(config).to(dtype).train()


MODELS = {
    "gemma": decoder("Gemma", head_dim=16),
    "gemma2": decoder("Gemma2", head_dim=16),
    "qwen3": decoder("Qwen3", head_dim=16),
    "gpt_neox": decoder("GPTNeoX"),
    "mixtral": decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2, output_router_logits=True),
    "gpt2": gpt2,
    "t5": t5,
    "bart": bart,
    "bert": bert,
    "vit": vit,
}


def inputs(name, number, device):
    generator = torch.Generator().manual_seed(number)
    if name == "vit":
        images = torch.randn(4, 3, 16, 16, generator=generator)
        return {"pixel_values": images.to(device), "labels": torch.arange(4).to(device)}
    ids = batch(number, length=6 + number % 3, device=device)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    if name == "bert":
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(2).to(device)}
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": batch(number + 50, device=device) if name in ("t5", "bart") else ids,
    }


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_architectures(device, policy, precision, name):
    dtype, autocast = PRECISIONS[precision]

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        for number in range(3):
            given = inputs(name, number, run.device)
            if dtype == torch.bfloat16 and "pixel_values" in given:
                given["pixel_values"] = given["pixel_values"].to(dtype)
            loss = run.forward(**given).loss
            run.see("loss", loss)
            run.backward(loss)
            run.see_gradients()
            optimizer.step()
            optimizer.zero_grad()
            run.see_weights()

    check(lambda: MODELS[name](dtype), script, device, policy=policy, autocast=autocast)
