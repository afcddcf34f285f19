"""Which way files are accessed, and that a fallback is said once; memory that can be given back."""

from __future__ import annotations

import errno
import importlib
import mmap
import os
import sys

import pytest
import torch

from slideformer_backend.storage import PagedSlab, PosixTier, SpillDirectory, System
from slideformer_backend.storage.kvikio_tier import KvikioTier, file_tier
from slideformer_backend.storage.posix_tier import ALIGNMENTS


class NoDirect(System):
    """A file system without O_DIRECT; some make the file before they refuse the flag."""

    def __init__(self, makes_the_file: bool) -> None:
        self._makes_the_file = makes_the_file

    def open(self, path, flags, mode=0o600):
        if flags & os.O_DIRECT:
            if self._makes_the_file:
                os.close(super().open(path, flags & ~os.O_DIRECT, mode))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, flags, mode)


class Strict(System):
    """A device whose direct I/O wants more than a page."""

    def _check(self, fd, buffer, offset):
        address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
        if any(number % 16384 for number in (address, len(buffer), offset)):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def read_at(self, fd, buffer, offset):
        self._check(fd, buffer, offset)
        return super().read_at(fd, buffer, offset)

    def write_at(self, fd, buffer, offset):
        self._check(fd, buffer, offset)
        return super().write_at(fd, buffer, offset)


def _round_trip(tier, nbytes=100_003):
    values = torch.randint(1, 256, (nbytes,), dtype=torch.uint8)
    region = tier.allocate("unit-0", nbytes)
    tier.write(region, 0, values).synchronize()
    found = torch.empty_like(values)
    tier.read(region, 0, found).synchronize()
    return torch.equal(values, found)


@pytest.mark.parametrize("makes_the_file", [True, False])
def test_a_file_system_without_direct_io_is_said_once(folder, caplog, makes_the_file):
    directory = SpillDirectory(folder, NoDirect(makes_the_file))
    tier = PosixTier(directory)
    assert tier.alignment == 0
    assert _round_trip(tier)
    assert len([record for record in caplog.records if "O_DIRECT" in record.message]) == 1
    assert tier.describe()["access"] == "page cache"
    tier.close()
    directory.close()


def test_a_strict_device_gets_what_it_wants(folder, caplog):
    directory = SpillDirectory(folder, Strict())
    tier = PosixTier(directory, block=1 << 16, request=1 << 17)
    assert tier.alignment == ALIGNMENTS[1] == 16384
    assert _round_trip(tier)
    assert caplog.records == []
    tier.close()
    directory.close()


def test_a_file_system_without_fallocate_is_asked_for_its_free_space(folder):
    class NoAllocate(System):
        free = 1 << 20

        def allocate(self, fd, nbytes):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

        def free_bytes(self, path):
            return self.free

    system = NoAllocate()
    directory = SpillDirectory(folder, system)
    tier = PosixTier(directory)
    assert _round_trip(tier)
    with pytest.raises(Exception, match="ENOSPC"):
        tier.allocate("unit-1", 2 << 20)
    tier.close()
    directory.close()


def test_a_kvikio_that_cannot_be_used_is_said(folder, caplog, tmp_path, monkeypatch):
    """Without a GPU kvikio's I/O, or already its import, fails for want of a library."""
    try:
        importlib.import_module("kvikio")
    except ImportError:
        (tmp_path / "kvikio").mkdir()
        (tmp_path / "kvikio" / "__init__.py").write_text("raise ImportError('libcuda.so.1: cannot open')\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "kvikio", raising=False)
    directory = SpillDirectory(folder)
    tier = file_tier(directory, from_device=True)
    if torch.cuda.is_available():
        assert isinstance(tier, (KvikioTier, PosixTier))
    else:
        assert isinstance(tier, PosixTier)
        assert len([record for record in caplog.records if "kvikio cannot be used" in record.message]) == 1
    assert _round_trip(tier)
    tier.close()
    directory.close()


def test_host_buffers_need_no_kvikio(folder, caplog):
    directory = SpillDirectory(folder)
    tier = file_tier(directory, from_device=False)
    assert isinstance(tier, PosixTier)
    assert caplog.records == []
    tier.close()
    directory.close()


def _resident(slab):
    """Bytes of the slab that have pages, in steps of 4 KiB."""
    start = slab.flat.data_ptr()
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(start // mmap.PAGESIZE * 8)
        entries = pages.read(-(-slab.nbytes // mmap.PAGESIZE) * 8)
    return sum(entries[i + 7] >> 7 for i in range(0, len(entries), 8)) * mmap.PAGESIZE


@pytest.mark.parametrize("nbytes", [1, 4095, (4 << 20) + 17])
def test_a_paged_slab_gives_its_pages_back_and_keeps_its_address(nbytes):
    slab = PagedSlab("states", nbytes)
    view = slab.view(torch.uint8, 0, nbytes)
    assert slab.nbytes == nbytes
    assert slab.flat.data_ptr() % mmap.PAGESIZE == 0
    for _ in range(2):
        assert not view.any()
        view.fill_(7)
        assert _resident(slab) >= nbytes
        slab.drop()
        assert _resident(slab) == 0
    kept = slab.flat.data_ptr()
    del slab
    view.fill_(3)
    assert view.data_ptr() == kept
    assert (view == 3).all()


def test_address_space_costs_no_memory():
    slabs = [PagedSlab("large", 1 << 40) for _ in range(4)]
    assert all(slab.flat[-1] == 0 for slab in slabs)
