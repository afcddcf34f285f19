"""The benchmark harness: what it runs, how it survives contenders, what it refuses, how it reports."""

import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console

from slideformer_backend.benchmarks.harness import driver, exact
from slideformer_backend.benchmarks.harness.command import main, write
from slideformer_backend.benchmarks.harness.contenders import Ours
from slideformer_backend.benchmarks.harness.driver import Driver, Options, read_lines
from slideformer_backend.benchmarks.harness.limits import measure_limits
from slideformer_backend.benchmarks.harness.reach import ROWS, TOY, Goal, Row, jobs_of
from slideformer_backend.benchmarks.harness.report import machine, make_report, step_limits
from slideformer_backend.benchmarks.harness.shapes import SHAPES, make_model
from slideformer_backend.benchmarks.harness.spec import (
    Job,
    Load,
    Result,
    job_from_json,
    result_from_dict,
    result_to_dict,
)

CPU = torch.device("cpu")
LOAD = Load(sequences=2, length=16, clip="quiet")
COMMON = {"device": "cpu", "kernels": "none", "steps": 2, "warmup": 1, "threads": 1}


class TestShapes:
    def test_parameters_are_those_of_the_model(self):
        shape = SHAPES["toy"]
        assert sum(p.numel() for p in make_model(shape, CPU).parameters()) == shape.parameters
        deeper = shape.with_layers(6)
        assert deeper.parameters - shape.parameters == 2 * shape.layer_parameters

    @pytest.mark.parametrize(("name", "billions"), [("1b", 1.236), ("3b", 3.213), ("8b", 8.030), ("14b", 14.8)])
    def test_sizes(self, name, billions):
        assert SHAPES[name].parameters / 1e9 == pytest.approx(billions, rel=0.05 if name == "14b" else 1e-3)

    def test_operations(self):
        shape = dataclasses.replace(SHAPES["toy"], vocabulary=0)
        forward = shape.layers * (2 * shape.layer_parameters + 2 * shape.hidden * 32)
        assert shape.operations(32, recomputed=0) == 3 * forward
        last = shape.layers * 2 * shape.hidden * shape.intermediate  # the recompute ends before its output
        assert shape.operations(32, recomputed=0.5) == 3.5 * forward - 0.5 * last


class TestJobs:
    def test_peers_are_shared_and_ours_is_not(self):
        jobs = jobs_of(ROWS, [], {}, {})
        assert len({job.key for job in jobs}) == len(jobs)
        ceilings = [job for job in jobs if job.contender == "ceiling" and job.shape == "3b"]
        assert [[load.sequences for load in job.loads] for job in ceilings] == [[8, 32], [2]]
        assert sum(job.contender == "ours" for job in jobs) == len(ROWS)
        assert all(load.clip == "off" for job in jobs if job.contender == "torchao" for load in job.loads)

    def test_filters_and_overrides(self):
        jobs = jobs_of(ROWS[:1], [], {"steps": 9}, {}, peer_steps=2)
        assert {job.steps for job in jobs if job.contender == "ours"} == {9}
        assert {job.contender: job.steps for job in jobs if job.contender != "ours"} == {
            "ceiling": 9, "zero2": 2, "zero3": 2, "torchao": 2,
        }  # fmt: skip
        jobs = jobs_of(ROWS[:1], [], {"warmup": 5}, {}, peer_warmup=1)
        assert {job.contender: job.warmup for job in jobs} == {
            "ours": 5, "ceiling": 1, "zero2": 1, "zero3": 1, "torchao": 1,
        }  # fmt: skip
        jobs = jobs_of(ROWS[:1], ["ours"], {"steps": 3}, {"gpu_memory": "9GiB"})
        assert [(job.contender, job.steps, job.config) for job in jobs] == [("ours", 3, {"gpu_memory": "9GiB"})]
        rows = [row for row in ROWS if row.name in ("3b-32-24g", "3b-2x16-24g", "3b-32-immediate")]
        jobs = jobs_of(rows, ["ours"], {}, {}, clips=["active"])
        assert [[load.clip for load in job.loads] for job in jobs] == [["active"]]  # the other rows have none of it

    def test_records_survive_json(self):
        for job in jobs_of((*ROWS, *TOY), [], {}, {}):
            assert job_from_json(job.to_json()) == job
        result = Result(contender="ours", shape="toy", label="x", load=LOAD, waits=[("h2d", "a", 0.5)], seconds=2.0)
        assert result_from_dict(json.loads(json.dumps(result_to_dict(result)))) == result
        assert result.rate == 16.0

    def test_an_unknown_row_is_named(self):
        with pytest.raises(SystemExit, match="no row '3b-31'"):
            main(["--rows", "3b-31"])

    @pytest.mark.parametrize(("option", "what"), [("--contenders", "contender 'zero4'"), ("--clips", "clip 'zero4'")])
    def test_an_unknown_name_is_refused_before_anything_runs(self, option, what):
        with pytest.raises(SystemExit, match=f"no {what}; there are "):
            main(["--rows", "toy", "--no-limits", option, "off,zero4" if option == "--clips" else "ours,zero4"])


