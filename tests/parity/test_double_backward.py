"""Gradients of gradients, over more layers than the window has slots: penalties, Hessian-vector products."""

import gc
import time

import pytest
import torch
from torch import nn

from slideformer_backend.errors import StaleGraphError, UnsupportedError
from slideformer_backend.plan.placement import Placement
from slideformer_backend.transfer import Monitor
from tests.budgets import tight
from tests.parity.harness import POLICIES, PRECISIONS, check, run_managed
from tests.parity.models import Stack, batch, hugging_face, language_loss
from tests.tolerances import ASSOCIATIVITY

LAYERS = 8
ADAMW = {"lr": 1e-3, "fused": True}


class Wide(Stack):
    """A stack that takes embeddings, and has nothing curved behind its last block."""

    def __init__(self):
        super().__init__(layers=LAYERS)
        self.norm = nn.Identity()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def wide():
    return Wide().train()


def deep_llama():
    return hugging_face("Llama", num_hidden_layers=LAYERS)


def embedded(run, ids):
    """Embeddings of ``ids`` as a leaf, and what the model makes of them."""
    embed = run.model.embed if isinstance(run.model, Wide) else run.model.get_input_embeddings()
    x = embed(ids).detach().requires_grad_()
    return x, run.forward(x) if isinstance(run.model, Wide) else run.forward(inputs_embeds=x)


def loss_and_penalty(run, ids):
    x, output = embedded(run, ids)
    loss = language_loss(output, ids)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.float().square().sum()


def penalty_alone(run, ids):
    """Only the second backward gives the last weights their gradient."""
    x, output = embedded(run, ids)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    (gradient,) = torch.autograd.grad(logits.float().sum(), x, create_graph=True)
    return gradient.float().square().sum() * 1e-3


def graph_of_the_gradient_alone(run, ids):
    """Nothing but the penalty holds the graph when the next forward, of another batch, needs slots."""
    penalty = penalty_alone(run, ids)
    gc.collect()
    embedded(run, ids.flip(1))
    with torch.no_grad():
        embedded(run, ids)
    return penalty


def two_penalties(run, ids):
    """On one forward: two graphs of its backward, one of the penalty's own, gone back through by one pass."""
    x, output = embedded(run, ids)
    loss = language_loss(output, ids)
    (one,) = torch.autograd.grad(loss, x, create_graph=True)
    (two,) = torch.autograd.grad(loss * loss, x, create_graph=True)
    (third,) = torch.autograd.grad(one.square().sum(), x, create_graph=True)
    return loss + one.square().sum() + two.square().mean() + third.square().mean()


LOSSES = {
    function.__name__: function
    for function in (loss_and_penalty, penalty_alone, graph_of_the_gradient_alone, two_penalties)
}


def training(loss_of, *, accumulate=1, clip=None, hooks=False):
    def script(run):
        kept = []
        for name, parameter in run.model.named_parameters() if hooks else ():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: kept.append((name, p.grad.clone())))
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        for number in range(3 * accumulate):
            ids = batch(number, length=6, device=run.device)
            loss = loss_of(run, ids) / accumulate
            run.see("loss", loss)
            is_last = (number + 1) % accumulate == 0
            run.backward(loss, is_last=is_last)
            if not is_last:
                continue
            run.see_gradients()
            if clip is not None:
                run.clip(clip)
            optimizer.step()
            optimizer.zero_grad()
            run.see_weights()
        for name, gradient in sorted(kept, key=lambda pair: pair[0]):
            run.see(f"kept {name}", gradient)

    return script


def checked(make, script, device, **options):
    """On a GPU some gradients of layers that keep their activations were in last places apart (an H200, torch 2.11)."""
    tolerance = ASSOCIATIVITY if device.type == "cuda" else None
    check(make, script, device, gpu_memory=tight(make()), kernels="off", tolerance=tolerance, **options)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("make", [wide, deep_llama])
def test_penalties(device, make, loss_of, prefetch):
    checked(make, training(loss_of), device, prefetch=prefetch)


