"""The recompute leaves nothing behind and sees what the forward saw."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from slideformer_backend.api import attach
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.errors import UnsupportedError

WIDTH = 16


class Noise(nn.Module):
    """A block whose forward does more than compute its output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.calls = 0
        self.state, self.total = None, torch.zeros(WIDTH)
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("average", torch.zeros(WIDTH))
        if kind == "spectral_norm":
            self.outer = torch.nn.utils.parametrizations.spectral_norm(self.outer)

    def forward(self, x):
        hidden = torch.relu(self.inner(x))
        self.calls += 1
        if self.kind == "numpy":
            hidden = hidden * float(np.random.rand())
        elif self.kind == "python":
            hidden = hidden * random.random()
        elif self.kind == "generator":
            hidden = hidden * torch.rand(WIDTH, generator=self.generator)
        elif self.kind == "torch":
            hidden = hidden * torch.rand(WIDTH)
        elif self.kind == "layer drop" and random.random() < 0.4:
            return x
        elif self.kind == "state":  # None at first, then rebound
            hidden = hidden if self.state is None else hidden + self.state
            self.state = hidden.detach().mean(0)
        elif self.kind == "state with a graph":  # of which the next forward uses the values
            hidden = hidden if self.state is None else hidden + self.state.detach()
            self.state = hidden.mean(0)
        elif self.kind == "new attribute":
            hidden = hidden + getattr(self, "made", 1.0)
            self.made = 0.5
        elif self.kind == "sum in place":
            hidden = hidden + self.total
            self.total += hidden.detach().mean(0)
        elif self.kind == "counter":
            hidden = hidden / self.calls
        elif self.kind == "batch norm":
            hidden = self.norm(hidden)
        elif self.kind == "average":
            hidden = hidden - self.average
            with torch.no_grad():
                self.average = 0.9 * self.average + 0.1 * hidden.mean(0)
        return x + self.outer(hidden)


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Noise(kind) for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def train(model, device, *, is_managed):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    engine = None
    if is_managed:
        engine = attach(model, SlideFormerConfig(), device=device)
        engine.bind(optimizer)
    seen = []
    data = torch.randn(3, 32, WIDTH, generator=torch.Generator().manual_seed(2))
    for x in data:
        loss = model(x).square().mean()
        loss.backward()
        seen.append(loss.detach().clone())
        seen += [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    if engine is not None:
        engine.detach()
    seen += [value.clone() for value in model.state_dict().values()]
    seen += [torch.tensor([random.random(), np.random.rand()]), torch.rand(1)]
    return seen, [block.calls for block in model.blocks]


class Remembered(nn.Module):
    """A block with a recurrent state in a cache, written in place as recurrent layers of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cache):
        hidden = x + self.inner(x) + cache.states.get(0, 0.0)
        if 0 in cache.states:
            cache.states[0].copy_(hidden.detach().mean(0))
        else:
            cache.states[0] = hidden.detach().mean(0)
        return hidden


class Cache:
    """Found by its name, as the engine finds it."""

    def __init__(self) -> None:
        self.states = {}


def test_a_recurrent_state_in_a_cache(device):
    """A fresh cache is filled once; the state in a filled one is overwritten and cannot be recomputed from."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Remembered() for _ in range(2)])

        def forward(self, x, caches):
            for block, cache in zip(self.blocks, caches, strict=True):
                x = block(x, cache)
            return x

    torch.manual_seed(0)
    managed = Model()
    plain = copy.deepcopy(managed).to(device)
    engine = attach(managed, SlideFormerConfig(), device=device)
    x = torch.randn(4, WIDTH, device=device)
    for model in (plain, managed):
        model(x, [Cache(), Cache()]).square().sum().backward()
    for one, two in zip(plain.parameters(), managed.parameters(), strict=True):
        assert torch.equal(one.grad.cpu(), two.grad.cpu())
    caches = [Cache(), Cache()]
    managed(x, caches)
    with pytest.raises(UnsupportedError, match="use_cache=False"):
        managed(x, caches)
    engine.detach()


KINDS = (
    "numpy", "python", "generator", "torch", "layer drop", "counter", "batch norm", "average", "spectral_norm",
    "state", "state with a graph", "new attribute", "sum in place",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_recomputed_forward_has_its_effects_once(kind):
    torch.manual_seed(0)
    start = Net(kind)
    expected, calls = train(copy.deepcopy(start), None, is_managed=False)
    found, managed_calls = train(copy.deepcopy(start), torch.device("cpu"), is_managed=True)
    assert managed_calls == calls
    assert len(found) == len(expected)
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
