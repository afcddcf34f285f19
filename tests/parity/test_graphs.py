"""What user code does with graphs: several forwards and backwards, hooks, captured activations, no_grad, generation."""

import inspect

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parity.harness import POLICIES, check
from tests.parity.models import batch, hugging_face, language_loss, llama, stack, steps
from tests.tolerances import ASSOCIATIVITY

ADAMW = {"lr": 1e-2, "fused": True}


def training(loss_of=None):
    """A script of ordinary AdamW steps."""
    return lambda run: steps(run, run.optimizer(torch.optim.AdamW, **ADAMW), loss_of=loss_of)


def each_policy(function):
    return pytest.mark.parametrize("policy", POLICIES)(function)


@each_policy
@pytest.mark.parametrize("generate", ["generate", "inference_mode"])
def test_generation_between_steps(device, policy, generate):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        for number in range(3):
            ids = batch(number, device=run.device)
            run.backward(language_loss(run.forward(ids), ids))
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

    check(lambda: Echo().train(), training(), device, policy=policy)


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


def _halve(parameter):
    parameter.grad.mul_(0.5)


@pytest.mark.parametrize("changes", [False, True])
def test_gradients_that_post_accumulate_hooks_keep(device, changes):
    """What a hook keeps stays as it was, and what it writes counts; hooks from before and after ``prepare``."""

    def make(kept):
        model = stack()()
        model.kept = kept
        for parameter in model.blocks[1].parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
        return model

    def script(run):
        kept = run.model.kept
        for parameter in run.model.blocks[2].parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad.detach()))
            if changes:
                parameter.register_post_accumulate_grad_hook(_halve)
        steps(run, run.optimizer(torch.optim.AdamW, **ADAMW))
        for number, gradient in enumerate(kept):
            run.see(f"kept {number}", gradient)

    check(lambda: make([]), script, device)


@each_policy
@pytest.mark.parametrize(("separate", "tolerance"), [(True, None), (False, ASSOCIATIVITY)])
def test_activations_captured_by_forward_hooks(device, policy, separate, tolerance):
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

    check(stack(), script, device, policy=policy, tolerance=tolerance, separate=separate)


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

    check(
        llama(),
        training(loss_of),
        device,
        policy=policy,
    )


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

    check(make, training(loss_of), device, policy=policy)


@each_policy
def test_prefix_cache(device, policy):
    """A forward that continues from a cache filled under no_grad (prefix tuning)."""

    def loss_of(run, ids):
        argument = "cache" if "cache" in inspect.signature(run.model.forward).parameters else "past_key_values"
        with torch.no_grad():
            cache = run.forward(ids[:, :3], use_cache=True).get(argument)
        return language_loss(run.forward(ids[:, 3:], **{argument: cache}), ids[:, 3:])

    check(
        llama(),
        training(loss_of),
        device,
        policy=policy,
    )


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
