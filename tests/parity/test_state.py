"""State in and out: resume bit for bit, checkpoints that other programs can read."""

import contextlib
import functools
import io

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slideformer_backend.optim.lion import Lion
from tests.parity.harness import POLICIES, PRECISIONS, assert_same, check, run_managed, run_plain
from tests.parity.models import batch, language_loss, llama, steps
from tests.tolerances import ASSOCIATIVITY

RULES = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "momentum": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "fused": True}),
    "sgd": (torch.optim.SGD, {"lr": 1e-1, "fused": True}),
    "lion": (Lion, {"lr": 1e-3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
}
each_policy = pytest.mark.parametrize("policy", POLICIES)
each_precision = pytest.mark.parametrize("precision", PRECISIONS)


def through_a_file(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def half(device):
    """Steps before a run is saved, and after: on a GPU more than its first three, in which layers may move there."""
    return 5 if device.type == "cuda" else 3


@functools.cache
def uninterrupted(device, policy, precision, rule):
    """What the second half of all steps shows, which does not depend on when a resumed run was saved."""
    dtype, autocast = PRECISIONS[precision]
    cls, options = RULES[rule]

    def straight(run):
        optimizer = run.optimizer(cls, **options)
        steps(run, optimizer, half(device))
        run.seen.clear()
        steps(run, optimizer, half(device), first=half(device))

    return run_managed(llama(dtype), straight, device, policy=policy, autocast=autocast).seen


@each_policy
@each_precision
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("when", ["after step", "after zero_grad"])
def test_resume(device, policy, precision, rule, when):
    """Half of the steps, save, a new process's model and optimizer, the other half: the bits of all of them."""
    dtype, autocast = PRECISIONS[precision]
    cls, options = RULES[rule]
    options_of_run = {"policy": policy, "autocast": autocast}
    saved = {}

    def first(run):
        optimizer = run.optimizer(cls, **options)
        last = half(device) - 1
        steps(run, optimizer, last)
        ids = batch(last, length=6 + last % 3, device=run.device)
        run.backward(language_loss(run.forward(ids), ids))
        optimizer.step()
        if when == "after zero_grad":
            optimizer.zero_grad()
        saved.update(through_a_file({"model": run.model.state_dict(), "optimizer": optimizer.state_dict()}))

    def second(run):
        run.model.load_state_dict(saved["model"])
        optimizer = run.optimizer(cls, **options)
        optimizer.load_state_dict(saved["optimizer"])
        steps(run, optimizer, half(device), first=half(device))

    run_managed(llama(dtype), first, device, **options_of_run)
    resumed = run_managed(llama(dtype), second, device, seed=7, **options_of_run)
    assert_same(uninterrupted(device, policy, precision, rule), resumed.seen)


@each_policy
@pytest.mark.parametrize("rule", ["adamw", "momentum", "adagrad"])
def test_optimizer_state_is_torchs(device, policy, rule):
    """fp32: a managed state dict continues in plain torch, and a plain one in a managed run."""
    cls, options = RULES[rule]
    saved = {}

    def first(run):
        optimizer = run.optimizer(cls, **options)
        steps(run, optimizer, 3)
        saved[run.is_managed] = through_a_file({"model": run.model.state_dict(), "optimizer": optimizer.state_dict()})

    def second(run):
        state = saved[not run.is_managed]
        run.model.load_state_dict(state["model"])
        optimizer = run.optimizer(cls, **options)
        optimizer.load_state_dict(state["optimizer"])
        steps(run, optimizer, 3, first=3)

    run_plain(llama(), first, device)
    run_managed(llama(), first, device, policy=policy)
    assert saved[True]["optimizer"]["param_groups"] == saved[False]["optimizer"]["param_groups"]
    left, right = saved[False]["optimizer"]["state"], saved[True]["optimizer"]["state"]
    assert left.keys() == right.keys()
    for number in left:
        assert_same(list(left[number].items()), [(key, right[number][key]) for key in left[number]])
    check(llama(), second, device, policy=policy, seed=7)


@each_policy
@each_precision
def test_load_in_the_middle(device, policy, precision):
    """Going back to the state of an earlier step, as after a loss spike."""
    dtype, autocast = PRECISIONS[precision]

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2, fused=True)
        steps(run, optimizer, 2)
        model, state = through_a_file(run.model.state_dict()), through_a_file(optimizer.state_dict())
        run.seen.clear()
        steps(run, optimizer, 2, first=2)
        once = list(run.seen)
        run.model.load_state_dict(model)
        optimizer.load_state_dict(state)
        run.seen.clear()
        steps(run, optimizer, 2, first=2)
        assert_same(once, run.seen)

    run_managed(llama(dtype), script, device, policy=policy, autocast=autocast)


@each_policy
def test_saved_models_are_complete_and_plain(device, policy, tmp_path):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2, fused=True)
        steps(run, optimizer, 2)
        run.see("keys", tuple(run.model.state_dict()))
        for name, tensor in run.model.state_dict().items():
            run.see(name, tensor)
            assert type(tensor) in (torch.Tensor, torch.nn.Parameter)
            if run.is_managed:
                assert tensor.untyped_storage().nbytes() == tensor.nbytes
        folder = tmp_path / str(run.is_managed)
        run.model.save_pretrained(folder)
        for name, tensor in load_file(folder / "model.safetensors").items():
            run.see(f"file {name}", tensor)
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        for name, parameter in loaded.named_parameters():
            run.see(f"loaded {name}", parameter)
        whole = io.BytesIO()
        torch.save(run.model, whole)
        whole.seek(0)
        restored = torch.load(whole, weights_only=False)
        for name, parameter in restored.named_parameters():
            run.see(f"restored {name}", parameter)
        ids = batch(30)
        run.see("loss", language_loss(restored.eval().to("cpu")(ids), ids))
        steps(run, optimizer, 2, first=2)

    check(llama(), script, device, policy=policy)


