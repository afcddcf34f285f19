"""Tiny models: sizes are multiples of 16, so that torch's fused AdamW has no sub-vector tail (DESIGN 4.5)."""

import torch
import transformers
from torch import nn

VOCABULARY = 64
HIDDEN = 32
LAYERS = 3


class Block(nn.Module):
    """Norm, linear, activation, dropout, linear, residual."""

    def __init__(self, width=HIDDEN, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.drop(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """A user's own model: embedding, blocks, norm, head. Returns the logits."""

    def __init__(self, width=HIDDEN, layers=LAYERS, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def stack(**options):
    return lambda: Stack(**options).train()


def llama(dtype=torch.float32, **options):
    """A factory of tiny Llamas."""
    return lambda: hugging_face("Llama", dtype, **options)


_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def hugging_face(family, dtype=torch.float32, suffix="ForCausalLM", **options):
    """A tiny randomly initialised model of a transformers family, in training mode."""
    config = getattr(transformers, f"{family}Config")(**{**_SMALL, **options})
    config._attn_implementation = "eager"
    return getattr(transformers, f"{family}{suffix}")(config).to(dtype).train()


def batch(number, rows=2, length=8, device="cpu"):
    """Token ids of batch ``number``; a fixed function of the arguments."""
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator).to(device)


def language_loss(output, ids):
    """Next-token loss from logits, or the model's own."""
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def steps(run, optimizer, count=3, first=0, loss_of=None):
    """Ordinary steps; sees losses, gradients and weights."""
    for number in range(first, first + count):
        ids = batch(number, length=6 + number % 3, device=run.device)
        loss = language_loss(run.forward(ids), ids) if loss_of is None else loss_of(run, ids)
        run.see("loss", loss)
        run.backward(loss)
        run.see_gradients()
        optimizer.step()
        optimizer.zero_grad()
        run.see_weights()
