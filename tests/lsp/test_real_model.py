"""Projectors on gradients of a real model: what is learned from some text holds for other text."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from slideformer_backend.lsp import OrthonormalProjector, SparseProjector
from tests.main_job.conftest import ROOT, fetch

__all__ = ["fetch"]

RANK, NONZEROS, ROUNDS = 288, 8, 200
LAYER = "model.layers.1."
NAMES = [LAYER + name for name in ("self_attn.q_proj.weight", "self_attn.o_proj.weight")]


@pytest.fixture(scope="module")
def gradients(fetch):
    """Of the first layers of SmolLM2-135M, for a batch of the training text and one of the held-out text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(os.environ.get("SLIDEFORMER_TEST_CACHE") or ROOT / ".cache")
    fetch.main(folder)
    source = folder / "smollm2-135m"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, num_hidden_layers=4)
    tokenizer = AutoTokenizer.from_pretrained(source)

    def of(split, first):
        lines = (folder / "human-eval" / f"{split}.jsonl").read_text().splitlines()
        ids = torch.tensor(tokenizer("\n".join(json.loads(line)["text"] for line in lines)).input_ids)
        batch = ids[first : first + 1024].view(4, 256)
        model.zero_grad()
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        return {name: model.get_parameter(name).grad.clone() for name in NAMES}

    return [of("train", 0)], of("test", 0)


def error(projector, gradient):
    return projector.error(projector.compress(gradient), gradient.norm().item())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_learned_projectors_beat_random_ones_and_an_svd_of_equal_bytes(gradients, name, record_property):
    seen, held = gradients
    samples, gradient = [part[name] for part in seen], held[name]
    device = torch.device("cpu")
    random = SparseProjector.random(gradient.shape, RANK, NONZEROS, seed=0, device=device)
    fitted = random.learn(samples, alpha=0.0, timeout=0, seed=0).projector  # only their scale is
    learned = random.learn(samples, alpha=0.0, timeout=ROUNDS, seed=0).projector
    rank = random.nbytes // (4 * sum(gradient.shape))
    equal = OrthonormalProjector.random(gradient.shape, rank, seed=0, device=device)
    svd = equal.learn(samples, alpha=0.0, timeout=0, seed=0).projector
    assert svd.nbytes <= learned.nbytes < svd.nbytes + 4 * sum(gradient.shape) + 8 * RANK
    found = [error(projector, gradient) for projector in (random, fitted, svd, learned)]
    record_property("measured", f"{name}: random {found[0]:.3f}, scaled {found[1]:.3f}, SVD of rank {rank} "
                    f"{found[2]:.3f}, learned {found[3]:.3f}")  # fmt: skip
    assert found[3] < found[2] < found[1] < found[0]
