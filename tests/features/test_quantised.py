"""QLoRA: a frozen quantised base slides as bytes; its scales stay on the device. With a stand-in for bitsandbytes'
classes, and with bitsandbytes itself where it is installed."""

import copy
import importlib.util
import pickle

import pytest
import torch
from torch import nn

from slideformer_backend.api import attach
from slideformer_backend.errors import UnsupportedError
from slideformer_backend.integrations import quantised
from tests.parity.harness import POLICIES, check, run_managed
from tests.parity.models import HIDDEN, Stack, batch, language_loss, llama, steps

ADAMW = {"lr": 1e-2, "fused": True}


class QuantState:
    """Scales, and the device they were last sent to."""

    def __init__(self, scales):
        self.scales, self.device = scales, scales.device

    def to(self, device):
        self.scales, self.device = self.scales.to(device), device


class Params4bit(nn.Parameter):
    """Bytes with a ``quant_state``, as bitsandbytes has them."""

    def __deepcopy__(self, memo):
        copied = type(self)(self.data.clone(), requires_grad=False)
        copied.quant_state = copy.deepcopy(self.quant_state, memo)
        return copied


class Linear4bit(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = Params4bit(torch.randint(0, 255, (HIDDEN, HIDDEN), dtype=torch.uint8), requires_grad=False)
        self.weight.quant_state = QuantState(torch.rand(HIDDEN, 1) / 1000)

    def forward(self, x):
        weight = (self.weight.float() - 128) * self.weight.quant_state.scales
        return nn.functional.linear(x, weight.to(x.dtype))


class Adapted(nn.Module):
    """A frozen quantised layer with a low-rank adapter."""

    def __init__(self):
        super().__init__()
        self.base = Linear4bit()
        self.down, self.up = nn.Linear(HIDDEN, 16, bias=False), nn.Linear(16, HIDDEN, bias=False)

    def forward(self, x):
        return x + self.base(x) + self.up(self.down(x))


def model():
    made = Stack()
    made.blocks = nn.ModuleList(Adapted() for _ in range(3))
    return made.train()


@pytest.mark.parametrize("policy", POLICIES)
def test_frozen_bytes_slide(device, policy):
    def script(run):
        if run.is_managed:
            quantised.install(run.engine)
        steps(run, run.optimizer(torch.optim.AdamW, **ADAMW))
        copied = copy.deepcopy(run.model)
        weight = copied.blocks[1].base.weight
        assert type(weight) is Params4bit
        assert torch.equal(weight.quant_state.scales, run.model.blocks[1].base.weight.quant_state.scales)
        ids = batch(9, device=run.device)
        run.see("copy", language_loss(copied(ids), ids))
        again = pickle.loads(pickle.dumps(run.model.blocks[1].base.weight))
        assert again.quant_state.scales.shape == (HIDDEN, 1)

    check(model, script, device, policy=policy)


def test_scales_are_where_the_weights_are_used(device):
    states = []

    def script(run):
        states.extend(block.base.weight.quant_state for block in run.model.blocks)
        for state in states:
            state.device = None
        quantised.install(run.engine)
        assert all(state.device == run.engine.device for state in states)
        units = [unit for unit in run.engine.units if unit.module is not None]
        assert all(unit.weights.nbytes < HIDDEN * HIDDEN * 4 * 2 for unit in units), "bytes slide, not floats"

    run_managed(model, script, device)
    assert all(state.device == torch.device("cpu") for state in states)


class Linear8bitLt(nn.Linear):
    """By its name."""


def test_layers_that_keep_an_alias_are_refused(active, fake_api):
    from accelerate import Accelerator

    made = Stack()
    made.blocks[1].up = Linear8bitLt(HIDDEN, 2 * HIDDEN)
    with pytest.raises(UnsupportedError, match=r"blocks\.1\.up is an 8-bit layer.*load_in_4bit"):
        Accelerator(cpu=True).prepare(made)
    assert fake_api.made == []


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", POLICIES)
def test_qlora_with_bitsandbytes(device, policy):
    import bitsandbytes
    import peft

    def make():
        base = llama()().requires_grad_(False)
        for layer in base.model.layers:
            for name in ("q_proj", "v_proj"):
                plain = getattr(layer.self_attn, name)
                made = bitsandbytes.nn.Linear4bit(
                    plain.in_features, plain.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
                )
                made.weight = bitsandbytes.nn.Params4bit(plain.weight.data, requires_grad=False, quant_type="nf4")
                setattr(layer.self_attn, name, made.to(device))
        config = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(base, config).train()

    def script(run):
        if run.is_managed:
            quantised.install(run.engine)
        steps(run, run.optimizer(torch.optim.AdamW, **ADAMW))

    check(make, script, device, policy=policy)


def test_an_engine_without_quantised_weights_is_left_alone(device):
    made = Stack()
    engine = attach(made, device=device)
    hooks = list(engine._detach_hooks)
    quantised.install(engine)
    assert engine._detach_hooks == hooks
    engine.detach()
