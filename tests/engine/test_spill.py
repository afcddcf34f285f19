"""Optimizer states in files: the same bits as in memory, less memory, transfers that overlap, faults that show."""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import gc
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

import slideformer_backend
from slideformer_backend.api import attach
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.engine.filed import Filed
from slideformer_backend.errors import ConfigError, StorageError, UnsupportedError
from slideformer_backend.optim.lion import Lion
from slideformer_backend.plan.ledger import STAGED_UNITS as ROOMS
from slideformer_backend.storage import PosixTier
from tests.budgets import tight

from .test_residency import Net

ROOT = Path(slideformer_backend.__file__).resolve().parents[1]
RULES = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
}
KINDS = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "autocast": (torch.float32, torch.bfloat16),
}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "nvme"
    path.mkdir(mode=0o700)
    return str(path)


class Job:
    """A small training job under the engine."""

    def __init__(self, device, *, kind="bf16", update="exact", rule="adamw", layers=7, **config):
        dtype, self.autocast = KINDS[kind]
        torch.manual_seed(0)
        self.device = device
        self.model = Net(width=32, layers=layers).to(dtype)
        settings = SlideFormerConfig(update=update, gpu_memory=tight(self.model), cpu_threads=1, **config)
        self.engine = attach(self.model, settings, device=device, autocast_dtype=self.autocast)
        self.optimizer = RULES[rule](self.model.parameters())
        self.engine.bind(self.optimizer)

    def backward(self, number, *, is_last=True, scale=1.0):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 20, (2, 8), generator=generator).to(self.device)
        context = torch.autocast(self.device.type, self.autocast) if self.autocast else contextlib.nullcontext()
        with context:
            logits = self.model(tokens)
        loss = torch.nn.functional.cross_entropy(logits.float().view(-1, 20), tokens.view(-1)) * scale
        self.engine.last_microbatch = lambda: is_last
        loss.backward()
        return loss.detach().cpu()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self):
        return [parameter.detach().to("cpu", copy=True) for parameter in self.model.parameters()]

    def states(self):
        found = self.optimizer.state_dict()["state"]
        return [v for n in sorted(found) for v in found[n].values() if isinstance(v, torch.Tensor)]


def plain(job, number):
    job.backward(number)
    job.step()


def clipped(job, number):
    job.backward(number)
    job.engine.clip_grad_norm_(job.model.parameters(), 0.1 if number % 2 else 1e4)
    job.step()


def accumulated(job, number):
    for micro in range(3):
        job.backward(10 * number + micro, is_last=micro == 2)
    job.step()


def nonfinite(job, number):
    job.backward(number, scale=float("inf") if number == 2 else 1.0)
    job.step()


def looked_at(job, number):
    job.backward(number)
    for parameter in list(job.model.parameters())[:9]:
        parameter.detach().sum()
    job.step()
    job.optimizer.state_dict()
    with torch.no_grad():
        next(iter(job.model.layers[3].parameters())).mul_(0.5)


def saved_and_loaded(job, number):
    plain(job, number)
    if number == 1:
        job.saved = job.model.state_dict(), job.optimizer.state_dict()
    if number == 3:
        job.model.load_state_dict(job.saved[0])
        job.optimizer.load_state_dict(job.saved[1])


SCRIPTS = {
    function.__name__: function
    for function in (plain, clipped, accumulated, nonfinite, looked_at, saved_and_loaded)
}  # fmt: skip


def _train(job, script, steps=5):
    seen = []
    for number in range(steps):
        SCRIPTS[script](job, number)
        seen += job.weights() if number == 2 else []
    seen += job.states() + job.weights()
    job.engine.detach()
    return [*seen, *job.weights()]


def _assert_same(expected, found):
    assert len(expected) == len(found)
    assert all(torch.equal(a.nan_to_num(77), b.nan_to_num(77)) for a, b in zip(expected, found, strict=True))


