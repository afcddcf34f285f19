"""The same on a CUDA device: streams delayed at random, poisoned buffers, a user's own stream (HAZARDS 2, 3, 4, 5)."""

from __future__ import annotations

import random
import tempfile
import time
from unittest import mock

import pytest
import torch

from slideformer_backend.api import attach
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.engine import spilling
from slideformer_backend.errors import StorageError
from slideformer_backend.transfer import Monitor
from tests.budgets import tight

from .toy import Toy, make_toy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CYCLES_PER_MS = 1_500_000
BEHIND_MS = 400
WIDTH, BLOCKS, STEPS = 256, 6, 4
FILED = ("file after boundary staged", "load after boundary read")
"""Waits of inputs that travel to files."""


def _delay(engine, lanes: tuple[str, ...], most_ms: float, seed: int) -> None:
    """Put a random pause before every operation of these lanes: on the stream, or on the lane's thread."""
    choose = random.Random(seed)
    for name in lanes:
        lane = getattr(engine.backend, name)

        def submit(work, run, *, _submit=lane.submit, _is_stream=lane.stream is not None, **options):
            pause = choose.choice((0.0, 0.5, 1.0)) * most_ms

            def delayed() -> None:
                if _is_stream:
                    torch.cuda._sleep(int(pause * CYCLES_PER_MS))
                else:
                    time.sleep(pause / 1000)
                run()

            return _submit(work, delayed, **options)

        lane.submit = submit


