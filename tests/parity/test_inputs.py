"""Gradients with respect to chosen parameters: ``torch.autograd.grad`` and ``backward(inputs=...)``."""

import pytest
import torch

from tests.parity.harness import PRECISIONS, check, run_managed
from tests.parity.models import Block, batch, language_loss, stack
from tests.parity.test_graphs import UncachedTwice
from tests.parity.test_user_hooks import masked

ADAMW = {"lr": 1e-2, "fused": True}


def loss_of(run, number=0):
    ids = batch(number, device=run.device)
    return language_loss(run.forward(ids), ids)


def compare(script, device, precision, make=None, **options):
    dtype, autocast = PRECISIONS[precision]
    make = make or stack()
    return check(lambda: make().to(dtype).train(), script, device, autocast=autocast, **options)


@pytest.mark.parametrize("make", [stack(), UncachedTwice])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_grad(device, precision, make):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        for number in range(3):
            loss = loss_of(run, number)
            chosen = list(run.model.parameters())[::-1]
            for gradient in torch.autograd.grad(loss, chosen, retain_graph=True):
                run.see("of grad", gradient)
            run.see("still none", all(parameter.grad is None for parameter in chosen))
            run.backward(loss)
            run.see_gradients()
            optimizer.step()
            optimizer.zero_grad()
            run.see_weights()

    compare(script, device, precision, make)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_backward_to_inputs(device, precision):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        for number in range(3):
            chosen = [p for p in run.model.blocks[number].parameters()] + [run.model.head.weight]
            for half in range(2):
                loss = loss_of(run, 2 * number + half)
                run.backward(loss, inputs=chosen, is_last=half == 1)
                run.see_gradients()
            optimizer.step()
            optimizer.zero_grad()
            run.see_weights()

    compare(script, device, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_unused_and_frozen(device, precision):
    def make():
        model = stack()()
        model.blocks.append(Block())
        model.blocks[1].requires_grad_(False)
        model.forward = lambda ids: model.head(model.blocks[1](model.blocks[0](model.embed(ids))))
        return model

    def script(run):
        used, frozen, unused = (run.model.blocks[number].up.weight for number in range(3))
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad(loss_of(run), [used, unused])
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.autograd.grad(loss_of(run), [used, frozen])
        for options in ({"allow_unused": True}, {"materialize_grads": True}):
            for gradient in torch.autograd.grad(loss_of(run), [unused, used], **options):
                run.see("gradient", gradient)
        run.backward(loss_of(run), inputs=[unused])
        run.see_gradients()
        one, two = torch.autograd.grad(
            [loss_of(run, 1), loss_of(run, 2)], {"a": used, "b": run.model.embed.weight}.values()
        )
        run.see("one", one)
        run.see("two", two)

    compare(script, device, precision, make)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_hooks(device, precision):
    """Hooks of a parameter change what ``grad`` gives."""

    def script(run):
        for name, parameter in run.model.named_parameters():
            parameter.register_hook(masked(name))
            parameter.register_hook(lambda gradient: gradient / 3)
        for gradient in torch.autograd.grad(loss_of(run), list(run.model.parameters())):
            run.see("gradient", gradient)
        run.backward(loss_of(run))
        run.see_gradients()

    compare(script, device, precision)


def test_gradients_are_where_the_parameter_is(device):
    def script(run):
        weights = list(run.model.parameters())
        found = torch.autograd.grad(loss_of(run), weights)
        assert [(g.dtype, g.device) for g in found] == [(w.dtype, w.device) for w in weights]

    run_managed(stack(), script, device, autocast=torch.bfloat16)
