"""The commands of the README's section "Recipes", run as they stand there, with limits appended."""

import os
import re
import shlex
from pathlib import Path

import pytest

from tests.features.test_recipe_flag import RECIPE
from tests.features.test_trl_scripts import WITNESS, folder

__all__ = ["folder"]

pytest.importorskip("trl", reason="trl is part of the extra [bench]")
README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
SECTION = re.search(r"^## Recipes\n(.*?)^## ", README, re.M | re.S)[1]
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", SECTION, re.S) for line in block.splitlines() if line]
LOOP = """
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

accelerator = Accelerator(cpu=True)
model = AutoModelForCausalLM.from_pretrained("model")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(2):
    ids = torch.arange(8)[None] + step
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
LIMITS = ["--max_steps", "2", "--use_cpu", "true", "--report_to", "none", "--save_strategy", "no"]


def test_there_are_four():
    assert len(COMMANDS) == 4


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: re.sub(r"\W+", " ", command)[:60])
def test_command(folder, warm_python, environ, command):
    (folder / "slideformer.yaml").write_text("distributed_type: SLIDEFORMER\nslideformer_config: {status: 'off'}\n")
    (folder / "loop.py").write_text(LOOP)
    (folder / "trainer.py").write_text(RECIPE)
    (folder / "witness" / "sitecustomize.py").write_text(
        WITNESS.replace('if os.environ.get("ACCELERATE_USE_SLIDEFORMER") == "true":', "if True:")
    )
    program, *words = shlex.split(command)
    start = {"python": [], "accelerate": ["-m", "accelerate.commands.accelerate_cli"]}[program]
    limits = [] if "loop.py" in words else LIMITS
    path = os.pathsep.join([str(folder / "witness"), environ["PYTHONPATH"]])
    cache = str(folder / "cache")
    output = warm_python(*start, *words, *limits, PYTHONPATH=path, OMP_NUM_THREADS="1", HF_DATASETS_CACHE=cache)
    assert any(int(line.split()[1]) > 0 for line in output.splitlines() if line.startswith("ENGINE")), output


@pytest.fixture(autouse=True)
def inside(folder, tmp_path):
    """The commands name their files relative to the folder that they run in."""
    for name in ("model", "data", "slideformer.yaml", "loop.py", "trainer.py"):
        (tmp_path / name).symlink_to(folder / name)
