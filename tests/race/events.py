"""Events of a training script. Each acts on one side and returns what a script could see; both sides must agree.

An event is a name and a seed. The seed fixes its choices, so that a sequence can be replayed on both sides, and
shortened.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from random import Random

import torch
from torch import nn

from .sides import EngineSide, PlainSide, Side
from .toy import AUTOCAST, BLOCKS, WIDTH, Boom, autocast

Seen = list[torch.Tensor | None]
Event = Callable[[Side, Random], Seen]
EVENTS: dict[str, Event] = {}


def event(function: Event) -> Event:
    """Register an event under its function's name."""
    EVENTS[function.__name__] = function
    return function


def _input(side: Side, random: Random) -> torch.Tensor:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    x = torch.randn(2, WIDTH, generator=generator)
    return x.to(torch.bfloat16) if side.kind == "bfloat16" else x


def _forward(side: Side, random: Random, **options) -> torch.Tensor:
    x = _input(side, random)
    unscaled = {number for number in range(BLOCKS) if random.random() < 0.15}
    with autocast(side.kind):
        return side.model(x, unscaled=unscaled, **options).float().square().sum()


def _some(side: Side, random: Random, *, with_gradient: bool = False) -> list[nn.Parameter]:
    return [p for p in side.trainable if random.random() < 0.3 and not (with_gradient and p.grad is None)]


@event
def backward(side: Side, random: Random) -> Seen:
    side.hint(random.random() < 0.7)
    loss = _forward(side, random)
    loss.backward()
    return [loss]


@event
def backward_last(side: Side, random: Random) -> Seen:
    side.hint(True)
    loss = _forward(side, random)
    loss.backward()
    return [loss]


@event
def backward_inputs(side: Side, random: Random) -> Seen:
    """Gradients of an edge parameter only: units open, and none of their gradients arrives."""
    side.hint(False)
    loss = _forward(side, random)
    loss.backward(inputs=[side.model.inp.weight])
    return [loss]


@event
def train(side: Side, random: Random) -> Seen:
    seen = backward(side, random)
    for number in range(len(side.optimizers)):
        side.step(number)
    _zero(side, True)
    return seen


@event
def clipped(side: Side, random: Random) -> Seen:
    seen = backward(side, random)
    seen.append(side.clip(list(side.model.parameters()), random.choice([0.5, 1.0, 5.0, 50.0])))
    for number in range(len(side.optimizers)):
        side.step(number)
    _zero(side, random.random() < 0.7)
    return seen


@event
def double_forward(side: Side, random: Random) -> Seen:
    side.hint(True)
    if side.kind == AUTOCAST:
        # the window's dtype is not the parameter's, so each visit accumulates by itself: with a pending gradient the
        # order of the fp32 sum differs from torch's in the last bit
        _zero(side, True)
    first, second = _forward(side, random), _forward(side, random)
    (first + second).backward()
    return [first, second]


@event
def retain(side: Side, random: Random) -> Seen:
    side.hint(random.random() < 0.5)
    loss = _forward(side, random)
    loss.backward(retain_graph=True)
    if random.random() < 0.3:
        side.clip(list(side.model.parameters()), 0.5)
    loss.backward()
    return [loss]


@event
def late_backward(side: Side, random: Random) -> Seen:
    side.hint(random.random() < 0.7)
    first = _forward(side, random)
    second = _forward(side, random)
    second.backward()
    first.backward()
    return [first, second]


@event
def discard(side: Side, random: Random) -> Seen:
    return [_forward(side, random).detach()]


@event
def evaluate(side: Side, random: Random) -> Seen:
    with torch.no_grad():
        return [_forward(side, random)]


@event
def explode_forward(side: Side, random: Random) -> Seen:
    with contextlib.suppress(Boom):
        _forward(side, random, explodes_at=random.randrange(BLOCKS))
        raise AssertionError("no exception")
    return []


@event
def explode_backward(side: Side, random: Random) -> Seen:
    loss = _forward(side, random, explodes_behind=random.randrange(BLOCKS))
    with contextlib.suppress(Boom):
        loss.backward()
        raise AssertionError("no exception")
    return [loss]


