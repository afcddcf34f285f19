"""Frozen, tied, unused and user-written parameters; copies, averages and readers of parameters between steps."""

import copy

import pytest
import torch
from torch import nn

from slideformer_backend.errors import StaleGraphError, UnsupportedError
from tests.parity.harness import POLICIES, PRECISIONS, check, run_managed
from tests.parity.models import HIDDEN, Block, Stack, batch, language_loss, llama, stack, steps

ADAMW = {"lr": 1e-2, "fused": True}

each_policy = pytest.mark.parametrize("policy", POLICIES)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
each_precision = pytest.mark.parametrize("precision", PRECISIONS)


def training(run, count=3, **options):
    steps(run, run.optimizer(torch.optim.AdamW, **ADAMW), count, **options)


def frozen(make, pattern):
    def made():
        model = make()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not pattern(name))
        return model

    return made


FREEZES = {
    "embedding": lambda name: "embed" in name,
    "first layers": lambda name: "embed" in name or "layers.0" in name,
    "last layer": lambda name: "layers.2" in name,
    "all but the head": lambda name: "lm_head" not in name,
    "all layers": lambda name: "layers" in name,
    "all but one matrix": lambda name: "layers.1.mlp.up" not in name,
    "all but norms": lambda name: "norm" not in name,
    "one matrix per layer": lambda name: "q_proj" in name,
}


@each_policy
@each_precision
@pytest.mark.parametrize("freeze", FREEZES)
def test_frozen(device, policy, precision, freeze):
    dtype, autocast = PRECISIONS[precision]
    make = frozen(llama(dtype), FREEZES[freeze])
    check(make, training, device, policy=policy, autocast=autocast)


@each_policy
def test_frozen_parameters_in_the_optimizer(device, policy):
    def script(run):
        steps(run, run.bind(torch.optim.AdamW(run.model.parameters(), **ADAMW)))

    check(frozen(llama(), FREEZES["first layers"]), script, device, policy=policy)


@each_policy
def test_frozen_later(device, policy):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        steps(run, optimizer, 2)
        for parameter in run.model.blocks[1].parameters():
            parameter.requires_grad_(False)
        run.model.embed.requires_grad_(False)
        steps(run, optimizer, 2, first=2)
        run.model.requires_grad_(True)
        steps(run, optimizer, 2, first=4)

    check(stack(), script, device, policy=policy)


@each_policy
@each_precision
def test_tied_embeddings(device, policy, precision):
    dtype, autocast = PRECISIONS[precision]
    check(llama(dtype, tie_word_embeddings=True), training, device, policy=policy, autocast=autocast)


class TiedBlocks(Stack):
    """A matrix shared by two blocks, and one shared by a block and the head's side."""

    def __init__(self):
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.extra = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.extra.weight = self.blocks[1].up.weight

    def forward(self, ids):
        logits = super().forward(ids)
        return logits + self.extra(self.embed(ids)).mean(-1, keepdim=True)


@each_policy
def test_weights_shared_by_units(device, policy):
    check(lambda: TiedBlocks().train(), training, device, policy=policy)


class SharedNorm(Stack):
    """One module that is part of every block."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.norm = self.blocks[0].norm


@each_policy
def test_a_module_shared_by_units(device, policy):
    check(lambda: SharedNorm().train(), training, device, policy=policy)


class Unused(Stack):
    """Parameters without a gradient: always, and in every other forward; a block that is skipped at times."""

    def __init__(self):
        super().__init__()
        self.never = nn.Parameter(torch.ones(HIDDEN))
        for block in self.blocks:
            block.never = nn.Parameter(torch.ones(HIDDEN))
        self.count = 0

    def forward(self, ids):
        self.count += 1
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            if (self.count + number) % 3:
                x = block(x)
        return self.head(self.norm(x))


@each_policy
@pytest.mark.parametrize("accumulate", [1, 2])
def test_unused(device, policy, accumulate):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        for number in range(5):
            for micro in range(accumulate):
                ids = batch(10 * number + micro, device=run.device)
                run.backward(language_loss(run.forward(ids), ids), is_last=micro == accumulate - 1)
            run.see_gradients()
            optimizer.step()
            optimizer.zero_grad()
            run.see_weights()

    check(lambda: Unused().train(), script, device, policy=policy)


class Views(Block):
    """A block that uses slices, transposes and buffers of its own."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.gate = nn.Parameter(torch.randn(2, HIDDEN) * 0.1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            self.seen += 0.0
        return super().forward(x) * self.gate[0] + x @ self.up.weight.t()[:, :HIDDEN] * self.gate[1]


