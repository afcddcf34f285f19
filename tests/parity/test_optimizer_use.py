"""How scripts use optimizers: groups, several of them, closures, hooks, schedulers, live hyper-parameters."""

import io

import pytest
import torch
from torch import nn

from slideformer_backend.errors import UnsupportedError
from slideformer_backend.optim.lion import Lion
from tests.parity.harness import POLICIES, PRECISIONS, check, run_managed
from tests.parity.models import HIDDEN, Stack, batch, language_loss, llama, stack, steps
from tests.tolerances import ASSOCIATIVITY

ADAMW = {"lr": 1e-2, "fused": True}

each_policy = pytest.mark.parametrize("policy", POLICIES)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def test_optimizers_without_a_rule_whose_layers_are_on_the_device(device):
    """Their states, step counts of those that count there too, go where they step: moved layers, loaded states."""
    for cls, options in (
        (torch.optim.AdamW, {"lr": 1e-2, "fused": True, "amsgrad": True}),
        (torch.optim.Adagrad, {"lr": 1e-2}),
    ):

        def script(run, cls=cls, options=options):
            optimizer = run.optimizer(cls, **options)
            for number in range(5):
                if number == 1 and run.is_managed:
                    for unit in list(run.engine.sliding)[:2]:
                        run.engine.move_to_device(unit)
                one_step(run, [optimizer], number)
                if number == 2:
                    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))

        check(stack(), script, device, tolerance=ASSOCIATIVITY if device.type == "cuda" else None)


def through_a_file(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True, map_location="cpu")


def decay_groups(model):
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if "norm" not in name], "weight_decay": 0.2},
        {"params": [p for name, p in named if "norm" in name], "weight_decay": 0.0, "lr": 3e-3, "betas": (0.8, 0.9)},
    ]


def one_step(run, optimizers, number, *, clip=None):
    ids = batch(number, device=run.device)
    loss = language_loss(run.forward(ids), ids)
    run.see("loss", loss)
    run.backward(loss)
    run.see_gradients()
    if clip is not None:
        run.clip(clip)
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    run.see_weights()


@each_policy
@each_dtype
def test_groups(device, policy, dtype):
    check(
        llama(dtype),
        lambda run: steps(run, run.optimizer(torch.optim.AdamW, decay_groups(run.model), **ADAMW)),
        device,
        policy=policy,
    )


@each_policy
@each_dtype
def test_a_group_added_later(device, policy, dtype):
    def script(run):
        first, second = decay_groups(run.model)
        optimizer = run.optimizer(torch.optim.AdamW, [first], **ADAMW)
        steps(run, optimizer, 2)
        optimizer.add_param_group(second)
        steps(run, optimizer, 2, first=2)

    check(llama(dtype), script, device, policy=policy)


@each_policy
@each_dtype
@pytest.mark.parametrize("second", ["adamw", "sgd", "adagrad"])
def test_two_optimizers(device, policy, dtype, second):
    """Both own parameters of every unit."""
    cls, options = {
        "adamw": (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
        "sgd": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "fused": True}),
        "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    }[second]

    def script(run):
        run.is_split = run.policy == "immediate"  # both optimizers, since they share units
        groups = decay_groups(run.model)
        optimizers = [
            run.optimizer(torch.optim.AdamW, groups[0]["params"], **ADAMW),
            run.optimizer(cls, groups[1]["params"], **options),
        ]
        for number in range(4):
            one_step(run, optimizers, number)

    check(llama(dtype), script, device, policy=policy)


@each_dtype
def test_alternating_optimizers(device, dtype):
    """Each steps every other time; the gradients of the other wait, or are dropped."""

    def script(run):
        groups = decay_groups(run.model)
        pair = [run.optimizer(torch.optim.AdamW, group["params"], **ADAMW) for group in groups]
        for number in range(6):
            ids = batch(number, device=run.device)
            run.backward(language_loss(run.forward(ids), ids))
            run.see_gradients()
            pair[number % 2].step()
            pair[number % 2].zero_grad()
            if number == 3:
                run.model.zero_grad()
            run.see_weights()

    check(llama(dtype), script, device)


