"""TRL's own `sft.py`, unmodified, through the launcher: figures, files and weights of the plain run, bit for bit."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="trl is part of the extra [bench]")
pytest.importorskip("datasets", reason="datasets is part of the extra [bench]")

TEXTS = [
    f"The {a} {b} of number {i}." for i, (a, b) in enumerate([("slow", "fox"), ("lazy", "dog"), ("old", "sea")] * 8)
]
LENGTH = 4  # steps
# Says at the end of a process whether an engine was at work in it.
WITNESS = """
import atexit, sys
def say():
    api = sys.modules.get("slideformer_backend.api")
    if api is not None:
        print("ENGINES", len(api.engines()))
atexit.register(say)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a tokenizer, and text, as the script wants them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("sft")
    raw = Tokenizer(models.WordLevel(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.train_from_iterator(TEXTS, trainers.WordLevelTrainer(special_tokens=["<unk>", "<eos>", "<pad>"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>")
    tokenizer.save_pretrained(path / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, eos_token_id=1, pad_token_id=2))
    model.save_pretrained(path / "model")
    (path / "data").mkdir()
    for split in ("train", "test"):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
        (path / "data" / f"{split}.jsonl").write_text(rows)
    return path


def script():
    return Path(importlib.util.find_spec("trl").origin).parent / "scripts" / "sft.py"


def words(folder, name):
    return [
        "--model_name_or_path", folder / "model", "--dataset_name", folder / "data", "--output_dir", folder / name,
        "--max_steps", LENGTH, "--save_steps", LENGTH, "--logging_steps", 1, "--eval_strategy", "steps",
        "--eval_steps", 2, "--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2,
        "--learning_rate", "1e-2", "--report_to", "none", "--use_cpu", "true", "--max_length", 16,
    ]  # fmt: skip


def test_sft_is_the_plain_run_bit_for_bit(folder, environ, python, warm_python):
    """Its defaults: a fp32 model under bf16 autocast, gradient checkpointing, its own fused head."""
    (folder / "sf.yaml").write_text("distributed_type: SLIDEFORMER\nslideformer_config: {update: exact}\n")
    launch = ["-m", "accelerate.commands.launch", "--config_file", folder / "sf.yaml"]
    commands = {"plain": (warm_python, [script()]), "ours": (python, [*launch, script()])}  # ours from nothing
    (folder / "witness").mkdir()
    (folder / "witness" / "sitecustomize.py").write_text(WITNESS)
    path = os.pathsep.join([str(folder / "witness"), environ["PYTHONPATH"]])
    more = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    said = {name: run(*command, *words(folder, name), **more) for name, (run, command) in commands.items()}
    assert "ENGINES 1" in said["ours"]
    assert "ENGINES" not in said["plain"]
    figures, weights = {}, {}
    for name in commands:
        state = json.loads((folder / name / f"checkpoint-{LENGTH}" / "trainer_state.json").read_text())
        timings = ("runtime", "per_second", "time")
        figures[name] = [
            {key: value for key, value in entry.items() if not key.endswith(timings) and "slideformer/" not in key}
            for entry in state["log_history"]
        ]
        weights[name] = load_weights(folder / name)
    assert len(figures["plain"]) == LENGTH + LENGTH // 2
    norms = [[entry.pop("grad_norm", None) for entry in figures[name]] for name in commands]
    assert figures["ours"] == figures["plain"]
    for one, two in zip(*norms, strict=True):
        assert one == two
    assert weights["ours"].keys() == weights["plain"].keys()
    assert all(torch.equal(weights["ours"][key], value) for key, value in weights["plain"].items())


def load_weights(path):
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")