@each_policy
def test_weights_used_directly_inside_their_unit(device, policy):
    def make():
        model = Stack()
        model.blocks = nn.ModuleList(Views() for _ in range(3))
        return model.train()

    check(make, training, device, policy=policy)


def multiplied_data(run):
    for parameter in run.model.parameters():
        parameter.data.mul_(0.9)


def copied(run):
    with torch.no_grad():
        for number, parameter in enumerate(run.model.parameters()):
            if number % 2:
                parameter.copy_(parameter * 1.25)


def multiplied(run):
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(0.75)


def assigned_data(run):
    for parameter in run.model.parameters():
        parameter.data = parameter.data * 0.9


def one_element(run):
    with torch.no_grad():
        next(iter(run.model.model.layers[1].parameters()))[0, 0] = 1.0
        run.model.lm_head.weight[0, 0] = 1.0


def foreach(run):
    with torch.no_grad():
        torch._foreach_mul_(list(run.model.parameters()), 0.9)


def initialised(run):
    torch.manual_seed(5)
    nn.init.normal_(run.model.model.layers[1].mlp.up_proj.weight, std=0.02)


def from_vector(run):
    vector = nn.utils.parameters_to_vector(run.model.parameters()) * 0.9
    run.see("vector", vector)
    nn.utils.vector_to_parameters(vector, run.model.parameters())


def loaded(run):
    state = {name: tensor * 0.9 for name, tensor in run.model.state_dict().items()}
    run.model.load_state_dict(state)


def noised(run):
    """The alias is there before the parameter is looked at, and written after."""
    for parameter in run.model.parameters():
        parameter.data.add_(parameter.sin() * 0.1)


def pruned(run):
    for parameter in run.model.parameters():
        parameter.data[parameter.abs() < 0.01] = 0
        parameter.data.mul_((parameter.abs() > 0.02).to(parameter.dtype))


def held(run):
    """Aliases of all parameters at once, while others are looked at."""
    aliases = [parameter.data for parameter in run.model.parameters()]
    norms = [parameter.norm() for parameter in run.model.parameters()]
    torch._foreach_mul_(aliases, 0.9)
    for alias, norm in zip(aliases, norms, strict=True):
        alias.add_(0.01 * norm)


def crossed(run):
    for layer in run.model.model.layers:
        layer.self_attn.v_proj.weight.data.copy_(layer.self_attn.k_proj.weight.data)


def put_aside(run):
    """As averages of weights are shown: `parameter.data` goes elsewhere and comes back; what was taken stays."""
    asides = {}
    for name, parameter in run.model.named_parameters():
        asides[name] = parameter.data
        parameter.data = parameter.data * 0.5
    run.see("asides", torch.cat([aside.flatten() for aside in asides.values()]))
    for name, parameter in run.model.named_parameters():
        parameter.data = asides[name]


def exchanged(run):
    for layer in run.model.model.layers:
        first, second = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight
        first.data, second.data = second.data, first.data


WRITES = [
    multiplied_data, copied, multiplied, assigned_data, one_element, foreach, initialised, from_vector, loaded, noised,
    pruned, held, crossed, put_aside, exchanged,
]  # fmt: skip