def test_two_optimizers_over_the_same_parameters_are_refused(device):
    def script(run):
        pair = [run.optimizer(torch.optim.AdamW, **ADAMW), run.optimizer(torch.optim.SGD, lr=0.1, fused=True)]
        one_step(run, [pair[1]], 0)
        with pytest.raises(UnsupportedError, match="two optimizers"):
            one_step(run, [pair[0]], 1)

    run_managed(stack(), script, device)


@each_policy
@pytest.mark.parametrize("keeps", [True, False])
def test_a_new_optimizer_starts_afresh(device, policy, keeps):
    def script(run):
        kept = []
        for cls, options in [
            (torch.optim.AdamW, ADAMW),
            (torch.optim.AdamW, ADAMW),
            (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
            (torch.optim.Adagrad, {"lr": 1e-2}),
            (torch.optim.AdamW, ADAMW),
        ]:
            optimizer = run.optimizer(cls, **options)
            steps(run, optimizer, 2)
            kept.append(optimizer)
            if not keeps:
                kept.clear()

    check(llama(), script, device, policy=policy)


@each_policy
@each_dtype
def test_a_unit_added_later(device, policy, dtype):
    def script(run):
        layer = list(run.model.model.layers[1].parameters())
        rest = [p for p in run.model.parameters() if not any(p is other for other in layer)]
        optimizer = run.optimizer(torch.optim.AdamW, rest, **ADAMW)
        steps(run, optimizer, 2)
        run.model.zero_grad()
        optimizer.add_param_group({"params": layer, "lr": 1e-3})
        steps(run, optimizer, 2, first=2)

    check(llama(dtype), script, device, policy=policy)


@each_policy
def test_closure(device, policy):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        for number in range(3):
            ids = batch(number, device=run.device)

            def closure(ids=ids):
                optimizer.zero_grad()
                loss = language_loss(run.forward(ids), ids)
                run.backward(loss)
                return loss

            run.see("loss", optimizer.step(closure))
            run.see_weights()

    check(llama(), script, device, policy=policy)


@each_policy
def test_step_hooks(device, policy):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        calls = []
        optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: calls.append("before"))
        optimizer.register_step_post_hook(lambda optimizer, args, kwargs: calls.append("after"))
        steps(run, optimizer)
        run.see("calls", tuple(calls))

    check(stack(), script, device, policy=policy)


SCHEDULERS = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
}


@each_policy
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers(device, policy, kind, when):
    def script(run):
        optimizer = torch.optim.AdamW(run.model.parameters(), **ADAMW)
        if when == "before":
            scheduler = SCHEDULERS[kind](optimizer)
            run.bind(optimizer)
        else:
            run.bind(optimizer)
            scheduler = SCHEDULERS[kind](optimizer)
        for number in range(4):
            one_step(run, [optimizer], number)
            scheduler.step()
            run.see("lr", scheduler.get_last_lr())

    check(stack(), script, device, policy=policy)


@each_dtype
@pytest.mark.parametrize("change", ["lr", "betas", "weight_decay"])
def test_hyper_parameters_changed_between_backward_and_step(device, dtype, change):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        for number in range(4):
            ids = batch(number, device=run.device)
            run.backward(language_loss(run.forward(ids), ids))
            optimizer.param_groups[0][change] = {"lr": 1e-2 / (1 + number), "betas": (0.8, 0.9), "weight_decay": 0.3}[
                change
            ]
            optimizer.step()
            optimizer.zero_grad()
            run.see_weights()

    check(llama(dtype), script, device)


@each_policy
@each_dtype
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}])
def test_lion(device, policy, dtype, options):
    check(llama(dtype), lambda run: steps(run, run.optimizer(Lion, lr=1e-3, **options)), device, policy=policy)


@each_dtype
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adagrad])
def test_steps_without_zero_grad(device, dtype, cls):
    """Gradients pile up; a second step takes the same gradient again."""

    def script(run):
        optimizer = run.optimizer(cls, lr=1e-2, **({"fused": True} if cls is torch.optim.AdamW else {}))
        for number in range(5):
            ids = batch(number, device=run.device)
            run.backward(language_loss(run.forward(ids), ids))
            optimizer.step()
            if number == 2:
                optimizer.step()
            if number == 3:
                optimizer.zero_grad()
            run.see_gradients()
            run.see_weights()

    check(llama(dtype), script, device)


