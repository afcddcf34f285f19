"""The mathematics of the projectors: what random ones promise, what learning and a change of projector keep."""

from __future__ import annotations

import math

import pytest
import torch

from slideformer_backend.kernels.sparse_factor import make_factor
from slideformer_backend.lsp import Beta, OrthonormalProjector, SparseProjector, carry_moments
from slideformer_backend.lsp.sparse import mean_square_error

M, N, RANK = 48, 40, 16


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def planted(seed, rank=3, basis=0):
    """A gradient of low rank, in the subspaces that ``basis`` names."""
    left, right = seeded(M, rank, seed=basis), seeded(N, rank, seed=basis + 1)
    return left @ torch.diag(seeded(rank, seed=seed + 100).abs() + 0.5) @ right.t()


def make(kind, device, seed=0, nonzeros=4, rank=RANK):
    if kind == "lsp":
        return SparseProjector.random((M, N), rank, nonzeros, seed=seed, device=device)
    return OrthonormalProjector.random((M, N), rank, seed=seed, device=device)


def true_error(projector, gradient):
    """By its definition."""
    approximation = projector.expand(projector.compress(gradient))
    return ((approximation - gradient).norm() / gradient.norm()).item()


def estimate(projector, gradient):
    return projector.error(projector.compress(gradient), gradient.norm().item())


@pytest.mark.parametrize("nonzeros", [1, 4, 8])
def test_random_factors_are_the_identity_in_the_mean(nonzeros, device):
    """E[PPᵀ] = I, and entries beside the diagonal have variance 1/d."""
    total, squares, count = torch.zeros(M, M), torch.zeros(M, M), 1500
    for seed in range(count):
        dense = SparseProjector.random((M, N), RANK, nonzeros, seed=seed, device=device).left.dense().cpu()
        product = dense @ dense.t()
        total += product
        squares += product.square()
    mean, rest = total / count, ~torch.eye(M, dtype=torch.bool)
    assert torch.allclose(mean.diagonal(), torch.ones(M), atol=1e-5)
    assert mean[rest].abs().max() < 6 * (1.0 / RANK / count) ** 0.5
    assert (squares[rest] / count).mean().item() == pytest.approx(1.0 / RANK, rel=0.03)


@pytest.mark.parametrize("nonzeros", [1, 4, 8, 16])
def test_every_row_keeps_its_nonzeros(nonzeros, device):
    factor = SparseProjector.random((M, N), RANK, nonzeros, seed=0, device=device).left
    assert bool(((factor.dense() != 0).sum(1) == nonzeros).all())


def test_the_error_of_random_projectors_is_the_formula(device):
    gradient = seeded(M, N).to(device)
    squares = []
    for seed in range(300):
        projector = make("lsp", device, seed, nonzeros=8)
        squares.append(estimate(projector, gradient) ** 2)
    mean = sum(squares) / len(squares)
    assert mean == pytest.approx((1 + (M - 1) / RANK) * (1 + (N - 1) / RANK) - 1, rel=0.05)
    assert math.sqrt(mean) > 1.0


@pytest.mark.parametrize("kind", ["lsp", "orthonormal"])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_the_estimate_is_the_error(kind, scale, device):
    gradient = seeded(M, N, seed=3).to(device) * scale
    projector = make(kind, device)
    assert estimate(projector, gradient) == pytest.approx(true_error(projector, gradient), rel=1e-4)
    learned = projector.learn([gradient], alpha=0.0, timeout=20, seed=1)
    assert estimate(learned.projector, gradient) == pytest.approx(true_error(learned.projector, gradient), rel=1e-3)
    assert learned.error == pytest.approx(true_error(learned.projector, gradient), rel=1e-3)


def test_errors_of_nothing_and_of_nan(device):
    for projector in (make("lsp", device), make("orthonormal", device)):
        zeros = torch.zeros(M, N, device=device)
        assert projector.error(projector.compress(zeros), 0.0) == 0.0
        assert math.isnan(projector.error(projector.compress(zeros * float("nan")), float("nan")))


def test_learning_finds_a_planted_subspace_and_goes_on_knowing_it(device):
    """What was learned of a subspace holds for other gradients in it, and not for gradients in another one."""
    for kind, alpha in (("lsp", 0.35), ("orthonormal", 1e-3)):
        samples = [planted(seed).to(device) for seed in range(6)]
        projector = make(kind, device)
        learned = projector.learn(samples, alpha=alpha, timeout=400, seed=0)
        assert learned.error <= alpha
        assert estimate(learned.projector, planted(77).to(device)) < 1.6 * alpha
        assert estimate(learned.projector, planted(77, basis=50).to(device)) > 2 * alpha
        assert estimate(projector, planted(77).to(device)) > 2 * alpha


def test_the_timeout_bounds_learning_and_nothing_gets_worse(device):
    gradient = seeded(M, N).to(device)
    projector = make("lsp", device)
    errors = []
    for timeout in (0, 1, 7, 30):
        learned = projector.learn([gradient], alpha=0.0, timeout=timeout, seed=0)
        assert learned.rounds == timeout
        errors.append(learned.error)
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < 1.0 < estimate(projector, gradient)
    assert projector.learn([gradient], alpha=2.0, timeout=50, seed=0).rounds == 0


@pytest.mark.parametrize("kind", ["lsp", "orthonormal"])
def test_a_side_within_the_rank_loses_nothing(kind, device):
    gradient = seeded(M, N).to(device)
    projector = make(kind, device, rank=44)
    assert projector.core_shape == (44, N)
    whole = make(kind, device, rank=M)
    assert torch.equal(whole.compress(gradient), gradient)
    assert torch.equal(whole.expand(gradient), gradient)
    assert whole.learn([gradient], alpha=0.0, timeout=3, seed=0).error < 1e-3