@each_policy
@each_precision
def test_detach_leaves_a_plain_model_that_trains_on(device, policy, precision):
    dtype, autocast = PRECISIONS[precision]

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2, fused=True)
        steps(run, optimizer, 2)
        if run.is_managed:
            run.engine.detach()
            run.model.to(run.device)
            optimizer.load_state_dict(optimizer.state_dict())  # which brings its states to the parameters
        run.see_weights()
        for parameter in run.model.parameters():
            run.see("type", (type(parameter).__name__, parameter.is_leaf, parameter.grad is None))
        # On a GPU these steps are torch's own, whose fused AdamW rounds otherwise than on the host; under autocast a
        # weight may then be another one in bf16.
        if dtype == torch.float32 and (device.type == "cpu" or autocast is None):
            steps(run, optimizer, 2, first=2)

    tolerance = ASSOCIATIVITY if device.type == "cuda" and precision == "fp32" else None
    check(llama(dtype), script, device, policy=policy, autocast=autocast, tolerance=tolerance)


@each_policy
@each_precision
@pytest.mark.parametrize("then", ["step", "zero_grad", "backward"])
def test_gradients_from_before_prepare(device, policy, precision, then):
    """They are the parameter's, as ever: stepped, forgotten or added to."""
    dtype, autocast = PRECISIONS[precision]
    if policy == "immediate" and then == "backward":
        pytest.skip("accumulates, which update: immediate has to be told about")

    def make():
        model = llama(dtype)()
        with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
            language_loss(model(batch(40)), batch(40)).backward()
        return model

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2, fused=True)
        if then == "backward":
            ids = batch(41, device=run.device)
            run.backward(language_loss(run.forward(ids), ids))
        run.see_gradients()
        if then == "zero_grad":
            optimizer.zero_grad()
            run.see_gradients()
        else:
            optimizer.step()
            optimizer.zero_grad()
        run.see_weights()
        steps(run, optimizer, 2)

    check(make, script, device, policy=policy, autocast=autocast)