@each_dtype
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("by", ["optimizer", "model"])
def test_zero_grad(device, dtype, to_none, by):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        for number in range(4):
            ids = batch(number, device=run.device)
            run.backward(language_loss(run.forward(ids), ids))
            if number == 1:  # dropped: no step
                (optimizer if by == "optimizer" else run.model).zero_grad(set_to_none=to_none)
                run.see_gradients()
                run.see_weights()
                continue
            optimizer.step()
            (optimizer if by == "optimizer" else run.model).zero_grad(set_to_none=to_none)
            run.see_gradients()
        run.see_weights()

    check(llama(dtype), script, device)


def test_a_step_without_any_gradient(device):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        optimizer.step()
        run.see_weights()
        steps(run, optimizer, 1)
        optimizer.step()
        run.see_weights()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        run.see_weights()
        steps(run, optimizer, 2, first=1)

    check(stack(), script, device)


def test_an_optimizer_that_needs_a_closure_is_refused(device):
    def script(run):
        run.optimizer(torch.optim.LBFGS)

    with pytest.raises(UnsupportedError, match="LBFGS"):
        run_managed(stack(), script, device)


@each_policy
def test_gradients_are_reset_as_torch_resets_them(device, policy):
    """To None or to zeros, with one kept by the script, and one on a parameter that is not the model's."""

    def script(run):
        own = torch.nn.Parameter(torch.ones(3))
        optimizer = run.optimizer(torch.optim.AdamW, [{"params": run.model.parameters()}, {"params": [own]}], **ADAMW)
        kept = None
        for number, to_none in enumerate([True, False, True]):
            ids = batch(number, device=run.device)
            run.backward(language_loss(run.forward(ids), ids))
            own.grad = torch.full((3,), 2.0)
            if policy == "exact":
                kept = kept if kept is not None else next(run.model.parameters()).grad
                run.see("kept", kept)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
            found = [parameter.grad for parameter in (*run.model.parameters(), own)]
            assert (
                all(gradient is None for gradient in found)
                if to_none
                else not any(g.any() for g in found if g is not None)
            )
            run.see("own", own.detach())
            run.see_weights()

    check(llama(torch.bfloat16), script, device, policy=policy)


def test_an_optimizer_keeps_its_own_reset(device):
    class Counting(torch.optim.AdamW):
        resets = 0

        def zero_grad(self, set_to_none=True):
            self.resets += 1
            super().zero_grad(set_to_none)

    def script(run):
        optimizer = run.optimizer(Counting, run.model.parameters(), **ADAMW)
        steps(run, optimizer, 2)
        run.see("resets", torch.tensor(optimizer.resets))

    check(llama(torch.bfloat16), script, device, policy="exact")


class ByName(torch.optim.Optimizer):
    """Has a list beside ``params``, and shrinks what has no gradient but may be written."""

    def __init__(self, named, lr):
        names, parameters = zip(*named, strict=True)
        super().__init__([{"params": list(parameters), "names": list(names)}], {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter, name in zip(group["params"], group["names"], strict=True):
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * (0.125 if "bias" in name else 1.0))
                elif "unused" in name:
                    parameter.mul_(0.5)


class PartlyUsed(Stack):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.unused = nn.Parameter(torch.ones(HIDDEN))
        self.norm.unused = nn.Parameter(torch.ones(HIDDEN))
        self.embed.requires_grad_(False)
        self.blocks[0].up.requires_grad_(False)


@each_policy
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_optimizer_sees_all_its_parameters_in_order(device, policy, precision):
    dtype, autocast = PRECISIONS[precision]

    def script(run):
        optimizer = run.bind(ByName(list(run.model.named_parameters()), 0.5))
        steps(run, optimizer)
        unused = [parameter for name, parameter in run.model.named_parameters() if "unused" in name]
        assert [parameter[0].item() for parameter in unused] == [0.5**3] * 4

    def make():
        return PartlyUsed().to(dtype).train()

    if dtype is torch.float32:
        check(make, script, device, policy=policy, autocast=autocast)
    else:  # plain torch rounds every step to bf16
        run_managed(make, script, device, policy=policy, autocast=autocast)
