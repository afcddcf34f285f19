"""Gradients that wait on the device for the next micro-batch."""

import collections

import pytest
import torch

from slideformer_backend.engine.gradients import Waiting
from slideformer_backend.transfer import GradientBuffer
from tests.parity.harness import PRECISIONS, check, run_managed
from tests.parity.models import batch, language_loss, llama
from tests.parity.test_parameters import ADAMW, each_policy, each_precision

LAYERS = 3


@pytest.fixture(autouse=True)
def gradients():
    """In place of the one for all tests: here the window has the slots that a test gives it."""


def grown(run, count=LAYERS):
    if run.is_managed:
        assert len(run.engine.sliding) == LAYERS
        run.engine.window.grow_gradients(run.engine.sliding, count)


def transfers(run):
    """How often each lane carries gradients from now on."""
    found = collections.Counter()
    for name in ("h2d", "d2h") if run.is_managed else ():
        lane = getattr(run.engine.backend, name)

        def submit(what, *args, lane=lane, name=name, submit=lane.submit, **kwargs):
            found[name] += what.startswith(("gradient of layers", "gradient of model.layers", "pending gradient of"))
            return submit(what, *args, **kwargs)

        lane.submit = submit
    return found


def micro(run, number, *, is_last=False):
    ids = batch(number, device=run.device)
    loss = language_loss(run.forward(ids), ids) / 3
    run.backward(loss, is_last=is_last)


def finished(run, optimizer):
    run.see_gradients()
    optimizer.step()
    optimizer.zero_grad()
    run.see_weights()


@each_policy
@each_precision
def test_they_are_sent_once(device, policy, precision):
    transferred(device, policy, precision, LAYERS, (0, 3))


@pytest.mark.parametrize(("count", "each_step"), [(1, (4, 7)), (0, (6, 9))])
def test_without_slots_for_all(device, count, each_step):
    transferred(device, "exact", "bf16", count, each_step)


def transferred(device, policy, precision, count, each_step):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        grown(run, count)
        found = transfers(run)
        for step in range(3):
            for number in range(3):
                micro(run, 3 * step + number, is_last=number == 2)
            optimizer.step()
            optimizer.zero_grad()
            run.see_weights()
        if run.is_managed:
            assert (found["h2d"], found["d2h"]) == tuple(3 * times for times in each_step)

    dtype, autocast = PRECISIONS[precision]
    check(llama(dtype), script, device, policy=policy, autocast=autocast)


def one_is_read(run, optimizer):
    run.see("gradient", run.model.model.layers[1].mlp.up_proj.weight.grad)


def one_is_written(run, optimizer):
    run.model.model.layers[1].mlp.up_proj.weight.grad.mul_(0.5)


def one_goes(run, optimizer):
    run.model.model.layers[1].mlp.up_proj.weight.grad = None


def one_is_replaced(run, optimizer):
    weight = run.model.model.layers[1].mlp.up_proj.weight
    weight.grad = torch.full_like(weight, 0.25)


def all_go(run, optimizer):
    optimizer.zero_grad()


def all_are_clipped(run, optimizer):
    run.clip(0.1)


def all_are_zeros(run, optimizer):
    optimizer.zero_grad(set_to_none=False)


def stepped(run, optimizer):
    """Although no step was to follow; the gradients stay."""
    optimizer.step()


def stepped_and_read(run, optimizer):
    optimizer.step()
    run.see_gradients()
    run.see_weights()


def evaluated(run, optimizer):
    with torch.no_grad():
        run.see("loss", language_loss(run.forward(ids := batch(9, device=run.device)), ids))


def failed(run, optimizer):
    """A backward that ends in the middle: what had arrived until then counts, as in plain PyTorch, in some layers."""
    handle = run.model.model.layers[0].register_full_backward_pre_hook(fails)
    with pytest.raises(ZeroDivisionError):
        micro(run, 5)
    handle.remove()
    optimizer.zero_grad()


def fails(module, gradient):
    raise ZeroDivisionError


@each_precision
@pytest.mark.parametrize(
    "between",
    [one_is_read, one_is_written, one_goes, one_is_replaced, all_go, all_are_clipped, all_are_zeros, stepped,
     stepped_and_read, evaluated, failed],
)  # fmt: skip
def test_what_a_script_does_between_micro_batches(device, precision, between):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        grown(run)
        for step in range(2):
            micro(run, 3 * step)
            between(run, optimizer)
            micro(run, 3 * step + 1)
            between(run, optimizer)
            micro(run, 3 * step + 2, is_last=True)
            run.clip(0.5)
            finished(run, optimizer)

    dtype, autocast = PRECISIONS[precision]
    check(llama(dtype), script, device, autocast=autocast)


def test_memory_that_the_script_holds(device):
    """Nobody is asked when it is looked at: such gradients go to the host each time."""

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        grown(run)
        micro(run, 0)
        held = run.model.model.layers[1].mlp.up_proj.weight.grad.data
        run.see("held", held)
        for number in (1, 2):
            micro(run, number, is_last=number == 2)
            run.model.model.layers[1].mlp.up_proj.weight.grad.sum()  # settles
            run.see("held", held)
        finished(run, optimizer)

    check(llama(), script, device)