@each_policy
@pytest.mark.parametrize(
    ("precision", "when"),
    [
        ("fp32", "after zero_grad"),
        ("fp32", "after step"),
        ("fp32", "before step"),
        ("bf16", "after step"),
        ("bf16", "before step"),
        ("autocast", "after step"),
    ],
)
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_user_writes(device, policy, precision, write, when):
    if write in (put_aside, exchanged) and precision == "bf16":
        pytest.skip("each write takes what a master has beyond its weight; the reference looks at the last one only")
    if write in (initialised, from_vector, noised, held, foreach, put_aside) and device.type == "cuda":
        pytest.skip("random numbers, arithmetic or one tensor of all weights: the layers' are on the host")
    if write is held and policy == "immediate" and precision == "bf16":
        pytest.skip("a split master takes writes through aliases of one layer at a time")
    dtype, autocast = PRECISIONS[precision]
    if policy == "immediate" and when == "before step":
        when = "before backward"  # weights change during backward

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        for number in range(3):
            ids = batch(number, device=run.device)
            loss = language_loss(run.forward(ids), ids)
            run.see("loss", loss)
            if when == "before backward":
                loss = None
                write(run)
                loss = language_loss(run.forward(ids), ids)
            run.backward(loss)
            if when == "before step":
                write(run)
            optimizer.step()
            if when == "after step":
                write(run)
            optimizer.zero_grad()
            if when == "after zero_grad":
                write(run)
        run.see_weights()

    check(llama(dtype), script, device, policy=policy, autocast=autocast)


@each_policy
@each_precision
def test_readers_between_steps(device, policy, precision):
    """Averages and penalties that read every parameter after every step."""
    if device.type == "cuda":
        pytest.skip("averages of the layers' weights are computed on the host, and round apart")
    dtype, autocast = PRECISIONS[precision]

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        averaged = torch.optim.swa_utils.AveragedModel(run.model)
        exponential = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        for number in range(4):
            ids = batch(number, device=run.device)
            run.backward(language_loss(run.forward(ids), ids))
            optimizer.step()
            optimizer.zero_grad()
            averaged.update_parameters(run.model)
            with torch.no_grad():
                for name, parameter in run.model.named_parameters():
                    exponential[name].lerp_(parameter, 0.1)
            run.see("length", sum(p.detach().float().norm() for p in run.model.parameters()))
        for name, parameter in averaged.module.named_parameters():
            run.see(f"average {name}", parameter)
        for name, value in exponential.items():
            run.see(f"exponential {name}", value)
        ids = batch(50, device=run.device)
        with torch.no_grad(), run.cast():
            run.see("loss of the average", language_loss(averaged(ids), ids))

    check(llama(dtype), script, device, policy=policy, autocast=autocast)


@each_policy
def test_a_copy_is_a_plain_model(device, policy):
    """A deep copy (reference model, EMA) shares nothing, trains on its own and can be managed itself."""

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        steps(run, optimizer, 2)
        copied = copy.deepcopy(run.model).to(run.device)
        for name, parameter in copied.named_parameters():
            run.see(f"copy {name}", parameter)
            run.see(
                "leaf", (parameter.is_leaf, parameter.requires_grad, type(parameter).__name__, parameter.grad is None)
            )
        steps(run, optimizer, 2, first=2)
        ids = batch(20, device=run.device)
        own = torch.optim.AdamW(copied.parameters(), **({**ADAMW}))
        for _ in range(2):
            with run.cast():
                loss = language_loss(copied(ids), ids)
            run.see("loss of the copy", loss)
            loss.backward()
            own.step()
            own.zero_grad()
        for name, parameter in copied.named_parameters():
            run.see(f"copy {name}", parameter)
        run.see_weights()

    check(llama(), script, device, policy=policy)


@each_policy
def test_a_frozen_reference_model(device, policy):
    """Preference training: a deep copy, made before the first step, scores the same batch."""

    def script(run):
        reference = copy.deepcopy(run.model).to(run.device).eval().requires_grad_(False)

        def loss_of(run, ids):
            with torch.no_grad():
                target = reference(ids).logits.log_softmax(-1)
            scores = run.forward(ids).logits.log_softmax(-1)
            distance = nn.functional.kl_div(scores, target, reduction="batchmean", log_target=True)
            return distance + language_loss(run.forward(ids), ids)

        training(run, loss_of=loss_of)

    check(llama(), script, device, policy=policy)


