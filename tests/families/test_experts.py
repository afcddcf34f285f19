"""Mixtures of experts: routing, experts without tokens, and the routers' own loss."""

import pytest
import torch
from torch import nn

from tests.families.catalogue import FAMILIES, text
from tests.parity.harness import POLICIES, PRECISIONS, check, run_managed
from tests.parity.models import HIDDEN, Stack, batch, hugging_face, language_loss, steps

ADAMW = {"lr": 1e-2, "fused": True, "weight_decay": 0.1}


class Routes(list):
    """No plain list, which a recompute would leave as it was."""


class Experts(nn.Module):
    """Experts as modules of their own, each called only when it has tokens; ``jitter`` makes routing random."""

    def __init__(self, jitter=0.0):
        super().__init__()
        self.router = nn.Linear(HIDDEN, 8, bias=False)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(8))
        self.jitter = jitter
        self.routes = Routes()

    def forward(self, x):
        flat = x.flatten(0, 1)
        scores = self.router(flat * (1 + self.jitter * torch.randn_like(flat))).softmax(-1)
        weight, chosen = scores.max(-1)
        self.routes.append(chosen.tolist())
        mixed = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if len(rows):
                mixed = mixed.index_add(0, rows, expert(flat[rows]) * weight[rows, None].to(flat.dtype))
        return x + mixed.view_as(x)


def with_experts(dtype, jitter=0.0):
    def make():
        model = Stack()
        model.blocks = nn.ModuleList(Experts(jitter) for _ in range(3))
        return model.to(dtype).train()

    return make


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("rows", [1, 2])
def test_experts_without_tokens_are_left_as_plain_leaves_them(device, policy, precision, rows):
    """Three tokens meet eight experts: most have no gradient, no states, no weight decay."""
    dtype, autocast = PRECISIONS[precision]
    idle = []

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        for step in range(4):
            for micro in range(2 if policy == "exact" else 1):
                ids = batch(10 * step + micro, rows=rows, length=3, device=run.device)
                run.backward(language_loss(run.forward(ids), ids), is_last=micro == 1 or policy != "exact")
            if policy == "exact":
                run.see_gradients()
                idle.append(sum(p.grad is None for p in run.model.parameters()))
                run.clip(0.05)
            optimizer.step()
            optimizer.zero_grad()
            run.see_weights()

    check(with_experts(dtype), script, device, policy=policy, autocast=autocast)
    assert policy == "immediate" or min(idle) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_recompute_routes_as_the_forward_did(device, policy):
    """Routing with noise: equal only if the recompute draws the same numbers."""

    def script(run):
        steps(run, run.optimizer(torch.optim.AdamW, **ADAMW))

    _, managed = check(with_experts(torch.float32, jitter=1.0), script, device, policy=policy)
    for block in managed.model.blocks:
        assert len(block.routes) == 6
        assert block.routes[0::2] == block.routes[1::2]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_every_way_to_run_experts(device, policy, implementation, family):
    def make():
        model = FAMILIES[family].make(torch.float32)
        model.set_experts_implementation(implementation)
        return model

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        steps(run, optimizer, loss_of=lambda run, ids: run.forward(input_ids=ids, labels=ids).loss)

    check(make, script, device, policy=policy)


@pytest.mark.parametrize("jitter", [0.0, 0.3])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_routers_own_loss_has_its_gradient(device, policy, jitter):
    """Router logits leave their blocks; a loss of them alone trains the routers and what comes before."""

    def make():
        return hugging_face("Mixtral", num_local_experts=4, output_router_logits=True, router_jitter_noise=jitter)

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        before = [layer.mlp.gate.weight.detach().clone() for layer in run.model.model.layers]
        steps(run, optimizer, loss_of=lambda run, ids: run.forward(**text(3)).aux_loss)
        for layer, weight in zip(run.model.model.layers, before, strict=True):
            assert not torch.equal(layer.mlp.gate.weight, weight)

    check(make, script, device, policy=policy)


def test_states_of_an_expert_start_with_its_first_tokens(device):
    """The step count that AdamW corrects by is the expert's own."""
    counts = []

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        steps(run, optimizer, 3, loss_of=lambda run, ids: language_loss(run.forward(ids[:, :3]), ids[:, :3]))
        run.engine.settle()
        state = optimizer.state_dict()["state"]
        counts.extend(int(entry["step"]) for entry in state.values())

    run_managed(with_experts(torch.float32), script, device)
    assert 3 in counts
    assert {1, 2} & set(counts)
