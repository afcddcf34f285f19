"""A layer that writes its own parameters in its forward trains as in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slideformer_backend.api import attach
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.errors import UnsupportedError
from slideformer_backend.plan.placement import Placement
from slideformer_backend.transfer import Monitor

from .harness import POLICIES, PRECISIONS, Run, assert_same, run_managed, run_plain

WIDTH, VOCABULARY, LAYERS = 16, 32, 4


class Writer(nn.Module):
    """A block whose forward writes one of its parameters."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.codes = nn.Embedding(8, WIDTH, max_norm=0.5 if kind == "max norm" else None)
        self.is_initialised = False
        if kind == "codebook":
            self.codes.weight.requires_grad_(False)

    def forward(self, x):
        kind = self.kind
        if kind == "clipped data":
            self.up.weight.data.clamp_(-0.1, 0.1)
        elif kind == "clipped without grad":
            with torch.no_grad():
                self.up.weight.clamp_(-0.1, 0.1)
        elif kind == "other memory":
            self.up.weight.data = nn.functional.normalize(self.up.weight.data, dim=1) * 0.5
        elif kind == "copied":
            self.up.weight.data.copy_(nn.functional.normalize(self.up.weight.data, dim=1) * 0.5)
        elif kind == "through a view":
            self.up.weight.detach()[:4].mul_(0.9)
        elif kind == "foreach":
            torch._foreach_mul_([self.up.weight.data, self.up.bias.data], 0.9)
        elif kind == "shrunk without grad":
            with torch.no_grad():
                self.up.weight.mul_(0.9)
        y = self.up(x)
        if kind == "first init" and not self.is_initialised:
            self.shift.data.copy_(-y.detach().mean((0, 1)))
            self.is_initialised = True
        elif kind == "average" and self.training:
            self.mean.data.mul_(0.9).add_(0.1 * y.detach().mean((0, 1)))
        elif kind == "average, used before":
            used = y * (1 + self.mean)
            self.mean.data.mul_(0.9).add_(0.1 * y.detach().mean((0, 1)))
            y = used
        elif kind == "max norm":
            x = x + self.codes((x.detach().abs().sum(-1) * 10).long() % 8)
        elif kind == "codebook":
            with torch.no_grad():
                flat, codes = y.flatten(0, 1), self.codes.weight
                chosen = nn.functional.one_hot(torch.cdist(flat.float(), codes.float()).argmin(1), 8).to(y.dtype)
                nearest = (chosen @ codes).view_as(y)
                if self.training:
                    self.codes.weight.data.mul_(0.9).add_(0.1 * (chosen.t() @ flat))
            y = y + (nearest - y).detach() * 0.1
        y = self.down(torch.sin(y + self.shift - self.mean))
        if kind == "written at the end":
            self.down.weight.data.mul_(0.95)
        return x + y


class Plain(nn.Module):
    """A block that does not mention its weights."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.sin(self.linear(x))


KINDS = (
    "clipped data",
    "clipped without grad",
    "other memory",
    "copied",
    "through a view",
    "foreach",
    "shrunk without grad",
    "first init",
    "average",
    "average, used before",
    "max norm",
    "codebook",
    "written at the end",
)


class Net(nn.Module):
    def __init__(self, kind: str, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Writer(kind) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(run, number):
    tokens = torch.randint(0, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(number)).to(run.device)
    logits = run.forward(tokens)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def training(run, *, accumulate=1, prepare=None):
    """Trains; forwards without gradients in between write too.

    A write takes what a master has beyond its weight, and the reference looks at the last of several: where one undoes
    another, there is one.
    """
    evaluates = run.model.blocks[0].kind not in ("copied", "other memory") or run.model.head.weight.dtype.itemsize == 4
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2, fused=True)
    for step in range(4):
        if prepare is not None:
            prepare(run, step)
        for number in range(accumulate):
            loss = loss_of(run, step * accumulate + number)
            run.see("loss", loss)
            run.backward(loss / accumulate, is_last=number == accumulate - 1)
        run.see_gradients()
        optimizer.step()
        optimizer.zero_grad()
        if evaluates and step in (0, 2):
            run.model.eval()
            with torch.no_grad():
                run.see("evaluation", loss_of(run, 100 + step))
            with torch.inference_mode():
                run.see("inference", loss_of(run, 200 + step).item())
            run.model.train()
            run.see_weights()
    run.see_weights()


def both(kind, script, device, *, precision="fp32", policy="exact", **config):
    dtype, autocast = PRECISIONS[precision]

    def make():
        return Net(kind).to(dtype).train()

    plain = run_plain(make, script, device, policy=policy, autocast=autocast)
    managed = run_managed(make, script, device, policy=policy, autocast=autocast, **config)
    assert_same(plain.seen, managed.seen)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_writes_its_own_parameters(device, kind, precision, policy):
    both(kind, training, device, precision=precision, policy=policy)


@pytest.mark.parametrize("kind", ["clipped data", "average, used before", "written at the end"])
def test_without_prefetch_and_while_accumulating(device, kind):
    both(kind, lambda run: training(run, accumulate=3), device, prefetch=0)


@pytest.mark.parametrize("kind", ["clipped data", "other memory", "average, used before", "max norm"])
def test_whatever_the_timing(device, kind):
    """With the checker of waits; slots are spoiled when they are free."""
    monitor = Monitor(poison=True, max_delay=1e-3, seed=3, check=device.type == "cpu")
    both(kind, lambda run: training(run, accumulate=2), device, monitor=monitor)


@pytest.mark.parametrize("kind", ["clipped without grad", "other memory", "average", "codebook"])
def test_weights_in_files(device, kind, tmp_path):
    files = {"weights": "nvme", "optimizer_states": "nvme", "nvme_path": tmp_path}
    both(kind, training, device, prefetch=1, **files)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["clipped data", "clipped without grad", "other memory", "average, used before"])
def test_compiled_layers(device, kind):
    """Compiled code writes as eager code does."""

    def make():
        model = Net(kind).train()
        for block in model.blocks:
            block.compile(backend="eager")
        return model

    torch._dynamo.reset()
    plain = run_plain(make, training, device)
    managed = run_managed(make, training, device)
    torch._dynamo.reset()
    assert_same(plain.seen, managed.seen)


def keep_activations(run, step):
    if run.is_managed and step == 1:
        engine = run.engine
        engine.window.grow(engine.sliding, LAYERS)
        kept = tuple(unit.index for unit in engine.sliding)
        engine.residency.placement = Placement((), kept, "gpu", LAYERS, "")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "other memory"])
def test_layers_that_keep_their_activations(device, kind, precision):
    both(kind, lambda run: training(run, prepare=keep_activations), device, precision=precision)


def move(run, step):
    if run.is_managed and step == 1:
        for _ in range(2):
            run.engine.move_to_device(run.engine.sliding[0])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_on_the_device(device, kind, precision):
    both(kind, lambda run: training(run, prepare=move), device, precision=precision)


@pytest.mark.parametrize("kind", ["clipped data", "average", "average, used before", "codebook"])
def test_two_forwards_before_a_backward(device, kind):
    def script(run: Run):
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        for step in range(3):
            first, second = loss_of(run, 2 * step), loss_of(run, 2 * step + 1)
            run.see("losses", first + second)
            run.backward(second, is_last=False)
            run.backward(first)
            run.see_gradients()
            optimizer.step()
            optimizer.zero_grad()
        run.see_weights()

    both(kind, script, device)


@pytest.mark.parametrize("kind", ["clipped data", "average, used before"])
def test_two_backwards_of_one_graph(device, kind):
    def script(run: Run):
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        for step in range(3):
            loss = loss_of(run, step)
            run.backward(loss, is_last=False, retain_graph=True)
            run.backward(loss)
            run.see_gradients()
            optimizer.step()
            optimizer.zero_grad()
        run.see_weights()

    both(kind, script, device)


@pytest.mark.parametrize("kind", ["first init", "average", "max norm", "codebook"])
def test_under_autocast(device, kind):
    """What the layer itself works with is in the user's dtype there, too."""
    both(kind, training, device, precision="autocast")


