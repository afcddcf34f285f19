"""Lays the source out as it is installed, so that a type checker finds the sibling folders inside the package."""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def lay_out(folder: Path) -> Path:
    """Makes ``folder/slideformer_backend`` of links into the source tree and returns ``folder``."""
    package = folder / "slideformer_backend"
    package.mkdir()
    for item in (ROOT / "slideformer_backend").iterdir():
        if item.name != "__pycache__":
            (package / item.name).symlink_to(item)
    for name in ("integrations", "kernels"):
        (package / name).symlink_to(ROOT / name)
    return folder


def check() -> int:
    """Runs the strict type check on the tree laid out that way; returns its exit status."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = lay_out(Path(scratch))
        options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
        return subprocess.run([sys.executable, "-m", "mypy", *options], cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(check())
