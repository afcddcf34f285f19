"""What user code does with graphs: several forwards and backwards, hooks, captured activations, no_grad, generation."""

import inspect

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parity.harness import POLICIES, check
from tests.parity.models import Stack, batch, hugging_face, language_loss, llama, stack, steps
from tests.tolerances import ASSOCIATIVITY

ADAMW = {"lr": 1e-2, "fused": True}
LAST = -1


def each_policy(function):
    return pytest.mark.parametrize("policy", POLICIES)(function)


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


BODIES = [value for value in list(globals().values()) if callable(value) and getattr(value, "__code__", None)
          and value.__code__.co_varnames[:2] == ("run", "number") and value is not loss_on]
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


@each_policy
@pytest.mark.parametrize("generate", ["generate", "inference_mode"])
def test_generation_between_steps(device, policy, generate):
    def body(run, number):
        run.backward(loss_on(run, number))

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        for number in range(3):
            body(run, number)
            optimizer.step()
            optimizer.zero_grad()
            run.model.eval()
            prompt = batch(number + 70, rows=2, length=4, device=run.device)
            with torch.inference_mode(generate == "inference_mode"):
                run.see("tokens", run.model.generate(prompt, max_new_tokens=6, do_sample=False))
            run.model.train()
        run.see_weights()

    check(llama(), script, device, policy=policy)


class Twice(nn.Module):
    """A model that uses each of its blocks twice."""

    def __init__(self):
        super().__init__()
        self.inner = stack()()

    def forward(self, ids):
        x = self.inner.embed(ids)
        for block in [*self.inner.blocks, *self.inner.blocks]:
            x = block(x)
        return self.inner.head(self.inner.norm(x))


class UncachedTwice(Twice):
    """The same without autocast's weight cache."""

    def forward(self, ids):
        torch.set_autocast_cache_enabled(False)
        try:
            return super().forward(ids)
        finally:
            torch.set_autocast_cache_enabled(True)


class CheckpointedTwice(Twice):
    """The same with the user's own checkpointing around each use."""

    def forward(self, ids):
        x = self.inner.embed(ids)
        for block in [*self.inner.blocks, *self.inner.blocks]:
            x = checkpoint(block, x, use_reentrant=False)
        return self.inner.head(self.inner.norm(x))


@each_policy
def test_users_own_checkpointing(device, policy):
    script = lambda run: steps(run, run.optimizer(torch.optim.AdamW, **ADAMW))  # noqa: E731
    check(lambda: CheckpointedTwice().train(), script, device, policy=policy)


@each_policy
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_unit_used_twice(device, policy, autocast):
    """Under autocast without its weight cache, which adds the gradients of both uses in bf16; ours adds in fp32."""
    make = Twice if autocast is None else UncachedTwice

    def script(run):
        steps(run, run.optimizer(torch.optim.AdamW, **ADAMW))

    check(lambda: make().train(), script, device, policy=policy, autocast=autocast)


@each_policy
def test_a_unit_used_twice_in_a_row(device, policy):
    class Echo(Twice):
        def forward(self, ids):
            x = self.inner.embed(ids)
            for block in self.inner.blocks:
                x = block(block(x))
            return self.inner.head(self.inner.norm(x))

    check(lambda: Echo().train(), lambda run: steps(run, run.optimizer(torch.optim.AdamW, **ADAMW)), device, policy=policy)


@each_policy
def test_parameter_hooks(device, policy):
    def script(run):
        for number, (name, parameter) in enumerate(run.model.named_parameters()):
            if number % 2:
                parameter.register_hook(lambda gradient, name=name: run.see(f"hook {name}", gradient))
            else:
                parameter.register_hook(lambda gradient: gradient * 0.5)
        steps(run, run.optimizer(torch.optim.AdamW, **ADAMW))

    check(llama(), script, device, policy=policy)


def test_post_accumulate_hooks_see_gradients(device):
    def script(run):
        for name, parameter in run.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: run.see(f"hook {name}", p.grad))
        steps(run, run.optimizer(torch.optim.AdamW, **ADAMW))

    check(stack(), script, device)


class SeparateInputs(Stack):
    """The unit's input is a tensor of its own, as a managed unit sees it: gradients add up in the same order."""

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x.view_as(x))
        return self.head(self.norm(x))


@each_policy
@pytest.mark.parametrize(("make", "tolerance"), [(SeparateInputs, None), (Stack, ASSOCIATIVITY)])
def test_activations_captured_by_forward_hooks(device, policy, make, tolerance):
    """A loss on activations inside and at the output of units (DESIGN 3.3)."""

    def script(run):
        captured = []
        inner = run.model.blocks[1].up.register_forward_hook(lambda module, args, output: captured.append(output))
        outer = run.model.blocks[0].register_forward_hook(lambda module, args, output: captured.append(output))

        def loss_of(run, ids):
            captured.clear()
            loss = language_loss(run.forward(ids), ids)
            return loss + sum(tensor.square().mean() for tensor in list(captured))

        steps(run, run.optimizer(torch.optim.AdamW, **ADAMW), loss_of=loss_of)
        inner.remove()
        outer.remove()

    check(lambda: make().train(), script, device, policy=policy, tolerance=tolerance)