def test_orthonormal_factors_are_orthonormal_and_the_best(device):
    gradient = (seeded(M, N) * torch.logspace(0, -2, N)).to(device)
    learned = make("orthonormal", device).learn([gradient], alpha=0.0, timeout=1, seed=0)
    for factor in (learned.projector.left, learned.projector.right):
        assert torch.allclose(factor.t() @ factor, torch.eye(RANK, device=device), atol=1e-5)
    singular = torch.linalg.svdvals(gradient.double())
    least = (singular[RANK:].square().sum() / singular.square().sum()).sqrt().item()
    assert least <= learned.error <= 1.05 * least


def moments():
    return {"exp_avg": seeded(RANK, RANK, seed=1), "exp_avg_sq": seeded(RANK, RANK, seed=2).square()}


@pytest.mark.parametrize("kind", ["lsp", "orthonormal"])
@pytest.mark.parametrize("beta", [None, Beta(0.9, 0.999, 10)])
def test_moments_stay_when_the_projector_does(kind, beta, device):
    projector, states = make(kind, device), {name: value.to(device) for name, value in moments().items()}
    carried = carry_moments(states, projector.overlaps(projector), beta)
    for name, value in states.items():
        assert torch.allclose(carried[name], value, atol=1e-4), name


@pytest.mark.parametrize("beta", [None, Beta(0.9, 0.999, 10)])
def test_moments_follow_a_permutation(beta, device):
    old, order = make("lsp", device), torch.randperm(RANK, generator=torch.Generator().manual_seed(4))
    left = make_factor(order.argsort()[old.left.positions.cpu().long()].to(device), old.left.values, RANK)
    new = SparseProjector(left, old.right)
    assert torch.equal(left.dense().cpu(), old.left.dense().cpu()[:, order])
    states = {name: value.to(device) for name, value in moments().items()}
    carried = carry_moments(states, new.overlaps(old), beta)
    for name, value in states.items():
        assert torch.allclose(carried[name].cpu(), value.cpu()[order], atol=1e-4), name


@pytest.mark.parametrize("kind", ["lsp", "orthonormal"])
def test_moments_survive_a_switch(kind, device):
    """A mean gradient that both projectors can hold is the same mean gradient afterwards; variances stay positive."""
    gradient = planted(1).to(device)
    old, new = (make(kind, device).learn([gradient], alpha=0.0, timeout=150, seed=s).projector for s in (0, 1))
    if kind == "lsp":
        new = make(kind, device, seed=9).learn([gradient], alpha=0.0, timeout=150, seed=1).projector
    mean = old.compress(gradient)
    for beta in (None, Beta(0.9, 0.999, 25)):
        carried = carry_moments({"exp_avg": mean, "exp_avg_sq": mean.square()}, new.overlaps(old), beta)
        held = new.expand(carried["exp_avg"])
        assert (held - gradient).norm() < 0.5 * gradient.norm()
        assert carried["exp_avg_sq"].min() >= 0.0
        assert carried["exp_avg_sq"].max() > 0.0
    assert set(carry_moments({"momentum_buffer": mean}, new.overlaps(old))) == {"momentum_buffer"}


def test_empty_columns_carry_nothing(device):
    left = make_factor(torch.zeros(1, M, dtype=torch.int64, device=device), torch.ones(1, M, device=device), RANK)
    old = SparseProjector(left, make("lsp", device).right)
    first, second = make("lsp", device).overlaps(old)
    assert torch.isfinite(first).all()
    assert torch.count_nonzero(first[:, 1:]) == 0
    assert torch.isfinite(second).all()


@pytest.mark.parametrize("kind", ["lsp", "orthonormal"])
def test_a_projector_comes_back_from_its_state(kind, device):
    projector = make(kind, device).learn([seeded(M, N).to(device)], alpha=0.0, timeout=5, seed=0).projector
    saved = {name: value.cpu() for name, value in projector.state().items()}
    found = make(kind, device, seed=8).restored(saved)
    gradient = seeded(M, N, seed=7).to(device)
    assert torch.equal(found.compress(gradient), projector.compress(gradient))
    with pytest.raises(ValueError, match="left factor"):
        make(kind, device, rank=RANK - 1).restored(saved)


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (12, 40)], ids=str)
def test_the_slopes_that_learning_follows_are_those_of_autograd(shape):
    """The square of the relative error as its definition says, in fp64 by autograd."""
    torch.manual_seed(0)
    projector = SparseProjector.random(shape, 12, 3, seed=5, device=torch.device("cpu"))
    factors = (projector.left, projector.right)
    samples = [torch.randn(shape) for _ in range(2)]
    leaves = [factor.values.double().requires_grad_() for factor in factors]
    left, right = (
        torch.zeros(factor.rows, factor.rank, dtype=torch.float64).scatter(1, factor.positions.t().long(), leaf.t())
        for factor, leaf in zip(factors, leaves, strict=True)
    )
    wide = [sample.double() for sample in samples]
    truth = sum((left @ left.t() @ g @ right @ right.t() - g).square().sum() / g.square().sum() for g in wide) / len(
        wide
    )
    expected = torch.autograd.grad(truth, leaves)
    squares = [sample.square().sum() for sample in samples]
    found, slopes = mean_square_error(factors, [factor.values for factor in factors], samples, squares)
    assert found.item() == pytest.approx(truth.item(), rel=1e-5)
    for slope, wanted in zip(slopes, expected, strict=True):
        assert (slope - wanted).norm() < 1e-5 * wanted.norm()
