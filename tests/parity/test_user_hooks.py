"""Gradient hooks of user code on a fp32 model under bf16 autocast, whose working weights are bf16."""

import pytest
import torch

from slideformer_backend.errors import UnsupportedError
from slideformer_backend.transfer import Monitor
from tests.parity.harness import PRECISIONS, check, run_managed
from tests.parity.models import batch, language_loss, stack

ADAMW = {"lr": 1e-2, "fused": True}
BF16 = torch.bfloat16


def train(run, optimizer, *, count=4, accumulate=2, first=0):
    for number in range(first, first + count):
        ids = batch(number, length=6, device=run.device)
        loss = language_loss(run.forward(ids), ids)
        run.see("loss", loss)
        is_last = (number + 1) % accumulate == 0
        run.backward(loss, is_last=is_last)
        if is_last:
            run.see_gradients()
            run.clip(0.5)
            optimizer.step()
            optimizer.zero_grad()
            run.see_weights()


def compare(script, device, *, precision="autocast", before=None, **options):
    """``before`` registers hooks on the model that is then prepared."""
    dtype, autocast = PRECISIONS[precision]

    def make():
        model = stack()().to(dtype)
        if before is not None:
            before(model)
        return model

    monitor = Monitor(max_delay=0.001, check=device.type == "cpu")
    check(make, script, device, autocast=autocast, monitor=monitor, **options)


class Looks:
    """What hooks see, by parameter: autocast's casts let gradients of a layer arrive in another order."""

    def __init__(self):
        self._seen = {}

    def of(self, name):
        def look(value):
            if isinstance(value, torch.nn.Parameter):
                value = value.grad
            self._seen.setdefault(name, []).append(None if value is None else value.clone())

        return look

    def show(self, run):
        for name, values in sorted(self._seen.items()):
            for value in values:
                run.see(name, value)


def mask_of(name, gradient):
    generator = torch.Generator().manual_seed(len(name))
    return (torch.rand(gradient.shape, generator=generator) > 0.5).to(gradient)


def masked(name):
    return lambda gradient: gradient * mask_of(name, gradient)


def scaled(gradient):
    """A factor that a bf16 gradient would round."""
    return gradient * (0.05 / (gradient.norm() + 1e-6)).clamp(max=1)


def in_place(gradient):
    gradient.mul_(0.3)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_tensor_hooks(device, precision):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        handles, looks = [], Looks()
        for name, parameter in run.model.named_parameters():
            parameter.register_hook(looks.of(f"first {name}"))
            handles.append(parameter.register_hook(masked(name)))
            parameter.register_hook(scaled)
            parameter.register_hook(looks.of(f"last {name}"))
        train(run, optimizer)
        for handle in handles:
            handle.remove()
        train(run, optimizer, first=4)
        looks.show(run)

    compare(script, device, precision=precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_hooks_from_before_prepare(device, precision):
    looks, handles = Looks(), []

    def before(model):
        handles.clear()
        looks.__init__()
        for name, parameter in model.named_parameters():
            handles.append(parameter.register_hook(masked(name)))
            parameter.register_hook(looks.of(name))
            parameter.register_post_accumulate_grad_hook(looks.of(f"sum {name}"))

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        train(run, optimizer)
        for handle in handles:
            handle.remove()
        train(run, optimizer, first=4)
        looks.show(run)

    compare(script, device, precision=precision, before=before)


def _halve(parameter):
    parameter.grad.mul_(0.5)


def _replace(parameter):
    parameter.grad = parameter.grad * 0.7


def _drop(parameter):
    if parameter.ndim == 1:
        parameter.grad = None


def _decay(parameter):
    parameter.grad.add_(parameter.detach(), alpha=0.1)


@pytest.mark.parametrize("precision", ["fp32", "autocast"])
@pytest.mark.parametrize("change", [_halve, _replace, _drop, _decay])
def test_post_accumulate_hooks(device, change, precision):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        looks = Looks()
        for name, parameter in run.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(looks.of(name))
            if "blocks" in name:
                parameter.register_post_accumulate_grad_hook(change)
                parameter.register_post_accumulate_grad_hook(looks.of(name))
        train(run, optimizer, count=6)
        looks.show(run)

    compare(script, device, precision=precision)


@pytest.mark.parametrize("write", [lambda p: p.mul_(2), lambda p: p.data.mul_(2)])
def test_post_accumulate_hooks_that_write_weights_are_refused(device, write):
    def script(run):
        weight = run.model.blocks[1].up.weight
        kept = weight.detach().clone()
        weight.register_post_accumulate_grad_hook(write)
        ids = batch(0, device=run.device)
        with pytest.raises(UnsupportedError, match="writes the weight"), torch.no_grad():
            language_loss_with_graph(run, ids).backward()
        run.forward(ids)
        assert torch.equal(weight, kept)

    run_managed(stack(), script, device, autocast=BF16)


def language_loss_with_graph(run, ids):
    with torch.enable_grad():
        return language_loss(run.forward(ids), ids)


def test_hooks_that_change_the_dtype_are_refused_as_by_torch(device):
    def script(run):
        run.model.blocks[1].up.weight.register_hook(lambda gradient: gradient.to(BF16))
        with pytest.raises(RuntimeError, match="has changed the type of"):
            language_loss_with_graph(run, batch(0, device=run.device)).backward()

    run_managed(stack(), script, device, autocast=BF16)


def test_hooks_outlive_the_engine(device):
    """As they were registered: what is taken off is off, and they see what torch gives them."""
    model, seen = stack()(), []
    weight = model.blocks[1].up.weight
    one, two = (weight.register_hook(lambda gradient: seen.append(gradient.dtype)) for _ in range(2))

    def script(run):
        language_loss_with_graph(run, batch(0, device=run.device)).backward()
        one.remove()
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))

    run_managed(lambda: model, script, device, autocast=BF16)
    assert seen == [torch.float32] * 2
    ids = batch(0)
    language_loss(model(ids), ids).backward()
    assert seen == [torch.float32] * 4
    assert list(weight._backward_hooks) == [two.id]
    assert all(type(hook).__module__ == "builtins" for hook in weight._backward_hooks.values())


def test_multi_grad_hooks(device):
    """That it has seen any gradient can be told; whether it has seen all cannot, and was told three times over."""

    def script(run):
        weights = list(run.model.parameters())
        with pytest.raises(UnsupportedError, match="register_multi_grad_hook"):
            torch.autograd.graph.register_multi_grad_hook(weights[2:], print)
        calls = []
        torch.autograd.graph.register_multi_grad_hook(weights, calls.append, mode="any")
        language_loss_with_graph(run, batch(0, device=run.device)).backward()
        assert [call.dtype for call in calls] == [torch.float32]

    run_managed(stack(), script, device, autocast=BF16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the leaf of a parameter changes with its device")
def test_multi_grad_hooks_where_leaves_stay(device):
    def script(run):
        calls = []
        torch.autograd.graph.register_multi_grad_hook(list(run.model.parameters()), calls.append)
        for number in range(2):
            language_loss_with_graph(run, batch(number, device=run.device)).backward()
        run.see("calls", len(calls))
        for call in calls:
            for gradient in call:
                run.see("gradient", gradient)

    check(stack(), script, device)
