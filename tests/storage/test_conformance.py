"""What every tier does (DESIGN 8). A tier that passes may take another one's place."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from random import Random

import pytest
import torch

from slideformer_backend.errors import StateError, StorageError

from .conftest import BLOCK, REQUEST

SIZES = (1, 3, 511, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, REQUEST, REQUEST + BLOCK + 7, 3 * REQUEST + 12345)


def _random(nbytes: int, seed: int = 0, skew: int = 0) -> torch.Tensor:
    """Random bytes at an address that is ``skew`` off."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes + skew,), dtype=torch.uint8, generator=generator)[skew:]


@pytest.fixture
def regions(tier):
    made = []

    def allocate(nbytes, name="unit-0.master"):
        made.append(tier.allocate(name, nbytes))
        return made[-1]

    yield allocate
    for region in made:
        tier.free(region)


@pytest.mark.parametrize("skew", [0, 1, 4, 510])
@pytest.mark.parametrize("nbytes", SIZES)
def test_bytes_come_back(tier, regions, nbytes, skew):
    region, source = regions(nbytes), _random(nbytes, nbytes, skew)
    tier.write(region, 0, source).synchronize()
    frame = torch.full((nbytes + 2 * 77,), 7, dtype=torch.uint8)
    tier.read(region, 0, frame[77:-77]).synchronize()
    assert torch.equal(frame[77:-77], source)
    assert (frame[:77] == 7).all(), "written in front of the target"
    assert (frame[-77:] == 7).all(), "written behind the target"


def test_zeros_until_written(tier, regions):
    region = regions(2 * REQUEST + 99)
    target = torch.full((region.nbytes,), 9, dtype=torch.uint8)
    tier.read(region, 0, target).synchronize()
    assert not target.any()
    tier.write(region, REQUEST + 5, _random(3)).synchronize()
    tier.read(region, 0, target).synchronize()
    assert torch.equal(target[REQUEST + 5 : REQUEST + 8], _random(3))
    assert not target[: REQUEST + 5].any()
    assert not target[REQUEST + 8 :].any()


def test_a_region_is_used_again_for_other_lengths(tier, regions):
    region = regions(REQUEST + BLOCK + 7)
    space = region.nbytes
    for nbytes in (space, BLOCK + 3, 0, 4096, space - 1, space):
        tier.renew(region, nbytes)
        assert (region.nbytes, region.space) == (nbytes, space)
        target = torch.full((nbytes,), 9, dtype=torch.uint8)
        tier.read(region, 0, target).synchronize()
        assert not target.any(), "what was there before"
        source = _random(nbytes, nbytes)
        tier.write(region, 0, source).synchronize()
        tier.read(region, 0, target).synchronize()
        assert torch.equal(target, source)
        with pytest.raises(StateError):
            tier.read(region, 1, target if nbytes else torch.empty(1, dtype=torch.uint8))
    with pytest.raises(StateError, match="cannot hold"):
        tier.renew(region, space + 1)
    assert region.nbytes == space


