"""Nothing that fails is silent (HAZARDS 6-8, 12-14): every system call fails in every way, any damage shows."""

from __future__ import annotations

import errno
import logging
import os
import resource
import tempfile
from random import Random

import pytest
import torch

from slideformer_backend.errors import StorageError
from slideformer_backend.storage import PosixTier, SpillDirectory
from slideformer_backend.storage.checksum import ZEROS, block_sums

from .faults import FAULTS, MOVES, FaultySystem

BLOCK, REQUEST = 1 << 13, 1 << 14
NBYTES = 5 * BLOCK + 123


def _random(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _use(folder: str, system: FaultySystem, direct: bool) -> None:
    """A run's use of a tier; raises AssertionError when bytes come back wrong."""
    directory = SpillDirectory(folder, system)
    try:
        tier = PosixTier(directory, 2, block=BLOCK, request=REQUEST, direct=direct)
        try:
            regions = [tier.allocate(f"unit-{number}", NBYTES) for number in range(2)]
            expected = [_random(NBYTES, 1), _random(NBYTES, 2)]
            for region, values in zip(regions, expected, strict=True):
                tier.write(region, 0, values).synchronize()
            expected[0][BLOCK + 5 : 2 * BLOCK + 9] = 3
            tier.write(regions[0], BLOCK + 5, expected[0][BLOCK + 5 : 2 * BLOCK + 9]).synchronize()
            for region, values in zip(regions, expected, strict=True):
                found = torch.empty_like(values)
                tier.read(region, 0, found).synchronize()
                assert torch.equal(found, values), "wrong bytes, and nobody said so"
            for region in regions:
                tier.free(region)
        finally:
            tier.close()
    finally:
        directory.close()


def _outcome(folder: str, system: FaultySystem, caplog, direct: bool = True) -> str:
    """``fine``: as if nothing had happened; ``error``: a StorageError; ``said``: went on, with a word in the log."""
    caplog.clear()
    error = None
    try:
        _use(folder, system, direct)
    except StorageError as caught:
        error = caught
    if error is None:
        return "said" if caplog.records else "fine"
    assert error.path.startswith(folder)
    assert error.path in str(error)
    assert error.remedy
    if system.fault in ("short", "nothing"):
        assert error.errno is None
    else:
        assert error.errno == getattr(errno, system.fault)
        assert system.fault in str(error)
    return "error"


def _clean(folder: str) -> None:
    """What a failed run left is gone after the next start, and that start's own files too."""
    SpillDirectory(folder).close()
    assert os.listdir(folder) == []


@pytest.fixture(autouse=True)
def _log(caplog):
    caplog.set_level(logging.WARNING)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_call_fails_once(folder, fault, direct, caplog, descriptors):
    clean = FaultySystem()
    _use(folder, clean, direct)
    seen = 0
    for number, name in enumerate(clean.calls):
        system = FaultySystem({number}, fault)
        outcome = _outcome(folder, system, caplog, direct)
        if not system.injected:
            continue
        seen += 1
        if fault in ("EINTR", "short", "nothing") and name in MOVES:
            assert outcome != "error", f"{fault} in {name} is no error"
        elif fault != "EINTR" and name != "close":
            assert outcome != "fine", f"{fault} in {name} (call {number}) was silent"
        _clean(folder)
    assert seen >= (len(MOVES) * 2 if fault in ("short", "nothing") else len(clean.calls) - 2)


@pytest.mark.parametrize("batch", range(4))
def test_a_thousand_faults(folder, batch, caplog, descriptors):
    """One to five faults per run, of one kind each run; none is silent."""
    total = errors = 0
    for seed in range(batch * 1000, (batch + 1) * 1000):
        random = Random(seed)
        system = FaultySystem(set(random.sample(range(75), random.randint(1, 6))), random.choice(FAULTS), seed)
        outcome = _outcome(folder, system, caplog, direct=random.random() < 0.8)
        assert outcome != "fine" or not system.injected or system.fault in ("EINTR", "short", "nothing")
        total += len(system.injected)
        errors += outcome == "error"
        _clean(folder)
        if total > 250:
            break
    assert total > 250, "1,000 in all batches"
    assert errors > 20


def test_no_progress_ends_with_an_error(folder):
    """A device that accepts nothing, or a file that somebody shortened."""
    for direct in (True, False):
        system = FaultySystem()
        directory = SpillDirectory(folder, system)
        tier = PosixTier(directory, 1, block=BLOCK, request=REQUEST, direct=direct)
        region = tier.allocate("unit-0", NBYTES)
        values = _random(NBYTES, 1)
        tier.write(region, 0, values).synchronize()
        os.truncate(region.path, BLOCK)
        with pytest.raises(StorageError, match="no progress") as caught:
            tier.read(region, 0, values).synchronize()
        assert caught.value.offset == BLOCK
        tier.free(region)
        tier.close()
        directory.close()


def _fill(tier, region):
    tier.write(region, 0, _random(NBYTES, 1)).synchronize()


@pytest.fixture(params=["disk", "tmpfs"])
def any_folder(request, folder):
    if request.param == "disk":
        yield folder
        return
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no tmpfs")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        yield memory


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("limit", [REQUEST, REQUEST + 1000])
def test_a_limit_on_file_sizes_is_called_that(any_folder, limit, is_early):
    """Also where it is not aligned: the system then cuts a direct write to a length that it does not take."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    directory = SpillDirectory(any_folder)
    tier = PosixTier(directory, 1, block=BLOCK, request=REQUEST)
    region = None if is_early else tier.allocate("unit-0", NBYTES)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(StorageError, match=r"Remedy: .*ulimit -f") as caught:
            _fill(tier, region or tier.allocate("unit-0", NBYTES))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        tier.close()
        directory.close()
    assert caught.value.errno == errno.EFBIG
    assert ("Reserving" in str(caught.value)) == is_early


def test_a_block_whose_write_failed_is_never_read(folder):
    system = FaultySystem()
    directory = SpillDirectory(folder, system)
    tier = PosixTier(directory, 1, block=BLOCK, request=REQUEST)
    region = tier.allocate("unit-0", NBYTES)
    tier.write(region, 0, _random(NBYTES, 1)).synchronize()
    system.at, system.fault = {len(system.calls)}, "EIO"
    with pytest.raises(StorageError, match="EIO"):
        tier.write(region, 0, _random(BLOCK, 2)).synchronize()
    with pytest.raises(StorageError, match="last write failed"):
        tier.read(region, 0, torch.empty(BLOCK, dtype=torch.uint8)).synchronize()
    tier.write(region, 0, _random(BLOCK, 2)).synchronize()
    found = torch.empty(BLOCK, dtype=torch.uint8)
    tier.read(region, 0, found).synchronize()
    assert torch.equal(found, _random(BLOCK, 2))
    tier.free(region)
    tier.close()
    directory.close()


def test_a_region_that_is_renewed_forgets_a_write_that_failed(folder):
    system = FaultySystem()
    directory = SpillDirectory(folder, system)
    tier = PosixTier(directory, 1, block=BLOCK, request=REQUEST)
    region = tier.allocate("unit-0", NBYTES)
    system.at, system.fault = {len(system.calls)}, "EIO"
    with pytest.raises(StorageError, match="EIO"):
        tier.write(region, 0, _random(BLOCK, 2)).synchronize()
    tier.renew(region, BLOCK + 5)
    tier.write(region, 0, _random(BLOCK + 5, 3)).synchronize()
    found = torch.empty(BLOCK + 5, dtype=torch.uint8)
    tier.read(region, 0, found).synchronize()
    assert torch.equal(found, _random(BLOCK + 5, 3))
    tier.free(region)
    tier.close()
    directory.close()


def test_a_thousand_flipped_bits(folder):
    directory = SpillDirectory(folder)
    tier = PosixTier(directory, 1, block=BLOCK, request=REQUEST)
    region, random = tier.allocate("unit-0", NBYTES), Random(7)
    values = _random(NBYTES, 1)
    tier.write(region, 0, values).synchronize()
    found = torch.empty_like(values)
    fd = os.open(region.path, os.O_RDWR)
    missed = []
    for _ in range(1200):
        position, bit = random.randrange(NBYTES), random.randrange(8)
        (old,) = os.pread(fd, 1, position)
        os.pwrite(fd, bytes([old ^ 1 << bit]), position)
        ticket = tier.read(region, 0, found)
        try:
            ticket.synchronize()
        except StorageError as error:
            if error.offset == position // BLOCK * BLOCK:
                continue
        finally:
            os.pwrite(fd, bytes([old]), position)
        missed.append((position, bit))
    os.close(fd)
    assert missed == []
    tier.read(region, 0, found).synchronize()
    assert torch.equal(found, values)
    tier.free(region)
    tier.close()
    directory.close()


@pytest.mark.parametrize("fill", ["random", "zeros", "ones"])
def test_any_two_flipped_bits_change_the_checksum(fill):
    block = {"random": _random(1 << 12, 3), "zeros": torch.zeros(1 << 12, dtype=torch.uint8)}.get(fill)
    block = torch.full((1 << 12,), 255, dtype=torch.uint8) if block is None else block
    (sums,), random, bits = block_sums(block), Random(1), block.numel() * 8
    for _ in range(4000):
        for bit in (pair := random.sample(range(bits), random.choice((1, 2)))):
            block[bit // 8] ^= 1 << bit % 8
        assert block_sums(block) != [sums]
        for bit in pair:
            block[bit // 8] ^= 1 << bit % 8
    assert block_sums(block) == [sums]


def test_the_checksum_is_the_documented_one():
    for nbytes in (0, 1, 4, 7, 1 << 12, (1 << 21) - 3):
        block = _random(nbytes, nbytes)
        words = torch.nn.functional.pad(block, (0, -nbytes % 4)).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        plain = sum(words.tolist())
        weighted = sum(word * (2 * i + 1) for i, word in enumerate(words.tolist()))
        assert block_sums(block) == ([(plain % 2**64, weighted % 2**64)] if nbytes else [])
    assert block_sums(torch.zeros(99, dtype=torch.uint8)) == [ZEROS]
    flat = _random(3 * 4096 + 77, 5)
    assert block_sums(flat, 4096) == [sums for part in flat.split(4096) for sums in block_sums(part)]


@pytest.mark.gpu
def test_the_checksum_of_a_device_buffer_is_the_same():
    for nbytes in (1, 4097, 1 << 21):
        block = _random(nbytes, nbytes)
        assert block_sums(block.cuda()) == block_sums(block)


def test_the_device_formula_is_the_same():
    from slideformer_backend.storage.checksum import _on_device

    for nbytes in (0, 4, 4096, 1 << 21):
        block = torch.full((nbytes,), 255, dtype=torch.uint8)
        assert _on_device(block, 1 << 21) == block_sums(block)
    flat = _random(3 * 4096 + 76, 5)
    for nbytes in (4, 4092, 4096, 8192, flat.numel()):
        assert _on_device(flat[:nbytes], 4096) == block_sums(flat[:nbytes], 4096)