CASES = [
    (script, update, kind, "adamw")
    for script in SCRIPTS
    for update in ("exact", "immediate")
    for kind in KINDS
    if update == "exact" or script in ("plain", "looked_at", "saved_and_loaded")
] + [("clipped", "exact", kind, rule) for rule in RULES for kind in ("bf16", "autocast") if rule != "adamw"]
CASES += [("plain", "immediate", kind, rule) for rule in RULES for kind in ("bf16", "fp32") if rule != "adamw"]


@pytest.mark.parametrize(("script", "update", "kind", "rule"), CASES)
def test_the_same_bits_as_in_memory(folder, device, script, update, kind, rule):
    options = {"update": update, "kind": kind, "rule": rule}
    expected = _train(Job(device, **options), script)
    job = Job(device, optimizer_states="nvme", nvme_path=folder, **options)
    # fp32 weights of plain SGD under `immediate` are their own masters: nothing is left to spill
    assert job.engine.spill.nbytes > 0 or (update, kind, rule) == ("immediate", "fp32", "plain sgd")
    _assert_same(expected, _train(job, script))
    assert os.listdir(folder) == []


@pytest.mark.parametrize("fraction", [0.3, 0.7])
def test_a_fraction_spills_as_planned(folder, device, fraction):
    expected = _train(Job(device), "clipped")
    job = Job(device, optimizer_states="nvme", nvme_path=folder, nvme_fraction=fraction)
    spilled = [unit.index for unit in job.engine.units if unit.spill is not None]
    assert fraction * 7 <= len(spilled) < fraction * 7 + 1
    assert job.engine.spill.nbytes == sum(
        slab.nbytes for unit in job.engine.units for slab in unit.states.values() if unit.index in spilled
    )
    _assert_same(expected, _train(job, "clipped"))


def test_auto_spills_where_host_memory_is_short(folder, device):
    """``host_memory`` counts what the process holds already, so the limit is found from there."""
    big, free = {"layers": 12, "kind": "fp32"}, Job(device, layers=12, kind="fp32")
    ledger = free.engine._preflight.plan.first
    assert free.engine.spill.tier is None
    expected = _train(free, "clipped")
    limit = ledger.host - ledger.host_states // 2
    roomy = Job(device, nvme_path=folder, host_memory=10 * ledger.host, **big)
    assert roomy.engine.spill.tier is None
    roomy.engine.detach()
    job = Job(device, nvme_path=folder, host_memory=limit, **big)
    spilled = [unit for unit in job.engine.units if unit.spill is not None]
    assert 0 < len(spilled) < len(job.engine.units)
    _assert_same(expected, _train(job, "clipped"))


def test_states_go_from_one_run_to_another(folder, device):
    """What a run with files saves, a run without loads, and the other way round."""
    jobs = [Job(device), Job(device, optimizer_states="nvme", nvme_path=folder)]
    for job in jobs:
        plain(job, 0)
    saved = [copy.deepcopy((job.model.state_dict(), job.optimizer.state_dict())) for job in jobs]
    for job, (model, states) in zip(jobs, reversed(saved), strict=True):
        plain(job, 1)
        job.model.load_state_dict(model)
        job.optimizer.load_state_dict(states)
        plain(job, 2)
    _assert_same(*[job.weights() + job.states() for job in jobs])
    for job in jobs:
        job.engine.detach()


def test_memory_holds_the_rooms_and_no_more(folder, device):
    in_memory = Job(device, layers=12)
    job = Job(device, layers=12, optimizer_states="nvme", nvme_path=folder)
    held = []
    for number in range(4):
        plain(in_memory, number)
        job.backward(number)
        held.append(job.engine.memory.allocated)
        job.step()
        held.append(job.engine.memory.allocated)
    states = sorted((unit.spill.nbytes for unit in job.engine.units), reverse=True)
    most = in_memory.engine.memory.allocated - sum(states) + sum(states[:ROOMS])
    assert max(held) <= most + job.engine.window.gradient_class(job.engine.units[0]) * 2
    in_rooms = [unit for unit in job.engine.units if unit.spill.are is not Filed.FILED]
    assert len(in_rooms) <= ROOMS
    assert job.engine.report().spilled_bytes == sum(states)
    assert job.engine.report().tier["tier"] == "posix"
    job.engine.detach()
    in_memory.engine.detach()


