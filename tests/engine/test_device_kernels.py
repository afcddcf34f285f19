"""The device's update and norm give the host kernels' bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slideformer_backend.engine import device_kernels
from slideformer_backend.engine.unit import Entry
from slideformer_backend.optim import twins
from slideformer_backend.optim.rules import RULES

GROUP = {
    "lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "maximize": False, "momentum": 0.9,
    "dampening": 0.1, "nesterov": True,
}  # fmt: skip
KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("coefficient", [1.0, 0.37])
@pytest.mark.parametrize(("name", "states"), [("adamw", 2), ("adam", 2), ("sgd", 1), ("sgd", 0), ("lion", 1)])
def test_update_equals_the_twin_bit_for_bit(device, name, states, coefficient, dtype):
    torch.manual_seed(0)
    count, rule = 70001, RULES[name]
    master = torch.randn(count)
    held = [torch.randn(count).abs() * 1e-3 for _ in range(states)]
    gradient = (torch.randn(count) * torch.logspace(-30, 3, count)).to(dtype)
    names = rule.state_names[:states]
    for step in (1, 2, 1000):
        entry = Entry(rule, names, rule.scalars(GROUP, step), np.float32(coefficient))
        weights = torch.zeros(count, dtype=dtype, device=device)
        moved = [tensor.to(device, copy=True) for tensor in (master, *held, gradient)]
        device_kernels.update(entry, moved[0], tuple(moved[1:-1]), moved[-1], weights)
        expected = torch.zeros(count, dtype=dtype)
        kind = KINDS[dtype]
        twins.update(rule, master, tuple(held), gradient, kind, np.float32(coefficient), entry.scalars, expected, kind)
        assert torch.equal(moved[0].cpu(), master)
        assert all(torch.equal(mine.cpu(), other) for mine, other in zip(moved[1:-1], held, strict=True))
        assert torch.equal(weights.cpu(), expected)


@pytest.mark.parametrize(("name", "states"), [("adamw", 2), ("sgd", 1), ("lion", 1)])
def test_an_update_of_a_split_master_rounds_weights_as_the_host_does(device, name, states):
    torch.manual_seed(0)
    count, rule = 300001, RULES[name]
    master = (torch.randn(count).to(torch.bfloat16).float().view(torch.int32) | 0x8000).view(torch.float32)  # all ties
    held = [torch.zeros(count) for _ in range(states)]
    gradient = torch.zeros(count).to(torch.bfloat16)
    still = {**GROUP, "weight_decay": 0.0}
    entry = Entry(rule, rule.state_names[:states], rule.scalars(still, 1), np.float32(1.0))
    low = torch.empty(count, dtype=torch.int16)
    expected = torch.empty(count, dtype=torch.bfloat16)
    twins.split(master, expected, low)
    assert not torch.equal(expected, master.to(torch.bfloat16))
    weights = torch.zeros(count, dtype=torch.bfloat16, device=device)
    moved = [tensor.to(device, copy=True) for tensor in (master, *held, gradient)]
    device_kernels.update(entry, moved[0], tuple(moved[1:-1]), moved[-1], weights, half_up=True)
    assert torch.equal(moved[0].cpu(), master)
    assert torch.equal(weights.cpu(), expected)
    device_kernels.reconcile(moved[0], weights, half_up=True)
    assert torch.equal(moved[0].cpu(), master)  # nobody wrote the weights


@pytest.mark.parametrize("half_up", [False, True])
@pytest.mark.parametrize("dtype", KINDS)
def test_a_written_weight_becomes_the_master(device, dtype, half_up):
    torch.manual_seed(0)
    count = 70001
    master = torch.randn(count)
    master[::1000] = float("nan")
    weights = torch.empty(count, dtype=dtype)
    if half_up and dtype == torch.bfloat16:
        twins.split(master, weights, torch.empty(count, dtype=torch.int16))
    else:
        twins.round_into(master, weights, KINDS[dtype])
    written = torch.arange(count) % 7 == 0
    weights[written] = (weights.nan_to_num() + 1)[written]
    expected = torch.where(written, weights.float(), master)
    found = master.to(device, copy=True)
    device_kernels.reconcile(found, weights.to(device), half_up=half_up)
    assert torch.equal(found.cpu().nan_to_num(9.0), expected.nan_to_num(9.0))


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("count", [1, 1023, 65536, 65537, 300001])
def test_sum_of_squares_equals_the_twin_bit_for_bit(device, count, dtype):
    torch.manual_seed(0)
    gradient = (torch.randn(count) * 3).to(dtype)
    blocks = -(-count // 65536)
    expected, found = torch.zeros(blocks, dtype=torch.float64), torch.zeros(blocks, dtype=torch.float64, device=device)
    twins.sum_squares(gradient, KINDS[dtype], expected)
    device_kernels.sum_squares(gradient.to(device), found)
    assert torch.equal(found.cpu(), expected)


def test_a_clip_rounds_as_the_host_does(device):
    torch.manual_seed(0)
    gradient = torch.randn(10001).to(torch.bfloat16)
    on_device = gradient.to(device, copy=True)
    device_kernels.scale(on_device, np.float32(0.3337))
    twins.scale(gradient, "bf16", np.float32(0.3337))
    assert torch.equal(on_device.cpu(), gradient)
