"""``prepare`` plans first: it says what it does, refuses what cannot fit before anything is allocated, and no more."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slideformer_backend.api import attach, engines
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.engine import preflight
from slideformer_backend.errors import PlanError
from slideformer_backend.plan import Terms, ledger_of, partition
from slideformer_backend.plan.host_budget import HostBudget
from slideformer_backend.plan.machine import Machine
from tests.engine.test_residency import Net

MIB = 1 << 20
CPU = torch.device("cpu")


@pytest.fixture
def model():
    return Net(width=256, layers=6, vocabulary=100).to(torch.bfloat16)


def least(model, **terms):
    """The ledger's lower bound on the host, for AdamW."""
    return ledger_of(partition(model), Terms(spares=0, **terms)).host_least


def adamw(model):
    return torch.optim.AdamW(model.parameters())


def test_a_cap_below_the_least_is_refused_before_anything_changes(model):
    before = {name: (parameter.data_ptr(), type(parameter)) for name, parameter in model.named_parameters()}
    need = least(model)
    with pytest.raises(PlanError) as caught:
        attach(model, SlideFormerConfig(host_memory=need - 1), device=CPU, optimizers=[adamw(model)])
    assert {name: (p.data_ptr(), type(p)) for name, p in model.named_parameters()} == before
    assert engines() == []
    error = caught.value
    assert f"{need / MIB:.1f} MiB needed" in error.found
    assert "states" in error.found
    assert "host_memory" in error.expected
    assert "update: immediate" in error.remedy
    assert "raise host_memory to" in error.remedy


def sizes(text):
    """Sizes in a text, in MiB, in their order."""
    return [float(number) for number in re.findall(r"([\d.]+) MiB", text)]


@pytest.mark.parametrize("states", ["host", "nvme"])
def test_the_parts_of_what_is_needed_add_up(model, tmp_path, states, caplog):
    """In the refusal and in the log: spilled states that are on their way are in host memory too."""
    tmp_path.chmod(0o700)
    config = {"optimizer_states": states, "nvme_path": str(tmp_path)}
    with pytest.raises(PlanError) as caught:
        attach(model, SlideFormerConfig(host_memory=MIB, **config), device=CPU, optimizers=[adamw(model)])
    total, *parts = sizes(caught.value.found)
    assert sum(parts) == pytest.approx(total, abs=0.05 * (len(parts) + 1))
    assert ("states on their way" in caught.value.found) == (states == "nvme")
    with caplog.at_level(logging.INFO, "slideformer_backend"):
        attach(model, SlideFormerConfig(**config), device=CPU, optimizers=[adamw(model)]).detach()
    (said,) = [record.getMessage() for record in caplog.records if "The plan:" in record.getMessage()]
    total, *parts = sizes(said.split("Host: ")[1].split("), of")[0])
    assert len(parts) >= 3
    assert sum(parts) == pytest.approx(total, abs=0.05 * (len(parts) + 1))


def test_a_cap_of_the_least_is_taken_and_kept(model):
    """The pool of gradient buffers then has no spare one, and training goes on."""
    optimizer = adamw(model)
    config = SlideFormerConfig(host_memory=least(model))
    engine = attach(model, config, device=CPU, optimizers=[optimizer])
    engine.bind(optimizer)
    for _ in range(3):
        model(torch.zeros(2, 4, dtype=torch.long)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.settle()
    assert engine.policy.spare_buffers == 1
    assert engine.memory.allocated < 1.4 * least(model)
    engine.detach()


def test_the_remedy_makes_it_fit(model):
    need = least(model)
    config = SlideFormerConfig(host_memory=need - 1, update="immediate")
    engine = attach(model, config, device=CPU, optimizers=[adamw(model)])
    engine.detach()


def test_without_an_optimizer_only_bind_can_tell(model):
    """A model that is only evaluated needs no states."""
    need = least(model)
    engine = attach(model, SlideFormerConfig(host_memory=need - 1), device=CPU)
    model(torch.zeros(2, 4, dtype=torch.long))
    held = engine.memory.allocated
    with pytest.raises(PlanError, match="host memory"):
        engine.bind(adamw(model))
    assert engine.memory.allocated == held
    engine.detach()


def test_an_optimizer_with_fewer_states_needs_less(model):
    config = SlideFormerConfig(host_memory=least(model) - 1)
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.RMSprop(model.parameters())):
        attach(model, config, device=CPU, optimizers=[optimizer]).detach()


