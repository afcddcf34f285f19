"""Frames: the same memory at a slab's address and at its own, no memory while the slab is empty."""

from __future__ import annotations

import os

import pytest
import torch

from slideformer_backend.errors import StorageError
from slideformer_backend.storage import FramedSlab, Frames, HostMemory, PosixTier, SpillDirectory

NBYTES = 3 * 4096 + 256


def _slabs(count):
    memory = HostMemory(pin=False)
    frames = Frames(NBYTES, memory)
    return memory, [FramedSlab(f"slab {number}", NBYTES, frames) for number in range(count)]


def test_a_frame_shows_at_both_addresses():
    _, (slab,) = _slabs(1)
    view, address = slab.view(torch.float32, 256, 5), slab.flat.data_ptr()
    slab.enter()
    slab.memory.fill_(7)
    assert slab.memory.data_ptr() != address
    assert bytes(slab.flat.numpy()) == bytes([7]) * NBYTES
    view.fill_(1.5)
    assert slab.memory[256:276].view(torch.float32).tolist() == [1.5] * 5
    slab.drop()
    assert slab.flat.data_ptr() == slab.memory.data_ptr() == address
    assert not slab.flat.any()
    assert not view.any()


def test_frames_go_from_slab_to_slab_and_as_many_as_are_kept_stay():
    memory, slabs = _slabs(5)
    for slab in slabs:
        slab.enter()
        slab.enter()  # once is enough
        slab.flat.fill_(len(slab.name))
    assert memory.allocated == 5 * 4 * 4096
    for slab in slabs:
        slab.drop(keep=2)
    assert memory.allocated == 2 * 4 * 4096
    slabs[3].enter()
    slabs[3].flat.fill_(3)
    slabs[4].enter()
    assert memory.allocated == 2 * 4 * 4096
    assert slabs[3].flat[0] == 3
    assert slabs[0].own_bytes == 0


def test_descriptors_and_memory_end_with_the_slabs():
    before = set(os.listdir("/proc/self/fd"))
    memory, slabs = _slabs(3)
    for slab in slabs:
        slab.enter()
    del slab, slabs
    assert memory.allocated == 0
    assert len(set(os.listdir("/proc/self/fd")) - before) == 0


def test_without_shared_memory_slabs_are_pageable(monkeypatch, caplog):
    def refuse(name):
        raise PermissionError(1, "not here")

    monkeypatch.setattr(os, "memfd_create", refuse)
    _, slabs = _slabs(2)
    for slab in slabs:
        slab.enter()
        slab.flat.fill_(9)
        assert slab.memory.data_ptr() == slab.flat.data_ptr()
    assert len(caplog.records) == 1
    assert slabs[0].own_bytes == NBYTES
    slabs[0].drop()
    assert not slabs[0].flat.any()
    assert slabs[1].flat.all()


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_as_memory_is_what_was_written(folder, direct):
    """Blocks of zeros too, which are not written: the file holds what was there before, or nothing."""
    block = 1 << 13
    directory = SpillDirectory(folder)
    tier = PosixTier(directory, 1, block=block, request=2 * block, direct=direct)
    region = tier.allocate("unit-0", 4 * block + 100)
    values = torch.randint(1, 256, (region.nbytes,), dtype=torch.uint8)
    tier.write(region, 0, values).synchronize()
    values[block : 2 * block] = 0
    values[-100:] = 0
    tier.write(region, 0, values).synchronize()
    assert torch.equal(tier.mapped(region), values)
    fresh = tier.allocate("unit-1", block + 1)
    assert not tier.mapped(fresh).any()
    with open(region.path, "r+b") as file:
        file.seek(3 * block + 5)
        file.write(b"\0")
    with pytest.raises(StorageError, match="checksum") as caught:
        tier.mapped(region)
    assert caught.value.offset == 3 * block
    for one in (region, fresh):
        tier.free(one)
    tier.close()
    directory.close()
