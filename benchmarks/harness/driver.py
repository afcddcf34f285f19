"""Runs all jobs: interleaved rounds, a process each, nothing that one of them does ends the run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from slideformer_backend.benchmarks.harness.memory import available
from slideformer_backend.benchmarks.harness.report import machine
from slideformer_backend.benchmarks.harness.spec import Job, Result, result_from_dict, result_to_dict

KEEP_FREE = 3 << 30
"""Bytes of host memory; less, and the machine may stop everything."""
VERIFY_TIMEOUT = 300.0
CHECK_TIME = 25.0
"""Seconds of the budget kept for the check of each of our contenders."""
_POLL = 0.1


@dataclass(kw_only=True)
class Options:
    """How a run goes.

    Attributes:
        out: folder of the run's files; ``results.jsonl`` grows by a line per result, so a crash loses little.
        rounds: how often every job runs, in the same order each time.
        budget: seconds after which no job is started any more (None: no limit).
        previous: results of an earlier run on the same machine; what succeeded there is not run again.
        traces: keep our traces, in ``traces.zip``.
        keep_free: bytes of host memory; a process that leaves less to the machine is stopped.
        say: takes progress lines.
    """

    out: Path
    rounds: int = 1
    budget: float | None = None
    previous: Sequence[Result] = ()
    traces: bool = True
    keep_free: int = KEEP_FREE
    say: Callable[[str], None] = print


@dataclass
class Run:
    """What a run has found so far, and on which machine. ``limits`` is empty, and ``limits_error`` says why, where they
    were not measured."""

    results: list[Result] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)
    limits_error: str = ""


class _Pending(NamedTuple):
    """A job of ours whose results are held back until ``seen`` has been compared with plain PyTorch."""

    job: Job
    seen: dict[str, Any]
    results: list[Result]


class Driver:
    """Runs jobs one after the other and collects their results."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._started = time.monotonic()
        self._scratch = tempfile.TemporaryDirectory(prefix="slideformer-bench-")
        self._folder = Path(self._scratch.name)
        self._traces = self._folder / "traces"
        self._count = 0
        self.run = Run()
        options.out.mkdir(parents=True, exist_ok=True)
        self._lines = options.out / "results.jsonl"
        self._log = options.out / "log.txt"

    def measure_limits(self, device: str, *, quick: bool) -> None:
        """The machine's limits, in a process of their own."""
        output, error = self._process("limits", {"device": device, "quick": quick}, 180.0, "limits of the machine")
        self.run.limits, self.run.limits_error = dict(output or {}), error
        if not error:
            self._append({"limits": self.run.limits})

    def run_all(self, jobs: Sequence[Job]) -> Run:
        """All jobs, round by round; then the checks; then every job of ours that failed its check is refused."""
        for number in range(self._options.rounds):
            pending: list[_Pending] = []
            for job in jobs:
                results, seen = self._one(job, number, reserve=CHECK_TIME * len(pending))
                if seen is not None:
                    pending.append(_Pending(job, seen, results))
                else:
                    self._note(results)
                self.run.results += results
            self._verify(pending)
            for waiting in pending:
                self._note(waiting.results)
        self._scratch.cleanup()
        self.run.machine = machine()  # now: it takes memory of the GPU
        self._append({"machine": self.run.machine})
        return self.run

    def _note(self, results: Sequence[Result]) -> None:
        for result in results:
            self._append({"result": result_to_dict(result)})

    def _one(self, job: Job, number: int, *, reserve: float) -> tuple[list[Result], dict[str, Any] | None]:
        earlier = self._earlier(job, number)
        if earlier is not None:
            self._options.say(f"  {job.name}: from the earlier run")
            return earlier, None
        left = self._left() - reserve
        if left < min(job.timeout, 60.0):
            return _failed(job, number, "not run: the time given for the run is over"), None
        traced = self._options.traces and job.contender == "ours" and number == 0
        trace = str(self._traces) if traced else None
        given = {"job": job.to_json(), "device": job.device, "threads": job.threads, "trace": trace}
        output, error = self._process("time", given, min(job.timeout, left), job.name)
        self._keep_traces()
        if error:
            return _failed(job, number, error), None
        results = [dataclasses.replace(result_from_dict(item), round=number) for item in (output or {})["results"]]
        self._options.say(f"    {'; '.join(f'{r.load.clip}: {r.rate:,.0f} tokens/s' for r in results)}")
        if job.contender != "ours":
            return results, None
        seen = (output or {})["observed"]
        if seen is None and job.check_layers:
            output, error = self._process("observe", given, job.timeout, f"check of {job.name}")
            seen = (output or {}).get("observed")
            if error:
                return _refuse(results, f"the check failed: {error}"), None
        if seen is None:
            return _refuse(results, "not checked against plain PyTorch"), None
        return results, seen

    def _keep_traces(self) -> None:
        """One archive holds all traces of a run."""
        for path in sorted(self._traces.glob("*.json.gz")):
            with zipfile.ZipFile(self._options.out / "traces.zip", "a") as archive:
                archive.write(path, path.name)
            path.unlink()

    def _verify(self, pending: Sequence[_Pending]) -> None:
        """Compare what our contenders saw with plain PyTorch; one process for those that share a model."""
        groups: dict[tuple[str, int | None, str], list[_Pending]] = {}
        for item in pending:
            groups.setdefault((item.job.shape, item.job.check_layers, item.job.kernels), []).append(item)
        for (shape, layers, kernels), members in groups.items():
            job = members[0].job
            items = [{"job": item.job.to_json(), "seen": item.seen} for item in members]
            given = {"device": job.device, "threads": job.threads, "kernels": kernels, "items": items}
            name = f"plain PyTorch, to check {len(members)} of ours ({shape})"
            output, error = self._process("verify", given, VERIFY_TIMEOUT, name)
            verdicts = output["verdicts"] if output is not None else [error] * len(members)
            for item, difference in zip(members, verdicts, strict=True):
                if difference:
                    _refuse(item.results, f"{'the check failed' if error else 'not exact'}: {difference}")
                    self._options.say(f"    REFUSED {item.job.name}: {difference}")
                for result in item.results:
                    result.checked = "" if difference else _checked(layers)

    def _earlier(self, job: Job, number: int) -> list[Result] | None:
        """Results of the job in the earlier run, if it has all of them and they are good."""
        found = []
        for load in job.loads:
            same = [
                r
                for r in self._options.previous
                if (r.contender, r.shape, r.label, r.load, r.round)
                == (job.contender, job.shape, job.label, load, number)
                and not r.error
            ]
            if not same:
                return None
            found.append(dataclasses.replace(same[-1], earlier=True))
        return found

    def _process(
        self, what: str, given: Mapping[str, Any], timeout: float, name: str
    ) -> tuple[dict[str, Any] | None, str]:
        """Run a worker. Its output and an empty error, or None and what went wrong."""
        self._count += 1
        source, target = self._folder / f"{self._count}-in.json", self._folder / f"{self._count}-out.json"
        source.write_text(json.dumps(given))
        self._options.say(f"[{time.monotonic() - self._started:4.0f} s] {name}")
        module = "slideformer_backend.benchmarks.harness.worker"
        log = self._folder / "log.txt"
        with log.open("w") as stream:
            child = subprocess.Popen(
                [sys.executable, "-m", module, what, str(source), str(target)],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        problem = _watch(child, timeout, self._options.keep_free)
        text = log.read_text(errors="replace")
        with self._log.open("a") as stream:
            stream.write(f"==== {name}\n{text[-20000:]}\n")
        if not problem and child.returncode == 0 and target.exists():
            return json.loads(target.read_text()), ""
        return None, problem or _last_words(text, child.returncode)

    def _environment(self) -> dict[str, str]:
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLIDEFORMER_", "ACCELERATE_"))
        }
        # extensions that a peer compiles: once per run, where the environment names no folder to keep them, so that no
        # lock of a killed process is ever met again
        extensions = {"TORCH_EXTENSIONS_DIR": kept.get("TORCH_EXTENSIONS_DIR", str(self._folder / "extensions"))}
        # without it cuBLAS refuses to be deterministic, as the check asks; every contender has it
        extensions |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        return {**kept, **extensions, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}

    def _left(self) -> float:
        budget = self._options.budget
        return float("inf") if budget is None else budget - (time.monotonic() - self._started)

    def _append(self, line: Mapping[str, Any]) -> None:
        with self._lines.open("a") as stream:
            stream.write(json.dumps(line) + "\n")


