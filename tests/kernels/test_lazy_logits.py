"""Lazy logits: every consumer gets what plain logits give it, and losses are made without them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import slideformer_backend.integrations.lazy_logits  # noqa: F401 - registers the fused losses
from slideformer_backend.errors import StaleGraphError
from slideformer_backend.integrations.lazy_logits_autograd import lazy_logits
from slideformer_backend.integrations.lazy_logits_tensor import LazyLogits, Source
from tests.kernels.truth import DEVICE, TOLERANCE, error

B, S, H, V = 2, 9, 16, 97


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(B, S, H, generator=generator)
    w, b = torch.randn(V, H, generator=generator), torch.randn(V, generator=generator)
    ids = torch.randint(0, V, (B, S), generator=generator)
    return [tensor.to(DEVICE) for tensor in (h, w, b, ids)]


@pytest.fixture
def computed(monkeypatch):
    """How often logits were computed."""
    calls = []
    real = Source.compute
    monkeypatch.setattr(Source, "compute", lambda self: (calls.append(self), real(self))[1])
    return calls


class OwnLoss(torch.autograd.Function):
    """A user's cross-entropy."""

    @staticmethod
    def forward(ctx, z, t):
        ctx.save_for_backward(z, t)
        return F.cross_entropy(z.reshape(-1, z.shape[-1]), t.reshape(-1))

    @staticmethod
    def backward(ctx, g):
        z, t = ctx.saved_tensors
        p = torch.softmax(z.float(), -1)
        p.view(-1, p.shape[-1])[torch.arange(t.numel(), device=p.device), t.reshape(-1)] -= 1
        return g * p / t.numel(), None


def shifted(z, ids, **options):
    return F.cross_entropy(z[:, :-1].reshape(-1, V).float(), ids[:, 1:].reshape(-1), **options)


def gradient_on_logits(z, ids):
    loss = shifted(z, ids)
    (of_logits,) = torch.autograd.grad(loss, z, retain_graph=True)
    return loss + of_logits.square().sum().detach()


def hook_after_the_loss(z, ids):
    loss = shifted(z, ids)
    z.register_hook(lambda g: g * 2)
    return loss


def retained(z, ids):
    z.retain_grad()
    loss = shifted(z, ids)
    loss.backward(retain_graph=True)
    return loss + z.grad.square().sum()


def in_place_on_a_view(z, ids):
    z[:, -1].zero_()
    return shifted(z, ids)


def view_in_place(z, ids):
    z.view(-1, V).mul_(0.5)
    return shifted(z, ids)


def in_place(z, ids):
    z.mul_(0.5)
    return shifted(z, ids)


def set_item(z, ids):
    z[..., 3] = -torch.inf
    return shifted(z, ids.clamp(min=4))


def masked_fill(z, ids):
    z.masked_fill_(ids[..., None] == 5, 0.1)
    return shifted(z, ids)


def unpacked(z, ids):
    return sum(row.logsumexp(-1).sum() for row in z) - z.gather(-1, ids[..., None]).sum()


def selective(z, ids):
    """As in TRL's experimental trainers on a CPU: row by row."""
    return pytest.importorskip("trl.trainer.utils").selective_log_softmax(z, ids).square().sum()