def _resident_kib():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Rss:"))


def test_pages_really_go_back_to_the_system(folder, device):
    """56 MiB of states, of which 4 of 14 units stay."""
    torch.manual_seed(0)
    model = Net(width=256, layers=14)
    engine = attach(
        model, SlideFormerConfig(optimizer_states="nvme", nvme_path=folder, gpu_memory=tight(model)), device=device
    )
    before = _resident_kib()
    engine.bind(torch.optim.AdamW(model.parameters()))
    engine.settle()
    spilled = [unit.spill for unit in engine.units if unit.spill is not None]
    while any(spill.are is Filed.CHANGED for spill in spilled):
        engine.spill.write_back()
    for spill in spilled:
        if spill.stored is not None:
            spill.stored.synchronize()
    states = engine.spill.nbytes >> 10
    largest = max(spill.nbytes for spill in spilled) >> 10
    grown = _resident_kib() - before
    assert states > 40_000
    assert grown < ROOMS * largest + 16_384, f"{grown} KiB of {states} are in memory"
    engine.detach()


# -- overlap -----------------------------------------------------------------------------------------------------------


class _Slow:
    """Notes when each transfer runs, and lets it take longer."""

    def __init__(self, monkeypatch, seconds):
        self.spans = []
        for name in ("load", "store"):
            monkeypatch.setattr(PosixTier, name, self._timed(name, getattr(PosixTier, name), seconds))

    def _timed(self, name, original, seconds):
        def timed(tier, region, start, tensor):
            begin = time.perf_counter()
            time.sleep(seconds)
            original(tier, region, start, tensor)
            self.spans.append((name, begin, time.perf_counter()))

        return timed

    def busy(self, *names):
        """Seconds in which at least one of each of ``names`` runs."""
        marks = sorted({t for _, a, b in self.spans for t in (a, b)})
        return sum(
            b - a
            for a, b in itertools.pairwise(marks)
            if all(any(n == name and s <= a and b <= e for n, s, e in self.spans) for name in names)
        )


def test_reads_writes_and_updates_of_different_units_overlap(folder, device, monkeypatch):
    job = Job(device, layers=10, optimizer_states="nvme", nvme_path=folder)
    plain(job, 0)
    plain(job, 1)
    job.engine.settle()
    for lane in (job.engine.backend.load, job.engine.backend.store):
        lane.submit("barrier", lambda: None).synchronize()
    slow = _Slow(monkeypatch, 0.02)
    submit = job.engine.backend.update.submit

    def noted(name, run, **options):
        def timed():
            begin = time.perf_counter()
            if name.startswith("advance"):
                time.sleep(0.02)
            run()
            slow.spans.append(("update", begin, time.perf_counter()))

        return submit(name, timed, **options)

    monkeypatch.setattr(job.engine.backend.update, "submit", noted)
    start = time.perf_counter()
    plain(job, 2)
    job.engine.settle()
    elapsed = time.perf_counter() - start
    loads, stores, updates = slow.busy("load"), slow.busy("store"), slow.busy("update")
    assert loads > 0.15
    assert slow.busy("load", "store") > 0.4 * min(loads, stores)
    assert slow.busy("load", "update") > 0.4 * min(loads, updates)
    assert elapsed < 0.8 * (loads + stores + updates)
    job.engine.detach()


def test_a_step_ends_without_waiting_for_files(folder, device, monkeypatch):
    """What changed is written behind the next forward, and the states that the next backward needs first are read."""
    job = Job(device, layers=10, optimizer_states="nvme", nvme_path=folder)
    for number in range(2):
        plain(job, number)
    order = [unit.index for unit in job.engine.schedule.backward_order()]
    assert order == sorted(order, reverse=True)
    staged = [unit.index for unit in job.engine.units if unit.spill.are is not Filed.FILED]
    assert set(order[: ROOMS - 1]) <= set(staged)
    job.engine.detach()


# -- faults ------------------------------------------------------------------------------------------------------------