def job(**changes):
    return Job(**{**COMMON, "contender": "ours", "shape": "toy", "loads": (LOAD,), **changes})


class TestDriver:
    @pytest.fixture
    def run(self, tmp_path):
        def run(*jobs, **options):
            made = Driver(Options(out=tmp_path, say=lambda line: None, **options))
            return made.run_all(jobs).results

        return run

    def test_what_fails_is_reported_and_the_rest_goes_on(self, run, tmp_path):
        bad = job(config={"prefetsh": 3})
        results = run(bad, job(contender="ceiling"))
        assert "did you mean 'prefetch'" in results[0].error
        assert results[0].rate == 0
        assert results[1].rate > 0
        assert len(results[1].losses) == 2
        assert [bool(r.error) for r in read_lines(tmp_path / "results.jsonl").results] == [True, False]
        assert read_lines(tmp_path / "results.jsonl").machine == machine()
        again = run(job(contender="ceiling"), previous=results)
        assert again[0].earlier
        assert again[0].seconds == results[1].seconds

    def test_what_hangs_is_stopped(self, run):
        assert run(job(timeout=0.3))[0].error == "stopped after 0 s"

    def test_what_eats_the_memory_is_stopped(self, run, monkeypatch):
        monkeypatch.setattr(driver, "available", lambda: 2 << 30)
        assert run(job())[0].error == "stopped: it left 2.0 GiB of host memory to this machine"
        assert run(job(timeout=0.3), keep_free=1 << 30)[0].error == "stopped after 0 s"

    def test_a_spent_budget(self, run):
        assert "time given" in run(job(), budget=1.0)[0].error

    def test_what_was_not_checked_is_refused(self, run, monkeypatch):
        good = result_to_dict(Result(contender="ours", shape="toy", label="", load=LOAD, seconds=1.0))
        outputs = {"time": {"results": [good], "observed": None}}
        monkeypatch.setattr(Driver, "_process", lambda self, what, *_: (outputs[what], ""))
        assert run(job(check_layers=0))[0].error == "not checked against plain PyTorch"

    def test_what_is_not_exact_is_refused(self, run, monkeypatch):
        good = result_to_dict(Result(contender="ours", shape="toy", label="", load=LOAD, seconds=1.0))
        outputs = {"time": {"results": [good], "observed": {}}, "verify": {"verdicts": ["the loss is wrong"]}}
        monkeypatch.setattr(Driver, "_process", lambda self, what, *_: (outputs[what], ""))
        (result,) = run(job())
        assert (result.error, result.seconds, result.checked) == ("not exact: the loss is wrong", 0.0, "")
        outputs["verify"] = {"verdicts": [""]}
        assert "equal to plain PyTorch" in run(job())[0].checked


@pytest.fixture(scope="module", params=["exact", "immediate"])
def seen(request):
    clips = ("quiet", "active") if request.param == "exact" else ("off",)
    loads = tuple(dataclasses.replace(LOAD, clip=clip) for clip in clips)
    ours = job(loads=loads, config={"update": request.param}, learning_rate=1e-3)
    trainer = Ours(make_model(SHAPES["toy"], CPU), ours, CPU)
    seen = exact.observe(trainer, ours, CPU)
    trainer.engine.detach()
    return ours, seen


class TestExactness:
    def test_ours_is_exact(self, seen):
        assert exact.verify([seen], CPU) == [""]
        assert len(set(seen[1]["losses"])) == exact.STEPS  # it trains

    def test_one_wrong_bit_is_found(self, seen):
        ours, good = seen
        name = "model.layers.1.mlp.up_proj.weight"
        changed = [
            {**good, "losses": [*good["losses"][:-1], good["losses"][-1] + 1e-6]},
            {**good, "weights": {**good["weights"], name: good["weights"][name] ^ 1}},
            {**good, "weights": {n: d for n, d in good["weights"].items() if n != name}},
        ]
        if good["gradients"]:
            changed.append({**good, "gradients": {**good["gradients"], name: 0}})
        verdicts = exact.verify([(ours, other) for other in changed], CPU)
        assert "loss of step 5" in verdicts[0]
        assert all(name in verdict for verdict in verdicts[1:])

    def test_digests_see_bits_and_places(self):
        one = torch.arange(1000, dtype=torch.float32).bfloat16()
        assert exact.digest(one, CPU) == exact.digest(one.clone().view(10, 100), CPU)
        assert exact.digest(one, CPU) != exact.digest(one.flip(0), CPU)
        zeros = torch.zeros(10)
        assert exact.digest(zeros, CPU) != exact.digest(-zeros, CPU)


