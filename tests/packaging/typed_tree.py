"""Lays the source out as it is installed, so that a type checker finds the sibling folders inside the package."""

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
