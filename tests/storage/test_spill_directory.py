"""Spill directories: private, locked, reclaimed when their owner is dead, never another run's (HAZARDS 12, 13)."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

import slideformer_backend
from slideformer_backend.errors import ConfigError, StorageError
from slideformer_backend.storage import PosixTier, SpillDirectory, System

ROOT = Path(slideformer_backend.__file__).resolve().parents[1]


def _start(code: str, *arguments: str) -> subprocess.Popen:
    """A process that runs ``code`` and waits for its input to end after it has written a line."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert process.stdout.readline().strip() == "ready"
    return process


RUN = """
    import sys, torch
    from slideformer_backend.storage import PosixTier, SpillDirectory
    directory = SpillDirectory(sys.argv[1])
    tier = PosixTier(directory)
    region = tier.allocate("unit-0", 5 << 20)
    tier.write(region, 0, torch.ones(5 << 20, dtype=torch.uint8)).synchronize()
    ticket = tier.write(region, 0, torch.ones(5 << 20, dtype=torch.uint8))
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_private_and_removed_by_close(folder):
    directory = SpillDirectory(folder)
    found = os.stat(directory.path)
    assert stat.S_IMODE(found.st_mode) == 0o700
    assert os.path.dirname(directory.path) == folder
    Path(directory.file("model.layers.3: exp/avg")).touch(0o600)
    assert os.path.dirname(directory.file("../../etc/passwd")) == directory.path
    directory.close()
    directory.close()
    assert os.listdir(folder) == []


def test_one_that_somebody_has_removed_is_nothing_to_warn_of(folder, caplog):
    directory = SpillDirectory(folder)
    shutil.rmtree(directory.path)
    directory.close()
    assert not caplog.records


def test_the_end_of_the_interpreter_removes_it(folder):
    process = _start(RUN, folder)
    assert os.listdir(folder)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert os.listdir(folder) == []


def test_a_killed_run_is_reclaimed_by_the_next_start_and_a_live_one_is_not(folder):
    dead, live = _start(RUN, folder), _start(RUN, folder)
    names = set(os.listdir(folder))
    assert len(names) == 2
    dead.send_signal(signal.SIGKILL)
    dead.communicate(timeout=60)
    assert set(os.listdir(folder)) == names, "nobody was there to clean up"
    ours = SpillDirectory(folder)
    assert ours.reclaimed == 1
    left = set(os.listdir(folder)) - {os.path.basename(ours.path)}
    assert len(left) == 1
    assert left < names
    (live_path,) = left
    assert sorted(os.listdir(os.path.join(folder, live_path))) == ["lock", "unit-0.spill"]
    live.communicate(timeout=60)
    ours.close()
    assert os.listdir(folder) == []


def test_a_forked_child_leaves_the_directory_to_its_parent(folder):
    code = """
        import os, sys
        from slideformer_backend.storage import SpillDirectory
        directory = SpillDirectory(sys.argv[1])
        child = os.fork()
        if child == 0:
            sys.exit(0)  # runs the interpreter's exit handlers
        os.waitpid(child, 0)
        print("ready" if os.path.exists(directory.path) else "removed by the child", flush=True)
        sys.stdin.read()
    """
    _start(code, folder).communicate(timeout=60)
    assert os.listdir(folder) == []


def test_many_runs_start_at_once(folder):
    code = """
        import os, sys
        from slideformer_backend.storage import SpillDirectory
        print("ready", flush=True)
        sys.stdin.readline()
        for turn in range(60):
            directory = SpillDirectory(sys.argv[1])
            open(directory.file("unit-0"), "x").close()
            assert sorted(os.listdir(directory.path)) == ["lock", "unit-0.spill"], "a neighbour took it"
            directory.close()
        print("done", flush=True)
    """
    processes = [_start(code, folder) for _ in range(4)]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        out, _ = process.communicate(timeout=120)
        assert out.strip() == "done"
    assert os.listdir(folder) == []


def test_what_is_not_a_dead_run_stays(folder, caplog):
    kept = ["slideformer-spill-12-0123456", "slideformer-spill-12-01234567x", "data", "slideformer-spill-1-00000000"]
    for name in kept:
        os.mkdir(os.path.join(folder, name))
        Path(folder, name, "precious.spill").touch()
    os.symlink(os.path.join(folder, "data"), os.path.join(folder, "slideformer-spill-2-00000000"))
    strange = Path(folder, "slideformer-spill-3-00000000")  # a dead run in whose directory somebody put a file
    strange.mkdir()
    for name in ("lock", "unit-0.spill", "notes.txt"):
        (strange / name).touch()
    SpillDirectory(folder).close()
    for name in kept:
        assert os.path.exists(os.path.join(folder, name, "precious.spill"))
    assert os.path.islink(os.path.join(folder, "slideformer-spill-2-00000000"))
    assert (strange / "notes.txt").exists()
    assert "cannot be removed" in caplog.text


def test_a_link_in_place_of_a_lock_is_not_followed(folder, tmp_path, caplog):
    target = tmp_path / "somebody's file"
    target.write_text("kept")
    run = Path(folder, "slideformer-spill-4-00000000")
    run.mkdir()
    os.symlink(target, run / "lock")
    SpillDirectory(folder).close()
    assert target.read_text() == "kept"
    assert (run / "lock").is_symlink()


def test_a_run_that_died_while_it_started_is_reclaimed(folder):
    os.mkdir(os.path.join(folder, "slideformer-spill-9-0000000a"))
    SpillDirectory(folder).close()
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    ("make", "message", "remedy"),
    [
        (lambda path: None, "does not exist", "mkdir"),
        (lambda path: path.touch(), "no folder", "name a folder"),
        (lambda path: path.symlink_to("/tmp"), "symbolic link", "/tmp"),
        (lambda path: (path.mkdir(), path.chmod(0o777)), "everybody", "chmod o-w"),
    ],
)
def test_a_folder_that_is_not_safe_is_refused(tmp_path, make, message, remedy):
    path = tmp_path / "nvme"
    make(path)
    with pytest.raises(ConfigError, match=message) as caught:
        SpillDirectory(str(path))
    assert remedy in caught.value.remedy
    if path.is_dir() and not path.is_symlink():
        assert list(path.iterdir()) == []


def test_a_sticky_folder_is_as_good_as_tmp(tmp_path):
    tmp_path.chmod(0o1777)
    SpillDirectory(str(tmp_path)).close()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_is_refused(folder, code):
    class Refusing(System):
        def make_directory(self, path):
            raise OSError(code, os.strerror(code))

    with pytest.raises(StorageError, match=errno.errorcode[code]) as caught:
        SpillDirectory(folder, Refusing())
    assert caught.value.path == folder
    assert caught.value.remedy
    assert os.listdir(folder) == []


def test_a_folder_that_takes_no_directories_is_refused():
    with pytest.raises(StorageError, match="ENOENT.*local disk"):
        SpillDirectory("/proc")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(folder):
    os.chmod(folder, 0o500)
    with pytest.raises(StorageError, match="EACCES"):
        SpillDirectory(folder)


def test_a_tier_that_is_dropped_in_the_middle_of_a_write_ends_it_and_closes_its_files(folder, descriptors):
    """The request holds the file until it is through; space and descriptors return with the last reference."""

    class Slow(System):
        def __init__(self):
            self.go, self.written = threading.Event(), []

        def write_at(self, fd, buffer, offset):
            self.go.wait(10)
            self.written.append(super().write_at(fd, buffer, offset))
            return self.written[-1]

    system = Slow()
    tier = PosixTier(SpillDirectory(folder, system), 1, direct=False)
    data = torch.ones(1 << 20, dtype=torch.uint8)
    ticket = tier.write(tier.allocate("unit-0", data.numel()), 0, data)
    del tier
    gc.collect()
    assert os.listdir(folder), "removed under a request"
    system.go.set()
    ticket.synchronize()
    assert system.written == [data.numel()]
    deadline = time.monotonic() + 10
    while os.listdir(folder) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert os.listdir(folder) == []