@event
def step(side: Side, random: Random) -> Seen:
    side.step(random.randrange(len(side.optimizers)))
    return []


@event
def step_all(side: Side, random: Random) -> Seen:
    for number in range(len(side.optimizers)):
        side.step(number)
    return []


def _zero(side: Side, to_none: bool) -> None:
    for optimizer in side.optimizers:
        optimizer.zero_grad(set_to_none=to_none)


@event
def zero_none(side: Side, random: Random) -> Seen:
    random.choice([side.model, *side.optimizers]).zero_grad()
    return []


@event
def zero_false(side: Side, random: Random) -> Seen:
    random.choice(side.optimizers).zero_grad(set_to_none=False)
    return []


@event
def forget(side: Side, random: Random) -> Seen:
    for parameter in _some(side, random):
        parameter.grad = None
    return []


@event
def clip(side: Side, random: Random) -> Seen:
    seen: Seen = []
    for _ in range(random.choice([1, 1, 2])):
        is_global = random.random() < 0.6
        parameters = list(side.model.parameters()) if is_global else _some(side, random)
        seen.append(side.clip(parameters, random.choice([0.3, 1.0, 5.0, 50.0, float("inf")])))
    return seen


@event
def clip_all(side: Side, random: Random) -> Seen:
    module = random.choice([side.model, side.model.blocks])
    return [side.clip(list(module.parameters()), random.choice([0.1, 0.5]))]


@event
def clip_torch(side: Side, random: Random) -> Seen:
    kind = random.choice([1.0, 2.0, float("inf")])
    return [torch.nn.utils.clip_grad_norm_(side.model.parameters(), random.choice([0.5, 5.0]), kind)]


@event
def clip_value(side: Side, random: Random) -> Seen:
    if any(parameter.grad is not None for parameter in side.trainable):
        torch.nn.utils.clip_grad_value_(side.model.parameters(), random.choice([0.05, 1.0]))
    return []


@event
def scale_gradient(side: Side, random: Random) -> Seen:
    for parameter in _some(side, random, with_gradient=True):
        parameter.grad.mul_(0.5)
    return []


@event
def scale_gradient_data(side: Side, random: Random) -> Seen:
    for parameter in _some(side, random, with_gradient=True):
        parameter.grad.data.clamp_(-0.1, 0.1)
    return []


@event
def assign_gradient(side: Side, random: Random) -> Seen:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    for parameter in _some(side, random):
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return []


@event
def hold_gradient(side: Side, random: Random) -> Seen:
    held = side.memory.setdefault("gradients", [])
    held.extend(p.grad for p in _some(side, random, with_gradient=True))
    del held[:-6]
    return []


@event
def read_held(side: Side, random: Random) -> Seen:
    return [gradient.clone() for gradient in side.memory.get("gradients", [])]


@event
def write_held(side: Side, random: Random) -> Seen:
    for gradient in side.memory.get("gradients", []):
        if random.random() < 0.5:
            gradient.mul_(0.25)
    return []


@event
def not_finite(side: Side, random: Random) -> Seen:
    for parameter in _some(side, random, with_gradient=True)[:2]:
        parameter.grad.view(-1)[0] = random.choice([float("inf"), float("nan")])
    return []


@event
def write_weights(side: Side, random: Random) -> Seen:
    parameters = _some(side, random)
    side.memory["has_written"], how = True, random.randrange(6)
    with torch.no_grad():
        for parameter in parameters:
            if how == 0:
                parameter.data.mul_(0.5)
            elif how == 1:
                parameter.copy_(parameter.detach().clone() * 0.75)
            elif how == 2:
                parameter.add_(0.125)
            elif how == 3:
                parameter.data = parameter.data.clone().neg_()
            elif how == 4:
                parameter.data.add_(parameter * 0.25)  # looked at between the alias and the write
            else:
                aside = parameter.data
                parameter.data = aside * 0.5
                parameter.data = aside - 0.25 * parameter  # and the alias is as it was
            side.wrote([parameter])
    return []


