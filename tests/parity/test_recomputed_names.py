"""State of layers that scripts rebind, hide behind partial functions, or let grow: a recompute leaves it alone."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import threading

import pytest
import torch
from torch import nn

from slideformer_backend.engine.reach import Viewer

from .test_recomputed_state import WIDTH, inputs, managed

STATE: dict[str, int] = {}
RECORD: list | None = None


class Counted(nn.Module):
    """``count`` is asked once per forward for a number that scales the output."""

    counts: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, count):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.count = count

    def forward(self, x):
        return x + torch.tanh(self.inner(x)) * self.count(self)


class Collector:
    def __init__(self):
        self.seen = []
        self.count = 0

    def note(self, scale, module, args, output):
        self.count += 1
        self.seen.append(scale)
        return output * self.count


def by_global(block):
    STATE["n"] += 1
    return STATE["n"]


def by_recording(block):
    if RECORD is not None:
        RECORD.append(1)
        return len(RECORD)
    return 1


def by_class(block):
    block.counts["n"] += 1
    return block.counts["n"]


def by_closure():
    state = {"n": 0}

    def count(block):
        state["n"] += 1
        return state["n"]

    def rebind():
        nonlocal state
        state = {"n": 0}

    return count, rebind, lambda: state["n"]


def rebind_global():
    global STATE
    STATE = {"n": 0}


def rebind_class():
    Counted.counts = {"n": 0}


def train(model, before_step, value, *, is_managed):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    seen = []
    with managed(model) if is_managed else contextlib.nullcontext() as engine:
        if engine is not None:
            engine.bind(optimizer)
        for step, x in enumerate(inputs()):
            before_step(step)
            model(x).square().mean().backward()
            seen += [value(), *(parameter.grad.clone() for parameter in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
    return seen


def same(one, other):
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True))


class Net(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Counted(count) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def compare(make):
    """``make`` gives the model, what the script does before a step, and what it looks at after a backward."""
    runs = []
    for is_managed in (False, True):
        torch.manual_seed(0)
        runs.append(train(*make(), is_managed=is_managed))
    assert same(*runs)
    return [value for value in runs[1] if not isinstance(value, torch.Tensor)]


def test_a_global_that_the_script_binds_anew():
    assert 4 in compare(lambda: (Net(by_global), lambda step: rebind_global(), lambda: STATE["n"]))


def test_a_class_attribute_that_the_script_binds_anew():
    assert 4 in compare(lambda: (Net(by_class), lambda step: rebind_class(), lambda: Counted.counts["n"]))


def test_a_variable_of_a_closure_that_the_script_binds_anew():
    def make():
        count, rebind, value = by_closure()
        return Net(count), lambda step: rebind(), value

    assert 4 in compare(make)


def test_a_recording_that_is_switched_on_later():
    def switch(step):
        global RECORD
        RECORD = None if step == 0 else []

    assert 4 in compare(lambda: (Net(by_recording), switch, lambda: RECORD and len(RECORD)))


def test_a_hook_that_is_a_partial_method():
    def make():
        model, collector = Net(lambda block: 1), Collector()
        for block in model.blocks:
            block.inner.register_forward_hook(functools.partial(collector.note, 2.0))
        return model, lambda step: None, lambda: (collector.count, len(collector.seen))

    assert (12, 12) in compare(make)


@pytest.mark.parametrize("size", [100, 2000, 5000])
def test_lists_that_grow(size):
    def make():
        grown = [1.0] * size

        def count(block):
            grown.append(2.0)
            return 1 + grown[-1]

        return Net(count), lambda step: None, lambda: len(grown)

    assert size + 12 in compare(make)


@pytest.mark.parametrize(
    "state", [collections.Counter(n=0), collections.namedtuple("Held", "counts")(counts={"n": 0})], ids=repr
)  # fmt: skip
def test_containers_of_other_kinds(state):
    def make():
        own = copy.deepcopy(state)
        counts = own if isinstance(own, dict) else own.counts

        def count(block):
            holder = own if isinstance(own, dict) else own[0]
            holder["n"] += 1
            return holder["n"]

        return Net(count), lambda step: None, lambda: counts["n"]

    assert 12 in compare(make)


class Dotted(dict):
    __getattr__ = dict.get
    __setattr__ = dict.__setitem__


class Passing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, given):
        given.h = given.h + torch.tanh(self.inner(given.h))
        return given


class Strict(dict):
    __slots__ = ()
    __getattr__ = dict.__getitem__


def test_a_dict_with_attributes_as_argument():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Passing() for _ in range(4))
            self.layers[0].held = Strict(a=1)  # raises KeyError for what it does not have

        def forward(self, x):
            given = Dotted(h=x)
            for layer in self.layers:
                given = layer(given)
            return given.h

    compare(lambda: (Whole(), lambda step: None, lambda: None))


def test_a_thread_that_writes_spoils_no_look():
    block = Counted(lambda block: 1)
    block.held = {}
    stop = threading.Event()

    def write():
        number = 0
        while not stop.is_set():
            number += 1
            block.held[number] = number
            if len(block.held) > 50:
                block.held.clear()

    thread, viewer = threading.Thread(target=write), Viewer()
    thread.start()
    try:
        for _ in range(300):
            reach, flat = viewer.look(block)
            assert all(isinstance(flat[position], (nn.Parameter, type(None))) for position in reach.parameters)
    finally:
        stop.set()
        thread.join()


def test_a_table_is_not_walked_through():
    """A layer's own attributes are all looked at, and of what they hold so much that a look stays short."""
    block = Counted(lambda block: 1)
    block.table = [{"tokens": list(range(60))} for _ in range(1000)]
    picture = Viewer().look(block)
    assert len(picture.flat) < 10_000
