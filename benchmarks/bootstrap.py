"""Set up a virtual environment for the two README commands, from nothing but Python >= 3.10.

Only the standard library is imported here: this file runs before anything is installed. Packages come through pip as
the machine has it configured; no registry is named, so mirrors, proxies and wheel folders work through pip's own
settings (PIP_INDEX_URL, PIP_FIND_LINKS, PIP_NO_INDEX and the like).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "tests" / "constraints.txt"
TORCH = "torch==2.13.0"
OLDEST_TORCH = (2, 9)
STAMP = "slideformer-setup.json"

# Run by an interpreter to say which torch it has; prints e.g. "2.11.0+cu130 True".
_PROBE_TORCH = "import torch; print(torch.__version__, torch.cuda.is_available())"


class SetupError(RuntimeError):
    """The machine lacks something that only its owner can add; the message says what and how."""


class Torch(NamedTuple):
    """Which torch the environment uses."""

    inherited: bool  # taken from the running interpreter instead of being installed
    gpu: bool  # an NVIDIA GPU is in this machine

    @property
    def words(self) -> str:
        if self.inherited:
            return "the CUDA torch of this interpreter"
        return f"{TORCH} ({'CUDA build' if self.gpu else 'runs on the CPU here'})"


class Environment(NamedTuple):
    """A virtual environment that is ready for use."""

    folder: Path
    gpu: bool

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def command(self, name: str) -> Path:
        """The console script `name` of this environment."""
        return self.folder / "bin" / name


def say(message: str) -> None:
    print(f"[setup] {message}", flush=True)


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver lists a GPU on this machine (asked without torch)."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU" in listed.stdout


def torch_of(python: str | Path) -> tuple[tuple[int, int], bool] | None:
    """(version, CUDA works) of the torch that `python` imports; None when it has none."""
    asked = subprocess.run([str(python), "-c", _PROBE_TORCH], capture_output=True, text=True, check=False)
    if asked.returncode != 0 or not asked.stdout.strip():
        return None
    version, cuda = asked.stdout.split()[-2:]
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)), cuda == "True"


def choose_torch(gpu: bool) -> Torch:
    """A CUDA torch that is already here is used as it is on a machine with a GPU; otherwise torch is installed."""
    found = torch_of(sys.executable) if gpu else None
    return Torch(inherited=found is not None and found[1] and found[0] >= OLDEST_TORCH, gpu=gpu)


def prepare(folder: Path, extras: Iterable[str]) -> Environment:
    """Make the environment in `folder`, or bring it up to date, with the package (editable) and its `extras`.

    A second call changes nothing. Raises `SetupError`, saying what to do, when this Python can make no environment and
    that cannot be mended here, when `folder` holds something else, or when pip fails.
    """
    started = time.monotonic()
    folder = folder.resolve()
    gpu = has_nvidia_gpu()
    environment = Environment(folder, gpu)
    stamp = _read_stamp(environment)
    base = _fingerprint([str(ROOT), sys.executable, sys.version, str(gpu)])
    files = (ROOT / "setup.cfg", ROOT / "pyproject.toml", CONSTRAINTS)
    contents = _fingerprint([TORCH, *(_text(name) for name in files)])
    running_inside = Path(sys.prefix).resolve() == folder and "base" in stamp
    usable = environment.python.exists() and (running_inside or stamp.get("base") == base)
    have = stamp.get("extras") if usable else None
    installed = set(have) if isinstance(have, list) else set()
    wanted = sorted(installed.union(extras))
    if usable and stamp.get("contents") == contents and wanted == sorted(installed):
        say(f"environment {folder} is up to date")
        return environment
    torch = Torch(inherited=stamp.get("inherited") is True, gpu=gpu) if usable else choose_torch(gpu)
    if not usable:
        say(f"making a virtual environment in {folder} with Python {sys.version.split()[0]} and {torch.words}")
        _make_venv(folder, torch)
    _install(environment, torch, wanted)
    base = str(stamp["base"]) if running_inside else base
    _write_stamp(folder, {"base": base, "contents": contents, "extras": wanted, "inherited": torch.inherited})
    say(f"environment ready after {time.monotonic() - started:.0f} s")
    return environment


def _read_stamp(environment: Environment) -> dict[str, object]:
    try:
        stamp = json.loads((environment.folder / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _write_stamp(folder: Path, stamp: Mapping[str, object]) -> None:
    (folder / STAMP).write_text(json.dumps(stamp))


def _fingerprint(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _make_venv(folder: Path, torch: Torch) -> None:
    if folder.exists() and any(folder.iterdir()):
        if not (folder / STAMP).exists():
            raise SetupError(f"{folder} was not made by this command; remove it, or name another folder with --venv")
        shutil.rmtree(folder)
    options = ["--system-site-packages"] if torch.inherited else []
    if not _can_make_venv():
        _add_venv_support()
    if not _can_make_venv():
        options.append("--without-pip")
        if not _has_pip():
            raise SetupError(_venv_advice())
    folder.mkdir(parents=True, exist_ok=True)
    _write_stamp(folder, {})  # from here on the folder is ours to remove, also after an interruption
    _run([sys.executable, "-m", "venv", *options, str(folder)])
    if torch.inherited:
        _inherit_site_packages(folder)


def _can_make_venv() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("venv", "ensurepip"))


def _has_pip() -> bool:
    """Whether this interpreter has a pip that can install into another environment (22.3 and later)."""
    asked = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        return False
    major, minor = asked.stdout.split()[1].split(".")[:2]
    return (int(major), int(minor)) >= (22, 3)


def _add_venv_support() -> None:
    """Debian ships `venv` in a package of its own: install it when we may."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None or not sys.executable.startswith("/usr/bin/"):
        return
    package = f"python3.{sys.version_info.minor}-venv"
    say(f"this Python has no venv module: installing the Debian package {package}")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package],
    ):
        if subprocess.run(command, env=quiet, stdin=subprocess.DEVNULL, check=False).returncode != 0:
            say(f"`{' '.join(command)}` failed")
            return
    importlib.invalidate_caches()