@pytest.mark.parametrize("first", [0, 1])
def test_a_tensor_that_is_looked_at_in_a_backward(device, first):
    """By a hook, before this micro-batch is added."""

    def script(run):
        weight, held = run.model.model.layers[1].mlp.up_proj.weight, []
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        grown(run)

        def look(gradient):
            run.see("own", weight.grad)
            for tensor in held:
                run.see("held", tensor)

        weight.register_hook(look)
        for step in range(2):
            for number in range(4):
                micro(run, 4 * step + number, is_last=number == 3)
                if number == first:
                    held.append(weight.grad)
            finished(run, optimizer)
            held.clear()

    check(llama(), script, device)


def test_a_tensor_that_the_script_holds(device):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        grown(run)
        micro(run, 0)
        held = run.model.model.layers[1].mlp.up_proj.weight.grad
        for number in (1, 2):
            micro(run, number, is_last=number == 2)
            run.see("held", held)
        finished(run, optimizer)
        run.see("held", held)

    check(llama(), script, device)


def halve(parameter):
    parameter.grad.mul_(0.5)


def test_hooks_of_the_script(device):
    def script(run):
        weight = run.model.model.layers[1].mlp.up_proj.weight
        weight.register_post_accumulate_grad_hook(halve)
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        grown(run)
        for step in range(2):
            for number in range(3):
                micro(run, 3 * step + number, is_last=number == 2)
            finished(run, optimizer)

    check(llama(), script, device)


@pytest.mark.parametrize("dropped", [(1,), (2,), (1, 2), (0, 1), (1, 3)])
def test_hooks_that_drop_all_gradients_of_a_layer(device, dropped):
    def script(run):
        now = []
        for parameter in run.model.model.layers[1].parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p: setattr(p, "grad", None) if now[-1] in dropped else None
            )
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        grown(run)
        free = slots(run)
        for step in range(2):
            for number in range(4):
                now.append(number)
                micro(run, 4 * step + number, is_last=number == 3)
            finished(run, optimizer)
            run.see("free", slots(run) == free)

    check(llama(), script, device)


def slots(run):
    """How many gradient slots are free."""
    return sum(map(len, run.engine.window._gradient_slots.values())) if run.is_managed else 0


@each_policy
@pytest.mark.parametrize("is_last", [True, False])
def test_a_backward_that_does_not_reach_the_parameters(device, policy, is_last):
    """Nothing is updated from what waits."""

    def make():
        model = llama()()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers" in name)
        return model

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        grown(run)
        for step in range(2):
            micro(run, 3 * step)
            ids = batch(9, device=run.device)
            embedded = run.model.get_input_embeddings()(ids).detach().requires_grad_()
            run.is_last = is_last
            loss = language_loss(run.forward(inputs_embeds=embedded), ids)
            run.see("gradient", torch.autograd.grad(loss, embedded)[0])
            micro(run, 3 * step + 1)
            micro(run, 3 * step + 2, is_last=True)
            finished(run, optimizer)

    check(make, script, device, policy=policy)


def test_a_layer_that_a_later_micro_batch_does_not_use(device):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        grown(run)
        layers = run.model.model.layers
        forward = layers[1].forward
        for number in range(3):
            if number == 1:
                layers[1].forward = lambda hidden_states, *args, **kwargs: hidden_states
            micro(run, number, is_last=number == 2)
            layers[1].forward = forward
            evaluated(run, optimizer)
        finished(run, optimizer)

    check(llama(), script, device)


def test_gradients_go_with_the_engine(device):
    """What waits on the device is the parameter's when the engine has left."""

    def script(run):
        run.optimizer(torch.optim.AdamW, **ADAMW)
        grown(run)
        micro(run, 0)
        if run.is_managed:
            run.engine.detach()
        for name, parameter in run.model.named_parameters():
            run.see(name, parameter.grad)

    check(llama(), script, device)


def test_slots_are_as_many_as_layers_can_use(device):
    def script(run):
        window, units = run.engine.window, run.engine.sliding
        before, size = window.device_bytes, window.gradient_slot_bytes(units[0])
        window.grow_gradients(units, 1)
        assert window.device_bytes == before + size
        window.grow_gradients(units, 99)
        assert window.device_bytes == before + LAYERS * size
        micro(run, 0)
        assert window.device_bytes == before + LAYERS * size

    run_managed(llama(), script, device)


def test_a_content_comes_once():
    buffer, calls = GradientBuffer(None), []
    buffer.defer(Waiting(None, lambda: calls.append(1)))
    assert buffer.take_back() is not None
    assert buffer.take_back() is buffer.filled is None
    buffer.defer(Waiting(None, lambda: calls.append(2)))
    assert buffer.filled is buffer.filled is None
    assert calls == [2]
