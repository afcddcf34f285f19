"""Rotary embedding against float64 truth and plain torch."""

from __future__ import annotations

import pytest
import torch

from slideformer_backend.kernels import rotary as module
from slideformer_backend.kernels.rotary import RotaryConfig, rotary
from tests.kernels.truth import DEVICE, check

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def angles(batch, length, width, dtype=torch.float32):
    """cos and sin as transformers makes them: the frequencies twice."""
    frequencies = 100.0 ** (-torch.arange(0, width, 2) / width)
    position = torch.arange(length)[None, :, None] + 3 * torch.arange(batch)[:, None, None]
    table = torch.cat([position * frequencies] * 2, -1)
    return table.cos().to(DEVICE, dtype), table.sin().to(DEVICE, dtype)


def plain(q, k, cos, sin, interleaved):
    """transformers' apply_rotary_pos_emb (Llama; Cohere when interleaved), with partial width as in GPT-NeoX."""
    cos, sin = cos.to(q.dtype).unsqueeze(1), sin.to(q.dtype).unsqueeze(1)
    width = cos.shape[-1]
    if interleaved:
        cos, sin = (t[..., : width // 2].repeat_interleave(2, -1) for t in (cos, sin))

    def rotate_half(x):
        if interleaved:
            return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)

    def turn(x):
        turned, rest = x[..., :width], x[..., width:]
        return torch.cat([turned * cos + rotate_half(turned) * sin, rest], -1)

    return turn(q), turn(k)


def run(function, q, k):
    q, k = q.clone().requires_grad_(), k.clone().requires_grad_()
    outputs = function(q, k)
    generator = torch.Generator().manual_seed(2)
    torch.autograd.backward(
        outputs, [torch.randn(o.shape, generator=generator).bfloat16().to(DEVICE, o.dtype) for o in outputs]
    )
    return [*(o.detach() for o in outputs), q.grad, k.grad]


def compare(q, k, cos, sin, interleaved=False):
    found = run(lambda q, k: rotary(q, k, cos, sin, interleaved), q, k)
    base = run(lambda q, k: plain(q, k, cos, sin, interleaved), q, k)
    truth = run(lambda q, k: plain(q, k, cos.double(), sin.double(), interleaved), q.double(), k.double())
    for name, *values in zip(("q", "k", "dq", "dk"), found, base, truth, strict=True):
        check(name, *values)


def inputs(batch, heads, key_heads, length, size, dtype=torch.float32, seed=0):
    """Transposed views, as attention layers make them."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, length, count, size, generator=generator).to(DEVICE, dtype).transpose(1, 2)
        for count in (heads, key_heads)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(
    ("shape", "width"),
    [((1, 1, 1, 1, 2), 2), ((2, 4, 4, 3, 16), 16), ((2, 6, 2, 5, 12), 12), ((2, 3, 1, 4, 20), 8)],
    ids=["least", "many heads", "grouped", "partial"],
)
def test_equals_truth(shape, width, interleaved, dtype):
    compare(*inputs(*shape, dtype=dtype), *angles(shape[0], shape[3], width), interleaved)


def test_one_table_for_all_sequences():
    q, k = inputs(3, 2, 1, 5, 8)
    cos, sin = angles(1, 5, 8)
    compare(q, k, cos, sin)
    compare(q, k, cos.expand(3, 5, 8), sin.expand(3, 5, 8))


def test_angles_in_bf16():
    compare(*inputs(2, 2, 1, 5, 8, dtype=torch.bfloat16), *angles(2, 5, 8, torch.bfloat16))


def test_memory_order_is_that_of_the_projection():
    """[batch, length, heads, D] in memory, so that what follows meets the strides it would have met."""
    q, k = inputs(2, 4, 2, 3, 8)
    for turned, given in zip(rotary(q, k, *angles(2, 3, 8)), (q, k), strict=True):
        assert turned.shape == given.shape
        assert turned.stride() == given.stride()


def test_any_strides():
    q, k = inputs(2, 4, 2, 3, 16)
    cos, sin = angles(2, 3, 8)
    found = rotary(q[..., ::2], k.contiguous()[..., :8], cos, sin)
    torch.testing.assert_close(found, plain(q[..., ::2], k[..., :8], cos, sin, False))


def test_no_token():
    compare(*inputs(2, 4, 2, 0, 8), *angles(2, 0, 8))


def test_inputs_are_not_changed():
    q, k = inputs(1, 2, 1, 3, 8)
    before = q.clone(), k.clone()
    rotary(q, k, *angles(1, 3, 8))
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


def test_configurations(monkeypatch):
    monkeypatch.setattr(module, "launch_config", lambda elements: RotaryConfig(1))
    compare(*inputs(2, 6, 2, 5, 12), *angles(2, 5, 12))


def test_random_shapes():
    generator = torch.Generator().manual_seed(4)

    def pick(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    for seed in range(60):
        size = 2 * pick(1, 20)
        width = size if seed % 2 else 2 * pick(1, size // 2 + 1)
        key_heads = pick(1, 3)
        batch, length = pick(1, 3), pick(1, 5)
        q, k = inputs(batch, key_heads * pick(1, 4), key_heads, length, size, DTYPES[seed % 3], seed)
        compare(q, k, *angles(batch, length, width), interleaved=seed % 4 > 1)