COMPUTED = {
    "gradient on the logits": gradient_on_logits,
    "hook after the loss": hook_after_the_loss,
    "hook": lambda z, ids: (z.register_hook(lambda g: g * 2), shifted(z, ids))[1],
    "hook on a view": lambda z, ids: (
        (y := z.view(-1, V)).register_hook(lambda g: g * 2),
        F.cross_entropy(y, ids.view(-1)),
    )[1],
    "retained gradient": retained,
    "in place on a view": in_place_on_a_view,
    "view in place": view_in_place,
    "in place": in_place,
    "item assignment": set_item,
    "masked fill": masked_fill,
    "own Function": lambda z, ids: OwnLoss.apply(z, ids),
    "vmap": lambda z, ids: torch.func.vmap(lambda y: y.sum())(z).sum(),
    "softmax": lambda z, ids: z.softmax(-1)[..., 3].sum(),
    "entropy": lambda z, ids: -(z.log_softmax(-1).exp() * z.log_softmax(-1)).sum(),
    "top k": lambda z, ids: z.topk(3, -1).values.sum(),
    "columns": lambda z, ids: z[..., 2:7].square().sum() + z.transpose(1, 2).select(1, 4).sum(),
    "concatenated": lambda z, ids: F.cross_entropy(torch.cat([z, z]).view(-1, V), ids.repeat(2, 1).view(-1)),
    "soft targets": lambda z, ids: F.cross_entropy(z.view(-1, V), torch.softmax(z.detach().view(-1, V) * 2, -1)),
    "classes in dim 1": lambda z, ids: F.cross_entropy(z.transpose(1, 2), ids),
    "shifted by a tensor": lambda z, ids: F.cross_entropy((z + z.detach().mean()).view(-1, V), ids.view(-1)),
    "scaled by a tensor": lambda z, ids: F.cross_entropy((z * torch.tensor(0.5)).view(-1, V), ids.view(-1)),
    "double precision": lambda z, ids: F.cross_entropy(z.double().view(-1, V), ids.view(-1)).float(),
    "loss and values": lambda z, ids: shifted(z, ids) + z.square().mean(),
    "values and loss": lambda z, ids: z.square().mean() + shifted(z, ids),
    "mean over all": lambda z, ids: z.sum() + z.mean(-1).sum(),
    "matrix product": lambda z, ids: (z @ z.mT).sum(),
}

PARTLY_FUSED = (
    "gradient on the logits",
    "hook after the loss",
    "hook",
    "retained gradient",
    "own Function",
    "loss and values",
)
"""Their loss is a fused one; the gradient of the logits, or what else is done with them, is computed."""

FUSED = {
    "shifted": shifted,
    "sum over items": lambda z, ids: shifted(z, ids, reduction="sum") / 7,
    "per token": lambda z, ids: shifted(z, ids, reduction="none").square().sum(),
    "smoothing": lambda z, ids: shifted(z, ids, label_smoothing=0.1),
    "class weights": lambda z, ids: shifted(z, ids, weight=torch.linspace(0.1, 2, V, device=z.device)),
    "ignored": lambda z, ids: shifted(z, torch.where(ids % 3 == 0, -100, ids)),
    "ignored class": lambda z, ids: shifted(z, ids, ignore_index=int(ids[0, 1])),
    "transformers' loss": lambda z, ids: F.cross_entropy(
        z.float().view(-1, V), F.pad(ids, (0, 1), value=-100)[..., 1:].contiguous().view(-1), reduction="sum"
    ),
    "loss module": lambda z, ids: torch.nn.CrossEntropyLoss()(z.contiguous().view(-1, V), ids.view(-1)),
    "scaled": lambda z, ids: F.cross_entropy((z / 3 * 2.0).view(-1, V), ids.view(-1)),
    "softcap": lambda z, ids: F.cross_entropy((torch.tanh(z / 5.0) * 5.0).float().view(-1, V), ids.view(-1)),
    "softcap of scaled": lambda z, ids: F.cross_entropy((torch.tanh(z * 0.3 / 5) * 4).view(-1, V), ids.view(-1)),
    "mask of tokens": lambda z, ids: F.cross_entropy(z[ids % 2 == 0], ids[ids % 2 == 0]),
    "rows by number": lambda z, ids: F.cross_entropy(z[:, [1, 3]].reshape(-1, V), ids[:, [1, 3]].reshape(-1)),
    "one token": lambda z, ids: F.cross_entropy(z[:, 4], ids[:, 4]),
    "two losses": lambda z, ids: shifted(z, ids) + 0.3 * F.cross_entropy(z.view(-1, V), ids.flip(1).reshape(-1)),
    "log-probabilities": lambda z, ids: z.float().log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1).square().sum(),
    "logits of the target": lambda z, ids: z.gather(-1, ids[..., None]).square().sum(),
    "logsumexp": lambda z, ids: torch.logsumexp(z[:, 1:], -1).square().mean() + z.logsumexp(-1, keepdim=True).sum(),
    "iterated": unpacked,
    "selective log-softmax": selective,
    "checkpoint": lambda z, ids: checkpoint(shifted, z, ids, use_reentrant=False),
    "reentrant checkpoint": lambda z, ids: checkpoint(shifted, z, ids, use_reentrant=True),
    "label smoother": lambda z, ids: (lambda p: p.gather(-1, ids[..., None]).mean() * 0.9
                                      + 0.1 / V * p.sum(-1, keepdim=True, dtype=torch.float32).mean())(
        -F.log_softmax(z, dim=-1)
    ),
}  # fmt: skip


