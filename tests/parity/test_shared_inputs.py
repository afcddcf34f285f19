"""Tensors that several layers take: their gradients add up in autograd's order, to the last bit."""

import collections

import pytest
import torch
from torch import nn

from slideformer_backend.engine.boundaries import Boundaries
from slideformer_backend.engine.guard import tensors_in
from tests.budgets import tight
from tests.parity.harness import POLICIES, check, run_managed
from tests.parity.models import HIDDEN, LAYERS, VOCABULARY, Block, batch, language_loss, steps

ADAMW = {"lr": 1e-2, "fused": True}


def script(run):
    steps(run, run.optimizer(torch.optim.AdamW, **ADAMW))


class Translator(nn.Module):
    """One embedding feeds the first layer of the encoder and that of the decoder."""

    def __init__(self, encoders=2):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.Transformer(HIDDEN, 4, encoders, 2, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.head(self.layers(x, x, tgt_mask=mask))


def test_nn_transformer(device):
    def accumulating(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        for number in range(6):
            ids = batch(number, device=run.device)
            run.backward(language_loss(run.forward(ids), ids) / 2, is_last=number % 2 == 1)
            run.see_gradients()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
                run.see_weights()

    check(lambda: Translator().train(), accumulating, device)


class Crossing(Block):
    """Uses what all layers share more than once, and gives it back unless told otherwise."""

    def forward(self, x, shared, out=None):
        y = x + self.up(shared["rotary"][0] * x)[..., :HIDDEN] * shared["memory"]
        y = super().forward(y * torch.sigmoid(shared["mask"]) + shared["memory"] - shared["rotary"][1])
        return y, shared["memory"]


class Decoder(nn.Module):
    """Layers share a memory, a learned mask and two computed tensors; ``kind`` tells what else happens to those."""

    def __init__(self, kind, layers=LAYERS):
        super().__init__()
        self.kind = kind
        self.embed, self.encode = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(VOCABULARY, HIDDEN)
        self.mask = nn.Parameter(torch.randn(HIDDEN))
        self.angle = nn.Parameter(torch.randn(HIDDEN))
        self.blocks = nn.ModuleList(Crossing() for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids):
        x, memory = self.embed(ids), torch.tanh(self.encode(ids))
        given = {"memory": memory, "mask": self.mask, "rotary": (self.angle.cos(), self.angle.sin())}
        if self.kind == "in itself":
            given["given"] = given
        parts = []
        for block in self.blocks:
            y, back = block(x, given)
            given["memory"] = back if self.kind == "returned" else memory
            if self.kind == "parallel":
                parts.append(y)
            else:
                x = y
        if self.kind == "used later":
            x = x + self.encode.weight.mean() * memory * memory
        return self.head(sum(parts) if parts else x)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["given", "returned", "used later", "parallel", "in itself"])
def test_shared_tensors(device, kind, policy):
    check(lambda: Decoder(kind).train(), script, device, policy=policy)


def test_a_shared_boundary_off_the_device(device, monkeypatch):
    """The first encoder layer's input has left when the first decoder layer takes it."""
    monkeypatch.setattr(Boundaries, "least", 1)
    make = lambda: Translator(encoders=5).train()  # noqa: E731
    check(make, script, device, activations="host", gpu_memory=tight(make()))


@pytest.mark.parametrize("alone", [False, True])
def test_a_penalty_on_what_layers_share(device, alone):
    """Its graph is entered by the gradients of tensors that come to no layer through a node."""

    def loss_of(run, ids):
        shared = []
        hook = run.model.blocks[0].register_forward_pre_hook(
            lambda _, args: shared.extend([args[0], *tensors_in(args[1])])
        )
        loss = language_loss(run.forward(ids), ids)
        hook.remove()
        chosen = shared[1:] if alone else shared
        penalty = sum(g.square().sum() for g in torch.autograd.grad(loss, chosen, create_graph=True))
        return penalty if alone else loss + penalty

    def penalised(run):
        steps(run, run.optimizer(torch.optim.AdamW, **ADAMW), loss_of=loss_of)

    make = lambda: Decoder("given", layers=6).train()  # noqa: E731
    check(make, penalised, device, gpu_memory=tight(make()))


def test_a_layer_is_entered_once(device):
    """Also one that gives back what all layers share, whose gradient is complete at the end only."""
    entered = collections.Counter()

    def counting(run):
        begin = run.engine.backend.begin

        def counted(what, unit):
            entered[what, unit] += 1
            begin(what, unit)

        run.engine.backend.begin = counted
        ids = batch(0, device=run.device)
        run.backward(language_loss(run.forward(ids), ids))

    run_managed(lambda: Decoder("returned").train(), counting, device)
    assert [entered["backward", f"blocks.{number}"] for number in range(LAYERS)] == [1] * LAYERS


class TwoStreams(Block):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, y):
        return super().forward(x), y + self.other(y)


class HalfUsed(nn.Module):
    """Of two streams the loss uses the second one."""

    def __init__(self, layers=8):
        super().__init__()
        self.embed, self.encode = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(TwoStreams() for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids):
        x, y = self.embed(ids), self.encode(ids)
        for block in self.blocks:
            x, y = block(x, y)
        return self.head(y)


@pytest.mark.parametrize("recompute", ["always", "auto"])
def test_an_unused_stream_gets_no_gradient(device, recompute):
    """None, not zeros, which AdamW would decay weights for; and each layer makes room for the next one."""

    def watching(run):
        most = 0
        if run.is_managed:
            reach = run.engine.backward.open

            def watched(visit):
                nonlocal most
                reach(visit)
                most = max(most, len(run.engine.backward._open))

            run.engine.backward.open = watched
        script(run)
        assert most <= 1

    check(lambda: HalfUsed().train(), watching, device, recompute=recompute)
