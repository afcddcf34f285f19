"""``slideformer doctor``: every finding has a remedy, whatever is broken."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys

import pytest
import torch

from slideformer_backend._imports import finder
from slideformer_backend.commands import check_gpu, check_host, check_software, doctor
from slideformer_backend.commands.findings import Finding, run_check
from slideformer_backend.plan.machine import probe_machine


@pytest.fixture(autouse=True)
def hooked(monkeypatch):
    """As torch's import leaves a process; other tests of this one may have taken the hook out."""
    if finder not in sys.meta_path:
        monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])


def levels(findings):
    return {finding.level for finding in findings}


def test_a_healthy_machine_has_no_error(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("SLIDEFORMER_DISABLE", raising=False)
    code = doctor.main(["--quick", "--nvme-path", str(tmp_path), "--json"])
    findings = json.loads(capsys.readouterr().out)
    assert code == 0, [finding for finding in findings if finding["level"] == "error"]
    topics = {finding["topic"] for finding in findings}
    assert topics >= {"versions", "hook", "configuration", "GPU", "pinning", "host memory", "CPU", "cache",
                      "NVMe folder", "GPUDirect Storage"}  # fmt: skip
    assert all(finding["remedy"] for finding in findings if finding["level"] in ("warning", "error"))
    drive = next(finding for finding in findings if finding["topic"] == "NVMe folder" and finding["values"])
    assert drive["values"]["read"] > 0
    assert drive["values"]["alignment"] > 0
    assert list(tmp_path.iterdir()) == [tmp_path / "cache"] or list(tmp_path.iterdir()) == []


def test_the_table_and_the_exit_code(capsys, monkeypatch):
    monkeypatch.setenv("SLIDEFORMER_UPDAET", "exact")
    code = doctor.main(["--no-measure"])
    out = capsys.readouterr().out
    assert code == 1
    assert "did you mean 'update'" in " ".join(out.split())
    assert "ERROR" in out
    assert "Training cannot work" in out
    monkeypatch.delenv("SLIDEFORMER_UPDAET")
    assert doctor.main(["--no-measure"]) == 0
    assert "Nothing is in the way of training" in capsys.readouterr().out


def test_without_measuring_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(check_host, "measure_drive", lambda *args: pytest.fail("measured"))
    found = doctor.examine(str(tmp_path), measure=False, quick=True)
    assert any(finding.found == "not looked at" for finding in found)


def test_a_check_that_fails_does_not_stop_the_others():
    def check():
        yield Finding(topic="first", level="ok", found="fine")
        raise ZeroDivisionError("inside")

    found = run_check("first", check)
    assert [finding.level for finding in found] == ["ok", "warning"]
    assert "ZeroDivisionError: inside" in found[1].found
    assert found[1].remedy


def test_calibration_that_fails_is_a_finding(monkeypatch):
    from slideformer_backend.commands import calibrate

    def fail(*args, **kwargs):
        raise MemoryError("none left")

    monkeypatch.setattr(calibrate, "measure", fail)
    found = doctor.examine(None, measure=True, quick=True)
    assert found[-1].topic == "calibration"
    assert "none left" in found[-1].found


def test_versions_below_what_is_needed(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["torch>=99", "not-there", "trl; extra == 'test'"])
    found = [finding for finding in check_software.versions() if finding.level == "error"]
    assert [finding.remedy for finding in found] == ["pip install 'torch>=99'", "pip install 'not-there'"]


@pytest.mark.parametrize(
    ("variables", "level", "words"),
    [
        ({"SLIDEFORMER_DISABLE": "1"}, "error", "unset SLIDEFORMER_DISABLE"),
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "warning", "slideformer launch"),
    ],
)
def test_a_hook_that_is_switched_off(monkeypatch, variables, level, words):
    point = importlib.metadata.EntryPoint(
        "slideformer_backend", "slideformer_backend._autoload:autoload", "torch.backends"
    )
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (finding,) = check_software.hook()
    assert finding.level == level
    assert words in finding.remedy


