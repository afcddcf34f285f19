"""Rules of the source that a machine can check: layers, lint, types, names of the machine it was written on."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Each layer imports those before it, never one after it. The last is the way in from outside.
LAYERS = (
    ("errors", "mistakes", "_imports", "kernels", "trace", "trace_summary"),
    ("config", "lsp_settings"),
    ("plan",),
    ("storage",),
    ("transfer",),
    ("optim",),
    ("lsp",),
    ("engine",),
    ("checkpoint",),
    ("api", "metrics", "status"),
    ("integrations",),
    ("benchmarks",),
    ("_autoload", "run", "commands", "cli"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
OTHERS_OF_HUGGING_FACE = ("accelerate", "transformers", "trl", "peft")


def sources():
    for folder in ("slideformer_backend", "benchmarks/harness", "integrations", "kernels"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def module_of(path):
    """Name of the package that holds a file, as it is installed."""
    parts = path.relative_to(ROOT).parts[:-1]
    return parts if parts[0] == "slideformer_backend" else ("slideformer_backend", *parts)


def layer_of(path):
    parts = (*module_of(path), path.stem)
    return parts[1]


def imports(path):
    """Absolute names of what a file imports, wherever in the file: modules, or names in them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module_of(path)
            base = package[: len(package) - node.level + 1] if node.level else ()
            names = (*base, *([node.module] if node.module else []))
            yield from ((".".join((*names, alias.name)), node.lineno) for alias in node.names)


def test_later_layers_import_earlier_ones_only():
    wrong = []
    for path in sources():
        here = layer_of(path)
        if here == "__init__":
            continue
        assert here in RANK, f"{path} belongs to no layer: give it one"
        for name, line in imports(path):
            top, *rest = name.split(".")
            if top in ("integrations", "kernels"):
                wrong.append(f"{path}:{line}: {top} is importable only as slideformer_backend.{top}")
            if top == "slideformer_backend" and rest and rest[0] in RANK and RANK[rest[0]] > RANK[here]:
                wrong.append(f"{path}:{line}: {here} imports {rest[0]}")
            if top == "slideformer_backend" and here == "kernels" and rest[:1] != ["kernels"]:
                wrong.append(f"{path}:{line}: kernels import nothing of ours")
    assert wrong == []


def test_only_integrations_knows_hugging_faces_libraries():
    wrong = [
        f"{path}:{line}: {name}"
        for path in sources()
        if layer_of(path) not in ("integrations", "benchmarks")
        for name, line in imports(path)
        if name.split(".")[0] in OTHERS_OF_HUGGING_FACE
    ]
    assert wrong == []


def test_files_are_short():
    assert [path for path in sources() if len(path.read_text().splitlines()) > 400] == []


def test_lint():
    pytest.importorskip("ruff", reason="ruff is part of the extra [test]")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "."], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(600)
def test_types(tmp_path):
    """Strict. The tree is laid out as it is installed, so that the sibling folders are found inside the package."""
    pytest.importorskip("mypy", reason="mypy is part of the extra [test]")
    package = tmp_path / "slideformer_backend"
    package.mkdir()
    (package / "benchmarks").mkdir()
    (package / "benchmarks" / "harness").symlink_to(ROOT / "benchmarks" / "harness")
    for item in [*(ROOT / "slideformer_backend").iterdir(), ROOT / "integrations", ROOT / "kernels"]:
        if item.name != "__pycache__":
            (package / item.name).symlink_to(item)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