def _go_on(job, numbers, completed=None, script=plain):
    """Steps until one fails; those that did not are noted."""
    for number in numbers:
        script(job, number)
        if completed is not None:
            completed.append(number)
    job.engine.settle()


class _Fails:
    """From the call number ``after`` on, ``most`` calls of ``name`` raise."""

    def __init__(self, system, name, after, code, most=10**9):
        self.calls = 0
        original = getattr(system, name)
        lock = threading.Lock()

        def call(*arguments):
            with lock:
                self.calls += 1
                is_due = after < self.calls <= after + most
            if is_due:
                raise OSError(code, os.strerror(code))
            return original(*arguments)

        setattr(system, name, call)


FAILURES = [("read_at", errno.EIO), ("write_at", errno.ENOSPC), ("write_at", errno.EIO)]


@pytest.mark.parametrize("update", ["exact", "immediate"])
@pytest.mark.parametrize(("name", "code"), FAILURES)
def test_a_failing_disk_ends_the_step_with_an_error(folder, device, name, code, update):
    """Same step; file, offset, errno and remedy; no file left."""
    job = Job(device, update=update, optimizer_states="nvme", nvme_path=folder)
    plain(job, 0)
    job.engine.settle()
    _Fails(job.engine.spill.tier.directory.system, name, 2, code)
    with pytest.raises(StorageError, match=errno.errorcode[code]) as caught:
        _go_on(job, range(1, 3))
    assert caught.value.errno == code
    assert caught.value.path.startswith(folder)
    assert caught.value.offset is not None
    assert caught.value.remedy
    with pytest.raises(StorageError):
        plain(job, 3)
    with pytest.raises(StorageError):
        job.engine.detach()
    assert os.listdir(folder) == []


@pytest.mark.parametrize("after", [0, 2, 5, 9, 14])
@pytest.mark.parametrize(("name", "code"), [("read_at", errno.EIO), ("write_at", errno.ENOSPC)])
def test_weights_are_those_of_the_last_completed_step(folder, device, name, code, after, caplog):
    expected = _weights_by_step(device, 6)
    job = Job(device, optimizer_states="nvme", nvme_path=folder)
    plain(job, 0)
    system = job.engine.spill.tier.directory.system
    fails = _Fails(system, name, after, code)
    completed = []
    with pytest.raises(StorageError):
        _go_on(job, range(1, 6), completed)
    assert fails.calls > after
    with pytest.raises(StorageError):
        job.engine.detach()
    found = job.weights()
    lost = _named_as_lost(job, caplog)
    if name == "write_at":
        assert not lost, "what could not be written is still in memory"
    names = [name for name, _ in job.model.named_parameters()]
    wrong = [n for n, a, b in zip(names, expected[1 + len(completed)], found, strict=True) if not torch.equal(a, b)]
    assert [n for n in wrong if n not in lost] == []
    assert os.listdir(folder) == []


@pytest.mark.parametrize("script", [clipped, accumulated])
@pytest.mark.parametrize("where", [("optimizer_states",), ("weights",), ("optimizer_states", "weights")], ids="+".join)
def test_one_write_that_fails_costs_no_weights(tmp_path, device, script, where, caplog):
    """What the file did not get is in memory, and is not read over from that file, however often others leave."""
    expected = _weights_by_step(device, 5, script)
    hit = 0
    for after in (5, 13, 22, 36, 59, 71):
        folder = tmp_path / str(after)
        folder.mkdir(mode=0o700)
        job = Job(device, nvme_path=str(folder), **dict.fromkeys(where, "nvme"))
        script(job, 0)
        fails = _Fails(job.engine.spill.tier.directory.system, "write_at", after, errno.ENOSPC, most=1)
        completed = []
        with contextlib.suppress(StorageError):
            _go_on(job, range(1, 5), completed, script)
        with contextlib.suppress(StorageError):
            job.engine.detach()
        hit += fails.calls > after
        assert not _named_as_lost(job, caplog)
        # a step whose decisions were taken has happened, for all units
        of_steps = [
            [
                name
                for (name, _), a, b in zip(job.model.named_parameters(), right, job.weights(), strict=True)
                if not torch.equal(a, b)
            ]
            for right in expected[1 + len(completed) : 3 + len(completed)]
        ]
        assert [] in of_steps, f"write {after}"
    assert hit >= 3


