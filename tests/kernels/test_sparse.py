"""Sparse projectors: the kernels against float64 truth, their twins, and the mean of stochastic rounding."""

from __future__ import annotations

import pytest
import torch

from slideformer_backend.kernels import sparse_twins as twins
from slideformer_backend.kernels.runtime import runs_triton
from slideformer_backend.kernels.sparse_apply import sparse_apply_
from slideformer_backend.kernels.sparse_compress import gather_columns, sparse_compress
from slideformer_backend.kernels.sparse_factor import SparseFactor, make_factor
from tests.kernels.truth import DEVICE, check

NONZEROS = [1, 4, 8, 16]
SHAPES = [(1, 1, 16), (33, 17, 16), (40, 530, 24), (129, 64, 31)]
"""m, n and the rank of both sides; the third shape needs two blocks of columns."""


def factor(rows: int, rank: int, nonzeros: int, seed: int, *, leave: int = 0) -> SparseFactor:
    """Random values at distinct random positions; the last ``leave`` columns stay empty."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.rand(rows, rank - leave, generator=generator).argsort(1)[:, :nonzeros].t()
    return make_factor(positions.to(DEVICE), torch.randn(nonzeros, rows, generator=generator).to(DEVICE), rank)


def matrix(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 9) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def test_the_kernels_run():
    assert runs_triton(matrix(1))


@pytest.mark.parametrize("nonzeros", NONZEROS)
@pytest.mark.parametrize(("m", "n", "rank"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def test_compress(m, n, rank, nonzeros, dtype):
    left, right = factor(m, rank, nonzeros, 1), factor(n, rank, nonzeros, 2)
    gradient = matrix(m, n, dtype=dtype)
    truth = left.dense().double().t() @ gradient.double() @ right.dense().double()
    found = sparse_compress(gradient, left, right)
    assert found.is_contiguous()
    check("core", found, twins.sparse_compress(gradient, left, right), truth)
    if DEVICE.type == "cuda":  # no atomics; the interpreter runs one program after the other, always in this order
        assert torch.equal(found, sparse_compress(gradient, left, right))


@pytest.mark.parametrize("nonzeros", NONZEROS)
@pytest.mark.parametrize(("m", "n", "rank"), SHAPES)
def test_apply_in_fp32(m, n, rank, nonzeros):
    left, right = factor(m, rank, nonzeros, 1), factor(n, rank, nonzeros, 2)
    weight, core = matrix(m, n), matrix(rank, rank, seed=3)
    truth = weight.double() * 0.75 + left.dense().double() @ core.double() @ right.dense().double().t()
    plain = twins.sparse_apply_(weight.clone(), core, left, right, 0.75, 5)
    found = sparse_apply_(weight, core, left, right, 0.75, 5)
    assert found is weight
    check("weight", found, plain, truth)


@pytest.mark.parametrize("nonzeros", NONZEROS)
@pytest.mark.parametrize(("m", "n", "rank"), SHAPES)
def test_apply_in_bf16_goes_to_one_of_the_two_neighbours(m, n, rank, nonzeros):
    left, right = factor(m, rank, nonzeros, 1), factor(n, rank, nonzeros, 2)
    weight, core = matrix(m, n, dtype=torch.bfloat16), matrix(rank, rank, dtype=torch.bfloat16, seed=3) * 1e-2
    truth = weight.double() + left.dense().double() @ core.double() @ right.dense().double().t()
    found = sparse_apply_(weight.clone(), core, left, right, 1.0, 5).double()
    step = 2.0 ** (truth.abs().log2().floor() - 7) + 1e-6
    assert bool(((found - truth).abs() <= step).all())


@pytest.mark.parametrize("side", ["left", "right"])
def test_empty_columns_give_zeros(side):
    left = factor(21, 24, 4, 1, leave=9 if side == "left" else 0)
    right = factor(30, 24, 4, 2, leave=9 if side == "right" else 0)
    core = sparse_compress(matrix(21, 30), left, right)
    empty = core[15:] if side == "left" else core[:, 15:]
    assert torch.count_nonzero(empty) == 0
    truth = left.dense().double().t() @ matrix(21, 30).double() @ right.dense().double()
    check("core", core, twins.sparse_compress(matrix(21, 30), left, right), truth)


def test_a_signed_permutation_is_exact():
    signs = torch.where(matrix(1, 40) > 0, 1.0, -1.0)
    left = make_factor(torch.randperm(40, device=DEVICE)[None], signs, 40)
    right = make_factor(torch.randperm(40, device=DEVICE)[None], signs.flip(1), 40)
    gradient = matrix(40, 40)
    core = sparse_compress(gradient, left, right)
    assert torch.equal(core, left.dense().t() @ gradient @ right.dense())
    assert torch.equal(sparse_apply_(torch.zeros_like(gradient), core, left, right, 1.0, 0), gradient)


def test_kernel_and_twin_round_with_the_same_bits():
    signs = torch.ones(1, 64, device=DEVICE)
    left = make_factor(torch.arange(48, device=DEVICE)[None], signs[:, :48], 48)
    right = make_factor(torch.arange(64, device=DEVICE)[None], signs, 64)
    core, weight = matrix(48, 64, seed=3) * 1e-3, matrix(48, 64, dtype=torch.bfloat16)
    core[0, 0], core[1, 1] = float("nan"), float("inf")
    for seed in (0, 1, 2**31 - 1):
        expected = twins.sparse_apply_(weight.clone(), core, left, right, 0.99, seed)
        found = sparse_apply_(weight.clone(), core, left, right, 0.99, seed)
        assert torch.equal(found.nan_to_num(77.0), expected.nan_to_num(77.0))
    assert found[0, 0].isnan()
    assert found[1, 1].isinf()


def test_small_updates_arrive_in_the_mean():
    """Each is a hundredth of a bf16 step: rounded to nearest, a thousand of them would change nothing."""
    count = 32
    left = make_factor(torch.arange(count, device=DEVICE)[None], torch.ones(1, count, device=DEVICE), count)
    weight = torch.ones(count, count, dtype=torch.bfloat16, device=DEVICE)
    update = torch.full((count, count), 2.0**-7 / 100, device=DEVICE)
    assert torch.equal((weight.float() + update).bfloat16(), weight)
    for seed in range(1000):
        twins.sparse_apply_(weight, update, left, left, 1.0, seed)
    mean = weight.double().mean().item()
    deviation = 2.0**-7 * (1000 * 0.01 * 0.99) ** 0.5 / count
    assert abs(mean - (1.0 + 10 * 2.0**-7)) < 4 * deviation
    assert weight.unique().numel() > 3


def test_positions_of_a_row_must_be_distinct():
    with pytest.raises(ValueError, match="distinct"):
        make_factor(torch.tensor([[0, 1], [2, 1]]), torch.ones(2, 2), 4)


def test_storage_is_linear_in_the_rows():
    found = factor(1000, 64, 4, 0)
    assert found.nbytes == 1000 * 4 * (4 + 4 + 4) + 65 * 4
    rows = torch.arange(1000, device=DEVICE)
    for column in (0, 63):
        own = found.entries[found.starts[column] : found.starts[column + 1]].long()
        assert bool((found.positions.view(-1)[own] == column).all())
        assert torch.equal(own % 1000, rows[(found.dense()[:, column] != 0)])


@pytest.mark.parametrize("columns", [1, 511, 513])
def test_gather_of_one_side(columns):
    left, source = factor(19, 16, 4, 1), matrix(19, columns)
    truth = left.dense().double().t() @ source.double()
    check("gather", gather_columns(left, source), twins.gather_columns(left, source), truth)