def both(consumer, data, *, bias=False, frozen=()):
    """[loss, gradient of hidden, weight, bias] with plain and with lazy logits."""
    h, w, b, ids = data
    results = []
    for head in (F.linear, lazy_logits):
        leaves = [t.clone().requires_grad_(n not in frozen) for n, t in zip("hwb", (h, w, b), strict=True)]
        logits = head(leaves[0].tanh(), leaves[1], leaves[2] if bias else None)
        loss = consumer(logits, ids)
        if loss.requires_grad:
            loss.backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
        del logits
    return zip(*results, strict=True)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", COMPUTED)
def test_consumers_get_exactly_the_plain_logits(name, bias, data):
    for plain, lazy in both(COMPUTED[name], data, bias=bias):
        if name in PARTLY_FUSED:
            torch.testing.assert_close(lazy, plain)
        else:
            assert plain is lazy is None or torch.equal(plain, lazy), name


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", FUSED)
def test_losses_are_fused(name, bias, data, computed):
    for plain, lazy in both(FUSED[name], data, bias=bias):
        torch.testing.assert_close(lazy, plain, rtol=5e-5, atol=1e-5)
    assert computed == [], f"{name} computed logits"


@pytest.mark.parametrize("frozen", ["h", "w", "hw"])
@pytest.mark.parametrize("name", ["shifted", "per token", "mask of tokens", "two losses"])
def test_frozen_parts(name, frozen, data, computed):
    for plain, lazy in both(FUSED[name], data, frozen=frozen):
        torch.testing.assert_close(lazy, plain, rtol=5e-5, atol=1e-5)
    assert computed == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["shifted", "log-probabilities", "per token"])
def test_autocast(name, dtype, data, computed):
    h, w, _, ids = data
    results = []
    for head in (F.linear, lazy_logits):
        leaves = [t.clone().requires_grad_() for t in (h, w)]
        with torch.autocast(DEVICE.type, dtype=dtype):
            logits = head(*leaves, None)
            assert logits.dtype == dtype
            loss = FUSED[name](logits, ids)
        loss.backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for plain, lazy in zip(*results, strict=True):
        assert plain.dtype == lazy.dtype
        torch.testing.assert_close(lazy, plain, rtol=3e-2, atol=2e-2)
    assert computed == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_log_probabilities_of_rows_are_as_near_to_the_truth(dtype, data, computed):
    """Each row's gradient is rounded on its own there, so bits say nothing."""
    h, w, _, ids = data
    results = []
    for head, kind in ((F.linear, torch.float64), (F.linear, torch.float32), (lazy_logits, torch.float32)):
        leaves = [t.to(kind, copy=True).requires_grad_() for t in (h, w)]
        with torch.autocast(DEVICE.type, dtype=dtype, enabled=kind == torch.float32):
            loss = selective(head(*leaves, None), ids)
        loss.backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for truth, plain, lazy in zip(*results, strict=True):
        assert plain.dtype == lazy.dtype
        assert error(lazy, truth) <= error(plain, truth) + TOLERANCE[dtype]
    assert computed == []


def test_metadata_needs_no_values(data, computed):
    h, w, _, _ = data
    z = lazy_logits(h, w, None)
    y = z[:, 2:].float()
    assert isinstance(y, LazyLogits)
    assert z.shape == (B, S, V)
    assert (z.dtype, z.device, z.dim(), z.numel()) == (torch.float32, h.device, 3, B * S * V)
    assert y.stride() == F.linear(h, w)[:, 2:].stride()
    assert y.storage_offset() == 2 * V
    assert z.view(-1, V).is_contiguous()
    assert not y.is_contiguous()
    assert computed == []