def test_a_weight_that_is_narrow_under_autocast_is_refused(device):
    """By a hook that came after attach: the engine could not know that this weight is used beside its layer."""
    model = Net("none").train()
    model.blocks = nn.ModuleList(Plain() for _ in range(LAYERS))
    engine = attach(model, SlideFormerConfig(), device=device, autocast_dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.bind(optimizer)

    def clip(module, args, most=0.1):
        with torch.no_grad():
            module.weight.clamp_(-most, most)

    hook = model.blocks[1].linear.register_forward_pre_hook(clip)
    run = Run(model, device, engine, autocast=torch.bfloat16)
    before = model.blocks[1].linear.weight.detach().clone()
    with pytest.raises(UnsupportedError, match=r"writes its own weight blocks\.1\.linear\.weight.*bfloat16 inside"):
        loss_of(run, 0)
    assert torch.equal(model.blocks[1].linear.weight, before)
    hook.remove()
    expected = loss_of(run, 0)
    hook = model.blocks[1].linear.register_forward_pre_hook(lambda module, args: clip(module, args, most=100))
    again = loss_of(run, 0)
    again.backward()  # a clamp that finds nothing to do writes nothing
    assert torch.equal(again, expected)
    assert torch.equal(model.blocks[1].linear.weight, before)
    hook.remove()
    optimizer.zero_grad()
    run.autocast = None
    model.blocks[1].linear.register_forward_pre_hook(clip)
    with torch.no_grad():
        loss_of(run, 0)  # outside autocast the layer has the weight itself
    assert torch.equal(model.blocks[1].linear.weight, before.clamp(-0.1, 0.1))
    engine.detach()


def test_what_only_the_recompute_writes_is_refused(device):
    model = Net("none").train()
    engine = attach(model, SlideFormerConfig(), device=device)

    def write(module, args):
        if torch._C._current_graph_task_id() != -1:  # inside a backward
            module.weight.data.mul_(2)

    model.blocks[1].down.register_forward_pre_hook(write)
    before = model.blocks[1].down.weight.detach().clone()
    run = Run(model, device, engine)
    with pytest.raises(UnsupportedError, match="which its forward had not done"):
        loss_of(run, 0).backward()
    engine.settle()
    assert torch.equal(model.blocks[1].down.weight, before)
    engine.detach()


def test_other_memory_is_refused_where_a_graph_has_the_old(device):
    model = Net("none").train()
    engine = attach(model, SlideFormerConfig(), device=device)
    engine.bind(torch.optim.SGD(model.parameters(), lr=0.1))
    run = Run(model, device, engine)
    keep_activations(run, 1)
    model.blocks[0].kind = "other memory"
    with pytest.raises(UnsupportedError, match=r"parameter\.data\.copy_"):
        loss_of(run, 0)
    engine.detach()


def test_an_embedding_with_a_largest_norm_at_the_edge(device):
    class Normed(Net):
        def __init__(self):
            super().__init__("none")
            self.embed.max_norm = 0.5

    for precision in ("fp32", "bf16"):
        dtype, _ = PRECISIONS[precision]

        def make(dtype=dtype):
            return Normed().to(dtype).train()

        assert_same(run_plain(make, training, device).seen, run_managed(make, training, device).seen)
