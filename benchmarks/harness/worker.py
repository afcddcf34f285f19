"""One process of a run: a contender, the check of one, or the machine's limits. Started by the driver.

    python -m slideformer_backend.benchmarks.harness.worker (time | verify | limits) INPUT OUTPUT

``INPUT`` and ``OUTPUT`` are JSON files; nothing else is read or written.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slideformer_backend.benchmarks.harness import exact
from slideformer_backend.benchmarks.harness.contenders import Ours, Trainer, make_trainer
from slideformer_backend.benchmarks.harness.limits import BYTES, measure_limits
from slideformer_backend.benchmarks.harness.memory import HostPeak
from slideformer_backend.benchmarks.harness.shapes import SHAPES, make_batches, use_kernels
from slideformer_backend.benchmarks.harness.spec import (
    MAX_NORMS,
    Job,
    Load,
    Result,
    job_from_json,
    result_to_dict,
)
from slideformer_backend.trace import Recorder, Timed, save
from slideformer_backend.trace_summary import summarise

TRACED_STEPS = 3
RECOMPUTE = ("ours", "zero2", "zero3", "torchao", "ceiling")


def run_job(job: Job, device: torch.device, trace: Path | None) -> dict[str, Any]:
    """Time a contender at its loads. The check's observations come along where the shape is checked as it is."""
    use_kernels("liger" if job.kernels == "ours" and job.contender != "ours" else job.kernels)
    _touch(device)
    host = HostPeak(whole_machine=device.type == "cuda")
    trainer = make_trainer(job, device)
    observed = None
    if isinstance(trainer, Ours) and job.check_layers is None:
        observed = exact.observe(trainer, job, device)
    if isinstance(trainer, Ours) and job.kernels == "ours":
        trainer.fuse()
    results = [result_to_dict(_time(job, load, trainer, host, device, trace)) for load in job.loads]
    host.close()
    return {"results": results, "observed": observed}


def observe_only(job: Job, device: torch.device) -> dict[str, Any]:
    """The check's observations of a contender at another depth than it is timed at."""
    use_kernels(job.kernels)
    trainer = make_trainer(job, device, layers=job.check_layers)
    if not isinstance(trainer, Ours):
        raise TypeError(f"{job.contender} is not checked")
    return {"results": [], "observed": exact.observe(trainer, job, device)}


def _time(job: Job, load: Load, trainer: Trainer, host: HostPeak, device: torch.device, trace: Path | None) -> Result:
    shape = SHAPES[job.shape]
    result = Result(contender=job.contender, shape=job.shape, label=job.label, load=load)
    # ZeRO-3 leaves empty tensors in the place of what it took away; it notes how large they were
    result.parameters = sum(getattr(p, "ds_numel", p.numel()) for p in trainer.model.parameters())
    batches = make_batches(shape, (job.warmup + job.steps) * load.accumulate, load.sequences, load.length, device)
    rows = [batches[i : i + load.accumulate] for i in range(0, len(batches), load.accumulate)]
    if job.repeats:
        rows = [rows[0]] * len(rows)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what an earlier load had reserved
    for row in rows[: job.warmup]:
        trainer.step(row, load.clip)
    trainer.finish()
    host.restart()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    losses: list[Tensor] = []
    repairs = [_repairs(trainer)]
    start = time.perf_counter()
    ends = [start]
    for row in rows[job.warmup :]:
        step = trainer.step(row, load.clip)
        losses.append(step.loss)
        if step.norm is not None:
            result.norms.append(step.norm)
        repairs.append(_repairs(trainer))
        ends.append(time.perf_counter())
    trainer.finish()
    result.seconds = (time.perf_counter() - start) / job.steps
    result.step_seconds = [round(b - a, 5) for a, b in itertools.pairwise(ends)]
    result.losses = [float(loss) for loss in losses]
    max_norm = MAX_NORMS[load.clip]
    result.clipped = sum(norm > max_norm for norm in result.norms) if max_norm is not None else 0
    expected = job.steps if load.clip == "active" else 0
    if result.norms and result.clipped != expected:
        result.error = f"clipping took effect in {result.clipped} of {job.steps} steps, expected {expected}"
    result.repairs = repairs[-1] - repairs[0]
    result.repaired = statistics.fmean(b > a for a, b in itertools.pairwise(repairs))
    result.host_bytes = host.bytes()
    if device.type == "cuda":
        result.allocated = torch.cuda.max_memory_allocated(device)
        result.reserved = torch.cuda.max_memory_reserved(device)
    result.recomputed = float(job.contender in RECOMPUTE)
    if isinstance(trainer, Ours):
        _look_inside(result, trainer, load, rows[-TRACED_STEPS:], trace)
    return result


