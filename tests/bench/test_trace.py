"""Traces: what is recorded, how it reads back, and that nothing is recorded without one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slideformer_backend.api import attach
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.engine.residency import Residency
from slideformer_backend.trace import Recorder, Timed, load, save
from slideformer_backend.trace_summary import describe, summarise

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = torch.nn.Linear(8, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def train(config=None, steps=3, recorder=None):
    torch.manual_seed(0)
    model = Net().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = attach(model, config or SlideFormerConfig(), device=CPU)
    engine.bind(optimizer)
    if recorder is not None:
        engine.backend.record(recorder)
    losses = []
    for _ in range(steps):
        loss = model(torch.ones(2, 8, dtype=torch.bfloat16))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    engine.detach()
    return losses


def test_a_trace_holds_every_unit_on_every_track(tmp_path):
    path = tmp_path / "new" / "trace.json"
    losses = train(SlideFormerConfig(trace=str(path)))
    assert losses == train()  # tracing changes nothing
    spans = load(path)
    for number in range(3):
        for what in ("forward", "recompute", "backward"):
            found = [s for s in spans if s.name == f"{what} of blocks.{number}"]
            assert len(found) == 3
            assert {s.track for s in found} == {"compute"}
            assert all(s.end > s.start for s in found)
        assert any(s.track == "d2h" and f"blocks.{number}" in s.name and s.nbytes > 0 for s in spans)
        assert any(s.track == "update" and f"blocks.{number}" in s.name and s.kind == "work" for s in spans)
    assert sum(s.kind == "step" for s in spans) == 3
    inner = next(s for s in spans if s.name == "recompute of blocks.1")
    outer = next(s for s in spans if s.name == "backward of blocks.1")
    assert outer.start <= inner.start <= inner.end <= outer.end


def test_a_viewer_can_read_it(tmp_path):
    path = tmp_path / "trace.json"
    train(SlideFormerConfig(trace=str(path)))
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "i"}
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names[0] == "compute"
    assert all(event["tid"] in names and event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_a_recorder_can_come_and_go():
    recorder = Recorder(CPU)
    train(recorder=recorder)
    spans = recorder.timed()
    assert sum(span.kind == "step" for span in spans) == 3
    assert recorder.write() is None  # it has no path


def test_every_recompute_is_observed(monkeypatch):
    """torch leaves a recompute by an exception, early; what the planner learns from it must not depend on that."""
    seen = []
    monkeypatch.setattr(Residency, "observe_recompute", lambda self, unit, nbytes: seen.append(unit.name))
    train(steps=1)
    assert seen == ["blocks.2", "blocks.1", "blocks.0"]


def test_two_engines_do_not_write_one_file(tmp_path):
    path = tmp_path / "trace.json"
    train(SlideFormerConfig(trace=str(path)))
    train(SlideFormerConfig(trace=str(path)))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trace-2.json", "trace.json"]


def test_without_a_trace_nothing_is_recorded(monkeypatch):
    def never(*_, **__):
        raise AssertionError("recorded")

    for name in ("__init__", "mark", "span", "begin", "end", "step"):
        monkeypatch.setattr(Recorder, name, never)
    train()


SPANS = [
    Timed("training thread", "optimizer.step", "step", 1.0, 1.0, 0),
    Timed("compute", "forward of a", "work", 0.5, 2.0, 0),  # half a second of it before the first step
    Timed("compute", "recompute of a", "work", 1.5, 2.0, 0),  # inside another one
    Timed("h2d", "weights of a", "work", 1.0, 1.5, 100),
    Timed("compute", "compute after weights loaded", "wait", 2.0, 2.5, 0),
    Timed("compute", "compute after weights loaded", "wait", 2.5, 2.6, 0),
    Timed("training thread", "optimizer.step", "step", 3.0, 3.0, 0),
    Timed("update", "advance of a", "work", 3.5, 4.0, 7),  # after the last step
]


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_what_is_saved_is_loaded(tmp_path, name):
    save(SPANS, tmp_path / name)
    loaded = load(tmp_path / name)
    assert sorted(loaded) == sorted(SPANS)


def test_the_summary_counts_whole_steps():
    summary = summarise(SPANS)
    assert summary.seconds == pytest.approx(2.0)
    assert summary.steps == 1
    assert summary.busy == pytest.approx({"compute": 1.0, "h2d": 0.5})
    assert summary.nbytes["h2d"] == 100
    (wait,) = summary.waits
    assert (wait.name, wait.times) == ("compute after weights loaded", 2)
    assert wait.total == pytest.approx(0.6)
    assert wait.longest == pytest.approx(0.5)
    text = describe(SPANS)
    assert "compute           50.0%" in text
    assert "500.00 ms  compute after weights loaded" in text


def test_the_summary_of_nothing():
    assert summarise([]).seconds == 0.0
    assert "busy" in describe([])


def test_the_command(tmp_path):
    (tmp_path / "script.py").write_text(
        "import sys\nsys.path.insert(0, sys.argv[1])\nimport test_trace\n"
        "from slideformer_backend.config import SlideFormerConfig\ntest_trace.train(SlideFormerConfig.from_env())\n"
    )

    def run(*words):
        command = [sys.executable, "-m", "slideformer_backend.cli", "trace", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    file = tmp_path / "out.json.gz"
    done = run("-o", str(file), str(tmp_path / "script.py"), str(Path(__file__).parent))
    assert done.returncode == 0, done.stderr
    assert "busy:" in done.stderr
    assert "busy:" in run("--show", str(file)).stdout
    (tmp_path / "bad.json").write_text("{}")
    bad = run("--show", str(tmp_path / "bad.json"))
    assert bad.returncode == 2
    assert "holds no trace" in bad.stderr
    assert run().returncode == 2


def test_what_the_command_says_without_a_trace(tmp_path):
    script, file = tmp_path / "script.py", tmp_path / "out.json"
    script.write_text("import sys\nsys.exit(3)\n")

    def run(*words):
        command = [sys.executable, "-m", "slideformer_backend.cli", "trace", *map(str, words)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stderr.splitlines()

    nothing = "[slideformer] no trace: no model was prepared, or none was trained"
    assert run("-o", file, script) == (3, [nothing])
    file.write_text("an earlier one")
    assert run("-o", file, script) == (3, [nothing])
    code, (line,) = run("-o", tmp_path / "none" / "out.json", script)
    assert (code, (tmp_path / "none").exists()) == (2, False)
    assert "out.json cannot be written: there is no folder" in line
    code, (line,) = run("--show", tmp_path / "none.json")
    assert code == 2
    assert line.startswith("slideformer trace: ")
    assert "none.json" in line
