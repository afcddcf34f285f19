"""Every way to install, used from every place; what is in the wheel is what is in the tree."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "slideformer_backend": ".",
    "benchmarks/harness": "slideformer_backend",
    "integrations": "slideformer_backend",
    "kernels": "slideformer_backend",
}

USE = """
import importlib, importlib.metadata, os
import slideformer_backend
from slideformer_backend import SlideFormerConfig
for name in ("integrations.session", "integrations.hooks", "kernels", "cli", "run", "benchmarks.harness.spec"):
    importlib.import_module("slideformer_backend." + name)
points = [point for point in importlib.metadata.entry_points(group="torch.backends")]
ours = [point.load() for point in points if point.name == "slideformer_backend"]
assert [point.__name__ for point in ours] == ["autoload"], points
import kernels
assert kernels.stub_of_hugging_face, kernels
try:
    import integrations
except ModuleNotFoundError:
    assert os.getcwd() != {root!r}
print("FILE", slideformer_backend.__file__, importlib.metadata.version("slideformer-backend"))
"""


def run(*command, cwd, **variables):
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**kept, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the source tree, so that builds leave nothing in it."""
    folder = tmp_path_factory.mktemp("source") / "repository"
    folder.mkdir()
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "CHANGELOG.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)
    (folder / "tests").mkdir()
    (folder / "tests" / "test_it.py").write_text(f"def test_it():\n    exec({USE.format(root=str(folder))!r})\n")
    return folder


def build(kind, source, target):
    target.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; print('BUILT', build_meta.build_{kind}({str(target)!r}))"
    return target / run(sys.executable, "-c", code, cwd=source).split("BUILT ")[1].strip()


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_the_tree(wheel):
    expected = {}
    for name, parent in PACKAGES.items():
        for path in sorted((ROOT / name).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                expected[os.path.normpath(os.path.join(parent, path.relative_to(ROOT)))] = path.read_bytes()
    assert contents(wheel) == expected


def test_kernels_is_a_folder_without_init():
    """Hazard: with one, `import transformers` in the repository root takes it for Hugging Face's kernels and fails."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert any((ROOT / "kernels").iterdir())


def test_the_sdist_builds_the_same_wheel(source, wheel, tmp_path):
    archive = build("sdist", source, tmp_path / "sdist")
    shutil.unpack_archive(archive, tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir() and path.name != "sdist")
    assert contents(build("wheel", unpacked, tmp_path / "again")) == contents(wheel)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Makes a virtual environment that sees the packages of the running one, and a stub of Hugging Face's kernels."""

    def make(name):
        folder = tmp_path_factory.mktemp(name)
        run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
        (site,) = (folder / "env" / "lib").glob("python*/site-packages")
        outer = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (site / "outer.pth").write_text("".join(f"{path}\n" for path in outer))
        (site / "kernels").mkdir()
        (site / "kernels" / "__init__.py").write_text("stub_of_hugging_face = True\n")
        (site / "kernels-0.18.5.dist-info").mkdir()
        (site / "kernels-0.18.5.dist-info" / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.5\n"
        )
        return folder / "env" / "bin"

    return make


MODES = {
    "wheel": (),
    "editable": ("-e",),
    "strict": ("--config-settings", "editable_mode=strict", "-e"),
}


@pytest.fixture(scope="module", params=MODES)
def installed(request, environment, source, wheel):
    programs = environment(request.param)
    what = wheel if request.param == "wheel" else source
    run(
        sys.executable, "-m", "pip", "--python", programs / "python", "install", "--quiet", "--no-deps", "--no-index",
        "--no-build-isolation", "--ignore-installed", *MODES[request.param], what, cwd=programs,
    )  # fmt: skip
    return programs


class TestUse:
    @pytest.mark.parametrize("place", ["root", "elsewhere"])
    def test_from(self, installed, source, tmp_path, place):
        cwd = source if place == "root" else tmp_path
        assert "FILE" in run(installed / "python", "-c", USE.format(root=str(source)), cwd=cwd)

    @pytest.mark.parametrize("place", ["root", "elsewhere"])
    def test_under_pytest(self, installed, source, tmp_path, place):
        arguments = ("-q", "-p", "no:cacheprovider", "-c", source / "pyproject.toml", source / "tests")
        cwd = source if place == "root" else tmp_path
        assert "1 passed" in run(installed / "python", "-m", "pytest", *arguments, cwd=cwd)
        code = "import sys, pytest; sys.path.remove(''); sys.exit(pytest.main(sys.argv[1:]))"  # what `pytest` does
        assert "1 passed" in run(installed / "python", "-c", code, *arguments, cwd=cwd)

    def test_the_command(self, installed, tmp_path):
        assert run(installed / "slideformer", "--version", cwd=tmp_path).strip()


def test_transformers_in_the_repository_root_finds_hugging_faces_kernels(environment, source):
    code = "import transformers.utils as u, kernels; print(u.is_kernels_available(), kernels.stub_of_hugging_face)"
    assert "True True" in run(environment("hub") / "python", "-c", code, cwd=source)
