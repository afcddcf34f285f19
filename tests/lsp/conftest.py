"""Fixtures of the LSP tests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slideformer_backend.engine import lsp_preflight
from slideformer_backend.plan.lsp_plan import make_lsp_plan


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def device():
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture
def edges_on_host(monkeypatch):
    """As where the device has no room for states of embeddings and head."""

    def decide(request, settings):
        plan = make_lsp_plan(request, settings)
        return replace(plan, terms=replace(plan.terms, edges_update_on_device=False))

    monkeypatch.setattr(lsp_preflight, "make_lsp_plan", decide)
