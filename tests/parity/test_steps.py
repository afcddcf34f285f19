"""Steps of training: losses, gradients, norms and weights, over policies, dtypes, accumulation, clips and rules."""

import functools

import pytest
import torch

from tests.parity.harness import POLICIES, PRECISIONS, assert_same, check, run_managed, run_plain
from tests.parity.models import batch, language_loss, llama

ADAMW = {"lr": 1e-2, "fused": True, "weight_decay": 0.1}


def training(
    *, steps=4, accumulate=1, tail=0, clip=None, by="accumulate", cls=torch.optim.AdamW, options=None, gradients=True
):
    """A training script: ``accumulate`` micro-batches a step, the last step ``tail`` of them."""

    def script(run):
        optimizer = run.optimizer(cls, **(ADAMW if options is None else options))
        number = 0
        for step in range(steps):
            count = tail if tail and step == steps - 1 else accumulate
            for micro in range(count):
                ids = batch(number, length=6 + number % 3, device=run.device)
                number += 1
                loss = language_loss(run.forward(input_ids=ids), ids) / accumulate
                run.see("loss", loss)
                run.backward(loss, is_last=by == "hand" or micro == count - 1)
            if gradients:
                run.see_gradients()
            if clip is not None:
                run.clip(clip)
                if gradients:
                    run.see_gradients()
            optimizer.step()
            optimizer.zero_grad()
            run.see_weights()

    return script


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("look", ["never", "gradients"])
def test_steps(device, policy, precision, look):
    if look == "gradients" and policy == "immediate":
        look = "never"
    dtype, autocast = PRECISIONS[precision]
    check(llama(dtype), training(gradients=look == "gradients"), device, policy=policy, autocast=autocast)


@functools.cache
def accumulated_and_clipped(device, precision, clip):
    """What plain PyTorch shows, gradients and all, whoever counts the micro-batches."""
    dtype, autocast = PRECISIONS[precision]
    return run_plain(llama(dtype), training(accumulate=4, tail=3, clip=clip), device, autocast=autocast).seen


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("by", ["accumulate", "hand"])
@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("clip", [None, 0.05, 1e6, float("inf")])
def test_accumulation_and_clips(device, precision, by, look, clip):
    dtype, autocast = PRECISIONS[precision]
    script = training(accumulate=4, tail=3, by=by, clip=clip, gradients=look)
    found = run_managed(llama(dtype), script, device, autocast=autocast).seen
    looked_at = accumulated_and_clipped(device, precision, clip)
    assert_same([pair for pair in looked_at if look or not pair[0].startswith("grad ")], found)


RULES = {
    "adam": (torch.optim.Adam, {"lr": 1e-2, "fused": True, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, ADAMW),
    "sgd": (torch.optim.SGD, {"lr": 1e-1, "fused": True}),
    "momentum": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "weight_decay": 0.1, "fused": True}),
    "nesterov": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True, "fused": True}),
    "dampening": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "dampening": 0.5, "fused": True}),
    "maximize": (torch.optim.AdamW, {**ADAMW, "maximize": True}),
    "amsgrad": (torch.optim.AdamW, {**ADAMW, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2}),
    "radam": (torch.optim.RAdam, {"lr": 1e-2}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1e-1}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_optimizers(device, policy, rule, precision):
    dtype, autocast = PRECISIONS[precision]
    cls, options = RULES[rule]
    clip = 0.05 if policy == "exact" else None
    script = training(cls=cls, options=options, clip=clip, gradients=policy == "exact")
    check(llama(dtype), script, device, policy=policy, autocast=autocast)
