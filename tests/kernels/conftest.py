"""Set-up for the kernel tests: Triton's interpreter where there is no GPU, and NaN in memory that is not written."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernels.truth import DEVICE

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def _import_interpreted() -> None:
    """Imports all kernels with the interpreter switched on; whatever runs later in this process does not see it."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        for path in sorted(KERNELS.glob("*.py")):
            importlib.import_module(f"slideformer_backend.kernels.{path.stem}")
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


if DEVICE.type == "cpu":
    _import_interpreted()


@pytest.fixture(autouse=True)
def _poisoned_and_single_threaded(monkeypatch):
    """``torch.empty`` gives NaN, so that a result that was never written cannot pass."""
    if DEVICE.type == "cpu":
        from triton.runtime import interpreter

        from tests.kernels.rounding import convert_float

        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(interpreter, "_convert_float", convert_float)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    with np.errstate(all="ignore"):  # lanes that a mask leaves out compute with whatever is there
        yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
