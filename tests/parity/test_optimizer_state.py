"""What scripts do with ``optimizer.state``: read moments, scale them, reset some or all of them."""

import copy
import pickle
from collections import defaultdict

import pytest
import torch

from slideformer_backend.errors import UnsupportedError
from tests.parity.harness import POLICIES, PRECISIONS, check, run_managed
from tests.parity.models import batch, language_loss, llama, stack, steps

ADAMW = {"lr": 1e-2, "fused": True}


def scaled(optimizer, parameters):
    for parameter in parameters:
        if parameter in optimizer.state:
            optimizer.state[parameter]["exp_avg"].mul_(0.1)
            optimizer.state[parameter]["exp_avg_sq"].mul_(0.5)


def zeroed(optimizer, parameters):
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def removed(optimizer, parameters):
    del optimizer.state[parameters[3]]
    assert parameters[3] not in optimizer.state
    assert optimizer.state.pop(parameters[5])["step"] > 0
    assert optimizer.state.pop(parameters[5], "none") == "none"


def cleared(optimizer, parameters):
    optimizer.state.clear()
    assert not optimizer.state


def assigned(optimizer, parameters):
    optimizer.state = defaultdict(dict)


def given(optimizer, parameters):
    like = torch.ones_like(parameters[4], dtype=torch.float32)
    optimizer.state[parameters[4]] = {"step": torch.tensor(7.0), "exp_avg": like, "exp_avg_sq": like.clone()}


def looked_at(optimizer, parameters):
    assert [id(parameter) for parameter in optimizer.state] == [id(parameter) for parameter in parameters]
    assert len(optimizer.state) == len(parameters)
    assert all(state["exp_avg"].norm() > 0 for _, state in optimizer.state.items())
    assert optimizer.state.get(parameters[0])["step"] > 0
    assert optimizer.state.get(torch.ones(1)) is None


CHANGES = [scaled, zeroed, removed, cleared, assigned, given, looked_at]


@pytest.mark.parametrize("when", ["after step", "before step"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_states_are_the_scripts_too(device, precision, when, change):
    dtype, autocast = PRECISIONS[precision]

    def script(run):
        optimizer, parameters = run.optimizer(torch.optim.AdamW, **ADAMW), list(run.model.parameters())
        for number in range(5):
            ids = batch(number, device=run.device)
            loss = language_loss(run.forward(ids), ids)
            run.see("loss", loss)
            run.backward(loss)
            if number in (2, 3) and when == "before step":
                change(optimizer, parameters)
            optimizer.step()
            if number in (2, 3) and when == "after step":
                change(optimizer, parameters)
            optimizer.zero_grad()
        states = [state for _, state in sorted(optimizer.state_dict()["state"].items())]
        run.see("first moments", torch.cat([state["exp_avg"].flatten() for state in states]))
        run.see("steps", torch.stack([state["step"] for state in states]))
        run.see_weights()

    check(llama(dtype), script, device, autocast=autocast)


@pytest.mark.parametrize("looks", [True, False], ids=["looked at", "given"])
def test_states_before_the_first_step(device, looks):
    """A look leaves an empty entry, as torch's own dictionary does; moments that are given begin the training."""

    def script(run):
        optimizer, parameters = run.optimizer(torch.optim.AdamW, **ADAMW), list(run.model.parameters())
        if looks:
            assert all(len(optimizer.state[parameter]) == 0 for parameter in parameters)
        else:
            given(optimizer, parameters)
        for number in range(4):
            ids = batch(number, device=run.device)
            loss = language_loss(run.forward(ids), ids)
            run.see("loss", loss)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        run.see_weights()

    check(llama(), script, device)


def test_entries_of_other_parameters_are_the_optimizers_own(device):
    def script(run):
        other = torch.nn.Parameter(torch.ones(16, device=run.device))
        optimizer = run.optimizer(torch.optim.AdamW, [*run.model.parameters(), other], **ADAMW)
        for number in range(4):
            ids = batch(number, device=run.device)
            run.backward(language_loss(run.forward(ids), ids) + other.square().sum())
            optimizer.step()
            if number == 1:
                state = dict(optimizer.state[other])
                del optimizer.state[other]
                optimizer.state[other] = state
            optimizer.zero_grad()
        assert optimizer.state[other]["step"] == 4
        run.see("other", other)
        run.see_weights()

    check(llama(), script, device)


def test_copies_of_an_optimizer_have_its_states(device):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        ids = batch(0, device=run.device)
        run.backward(language_loss(run.forward(ids), ids))
        optimizer.step()
        for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer.state))):
            states = getattr(made, "state", made)
            assert type(states) is defaultdict
            assert len(states) == len(optimizer.state) == len(list(run.model.parameters()))
        run.engine.detach()
        assert type(optimizer.state) is defaultdict
        assert all(state["step"] == 1 for state in optimizer.state.values())

    run_managed(stack(), script, device)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adagrad])
def test_states_handed_to_another_optimizer(device, policy, cls):
    """Taken before the other one is prepared they go over; afterwards they are gone, which is said."""
    options = ADAMW if cls is torch.optim.AdamW else {"lr": 1e-2}

    def script(run):
        first = run.optimizer(cls, **options)
        steps(run, first)
        saved = first.state_dict()
        second = run.optimizer(cls, **options)
        if run.is_managed and cls is torch.optim.AdamW:
            with pytest.raises(UnsupportedError, match="no states any more.*state_dict.. before the other one"):
                first.state_dict()
            if policy == "exact":
                with pytest.raises(UnsupportedError, match="no states any more"):
                    dict(first.state)
        else:
            assert first.state_dict()["state"].keys() == saved["state"].keys()
        second.load_state_dict(saved)
        steps(run, second, first=3)
        assert second.state_dict()["state"].keys() == saved["state"].keys()

    check(llama(), script, device, policy=policy)
