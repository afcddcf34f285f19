"""Exceptions and non-finite gradients: no damage, and the next step is right."""

import gc
import re
import threading
from functools import partial

import pytest
import torch

from slideformer_backend.api import attach
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.errors import SlideFormerError, UnsupportedError
from tests.budgets import tight
from tests.parity.harness import POLICIES, PRECISIONS, check, run_managed
from tests.parity.models import Stack, batch, language_loss, llama, stack, steps

ADAMW = {"lr": 1e-2, "fused": True}
each_policy = pytest.mark.parametrize("policy", POLICIES)


class Trip(torch.autograd.Function):
    """Identity that raises in forward or backward when armed."""

    armed = None

    @staticmethod
    def forward(ctx, x):
        if Trip.armed == "forward":
            raise MemoryError("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return Trip.tripped(gradient)

    @staticmethod
    def tripped(gradient):
        if Trip.armed == "backward":
            raise MemoryError("backward")
        return gradient


class Fragile(Stack):
    """Block ``number`` has a trip wire inside, or behind it."""

    def __init__(self, number=1, *, is_inside=True):
        super().__init__()
        self.behind = None if is_inside else number
        if is_inside:
            self.blocks[number].up.register_forward_hook(lambda module, args, output: Trip.apply(output))

    def forward(self, ids):
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == self.behind:
                x.register_hook(Trip.tripped)
        return self.head(self.norm(x))


@each_policy
@pytest.mark.parametrize("where", ["forward", "backward", "user", "interrupt"])
@pytest.mark.parametrize("times", [1, 3])
def test_an_exception_and_then_a_good_step(device, policy, where, times):
    """What a script does about an out-of-memory batch: drop it (zero_grad) and go on.

    Under immediate, units behind the wire have been updated when backward raises; only ``forward`` can equal plain.
    """

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        steps(run, optimizer, 2)
        for number in range(times):
            ids = batch(40 + number, device=run.device)
            Trip.armed = where
            try:
                loss = language_loss(run.forward(ids), ids)
                if where == "user":
                    raise MemoryError("after forward")
                if where == "interrupt":
                    raise KeyboardInterrupt
                run.backward(loss)
            except (MemoryError, KeyboardInterrupt) as error:
                run.see("raised", type(error).__name__)
            Trip.armed = None
            loss = None
            optimizer.zero_grad()
        run.see_weights()
        steps(run, optimizer, 2, first=2)

    if policy == "immediate" and where == "backward":
        where = "forward"
    check(lambda: Fragile().train(), script, device, policy=policy)


def first_touch(run, name, weight):
    """What a script may do first after a backward that raised, while nothing else has been touched."""
    with torch.no_grad():
        if name == "dtype":
            run.see(name, (weight.dtype, weight.shape, weight.grad is None))
        elif name == "detach":
            run.see(name, weight.detach())
        elif name == "state_dict":
            for key, value in run.model.state_dict().items():
                run.see(key, value)
        elif name == "add":
            weight.add_(1.0)
        elif name == "data":
            weight.data.add_(1.0)
        elif name == "load":
            run.model.load_state_dict({key: torch.full_like(v, 0.1) for key, v in run.model.state_dict().items()})
        elif name == "pieces":
            torch._foreach_add_([*run.model.blocks.parameters()], 1.0)
        elif name == "gradient":
            weight.grad = torch.ones_like(weight)
        elif name == "earlier gradient":
            weight.grad.mul_(0.5)
            weight.grad.mul_(0.5)


TOUCHES = ["dtype", "detach", "state_dict", "add", "data", "load", "pieces", "gradient", "earlier gradient"]


@each_policy
@pytest.mark.parametrize("precision", ["bf16", "autocast"])
@pytest.mark.parametrize(("number", "is_inside"), [(0, True), (0, False), (1, True)])
def test_whatever_a_script_does_first_after_a_backward_that_raised(device, policy, precision, number, is_inside):
    """The layer that it was in is on the host again before the script sees the exception: what is read is what the last
    step left, and what is written stays. Under immediate the layers behind have been updated: none is looked at."""
    dtype, autocast = PRECISIONS[precision]

    def script(run, name):
        weights = list(run.model.blocks[number].parameters())
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        steps(run, optimizer, 1)
        ids = batch(40, device=run.device)
        if name == "earlier gradient":
            run.backward(language_loss(run.forward(ids), ids), is_last=False)
        loss = language_loss(run.forward(ids), ids)
        Trip.armed = "backward"
        with pytest.raises(MemoryError):
            run.backward(loss)
        Trip.armed = None
        first_touch(run, name, weights[0])
        if "gradient" in name:
            run.see("grad", weights[0].grad)
        optimizer.zero_grad()
        for weight in weights:
            run.see("weight", weight)
        if policy == "exact":
            steps(run, optimizer, 1, first=1)
            run.see_weights()

    def make():
        return Fragile(number, is_inside=is_inside).to(dtype).train()

    for name in TOUCHES:
        if policy == "immediate" and (name == "state_dict" or "gradient" in name):  # behind the wire; spent
            continue
        check(make, partial(script, name=name), device, policy=policy, autocast=autocast)


def test_what_fails_at_the_end_of_a_backward_that_raised_is_raised_by_whatever_follows(device, monkeypatch):
    """Torch calls us there while it lets go of the pass, where nobody would hear an exception."""
    model = Fragile().train()
    engine = attach(model, SlideFormerConfig(gpu_memory=tight(model)), device=device)
    weight = next(model.blocks[1].parameters())
    before = weight.detach().clone()
    ids = batch(0, device=device)
    loss = language_loss(model(ids), ids)

    def fails(*, is_last):
        monkeypatch.undo()
        raise OSError("at the end")

    monkeypatch.setattr(engine.edges, "after_backward", fails)
    monkeypatch.setattr(Trip, "armed", "backward")
    with pytest.raises(MemoryError):
        loss.backward()
    with pytest.raises(OSError, match="at the end"):
        weight.detach()
    assert torch.equal(weight.detach(), before)
    engine.detach()


def poisoned(run, number, value=float("nan")):
    ids = batch(number, device=run.device)
    loss = language_loss(run.forward(ids), ids)
    return loss * value if number in (1, 3) else loss


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_non_finite_steps_are_skipped(device, value, dtype, clip):
    """``nonfinite: skip`` equals a script that leaves out such steps."""

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        for number in range(6):
            run.backward(poisoned(run, number, value))
            if clip is not None:
                run.clip(clip)
            is_good = number not in (1, 3)
            if run.is_managed or is_good:
                optimizer.step()
            if run.is_managed:
                assert run.engine.step_was_skipped(optimizer) is not is_good
            optimizer.zero_grad()
            run.see_weights()

    check(llama(dtype), script, device)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_non_finite_as_plain(device, clip):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        for number in range(3):
            run.backward(poisoned(run, number))
            if clip is not None:
                run.clip(clip)
            run.see_gradients()
            optimizer.step()
            optimizer.zero_grad()
            run.see_weights()

    check(llama(), script, device, nonfinite="as_plain")


@each_policy
def test_non_finite_raises(device, policy):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        run.backward(poisoned(run, 1))
        with pytest.raises(SlideFormerError, match="Non-finite"):
            optimizer.step()
        if policy == "exact":
            for name, parameter in run.model.named_parameters():
                assert torch.equal(parameter, before[name])

    run_managed(stack(), script, device, policy=policy, nonfinite="raise")


def test_twenty_skips_in_a_row_are_an_error(device):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        for _ in range(19):
            run.backward(poisoned(run, 1))
            optimizer.step()
            optimizer.zero_grad()
        run.backward(poisoned(run, 1))
        with pytest.raises(SlideFormerError, match="in a row"):
            optimizer.step()

    run_managed(stack(), script, device)


@pytest.mark.parametrize("end", ["detach", "free", "forward"])
@each_policy
def test_an_exception_inside_backward_says_what_was_updated(device, policy, end, caplog):
    """Under immediate the layers behind the wire have taken a step; those before it, and the torn one, have not."""
    model = Fragile().train()
    engine = attach(model, SlideFormerConfig(update=policy, gpu_memory=tight(model)), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine.bind(optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = batch(0, device=device)
    Trip.armed = "backward"
    loss = language_loss(model(ids), ids)
    with pytest.raises(MemoryError):
        loss.backward()
    Trip.armed = None
    del loss
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    if end == "free":
        del model, optimizer, engine
        gc.collect()
    elif end == "forward":
        model(ids)
    if end != "free":
        engine.detach()
        torn = [name for name, p in model.named_parameters() if name.startswith(("blocks.0.", "blocks.1."))]
        assert torn
        assert all(torch.equal(model.get_parameter(name), before[name]) for name in torn)
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    if policy == "exact":
        assert errors == []
        return
    (message,) = errors
    assert said == errors or device.type == "cuda"  # at once, unless torch's own thread lets go last
    assert re.search(r"updated [1-9]\d* layers.*load the last checkpoint, or set update: exact", message)


def test_another_thread_during_backward_is_refused_and_training_goes_on(device):
    """It read a parameter, which ended the backward of the thread that trains."""
    reached, seen = threading.Event(), []

    def read(weight):
        reached.wait(60)
        try:
            weight.detach().float().sum().item()
        except Exception as error:
            seen.append(error)

    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value, thread):
            ctx.thread = thread
            return value.view_as(value)

        @staticmethod
        def backward(ctx, gradient):
            if ctx.thread is not None:
                reached.set()
                ctx.thread.join(60)
            return gradient, None

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, run.model.parameters(), **ADAMW)
        for number in range(3):
            thread = None
            if number == 1 and run.engine is not None:
                thread = threading.Thread(target=read, args=(next(run.model.model.layers[0].parameters()),))
                thread.start()
            hook = run.model.model.layers[0].register_forward_hook(lambda m, a, out, t=thread: Gate.apply(out, t))
            steps(run, optimizer, 1, number)
            hook.remove()

    check(llama(torch.bfloat16), script, device, policy="exact")
    assert len(seen) == 1
    assert isinstance(seen[0], UnsupportedError)
    assert "thread Thread-" in str(seen[0])


def test_a_backward_that_failed_on_a_thread_that_is_gone_hinders_nobody(device):
    """The thread that trained is over; another one reads, steps on, and takes the model back."""
    model = Fragile()
    engine = attach(model, SlideFormerConfig(), device=device)
    ids, errors = batch(0, device=device), []

    def train():
        try:
            language_loss(model(ids), ids).backward()
        except MemoryError as error:
            errors.append(str(error))

    Trip.armed = "backward"
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    Trip.armed = None
    assert errors == ["backward"]
    for parameter in model.parameters():
        if parameter.grad is not None:  # of what came before the wire
            parameter.grad = None
    language_loss(model(ids), ids).backward()
    engine.detach()
    assert all(parameter.grad is not None for parameter in model.parameters())
