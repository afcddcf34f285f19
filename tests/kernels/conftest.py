"""Set-up for the kernel tests: Triton's interpreter where there is no GPU, and NaN in memory that is not written."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from tests.kernels.truth import DEVICE

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


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
