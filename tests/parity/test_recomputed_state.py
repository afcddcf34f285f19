"""A layer whose forward depends on something besides its input: its recompute sees that as it was."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import copy
import functools
import gc
import random
import weakref
from dataclasses import dataclass
from types import MethodType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from slideformer_backend.api import attach
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.engine.reach import Viewer
from slideformer_backend.errors import UnsupportedError

WIDTH = 16
GLOBAL_GENERATOR = torch.Generator()
GLOBAL_LIST: list = []
VARIABLE = contextvars.ContextVar("scale", default=1.0)


class Block(nn.Module):
    class_list: list = []  # noqa: RUF012

    def __init__(self, kind: str, number: int) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.kind = kind
        self.state = self.first_state(kind, number)
        self.act, self.mode, self.config = torch.tanh, "sine", SimpleNamespace(scale=1.0)

    @staticmethod
    def first_state(kind, number):
        made = {
            "list": list, "nested": lambda: {"a": [1.0]}, "list of tensors": lambda: [torch.zeros(WIDTH)],
            "dict": lambda: {"mean": 1.0}, "deque": lambda: collections.deque([1.0], maxlen=2), "set": lambda: {1},
            "counter": lambda: collections.defaultdict(int), "namespace": lambda: SimpleNamespace(scale=1.0),
            "array": lambda: np.ones(1), "numpy generator": lambda: np.random.default_rng(number),
            "numpy state": lambda: np.random.RandomState(number), "python generator": lambda: random.Random(number),
            "generators": lambda: [torch.Generator().manual_seed(number)],
        }  # fmt: skip
        return made[kind]() if kind in made else None

    def scale(self, hidden):
        kind, state, mean = self.kind, self.state, hidden.detach().abs().mean()
        if kind == "list":
            self.state = [*state, mean][-2:]
            return 1 + sum(state)
        if kind == "nested":
            state["a"][0] += float(mean)
            return state["a"][0]
        if kind == "list of tensors":
            state[0].add_(mean)
            return 1 + state[0].clone()
        if kind == "dict":
            state["mean"] = 0.9 * state["mean"] + float(mean)
            state.setdefault("seen", 0.5)
            return state["mean"]
        if kind == "deque":
            state.append(float(mean))
            return sum(state)
        if kind == "set":
            state.add(len(state) + 1)
            return len(state)
        if kind == "counter":
            state[kind] += 1
            return state[kind]
        if kind == "namespace":
            state.scale += float(mean)
            return state.scale
        if kind == "array":
            state += float(mean)
            return float(state[0])
        if kind in ("numpy generator", "python generator"):
            return state.random() + 0.5
        if kind == "numpy state":
            return state.rand() + 0.5
        if kind == "generators":
            return torch.rand(WIDTH, generator=state[0])
        if kind == "global generator":
            return torch.rand(WIDTH, generator=GLOBAL_GENERATOR)
        if kind == "global list":
            GLOBAL_LIST.append(hidden.square().mean())
        if kind == "class list":
            self.class_list.append(hidden.square().mean())
        return 1.0

    def forward(self, x):
        hidden = self.act(self.inner(x))
        if self.mode == "sine":
            hidden = hidden.sin()
        return x + self.outer(hidden * self.scale(hidden) * self.config.scale * VARIABLE.get())


class Net(nn.Module):
    def __init__(self, kind: str = "", block=Block) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block(kind, number) for number in range(4))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def inputs():
    return torch.randn(3, 8, WIDTH, generator=torch.Generator().manual_seed(2))


@contextlib.contextmanager
def managed(model):
    engine = attach(model, SlideFormerConfig(), device=torch.device("cpu"))
    try:
        yield engine
    finally:
        engine.detach()


def train(model, *, is_managed):
    """Losses, gradients of three steps, and what the states are afterwards."""
    GLOBAL_GENERATOR.manual_seed(5)
    seen = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with managed(model) if is_managed else contextlib.nullcontext() as engine:
        if engine is not None:
            engine.bind(optimizer)
        for x in inputs():
            loss = model(x).square().mean() + sum(GLOBAL_LIST) + sum(Block.class_list)
            GLOBAL_LIST.clear()
            Block.class_list.clear()
            loss.backward()
            seen += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        assert not GLOBAL_LIST
        assert not Block.class_list
    return seen, [repr(vars(block.state) if block.kind == "namespace" else block.state) for block in model.blocks]


KINDS = (
    "list", "nested", "list of tensors", "dict", "deque", "set", "counter", "namespace", "array", "numpy generator",
    "numpy state", "python generator", "generators", "global generator", "global list", "class list",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_a_forward_changes(kind):
    torch.manual_seed(0)
    start = Net(kind)
    expected, states = train(copy.deepcopy(start), is_managed=False)
    found, managed_states = train(copy.deepcopy(start), is_managed=True)
    if "generator" not in kind and "numpy" not in kind:
        assert managed_states == states
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def hooked(model, register, hook):
    handles = [getattr(block.inner, register)(hook, **({"with_kwargs": True})) for block in model.blocks]
    return lambda: [handle.remove() for handle in handles]


def patched(model, to):
    for block in model.blocks:
        block.inner.forward = MethodType(to, block.inner)
    return lambda: [vars(block.inner).pop("forward") for block in model.blocks]


def assigned(model, **names):
    was = [{name: getattr(block, name) for name in names} for block in model.blocks]
    for block in model.blocks:
        for name, value in names.items():
            setattr(block, name, value)
    return lambda: [setattr(b, name, one[name]) for b, one in zip(model.blocks, was, strict=True) for name in names]


def configured(model):
    for block in model.blocks:
        block.config.scale = 0.7
    return lambda: [setattr(block.config, "scale", 1.0) for block in model.blocks]


def varied(model):
    token = VARIABLE.set(0.4)
    return lambda: VARIABLE.reset(token)


def swapped(model):
    torch.manual_seed(7)
    return assigned(model, outer=nn.Sequential(nn.Tanh(), *(block.outer for block in model.blocks[:1])))


DURING_FORWARD = {
    "string": lambda model: assigned(model, mode="none"),
    "function": lambda model: assigned(model, act=torch.sigmoid),
    "object": configured,
    "context variable": varied,
    "hook": lambda model: hooked(model, "register_forward_hook", lambda m, a, k, out: out * 2 + 1),
    "pre-hook": lambda model: hooked(model, "register_forward_pre_hook", lambda m, a, k: ((a[0] * 2,), k)),
    "patched forward": lambda model: patched(model, lambda self, x: nn.functional.linear(x, self.weight) * 2),
    "module": lambda model: assigned(model, inner=nn.Identity()),
}


@pytest.mark.parametrize("kind", DURING_FORWARD)
def test_what_is_so_during_the_forward_only(kind):
    def gradients(model):
        undo = DURING_FORWARD[kind](model)
        loss = model(inputs()).square().mean()
        undo()
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    torch.manual_seed(0)
    plain = Net()
    ours = copy.deepcopy(plain)
    expected = gradients(plain)
    with managed(ours):
        found = gradients(ours)
        after = [(block.mode, block.act, block.config.scale, len(block.inner._forward_hooks)) for block in ours.blocks]
        assert after == [("sine", torch.tanh, 1.0, 0)] * 4
        assert all(two is one or torch.equal(one, two) for one, two in zip(expected, found, strict=True))


def test_weights_of_a_functional_call():
    """Weights adapted by a step of an inner loop (meta-learning) are there during the forward only."""
    torch.manual_seed(0)
    plain = Net()
    ours = copy.deepcopy(plain)

    def gradients(model):
        start = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
        fast = {name: 1.5 * parameter for name, parameter in start.items()}
        loss = torch.func.functional_call(model, fast, (inputs(),)).square().mean()
        return torch.autograd.grad(loss, list(start.values()))

    expected = gradients(plain)
    with managed(ours):
        assert all(torch.equal(one, two) for one, two in zip(expected, gradients(ours), strict=True))


def test_the_choice_of_attention_kernels():
    class Attention(Block):
        def forward(self, x):
            hidden = self.inner(x)[:, None]
            return x + self.outer(nn.functional.scaled_dot_product_attention(hidden, hidden, hidden)[:, 0])

    def gradients(model):
        with sdpa_kernel(SDPBackend.MATH):
            loss = model(inputs()).square().mean()
        loss.backward()
        assert torch.backends.cuda.flash_sdp_enabled()
        return [parameter.grad.clone() for parameter in model.parameters()]

    torch.manual_seed(0)
    plain = Net(block=Attention)
    ours = copy.deepcopy(plain)
    expected = gradients(plain)
    with managed(ours):
        assert all(torch.equal(one, two) for one, two in zip(expected, gradients(ours), strict=True))


def test_the_order_of_attention_kernels_that_torch_decides_on_late():
    """In its first attention of a process torch puts cuDNN before flash, on GPUs where that is faster."""
    usual = torch._C._get_sdp_priority_order()
    wanted = usual[::-1]

    class Torch:  # no recompute looks at classes, as it cannot look into torch
        has_decided = False

    class Attention(Block):
        def forward(self, x):
            if not Torch.has_decided:
                Torch.has_decided = True
                torch._C._set_sdp_priority_order(wanted)
            is_wanted = torch._C._get_sdp_priority_order() == wanted
            return x + self.outer(torch.tanh(self.inner(x)) if is_wanted else self.inner(x))

    def gradients(model):
        Torch.has_decided = False
        torch._C._set_sdp_priority_order(usual)
        model(inputs()).square().mean().backward()
        assert torch._C._get_sdp_priority_order() == wanted
        return [parameter.grad.clone() for parameter in model.parameters()]

    torch.manual_seed(0)
    plain = Net(block=Attention)
    ours = copy.deepcopy(plain)
    try:
        expected = gradients(plain)
        with managed(ours):
            assert all(torch.equal(one, two) for one, two in zip(expected, gradients(ours), strict=True))
    finally:
        torch._C._set_sdp_priority_order(usual)


@dataclass
class Record:
    h: torch.Tensor
    kept: list


class Given(nn.Module):
    """A block that writes into what it is given."""

    def __init__(self, kind: str, number: int) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)

    def step(self, h, position):
        return h + torch.sin(self.linear(h + position))

    def forward(self, given, position=None, extra=None):
        kind = self.kind
        if kind in ("dict", "returned dict", "ordered dict"):
            given["h"] = self.step(given["h"], given["position"])
            return given if kind == "returned dict" else None
        if kind == "nested":
            given["levels"][0] = self.step(given["levels"][0], given["position"])
            return given["levels"][0]
        if kind == "list":
            extra.append(given.square().mean())
        elif kind == "deque":
            extra.append(float(given.detach().mean()))
            return self.step(given * sum(extra), position)
        elif kind == "generator":
            return self.step(given * torch.rand(WIDTH, generator=extra), position)
        elif kind == "object":
            given.h = self.step(given.h, position)
            given.kept.append(given.h)
            return given.h
        return self.step(given, position)


class GivenNet(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.position = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Given(kind, number) for number in range(4))

    def forward(self, x):
        h, position, kind = self.first(x), self.position(x), self.kind
        if "dict" in kind:
            make = collections.OrderedDict if kind == "ordered dict" else dict
            given = make(h=h, position=position)
            for block in self.blocks:
                assert block(given) is (given if kind == "returned dict" else None)
            return given["h"].square().mean() + given["position"].mean()
        if kind == "nested":
            given = {"levels": [h], "position": position}
            for block in self.blocks:
                block(given)
            return given["levels"][0].square().mean()
        if kind == "object":
            given = Record(h, [])
            for block in self.blocks:
                block(given, position)
            return given.h.square().mean() + sum(kept.mean() for kept in given.kept)
        extra = {"list": list, "deque": collections.deque, "generator": torch.Generator}[kind]()
        if kind == "generator":
            extra.manual_seed(3)
        for block in self.blocks:
            h = block(h, position, extra=extra)
        return h.square().mean() + (sum(extra) if kind == "list" else 0.0)


@pytest.mark.parametrize(
    "kind", ["dict", "returned dict", "ordered dict", "nested", "list", "deque", "generator", "object"]
)
def test_arguments_that_a_layer_writes_to(kind):
    torch.manual_seed(0)
    plain = GivenNet(kind)
    ours = copy.deepcopy(plain)
    with managed(ours):
        for x in inputs():
            one, two = plain(x), ours(x)
            assert torch.equal(one, two)
            one.backward()
            two.backward()
        pairs = list(zip(plain.parameters(), ours.parameters(), strict=True))
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_looks_share_one_picture_and_keep_no_graph():
    """Looking costs little where nothing changes, and no earlier step stays in memory."""
    block, viewer = Block("list", 0), Viewer()
    block(torch.ones(2, WIDTH))
    picture = viewer.look(block)
    assert viewer.look(block) is picture
    passing = block.inner.weight * 2
    gone = weakref.ref(passing)
    own = block.inner._parameters["weight"]
    block.inner._parameters["weight"] = passing
    block.state = [passing.mean() * torch.ones(2)]
    also_gone = weakref.ref(block.state[0])
    viewer.look(block)
    block.inner._parameters["weight"], block.state = own, [1.0]
    del passing
    gc.collect()
    assert (gone(), also_gone()) == (None, None)
    assert viewer.look(block).reach is not picture.reach
    assert viewer.look(block) is viewer.look(block)


def test_a_forward_replaced_after_the_model_was_attached():
    """One that calls what it replaces works; one that does not leaves the layer without its weights."""
    torch.manual_seed(0)
    model = Net()
    with managed(model):
        for block in model.blocks:
            block.forward = functools.partial(lambda forward, x: forward(x) * 0.9, block.forward)
        model(inputs()).square().mean().backward()
        for block in model.blocks:
            block.forward = MethodType(lambda self, x: Block.forward(self, x) * 0.9, block)
        with pytest.raises(UnsupportedError, match=r"forward of blocks\.3 was replaced .*Remedy: replace it before"):
            model(inputs()).square().mean().backward()
