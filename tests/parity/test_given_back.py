"""What layers put out that they were given, leaves that they take first, graphs that are gone through twice."""

import collections
import gc
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from slideformer_backend.api import attach
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.engine.guard import _name_devices
from slideformer_backend.errors import UnsupportedError
from slideformer_backend.plan.placement import Placement
from tests.budgets import tight
from tests.parity.harness import check
from tests.parity.models import HIDDEN, VOCABULARY, Block, batch, language_loss, steps
from tests.tolerances import ASSOCIATIVITY

SGD = {"lr": 1e-1, "fused": True}
Pair = collections.namedtuple("Pair", "x given")


class Layer(Block):
    def forward(self, x, kind=None, bias=None):
        if kind == "itself":
            return x
        if kind in ("tuple", "list", "dict", "named"):
            y = super().forward(x)
            return {"tuple": (y, x), "list": [y, x], "dict": {0: y, 1: x}, "named": Pair(y, x)}[kind]
        if kind == "own":
            return super().forward(x), self.norm.weight
        if kind == "bias":
            return super().forward(x + bias)
        if kind == "bias back":
            return super().forward(x + bias), bias
        return super().forward(x)


class Net(nn.Module):
    def __init__(self, kind=None, layers=4, frozen=False):
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(VOCABULARY, HIDDEN).requires_grad_(not frozen)
        self.scale = nn.Parameter(torch.full((HIDDEN,), 1.5))
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids):
        x, kind = self.embed(ids), self.kind
        for number, layer in enumerate(self.layers):
            if kind == "itself":  # which the model changes in place, and goes on with
                y = layer(x, kind if number % 2 else None)
                y *= self.scale
                x = x + y if number % 2 else y
            elif kind in ("tuple", "list", "dict", "named"):
                found = layer(x, kind)
                assert found[1] is x
                x = found[0] + x.sin()
            elif kind == "own":
                y, weight = layer(x, kind)
                x = y * weight if number % 2 else y
            elif kind == "bias":
                x = layer(x, kind, bias=self.scale)
            elif kind == "bias back":
                x, bias = layer(x, kind, bias=self.scale)
                x = x * bias
            else:
                x = layer(x)
        return self.head(x)


class Ordered(Net):
    """Six layers, of which some come, or come again."""

    order = ()

    def forward(self, ids):
        x = self.embed(ids)
        for number in self.order:
            x = self.layers[number](x)
        return self.head(x)


@pytest.mark.parametrize("kind", ["itself", "tuple", "list", "dict", "named"])
def test_a_tensor_that_is_handed_back_is_the_callers(device, kind):
    def script(run):
        steps(run, run.optimizer(torch.optim.SGD, **SGD))

    tolerance = None if kind == "itself" else ASSOCIATIVITY  # used by the layer and outside of it
    check(lambda: Net(kind), script, device, gpu_memory=tight(Net()), tolerance=tolerance)


def test_a_layer_puts_out_a_parameter_of_its_own(device):
    def script(run):
        steps(run, run.optimizer(torch.optim.SGD, **SGD))

    # outside of its layer it is in host memory
    refused = pytest.raises(UnsupportedError, match="outside of its layer") if device.type == "cuda" else nullcontext()
    with refused:
        check(lambda: Net("own"), script, device, gpu_memory=tight(Net()))


def test_a_parameter_beside_tensors_of_another_device_is_named(device):
    def script(run):
        if run.is_managed:
            weight = run.model.layers[0].norm.weight
            with pytest.raises(UnsupportedError, match=r"mul\(\) takes a parameter .* on cpu there, other .* on meta"):
                weight * torch.ones_like(weight, device="meta")
        steps(run, run.optimizer(torch.optim.SGD, **SGD))

    check(lambda: Net(), script, device, gpu_memory=tight(Net()))


def test_a_batch_on_another_device_is_torchs_to_name():
    """An embedding is on the device, and the script left its tokens on the host."""
    error = RuntimeError("Expected all tensors to be on the same device")
    host, device = torch.ones(3), torch.ones(3, device="meta")
    _name_devices(error, "embedding", [(device, None)], (device, host))
    with pytest.raises(UnsupportedError):
        _name_devices(error, "mul", [(host, None)], (host, device))


@pytest.mark.parametrize("kind", ["bias", "bias back"])
def test_a_learned_tensor_comes_first(device, kind):
    def script(run):
        """Nothing is read between steps, which would wait for updates."""
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2, fused=True)
        for number in range(20):
            ids = batch(number, device=run.device)
            run.backward(language_loss(run.forward(ids), ids))
            optimizer.step()
            optimizer.zero_grad()
        run.see_weights()

    check(lambda: Net(kind, frozen=True), script, device, gpu_memory=tight(Net()), tolerance=ASSOCIATIVITY)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("order", [(2,), (2, 0, 1, 2, 3, 4, 5)])
def test_twice_through_a_kept_graph(device, order, frozen):
    """Layers that do not come are fetched ahead all the same, those that come twice have gradients to come."""

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2, fused=True)
        for number in range(3):
            ids = batch(number, device=run.device)
            loss = language_loss(run.forward(ids), ids)
            run.see("loss", loss)
            run.backward(loss, retain_graph=True)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        run.see_weights()

    def make():
        model = Ordered(layers=6, frozen=frozen)
        model.order = order
        return model

    tolerance = ASSOCIATIVITY if device.type == "cuda" else None
    check(make, script, device, gpu_memory=tight(make()), tolerance=tolerance)


@pytest.mark.parametrize("where", ["sliding", "kept", "on the device"])
def test_nothing_of_a_step_outlives_it(device, where):
    """Not as part of a cycle either, nor as a hook on a leaf."""
    model = Net("bias back", frozen=True)
    engine = attach(model, SlideFormerConfig(gpu_memory=tight(model)), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    engine.bind(optimizer)
    if where == "on the device":
        for unit in list(engine.sliding):
            engine.move_to_device(unit)
    if where != "sliding":
        engine.residency.placement = Placement((), tuple(unit.index for unit in engine.units), "gpu", 0, "")
    units = [unit for unit in engine.units if unit.module is not None]
    gc.collect()
    gc.disable()
    try:
        for number in range(6):
            ids = batch(number, device=device)
            loss = language_loss(model(ids), ids)
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
        assert sum(len(unit.visits) for unit in units) == 0
        with torch._C.DisableTorchFunctionSubclass():
            assert len(model.scale._backward_hooks or ()) <= 1
    finally:
        gc.enable()
        engine.detach()