@event
def write_edges(side: Side, random: Random) -> Seen:
    parameter, side.memory["has_written"] = side.model.inp.weight, True
    with torch.no_grad():
        if random.random() < 0.5:
            parameter.data.mul_(0.5)
        else:
            parameter.mul_(0.75)
    side.wrote([parameter])
    return []


@event
def move(side: Side, random: Random) -> Seen:
    side.move(random.randrange(BLOCKS))
    return []


@event
def hyperparameters(side: Side, random: Random) -> Seen:
    group = random.choice(random.choice(side.optimizers).param_groups)
    which = random.randrange(3)
    if which == 0:
        group["lr"] *= random.choice([0.5, 1.5])
    elif which == 1:
        group["weight_decay"] = random.choice([0.0, 0.2])
    elif "betas" in group:
        group["betas"] = random.choice([(0.9, 0.99), (0.8, 0.999)])
    else:
        group["momentum"] = random.choice([0.5, 0.9])
    return []


@event
def read(side: Side, random: Random) -> Seen:
    seen: Seen = []
    for parameter in _some(side, random):
        how = random.randrange(3)
        seen.append((parameter.norm, parameter.data.clone, parameter.detach().clone)[how]())
    return [tensor.detach() for tensor in seen]


@event
def read_gradients(side: Side, random: Random) -> Seen:
    gradients = [parameter.grad for parameter in _some(side, random)]
    return [None if gradient is None else gradient.clone() for gradient in gradients]


@event
def save(side: Side, random: Random) -> Seen:
    side.memory["has_written"] = False
    side.memory["model"] = {name: value.clone() for name, value in side.model.state_dict().items()}
    return list(side.memory["model"].values())


@event
def load(side: Side, random: Random) -> Seen:
    # an edge weight written and put back before the engine looks keeps its master: only the last value counts
    edges = () if side.memory.get("has_written") else ("inp.", "out.")
    saved = {n: v for n, v in side.memory.get("model", {}).items() if n.startswith(("blocks.", *edges))}
    side.model.load_state_dict(saved, strict=False)
    side.wrote([p for n, p in side.model.named_parameters() if n in saved])
    return []


@event
def save_optimizers(side: Side, random: Random) -> Seen:
    if isinstance(side, PlainSide):
        side.memory["states"] = side.states()
    else:
        side.memory["optimizers"] = [copy.deepcopy(optimizer.state_dict()) for optimizer in side.optimizers]
    side.memory["groups"] = [_hyperparameters(optimizer) for optimizer in side.optimizers]
    return []


@event
def load_optimizers(side: Side, random: Random) -> Seen:
    if "groups" not in side.memory:
        return []
    if isinstance(side, EngineSide):
        for optimizer, saved in zip(side.optimizers, side.memory["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    elif isinstance(side, PlainSide):
        side.load(side.memory["states"])
        for optimizer, groups in zip(side.optimizers, side.memory["groups"], strict=True):
            for group, kept in zip(optimizer.param_groups, groups, strict=True):
                group.update(copy.deepcopy(kept))
    return []


def _hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict]:
    return [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]


def everything(side: Side) -> Seen:
    """All weights, gradients and states."""
    return [*weights_and_gradients(side), *_state_values(side)]


def weights_and_gradients(side: Side) -> Seen:
    """All weights and gradients."""
    weights = [parameter.detach().clone() for parameter in side.model.parameters()]
    gradients = [None if p.grad is None else p.grad.clone() for p in side.model.parameters()]
    return [*weights, *gradients]


def _state_values(side: Side) -> Sequence[torch.Tensor | None]:
    seen: Seen = []
    for states in side.states():
        for number in sorted(states):
            for name in ("master", "exp_avg", "exp_avg_sq", "step", "momentum_buffer"):
                value = states[number].get(name)
                seen.append(value.clone() if isinstance(value, torch.Tensor) else None)
    return seen
