"""A Hugging Face model without weights: what ``slideformer plan`` looks at."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from slideformer_backend.errors import ConfigError

_LLAMA = {"model_type": "llama", "tie_word_embeddings": False, "max_position_embeddings": 131072}


def _shape(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **rest: object
) -> dict[str, object]:
    return {
        **_LLAMA,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        **rest,
    }


NAMED: dict[str, dict[str, object]] = {
    "llama-1b": _shape(2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True),
    "llama-3b": _shape(3072, 8192, 28, 24, 8, 128256, tie_word_embeddings=True),
    "llama-8b": _shape(4096, 14336, 32, 32, 8, 128256),
    "qwen-14b": _shape(5120, 13824, 48, 40, 8, 152064, model_type="qwen2"),
    "qwen-32b": _shape(5120, 27648, 64, 40, 8, 152064, model_type="qwen2"),
    "llama-70b": _shape(8192, 28672, 80, 64, 8, 128256),
    "mistral-large": _shape(12288, 28672, 88, 96, 8, 32768, model_type="mistral", head_dim=128, sliding_window=None),
}
"""Shapes of Llama 3.2 1B and 3B, 3.1 8B and 70B, Qwen 2.5 14B and 32B, and Mistral Large 2 (123B)."""

ATTENTION = "slideformer_plan"
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class MetaModel(NamedTuple):
    """A model on the meta device, in training mode. ``vocabulary`` is 0 for a model without a language head."""

    name: str
    model: nn.Module
    vocabulary: int
    hidden: int


class _Operations:
    """Operations of attention so far: torch's counter does not see into a stand-in."""

    count = 0.0


def attention_operations() -> float:
    """Operations that the stand-in for attention kernels has stood for so far."""
    return _Operations.count


def load_meta(source: str, dtype: torch.dtype | None = None) -> MetaModel:
    """The model that ``source`` names: a folder with a ``config.json``, such a file, or one of ``NAMED``.

    Args:
        source: as above.
        dtype: of the weights; None: what the configuration says, else bfloat16.

    Raises:
        ConfigError: there is no such model, or transformers does not know it.
    """
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    values = read_config(source)
    kind = values.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(f"{source}: its configuration names no model_type.", found=sorted(values)[:8])
    wanted = dtype or _DTYPES.get(str(values.get("dtype") or values.get("torch_dtype")).removeprefix("torch."))
    rest = {name: value for name, value in values.items() if name not in ("model_type", "dtype", "torch_dtype")}
    _register_attention()
    try:
        config: Any = AutoConfig.for_model(kind, **rest)
        text = config.get_text_config()
        text.use_cache = False
        text.pad_token_id = None  # with one, some models look for padding among token numbers
        causal = any("ForCausalLM" in str(name) for name in values.get("architectures") or ("ForCausalLM",))
        make: Any = (AutoModelForCausalLM if causal else AutoModel).from_config
        with torch.device("meta"):
            model = make(config, dtype=wanted or torch.bfloat16, attn_implementation=ATTENTION)
    except Exception as error:  # whatever a model's code says of values that it was not made for
        raise ConfigError(f"{source}: transformers cannot make this model: {error}") from error
    head = model.get_output_embeddings()
    return MetaModel(source, model.train(), 0 if head is None else int(text.vocab_size), int(text.hidden_size))


def read_config(source: str) -> Mapping[str, Any]:
    """The configuration that ``source`` names, as written.

    Raises:
        ConfigError: nothing of that name, or no JSON object.
    """
    if source in NAMED:
        return NAMED[source]
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"{source} is no model that can be planned for.",
            expected=f"a folder with a config.json, a config.json, or one of {', '.join(NAMED)}",
            remedy="download the model's config.json and name that file",
        )
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold a JSON object.", found=type(values).__name__)
    return values


class _FusedAttention(torch.autograd.Function):
    """Keeps what fused attention kernels keep: query, key, value, output, and one fp32 number per row."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[-1])
        rows = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, rows)
        # causal: half of the square; two products of 2 operations per element
        _Operations.count += 2.0 * batch * heads * length * key.shape[2] * value.shape[-1]
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Of the interface of transformers' attention functions. [B, heads, L, D] in, [B, L, heads, D] out."""
    make: Any = _FusedAttention.apply
    return make(query, key, value), None


def _register_attention() -> None:
    """Without a mask of that name transformers makes none, as for fused causal attention."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)


class _FusedNorm(torch.autograd.Function):
    """Keeps what fused RMS norm kernels keep: the input and one fp32 number per row."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, in_place: bool) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, hidden.new_empty(hidden.shape[:-1], dtype=torch.float32))
        ctx.in_place = in_place
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, weight, _ = ctx.saved_tensors
        (gradient,) = gradients
        return gradient.detach() if ctx.in_place else torch.empty_like(gradient), torch.empty_like(weight), None


class _FusedGate(torch.autograd.Function):
    """Keeps what fused gated activations keep: their two inputs."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, in_place: bool) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.in_place = in_place
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        if ctx.in_place:
            return gate.detach(), up.detach(), None
        return torch.empty_like(gate), torch.empty_like(up), None


def fuse_layers(model: nn.Module, kernels: Container[str] = ("rms_norm", "gated"), *, in_place: bool = False) -> None:
    """Let norms and gated feed-forwards of a meta model take the memory that they take as fused kernels.

    Args:
        model: changed for good.
        kernels: names as of the configuration's key; rotary embedding saves nothing of size either way.
        in_place: whether gradients take the memory of what was saved, as in Liger's kernels.
    """
    for module in model.modules():
        is_norm = type(module).__name__.endswith("RMSNorm") and isinstance(
            getattr(module, "weight", None), nn.Parameter
        )
        if is_norm and "rms_norm" in kernels:
            module.forward = _norm_forward(module, in_place)
        elif set(module._modules) >= {"gate_proj", "up_proj", "down_proj"} and "gated" in kernels:
            module.forward = _gate_forward(module, in_place)


def _norm_forward(module: Any, in_place: bool) -> Any:
    make: Any = _FusedNorm.apply
    return lambda hidden: make(hidden, module.weight, in_place)


def _gate_forward(module: Any, in_place: bool) -> Any:
    make: Any = _FusedGate.apply
    return lambda hidden: module.down_proj(make(module.gate_proj(hidden), module.up_proj(hidden), in_place))