def test_values_are_computed_once(data, computed):
    h, w, _, _ = data
    z = lazy_logits(h, w, None)
    plain = F.linear(h, w)
    assert torch.equal(z, plain)
    assert torch.equal(z[0], plain[0])
    assert z.tolist() == plain.tolist()
    assert (z.numpy(force=True) == plain.numpy(force=True)).all()
    assert torch.equal(z.argmax(-1), plain.argmax(-1))
    assert torch.equal(z.cpu(), plain.cpu())
    assert "LazyLogits" not in repr(z)
    assert len(computed) == 1


def test_copies_and_pickles_are_plain_tensors(data):
    h, w, _, _ = data
    z = lazy_logits(h, w.requires_grad_(), None)
    for made in (copy.deepcopy(z.detach()), pickle.loads(pickle.dumps(z))):
        assert type(made) is torch.Tensor
        assert torch.equal(made, F.linear(h, w))


def test_mean_of_nothing(data):
    def nothing(z, ids):
        return F.cross_entropy(z.view(-1, V), torch.full_like(ids, -100).view(-1))

    (plain, lazy), *gradients = both(nothing, data)
    assert plain.isnan()
    assert lazy.isnan()
    for plain, lazy in gradients:
        assert plain is lazy is None or torch.equal(plain, lazy)


def test_no_gradient_is_made_without_grad_mode(data, computed, monkeypatch):
    from slideformer_backend.kernels import chunks

    h, w, _, ids = data
    monkeypatch.setattr(chunks, "_add_product", None)
    with torch.no_grad():
        loss = shifted(lazy_logits(h.requires_grad_(), w.requires_grad_(), None), ids)
    assert not loss.requires_grad
    detached = shifted(lazy_logits(h, w, None).detach(), ids)
    assert not detached.requires_grad
    assert computed == []


def test_backward_twice(data):
    h, w, _, ids = data
    h.requires_grad_()
    loss = shifted(lazy_logits(h, w, None), ids)
    first = torch.autograd.grad(loss, h, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(loss, h)[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, h)


def test_double_backward(data):
    """Through computed logits, as through plain ones."""
    h, w, _, _ = data
    results = []
    for head in (F.linear, lazy_logits):
        leaf = h.clone().requires_grad_()
        (first,) = torch.autograd.grad(head(leaf, w, None).square().sum(), leaf, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    assert torch.equal(*results)


def test_stale_logits_raise(data):
    h, w, _, ids = data
    is_stale = []
    z = lazy_logits(h.requires_grad_(), w, None, is_stale=lambda: bool(is_stale))
    loss = shifted(z, ids)
    is_stale.append(True)
    with pytest.raises(StaleGraphError, match="before optimizer.step"):
        z.sum()
    with pytest.raises(StaleGraphError):
        loss.backward()


def test_no_large_tensor_is_made():
    """No operation below autograd gives a tensor of the size of the logits, forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple) else (result,):
                if type(tensor) is torch.Tensor and tensor.device.type != "meta" and tensor.is_floating_point():
                    sizes.append(tensor.numel())
            return result

    vocabulary, tokens = 4096, 64
    h = torch.randn(1, tokens, 4, device=DEVICE, requires_grad=True)
    w = torch.randn(vocabulary, 4, device=DEVICE, requires_grad=True)
    ids = torch.randint(0, vocabulary, (1, tokens), device=DEVICE)
    from slideformer_backend.kernels import chunks

    before = chunks.CHUNK_BYTES
    chunks.CHUNK_BYTES = vocabulary * 4 * 8
    try:
        with Watch():
            z = lazy_logits(h, w, None)
            loss = F.cross_entropy(z[:, :-1].float().reshape(-1, vocabulary), ids[:, 1:].reshape(-1))
            loss.backward()
    finally:
        chunks.CHUNK_BYTES = before
    assert max(sizes) <= 8 * vocabulary + w.numel(), "a chunk may also use the room of the weight's gradient"