def test_parameters_that_no_optimizer_holds_count_as_frozen(model):
    config = SlideFormerConfig(host_memory=least(model) // 2)
    optimizer = torch.optim.AdamW(model.layers[0].parameters())
    engine = attach(model, config, device=CPU, optimizers=[optimizer])
    engine.bind(optimizer)
    engine.detach()


@pytest.fixture
def machine(monkeypatch):
    """Lets ``prepare`` see another machine."""

    def see(*, available, swap=0, gpu=0, nvme=0):
        host = HostBudget(available, available, swap, "the cgroup's limit")
        found = Machine(name="other", gpu_total=gpu, gpu_free=gpu, host=host, threads=2, nvme_free=nvme)
        monkeypatch.setattr(preflight, "probe_machine", lambda device, path: found)
        monkeypatch.setattr(preflight, "probe_host_budget", lambda: host)
        monkeypatch.setattr(preflight, "free_space", lambda path: nvme)

    return see


@pytest.fixture
def spilling(tmp_path):
    folder = tmp_path / "nvme"
    folder.mkdir(mode=0o700)
    return SlideFormerConfig(optimizer_states="nvme", nvme_path=str(folder))


def test_a_disk_that_is_too_small_is_refused_before_anything_changes(model, machine, spilling):
    """A byte decides; what is counted are whole blocks."""
    machine(available=1 << 34, nvme=1 << 34)
    engine = attach(model, spilling, device=CPU, optimizers=[adamw(model)])
    need = engine._preflight.plan.first.nvme_states
    engine.bind(adamw(model))
    files = list(Path(spilling.nvme_path).glob("*/*.spill"))
    assert sum(file.stat().st_blocks for file in files) * 512 == need > engine.spill.nbytes
    engine.detach()
    before = {name: (parameter.data_ptr(), type(parameter)) for name, parameter in model.named_parameters()}
    machine(available=1 << 34, nvme=need - 1)
    with pytest.raises(PlanError, match="NVMe do not fit") as caught:
        attach(model, spilling, device=CPU, optimizers=[adamw(model)])
    assert {name: (p.data_ptr(), type(p)) for name, p in model.named_parameters()} == before
    assert list(Path(spilling.nvme_path).iterdir()) == []
    error = caught.value
    assert f"{need:,} bytes" in error.found
    assert f"{need - 1:,} bytes" in error.expected
    assert error.remedy.startswith("set nvme_fraction to ")
    share = float(error.remedy.split()[3].rstrip(";"))
    attach(model, replace(spilling, nvme_fraction=share), device=CPU, optimizers=[adamw(model)]).detach()
    machine(available=1 << 34, nvme=need)
    attach(model, spilling, device=CPU, optimizers=[adamw(model)]).detach()
    machine(available=1 << 34, nvme=0)
    engine = attach(model, spilling, device=CPU)  # who only evaluates needs no files
    with pytest.raises(PlanError, match="NVMe do not fit"):
        engine.bind(adamw(model))
    engine.detach()


def test_what_dead_runs_left_is_removed_before_free_space_is_asked_for(model, machine, spilling, monkeypatch):
    left = Path(spilling.nvme_path) / "slideformer-spill-1-0123abcd"
    left.mkdir(mode=0o700)
    (left / "lock").touch()
    (left / "unit.spill").touch()
    machine(available=1 << 34, nvme=1 << 34)
    probe = preflight.probe_machine
    monkeypatch.setattr(
        preflight, "probe_machine", lambda *known: pytest.fail("left") if left.exists() else probe(*known)
    )
    attach(model, spilling, device=CPU, optimizers=[adamw(model)]).detach()


def weight_bytes(model):
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def test_weights_that_are_there_are_given_back_and_swap_counts(model, machine):
    """Refused only where the least exceeds what is free, what the model itself holds, and swap together."""
    need = least(model) - weight_bytes(model)
    for available, swap in ((need, 0), (need - MIB, MIB)):
        machine(available=available, swap=swap)
        attach(model, SlideFormerConfig(), device=CPU, optimizers=[adamw(model)]).detach()
    machine(available=need - 2 * MIB, swap=MIB)
    with pytest.raises(PlanError, match="the cgroup's limit"):
        attach(model, SlideFormerConfig(), device=CPU, optimizers=[adamw(model)])


def test_between_the_least_and_the_prediction_there_is_a_warning(model, machine, caplog):
    terms = Terms(spares=1)
    need = ledger_of(partition(model), terms).host - weight_bytes(model)
    for available, warned in ((need - 1, True), (need + 4 * MIB, False)):
        machine(available=available)
        caplog.clear()
        with caplog.at_level(logging.INFO, "slideformer_backend"):
            attach(model, SlideFormerConfig(), device=CPU, optimizers=[adamw(model)]).detach()
        warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert bool(warnings) == warned
        paragraphs = [record.getMessage() for record in caplog.records if "The plan:" in record.getMessage()]
        assert len(paragraphs) == 1
        assert "6 units slide" in paragraphs[0]


def test_a_gpu_that_cannot_hold_the_least_window_is_refused(model, machine):
    parts = partition(model)
    ledger = ledger_of(parts, Terms(prefetch=0))
    machine(available=1 << 34, gpu=ledger.device - 1)
    with pytest.raises(PlanError, match="GPU memory") as caught:
        preflight.Preflight(model, parts, SlideFormerConfig(), CPU).check()
    assert "before any activation" in caught.value.found
    machine(available=1 << 34, gpu=ledger.device)
    assert preflight.Preflight(model, parts, SlideFormerConfig(), CPU).check().prefetch == 0
    machine(available=1 << 34, gpu=1 << 34)
    assert preflight.Preflight(model, parts, SlideFormerConfig(), CPU).check().prefetch == 2
    with pytest.raises(PlanError, match="gpu_memory"):
        preflight.Preflight(model, parts, SlideFormerConfig(gpu_memory=ledger.device - 1), CPU).check()


def test_accelerate_passes_its_optimizers_on(tmp_path):
    """``prepare(model, optimizer)`` refuses in one piece; the script's error is ours."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch
            from accelerate import Accelerator
            from tests.engine.test_residency import Net

            model = Net(width=256, layers=6, vocabulary=100)
            before = [parameter.data_ptr() for parameter in model.parameters()]
            try:
                Accelerator(cpu=True).prepare(model, torch.optim.AdamW(model.parameters()))
            except RuntimeError as error:
                assert before == [parameter.data_ptr() for parameter in model.parameters()]
                print(type(error).__name__, error)
            """
        )
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "slideformer_backend.run", "--slideformer_host_memory", "8MiB", str(script)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout.startswith("PlanError The model cannot be trained with this host memory."), done.stderr