def _train(**options) -> list[torch.Tensor]:
    """Gradients norms, losses and weights of a few steps; see ``_trained``. Files go by way of host memory."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(spilling, "direct_tier", return_value=None):
        return _trained(folder, **options)


def _trained(
    folder: str,
    *,
    kind: str = "bfloat16",
    update: str = "exact",
    delayed: tuple[str, ...] = (),
    compute_ms: float = 0.0,
    most_ms: float = 5.0,
    monitor: Monitor | None = None,
    stream: torch.cuda.Stream | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    inputs: str = "gpu",
    files: str = "host",
    grow: int = 0,
) -> list[torch.Tensor]:
    device = torch.device("cuda")
    model: Toy = make_toy(kind, 0, width=WIDTH, blocks=BLOCKS)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    config = SlideFormerConfig(
        cpu_threads=2, update=update, prefetch=2, gpu_memory=tight(model), activations=inputs, nvme_path=folder,
        weights=files, optimizer_states=files,
    )  # fmt: skip
    engine = attach(model, config, device=device, monitor=monitor)
    engine.bind(optimizer)
    engine.boundaries.least, engine.boundaries.kept = 0, 1
    _delay(engine, delayed, most_ms, seed=7)
    seen: list[torch.Tensor] = []
    with torch.cuda.stream(stream):
        for step in range(STEPS):
            for part in range(accumulate):
                generator = torch.Generator().manual_seed(step * 10 + part)
                x = torch.randn(8, WIDTH, generator=generator).to(device, model.inp.weight.dtype)
                engine.last_microbatch = lambda part=part: part == accumulate - 1
                if step == 1 and part == 0 and grow:  # not before the input is there: the host waits for its copy
                    torch.cuda._sleep(BEHIND_MS * CYCLES_PER_MS)
                    engine.window.grow(engine.sliding, grow)
                if compute_ms:
                    torch.cuda._sleep(int(compute_ms * CYCLES_PER_MS))
                loss = model(x).float().square().mean()
                if compute_ms:
                    torch.cuda._sleep(int(compute_ms * CYCLES_PER_MS))
                loss.backward()
                seen.append(loss.detach())
            if clip is not None:
                seen.append(engine.clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
            optimizer.zero_grad()
    torch.cuda.synchronize()
    engine.detach()
    return [tensor.cpu() for tensor in seen] + [parameter.detach().clone() for parameter in model.parameters()]


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module", autouse=True)
def _deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def _quiet_monitor(skip: str | None = None) -> Monitor:
    return Monitor(check=False, poison=True, skip=skip)


@pytest.mark.parametrize("update", ["exact", "immediate"])
@pytest.mark.parametrize("delayed", [("h2d",), ("d2h",), ("update",), ("norms",), ("h2d", "d2h", "update", "norms")])
def test_equal_under_delays(delayed, update):
    expected = _train(update=update)
    assert _same(expected, _train(update=update, delayed=delayed, monitor=_quiet_monitor()))


@pytest.mark.parametrize("inputs", ["host", "nvme"])
@pytest.mark.parametrize(
    "delayed",
    [(), ("out",), ("back",), ("file_out",), ("file_back",), ("out", "back", "file_out", "file_back", "h2d", "update")],
)
def test_equal_when_inputs_of_units_leave(delayed, inputs):
    expected = _train(accumulate=2)
    found = _train(accumulate=2, delayed=delayed, compute_ms=2.0, monitor=_quiet_monitor(), inputs=inputs)
    assert _same(expected, found)


@pytest.mark.parametrize("update", ["exact", "immediate"])
@pytest.mark.parametrize(
    "delayed",
    [(), ("weights_in",), ("weights_out",), ("weights_in", "weights_out", "load", "store", "h2d", "update")],
)
def test_equal_when_weights_and_states_wait_in_files(delayed, update):
    clip = 0.01 if update == "exact" else None
    expected = _train(accumulate=2, update=update, clip=clip)
    monitor = _quiet_monitor()
    found = _train(accumulate=2, update=update, clip=clip, delayed=delayed, monitor=monitor, files="nvme")
    assert "h2d after weights read" in monitor.waits_seen
    assert _same(expected, found)


@pytest.mark.parametrize(
    ("wait", "delayed"),
    [
        ("h2d after weights read", ("weights_in",)),
        ("drop after weights sent", ("h2d",)),
        ("write after weights updated", ("update",)),
    ],
)
def test_a_wait_for_files_left_out_is_seen_by_delay(wait, delayed):
    expected = _train(accumulate=2)
    monitor = _quiet_monitor(skip=wait)
    found = _train(accumulate=2, delayed=delayed, most_ms=30.0, monitor=monitor, files="nvme")
    assert wait in monitor.waits_seen
    assert not _same(expected, found)


@pytest.mark.parametrize("lane", ["h2d", "d2h"])
def test_equal_with_100_ms_on_one_stream(lane):
    """HAZARDS 2; the slot pools are at their smallest."""
    assert _same(_train(), _train(delayed=(lane,), most_ms=100.0, monitor=_quiet_monitor()))


def test_equal_when_slots_are_made_while_compute_is_behind():
    """Their memory is still in use, or being cleared, when the host has gone on to the transfer that fills it."""
    expected = _train()
    assert _same(expected, _train(grow=3, monitor=_quiet_monitor()))
    found = (_train(grow=3, monitor=_quiet_monitor(skip="h2d after slot released")) for _ in range(5))
    assert not all(_same(expected, other) for other in found)  # where others use device and host, not every time


def test_equal_with_slow_compute():
    assert _same(_train(), _train(compute_ms=20.0, monitor=_quiet_monitor()))


@pytest.mark.parametrize("clip", [None, 0.01])
def test_equal_inside_a_users_stream(clip):
    """HAZARDS 5."""
    expected = _train(accumulate=2, clip=clip)
    stream = torch.cuda.Stream()
    delayed = ("h2d", "d2h", "update")
    found = _train(accumulate=2, clip=clip, stream=stream, delayed=delayed, compute_ms=5.0, monitor=_quiet_monitor())
    assert _same(expected, found)


@pytest.mark.parametrize(
    ("wait", "delayed", "compute_ms"),
    [
        ("compute after weights loaded", ("h2d",), 0.0),
        ("h2d after slot released", (), 20.0),
        ("h2d after weights updated", ("update",), 0.0),
        ("d2h after compute", (), 20.0),
        ("compute after gradient slot drained", ("d2h",), 0.0),
        ("advance after gradient filled", ("d2h",), 0.0),
        ("compute after weights refreshed", ("h2d",), 0.0),
        ("compute after pending gradient", ("h2d",), 0.0),
        ("compute after boundary loaded", ("back",), 0.0),
        ("store after compute", (), 20.0),
        ("load after boundary stored", ("out",), 0.0),
        ("compute after boundary stored", ("out",), 0.0),
        ("file after boundary staged", ("out",), 0.0),
        ("load after boundary read", ("file_back",), 0.0),
    ],
)
def test_a_wait_left_out_is_seen_by_delay(wait, delayed, compute_ms):
    expected = _train(accumulate=2)
    monitor = _quiet_monitor(skip=wait)
    inputs = "nvme" if wait in FILED else "host" if "boundary" in wait or wait.startswith("store") else "gpu"
    options = {"accumulate": 2, "delayed": delayed, "compute_ms": compute_ms, "most_ms": 30.0, "inputs": inputs}
    seen = ""
    try:
        found = _train(monitor=monitor, **options)
    except StorageError as error:
        seen = str(error)
    assert wait in monitor.waits_seen
    if seen:  # what was filed before it was whole is not what its checksum says
        assert wait in FILED
        assert "checksum" in seen
    else:
        assert not _same(expected, found)