@functools.cache
def _weights_by_step(device, steps, script=plain, **options):
    job = Job(device, **options)
    made = [job.weights()]
    for number in range(steps):
        script(job, number)
        made.append(job.weights())
    job.engine.detach()
    return made


class _Gate:
    """Once closed, calls of ``name`` wait; once open again they raise, ``failures`` of them."""

    def __init__(self, system, name, code, failures):
        self._is_closed, self._opened = False, threading.Event()
        self._left = itertools.count(1 - failures)
        original = getattr(system, name)

        def call(*arguments):
            if self._is_closed:
                self._opened.wait(60)
                if next(self._left) <= 0:
                    raise OSError(code, os.strerror(code))
            return original(*arguments)

        setattr(system, name, call)

    def close(self):
        self._is_closed = True

    def open(self, spill):
        """Returns when the failure has been noted."""
        self._opened.set()
        with contextlib.suppress(StorageError):
            while True:
                spill.check()
                time.sleep(0.001)


@pytest.mark.parametrize("kind", ["bf16", "autocast"])
@pytest.mark.parametrize("script", [plain, clipped])
@pytest.mark.parametrize("is_inside", [True, False], ids=["in step", "behind step"])
@pytest.mark.parametrize(
    ("name", "code", "failures"),
    [("read_at", errno.EIO, 1), ("read_at", errno.EIO, 10**6), ("write_at", errno.ENOSPC, 10**6)],
)
def test_a_step_counts_for_all_units_or_for_none(folder, device, kind, script, is_inside, name, code, failures, caplog):
    """The disk fails when ``step()`` has taken its decisions: it has happened, and updates that it left to the lane are
    made up for. A disk that can be read again costs nothing; units whose states cannot be read are named."""
    expected = _weights_by_step(device, 3, script, kind=kind)
    job = Job(device, optimizer_states="nvme", nvme_path=folder, kind=kind)
    script(job, 0)
    script(job, 1)
    job.engine.policy.spare_buffers = 100  # no arriving gradient waits for an update
    spill, step = job.engine.spill, job.engine.stepper.step
    gate = _Gate(spill.tier.directory.system, name, code, failures)
    closing = job.model.register_forward_hook(lambda *_: gate.close())  # all updates before this step are done
    if is_inside:

        def fails_inside(binding):
            step(binding)
            gate.open(spill)

        job.engine.stepper.step = fails_inside
    script(job, 2)
    closing.remove()
    late = [unit.name for unit in job.engine.sliding if not unit.updated.has_succeeded]
    assert late, "updates were still to come when the step ended"
    if not is_inside:
        gate.open(spill)
    for attempt in (lambda: script(job, 3), job.engine.detach):
        with pytest.raises(StorageError, match=errno.errorcode[code]):
            attempt()
    found = dict(zip([name for name, _ in job.model.named_parameters()], job.weights(), strict=True))
    wrong = {n for (n, b), a in zip(found.items(), expected[3], strict=True) if not torch.equal(a, b)}
    lost = _named_as_lost(job, caplog)
    assert wrong - lost == set()
    assert bool(lost) == (name == "read_at" and failures > 1)


def _named_as_lost(job, caplog):
    """The parameters of the units that the log names; a unit of edge parameters has a name that none of them has."""
    units = {name for r in caplog.records if "unfinished" in r.message for name in r.args[1].split(", ")}
    assert units <= {unit.name for unit in job.engine.units}
    return {record.name for unit in job.engine.units if unit.name in units for record in unit.records}


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [({}, "more states in host memory"), ({"nvme_fraction": 1.0}, "free space there, or lower nvme_fraction")],
)
def test_a_full_disk_is_found_before_the_first_step(folder, device, settings, remedy):
    model = Net(width=32, layers=4)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    config = SlideFormerConfig(optimizer_states="nvme", nvme_path=folder, **settings)
    engine = attach(model, config, device=device)
    _Fails(engine.spill.tier.directory.system, "allocate", 3, errno.ENOSPC)
    with pytest.raises(StorageError, match="ENOSPC") as caught:
        engine.bind(torch.optim.AdamW(model.parameters()))
    assert "free space" in caught.value.remedy
    assert remedy in caught.value.remedy
    assert ("lower" in caught.value.remedy) == bool(settings)
    engine.detach()
    assert os.listdir(folder) == []
    assert all(torch.equal(a, b.cpu()) for a, b in zip(weights, model.parameters(), strict=True))


