"""When boundaries go straight from the device to files: only where GPUDirect Storage itself would carry them."""

from __future__ import annotations

import contextlib
import enum
import os
import sys
import types

import numpy as np
import pytest
import torch

from slideformer_backend.errors import StorageError
from slideformer_backend.storage import SpillDirectory
from slideformer_backend.storage.kvikio_tier import KvikioTier, direct_tier

from .faults import FaultySystem


class CompatMode(enum.Enum):
    OFF, ON, AUTO = range(3)


class Done:
    def __init__(self, count: int) -> None:
        self.count = count

    def get(self) -> int:
        return self.count


class CuFile:
    """Plain calls in kvikio's words."""

    def __init__(self, path: str, flags: str) -> None:
        assert flags == "r+"
        self.fd = os.open(path, os.O_RDWR)

    def pread(self, buffer: np.ndarray, size: int, offset: int) -> Done:
        return Done(os.preadv(self.fd, [buffer.data], offset))

    def pwrite(self, buffer: np.ndarray, size: int, offset: int) -> Done:
        return Done(os.pwritev(self.fd, [buffer.data], offset))

    def close(self) -> None:
        os.close(self.fd)


@pytest.fixture
def kvikio(monkeypatch):
    """A kvikio whose driver and mode a test can choose, in place of the real one."""

    def install(*, has_driver: bool, is_posix: bool) -> dict[str, object]:
        settings: dict[str, object] = {"compat_mode": CompatMode.OFF, "num_threads": 1}

        @contextlib.contextmanager
        def setting(values):
            before = dict(settings)
            settings.update(values)
            yield
            settings.clear()
            settings.update(before)

        modules = {
            "kvikio": types.ModuleType("kvikio"),
            "kvikio.defaults": types.ModuleType("kvikio.defaults"),
            "kvikio.cufile_driver": types.ModuleType("kvikio.cufile_driver"),
        }
        modules["kvikio"].__spec__ = types.SimpleNamespace(name="kvikio")
        vars(modules["kvikio"]).update(CompatMode=CompatMode, CuFile=CuFile)
        vars(modules["kvikio.defaults"]).update(
            set=setting, get=settings.__getitem__, is_compat_mode_preferred=lambda: is_posix
        )
        vars(modules["kvikio.cufile_driver"])["get"] = {"is_gds_available": has_driver}.__getitem__
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return settings

    return install


@pytest.mark.parametrize(("has_driver", "is_posix"), [(True, False), (False, False), (True, True), (False, True)])
def test_only_with_a_driver_and_without_compatibility_mode(folder, kvikio, caplog, has_driver, is_posix):
    caplog.set_level("INFO")
    settings = kvikio(has_driver=has_driver, is_posix=is_posix)
    before = dict(settings)
    directory = SpillDirectory(folder, system := FaultySystem())
    tier = direct_tier(directory, less="train less")
    if not has_driver or is_posix:
        assert tier is None
        assert len([record for record in caplog.records if "no GPUDirect Storage" in record.message]) == 1
    else:
        assert isinstance(tier, KvikioTier)
        values = torch.randint(1, 256, (5_000_003,), dtype=torch.uint8)
        region = tier.allocate("boundary-1", values.numel())
        tier.write(region, 0, values).synchronize()
        found = torch.empty_like(values)
        tier.read(region, 0, found).synchronize()
        assert torch.equal(found, values)
        system.at, system.fault = {len(system.calls) + 1}, "ENOSPC"
        with pytest.raises(StorageError, match="free space there, or train less"):
            tier.allocate("boundary-2", 4096)
        assert system.injected == ["allocate"]
        tier.close()
    assert settings == before, "kvikio's settings are the process's"
    assert os.listdir(directory.path) == ["lock"]
    directory.close()


def test_without_kvikio_there_is_none(folder, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setitem(sys.modules, "kvikio", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    directory = SpillDirectory(folder)
    assert direct_tier(directory) is None
    assert len([record for record in caplog.records if "not installed" in record.message]) == 1
    directory.close()
