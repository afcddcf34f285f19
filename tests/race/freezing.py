"""Events that freeze and unfreeze parameters, beside those of ``events``."""

from __future__ import annotations

from random import Random

import torch
from torch import nn

from .events import Seen, _forward, event
from .sides import Side


def _turn(side: Side, random: Random, *, trains: bool, share: float) -> None:
    """Freeze or unfreeze whole modules and single parameters; an optimizer that lacks one gets it."""
    modules = [*side.model.blocks, side.model.inp, side.model.out]
    chosen = {p for module in modules if random.random() < share for p in module.parameters()}
    chosen |= {p for p in side.model.parameters() if random.random() < share / 2}
    chosen.discard(side.model.inp.weight)  # something must train
    turned = [p for p in side.model.parameters() if p in chosen and p.requires_grad != trains]
    for parameter in turned:
        parameter.requires_grad_(trains)
    held = {p for optimizer in side.optimizers for group in optimizer.param_groups for p in group["params"]}
    missing = [parameter for parameter in turned if trains and parameter not in held]
    if missing:
        random.choice(side.optimizers).add_param_group({"params": missing})
        side.memory.pop("groups", None)  # saved states are those of another optimizer


@event
def unfreeze(side: Side, random: Random) -> Seen:
    _turn(side, random, trains=True, share=0.5)
    return []


@event
def unfreeze_all(side: Side, random: Random) -> Seen:
    _turn(side, random, trains=True, share=1.0)
    return []


@event
def freeze(side: Side, random: Random) -> Seen:
    _turn(side, random, trains=False, share=0.3)
    return []


@event
def turn_inside(side: Side, random: Random) -> Seen:
    """Between forward and backward: the graph is that of the parameters that trained then."""
    side.hint(random.random() < 0.5)
    loss = _forward(side, random)
    _turn(side, random, trains=random.random() < 0.6, share=0.4)
    loss.backward()
    return [loss]


@event
def gradient_of_frozen(side: Side, random: Random) -> Seen:
    """A frozen parameter may have a gradient, and is stepped then."""
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    parameters: list[nn.Parameter] = [p for p in side.model.parameters() if not p.requires_grad]
    for parameter in parameters[: random.randrange(3)]:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return []