@pytest.mark.parametrize("seed", range(4))
def test_random_ranges_equal_a_byte_array(tier, regions, seed):
    random = Random(seed)
    region = regions(2 * REQUEST + random.randrange(2 * BLOCK))
    model = torch.zeros(region.nbytes, dtype=torch.uint8)
    for turn in range(60):
        start = random.choice((random.randrange(region.nbytes), random.randrange(region.nbytes) // 4096 * 4096))
        most = min(region.nbytes - start, random.choice((10, 5000, BLOCK, 2 * REQUEST)))
        nbytes = random.choice((most, random.randint(0, most)))
        if random.random() < 0.5:
            source = _random(nbytes, turn, skew=random.choice((0, 1, 4096)))
            tier.write(region, start, source).synchronize()
            model[start : start + nbytes] = source
        else:
            target = torch.empty(nbytes, dtype=torch.uint8)
            tier.read(region, start, target).synchronize()
            assert torch.equal(target, model[start : start + nbytes])


def test_operations_overlap_and_may_share_a_block(tier, regions):
    region = regions(3 * REQUEST + 1)
    source = _random(region.nbytes)
    cuts = [0, *sorted(Random(5).sample(range(1, region.nbytes), 150)), region.nbytes]
    tickets = [tier.write(region, a, source[a:b]) for a, b in itertools.pairwise(cuts)]
    for ticket in tickets:
        ticket.synchronize()
    target = torch.empty_like(source)
    tickets = [tier.read(region, a, target[a:b]) for a, b in itertools.pairwise(cuts)]
    for ticket in reversed(tickets):
        ticket.synchronize()
    assert torch.equal(source, target)


def test_regions_are_separate(tier, regions):
    first, second = regions(BLOCK + 1, "a"), regions(BLOCK + 1, "b")
    tier.write(first, 0, _random(BLOCK + 1, 1)).synchronize()
    tier.write(second, 0, _random(BLOCK + 1, 2)).synchronize()
    target = torch.empty(BLOCK + 1, dtype=torch.uint8)
    tier.read(first, 0, target).synchronize()
    assert torch.equal(target, _random(BLOCK + 1, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_any_dtype_and_shape(tier, regions, dtype):
    source = torch.randn(33, 5, 7).to(dtype)
    region = regions(source.nbytes)
    tier.write(region, 0, source).synchronize()
    target = torch.empty_like(source)
    tier.read(region, 0, target).synchronize()
    assert torch.equal(source, target)


@pytest.mark.gpu
def test_device_tensors(tier, regions):
    source = _random(2 * REQUEST + 4099).cuda()
    region = regions(source.numel())
    tier.write(region, 0, source).synchronize()
    target = torch.zeros_like(source)
    tier.read(region, 0, target).synchronize()
    torch.cuda.synchronize()
    assert torch.equal(source, target)
    host = torch.empty(source.numel(), dtype=torch.uint8)
    tier.read(region, 0, host).synchronize()
    assert torch.equal(source.cpu(), host)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 4), (97, 4), (0, 101), (101, 0)])
def test_a_range_outside_is_refused(tier, regions, offset, nbytes):
    region = regions(100)
    for call in (tier.read, tier.write):
        with pytest.raises(StateError, match="outside"):
            call(region, offset, torch.zeros(nbytes, dtype=torch.uint8))


def test_a_tensor_with_holes_is_refused(tier, regions):
    region = regions(100)
    for call in (tier.read, tier.write):
        with pytest.raises(StateError, match="contiguous"):
            call(region, 0, torch.zeros(10, 10)[:, 1])


def test_nothing_is_moved_by_an_empty_tensor(tier, regions):
    region = regions(0)
    for call in (tier.read, tier.write):
        assert call(region, 0, torch.empty(0)).is_complete
        call(region, 0, torch.empty(0)).synchronize()


def test_a_name_can_be_used_again(tier):
    for seed in range(3):
        region = tier.allocate("unit-0.exp_avg", BLOCK + 3)
        target = torch.ones(region.nbytes, dtype=torch.uint8)
        tier.read(region, 0, target).synchronize()
        assert not target.any(), "the last owner's bytes"
        tier.write(region, 0, _random(region.nbytes, seed)).synchronize()
        tier.free(region)
        tier.free(region)


def test_a_ticket_keeps_its_tensor_alive(tier, regions):
    region, source = regions(8 * REQUEST), _random(8 * REQUEST)
    gone = weakref.ref(source.untyped_storage())
    ticket = tier.write(region, 0, source)
    del source
    ticket.synchronize()
    target = torch.empty(region.nbytes, dtype=torch.uint8)
    tier.read(region, 0, target).synchronize()
    assert torch.equal(target, _random(region.nbytes))
    del gone


def test_a_tier_without_work_sleeps(tier, regions):
    region = regions(BLOCK)
    tier.write(region, 0, _random(BLOCK)).synchronize()
    start = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - start < 0.1


def test_close_finishes_and_frees(tier):
    def running():
        return {thread for thread in threading.enumerate() if thread.name.startswith("slideformer-io")}

    before, region = running(), tier.allocate("unit-0", 4 * REQUEST)
    ticket = tier.write(region, 0, _random(region.nbytes))
    assert running() - before
    tier.close()
    assert ticket.is_complete
    ticket.synchronize()
    assert running() - before == set()
    assert not os.path.exists(getattr(region, "path", "nowhere"))


def test_one_flipped_bit_is_found(tier, regions):
    region = regions(2 * BLOCK + 5)
    if not hasattr(region, "path"):
        pytest.skip("memory is not checked")
    source = _random(region.nbytes)
    tier.write(region, 0, source).synchronize()
    for position in (0, BLOCK + 17, region.nbytes - 1):
        _flip(region.path, position, 3)
        with pytest.raises(StorageError, match="Checking") as caught:
            tier.read(region, 0, torch.empty_like(source)).synchronize()
        assert caught.value.path == region.path
        assert caught.value.offset == position // BLOCK * BLOCK
        _flip(region.path, position, 3)
    tier.read(region, 0, torch.empty_like(source)).synchronize()


def _flip(path, position, bit):
    fd = os.open(path, os.O_RDWR)
    try:
        (value,) = os.pread(fd, 1, position)
        os.pwrite(fd, bytes([value ^ (1 << bit)]), position)
        os.fsync(fd)
    finally:
        os.close(fd)
