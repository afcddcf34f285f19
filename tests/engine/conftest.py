"""Fixtures of the engine tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """The machine is small and results must not depend on it."""
    torch.set_num_threads(1)


@pytest.fixture
def device():
    """A GPU where there is one: every test here runs on both."""
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
