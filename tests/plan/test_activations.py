"""What the meta device says of a unit is what a run with data does."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from slideformer_backend.integrations.meta_model import attention_operations, load_meta
from slideformer_backend.plan.activations import LiveBytes, estimate_unit, observe_units
from slideformer_backend.plan.partition import partition
from tests.engine.test_residency import Net


def saved_bytes(block, inputs):
    """Bytes of what autograd keeps of a forward with data, parameters and inputs not counted."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), *inputs)}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(*inputs)
    kept.pop(output.untyped_storage().data_ptr(), None)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_bytes_are_those_of_autograd(dtype):
    with torch.device("meta"):
        meta = Net(width=48, layers=3, vocabulary=50).to(dtype)
    tokens = torch.zeros(4, 16, dtype=torch.long, device="meta")
    parts = partition(meta).sliding
    found = observe_units(meta, parts, lambda: meta(tokens), lambda: 0.0)
    real = Net(width=48, layers=3, vocabulary=50).to(dtype)
    hidden = torch.randn(4, 16, 48).to(dtype).requires_grad_()
    statistics = 2 * 4 * 16 * (4 - dtype.itemsize)  # of the norm: a GPU keeps them in fp32, a CPU in the dtype
    assert [unit.saved for unit in found] == [saved_bytes(real.layers[0], [hidden]) + statistics] * 3
    assert {unit.boundary for unit in found} == {hidden.numel() * dtype.itemsize}
    assert {unit.operations for unit in found} == {2.0 * 4 * 16 * (48 * 96 * 2)}
    assert all(unit.peak > unit.saved for unit in found)
    assert all(parameter.grad is None for parameter in meta.parameters())


def test_a_recompute_repeats_what_torch_repeats():
    """Operations that a checkpointed backward runs beyond a plain one, counted on data."""

    def counted(run):
        block, hidden = Net(width=48, layers=3, vocabulary=50).layers[0], torch.randn(4, 16, 48, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            run(block, hidden).sum().backward()
        return counter.get_total_flops()

    plain = counted(lambda block, hidden: block(hidden))
    again = counted(lambda block, hidden: checkpoint(block, hidden, use_reentrant=False)) - plain
    with torch.device("meta"):
        meta = Net(width=48, layers=3, vocabulary=50)
    tokens = torch.zeros(4, 16, dtype=torch.long, device="meta")
    found = observe_units(meta, partition(meta).sliding, lambda: meta(tokens), lambda: 0.0)
    assert {unit.again for unit in found} == {again}
    assert 0 < again < found[0].operations


def test_live_bytes_return_to_zero():
    live = LiveBytes()
    with live:
        first = torch.empty(1000, device="meta")
        second = first * 2
        view = second[:10]
        assert (live.live, live.peak) == (8000, 8000)
        del first
        assert live.live == 4000
        del second
        assert live.live == 4000  # the view holds it
        del view
    assert (live.live, live.peak) == (0, 8000)


def test_a_3b_layer_keeps_what_was_measured(described):
    """84.7 GiB without and 15.3 with recompute on an H200: 84.2 kB per token and layer, with Liger's kernels."""
    _, parts, activity = described("llama-3b", 32)
    assert len(set(activity)) == 1
    assert activity[0].saved / 32768 == pytest.approx(84_200, rel=0.01)
    assert activity[0].boundary == 32768 * 3072 * 2
    # 2 operations per weight, and causal attention at half of its square
    expected = 32768 * (2 * sum(spec.shape.numel() for spec in parts.sliding[0].specs) + 2 * 3072 * 1024)
    assert activity[0].operations == pytest.approx(expected, rel=0.001)
    assert activity[0].operations - activity[0].again == 32768 * 2 * 3072 * 8192


def test_layers_that_run_their_own_code_keep_more(described):
    fused, own = described("llama-3b", 2)[2][0], described("llama-3b", 2, fused=False)[2][0]
    assert own.saved > 1.3 * fused.saved
    assert own.operations == fused.operations


@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "gemma2", "mixtral", "phi3"])
def test_other_architectures_can_be_looked_at(tmp_path, kind):
    small = {"gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 4}}.get(
        kind,
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16},
    )  # fmt: skip
    values = {"model_type": kind, "vocab_size": 128, "pad_token_id": 0, **small}
    (tmp_path / "config.json").write_text(json.dumps(values))
    meta = load_meta(str(tmp_path))
    parts = partition(meta.model)
    tokens = torch.zeros(2, 32, dtype=torch.long, device="meta")
    found = observe_units(meta.model, parts.sliding, lambda: meta.model(tokens), attention_operations)
    assert len(found) == 2
    assert all(unit.operations > 0 and unit.saved > 0 and unit.boundary == 2 * 32 * 64 * 2 for unit in found)
    guess = estimate_unit(parts.sliding[0], 64)
    assert guess.is_estimate
    if kind != "mixtral":  # a few experts of many run for a token
        assert guess.operations == pytest.approx(found[0].operations, rel=0.3)
