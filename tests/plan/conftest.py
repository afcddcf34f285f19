"""Fixtures of the planner's tests: a machine that is described, a model without weights."""

from __future__ import annotations

import pytest
import torch

from slideformer_backend.plan.host_budget import HostBudget
from slideformer_backend.plan.machine import Machine

GIB = 1 << 30
H200 = {
    "gemm": 750e12, "gpu_memory": 4.2e12, "h2d": 49e9, "d2h": 49e9, "host": 3.5e9 * 30,
    "nvme_read": 6e9, "nvme_write": 5e9,
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def machine():
    def make(*, gpu=24 * GIB, host=120 * GIB, nvme=0, rates=H200):
        return Machine(
            name="described",
            gpu_total=gpu,
            gpu_free=gpu,
            host=HostBudget(host, host, 0, "the description"),
            threads=16,
            nvme_free=nvme,
            rates=rates,
            sources=dict.fromkeys(rates, "given"),
        )

    return make


@pytest.fixture(scope="session")
def described():
    """Parts and activity of a named shape at a batch, with layers as Liger's kernels run them."""
    from slideformer_backend.integrations.meta_model import attention_operations, fuse_layers, load_meta
    from slideformer_backend.plan.activations import observe_units
    from slideformer_backend.plan.partition import partition

    known = {}

    def make(name, sequences, length=1024, *, fused=True):
        key = (name, sequences, length, fused)
        if key not in known:
            meta = load_meta(name)
            if fused:
                fuse_layers(meta.model, in_place=True)
            parts = partition(meta.model)
            tokens = torch.zeros(sequences, length, dtype=torch.long, device="meta")
            activity = observe_units(meta.model, parts.sliding, lambda: meta.model(tokens), attention_operations)
            known[key] = meta, parts, tuple(activity)
        return known[key]

    return make


@pytest.fixture
def request_for(described, machine):
    from slideformer_backend.plan.request import Choices, Load, Request

    def make(name, sequences, length=1024, *, accumulate=1, on=None, fused=True, **choices):
        meta, parts, activity = described(name, sequences, length, fused=fused)
        return Request(
            parts=parts,
            activity=activity,
            load=Load(sequences=sequences, length=length, accumulate=accumulate),
            vocabulary=meta.vocabulary,
            hidden=meta.hidden,
            machine=on or machine(),
            choices=Choices(**choices),
        )

    return make
