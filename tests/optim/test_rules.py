"""Which optimizers get a fused rule, and which have to run as themselves."""

from __future__ import annotations

import functools
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

from slideformer_backend.optim.lion import Lion
from slideformer_backend.optim.rules import RULES, rule_for

AdamW, Adam, SGD = torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD


def parameters():
    return [nn.Parameter(torch.ones(4))]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (AdamW, "adamw"),
        (functools.partial(AdamW, fused=True, maximize=True), "adamw"),
        (functools.partial(AdamW, foreach=False, lr=torch.tensor(1e-3)), "adamw"),
        (Adam, "adam"),
        (functools.partial(Adam, decoupled_weight_decay=True), "adamw"),
        (SGD, "sgd"),
        (functools.partial(SGD, momentum=0.9, nesterov=True, fused=True), "sgd"),
        (functools.partial(SGD, weight_decay=torch.tensor(0.1)), "sgd"),
        (Lion, "lion"),
    ],
)
def test_recognised(make, name):
    assert rule_for(make(parameters())) is RULES[name]


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(AdamW, amsgrad=True),
        functools.partial(Adam, capturable=True),
        functools.partial(AdamW, differentiable=True),
        functools.partial(SGD, differentiable=True),
        functools.partial(AdamW, betas=(torch.tensor(0.9), torch.tensor(0.999)), foreach=False),
        functools.partial(SGD, lr=torch.tensor(0.1, requires_grad=True)),
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.SparseAdam,
        torch.optim.LBFGS,
    ],
)
def test_other_classes_and_options_run_as_themselves(make):
    if getattr(make, "keywords", {}).get("capturable"):
        optimizer = Adam(parameters())  # its constructor wants a GPU
        optimizer.param_groups[0]["capturable"] = True
    else:
        optimizer = make(parameters())
    assert rule_for(optimizer) is None


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_other_dtypes_run_as_themselves(dtype):
    assert rule_for(AdamW([nn.Parameter(torch.ones(4, dtype=dtype))])) is None


def test_sparse_parameters_run_as_themselves():
    sparse = nn.Parameter(torch.ones(4).to_sparse())
    assert rule_for(SGD([sparse], lr=0.1)) is None


def test_groups_must_agree():
    groups = [{"params": parameters()}, {"params": parameters(), "decoupled_weight_decay": True}]
    assert rule_for(Adam(groups)) is None
    groups = [{"params": parameters()}, {"params": parameters(), "amsgrad": True}]
    assert rule_for(AdamW(groups)) is None
    groups = [{"params": parameters(), "weight_decay": 0.0}, {"params": parameters(), "lr": 1.0}]
    assert rule_for(AdamW(groups)) is RULES["adamw"]


def test_subclasses():
    class Same(AdamW):
        def __init__(self, params):
            super().__init__(params, lr=3e-4)

    class OwnStep(AdamW):
        def step(self, closure=None):
            return super().step(closure)

    class Decorated(Adam):
        @torch.no_grad()
        def step(self, closure=None):
            return super().step(closure)

    def twice(step):
        @functools.wraps(step)
        def wrapper(*args, **kwargs):
            step(*args, **kwargs)
            return step(*args, **kwargs)

        return wrapper

    class Wrapped(SGD):
        step = twice(SGD.step)

    class OwnStates(AdamW):
        def _init_group(self, *args):
            return super()._init_group(*args)

    assert rule_for(Same(parameters())) is RULES["adamw"]
    for cls in (OwnStep, Decorated, Wrapped, OwnStates):
        assert rule_for(cls(parameters())) is None, cls


