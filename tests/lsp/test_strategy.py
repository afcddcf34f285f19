"""``strategy: lsp`` as a script sees it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slideformer_backend.api import attach
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.errors import CheckpointError, ConfigError, UnsupportedError
from slideformer_backend.kernels.sparse_factor import make_factor
from slideformer_backend.lsp import SparseProjector
from slideformer_backend.lsp_settings import LspSettings
from slideformer_backend.plan import cores as plan_of_cores

from .toy import EngineSide, Event, PlainSide, loss_of, make_model, make_optimizer

CPU = torch.device("cpu")
STEP = [Event("backward", (0, True)), Event("step"), Event("zero")]


@pytest.fixture
def side():
    made = EngineSide(torch.float32)
    yield made
    made.close()


def attached(model, device=CPU, **options):
    lsp = options.pop("lsp", {"rank": 8, "nonzeros": 2})
    return attach(model, SlideFormerConfig(strategy="lsp", lsp=lsp, cpu_threads=1, **options), device=device)


def permutation(count, seed):
    generator = torch.Generator().manual_seed(seed)
    signs = torch.where(torch.rand(1, count, generator=generator) < 0.5, 1.0, -1.0)
    return make_factor(torch.randperm(count, generator=generator)[None], signs, count)


def test_a_signed_permutation_is_adamw_bit_for_bit(monkeypatch):
    """r = 1, d = m = n: nothing is lost, so nothing but the order of elements differs. 200 steps, clipped at times."""
    monkeypatch.setattr(plan_of_cores, "LEAST_GAIN", 0)
    side = EngineSide(torch.float32, rank=64, nonzeros=1, alpha=1.0)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(side.model.named_parameters()):
            if (core := side.engine.record_of(parameter).core) is not None:
                assert name.startswith("blocks.")
                core.projector = SparseProjector(*(permutation(rows, number) for rows in parameter.shape))
    plain = make_model()
    optimizer = make_optimizer(plain)
    exact = PlainSide(torch.float32, rank=1)
    exact.matrices.clear()
    for step in range(200):
        events = [Event("backward", (step, True)), Event("step"), Event("zero")]
        if step % 7 == 3:
            events.insert(1, Event("clip", 0.1))
        side.run(events)
        exact.run(events)
        if step < 3 and step % 7 != 3:
            loss_of(plain, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            for mine, torchs in zip(side.model.parameters(), plain.parameters(), strict=True):
                assert torch.allclose(mine, torchs, rtol=1e-4, atol=1e-6)
    for mine, right in zip(side.model.parameters(), exact.model.parameters(), strict=True):
        assert torch.equal(mine, right)
    side.close()


def test_small_learning_rates_move_bf16_weights():
    """At 5e-5 an update of a weight of 1 is a hundredth of a bf16 step: rounding to nearest would drop it."""
    count, steps, lr = 64, 400, 5e-5

    class Ones(nn.Module):
        def __init__(self):
            super().__init__()
            blocks = [nn.Sequential(nn.Linear(count, count, bias=False)) for _ in range(2)]
            self.blocks = nn.ModuleList(blocks)

        def forward(self, x):
            return sum((block[0](x) for block in self.blocks), torch.zeros(()))

    model = Ones().bfloat16()
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
    engine = attached(model, lsp={"rank": 32, "nonzeros": 1, "check_interval": 1000, "alpha": 100.0})
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, betas=(0.0, 0.0))
    engine.bind(optimizer)
    core = engine.record_of(model.blocks[0][0].weight).core
    for _ in range(steps):
        model(torch.ones(4, count, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    # every step moves a core by lr times its gradient's signs
    signs = core.projector.compress(torch.ones(count, count)).sign()
    expected = 1.0 - steps * lr * core.projector.expand(signs)
    found = model.blocks[0][0].weight.detach().float()
    assert (found - expected).mean().abs() < 4 * 2.0**-8 * (steps * 0.013) ** 0.5 / count
    assert (found - 1.0).abs().max() > 2.0**-7
    slope = ((found - 1.0) * (expected - 1.0)).sum() / (expected - 1.0).square().sum()
    assert slope.item() == pytest.approx(1.0, abs=0.1)
    engine.detach()


def test_the_norm_is_that_of_the_gradients_not_of_the_cores(side):
    side.run([Event("backward", (3, True))])
    found = side.engine.clip_grad_norm_(side.model.parameters(), 1e9)
    plain = make_model()
    loss_of(plain, 3).backward()
    right = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    assert torch.allclose(found, right, rtol=1e-6)
    cores = [side.core(name) for name, _ in side.model.named_parameters() if _has_core(side, name)]
    compressed = torch.stack([core.view(core.gradient).norm() for core in cores]).norm()
    assert abs(compressed - right) > 0.1 * right


def _has_core(side, name):
    return side.engine.record_of(side.model.get_parameter(name)).core is not None


def test_micro_batches_add_their_cores():
    both = EngineSide(torch.float32, alpha=1e9)
    one = EngineSide(torch.float32, alpha=1e9)
    both.run([Event("backward", (0, False)), Event("backward", (1, True))])
    cores = []
    for batch in (0, 1):
        one.run([Event("zero"), Event("backward", (batch, True))])
        one.engine.settle()
        cores.append(one.core("blocks.1.up.weight").view(one.core("blocks.1.up.weight").gradient).clone())
    both.engine.settle()
    core = both.core("blocks.1.up.weight")
    assert torch.equal(core.view(core.gradient), cores[0] + cores[1])
    both.close()
    one.close()


def test_a_step_with_a_nan_changes_nothing(side):
    side.run(STEP)
    before = [parameter.detach().clone() for parameter in side.model.parameters()]
    states = {k: v["exp_avg"].clone() for k, v in side.optimizer.state_dict()["state"].items()}
    (loss_of(side.model, 1) * float("nan")).backward()
    side.optimizer.step()
    assert side.engine.step_was_skipped(side.optimizer)
    side.optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(before, side.model.parameters(), strict=True))
    after = {k: v["exp_avg"] for k, v in side.optimizer.state_dict()["state"].items()}
    assert all(torch.equal(states[key], after[key]) for key in states)
    side.run(STEP)
    assert all(torch.isfinite(parameter).all() for parameter in side.model.parameters())


def test_orthonormal_feedback_survives_a_nan():
    side = EngineSide(torch.float32, projector="orthonormal")
    (loss_of(side.model, 1) * float("nan")).backward()
    side.optimizer.step()
    side.optimizer.zero_grad()
    side.run([*STEP, Event("read")])
    assert all(torch.isfinite(parameter).all() for parameter in side.model.parameters())
    side.close()


def test_a_compressed_gradient_is_there_and_nobody_can_read_it(side):
    weight = side.model.blocks[0].up.weight
    assert weight.grad is None
    side.run([Event("backward", (0, True))])
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape
    assert "CompressedGradient" in repr(weight.grad)
    for use in (
        lambda: weight.grad.norm(),
        lambda: weight.grad.mul_(0.5),
        lambda: torch.nn.utils.clip_grad_norm_(side.model.parameters(), 1.0),
        lambda: torch.nn.utils.clip_grad_value_(side.model.parameters(), 1.0),
        lambda: weight.grad.detach().cpu(),
    ):
        with pytest.raises(UnsupportedError, match=r"blocks\.0\.up\.weight was compressed"):
            use()
    assert side.model.blocks[0].norm.weight.grad.norm() > 0
    side.optimizer.zero_grad()
    assert weight.grad is None
    side.optimizer.step()  # without any gradient
    assert side.engine.record_of(weight).steps == 0


def test_a_gradient_that_user_code_assigns_is_compressed(side):
    weight = side.model.blocks[0].up.weight
    weight.grad = torch.ones_like(weight)
    side.engine.settle()
    core = side.core("blocks.0.up.weight")
    assert torch.equal(core.view(core.gradient), core.projector.compress(torch.ones(27, 20)))
    before = weight.detach().clone()
    side.optimizer.step()
    assert not torch.equal(before, weight)


def test_what_user_code_writes_counts(side):
    side.run(STEP)
    with torch.no_grad():
        side.model.blocks[1].up.weight.zero_()
    assert torch.count_nonzero(side.model.blocks[1].up.weight) == 0
    side.run(STEP)
    assert 0 < side.model.blocks[1].up.weight.abs().max() < 0.5


class _Planted(nn.Module):
    """Its weights' gradients lie in subspaces that the batch chooses."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(40, 48, bias=False)) for _ in range(2))


