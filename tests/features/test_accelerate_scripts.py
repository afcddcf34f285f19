"""Accelerate's own test scripts, unmodified, through the launcher."""

import json
import os
from pathlib import Path

import accelerate
import pytest
import torch

SCRIPTS = Path(accelerate.__file__).parent / "test_utils" / "scripts"
# The script takes its metric from a hub; this one is accuracy, as that one's is.
EVALUATE = """
class Metric:
    def __init__(self):
        self.right = []
    def add_batch(self, predictions, references):
        self.right += (predictions == references).tolist()
    def compute(self):
        right, self.right = self.right, []
        return {"accuracy": sum(right) / len(right)}
def load(*names):
    return Metric()
"""
CARD = """---
configs:
- config_name: mrpc
  data_files:
  - {split: train, path: train.jsonl}
  - {split: validation, path: validation.jsonl}
---
"""
WITNESS = """
import os
if os.environ.get("ACCELERATE_USE_SLIDEFORMER") == "true":
    from slideformer_backend import api
    attach = api.attach
    def say(*arguments, **named):
        engine = attach(*arguments, **named)
        print("ENGINE of", type(engine.model).__name__)
        return engine
    api.attach = say
"""


@pytest.fixture
def launch(warm_python, tmp_path, environ):
    (tmp_path / "sf.yaml").write_text("distributed_type: SLIDEFORMER\nslideformer_config: {status: 'off'}\n")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WITNESS)
    (tmp_path / "site" / "evaluate.py").write_text(EVALUATE)
    path = os.pathsep.join([str(tmp_path / "site"), environ["PYTHONPATH"]])
    variables = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}

    def run(script, *words, managed=True, **more):
        start = ["-m", "accelerate.commands.launch", "--config_file", "sf.yaml"] if managed else []
        return warm_python(*start, SCRIPTS / script, *words, **variables, **more)

    return run


@pytest.mark.parametrize("script", ["test_sync.py", "test_script.py"])
def test_scripts(launch, script):
    """They check themselves; the engines that they met are named."""
    assert "ENGINE of RegressionModel" in launch(script)


@pytest.fixture
def data(tmp_path):
    """A tiny BERT with a tokenizer, and pairs of sentences where the script looks for them."""
    pytest.importorskip("datasets", reason="datasets is part of the extra [bench]")
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    rows = [
        {"sentence1": f"the {a} fox", "sentence2": f"the {b} fox", "label": int(a == b), "idx": n}
        for n, (a, b) in enumerate((a, b) for a in "abcdefgh" for b in "abcdefgh")
    ]
    folder = tmp_path / "nyu-mll" / "glue"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = [row[name] for row in rows for name in ("sentence1", "sentence2")]
    raw.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["[UNK]", "[PAD]"]))
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(tmp_path / "m")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    BertForSequenceClassification(BertConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path / "m")


def test_checkpointing(launch, data, tmp_path):
    """Trains, saves each epoch, and resumes from each; accuracies and rates are those without us."""
    script = "external_deps/test_checkpointing.py"
    states = {}
    for managed in (False, True):
        out = tmp_path / f"out {managed}"
        out.mkdir()
        words = ["--model_name_or_path", "m", "--output_dir", out]
        output = launch(script, *words, managed=managed)
        assert ("ENGINE of BertForSequenceClassification" in output) == managed
        states[managed] = [json.loads((out / f"state_{epoch}.json").read_text()) for epoch in range(2)]
    assert states[True] == states[False]
    for epoch in range(2):
        output = launch(script, *words, "--resume_from_checkpoint", out / f"epoch_{epoch}")
        assert "resumed checkpoint performance" in output
    first = tmp_path / "first"
    first.mkdir()
    launch(script, "--model_name_or_path", "m", "--output_dir", first, "--partial_train_epoch", 1)
    assert json.loads((first / "state_0.json").read_text()) == states[True][0]