@each_policy
def test_module_hooks(device, policy):
    """Hooks of a unit fire once per forward and backward; those of modules inside it in the recompute too."""

    def script(run):
        calls = []
        for name, module in run.model.named_modules():
            module.register_forward_pre_hook(lambda module, args, name=name: calls.append(f"pre {name}"))
            module.register_forward_hook(lambda module, args, output, name=name: calls.append(f"post {name}"))
            if name.startswith("blocks."):
                module.register_full_backward_hook(lambda module, i, o, name=name: calls.append(f"backward {name}"))
        steps(run, run.optimizer(torch.optim.AdamW, **ADAMW))
        for number in range(3):
            for kind in ("pre", "post", "backward"):
                run.see(kind, calls.count(f"{kind} blocks.{number}"))
            run.see("inner", calls.count(f"backward blocks.{number}.up"))

    check(stack(), script, device, policy=policy)


@each_policy
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_backward_from_the_middle(device, policy, layer):
    """A loss on hidden states of one layer leaves later units without a gradient."""

    def loss_of(run, ids):
        return run.forward(ids, output_hidden_states=True).hidden_states[layer].float().square().mean()

    check(llama(), lambda run: steps(run, run.optimizer(torch.optim.AdamW, **ADAMW), loss_of=loss_of), device, policy=policy)


@each_policy
@pytest.mark.parametrize("options", [{"use_cache": True}, {"output_hidden_states": True}, {"output_attentions": True}])
def test_model_options(device, policy, options):
    def loss_of(run, ids):
        output = run.forward(ids, **options)
        loss = language_loss(output, ids)
        for tensor in output.get("hidden_states") or output.get("attentions") or ():
            loss = loss + tensor.float().square().mean() * 1e-2
        return loss

    def script(run):
        steps(run, run.optimizer(torch.optim.AdamW, **ADAMW), loss_of=loss_of)

    tolerance = ASSOCIATIVITY if "output_hidden_states" in options else None
    check(llama(), script, device, policy=policy, tolerance=tolerance)


def switch(model, what, *arguments):
    """Checkpointing by the name that this version of transformers prefers."""
    new = getattr(model, f"activation_checkpointing_{what}", None)
    (new or getattr(model, f"gradient_checkpointing_{what}"))(*arguments)


@each_policy
@pytest.mark.parametrize("by", ["model", "units"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_user_checkpointing(device, policy, by, reentrant):
    """The user switches Hugging Face's checkpointing on; also reentrant, whose inputs must require a gradient."""

    def script(run):
        model = run.model
        if by == "model":
            switch(model, "enable", {"use_reentrant": reentrant})
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        steps(run, optimizer, 2)
        if by == "units":
            switch(model, "enable", {"use_reentrant": reentrant})
        steps(run, optimizer, 2, first=2)
        switch(model, "disable")
        steps(run, optimizer, 1, first=4)

    check(llama(attention_dropout=0.1), script, device, policy=policy)


@each_policy
def test_router_loss_of_a_mixture_of_experts(device, policy):
    def make():
        return hugging_face("Mixtral", num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)

    def loss_of(run, ids):
        return run.forward(ids, labels=ids).loss

    check(make, lambda run: steps(run, run.optimizer(torch.optim.AdamW, **ADAMW), loss_of=loss_of), device, policy=policy)


@each_policy
def test_prefix_cache(device, policy):
    """A forward that continues from a cache filled under no_grad (prefix tuning)."""

    def loss_of(run, ids):
        argument = "cache" if "cache" in inspect.signature(run.model.forward).parameters else "past_key_values"
        with torch.no_grad():
            cache = run.forward(ids[:, :3], use_cache=True).get(argument)
        return language_loss(run.forward(ids[:, 3:], **{argument: cache}), ids[:, 3:])

    check(llama(), lambda run: steps(run, run.optimizer(torch.optim.AdamW, **ADAMW), loss_of=loss_of), device, policy=policy)


@each_policy
def test_stream_of_batch_sizes(device, policy):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        for number, (rows, length) in enumerate([(1, 4), (4, 16), (2, 3), (1, 30), (3, 8)]):
            ids = batch(number, rows, length, run.device)
            loss = language_loss(run.forward(ids), ids)
            run.see("loss", loss)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        run.see_weights()

    check(llama(), script, device, policy=policy)
