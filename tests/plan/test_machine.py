"""The machine: probed, described, and its measured rates kept."""

from __future__ import annotations

import json
import stat

import pytest
import torch

from slideformer_backend.commands.calibrate import calibrated, measure_drive
from slideformer_backend.plan import rates_cache
from slideformer_backend.plan.machine import ASSUMED, describe_machine, free_space, probe_machine

RATES = {"gemm": 1e12, "host": 2e10, "h2d": 1e10, "d2h": 1e10}


def test_this_machine():
    found = probe_machine()
    assert found.threads >= 1
    assert found.host.available > 0
    assert found.has_gpu == torch.cuda.is_available()
    assert found.nvme_free == 0
    assert probe_machine(nvme_path="/").nvme_free > 0


def test_free_space_of_a_folder_that_is_not_there_yet(tmp_path):
    assert free_space(str(tmp_path / "a" / "b")) > 0


def test_a_described_machine_has_no_rates_of_this_one(machine):
    base = machine()
    found = describe_machine(base, gpu=8 << 30, nvme=1 << 40)
    assert found.gpu_total == 8 << 30
    assert found.gpu_free < found.gpu_total
    assert found.rates == {"host": base.rates["host"]}
    assert describe_machine(base, host=64 << 30).rates.keys() == base.rates.keys() - {"host"}
    filled = found.with_rates(ASSUMED, "assumed")
    assert filled.sources["gemm"] == "assumed"
    assert filled.sources["host"] == "given"
    assert filled.rates["host"] == base.rates["host"]


def test_rates_are_kept_and_read(machine, tmp_path):
    file = rates_cache.cache_file(machine(), {"XDG_CACHE_HOME": str(tmp_path)})
    assert file.parent == tmp_path / "slideformer"
    assert rates_cache.load_rates(file) == {}
    assert rates_cache.save_rates(file, {**RATES, "nvme_read": 1e9})
    assert rates_cache.load_rates(file) == RATES  # a drive's rates belong to a folder
    assert list(file.parent.iterdir()) == [file]


def test_another_machine_or_version_has_another_file(machine, monkeypatch):
    first = rates_cache.cache_file(machine())
    assert rates_cache.cache_file(machine()) == first
    assert rates_cache.cache_file(machine(gpu=80 << 30)) != first
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert rates_cache.cache_file(machine()) != first


def test_a_relative_cache_home_does_not_count(machine):
    """The specification of base directories says so."""
    file = rates_cache.cache_file(machine(), {"XDG_CACHE_HOME": "here", "HOME": "/somebody"})
    assert str(file).startswith("/somebody/.cache/slideformer/")


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"gemm": "fast", "host": -1, "h2d": true, "other": 3}'])
def test_a_damaged_file_counts_as_none(tmp_path, content):
    file = tmp_path / "machine.json"
    file.write_text(content)
    assert rates_cache.load_rates(file) == {}


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    assert not rates_cache.save_rates(tmp_path / "file" / "slideformer" / "machine.json", RATES)


def test_calibration_measures_and_then_reads(monkeypatch):
    from slideformer_backend.commands import calibrate

    here = probe_machine()
    quick = calibrated(here, quick=True)
    assert {"gemm", "host"} <= quick.rates.keys()
    assert all(rate > 1e8 for rate in quick.rates.values())
    assert not rates_cache.cache_file(here).exists()
    calls = []
    monkeypatch.setattr(calibrate, "measure", lambda machine, quick: calls.append(1) or RATES)
    assert calibrated(here).rates["gemm"] == calibrated(here).rates["gemm"] == 1e12
    assert len(calls) == 1
    calibrated(here, refresh=True)
    assert len(calls) == 2
    assert json.loads(rates_cache.cache_file(here).read_text()) == RATES
    assert stat.S_IMODE(rates_cache.cache_file(here).parent.stat().st_mode) == 0o700


def test_a_drive_is_measured_and_left_as_it_was(tmp_path):
    drive = measure_drive(tmp_path, 4 << 23)
    assert drive.read > 1e6
    assert drive.write > 1e6
    assert drive.alignment in (1, 512, 4096, 65536)
    assert list(tmp_path.iterdir()) == []


def test_errors_of_a_drive_come_out(tmp_path, monkeypatch):
    import os

    monkeypatch.setattr(os, "pwrite", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        measure_drive(tmp_path, 4 << 23)
    monkeypatch.setattr(os, "pwrite", lambda handle, block, offset: len(block) // 2)
    with pytest.raises(OSError, match="bytes at offset"):
        measure_drive(tmp_path, 4 << 23)
    assert list(tmp_path.iterdir()) == []
