"""An interpreter that has DeepSpeed: this one, or one that borrows its packages and adds DeepSpeed to them."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

DEEPSPEED = "deepspeed==0.19.8"
INSTALL_TIMEOUT = 240


def python_with_deepspeed():
    """(path of the interpreter, "") or (None, why there is none).

    DeepSpeed is installed beside our packages, into an environment of its own that is kept in the tests' cache: it
    comes as source and brings more packages along, and a failure of that must not take the test environment with it.
    Nothing is compiled: on the CPU, ZeRO-Offload runs with torch's AdamW (see ``zero_config``).
    """
    if importlib.util.find_spec("deepspeed") is not None:
        return Path(sys.executable), ""
    cache = Path(os.environ.get("SLIDEFORMER_TEST_CACHE", tempfile.gettempdir()))
    key = hashlib.sha256(f"{DEEPSPEED} {sys.executable} {sys.version}".encode()).hexdigest()[:12]
    folder = cache / f"peers-{key}"
    python, stamp = folder / "bin" / "python", folder / "ready"
    if stamp.exists():
        return python, ""
    try:
        _make(folder, python)
    except (subprocess.SubprocessError, OSError) as error:
        words = getattr(error, "stderr", None) or str(error)
        return None, f"{DEEPSPEED} cannot be installed here: {words.strip().splitlines()[-1][:300]}"
    stamp.touch()
    return python, ""


def _make(folder, python):
    def run(*command):
        options = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "timeout": INSTALL_TIMEOUT}
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        subprocess.run(list(map(str, command)), check=True, env={**kept, "DS_BUILD_OPS": "0"}, **options)

    run(sys.executable, "-m", "venv", "--without-pip", "--clear", folder)
    site = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    outer = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "outer.pth").write_text("".join(f"{path}\n" for path in sorted(outer)))
    # No build isolation: its setup needs the torch that is here, and nothing is fetched a second time.
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check",
        "--no-build-isolation", DEEPSPEED,
    )  # fmt: skip
