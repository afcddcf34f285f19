"""RMSNorm against float64 truth and plain torch."""

from __future__ import annotations

import pytest
import torch

from slideformer_backend.kernels import rms_norm as module
from slideformer_backend.kernels import rms_norm_backward, twins
from slideformer_backend.kernels.column_sum import column_sum
from slideformer_backend.kernels.rms_norm import NormConfig, rms_norm, rms_norm_add
from tests.kernels.truth import DEVICE, check

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def llama(x, weight, eps, offset):
    """As transformers' LlamaRMSNorm; truth when everything is float64."""
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) if weight is None else weight * wide.to(x.dtype)


def gemma(x, weight, eps, offset):
    """As transformers' GemmaRMSNorm."""
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (offset + weight.to(wide.dtype))).to(x.dtype)


def run(function, tensors, frozen=()):
    leaves = [
        None if x is None else x.clone().requires_grad_(n not in frozen) for n, x in zip("xrw", tensors, strict=True)
    ]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(5)
    upstream = [torch.randn(o.shape, generator=generator).to(DEVICE, torch.bfloat16).to(o.dtype) for o in outputs]
    pairs = [(o, u) for o, u in zip(outputs, upstream, strict=True) if o.requires_grad]
    torch.autograd.backward(*zip(*pairs, strict=True))
    return [*(o.detach() for o in outputs), *(None if x is None else x.grad for x in leaves)]


def inputs(shape, dtype, *, residual=False, weight=True, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def make(*size):
        return torch.randn(*size, generator=generator).to(DEVICE, dtype)

    return [make(*shape) * 3, make(*shape) if residual else None, make(shape[-1]) if weight else None]


def compare(tensors, style, eps=1e-6, frozen=()):
    offset = 1.0 if style is gemma else 0.0

    def ours(x, r, w):
        return rms_norm(x, w, eps, offset) if r is None else rms_norm_add(x, r, w, eps, offset)

    def torchs(x, r, w):
        return style(x, w, eps, offset) if r is None else (style(x + r, w, eps, offset), x + r)

    found, base = run(ours, tensors, frozen), run(torchs, tensors, frozen)
    truth = run(torchs, [None if x is None else x.double() for x in tensors], frozen)
    for number, values in enumerate(zip(found, base, truth, strict=True)):
        check(f"result {number}", *values)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("style", [llama, gemma], ids=["llama", "gemma"])
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 64), (2, 3, 100), (3, 2049), (33, 48)], ids=str)
def test_equals_truth(shape, residual, style, dtype):
    compare(inputs(shape, dtype, residual=residual), style)


@pytest.mark.parametrize("frozen", ["x", "w", "xr"])
@pytest.mark.parametrize("residual", [False, True])
def test_frozen_inputs(frozen, residual):
    compare(inputs((4, 32), torch.float32, residual=residual), llama, frozen=frozen)


@pytest.mark.parametrize("residual", [False, True])
def test_without_weight(residual):
    compare(inputs((4, 32), torch.float32, residual=residual, weight=False), llama)


def test_only_the_sum_is_used():
    x, r, w = inputs((3, 8), torch.float32, residual=True)
    x.requires_grad_()
    rms_norm_add(x, r, w)[1].sum().backward()
    assert (x.grad == 1).all()


def test_no_row():
    compare(inputs((0, 32), torch.float32), llama)