def _look_inside(
    result: Result, trainer: Ours, load: Load, rows: Sequence[Sequence[Tensor]], trace: Path | None
) -> None:
    """A few more steps with a trace, after the clock has stopped."""
    engine = trainer.engine
    recorder = Recorder(engine.device)
    engine.backend.record(recorder)
    for row in [rows[0], *rows]:
        trainer.step(row, load.clip)
    trainer.finish()
    engine.backend.record(None)
    spans = [_with_bytes(span, engine) for span in recorder.timed()]
    summary = summarise(spans)
    seconds, steps = max(summary.seconds, 1e-12), max(1, summary.steps)
    result.busy = {track: busy / seconds for track, busy in summary.busy.items()}
    blocked = "compute" if engine.device.type == "cuda" else "training thread"
    stalls = sum(wait.total for wait in summary.waits if wait.track == blocked)
    result.busy["compute"] = max(0.0, 1.0 - stalls / seconds)
    result.moved = {track: nbytes // steps for track, nbytes in summary.nbytes.items()}
    result.waits = [(wait.track, wait.name, wait.total / seconds) for wait in summary.waits[:8]]
    residency = getattr(engine, "residency", None)
    placement = getattr(residency, "placement", None)
    result.plan = placement.reason if placement is not None else ""
    kept = len(placement.kept_activations) if placement is not None else 0
    result.recomputed = 1.0 - kept / SHAPES[result.shape].layers
    if trace is not None:
        name = f"{result.shape}-{load.batch.replace(' ', '')}-{result.label or 'ours'}-{load.clip}".replace(" ", "-")
        save(spans, trace / f"{name}.json.gz")


def _with_bytes(span: Timed, engine: Any) -> Timed:
    """The memory that an update moves, which its buffers alone do not tell: some are only read, some only written."""
    what, _, unit = span.name.partition(" of ")
    if span.track != "update" or what not in BYTES:
        return span
    elements = {unit.name: unit.layout.state_elements for unit in engine.units}
    return span._replace(nbytes=BYTES[what] * elements.get(unit, 0))


def _repairs(trainer: Trainer) -> int:
    return trainer.engine.report().repairs if isinstance(trainer, Ours) else 0


def _touch(device: torch.device) -> None:
    """What every process of torch pays (CUDA context, libraries) belongs to its base, not to a contender."""
    square = torch.ones(64, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    (square @ square).sum().backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments: Sequence[str]) -> None:
    """See the module."""
    what, source, target = arguments
    given = json.loads(Path(source).read_text())
    if given.get("threads"):
        torch.set_num_threads(given["threads"])
    device = torch.device(given["device"])
    output: Mapping[str, Any]
    if what == "limits":
        output = measure_limits(device, quick=given["quick"])
    elif what == "verify":
        use_kernels(given["kernels"])
        jobs = [(job_from_json(item["job"]), item["seen"]) for item in given["items"]]
        output = {"verdicts": exact.verify(jobs, device)}
    else:
        job = job_from_json(given["job"])
        trace = Path(given["trace"]) if given.get("trace") else None
        output = observe_only(job, device) if what == "observe" else run_job(job, device, trace)
    Path(target).write_text(json.dumps(output))


if __name__ == "__main__":
    main(sys.argv[1:])