@pytest.mark.parametrize("precision", [name for name in PRECISIONS if name != "fp32"])
@pytest.mark.parametrize("loss_of", [loss_and_penalty, penalty_alone])
def test_penalties_in_other_dtypes(device, loss_of, precision):
    dtype, autocast = PRECISIONS[precision]
    checked(lambda: wide().to(dtype), training(loss_of), device, prefetch=0, autocast=autocast)


@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("policy", POLICIES)
def test_accumulation(device, policy, loss_of):
    checked(wide, training(loss_of, accumulate=3), device, policy=policy, prefetch=0)


@pytest.mark.parametrize("hooks", [False, True])
def test_accumulation_clips_and_hooks(device, hooks):
    checked(wide, training(penalty_alone, accumulate=2, clip=0.05, hooks=hooks), device, prefetch=0)


@pytest.mark.parametrize("keeps", [0, 3, LAYERS])
@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)
def test_kept_activations(device, loss_of, keeps):
    """Some layers, or none, or all; every lane late, and what is given back poisoned."""
    inner = training(loss_of, accumulate=2)

    def script(run):
        if run.is_managed and keeps:
            engine = run.engine
            engine.window.grow(engine.sliding, keeps)
            kept = tuple(unit.index for unit in engine.sliding[-keeps:])
            engine.residency.placement = Placement((), kept, "gpu", keeps, "")
        inner(run)

    monitor = Monitor(max_delay=0.002, check=device.type == "cpu")
    checked(wide, script, device, prefetch=0, monitor=monitor)


@pytest.mark.parametrize("make", [wide, deep_llama])
def test_slots_are_given_back(device, make):
    """What a graph of a backward holds ends with it."""

    def held(engine):
        end = time.monotonic() + 10.0  # on a GPU torch's own thread may be the last to let go
        while found := any(visit.holds_slot for unit in engine.sliding for visit in unit.visits):
            gc.collect()
            if time.monotonic() > end:
                break
        return found

    def script(run):
        run.see("loss", loss_and_penalty(run, batch(1, device=run.device)))
        run.see("held", run.is_managed and held(run.engine))

    checked(make, script, device, prefetch=0)


def test_stale_graph(device):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        penalty = penalty_alone(run, batch(1, device=run.device))
        run.backward(loss_and_penalty(run, batch(2, device=run.device)))
        optimizer.step()
        with pytest.raises(StaleGraphError):
            penalty.backward()

    run_managed(wide, script, device, gpu_memory=tight(wide()), kernels="off", prefetch=0)


def test_gradients_with_a_graph_are_refused(device):
    def script(run):
        _, output = embedded(run, batch(1, device=run.device))
        with pytest.raises(UnsupportedError, match="autograd.grad"):
            output.float().square().sum().backward(create_graph=True)

    run_managed(wide, script, device, gpu_memory=tight(wide()), kernels="off")


def test_weights_outside_their_block_are_refused_still(device):
    def script(run):
        loss = loss_and_penalty(run, batch(1, device=run.device))
        loss.backward()
        del loss
        with pytest.raises(UnsupportedError, match="outside its block"):
            run.model.blocks[0].up.weight.square().sum().backward()

    run_managed(wide, script, device, gpu_memory=tight(wide()), kernels="off")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_hessian_vector_products(device, precision):
    """The gradients of all weights, and those of a number made of them."""

    def script(run):
        ids = batch(1, device=run.device)
        weights = list(run.model.parameters())
        for _ in range(2):
            loss = language_loss(run.forward(embedded(run, ids)[0]), ids)
            gradients = torch.autograd.grad(loss, weights[1:], create_graph=True)
            products = torch.autograd.grad(sum(g.sin().sum() for g in gradients), weights[1:], allow_unused=True)
            for gradient, product in zip(gradients, products, strict=True):
                run.see("gradient", gradient)
                run.see("product", product)

    dtype, autocast = PRECISIONS[precision]
    checked(lambda: wide().to(dtype), script, device, prefetch=0, autocast=autocast)