def _planted_gradient(basis, seed):
    def seeded(*shape, at):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(at))

    left, right = seeded(48, 2, at=basis), seeded(40, 2, at=basis + 1)
    return left @ torch.diag(seeded(2, at=seed).abs() + 0.5) @ right.t()


@pytest.mark.parametrize(("projector", "alpha"), [("lsp", 0.5), ("orthonormal", 0.01)])
def test_projectors_learn_anew_when_gradients_turn_away(projector, alpha):
    model = _Planted()
    lsp = {"rank": 16, "nonzeros": 8, "check_interval": 2, "alpha": alpha, "timeout": 400, "projector": projector}
    engine = attached(model, lsp=lsp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine.bind(optimizer)
    core = engine.record_of(model.blocks[0][0].weight).core
    for step in range(12):
        for block in model.blocks:
            block[0].weight.grad = _planted_gradient(0 if step < 6 else 50, seed=0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 5:
            assert core.learned == 1  # at the first step
    assert core.learned == 2  # at step 6, where they turn
    assert [error > alpha for error in core.errors] == [True, False, False, True, False, False]
    engine.settle()
    assert core.moment("exp_avg").abs().max() > 0
    engine.detach()


@pytest.mark.parametrize("options", [{"projector": "orthonormal"}, {"rule": "sgd"}], ids=["feedback", "sgd"])
def test_what_is_fed_back_and_counted_goes_on_too(options):
    """The residual of error feedback; steps under a rule that does not count them, by which bf16 is rounded."""
    first = EngineSide(torch.bfloat16, **options)
    first.run(STEP * 4)
    weights = {name: value.clone() for name, value in first.model.state_dict().items()}
    states = first.optimizer.state_dict()
    second = EngineSide(torch.bfloat16, **options)
    second.run([Event("backward", (7, True)), Event("step"), Event("zero")])
    second.model.load_state_dict(weights)
    second.optimizer.load_state_dict(states)
    for side in (first, second):
        side.run(STEP * 3)
    for mine, right in zip(second.model.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(mine, right)
    first.close()
    second.close()


def test_training_goes_on_from_a_state_dict_bit_for_bit():
    events = [Event("backward", (number, True)) if k == 0 else Event(("step", "zero")[k - 1])
              for number in range(4) for k in range(3)]  # fmt: skip
    first = EngineSide(torch.bfloat16)
    first.run(events)
    weights = {name: value.clone() for name, value in first.model.state_dict().items()}
    states = first.optimizer.state_dict()
    second = EngineSide(torch.bfloat16)
    second.model.load_state_dict(weights)
    second.optimizer.load_state_dict(states)
    for side in (first, second):
        side.run(events)
    for mine, right in zip(second.model.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(mine, right)
    for other in ({"rank": 7}, {"nonzeros": 2}, {"projector": "orthonormal"}):
        third = EngineSide(torch.bfloat16, **other)
        with pytest.raises(CheckpointError, match="resume with the strategy"):
            third.optimizer.load_state_dict(states)
        third.close()
    plain = make_model(torch.bfloat16)
    optimizer = make_optimizer(plain)
    engine = attach(plain, SlideFormerConfig(cpu_threads=1), device=CPU)
    engine.bind(optimizer)
    with pytest.raises(CheckpointError, match="resume with the strategy"):
        optimizer.load_state_dict(states)
    engine.detach()
    first.close()
    second.close()


def test_detached_models_are_plain_and_train_on(side):
    side.run(STEP)
    expected = [parameter.detach().clone() for parameter in side.model.parameters()]
    side.engine.detach()
    for parameter, right in zip(side.model.parameters(), expected, strict=True):
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter, right)
    loss_of(side.model, 1).backward()
    side.optimizer.step()


def test_a_second_optimizer_starts_with_fresh_states(side):
    side.run(STEP)
    other = make_optimizer(side.model)
    side.engine.bind(other)
    assert side.engine.record_of(side.model.blocks[0].up.weight).steps == 0
    assert torch.count_nonzero(side.core("blocks.0.up.weight").moment("exp_avg")) == 0
    loss_of(side.model, 1).backward()
    other.step()
    assert side.engine.record_of(side.model.blocks[0].up.weight).steps == 1


def test_settings_that_contradict_the_strategy_are_refused():
    for options in ({"update": "immediate"}, {"nvme_path": "/tmp"}, {"optimizer_states": "nvme"}):
        with pytest.raises(ConfigError, match="strategy lsp does without it|needs a folder"):
            attached(make_model(), **options)
    with pytest.raises(ConfigError, match="settings of another strategy"):
        attach(make_model(), SlideFormerConfig(lsp={"rank": 4}), device=CPU)


@pytest.mark.parametrize(
    ("value", "words"),
    [({"rank": 0}, "rank"), ({"ranks": 4}, "rank"), ({"alpha": -1}, "alpha"), ({"projector": "svd"}, "projector")],
)
def test_a_bad_setting_is_refused(value, words):
    with pytest.raises(ConfigError, match=words):
        SlideFormerConfig(strategy="lsp", lsp=value)


def test_settings_come_as_text_too():
    config = SlideFormerConfig.from_env({"SLIDEFORMER_STRATEGY": "lsp", "SLIDEFORMER_LSP": '{"rank": 512}'})
    assert LspSettings.from_section(config.lsp).rank == 512
    assert SlideFormerConfig.from_mapping({"strategy": "lsp", "lsp": {"alpha": "0.5"}}).lsp == {"alpha": 0.5}


def test_optimizers_that_cores_cannot_serve_are_refused():
    for make, words in (
        (lambda p: torch.optim.Adagrad(p), "fused rule"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "AdamW"),
    ):
        model = make_model()
        engine = attached(model)
        with pytest.raises(UnsupportedError, match=words):
            engine.bind(make(model.parameters()))
        engine.detach()
    with pytest.raises(UnsupportedError, match="fp16"):
        attached(make_model(torch.float16))


def test_what_is_unfrozen_later_is_updated_exactly():
    model, plain = make_model(), make_model()
    for each in (model, plain):
        each.blocks[1].up.weight.requires_grad_(False)
        each.head.bias.requires_grad_(False)
    engine = attached(model, lsp={"rank": 8, "nonzeros": 2})
    optimizer = make_optimizer(model)
    engine.bind(optimizer)
    for each in (model, plain):
        each.blocks[1].up.weight.requires_grad_(True)
        each.head.bias.requires_grad_(True)
    loss_of(model, 0).backward()
    loss_of(plain, 0).backward()
    record = engine.record_of(model.blocks[1].up.weight)
    assert record.core is None
    assert torch.equal(model.blocks[1].up.weight.grad, plain.blocks[1].up.weight.grad)
    optimizer.step()
    make_optimizer(plain).step()
    for name in ("blocks.1.up.weight", "head.bias", "blocks.0.norm.weight"):
        found, right = model.get_parameter(name), plain.get_parameter(name)
        assert torch.allclose(found, right, rtol=1e-5, atol=1e-7), name
        assert not torch.equal(found, make_model().get_parameter(name))
    engine.detach()
