"""Loads the scripts of benchmarks/ as modules: they belong to no package."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
FINETUNE = ROOT / "benchmarks" / "finetune"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def load_script() -> Callable[[Path], ModuleType]:
    return load


@pytest.fixture
def bootstrap() -> ModuleType:
    return load(ROOT / "benchmarks" / "bootstrap.py")


@pytest.fixture(scope="session")
def fetch() -> ModuleType:
    return load(FINETUNE / "fetch.py")