def read_lines(path: Path) -> Run:
    """The results and limits in a ``results.jsonl``."""
    run = Run()
    for line in path.read_text().splitlines():
        item = json.loads(line)
        if "limits" in item:
            run.limits = item["limits"]
        elif "machine" in item:
            run.machine = item["machine"]
        else:
            run.results.append(result_from_dict(item["result"]))
    return run


def _checked(layers: int | None) -> str:
    depth = f", at {layers} layers" if layers else ""
    return f"5 steps equal to plain PyTorch in every bit{depth}"


def _watch(child: subprocess.Popen[bytes], timeout: float, keep_free: int) -> str:
    """Wait for a worker; stop it, and say why, when it hangs or takes the machine's last memory."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{child.pid}/oom_score_adj").write_text("1000")  # it, and not this process, if it comes to that
    deadline = time.monotonic() + timeout
    problem = ""
    try:
        while child.poll() is None and not problem:
            time.sleep(_POLL)
            if time.monotonic() > deadline:
                problem = f"stopped after {timeout:.0f} s"
            elif (left := available()) < keep_free:
                problem = f"stopped: it left {left / 2**30:.1f} GiB of host memory to this machine"
    finally:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return problem


def _last_words(text: str, status: int) -> str:
    """The error in a worker's output: its last line that looks like one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if status == -signal.SIGKILL:
        return "killed, probably for want of host memory"
    errors = [line for line in lines if ("Error" in line or "error:" in line) and not line.startswith("File ")]
    return (errors or lines or [f"exit status {status}"])[-1][:600]


def _failed(job: Job, number: int, error: str) -> list[Result]:
    return [
        Result(contender=job.contender, shape=job.shape, label=job.label, load=load, error=error, round=number)
        for load in job.loads
    ]


def _refuse(results: list[Result], reason: str) -> list[Result]:
    """Take the figures away: what is not exact has no speed."""
    for result in results:
        blank = Result(contender=result.contender, shape=result.shape, label=result.label, load=result.load)
        for item in dataclasses.fields(Result):
            setattr(result, item.name, getattr(blank, item.name) if item.name != "round" else result.round)
        result.error = reason
    return results
