"""The set-up of the README commands, without installing anything."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("benchmarks/finetune/run.py", "tests/run.py")


@pytest.fixture
def installs(bootstrap, monkeypatch):
    """Makes folders in place of environments and records what would be installed."""
    seen = []

    def make(folder, torch):
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "bin" / "python").touch()
        seen.append(("make", torch.inherited))

    monkeypatch.setattr(bootstrap, "_make_venv", make)
    monkeypatch.setattr(bootstrap, "_install", lambda environment, torch, extras: seen.append(("install", extras)))
    monkeypatch.setattr(bootstrap, "has_nvidia_gpu", lambda: False)
    return seen


def test_second_run_changes_nothing(bootstrap, installs, tmp_path):
    bootstrap.prepare(tmp_path / "env", ["bench"])
    assert installs == [("make", False), ("install", ["bench"])]
    environment = bootstrap.prepare(tmp_path / "env", ["bench"])
    assert len(installs) == 2
    assert environment == bootstrap.Environment(tmp_path / "env", gpu=False)


def test_extras_add_up(bootstrap, installs, tmp_path):
    bootstrap.prepare(tmp_path / "env", ["bench"])
    bootstrap.prepare(tmp_path / "env", ["test"])
    bootstrap.prepare(tmp_path / "env", ["bench"])
    assert installs[1:] == [("install", ["bench"]), ("install", ["bench", "test"])]


def test_new_requirements_are_installed_into_the_same_environment(bootstrap, installs, tmp_path, monkeypatch):
    bootstrap.prepare(tmp_path / "env", ["bench"])
    changed = tmp_path / "constraints.txt"
    changed.write_text("rich==1.0\n")
    monkeypatch.setattr(bootstrap, "CONSTRAINTS", changed)
    bootstrap.prepare(tmp_path / "env", ["bench"])
    assert installs[2:] == [("install", ["bench"])]


def test_another_python_makes_a_new_environment(bootstrap, installs, tmp_path, monkeypatch):
    bootstrap.prepare(tmp_path / "env", ["bench", "test"])
    monkeypatch.setattr(bootstrap.sys, "executable", "/opt/other/bin/python3")
    bootstrap.prepare(tmp_path / "env", ["bench"])
    assert installs[2:] == [("make", False), ("install", ["bench"])]


def test_interrupted_installation_starts_over(bootstrap, installs, tmp_path, monkeypatch):
    def fails(environment, torch, extras):
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(bootstrap, "_install", fails)
        with pytest.raises(KeyboardInterrupt):
            bootstrap.prepare(tmp_path / "env", ["bench"])
    bootstrap.prepare(tmp_path / "env", ["bench"])
    assert installs == [("make", False), ("make", False), ("install", ["bench"])]


def test_foreign_folder_is_left_alone(bootstrap, tmp_path):
    mine = tmp_path / "env" / "thesis.tex"
    mine.parent.mkdir()
    mine.touch()
    with pytest.raises(bootstrap.SetupError, match="was not made by this command"):
        bootstrap._make_venv(tmp_path / "env", bootstrap.Torch(inherited=False, gpu=False))
    assert mine.exists()


def test_python_without_venv_and_pip_says_what_to_install(bootstrap, tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "_can_make_venv", lambda: False)
    monkeypatch.setattr(bootstrap, "_add_venv_support", lambda: None)
    monkeypatch.setattr(bootstrap, "_has_pip", lambda: False)
    package = f"apt-get install python3.{sys.version_info.minor}-venv"
    with pytest.raises(bootstrap.SetupError, match=package):
        bootstrap._make_venv(tmp_path / "env", bootstrap.Torch(inherited=False, gpu=False))
    assert not (tmp_path / "env").exists()


def test_failing_command_is_named(bootstrap):
    with pytest.raises(bootstrap.SetupError, match=r"import sys; sys.exit\(3\).*exit status 3"):
        bootstrap._run([sys.executable, "-c", "import sys; sys.exit(3)"])


@pytest.mark.parametrize(
    ("gpu", "found", "inherited"),
    [
        (True, ((2, 11), True), True),
        (True, ((2, 11), False), False),
        (True, ((2, 8), True), False),
        (True, None, False),
        (False, ((2, 11), True), False),
    ],
)
def test_torch_is_inherited_only_when_it_can_use_the_gpu(bootstrap, monkeypatch, gpu, found, inherited):
    monkeypatch.setattr(bootstrap, "torch_of", lambda python: found)
    assert bootstrap.choose_torch(gpu) == bootstrap.Torch(inherited=inherited, gpu=gpu)


def test_inheriting_environment_sees_our_packages_and_runs_its_own_scripts(bootstrap, tmp_path):
    """Also when this interpreter is in a virtual environment itself, whose packages venv alone would not show."""
    folder = tmp_path / "env"
    bootstrap._make_venv(folder, bootstrap.Torch(inherited=True, gpu=True))
    environment = bootstrap.Environment(folder, gpu=True)
    bootstrap._write_console_script(environment, "show", "platform_of")
    site = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (site / "platform_of.py").write_text(
        "import json, sys, rich\ndef main():\n    print(json.dumps([sys.prefix, rich.__file__]))\n"
    )
    shown = subprocess.run([environment.command("show")], capture_output=True, text=True, check=True)
    prefix, rich = json.loads(shown.stdout)
    assert Path(prefix) == folder
    assert Path(rich).exists()


@pytest.mark.install
def test_inheriting_environment_installs_without_a_registry(bootstrap, tmp_path, monkeypatch):
    """As on a GPU machine that nothing can be fetched to, and whose Python has all that is needed."""
    monkeypatch.setattr(bootstrap, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(bootstrap, "torch_of", lambda python: ((2, 13), True))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    environment = bootstrap.prepare(tmp_path / "env", ["bench"])
    program = "import sys, slideformer_backend as s, torch; print(sys.prefix, s.__file__, torch.__file__, sep='\\n')"
    shown = subprocess.run(
        [environment.python, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    prefix, ours, torch = map(Path, shown.stdout.split())
    assert prefix == tmp_path / "env"
    assert ours.is_relative_to(ROOT)
    assert not torch.is_relative_to(prefix)
    assert environment.command("accelerate").read_text().startswith(f"#!{environment.python}\n")


def test_torch_is_asked_for_in_another_process(bootstrap):
    version, cuda = bootstrap.torch_of(sys.executable)
    assert version >= (2, 9)
    assert isinstance(cuda, bool)
    assert bootstrap.torch_of("/usr/bin/false") is None


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_need_only_the_standard_library(command, tmp_path):
    """`-I -S`: no site-packages; any working directory."""
    shown = subprocess.run(
        [sys.executable, "-I", "-S", str(ROOT / command), "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert "--venv" in shown.stdout


def test_no_registry_is_named():
    """Packages come from wherever the machine's pip is told to take them."""
    files = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / name for name in ("tests/run.py", ".ci/run", "Makefile"))]
    files.append(ROOT / "tests" / "constraints.txt")
    for file in files:
        assert not re.search(r"https?://|--(extra-)?index-url", file.read_text()), file


def test_constraints_pin_what_they_name():
    lines = (ROOT / "tests" / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins
    for pin in pins:
        assert re.fullmatch(r"[\w-]+==[\w.]+(; python_version >= \"3\.\d+\")?", pin), pin


def test_constraints_and_bootstrap_agree_on_torch(bootstrap):
    assert bootstrap.TORCH in (ROOT / "tests" / "constraints.txt").read_text().splitlines()