def test_a_stale_graph_raises(device):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        ids = batch(0, device=run.device)
        old = language_loss(run.forward(ids), ids)
        run.backward(language_loss(run.forward(ids), ids))
        optimizer.step()
        with pytest.raises((StaleGraphError, RuntimeError)):
            run.backward(old)
        optimizer.zero_grad()
        steps(run, optimizer, 2, first=1)

    run_managed(stack(), script, device)


def test_a_penalty_on_sliding_weights_is_refused(device):
    """A loss that uses a sliding weight outside its unit."""

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        ids = batch(0, device=run.device)
        loss = run.model.blocks[0].up.weight.square().sum().to(run.device) + language_loss(run.forward(ids), ids)
        if run.is_managed:
            with pytest.raises(UnsupportedError, match="outside its block"):
                run.backward(loss)
        optimizer.zero_grad()
        steps(run, optimizer, 2, first=1)

    check(stack(), script, device)  # nothing of it is left


@each_policy
def test_metadata_of_parameters(device, policy):
    def script(run):
        for name, parameter in run.model.named_parameters():
            run.see(name, (tuple(parameter.shape), parameter.dtype, parameter.requires_grad, parameter.is_leaf))
            run.see("class", (isinstance(parameter, nn.Parameter), type(parameter).__name__, repr(parameter)[:9]))
        run.see("count", sum(p.numel() for p in run.model.parameters()))
        run.see("dtype", run.model.dtype)
        run.see("bytes", sum(p.nbytes for p in run.model.parameters()))

    check(llama(torch.float32), script, device, policy=policy)


class Hollow(Block):
    """A block with parameters of no elements: one among others, one between them, one of a part of its own."""

    def __init__(self):
        super().__init__()
        self.before = nn.Parameter(torch.zeros(0, HIDDEN))
        self.part = nn.RMSNorm(0)
        self.after = nn.Parameter(torch.zeros(0))

    def forward(self, x):
        nothing = self.before.sum() + self.after.sum()
        return super().forward(x) + self.part(x[..., :0]).sum() + nothing


class Void(nn.Module):
    """A repeated block of which no parameter has an element."""

    def __init__(self):
        super().__init__()
        self.inner = nn.RMSNorm(0)

    def forward(self, x):
        return x + self.inner(x[..., :0]).sum()


@each_policy
@each_precision
@pytest.mark.parametrize("where", ["among others", "whole blocks", "edge"])
def test_parameters_without_elements(device, policy, precision, where):
    dtype, autocast = PRECISIONS[precision]

    def make():
        model = Stack()
        if where == "edge":
            model.norm.extra = nn.Parameter(torch.zeros(0, HIDDEN))
            model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
        else:
            model.blocks = nn.ModuleList(Hollow() if where == "among others" else Void() for _ in range(3))
        return model.to(dtype).train()

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        for number in range(3):
            ids = batch(number, device=run.device)
            loss = language_loss(run.forward(ids), ids) + sum(p.sum() for p in run.model.parameters(recurse=False))
            run.see("loss", loss)
            run.backward(loss)
            if policy == "exact":
                run.clip(0.1)
            run.see_gradients()
            optimizer.step()
            optimizer.zero_grad()
            run.see_weights()

    check(make, script, device, policy=policy, autocast=autocast)


@pytest.mark.parametrize(
    "move",
    [
        lambda p: p.set_(torch.zeros(3)),
        lambda p: p.set_(torch.zeros(3).untyped_storage()),
        lambda p: p.resize_(3),
        lambda p: p.t_(),
        lambda p: p.unsqueeze_(0),
    ],
    ids=["set_", "storage", "resize_", "t_", "unsqueeze_"],
)
@pytest.mark.parametrize("name", ["blocks.1.up.weight", "head.weight"])
def test_other_memory_for_a_parameter_is_refused(device, name, move):
    """What the engine computes with is where it put the parameter: it would have been ignored, and lost."""

    def script(run):
        parameter = run.model.get_parameter(name)
        before = parameter.detach().clone()
        with torch.no_grad(), pytest.raises(UnsupportedError, match="cannot get other memory.*before accelerator.prep"):
            move(parameter)
        assert torch.equal(run.model.get_parameter(name), before)
        training(run)

    run_managed(stack(), script, device)