@pytest.mark.timeout(120)
def test_limits():
    limits = measure_limits(CPU, quick=True)
    assert {"gemm", "host_mix", "advance", "peek", "update", "threads"} <= limits.keys()
    assert all(value > 0 for value in limits.values())


ROW = Row(
    name="r",
    shape="3b",
    sequences=8,
    goals=(Goal("quiet", "of ceiling", 0.9), Goal("quiet", "of limit", 1.1, True), Goal("active", "of zero2", 2.0)),
)


def results():
    load = ROW.load("quiet")
    common = {"shape": "3b", "label": "", "parameters": 100}
    ours = Result(contender="ours", load=load, seconds=1.0, recomputed=1.0, checked="yes", **common)
    ours.moved = {"h2d": 200, "update": 90}
    ours.host_bytes = 1600
    slow = dataclasses.replace(ours, seconds=3.0, round=1)
    ceiling = Result(contender="ceiling", load=ROW.load("off"), seconds=0.95, recomputed=1.0, **common)
    zero = Result(contender="zero2", load=ROW.load("active"), error="it hangs", **common)
    return [ours, slow, dataclasses.replace(ours, seconds=2.0, round=2), ceiling, zero]


LIMITS = {"gemm": 1e15, "h2d": 100.0, "h2d_both": 80.0, "host_mix": 100.0, "host_mix_dma": 60.0}


class TestReport:
    def test_medians_limits_and_verdicts(self):
        report = make_report([ROW], results(), LIMITS)
        assert [result.seconds for result in report.results] == [2.0, 0.95, 0.0]
        ours = report.results[0]
        assert report.spread[id(ours)] == (ours.load.tokens / 3.0, ours.load.tokens / 1.0)
        limits = step_limits(ours, report.results, LIMITS)
        assert {name: limits[name] for name in ("compute", "h2d", "update")} == {
            "compute": 0.95,
            "h2d": 2.5,
            "update": 1.5,
        }
        assert report.ratio(ours) == pytest.approx(0.8)
        assert [verdict.reached for verdict in report.verdicts] == [False, True, None]

    def test_a_report_of_runs_elsewhere(self, tmp_path):
        """Names the machine they were on; what one took over from the other counts once."""
        ceiling = Result(contender="ceiling", shape="toy", label="", load=LOAD, seconds=2.0)
        for number, result in enumerate((ceiling, dataclasses.replace(ceiling, earlier=True))):
            lines = ({"result": result_to_dict(result)}, {"machine": {"gpu": "another"}})
            (tmp_path / f"{number}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        files = [word for number in range(2) for word in ("--resume", str(tmp_path / f"{number}.jsonl"))]
        main(["--report-only", "--rows", "toy", "--out", str(tmp_path / "out"), *files])
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert report["machine"] == {"gpu": "another"}
        assert [(item["contender"], item["earlier"]) for item in report["results"]] == [("ceiling", False)]
        assert "(" not in (tmp_path / "out" / "report.md").read_text().split("| ceiling |")[1].split("|")[1]

    def test_files_and_terminal(self, tmp_path):
        stream = io.StringIO()
        write([ROW], results(), LIMITS, tmp_path, Console(file=stream, width=200))
        text = stream.getvalue()
        assert "no result: zero2" in text
        assert "it hangs" in text
        assert "MISSED       r quiet: ≥ 0.9x ceiling (0.475)" in text
        page = (tmp_path / "report.md").read_text()
        assert "## 3b, 8 sequences of 1024" in page
        assert "no result: it hangs" in page
        content = json.loads((tmp_path / "report.json").read_text())
        assert content["results"][0]["tokens_per_second"] == 4096.0
        assert content["goals"][1] == {
            "row": "r",
            "clip": "quiet",
            "asked": "≤ 1.1x limit",
            "found": pytest.approx(0.8),
            "reached": True,
        }
        assert content["machine"]["torch"] == torch.__version__
        pytest.importorskip("matplotlib", reason="matplotlib is part of the extra [bench]")
        assert (tmp_path / "report.png").stat().st_size > 5000
