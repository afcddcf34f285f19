"""Gradual unfreezing: what was frozen at ``prepare`` trains later, as on plain PyTorch, step by step."""

import copy

import pytest
import torch
from torch import nn

from slideformer_backend.engine import Engine
from slideformer_backend.engine.residency import Residency
from slideformer_backend.errors import PlanError, UnsupportedError
from slideformer_backend.plan import Terms, ledger_of, partition
from tests.parity.harness import PRECISIONS, assert_same, check, run_managed, run_plain
from tests.parity.models import Stack, batch, language_loss, llama, stack, steps
from tests.parity.test_parameters import ADAMW, each_policy, each_precision, frozen

PATTERNS = {
    "a layer": lambda name: "layers.1" in name,
    "all layers": lambda name: "layers" in name,
    "one matrix per layer": lambda name: "mlp.up" in name,
    "embedding and head": lambda name: "layers" not in name,
    "all but the head": lambda name: "lm_head" not in name,
}


def unfreeze(run):
    found = [parameter for parameter in run.model.parameters() if not parameter.requires_grad]
    for parameter in found:
        parameter.requires_grad_(True)
    return found


def refreeze(parameters):
    for parameter in parameters[::2]:
        parameter.requires_grad_(False)


class Apart(torch.optim.Optimizer):
    """RMSprop without a root: each operation rounds once, so that a GPU gives the bits of the host."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            state = self.state[parameter]
            if not state:
                state.update(step=torch.zeros(()), mean=torch.zeros_like(parameter))
            state["step"] += 1
            mean = state["mean"].mul_(0.5)
            mean.add_(parameter.grad.abs())
            parameter.sub_(parameter.grad.mul(self.param_groups[0]["lr"]).div(mean.add(1.0)))


def held(run, rule=torch.optim.AdamW):
    """An optimizer over all parameters, frozen ones too; plain PyTorch skips what has no gradient."""
    if rule is torch.optim.RMSprop and run.device.type == "cuda":
        rule = Apart  # the reference updates on the host, where torch's own rounds apart from what it does on a GPU
    return run.bind(rule(run.model.parameters(), **(ADAMW if rule is torch.optim.AdamW else {"lr": 1e-2})))


@each_policy
@each_precision
@pytest.mark.parametrize("pattern", PATTERNS)
def test_held_by_the_optimizer(device, policy, precision, pattern):
    def script(run):
        optimizer = held(run)
        steps(run, optimizer, 2)
        found = unfreeze(run)
        steps(run, optimizer, 2, first=2)
        refreeze(found)
        steps(run, optimizer, 1, first=4)
        unfreeze(run)
        steps(run, optimizer, 1, first=5)

    dtype, autocast = PRECISIONS[precision]
    check(frozen(llama(dtype), PATTERNS[pattern]), script, device, policy=policy, autocast=autocast)


@each_policy
@each_precision
def test_layer_by_layer_in_param_groups_of_their_own(device, policy, precision):
    """From the head down, one more layer every step, each with a learning rate of its own."""

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        steps(run, optimizer, 1)
        layers = run.model.model.layers
        for number, module in enumerate([run.model.model.norm, *reversed(layers), run.model.model.embed_tokens], 1):
            module.requires_grad_(True)
            optimizer.add_param_group({"params": list(module.parameters()), "lr": 1e-2 / number})
            steps(run, optimizer, 1, first=number)

    dtype, autocast = PRECISIONS[precision]
    check(frozen(llama(dtype), lambda name: "lm_head" not in name), script, device, policy=policy, autocast=autocast)


@each_policy
def test_another_optimizer_is_made(device, policy):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        steps(run, optimizer, 2)
        unfreeze(run)
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        steps(run, optimizer, 2, first=2)

    check(frozen(llama(), PATTERNS["all but the head"]), script, device, policy=policy)


@each_policy
@each_precision
def test_the_optimizer_gets_them_after_the_backward(device, policy, precision):
    """A gradient that no optimizer was known for is there when one steps."""

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        steps(run, optimizer, 2)
        found = unfreeze(run)
        ids = batch(2, device=run.device)
        run.backward(language_loss(run.forward(ids), ids))
        optimizer.add_param_group({"params": found})
        optimizer.step()
        optimizer.zero_grad()
        run.see_weights()
        steps(run, optimizer, 2, first=3)

    dtype, autocast = PRECISIONS[precision]
    check(frozen(llama(dtype), PATTERNS["all but the head"]), script, device, policy=policy, autocast=autocast)


def accumulated(run, optimizer, *, middle, clip=None):
    """Four micro-batches per step; ``middle`` happens after the second one of the second step."""
    for number in range(12):
        if number == 6:
            middle(run)
        ids = batch(number, length=6 + number % 3, device=run.device)
        loss = language_loss(run.forward(ids), ids) / 4
        run.see("loss", loss)
        run.backward(loss, is_last=number % 4 == 3)
        run.see_gradients()
        if number % 4 == 3:
            if clip is not None:
                run.clip(clip)
            optimizer.step()
            optimizer.zero_grad()
            run.see_weights()


@each_policy
@each_precision
@pytest.mark.parametrize("pattern", ["one matrix per layer", "all but the head"])
def test_in_the_middle_of_accumulation(device, policy, precision, pattern):
    dtype, autocast = PRECISIONS[precision]

    def script(run):
        accumulated(run, held(run), middle=unfreeze, clip=0.3 if policy == "exact" else None)

    check(frozen(llama(dtype), PATTERNS[pattern]), script, device, policy=policy, autocast=autocast)


def test_gradients_that_the_script_holds_stay_the_parameters_own(device):
    """A tensor taken as ``p.grad`` before is ``p.grad`` afterwards: it accumulates, and may be written."""

    def script(run):
        kept = {}

        def middle(run):
            kept.update({name: p.grad for name, p in run.model.named_parameters() if p.grad is not None})
            unfreeze(run)

        accumulated(run, held(run), middle=middle)
        for name, gradient in kept.items():
            run.see(name, gradient)
        ids = batch(20, device=run.device)
        run.backward(language_loss(run.forward(ids), ids), is_last=False)
        kept = {name: parameter.grad for name, parameter in run.model.named_parameters()}
        for gradient in kept.values():
            gradient.mul_(0.5)
        for name, parameter in run.model.named_parameters():
            run.see(f"half of {name}", parameter.grad)

    check(frozen(llama(), PATTERNS["one matrix per layer"]), script, device)


def test_memory_of_a_gradient_that_would_not_follow_is_refused(device):
    def script(run):
        optimizer = held(run)
        ids = batch(0, device=run.device)
        run.backward(language_loss(run.forward(ids), ids), is_last=False)
        alias = run.model.model.layers[1].mlp.gate_proj.weight.grad.data
        unfreeze(run)
        with pytest.raises(UnsupportedError, match=r"layers\.1.*gradients are being accumulated.*keep a clone"):
            run.forward(ids)
        del alias
        run.backward(language_loss(run.forward(ids), ids))
        run.see_gradients()
        optimizer.step()
        run.see_weights()

    def plain(run):
        optimizer = held(run)
        ids = batch(0, device=run.device)
        language_loss(run.forward(ids), ids).backward()
        unfreeze(run)
        language_loss(run.forward(ids), ids).backward()
        run.see_gradients()
        optimizer.step()
        run.see_weights()

    make = frozen(llama(), PATTERNS["one matrix per layer"])
    assert_same(run_plain(make, plain, device).seen, run_managed(make, script, device).seen)


@pytest.mark.parametrize("trains", [True, False], ids=["unfrozen", "frozen"])
@pytest.mark.parametrize("is_resident", [False, True], ids=["sliding", "resident"])
def test_between_forward_and_backward(device, trains, is_resident):
    """The graph is that of the parameters that trained in forward, also where it is computed again."""

    def script(run):
        optimizer = held(run)
        if is_resident and run.engine is not None:
            for unit in list(run.engine.sliding):
                run.engine.move_to_device(unit)
        for number in range(3):
            ids = batch(number, device=run.device)
            loss = language_loss(run.forward(ids), ids)
            if number == 1:
                for name, parameter in run.model.named_parameters():
                    if "mlp" in name or "embed" in name:
                        parameter.requires_grad_(trains)
            run.backward(loss)
            run.see_gradients()
            optimizer.step()
            optimizer.zero_grad()
            run.see_weights()

    check(frozen(llama(), lambda name: "mlp" in name and trains), script, device)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("rule", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("pattern", ["a layer", "one matrix per layer"])
def test_on_the_device(device, precision, rule, pattern):
    def script(run):
        optimizer = held(run, rule)
        steps(run, optimizer, 2)
        if run.engine is not None:
            for unit in list(run.engine.sliding)[:2]:
                run.engine.move_to_device(unit)
        steps(run, optimizer, 1, first=2)
        found = unfreeze(run)
        steps(run, optimizer, 2, first=3)
        refreeze(found)
        steps(run, optimizer, 1, first=5)

    check(frozen(llama(PRECISIONS[precision][0]), PATTERNS[pattern]), script, device)


@each_policy
@each_precision
@pytest.mark.parametrize("pattern", ["a layer", "one matrix per layer"])
@pytest.mark.parametrize("rule", [torch.optim.AdamW, torch.optim.RMSprop])
def test_back_from_a_device_without_room(device, policy, precision, pattern, rule, monkeypatch):
    """Layers that had moved there while they were frozen slide again; a pending gradient comes along."""
    monkeypatch.setattr(Residency, "spare", 0)
    dtype, autocast = PRECISIONS[precision]

    def script(run):
        optimizer = held(run, rule)
        steps(run, optimizer, 2)
        if run.engine is not None:
            for unit in list(run.engine.sliding):
                run.engine.move_to_device(unit)
        steps(run, optimizer, 1, first=2)
        accumulated(run, optimizer, middle=unfreeze, clip=0.3 if policy == "exact" else None)
        if run.engine is not None and (rule is torch.optim.AdamW or dtype == torch.bfloat16):
            assert len(run.engine.sliding) == (1 if pattern == "a layer" else 3), "with states that we know of"
        refreeze(list(run.model.parameters()))
        steps(run, optimizer, 1, first=5)
        run.see("states", optimizer.state_dict()["state"][2]["step"])

    check(frozen(llama(dtype), PATTERNS[pattern]), script, device, policy=policy, autocast=autocast)


@pytest.mark.parametrize("recomputes", [True, False])
def test_a_graph_that_needs_a_layer_on_the_device_keeps_it_there(device, monkeypatch, recomputes):
    monkeypatch.setattr(Residency, "spare", 0)
    monkeypatch.setattr(Engine, "recomputes", lambda engine, unit: recomputes)

    def script(run):
        optimizer = held(run)
        if run.engine is not None:
            for unit in list(run.engine.sliding):
                run.engine.move_to_device(unit)
        first, second = (language_loss(run.forward(ids), ids) for ids in (batch(n, device=run.device) for n in (0, 1)))
        run.backward(first, is_last=False)
        found = unfreeze(run)
        if run.engine is not None:
            with pytest.raises(PlanError, match="no room"):
                run.forward(batch(2, device=run.device))
        for parameter in found:
            parameter.requires_grad_(False)
        run.backward(second)
        run.see_gradients()
        optimizer.step()
        optimizer.zero_grad()
        unfreeze(run)
        steps(run, optimizer, 2, first=3)

    check(frozen(llama(), PATTERNS["a layer"]), script, device)


@each_policy
@each_precision
@pytest.mark.parametrize("share", [None, 0.3])
def test_states_on_nvme(device, policy, precision, share, tmp_path):
    dtype, autocast = PRECISIONS[precision]

    def script(run):
        optimizer = held(run)
        steps(run, optimizer, 2)
        found = unfreeze(run)
        steps(run, optimizer, 2, first=2)
        refreeze(found)
        steps(run, optimizer, 1, first=4)
        if run.engine is not None and (policy, precision) == ("exact", "bf16"):
            spilled = [unit for unit in run.engine.units if unit.spill is not None and unit.spill.nbytes]
            found = run.engine.units if device.type == "cpu" else run.engine.sliding  # a GPU has room for the others
            assert all(unit in spilled for unit in found) if share is None else spilled

    (tmp_path / "nvme").mkdir()
    nvme = {"optimizer_states": "nvme", "nvme_path": str(tmp_path / "nvme"), "nvme_fraction": share}
    make = frozen(llama(dtype), PATTERNS["all but the head"])
    check(make, script, device, policy=policy, autocast=autocast, **nvme)


@each_policy
def test_an_optimizer_that_runs_as_itself(device, policy):
    def script(run):
        optimizer = held(run, torch.optim.Adagrad)
        steps(run, optimizer, 2)
        unfreeze(run)
        steps(run, optimizer, 2, first=2)

    check(frozen(llama(), PATTERNS["all but the head"]), script, device, policy=policy)


class Mixed(Stack):
    """Blocks of bf16 with norms in fp32, as adapters in fp32 over a bf16 base."""

    def __init__(self):
        super().__init__()
        self.blocks.to(torch.bfloat16)
        for block in self.blocks:
            block.norm.float()

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.float()))


def _mixed_block(block, x):
    hidden = block.norm(x.float()).to(torch.bfloat16)
    return x + block.down(nn.functional.gelu(block.up(hidden))).float()


@pytest.mark.parametrize(("policy", "first"), [("exact", "norms"), ("exact", "matrices"), ("immediate", "norms")])
def test_dtypes_that_mix_later(device, policy, first, monkeypatch):
    """The kind of master depends on all that trains of a block."""
    monkeypatch.setattr("tests.parity.models.Block.forward", _mixed_block)

    def script(run):
        optimizer = held(run)
        for number in range(4):
            if number == 2:
                unfreeze(run)
            ids = batch(number, device=run.device)
            loss = language_loss(run.forward(ids), ids)
            run.see("loss", loss)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.see_weights()

    make = frozen(Mixed, lambda name: "blocks" in name and ("norm" in name) == (first == "matrices"))
    expected = run_plain(make, script, device)  # masters that round to even, as those of a mixed block
    assert_same(expected.seen, run_managed(make, script, device, policy=policy).seen)


@pytest.mark.parametrize("is_resident", [False, True], ids=["sliding", "resident"])
def test_split_masters_are_joined(device, is_resident, monkeypatch):
    """They keep every bit, and round to even from then on."""
    monkeypatch.setattr("tests.parity.models.Block.forward", _mixed_block)

    def script(run):
        optimizer = held(run)
        steps(run, optimizer, 3)
        if is_resident:
            run.engine.move_to_device(run.engine.sliding[1])
        run.engine.settle()
        records = [run.engine.record_of(p) for n, p in run.model.named_parameters() if "blocks.1" in n and p.dim() == 2]
        before = [run.engine.master_of(record).cpu() for record in records]
        ties = [half_way(master) for master in before]
        for record, master in zip(records, ties, strict=True):
            with torch.no_grad():
                record.parameter.copy_(upper(master))
            run.engine.settle()
            run.engine.load_state(record, {"master": master})
        unfreeze(run)
        run.engine.admission.look()
        for record, master in zip(records, ties, strict=True):
            assert torch.equal(run.engine.master_of(record).cpu(), master)
            assert torch.equal(record.parameter.detach().cpu(), master.bfloat16())
            assert not torch.equal(upper(master), master.bfloat16()), "no tie among them"
        steps(run, optimizer, 1, first=3)

    run_managed(frozen(Mixed, lambda name: "blocks" in name and "norm" in name), script, device, policy="immediate")


def half_way(master):
    """Every other element lies in the middle of two bf16 numbers."""
    bits = master.clone().view(torch.int32)
    bits[:, ::2] = (bits[:, ::2] & ~0xFFFF) | 0x8000
    return bits.view(torch.float32)


def upper(master):
    """The bf16 weights of a split master."""
    return ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def test_a_module_inside_the_model_is_called(device):
    """No forward of the whole model comes by; gradients outside the blocks are there before we look."""

    def script(run):
        optimizer = held(run)
        for number in range(4):
            if number == 2:
                unfreeze(run)
            ids = batch(number, device=run.device)
            x = run.model.embed(ids)
            for block in run.model.blocks:
                x = block(x)
            loss = x.square().mean()
            run.see("loss", loss)
            run.backward(loss)
            run.see_gradients()
            run.clip(0.1)
            optimizer.step()
            optimizer.zero_grad()
            run.see_weights()

    check(frozen(stack(), lambda name: "embed" in name or "blocks.1" in name), script, device)


@each_policy
def test_states_from_before_are_kept_while_frozen(device, policy):
    """A resume whose parameters train later again: states of frozen ones wait for that, as in torch."""
    saved = {}

    def first(run):
        optimizer = held(run)
        steps(run, optimizer, 3)
        saved.update(model=run.model.state_dict(), optimizer=optimizer.state_dict())

    def second(run):
        saved_now = copy.deepcopy(saved)  # torch takes some of its tensors over
        run.model.load_state_dict(saved_now["model"])
        optimizer = held(run)
        optimizer.load_state_dict(saved_now["optimizer"])
        steps(run, optimizer, 2)
        again = optimizer.state_dict()["state"]
        for number in sorted(again):
            run.see(f"step of {number}", again[number]["step"])
            run.see(f"moment of {number}", again[number]["exp_avg"])
        unfreeze(run)
        steps(run, optimizer, 2, first=2)

    run_plain(llama(), first, device)
    check(frozen(llama(), PATTERNS["all but the head"]), second, device, policy=policy)


@each_policy
def test_memory_is_that_of_a_model_prepared_so(device, policy):
    """The same layout, the same bytes: nothing of the old one is left."""
    found = []

    def script(run, *, later):
        optimizer = held(run)
        steps(run, optimizer, 1)
        if later:
            unfreeze(run)
            steps(run, optimizer, 1, first=1)
        run.engine.settle()
        run.see_weights()
        states = {unit.name: {n: s.nbytes for n, s in unit.states.items()} for unit in run.engine.sliding}
        layouts = {unit.name: unit.layout for unit in run.engine.sliding}
        found.append((states, layouts, run.engine.window.device_bytes))

    make = llama(torch.bfloat16)
    run_managed(make, lambda run: script(run, later=False), device, policy=policy)
    run_managed(frozen(make, PATTERNS["all layers"]), lambda run: script(run, later=True), device, policy=policy)
    assert found[0] == found[1]


def test_no_room_is_refused_and_the_run_goes_on(device, caplog):
    make = frozen(llama(torch.bfloat16), PATTERNS["all layers"])
    parts = partition(make())
    fits = ledger_of(parts, Terms(spares=0)).host_least
    whole = ledger_of(partition(llama(torch.bfloat16)()), Terms(spares=0)).host_least

    def script(run):
        optimizer = held(run)
        steps(run, optimizer, 1)
        found = unfreeze(run)
        with pytest.raises(PlanError, match="frozen at prepare.*no room") as caught:
            run.forward(batch(1, device=run.device))
        assert "states" in caught.value.found
        assert "host_memory" in caught.value.expected
        for parameter in found:
            parameter.requires_grad_(False)
        steps(run, optimizer, 1, first=1)

    run_managed(make, script, device, host_memory=(fits + whole) // 2)

    def fitting(run):
        optimizer = held(run)
        steps(run, optimizer, 1)
        unfreeze(run)
        with caplog.at_level("INFO"):
            steps(run, optimizer, 1, first=1)
        count = sum(p.numel() for p in run.model.model.layers.parameters())
        assert f"{count:,} parameters that were frozen at prepare() train from now on" in caplog.text

    run_managed(make, fitting, device, host_memory=whole)


REFUSED = {
    "a sparse embedding": (lambda model: nn.Embedding(64, 32, sparse=True), "sparse gradients"),
    "double precision": (lambda model: nn.Embedding(64, 32, dtype=torch.float64), "cannot be trained"),
}


class WithExtra(Stack):
    def __init__(self, extra):
        super().__init__()
        self.extra = extra(self)

    def forward(self, ids):
        return super().forward(ids) + 0.0 * self.extra(ids).float().sum()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused(device, name):
    extra, message = REFUSED[name]

    def script(run):
        steps(run, run.optimizer(torch.optim.AdamW, **ADAMW), 1)
        unfreeze(run)
        with pytest.raises(UnsupportedError, match=message):
            run.forward(batch(0, device=run.device))

    run_managed(frozen(lambda: WithExtra(extra), lambda name: "extra" in name), script, device)


def test_memory_that_was_shared_is_refused(device):
    """Two frozen parameters over one memory are apart since ``prepare``."""

    def make():
        model = frozen(stack(), lambda name: "blocks.1.up.weight" in name or "blocks.0.up.weight" in name)()
        model.blocks[1].up.weight.data = model.blocks[0].up.weight.data
        return model

    def script(run):
        steps(run, run.optimizer(torch.optim.AdamW, **ADAMW), 1)
        run.model.blocks[1].requires_grad_(True)
        with pytest.raises(UnsupportedError, match=r"blocks\.1\.up\.weight.*blocks\.0\.up\.weight.*same memory"):
            run.forward(batch(0, device=run.device))

    run_managed(make, script, device)


def test_inside_its_own_block_is_refused(device):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        block = run.model.blocks[1]

        def inside(module, args):
            block.requires_grad_(True)
            run.engine.admission.look()

        handle = block.up.register_forward_pre_hook(inside)
        with pytest.raises(UnsupportedError, match=r"blocks\.1.*inside a forward or backward of its block"):
            steps(run, optimizer, 1)
        handle.remove()
        steps(run, optimizer, 1)

    run_managed(frozen(stack(), lambda name: "blocks.1" in name), script, device)
