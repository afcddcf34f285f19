"""Side by side with ZeRO-Offload: the same toy model on the same tokens learns the same.

DeepSpeed's CPU accelerator runs ZeRO-2 with offload in one process. Losses over 20 steps must agree within the noise of
bf16: what plain PyTorch's losses vary by when the masters start a little off, by less than the bf16 weights show.
"""

import dataclasses
import sys

import pytest
import torch

from slideformer_backend.benchmarks.harness.contenders import Plain
from slideformer_backend.benchmarks.harness.driver import Driver, Options
from slideformer_backend.benchmarks.harness.shapes import SHAPES, make_batches, make_model
from slideformer_backend.benchmarks.harness.spec import Job, Load

from .peer import python_with_deepspeed

STEPS = 20
LOAD = Load(sequences=4, length=32, clip="quiet")
RATE = 1e-3
JOB = Job(
    contender="ours",
    shape="toy",
    loads=(LOAD,),
    kernels="none",
    device="cpu",
    steps=STEPS,
    warmup=0,
    check_layers=SHAPES["toy"].layers,  # checked in a process of its own: the timed one starts from the first step
    threads=1,
    learning_rate=RATE,
    repeats=True,
    timeout=120.0,
)


def plainly(*, seed=None, rate=RATE):
    """Losses of plain PyTorch with fp32 masters; with a ``seed``, these start off by up to half a bf16 step."""
    job = dataclasses.replace(JOB, contender="plain", learning_rate=rate)
    trainer = Plain(make_model(SHAPES["toy"], torch.device("cpu")), job)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for master in trainer.masters:
            master += master * (torch.rand(master.shape, generator=generator) - 0.5) * 2.0**-8
    batch = make_batches(SHAPES["toy"], 1, LOAD.sequences, LOAD.length, torch.device("cpu"))
    return [float(trainer.step(batch, LOAD.clip).loss) for _ in range(STEPS)]


def distance(first, second):
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


@pytest.fixture(scope="module")
def losses():
    return plainly()


@pytest.fixture(scope="module")
def band(losses):
    """Twice the largest difference that noise makes: two runs that are compared are both off."""
    return 2 * max(distance(losses, plainly(seed=seed)) for seed in range(3))


def test_the_band_is_narrow(losses, band):
    """A learning rate that is 3 % off would be noticed, and the model does learn."""
    assert losses[0] - losses[-1] > 1.0
    assert 0 < band < distance(losses, plainly(rate=1.03 * RATE)) / 2


@pytest.mark.install
@pytest.mark.timeout(600)
def test_losses_agree_with_zero_offload(losses, band, tmp_path, monkeypatch, record_property):
    python, problem = python_with_deepspeed()
    jobs = [JOB] if python is None else [JOB, dataclasses.replace(JOB, contender="zero2")]
    monkeypatch.setattr(sys, "executable", str(python or sys.executable))
    ours, *others = Driver(Options(out=tmp_path, say=lambda line: None, traces=False)).run_all(jobs).results
    assert not ours.error
    assert "equal to plain PyTorch" in ours.checked
    assert distance(ours.losses, losses) <= band
    record_property(
        "measured", f"ours and plain PyTorch: losses within {distance(ours.losses, losses):.1e} ({band:.1e})"
    )
    if problem:  # what ZeRO-Offload computes is what was compared above: bf16 model, fp32 masters, torch's AdamW
        record_property("measured", f"ZeRO-Offload did not run, its arithmetic alone was compared: {problem}")
        return
    (zero,) = others
    assert not zero.error
    assert distance(ours.losses, zero.losses) <= band
    record_property(
        "measured",
        f"ours and ZeRO-Offload (DeepSpeed's CPU accelerator, toy model): losses within"
        f" {distance(ours.losses, zero.losses):.1e} (noise {band:.1e}); step time {ours.seconds * 1e3:.0f} ms and"
        f" {zero.seconds * 1e3:.0f} ms, ratio {zero.seconds / ours.seconds:.2f}; host memory"
        f" {ours.host_bytes / 2**20:.0f} MiB and {zero.host_bytes / 2**20:.0f} MiB",
    )
