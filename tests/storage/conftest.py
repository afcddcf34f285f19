"""Every tier, in a folder of its own."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import pytest
import torch

from slideformer_backend.storage import HostMemory, HostTier, PosixTier, SpillDirectory
from slideformer_backend.storage.kvikio_tier import KvikioTier, file_tier

BLOCK, REQUEST = 1 << 16, 1 << 18
"""Small, so that every kind of boundary is met in a small region."""
TIERS = ("pinned", "pageable", "direct", "page cache", "tmpfs", "kvikio")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "nvme"
    path.mkdir(mode=0o700)
    return str(path)


@pytest.fixture(params=TIERS)
def tier(request, folder):
    kind = request.param
    if kind in ("pinned", "pageable"):
        made = HostTier(HostMemory(pin=torch.cuda.is_available()), pinned=kind == "pinned", threads=3)
        yield made
        made.close()
        return
    if kind == "tmpfs":
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("no tmpfs")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
            yield from _file_tier(memory, kind)
    else:
        yield from _file_tier(folder, kind)
    assert [name for name in os.listdir(folder) if name.startswith("slideformer")] == []


def _file_tier(folder, kind):
    directory = SpillDirectory(folder)
    try:
        if kind == "kvikio":
            usable = file_tier(directory, from_device=True)
            usable.close()
            if not isinstance(usable, KvikioTier):
                pytest.skip("kvikio needs the CUDA driver")
            made = KvikioTier(directory, 3, block=BLOCK, request=REQUEST)
        else:
            made = PosixTier(directory, 3, block=BLOCK, request=REQUEST, direct=kind != "page cache")
        yield made
        made.close()
        assert set(os.listdir(directory.path)) == {"lock"}, "a region was not freed"
    finally:
        directory.close()


@pytest.fixture
def descriptors():
    """No descriptor is left open; what earlier tests left to the garbage collector is not counted."""
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert len(list(Path("/proc/self/fd").iterdir())) == before
