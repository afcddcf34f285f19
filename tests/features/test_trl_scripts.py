"""TRL's own dpo.py, reward.py and grpo.py, unmodified, through the launcher: the plain run, bit for bit."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="trl is part of the extra [bench]")
pytest.importorskip("datasets", reason="datasets is part of the extra [bench]")

STEPS = 3
WORDS = [f"The {a} {b}" for a in ("slow", "lazy", "old", "new") for b in ("fox", "dog", "sea")]
ROWS = [
    {"prompt": words, "chosen": f" of number {n % 5}.", "rejected": f" of {WORDS[n % 7]}."}
    for n, words in enumerate(WORDS * 2)
]
# Says at the end of a process which engines were made in it, and how many bytes of moments each of them came to own.
WITNESS = """
import atexit, os
if os.environ.get("ACCELERATE_USE_SLIDEFORMER") == "true":
    from slideformer_backend import api
    made, attach = [], api.attach
    def attach_and_keep(*arguments, **named):
        made.append(attach(*arguments, **named))
        return made[-1]
    api.attach = attach_and_keep
    def say():
        for engine in made:
            moments = [slab.nbytes for u in engine.units for name, slab in u.states.items() if name != "master"]
            print("ENGINE", sum(moments))
    atexit.register(say)
"""
REWARDS = """
def short(completions, **more):
    return [-float(len(text)) / 100 for text in completions]
"""
COMMON = [
    "--max_steps", STEPS, "--save_strategy", "no", "--logging_steps", 1, "--per_device_train_batch_size", 2,
    "--gradient_accumulation_steps", 2, "--learning_rate", "1e-2", "--report_to", "none", "--use_cpu", "true",
    "--disable_tqdm", "true",
]  # fmt: skip
LORA = ["--use_peft", "true", "--lora_r", 16, "--lora_target_modules", "q_proj", "v_proj"]
GRPO = [
    "--reward_funcs", "rewards.short", "--num_generations", 2, "--max_completion_length", 8, "--dataset_train_split",
    "train", "--bf16", "false", "--beta", "0.1",
]  # fmt: skip
# script, its own words, how many models an engine trains, how many it only slides (a reference)
CASES = {
    "dpo": ("dpo.py", ["--max_length", 32, "--eval_strategy", "steps", "--eval_steps", 2], 1, 1),
    "dpo, precomputed reference": ("dpo.py", ["--max_length", 32, "--precompute_ref_log_probs", "true"], 1, 0),
    "dpo, adapters": ("dpo.py", ["--max_length", 32, *LORA], 1, 0),
    "reward": ("reward.py", ["--max_length", 32, "--eval_strategy", "steps", "--eval_steps", 2], 1, 0),
    "grpo": ("grpo.py", GRPO, 1, 1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a tokenizer, and preference data, as the scripts want them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("trl")
    raw = Tokenizer(models.WordLevel(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = [text for row in ROWS for text in row.values()]
    raw.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["<unk>", "<eos>", "<pad>"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>")
    tokenizer.save_pretrained(path / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, eos_token_id=1, pad_token_id=2, bos_token_id=None))
    model.save_pretrained(path / "model")
    (path / "data").mkdir()
    for split in ("train", "test"):
        (path / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (path / "rewards.py").write_text(REWARDS)
    (path / "witness").mkdir()
    (path / "witness" / "sitecustomize.py").write_text(WITNESS)
    (path / "sf.yaml").write_text("distributed_type: SLIDEFORMER\nslideformer_config: {update: exact}\n")
    return path


def figures(output):
    """The entries that Trainer printed, without times and what we add to them."""
    entries = [eval(line) for line in output.splitlines() if line.startswith("{'") and line.endswith("}")]
    timings = ("runtime", "per_second", "time")
    return [
        {key: value for key, value in entry.items() if not key.endswith(timings) and "slideformer/" not in key}
        for entry in entries
    ]


@pytest.mark.parametrize("case", CASES)
def test_the_script_gives_what_it_gives_without_us(folder, environ, warm_python, case):
    from safetensors.torch import load_file

    name, words, trained, frozen = CASES[case]
    script = Path(importlib.util.find_spec("trl").origin).parent / "scripts" / name
    path = os.pathsep.join([str(folder / "witness"), environ["PYTHONPATH"]])
    more = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    launch = ["-m", "accelerate.commands.launch", "--config_file", folder / "sf.yaml"]
    data = ["--model_name_or_path", folder / "model", "--dataset_name", folder / "data"]
    outputs, weights = {}, {}
    for kind, start in {"plain": [], "ours": launch}.items():
        out = folder / f"{case} {kind}"
        command = [*start, script, *data, *COMMON, *words, "--output_dir", out]
        outputs[kind] = warm_python(*command, cwd=folder, **more)
        (file,) = [*out.glob("model.safetensors"), *out.glob("adapter_model.safetensors")]
        weights[kind] = load_file(file)
    states = [int(line.split()[1]) for line in outputs["ours"].splitlines() if line.startswith("ENGINE")]
    assert sum(count > 0 for count in states) == trained
    assert sum(count == 0 for count in states) == frozen, "a model for reference only owns no moments"
    assert "ENGINE" not in outputs["plain"]
    seen = figures(outputs["plain"])
    assert len(seen) > STEPS
    assert figures(outputs["ours"]) == seen
    assert weights["ours"].keys() == weights["plain"].keys()
    different = [key for key, value in weights["plain"].items() if not torch.equal(weights["ours"][key], value)]
    assert different == []
