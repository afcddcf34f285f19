"""How often and in which order scripts call forward and backward."""

import pytest
import torch

from slideformer_backend.api import attach
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.errors import UnsupportedError
from tests.budgets import tight
from tests.parity.harness import POLICIES, check
from tests.parity.models import batch, language_loss, llama, stack

ADAMW = {"lr": 1e-2, "fused": True}


def loss_on(run, number, **options):
    ids = batch(number, device=run.device)
    return language_loss(run.forward(ids, **options), ids)


def trained(body, *, count=3, gradients=True):
    """A script whose step ``n`` calls ``body(run, n)`` for its backward passes."""

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        for number in range(count):
            run.model.train()
            body(run, number)
            if gradients:
                run.see_gradients()
            optimizer.step()
            optimizer.zero_grad()
            run.see_weights()

    return script


def two_forwards_one_backward(run, number):
    run.backward(loss_on(run, number) + 0.5 * loss_on(run, number + 50))


def two_forwards_two_backwards(run, number):
    first, second = loss_on(run, number), loss_on(run, number + 50)
    run.backward(second, is_last=False)
    run.backward(first)


def two_forwards_two_backwards_in_order(run, number):
    first, second = loss_on(run, number), loss_on(run, number + 50)
    run.backward(first, is_last=False)
    run.backward(second)


def retained_graph(run, number):
    loss = loss_on(run, number)
    run.backward(loss, is_last=False, retain_graph=True)
    run.backward(loss * 0.5)


def retained_and_never_used_again(run, number):
    run.backward(loss_on(run, number), retain_graph=True)


def two_losses_of_one_forward(run, number):
    ids = batch(number, device=run.device)
    logits = run.forward(ids)
    logits = logits if isinstance(logits, torch.Tensor) else logits.logits
    run.backward(language_loss(logits, ids), is_last=False, retain_graph=True)
    run.backward(logits.float().logsumexp(-1).square().mean() * 1e-3)


def discarded_forward_before(run, number):
    loss_on(run, number + 90)
    run.backward(loss_on(run, number))


def discarded_forward_after(run, number):
    run.backward(loss_on(run, number))
    loss_on(run, number + 90)


def kept_discarded_loss(run, number):
    run.kept = [*getattr(run, "kept", []), loss_on(run, number + 90)]
    run.backward(loss_on(run, number))


def no_grad_forward_before(run, number):
    with torch.no_grad():
        run.see("no_grad", loss_on(run, number + 90))
    run.backward(loss_on(run, number))


def no_grad_forward_between(run, number):
    loss = loss_on(run, number)
    with torch.no_grad():
        run.see("no_grad", loss_on(run, number + 90))
    run.backward(loss)
    with torch.no_grad():
        run.see("after backward", loss_on(run, number + 91))


def evaluation_between(run, number):
    run.backward(loss_on(run, number))
    run.model.eval()
    with torch.no_grad():
        run.see("evaluation", loss_on(run, number + 90))
    run.model.train()


def inference_mode_between(run, number):
    with torch.inference_mode():
        run.see("inference", loss_on(run, number + 90))
    run.backward(loss_on(run, number))
    with torch.inference_mode():
        run.see("inference", loss_on(run, number + 91))


def inference_mode_between_forward_and_backward(run, number):
    loss = loss_on(run, number)
    with torch.inference_mode():
        run.see("inference", loss_on(run, number + 91))
    run.backward(loss)


def autograd_grad_of_logits(run, number):
    """Gradients by ``torch.autograd.grad`` with respect to activations leave parameters alone."""
    ids = batch(number, device=run.device)
    logits = run.forward(ids)
    logits = logits if isinstance(logits, torch.Tensor) else logits.logits
    loss = language_loss(logits, ids)
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    run.see("gradient of logits", gradient)
    run.backward(loss + 0.0 * gradient.square().sum())


def backward_inside_a_function(run, number):
    torch.autograd.backward([loss_on(run, number), loss_on(run, number + 50)])


BODIES = [
    value
    for value in list(globals().values())
    if callable(value)
    and getattr(value, "__code__", None)
    and value.__code__.co_varnames[:2] == ("run", "number")
    and value is not loss_on
]
# Under immediate, weights change during backward: a look at them before step() differs.
BEFORE_STEP = {discarded_forward_after, no_grad_forward_between, evaluation_between, inference_mode_between}


@pytest.mark.parametrize(
    ("body", "policy"),
    [
        pytest.param(body, policy, id=f"{body.__name__}-{policy}")
        for body in BODIES
        for policy in POLICIES
        if policy == "exact" or body not in BEFORE_STEP
    ],
)
@pytest.mark.parametrize("make", [stack(dropout=0.2), llama(attention_dropout=0.2)], ids=["stack", "llama"])
def test_backward_patterns(device, policy, body, make):
    for look in (True, False):
        check(make, trained(body, gradients=look), device, policy=policy)


@pytest.mark.parametrize("make", [stack(), llama()], ids=["stack", "llama"])
def test_a_second_backward_under_immediate_is_refused_before_torch_complains(device, make):
    model = make().train()
    engine = attach(model, SlideFormerConfig(update="immediate", gpu_memory=tight(model)), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine.bind(optimizer)
    ids = batch(0, device=device)
    output = model(ids)
    loss = language_loss(output if isinstance(output, torch.Tensor) else output.logits, ids)
    loss.backward(retain_graph=True)
    with pytest.raises(UnsupportedError, match="set update: exact"):
        loss.backward()
    optimizer.step()
    model(ids)
    engine.detach()
