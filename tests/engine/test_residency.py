"""Units that live on the device train to the same bits as units that slide."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from slideformer_backend.api import attach
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.plan.placement import UnitCost, place
from tests.budgets import tight


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 16, layers: int = 4, vocabulary: int = 20) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "whole": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


def train(model, *, moves, device, update="exact", optimizer="adamw", max_norm=None, accumulate=1, steps=6):
    """Train; ``moves`` maps a step to the number of units that move to the device before it."""
    engine = attach(
        model, SlideFormerConfig(update=update, prefetch=2, gpu_memory=tight(model)), device=device
    )  # nothing moves by itself
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    engine.bind(optimizer)
    generator = torch.Generator().manual_seed(3)
    seen = []
    for step in range(steps):
        for _ in range(moves.get(step, 0)):
            engine.move_to_device(engine.sliding[0])
        for number in range(accumulate):
            engine.last_microbatch = lambda number=number: number == accumulate - 1
            tokens = torch.randint(0, 20, (2, 8), generator=generator).to(device)
            loss = nn.functional.cross_entropy(model(tokens).float().view(-1, 20), tokens.view(-1)) / accumulate
            loss.backward()
            seen.append(loss.item())
        if max_norm is not None:
            seen.append(engine.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    engine.settle()
    state = copy.deepcopy(optimizer.state_dict())
    weights = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    engine.detach()
    return seen, weights, state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"max_norm": 0.05},
        {"max_norm": 100.0, "accumulate": 2},
        {"optimizer": "sgd", "max_norm": 0.1},
        {"optimizer": "whole"},
        {"update": "immediate"},
    ],
    ids=str,
)
def test_moved_units_train_to_the_same_bits(device, dtype, case):
    torch.manual_seed(0)
    start = Net().to(dtype)
    slid = train(copy.deepcopy(start), moves={}, device=device, **case)
    moved = train(copy.deepcopy(start), moves={2: 1, 4: 2}, device=device, **case)
    if dtype is torch.bfloat16 and case.get("update") == "immediate":
        # A split master's weight rounds ties up, a device unit's to even (DESIGN 5): equal until the first tie.
        assert slid[0][:3] == moved[0][:3]
        return
    assert slid[0] == moved[0]
    for name, value in slid[1].items():
        assert torch.equal(value, moved[1][name]), name
    assert slid[2]["param_groups"] == moved[2]["param_groups"]
    for number, entries in slid[2]["state"].items():
        for key, value in entries.items():
            other = moved[2]["state"][number][key]
            assert torch.equal(value.cpu(), other.cpu()) if isinstance(value, torch.Tensor) else value == other


def test_a_write_to_a_resident_parameter_counts(device):
    torch.manual_seed(0)
    start = Net().to(torch.bfloat16)
    results = []
    for moves in (0, 2):
        model = copy.deepcopy(start)
        engine = attach(model, SlideFormerConfig(prefetch=2, gpu_memory=tight(model)), device=device)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        engine.bind(optimizer)
        for _ in range(moves):
            engine.move_to_device(engine.sliding[0])
        for _ in range(3):
            tokens = torch.arange(16, device=device).view(2, 8)
            nn.functional.cross_entropy(model(tokens).float().view(-1, 20), tokens.view(-1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.layers[0].up.weight.data.mul_(0.5)
                model.layers[3].down.weight[0].zero_()
        engine.settle()
        results.append({name: value.cpu().clone() for name, value in model.state_dict().items()})
        engine.detach()
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_place_fills_from_the_front_and_skips_recompute_only_when_all_are_resident():
    units = [UnitCost(number, 10, 4) for number in range(4)]
    assert place(units, 25).resident == (0, 1)
    assert place(units, 25).kept_activations == ()
    assert place(units, 49).kept_activations == (3, 2)
    assert place(units, 49, recompute="always").kept_activations == ()
    assert place(units, -5).resident == ()
    assert "2 of 4 units" in place(units, 25).reason