def _venv_advice() -> str:
    package = f"python3.{sys.version_info.minor}-venv"
    return (
        f"{sys.executable} can neither make a virtual environment (module `ensurepip` is missing) nor run pip. "
        f"On Debian or Ubuntu run `apt-get install {package}` as root, then start this command again."
    )


def _inherit_site_packages(folder: Path) -> None:
    """Show the running interpreter's packages to the new environment.

    `--system-site-packages` alone shows those of the base when that interpreter is itself in a virtual environment.
    """
    seen = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    target = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / "inherited.pth"
    target.write_text("".join(f"{path}\n" for path in sorted(seen)))


def _install(environment: Environment, torch: Torch, extras: Sequence[str]) -> None:
    pip = [str(environment.python), "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode != 0:
        pip = [sys.executable, "-m", "pip", "--python", str(environment.python)]
    package = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    # --no-compile: a minute for byte code of which most is never read; the first import of a module writes its own
    command = [*pip, "install", "--no-compile", "--disable-pip-version-check", "--progress-bar", "off", "-qq"]
    if torch.inherited:
        if importlib.util.find_spec("setuptools") is not None:
            # venv brings an old one up to Python 3.11; it would hide the one that fits the inherited torch.
            subprocess.run([*pip, "uninstall", "--yes", "-qq", "setuptools"], check=False)
            command.append("--no-build-isolation")
    else:
        command += ["--constraint", str(CONSTRAINTS), TORCH]
    say(f"installing the package with extras [{', '.join(extras)}]; the first time this takes minutes")
    _run([*command, "--editable", package])
    if not environment.command("accelerate").exists():
        _write_console_script(environment, "accelerate", "accelerate.commands.accelerate_cli")
    if torch.gpu:
        found = torch_of(environment.python)
        if found is None or not found[1]:
            say("WARNING: there is an NVIDIA GPU, but the installed torch cannot use it; everything runs on the CPU")


def _write_console_script(environment: Environment, name: str, module: str) -> None:
    """pip writes no console script for an inherited package, and its parent's would start the parent's interpreter."""
    script = environment.command(name)
    script.write_text(f"#!{environment.python}\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
    script.chmod(0o755)


def _run(command: Sequence[str]) -> None:
    """Run a command to its end, saying now and then that it is still at work."""
    started = time.monotonic()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as running:
        while True:
            try:
                status = running.wait(timeout=30)
                break
            except subprocess.TimeoutExpired:
                say(f"still at it after {time.monotonic() - started:.0f} s")
    if status != 0:
        raise SetupError(f"`{shlex.join(command)}` failed with exit status {status}; its output above says why")
