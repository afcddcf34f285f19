"""``benchmarks/lsp.py``: a method that is cut short still gives its figures; what is not installed is said."""

import json
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from slideformer_backend import api

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    """The modules ``lsp`` and ``lsp_worker``."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import lsp
    import lsp_worker

    others = api.engines()
    with mock.patch.dict(os.environ):  # a worker is a process of its own, and may set what it likes
        yield lsp, lsp_worker
    for engine in api.engines():
        if engine not in others:
            engine.detach()
    for name in ("lsp", "lsp_worker", "train_llama"):
        sys.modules.pop(name, None)


def arguments(lsp, *more):
    options = "--shape tiny --dtype float32 --length 16 --held-out 1 --steps 2 --seconds 60 --threads 1 --rank 16"
    return lsp.parse([*options.split(), "--timeout", "1", "--gbps", "0.1", *more])


def test_a_method_says_what_it_finds_as_it_goes(bench, capsys):
    lsp, worker = bench
    worker.work(arguments(lsp, "--worker", "lsp"))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    progress = [line for line in lines if "done" in line]
    assert [(line.get("step"), line["done"]) for line in progress] == [
        (None, "set-up of model and optimizer"),
        (1, "issued"),
        (2, "issued"),
    ]
    assert lines[:2] == [progress[0], {"began": True, "rate": 2e-4}]
    assert [line["steps"] for line in lines if "held_out" in line] == [0, 2]
    assert lines[-1]["matrices"] == 28
    assert lines[-1]["layers_on_device"] == 4


def test_a_method_that_is_not_installed(bench, capsys, monkeypatch):
    lsp, worker = bench
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    worker.work(arguments(lsp, "--worker", "zero"))
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert line == {"error": "not installed: deepspeed"}
    assert lsp.row("zero", [line]) == "| zero | - | - | not installed: deepspeed |"


def test_moments_of_zero_offload_are_those_of_a_first_step(bench):
    """Set-up allocates them: training is the same, bit for bit."""

    def train(allocates):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 12))
        optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.0)
        if allocates:
            bench[1]._allocate_moments(optimizer)
            held = optimizer.state[parameter]["exp_avg"]
        for number in range(3):
            parameter.grad = torch.sin(parameter.detach() + number)
            optimizer.step()
        assert not allocates or optimizer.state[parameter]["exp_avg"] is held
        return parameter.detach(), optimizer.state[parameter]

    (right, states), (found, ahead) = train(False), train(True)
    assert torch.equal(found, right)
    assert states.keys() == ahead.keys()
    assert all(torch.equal(ahead[name], states[name]) for name in states)


def test_what_zero_offload_copies(bench):
    """fp32 gradients down, bf16 weights up."""
    assert bench[1].zero_wire_seconds(10**9, torch.bfloat16, 2e9) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("began", "words"), [(True, "3.5000 at 4 s, step 2; stopped: out of time"), (False, "stopped")]
)
def test_a_method_that_hangs_is_stopped_and_its_figures_stay(bench, monkeypatch, tmp_path, began, words):
    lsp, _ = bench
    script = tmp_path / "python"
    first = 'echo \'{"began": true, "rate": 0.5}\'\necho \'{"seconds": 4.0, "steps": 2, "held_out": 3.5}\'\n'
    script.write_text("#!/bin/sh\n" + (first if began else "") + "echo words\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(lsp, "GRACE_SECONDS", 0.2)
    if not began:
        monkeypatch.setattr(lsp, "SETUP_SECONDS", 0.2)
    results = {"lsp": []}
    lsp.run(arguments(lsp, "--seconds", "0.1", "--out", str(tmp_path)), "lsp", results)
    assert words in (tmp_path / "report.md").read_text()
    lines = (tmp_path / "lsp.jsonl").read_text().splitlines()
    assert len(lines) == (3 if began else 1)
    assert [json.loads(line) for line in lines] == results["lsp"]
