"""README's pages on DeepSpeed and checkpoints: their commands run, one after the other, on a Trainer script."""

import json
import re
import shlex

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoint.test_convert import STAGE_3
from tests.launch.conftest import ROOT

SCRIPT = """
import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        row = (torch.arange(8) + index) % 64
        return {"input_ids": row, "labels": row}


args = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()[0]
config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
trainer = Trainer(model=LlamaForCausalLM(config).to(torch.bfloat16), args=args, train_dataset=Rows())
trainer.train()
print("managed:", type(trainer.accelerator).__name__)
"""
MODULES = {"accelerate": "accelerate.commands.accelerate_cli", "slideformer": "slideformer_backend.cli"}


def commands(section):
    text = (ROOT / "README.md").read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


@pytest.mark.timeout(300)
def test_the_commands_run(python, warm_python, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "ds_config.json").write_text(json.dumps({**STAGE_3, "bf16": {"enabled": True}, "fp16": {}}))
    lines = [*commands("Coming from DeepSpeed"), *commands("Checkpoints")]
    assert [line[:2] for line in lines] == [
        ["slideformer", "convert"],
        ["accelerate", "launch"],
        ["accelerate", "launch"],
        ["slideformer", "export"],
        ["slideformer", "export"],
    ]
    for number, (program, *arguments) in enumerate(lines):
        if program == "accelerate":
            arguments = ["launch", "--cpu", *arguments[1:]]
            arguments += ["--use_cpu", "true", "--report_to", "none"]
            if "--max_steps" not in arguments:
                arguments += ["--max_steps", "1", "--save_strategy", "no"]
        run = python if number == 1 else warm_python  # one launch from nothing
        said = run("-m", MODULES[program], *arguments, OMP_NUM_THREADS="1")
        assert program != "accelerate" or "managed: SlideFormerAccelerator" in said
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "model-fp32", dtype="auto")
    assert plain.dtype == torch.bfloat16
    for one, two in zip(plain.parameters(), wide.parameters(), strict=True):
        assert torch.equal(one, two.bfloat16())
    assert any(not torch.equal(p, p.bfloat16().float()) for p in wide.parameters())