def test_subclass_instantiated_before_its_base():
    """torch wraps ``step`` of whichever class comes first, so that a plain subclass may own a wrapper."""
    program = (
        "import torch\n"
        "from slideformer_backend.optim.rules import rule_for\n"
        "class Mine(torch.optim.AdamW): pass\n"
        "mine = Mine([torch.nn.Parameter(torch.ones(2))])\n"
        "assert 'step' in vars(Mine), 'nothing to test here any more'\n"
        "plain = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])\n"
        "adam = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])\n"
        "assert [rule_for(o).name for o in (mine, plain, adam)] == ['adamw', 'adamw', 'adam']\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=60)


def test_after_the_first_use_of_torch_compile():
    """torch.compile wraps ``_init_group`` of every optimizer class of torch, whatever is compiled."""
    program = (
        "import torch\n"
        "from slideformer_backend.optim.rules import rule_for\n"
        "torch.compile(torch.nn.Linear(1, 1), backend='eager')\n"
        "parameters = [torch.nn.Parameter(torch.ones(2))]\n"
        "made = [kind(parameters, lr=0.1) for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)]\n"
        "assert [rule_for(o).name for o in made] == ['adamw', 'adam', 'sgd']\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=60)


def test_a_scheduler_or_an_engine_may_replace_step_on_the_instance():
    optimizer = AdamW(parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert "step" in vars(optimizer)
    assert rule_for(optimizer) is RULES["adamw"]
    optimizer.step = lambda closure=None: None
    assert rule_for(optimizer) is RULES["adamw"]


@pytest.fixture
def foreign_lion():
    """A class that looks like ``lion_pytorch.Lion`` without the package."""
    source = types.ModuleType("lion_pytorch.lion_pytorch")

    class PytorchLion(torch.optim.Optimizer):
        def __init__(self, params, *, decoupled=False, function=None, **options):
            self.decoupled_wd = decoupled
            super().__init__(params, {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, **options})
            self.update_fn = function or types.FunctionType((lambda: None).__code__, {"__name__": source.__name__})

        def step(self, closure=None):
            return None

    PytorchLion.__module__, PytorchLion.__qualname__ = source.__name__, "Lion"
    return PytorchLion


def test_lion_of_others_by_name(foreign_lion):
    assert rule_for(foreign_lion(parameters())) is RULES["lion"]
    assert rule_for(foreign_lion(parameters(), decoupled=True)) is None
    assert rule_for(foreign_lion(parameters(), cautious_factor=0.0)) is None
    assert rule_for(foreign_lion(parameters(), function=lambda: None)) is None
    foreign_lion.__module__ = "somewhere.else"
    assert rule_for(foreign_lion(parameters())) is None


def test_states():
    momentum, plain = SGD(parameters(), momentum=0.9), SGD(parameters())
    rule = rule_for(momentum)
    assert rule.states_used(momentum.param_groups[0]) == rule.state_names == ("momentum_buffer",)
    assert rule.states_used(plain.param_groups[0]) == ()
    for make in (AdamW, Adam, Lion):
        optimizer = make(parameters())
        optimizer.param_groups[0]["params"][0].grad = torch.ones(4)
        optimizer.step()
        state = set(optimizer.state[optimizer.param_groups[0]["params"][0]]) - {"step"}
        assert set(rule_for(optimizer).states_used(optimizer.param_groups[0])) == state


def test_scalars_are_equal_exactly_when_the_update_is():
    optimizer = AdamW(parameters())
    rule, group = rule_for(optimizer), optimizer.param_groups[0]
    first = rule.scalars(group, 3)
    assert first == rule.scalars(dict(group), 3)
    assert hash(first) == hash(rule.scalars(dict(group), 3))
    assert all(type(value) is np.float32 for value in first)
    assert first != rule.scalars(group, 4)
    for key, value in (("lr", 2e-3), ("weight_decay", 0.1), ("maximize", True), ("betas", (0.8, 0.999)), ("eps", 1e-6)):
        assert first != rule.scalars({**group, key: value}, 3), key
    sgd = RULES["sgd"]
    group = SGD(parameters(), momentum=0.9).param_groups[0]
    assert sgd.scalars(group, 1) != sgd.scalars(group, 2) == sgd.scalars(group, 3)
    assert sgd.scalars(group, 2) == sgd.scalars({**group, "lr": torch.tensor(1e-3, dtype=torch.float64)}, 2)
