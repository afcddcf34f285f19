"""How units are cut into slices for the workers."""

from __future__ import annotations

import pytest

from slideformer_backend.engine.arithmetic import Arithmetic
from slideformer_backend.optim.norm import BLOCK
from slideformer_backend.optim.workers import WorkerPool


def cut(threads, count, whole=None):
    with WorkerPool(threads) as workers:
        return list(Arithmetic(workers)._cut(count, count if whole is None else whole))


@pytest.mark.parametrize("threads", [1, 2, 14])
@pytest.mark.parametrize("count", [0, 1, BLOCK, 3 * BLOCK + 5, 100 * BLOCK - 1, 3328 * BLOCK, 10_000_019])
def test_slices_cover_everything_once_in_whole_blocks(threads, count):
    parts = cut(threads, count)
    ends = [0, *(part.stop for part in parts)]
    assert [part.start for part in parts] == ends[:-1]
    assert ends[-1] == count
    assert all(part.start % BLOCK == 0 and part.stop > part.start for part in parts)


@pytest.mark.parametrize("threads", [2, 14])
def test_the_last_slices_are_small(threads):
    """Whoever is late with its last one is waited for: by an eighth of a worker's part at most."""
    part = 800 * BLOCK
    sizes = [found.stop - found.start for found in cut(threads, threads * part)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == part // 2
    assert max(sizes[-2 * threads :]) == part // 8
    assert len(sizes) <= 5 * threads


def test_few_blocks_are_one_for_each_worker():
    assert len(cut(14, 14 * BLOCK)) == 14
    assert len(cut(14, 16 * BLOCK)) == 16


def test_a_parameter_is_cut_as_finely_as_its_unit():
    whole = 2 * 800 * BLOCK
    assert cut(2, 500 * BLOCK, whole) == [*cut(2, whole)[:1], slice(400 * BLOCK, 500 * BLOCK)]
    assert cut(2, 5, 0) == [slice(0, 5)]
