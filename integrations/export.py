"""``slideformer export``: a checkpoint as plain model files, named and cut as the model's own library does it."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from slideformer_backend.errors import CheckpointError, ConfigError
from slideformer_backend.integrations.checkpoints import STATE, read_training_state
from slideformer_backend.storage.directory import MANIFEST, MARKER, verify

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
_NOT_COPIED = (MANIFEST, MARKER, STATE, "trainer_state.json", "config.json", "generation_config.json", "README.md")

Dtype = Literal["float32", "bfloat16", "float16"]


def export(
    checkpoint: Path,
    out: Path,
    *,
    dtype: Dtype | None = None,
    max_shard_size: str = "5GB",
    like: Path | None = None,
) -> None:
    """Write the model of ``checkpoint`` into ``out``: safetensors, configuration, tokenizer.

    Args:
        checkpoint: a folder of ``Trainer`` (``checkpoint-<n>``) or of ``save_state``.
        out: made here; must be empty.
        dtype: of the weights; float32 takes the master weights of a 16-bit model. As trained by default.
        max_shard_size: of one file.
        like: a model folder whose tokenizer, and configuration if the checkpoint has none, are taken.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or lacks what a model needs.
        ConfigError: ``out`` is not empty.
    """
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint} is no folder.")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty.", remedy="name a new folder")
    verify(checkpoint)
    out.mkdir(parents=True, exist_ok=True)
    adapter = next((folder for folder in _adapters(checkpoint)), None)
    if adapter is not None:
        for path in adapter.glob("adapter_*"):
            shutil.copy2(path, out)
    else:
        _export_model(checkpoint, out, dtype, max_shard_size, like)
    for source in (checkpoint, like):
        _copy_rest(source, out)


def _export_model(checkpoint: Path, out: Path, dtype: Dtype | None, max_shard_size: str, like: Path | None) -> None:
    import torch

    state = read_training_state(checkpoint)
    if state is not None and state["weights"] == "module":
        model = _from_module(checkpoint, like)
    else:
        model = _class_of(_config_of(checkpoint, like)).from_pretrained(checkpoint, dtype="auto")
    if dtype is not None:
        model = model.to(getattr(torch, dtype))
    if dtype == "float32":
        _take_masters(model, checkpoint / "optimizer")
    model.save_pretrained(out, max_shard_size=max_shard_size)


def _from_module(checkpoint: Path, like: Path | None) -> Any:
    """The model around weights that ``save_state`` named as the module names them; their memory is the file's."""
    import torch
    from safetensors.torch import load_file

    from slideformer_backend.checkpoint import alias

    config = _config_of(checkpoint, like)
    file = checkpoint / "model.safetensors"
    if not file.exists():
        raise CheckpointError(f"{checkpoint} has no model.safetensors.", remedy="save with safe_serialization=True")
    with torch.device("meta"):
        model = _class_of(config)(config)
    # Tensors of one file may share a storage, which would make one shard of them.
    weights = {name: alias(tensor) for name, tensor in load_file(file).items()}
    found = model.load_state_dict(weights, strict=False, assign=True)
    missing = set(found.missing_keys) - set(getattr(model, "all_tied_weights_keys", None) or ())
    if missing or found.unexpected_keys:
        raise CheckpointError(
            f"The weights of {file} are not those of a {type(model).__name__}.",
            found=", ".join(sorted([*missing, *found.unexpected_keys])[:4]),
            remedy="export from the script instead: accelerator.unwrap_model(model).save_pretrained(...)",
        )
    model.tie_weights()
    return model


def _take_masters(model: Any, folder: Path) -> None:
    import torch
    from safetensors import safe_open

    parameters = dict(model.named_parameters(remove_duplicate=False))
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for name in file.keys():  # noqa: SIM118  # a file object that is no mapping
                if name in parameters:
                    parameters[name].copy_(file.get_tensor(name))


def _config_of(checkpoint: Path, like: Path | None) -> Any:
    from transformers import AutoConfig

    folder = next((f for f in (checkpoint, like) if f is not None and (f / "config.json").exists()), None)
    if folder is None:
        raise CheckpointError(
            f"{checkpoint} has no config.json: the model that was trained has no configuration of transformers.",
            remedy="pass --like with a folder of the same model",
        )
    return AutoConfig.from_pretrained(folder)


def _class_of(config: Any) -> Any:
    import transformers

    names = config.architectures or []
    found = getattr(transformers, names[0], None) if names else None
    if found is None:
        raise CheckpointError(
            "The class of the model is not one of transformers.",
            found=", ".join(names) or "no architectures in config.json",
            remedy="export from the script instead: accelerator.unwrap_model(model).save_pretrained(...)",
        )
    return found


def _adapters(checkpoint: Path) -> Iterator[Path]:
    yield from (f for f in (checkpoint, checkpoint / "adapter") if (f / "adapter_config.json").exists())


def _copy_rest(source: Path | None, out: Path) -> None:
    """Tokenizer, chat template, processor: whatever is not weights and not ours."""
    for path in sorted(source.iterdir()) if source is not None else ():
        is_weights = path.name.endswith(_WEIGHTS)
        if path.is_file() and not is_weights and path.name not in _NOT_COPIED and not (out / path.name).exists():
            shutil.copy2(path, out)


def main(arguments: Sequence[str]) -> None:
    """``slideformer export CHECKPOINT OUT``.

    Raises:
        SlideFormerError, OSError: see ``export``.
    """
    parser = argparse.ArgumentParser(
        prog="slideformer export", description="Write a checkpoint as a plain model folder of transformers or PEFT."
    )
    parser.add_argument("checkpoint", type=Path, help="a checkpoint of Trainer or of accelerator.save_state()")
    parser.add_argument("out", type=Path, help="the folder to make")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="as trained, if not given")
    parser.add_argument("--max_shard_size", default="5GB", help="size of one file (5GB)")
    parser.add_argument("--like", type=Path, help="a model folder to take the tokenizer from")
    options = parser.parse_args(arguments)
    export(
        options.checkpoint,
        options.out,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
        like=options.like,
    )
    print(f"The model is in {options.out}.")