def test_a_flipped_bit_ends_the_step_with_an_error(folder, device):
    job = Job(device, optimizer_states="nvme", nvme_path=folder)
    plain(job, 0)
    plain(job, 1)
    job.engine.settle()
    job.engine.spill.write_back()
    unit = next(unit for unit in job.engine.sliding if unit.spill.are is Filed.FILED)
    unit.spill.stored.synchronize()
    region = unit.spill.parts["exp_avg"].region
    fd = os.open(region.path, os.O_RDWR)
    (old,) = os.pread(fd, 1, 100)
    os.pwrite(fd, bytes([old ^ 4]), 100)
    os.fsync(fd)
    os.close(fd)
    with pytest.raises(StorageError, match="checksum") as caught:
        _go_on(job, [2])
    assert caught.value.path == region.path
    with pytest.raises(StorageError):
        job.engine.detach()


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"optimizer_states": "nvme"}, ConfigError, "nvme_path"),
        ({"nvme_fraction": 0.5}, ConfigError, "set nvme_path"),
        ({"nvme_fraction": 0.0}, ConfigError, "or remove nvme_fraction"),
        ({"optimizer_states": "nvme", "nvme_path": "/nowhere/at/all"}, ConfigError, "does not exist"),
        ({"optimizer_states": "host", "nvme_fraction": 0.5, "nvme_path": "/tmp"}, ConfigError, "share"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_changes(device, config, error, message):
    model = Net()
    classes = {type(parameter) for parameter in model.parameters()}
    with pytest.raises(error, match=message):
        attach(model, SlideFormerConfig(**config), device=device)
    assert {type(parameter) for parameter in model.parameters()} == classes
    assert attach(model, device=device).is_detached is False


def test_an_optimizer_that_runs_as_itself_is_refused(folder, device):
    model = Net()
    engine = attach(model, SlideFormerConfig(optimizer_states="nvme", nvme_path=folder), device=device)
    with pytest.raises(UnsupportedError, match="RMSprop"):
        engine.bind(torch.optim.RMSprop(model.parameters()))
    engine.detach()


def test_an_abandoned_engine_leaves_no_file(folder, device):
    """Neither by its name nor, kept by a descriptor, without one."""
    job = Job(device, optimizer_states="nvme", nvme_path=folder)
    plain(job, 0)
    assert os.listdir(folder)
    assert len(_open_below(folder)) > 7
    del job
    for _ in range(3):
        gc.collect()
    deadline = time.monotonic() + 10
    while (os.listdir(folder) or _open_below(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
        gc.collect()
    assert os.listdir(folder) == []
    assert _open_below(folder) == []


def _open_below(folder):
    """Files of ``folder`` that this process has open, removed ones too: their space is not free."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(link))
    return [path for path in found if path.startswith(folder)]


def test_a_run_killed_in_the_middle_of_its_steps_is_reclaimed(folder, device):
    code = """
        import sys, torch
        from tests.engine.test_spill import Job, plain
        job = Job(torch.device(sys.argv[2]), optimizer_states="nvme", nvme_path=sys.argv[1])
        plain(job, 0)
        print("ready", flush=True)
        while True:
            plain(job, 1)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), folder, device.type],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    process.kill()
    process.communicate(timeout=60)
    (left,) = os.listdir(folder)
    assert any(name.endswith(".spill") for name in os.listdir(os.path.join(folder, left)))
    job = Job(device, optimizer_states="nvme", nvme_path=folder)
    assert left not in os.listdir(folder)
    plain(job, 0)
    job.engine.detach()
    assert os.listdir(folder) == []
