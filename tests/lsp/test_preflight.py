"""``prepare`` under ``strategy: lsp``: the plan, its refusals, and that memory is what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.engine import core_sums
from slideformer_backend.engine.lsp_preflight import LspPreflight
from slideformer_backend.errors import PlanError
from slideformer_backend.lsp_settings import LspSettings
from slideformer_backend.plan import partition
from slideformer_backend.plan.cores import core_elements, factor_bytes
from slideformer_backend.plan.lsp_plan import lsp_ledger

from .toy import EngineSide, Event, make_model

STEP = [Event("backward", (0, True)), Event("step"), Event("zero")]


@pytest.fixture
def side():
    made = EngineSide(torch.float32)
    yield made
    made.close()


def preflight(model, **options):
    config = SlideFormerConfig(strategy="lsp", lsp={"rank": 8, "nonzeros": 2}, **options)
    return LspPreflight(model, partition(model), config, torch.device("cuda"), None)


@pytest.fixture
def gpu(monkeypatch):
    """Sets how much memory of a GPU is free."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "described")

    def set_free(free):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))

    return set_free


def test_what_cannot_fit_is_refused_before_anything_moves(gpu):
    model = make_model()
    gpu(30_000)
    with pytest.raises(PlanError, match="no room") as caught:
        preflight(model).check()
    assert "strategy: slide" in str(caught.value)
    gpu(300_000)
    assert preflight(model).check().prefetch == 0
    with pytest.raises(PlanError, match="no room"):
        preflight(model, gpu_memory=30_000).check()
    with pytest.raises(PlanError, match=r"host memory, which has no room.*host_memory"):
        preflight(model, host_memory=10_000).check()


def test_states_of_edges_wait_on_the_host_where_the_gpu_is_short(gpu):
    """``gpu_memory`` decides; what is taken is a quarter for activations, as nobody knows the batch."""
    model = make_model()
    gpu(1 << 30)
    whole = preflight(model).plan.ledger
    assert whole.host_edges == 0
    just = whole.device * 4 // 3 + 4
    assert preflight(model, gpu_memory=just).check().edges_update_on_device
    short = preflight(model, gpu_memory=just - 8)
    assert not short.check().edges_update_on_device
    assert short.plan.device == whole.device - 8 * sum(p.numel() for p in edges_of(model))
    assert short.plan.host > whole.host + 16 * sum(p.numel() for p in edges_of(model))


def edges_of(model):
    return [*model.inp.parameters(), *model.head.parameters()]


def test_a_rank_that_compresses_nothing_is_said_aloud(caplog):
    side = EngineSide(torch.float32, rank=64)
    assert "compresses nothing" in caplog.text
    side.close()


def test_bytes_are_those_of_the_formulas():
    """Llama 7B, d = 2048, r = 8: 1.9 GB each way instead of 13, moments of 7.5 GB instead of 52."""
    settings = LspSettings()
    layer = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)]
    elements = 32 * sum(core_elements(shape, settings) for shape in layer)
    weights = 32 * sum(m * n for m, n in layer)
    assert elements * 2 / 1e9 == pytest.approx(1.88, abs=0.01)
    assert elements * 8 / 1e9 == pytest.approx(7.5, abs=0.05)
    assert weights * 2 / 1e9 == pytest.approx(13.0, abs=0.1)
    assert weights * 8 / 1e9 == pytest.approx(52.0, abs=0.4)
    assert 32 * sum(factor_bytes(shape, settings) for shape in layer) / 1e9 < 0.3


def test_what_the_engine_allocates_is_what_the_formulas_say(side):
    cores = [record.core for unit in side.engine.units for record in unit.records if record.core is not None]
    assert len(cores) == 12
    settings = side.engine.edges.device_units.settings
    for core in cores:
        assert core.gradient.nbytes == core.update.nbytes == 4 * core_elements(core.projector.shape, settings)
        assert core.projector.nbytes == factor_bytes(core.projector.shape, settings)
    side.run(STEP)
    side.engine.settle()
    total = sum(core_elements(core.projector.shape, settings) for core in cores)
    assert side.engine.report().host_bytes == total * (4 + 4 + 8) + _norm_bytes(side)
    assert side.engine._preflight.plan.ledger.host == total * (4 + 4 + 8)


def test_the_host_holds_what_the_plan_says_with_edges_and_sums_there(monkeypatch, edges_on_host):
    monkeypatch.setattr(core_sums, "place_of", lambda *_: "in host memory")
    side = EngineSide(torch.bfloat16)
    micro = [Event("backward", (0, False)), Event("backward", (1, True)), Event("clip", 0.5)]
    side.run([*micro, Event("step"), Event("zero")] * 2)
    side.engine.settle()
    plan = side.engine._preflight.plan
    ledger = lsp_ledger(plan.request.parts, plan.settings, replace(plan.terms, accumulates=True))
    assert side.engine.report().host_bytes == ledger.host + ledger.sums + _norm_bytes(side)
    assert ledger.host_edges > 0
    side.close()


def _norm_bytes(side):
    return sum(slab.nbytes for slab in side.engine.policy.norms._landing.values())