def test_rows_of_zeros_and_huge_values():
    x, _, w = inputs((3, 32), torch.float32)
    x[0] = 0
    x[1] *= 1e15
    compare([x, None, w], llama)


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("eps", [0.0, 1], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
def test_bits_of_special_values(dtype, eps, residual):
    """Signed zeros, infinities, NaN, subnormals, ties of rounding: as plain torch's. 1/rms is a power of 2: exact."""
    tiny, most = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    step = torch.finfo(dtype).eps
    special = [0.0, tiny, tiny * step, tiny * step * 0.75, tiny * step / 4, tiny * (1 - step), 1 + step / 2]
    special += [1 + 1.5 * step, most, most / 2, most * (1 + step / 4), 1e-44, 3e38, torch.inf, torch.nan]
    weight = torch.tensor([sign * value for value in special for sign in (1, -1)] * 128, device=DEVICE)[:2048]
    signs = torch.tensor([1, -1, -1, 1]).repeat(512)
    order = torch.randperm(2048, generator=torch.Generator().manual_seed(2))
    x = torch.zeros(5, 2048)
    x[:, : (3 if eps else 1) * 512] = 2  # the mean square is 3, or 1
    x = (x * signs)[:, order]
    x[2, 7], x[3, 7], x[4, 7] = torch.inf, -torch.inf, torch.nan
    x = x.to(DEVICE, dtype)
    extra = torch.full_like(x, -0.0)
    found = rms_norm_add(x, extra, weight, eps)[0] if residual else rms_norm(x, weight, eps)
    expected = twins.rms_norm(x + extra if residual else x, weight, eps)
    is_nan = expected.isnan()
    assert (found.isnan() == is_nan).all()
    assert (found.view(torch.int16) == expected.view(torch.int16))[~is_nan].all()
    for kind in (expected == 0, expected.isinf(), is_nan, (expected != 0) & (expected.abs() < tiny)):
        assert kind[:2].any(), "none of a kind that is asked about"
    assert ((expected == 0) & expected.signbit()).any()


def test_strides():
    """Rows of a wider tensor are read where they lie; other strides are copied; gradients arrive transposed."""
    wide = torch.randn(4, 6, 64, device=DEVICE)
    w = torch.randn(32, device=DEVICE)
    for x in (wide[..., :32], wide.transpose(0, 1)[..., 32:], wide[..., ::2]):
        found = x.detach().clone().requires_grad_()
        plain = x.detach().clone().requires_grad_()
        torch.testing.assert_close(rms_norm(x, w), llama(x, w, 1e-6, 0))
        rms_norm(found, w).transpose(0, 1).mul(torch.arange(32, device=DEVICE)).sum().backward()
        llama(plain, w, 1e-6, 0).transpose(0, 1).mul(torch.arange(32, device=DEVICE)).sum().backward()
        torch.testing.assert_close(found.grad, plain.grad)


@pytest.mark.parametrize("columns", [1, 64, 1000, 3072, 4096, 30000, 65536])
@pytest.mark.parametrize("size", [2, 4])
def test_what_is_loaded_ahead_fits_into_shared_memory(columns, size):
    power = 1 << (columns - 1).bit_length()
    config = module.backward_config(columns, 3 * power * size)
    assert (config.stages - 1) * config.rows * 3 * power * size <= 1 << 16
    assert config.programs * config.warps == (24 if columns == 4096 else 16)
    assert (config.stages > 1) == (power * config.rows * size <= (1 << 16) // 3)


@pytest.mark.parametrize("columns", [1, 33, 100])
@pytest.mark.parametrize("rows", [1, 63, 130])
@pytest.mark.parametrize("dtype", DTYPES)
def test_column_sum(rows, columns, dtype):
    source = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    check("sum", column_sum(source, dtype), source.sum(0).to(dtype), source.double().sum(0))


@pytest.mark.parametrize("config", [NormConfig(1, 1, 1), NormConfig(4, 2, 3), NormConfig(2, 4, 1, stages=3)], ids=str)
def test_configurations(config, monkeypatch):
    monkeypatch.setattr(module, "forward_config", lambda columns, *_: config)
    monkeypatch.setattr(rms_norm_backward, "backward_config", lambda columns, *_: config)
    for columns in (40, 41, 64):  # a head and a tail, a tail with lanes to spare, a head alone
        compare(inputs((23, columns), torch.float32, residual=True), gemma)


def test_random_shapes():
    generator = torch.Generator().manual_seed(7)
    for seed in range(60):
        rows, columns = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((1, 20), (4, 300)))
        dtype, style = DTYPES[seed % 3], (llama, gemma)[seed // 3 % 2]
        compare(inputs((rows, columns), dtype, residual=seed % 4 == 0, seed=seed), style, eps=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_weight_with_16_bit_input(dtype):
    """Models that keep norms in fp32: the output has the dtype of the input, the weight's gradient is fp32."""
    x, _, w = inputs((5, 64), dtype)
    w = w.float()
    found = run(lambda x, r, w: rms_norm(x, w), [x, None, w])
    truth = run(lambda x, r, w: llama(x, w, 1e-6, 0), [x.double(), None, w.double()])
    assert found[0].dtype == dtype
    assert found[3].dtype == torch.float32
    for mine, true in zip(found, truth, strict=True):
        if true is not None:
            torch.testing.assert_close(mine.double(), true, rtol=2e-2, atol=2e-2)
