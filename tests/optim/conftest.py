"""Set-up for the optimizer tests; optim_cases.py beside this file has what they share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
pytest.register_assert_rewrite("optim_cases")


@pytest.fixture(autouse=True)
def _one_thread():
    """The machine is shared, and torch's results must not depend on how it splits work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
