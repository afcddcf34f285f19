"""``--slideformer slideformer.yaml`` in a recipe's command line."""

import json

import pytest
import torch
from transformers import HfArgumentParser, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from slideformer_backend import ConfigError, api
from slideformer_backend.integrations.session import session
from tests.features.test_trainer import Rows, llama, padded

RECIPE = """
import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 64}
rows = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(8)]
trainer = Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), args, train_dataset=rows)
trainer.train()
import sys
api = sys.modules.get("slideformer_backend.api")
print("UPDATE", [engine.config.update for engine in api.engines()] if api else None)
"""
WORDS = ["--output_dir", "out", "--use_cpu", "true", "--max_steps", 2, "--report_to", "none", "--save_strategy", "no"]


@pytest.fixture
def config(tmp_path):
    def write(text, name="sf.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_a_recipe_of_its_own_process(python, warm_python, tmp_path):
    (tmp_path / "train.py").write_text(RECIPE)
    (tmp_path / "sf.yaml").write_text("update: immediate\nstatus: 'off'\n")
    assert "UPDATE ['immediate']" in python("train.py", *WORDS, "--slideformer", "sf.yaml", "--max_grad_norm", 0)
    assert "UPDATE ['exact']" in warm_python("train.py", *WORDS, "--slideformer")
    assert "UPDATE None" in warm_python("train.py", *WORDS)


@pytest.mark.parametrize(
    "text",
    [
        "update: immediate\n",
        json.dumps({"update": "immediate"}),
        "distributed_type: SLIDEFORMER\nslideformer_config: {update: immediate}\n",
        "distributed_type: 'NO'\nslideformer_config: {update: immediate}\n",
    ],
)
def test_kinds_of_file(clean, config, text):
    words = ["--output_dir", "out", "--slideformer", config(text)]
    parsed = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    assert [type(item) for item in parsed] == [TrainingArguments]
    assert session.config().update == "immediate"


def test_defaults_and_absence(clean):
    HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--output_dir", "out"])
    assert session.config() is None
    HfArgumentParser((Seq2SeqTrainingArguments,)).parse_args_into_dataclasses(["--slideformer", "--output_dir", "out"])
    assert session.config().update == "exact"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("updte: exact\n", "updte.*update"),
        ("update: sometimes\n", "update.*exact, immediate"),
        ("- a list\n", "not a mapping"),
        ("distributed_type: FSDP\n", "another strategy.*FSDP"),
    ],
)
def test_mistakes_are_named_on_the_command_line(clean, config, capsys, text, message):
    parser = HfArgumentParser(TrainingArguments)
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses(["--output_dir", "out", "--slideformer", config(text)])
    import re

    assert re.search(message, capsys.readouterr().err.replace("\n", " "))
    assert session.config() is None


def test_a_missing_file(clean):
    with pytest.raises(ConfigError, match=r"cannot be read.*nowhere\.yaml"):
        TrainingArguments(output_dir="out", slideformer="nowhere.yaml")


def test_recipes_in_files(clean, config):
    recipe = config("output_dir: out\nslideformer: {update: immediate}\n", "recipe.yaml")
    HfArgumentParser(TrainingArguments).parse_yaml_file(recipe)
    assert session.config().update == "immediate"
    recipe = config(json.dumps({"output_dir": "out", "slideformer": {"update": "exact"}}), "recipe.json")
    HfArgumentParser(TrainingArguments).parse_json_file(recipe)
    assert session.config().update == "exact"


def test_parsers_of_other_things_are_left_alone(clean):
    import dataclasses

    @dataclasses.dataclass
    class Own:
        slide: int = 1

    parser = HfArgumentParser(Own)
    assert "--slideformer" not in parser._option_string_actions
    (_, rest) = parser.parse_args_into_dataclasses(["--slideformer", "x"], return_remaining_strings=True)
    assert rest == ["--slideformer", "x"]
    assert session.config() is None


def test_in_code(clean, tmp_path):
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", max_steps=2, save_strategy="no", disable_tqdm=True,
        slideformer={"status": "off"},
    )  # fmt: skip
    trainer = Trainer(model=llama(), args=arguments, train_dataset=Rows(), data_collator=padded)
    trainer.train()
    engine = api.engine_of(trainer.model)
    assert engine is not None
    assert not isinstance(trainer.model, torch.nn.DataParallel)
    engine.detach()
    assert "slideformer" not in arguments.to_dict()
    TrainingArguments(output_dir=str(tmp_path))
    assert session.is_active()  # as with deepspeed: recipes make further arguments out of their first ones
    TrainingArguments(output_dir=str(tmp_path), slideformer=False)
    assert not session.is_active()
