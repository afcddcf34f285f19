"""The device and the quiet, deterministic surroundings of parity tests."""

import os
import zlib

import pytest
import torch

from slideformer_backend.engine.residency import Residency
from slideformer_backend.engine.window import Window

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture
def device():
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(autouse=True)
def sliding(monkeypatch, device):
    """On a GPU too nothing moves there by itself: with all its memory every one of these small models would, before its
    third step, and plain torch's updates on the device round apart from those on the host."""
    if device.type == "cuda" and os.environ.get("PLACEMENT") != "auto":
        for name, value in (("budget", 0), ("room", None), ("spare", None)):
            monkeypatch.setattr(Residency, name, value)


@pytest.fixture(autouse=True)
def gradients(monkeypatch, request):
    """In every other test, or in all with ``GRADIENTS=device``, gradients of earlier micro-batches wait in slots."""
    every_other = ("host", "device")[zlib.crc32(request.node.name.encode()) % 2]
    if os.environ.get("GRADIENTS", every_other) == "device":
        monkeypatch.setattr(Window, "has_spare_gradient_slots", lambda window, unit: True)


@pytest.fixture(autouse=True)
def deterministic():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