def test_a_package_that_is_not_installed_has_no_hook(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    (finding,) = check_software.hook()
    assert finding.level == "warning"
    assert "pip install" in finding.remedy


def test_a_driver_without_a_usable_torch_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert levels(check_gpu.gpu(tmp_path)) == {"note"}
    (tmp_path / "driver" / "nvidia").mkdir(parents=True)
    (tmp_path / "driver" / "nvidia" / "version").write_text("NVRM version: NVIDIA UNIX x86_64  570.86.15  Release\n")
    for version, words in ((None, "CUDA build of torch"), ("12.8", "CUDA_VISIBLE_DEVICES")):
        monkeypatch.setattr(torch.version, "cuda", version)
        (finding,) = check_gpu.gpu(tmp_path)
        assert finding.level == "error"
        assert "570.86.15" in finding.found
        assert words in finding.remedy


@pytest.mark.parametrize(
    ("rate", "found", "words"),
    [
        (49e9, {"gen.current": 1, "gen.max": 5, "width.current": 16, "width.max": 16}, None),
        (20e9, {"gen.current": 5, "gen.max": 5, "width.current": 16, "width.max": 16}, "NUMA"),
        (20e9, {"gen.current": 4, "gen.max": 4, "width.current": 16, "width.max": 16}, None),
        (11e9, {"gen.current": 4, "gen.max": 4, "width.current": 8, "width.max": 16}, "another slot"),
        (12e9, {}, None),
        (5e9, {}, "PCIe 3.0"),
    ],
)
def test_the_link_is_judged_by_what_it_is(rate, found, words):
    remedy = check_gpu.judge_link(rate, found)
    assert (remedy is None) if words is None else (words in remedy)


def test_few_cores_and_a_bound_openmp_are_said(monkeypatch):
    monkeypatch.setattr(check_host, "cores", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cpu, omp = check_host.processors(probe_machine())
    assert cpu.level == "warning"
    assert "bound to few cores" in cpu.remedy
    assert omp.level == "note"


def test_a_cgroup_is_said(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/job").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text("100000000")
    (tmp_path / "sys/fs/cgroup/job/memory.current").write_text("80000000")
    found = list(check_host.memory(tmp_path))
    assert [finding.level for finding in found] == ["warning", "note"]
    assert "cgroup" in found[0].found


def test_folders_that_are_no_place_for_spill_files(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    size = 1 << 25
    assert [f.level for f in check_host.spill_folder(str(tmp_path / "missing"), size)] == ["error"]
    assert [f.level for f in check_host.spill_folder(str(tmp_path / "file"), size)] == ["error"]
    found = list(check_host.spill_folder(str(tmp_path / "link"), size))
    assert "symbolic link" in found[0].found
    assert "every user may write" in found[1].found
    assert all(finding.remedy for finding in found if finding.level == "warning")


def test_a_full_drive_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(check_host, "free_space", lambda path: 1 << 20)
    (finding,) = check_host.spill_folder(str(tmp_path), 1 << 25)
    assert (finding.level, "free" in finding.found) == ("error", True)
    monkeypatch.undo()

    def fail(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(check_host, "measure_drive", fail)
    (finding,) = check_host.spill_folder(str(tmp_path), 1 << 25)
    assert finding.level == "error"
    assert "EIO" in finding.found


def test_memory_file_systems_are_said(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"root / ext4 rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0\n")
    assert check_host.file_system(tmp_path, mounts) == "tmpfs"
    assert check_host.file_system(tmp_path.parent, mounts) == "ext4"
    assert check_host.file_system(tmp_path, tmp_path / "none") == "unknown"


def test_a_cache_that_cannot_be_written_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda *args: False)
    (finding,) = check_host.cache(probe_machine())
    assert finding.level == "note"
    assert "XDG_CACHE_HOME" in finding.remedy
