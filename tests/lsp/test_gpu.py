"""The strategy on a CUDA device: kernels, streams delayed at random, and the projector's own twins."""

from __future__ import annotations

import pytest
import torch

from slideformer_backend.engine import core_sums
from slideformer_backend.lsp import SparseProjector
from tests.race.test_gpu import _delay

from .test_schedule import PLACES, loop, sums, wild
from .toy import EngineSide, Event, loss_of, make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run(events, delayed=(), seed=0, **options):
    side = EngineSide(torch.bfloat16, device="cuda", **options)
    try:
        _delay(side.engine, delayed, 4.0, seed)
        return [value.cpu() for value in side.run(events)]
    finally:
        side.close()


@pytest.mark.parametrize("projector", ["lsp", "orthonormal"])
@pytest.mark.parametrize("delayed", [("h2d",), ("d2h",), ("update",), ("h2d", "d2h", "update", "norms")])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_delays_change_no_bit(delayed, projector, clip):
    expected = run(loop(6, clip=clip), projector=projector)
    for found in (run(loop(6, clip=clip), delayed, seed, projector=projector) for seed in range(3)):
        assert all(torch.equal(right, value) for right, value in zip(expected, found, strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_whatever_a_script_may_do(seed):
    expected = run(wild(seed))
    found = run(wild(seed), ("h2d", "d2h", "update"), seed)
    assert all(torch.equal(right, value) for right, value in zip(expected, found, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_sums_of_gradients_change_no_bit_wherever_they_are(monkeypatch, seed):
    found = []
    for place in PLACES:
        monkeypatch.setattr(core_sums, "place_of", lambda *_, place=place: place)
        found += [run(sums(seed)), run(sums(seed), ("h2d", "d2h", "update"), seed)]
    for other in found[1:]:
        assert all(torch.equal(right, value) for right, value in zip(found[0], other, strict=True))


def test_sums_of_gradients_have_the_norm_of_plain_accumulation(monkeypatch):
    for place in PLACES:
        monkeypatch.setattr(core_sums, "place_of", lambda *_, place=place: place)
        side, plain = EngineSide(torch.float32, device="cuda"), make_model().cuda()
        plain.device_of_inputs = torch.device("cuda")
        for batch in range(3):
            side.run([Event("backward", (batch, batch == 2))])
            loss_of(plain, batch).backward()
        right = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert torch.allclose(side.engine.clip_grad_norm_(side.model.parameters(), 1.0), right, rtol=1e-5)
        side.close()


@pytest.mark.parametrize("clip", [None, 0.2])
def test_edges_on_the_host_change_no_bit(request, clip):
    expected = run(loop(6, clip=clip))
    request.getfixturevalue("edges_on_host")
    for found in (run(loop(6, clip=clip)), run(loop(6, clip=clip), ("h2d", "d2h", "update"))):
        assert all(torch.equal(right, value) for right, value in zip(expected, found, strict=True))


def test_a_large_matrix_against_its_dense_factors():
    """A shape of a 7B model: cores and updates are those of dense products."""
    device = torch.device("cuda")
    projector = SparseProjector.random((4096, 11008), 2048, 8, seed=0, device=device)
    gradient = torch.randn(4096, 11008, device=device).bfloat16()
    left, right = projector.left.dense(), projector.right.dense()
    core = projector.compress(gradient)
    truth = left.t().double() @ gradient.double() @ right.double()
    assert (core.double() - truth).norm() < 2**-8 * truth.norm()
    weight = torch.randn(4096, 11008, device=device)
    expected = weight.double() * 0.5 + left.double() @ core.double() @ right.t().double()
    projector.apply_(weight, core, 0.5, 1)
    assert (weight.double() - expected).norm() < 1e-5 * expected.norm()
    assert torch.equal(core, projector.compress(gradient))
