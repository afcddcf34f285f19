"""Arguments of units that change in place between forward and recompute are refused with the remedy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slideformer_backend.api import attach
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.errors import UnsupportedError
from tests.budgets import tight

WIDTH, ROWS, LAYERS = 64, 300, 6  # 77 KB: large enough to leave the device


class Block(nn.Module):
    """Keeps neither its input nor its condition for backward: plain PyTorch lets both change."""

    is_inside = False

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, condition=None):
        hidden = x
        for part in condition if isinstance(condition, (list, tuple)) else (condition,):
            value = part["scale"] if isinstance(part, dict) else part
            hidden = hidden if value is None else hidden + value
        hidden = self.down(torch.relu(self.up(torch.relu(hidden))))
        if self.is_inside:
            x += hidden
            return x
        return hidden


class Net(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, condition=None):
        x = x if self.how == "first" else self.embed(x)
        for layer in self.layers:
            if self.how == "outside":
                x += layer(x, condition=condition)
            elif self.how == "zeroed":
                taken, x = x, layer(x)
                taken.mul_(0)
            else:
                x = x + layer(x, condition=condition)
        return self.head(x)


@pytest.fixture(params=["gpu", "host", "resident"])
def managed(request, device):
    """Makes a managed model under each way of keeping inputs, also of a unit that lives on the device."""
    engines = []

    def make(how: str = ""):
        torch.manual_seed(0)
        model = Net(how).train()
        kept = "gpu" if request.param == "resident" else request.param
        engine = attach(model, SlideFormerConfig(activations=kept, gpu_memory=tight(model)), device=device)
        engine.bind(torch.optim.AdamW(model.parameters(), lr=1e-2))
        if request.param == "resident":
            for unit in list(engine.sliding):
                engine.move_to_device(unit)
        engines.append(engine)
        return model

    yield make
    for engine in engines:
        engine.detach()


def rows(device):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)


@pytest.mark.parametrize("wrap", [lambda c: c, lambda c: [c], lambda c: (None, [{"scale": c}][0])])
def test_a_keyword_argument_that_changes_before_backward(managed, device, wrap):
    model = managed()
    condition = torch.zeros(WIDTH, device=device)
    first = model(rows(device), wrap(condition))
    condition.fill_(3.0)
    loss = (first - model(rows(device), wrap(condition))).sum()
    with pytest.raises(UnsupportedError, match=r"argument condition of layers\.5 .*SlideFormer.*condition\.clone\(\)"):
        loss.backward()
    model.zero_grad()
    model(rows(device), wrap(condition)).sum().backward()
    condition.fill_(0.0)  # after backward it may change


def test_an_input_that_changes_before_backward(managed, device):
    """Also where the copy on the host would be right: which inputs leave is the plan's affair."""
    model = managed("first")
    batch = rows(device)
    loss = model(batch).sum()
    batch.fill_(1.0)
    with pytest.raises(UnsupportedError, match=r"argument x of layers\.0 .*modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("how", ["outside", "zeroed"])
def test_a_residual_added_in_place(managed, device, how):
    model = managed(how)
    loss = model(rows(device)).sum()
    with pytest.raises(UnsupportedError, match=r"argument x of layers\.\d .*x = x \+ layer\(x\)"):
        loss.backward()


def test_a_layer_that_changes_its_input(managed, device, monkeypatch):
    monkeypatch.setattr(Block, "is_inside", True)
    model = managed()
    with pytest.raises(UnsupportedError, match=r"layers\.0 changes its argument x in place.*x = x \+ y"):
        model(rows(device))
    with torch.no_grad():
        model(rows(device))  # nothing is run again


def test_the_random_state_where_all_arguments_are_keywords(device):
    """The device's generator is saved although the checkpoint sees no positional tensor."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return torch.dropout(self.linear(x).relu(), 0.5, True).square()

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Dropped() for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x=x)
            return x

    def gradients(is_managed):
        torch.manual_seed(0)
        model = Stack()
        engine = attach(model, SlideFormerConfig(gpu_memory=tight(model)), device=device) if is_managed else None
        model = model if is_managed else model.to(device)
        torch.manual_seed(1)
        model(rows(device)).sum().backward()
        found = [parameter.grad.cpu().clone() for parameter in model.parameters()]
        if engine is not None:
            engine.detach()
        return found

    for plain, ours in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, ours)
