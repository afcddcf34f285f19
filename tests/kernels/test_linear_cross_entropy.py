"""Linear cross-entropy against float64 truth and plain torch: options, edge cases, dtypes, shapes, memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch.nn import functional as F

from slideformer_backend.kernels import chunks, twins
from slideformer_backend.kernels.linear_cross_entropy import linear_cross_entropy, linear_token_losses
from slideformer_backend.kernels.loss import LossOptions
from slideformer_backend.kernels.softmax_gradient import LaunchConfig, softmax_gradient_
from tests.kernels.truth import DEVICE, TOLERANCE, check, error

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass
class Case:
    """One head and one batch. ``run`` gives the loss and gradients of hidden, weight and bias."""

    tokens: int = 7
    hidden: int = 16
    vocabulary: int = 97
    dtype: torch.dtype = torch.float32
    bias: bool = False
    ignored: float = 0.3
    options: LossOptions = field(default_factory=LossOptions)
    class_weights: bool = False
    seed: int = 0

    def tensors(self):
        generator = torch.Generator().manual_seed(self.seed)

        def make(*shape):
            return torch.randn(*shape, generator=generator)

        h = make(self.tokens, self.hidden) * 2
        w = make(self.vocabulary, self.hidden) / self.hidden**0.5
        b = make(self.vocabulary) if self.bias else None
        t = torch.randint(0, self.vocabulary, (self.tokens,), generator=generator)
        t[torch.rand(self.tokens, generator=generator) < self.ignored] = self.options.ignore_index
        c = torch.rand(self.vocabulary, generator=generator) + 0.1 if self.class_weights else None
        h, w, b = (None if x is None else x.to(DEVICE, self.dtype) for x in (h, w, b))
        return h, w, b, t.to(DEVICE), None if c is None else c.to(DEVICE)


def plain_losses(h, w, b, t, c, options):
    """Per-token losses as a model in plain torch computes them: logits in its dtype, loss in at least fp32."""
    logits = F.linear(h, w, b)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    z = logits * options.scale
    if options.softcap:
        z = options.softcap * torch.tanh(z / options.softcap)
    c = None if c is None else c.to(z.dtype)
    loss = F.cross_entropy(
        z, t, c, ignore_index=options.ignore_index, label_smoothing=options.smoothing, reduction="none"
    )
    return loss + options.z_loss * torch.where(t != options.ignore_index, torch.logsumexp(z, -1) ** 2, 0)


def plain(h, w, b, t, c, options, reduction):
    losses = plain_losses(h, w, b, t, c, options)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    counted = (t != options.ignore_index).to(losses.dtype)
    divisor = counted if c is None else counted * c.to(losses.dtype)[t.clamp(0)]
    return losses.sum() / divisor.sum().clamp_min(1e-30)


def gradients(function, h, w, b, frozen=()):
    """Loss and gradients; a gradient of ones-like weights of fixed values flows into losses that are not scalar."""
    leaves = [
        None if x is None else x.detach().clone().requires_grad_(name not in frozen)
        for name, x in zip("hwb", (h, w, b), strict=True)
    ]
    loss = function(*leaves)
    if any(x is not None and x.requires_grad for x in leaves):
        loss.backward(torch.linspace(0.5, 1.5, loss.numel(), device=DEVICE).view_as(loss).to(loss.dtype))
    return [loss.detach(), *(None if x is None else x.grad for x in leaves)]


def compare(case, reduction="mean", frozen=(), tokens=3):
    h, w, b, t, c = case.tensors()
    options = case.options._replace(class_weight=c)

    def ours(h, w, b):
        return linear_cross_entropy(h, w, t, b, options, reduction=reduction, tokens=tokens)

    def torchs(h, w, b):
        return plain(h, w, b, t, c, case.options, reduction)

    found = gradients(ours, h, w, b, frozen)
    base = gradients(torchs, h, w, b, frozen)
    truth = gradients(torchs, *(None if x is None else x.double() for x in (h, w, b)), frozen)
    for name, *values in zip(("loss", "hidden", "weight", "bias"), found, base, truth, strict=True):
        check(name, *values)
    return found


OPTIONS = {
    "plain": {},
    "smoothing": {"options": LossOptions(smoothing=0.1)},
    "z-loss": {"options": LossOptions(z_loss=1e-2)},
    "scale": {"options": LossOptions(scale=0.25)},
    "softcap": {"options": LossOptions(softcap=3.0)},
    "everything": {
        "options": LossOptions(ignore_index=5, smoothing=0.2, z_loss=1e-2, scale=1.5, softcap=4.0),
        "class_weights": True,
        "bias": True,
    },
    "class weights": {"class_weights": True},
    "bias": {"bias": True},
    "another ignore_index": {"options": LossOptions(ignore_index=3)},
    "all ignored": {"ignored": 1.1},
    "none ignored": {"ignored": 0.0},
    "one token": {"tokens": 1, "ignored": 0.0},
    "no token": {"tokens": 0},
    "vocabulary of 257": {"vocabulary": 257},
    "vocabulary of 1": {"vocabulary": 1, "ignored": 0.0},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_truth(name, reduction, dtype):
    compare(replace(Case(dtype=dtype), **OPTIONS[name]), reduction)


def test_all_ignored_gives_zero_and_no_nan():
    loss, *found = compare(Case(ignored=1.1, bias=True))
    assert loss == 0
    assert all((gradient == 0).all() for gradient in found)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("frozen", ["h", "w", "b", "hw", "wb", "hwb"])
def test_frozen_parts_get_no_gradient(frozen, reduction, monkeypatch):
    products = []
    real = chunks._add_product
    monkeypatch.setattr(chunks, "_add_product", lambda *a, **k: (products.append(a), real(*a, **k)))
    compare(Case(bias=True), reduction, frozen)
    assert bool(products) == ("w" not in frozen), "the product for a frozen head's gradient is not computed"


@pytest.mark.parametrize("vocabulary", [65537, 262208])
def test_large_vocabularies(vocabulary):
    compare(Case(tokens=3, hidden=4, vocabulary=vocabulary, dtype=torch.bfloat16, ignored=0.0), tokens=2)


@pytest.mark.gpu
def test_offsets_beyond_int32():
    """70,000 rows of 65,537 classes: the last row starts beyond 2^32 elements."""
    logits = torch.randn(16, 65600, dtype=torch.bfloat16, device=DEVICE).repeat(70_000 // 16, 1)
    targets = torch.randint(0, 65537, (len(logits),), device=DEVICE)
    first, last = logits[:16].clone(), logits[-16:].clone()
    result = softmax_gradient_(logits, targets, 65537, LossOptions(), gradient_scale=1.0)
    for rows, part, at in ((first, logits[:16], slice(0, 16)), (last, logits[-16:], slice(-16, None))):
        expected = twins.softmax_gradient_(rows, targets[at], 65537, LossOptions(), gradient_scale=1.0)
        assert error(result.loss[at], expected.loss) < 1e-5
        assert error(part, rows) < 1e-2


def test_random_shapes():
    """Shapes, options and dtypes drawn at random; the seed is fixed, each case prints itself when it fails."""
    generator = torch.Generator().manual_seed(11)

    def pick(*choices):
        return choices[int(torch.randint(0, len(choices), (), generator=generator))]

    for seed in range(200):
        case = Case(
            tokens=pick(1, 2, 3, 5, 8),
            hidden=pick(1, 3, 8, 17),
            vocabulary=pick(2, 31, 64, 65, 129, 300),
            dtype=pick(*DTYPES),
            bias=pick(True, False),
            ignored=pick(0.0, 0.5),
            options=LossOptions(pick(-100, 0), pick(0.0, 0.1), pick(0.0, 1e-3), pick(1.0, 0.5), pick(0.0, 5.0)),
            class_weights=pick(True, False),
            seed=seed,
        )
        try:
            compare(case, pick("mean", "sum", "none"), tokens=pick(None, 1, 2, 4))
        except AssertionError as failure:
            raise AssertionError(f"{case}: {failure}") from None


def test_inputs_need_not_be_contiguous():
    h, w, _, t, _ = Case(tokens=12).tensors()
    wide, tall = torch.cat([h, h], 1), torch.cat([w, w], 1)
    stepped = torch.stack([t, t], 1)[:, 0]
    apart = linear_cross_entropy(wide[:, :16].view(3, 4, 16).transpose(0, 1), tall[:, :16], stepped.view(3, 4).t())
    together = linear_cross_entropy(h, w, t)
    torch.testing.assert_close(apart, together)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast(dtype, reduction):
    """fp32 weights under autocast: products in the autocast dtype, gradients in fp32."""
    h, w, b, t, c = Case(bias=True).tensors()

    def within(function):
        def run(h, w, b):
            with torch.autocast(DEVICE.type, dtype=dtype):
                return function(h, w, b)

        return run

    found = gradients(within(lambda h, w, b: linear_cross_entropy(h, w, t, b, reduction=reduction, tokens=3)), h, w, b)
    base = gradients(within(lambda h, w, b: plain(h, w, b, t, c, LossOptions(), reduction)), h, w, b)
    doubles = (x.double() for x in (h, w, b))
    truth = gradients(lambda h, w, b: plain(h, w, b, t, c, LossOptions(), reduction), *doubles)
    for name, mine, torchs, true in zip(("loss", "hidden", "weight", "bias"), found, base, truth, strict=True):
        assert mine.dtype == torch.float32, name
        assert error(mine, true) <= error(torchs, true) + TOLERANCE[dtype], name


def test_num_items_divides_the_sum():
    h, w, _, t, _ = Case().tensors()
    total = linear_cross_entropy(h, w, t, reduction="sum")
    for items in (13, torch.tensor(13), torch.tensor(13.0)):
        for reduction in ("sum", "mean"):
            torch.testing.assert_close(linear_cross_entropy(h, w, t, reduction=reduction, num_items=items), total / 13)


def test_error_of_the_weight_gradient_does_not_grow_with_chunks():
    h, w, _, t, _ = Case(tokens=96, dtype=torch.bfloat16, ignored=0.0).tensors()
    truth = gradients(lambda h, w, b: plain(h, w, b, t, None, LossOptions(), "sum"), h.double(), w.double(), None)[2]
    errors = []
    for tokens in (96, 1):
        found = gradients(
            lambda h, w, b, n=tokens: linear_cross_entropy(h, w, t, reduction="sum", tokens=n), h, w, None
        )
        errors.append(error(found[2], truth))
    assert errors[1] <= errors[0] * 1.05 + 1e-4


def test_gradient_is_added_to_a_present_one_exactly_once():
    h, w, _, t, _ = Case().tensors()
    w.requires_grad_()
    linear_cross_entropy(h, w, t).backward()
    once = w.grad.clone()
    linear_cross_entropy(h, w, t, tokens=2).backward()
    torch.testing.assert_close(w.grad, 2 * once)


def test_tied_weight_receives_both_gradients():
    _, w, _, t, _ = Case().tensors()
    ids = torch.arange(7, device=DEVICE)
    grads = []
    for function in (lambda h, w: linear_cross_entropy(h, w, t, tokens=3), lambda h, w: F.cross_entropy(h @ w.t(), t)):
        leaf = w.clone().requires_grad_()
        function(F.embedding(ids, leaf), leaf).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


def test_backward_twice():
    h, w, _, t, _ = Case().tensors()
    h.requires_grad_()
    w.requires_grad_()
    loss = linear_cross_entropy(h, w, t) * 0.5
    first = torch.autograd.grad(loss, (h, w), retain_graph=True)
    second = torch.autograd.grad(loss, (h, w))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, (h, w))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_weights_changed_before_backward_raise(reduction):
    h, w, _, t, _ = Case().tensors()
    w.requires_grad_()
    loss = linear_cross_entropy(h, w, t, reduction=reduction).sum()
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_gradient_is_made_without_grad_mode(monkeypatch):
    h, w, _, t, _ = Case().tensors()
    w.requires_grad_()
    monkeypatch.setattr(chunks, "_add_product", None)
    with torch.no_grad():
        loss = linear_cross_entropy(h, w, t)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, F.cross_entropy(h @ w.t(), t).detach())


def test_target_outside_the_vocabulary_gives_nan():
    h, w, _, t, _ = Case(ignored=0.0).tensors()
    t[1] = 97
    losses = linear_cross_entropy(h, w, t, reduction="none")
    assert losses.isnan().tolist() == [False, True, False, False, False, False, False]


def test_logsumexp_has_gradients():
    h, w, _, t, _ = Case(ignored=0.0).tensors()

    def ours(h, w, b):
        found = linear_token_losses(h, w, t, tokens=3)
        return found.lse.square().sum() + found.loss.sum()

    def truths(h, w, b):
        z = h @ w.t()
        return z.logsumexp(-1).square().sum() + F.cross_entropy(z, t, reduction="sum")

    for mine, true in zip(gradients(ours, h, w, None), gradients(truths, h.double(), w.double(), None), strict=True):
        if true is not None:
            assert error(mine, true) < 1e-5


def test_masked_classes():
    """Logits of -inf (from a bias) have probability 0, also where a whole block of a row is masked."""
    h, w, b, t, _ = Case(vocabulary=300, bias=True, ignored=0.0).tensors()
    b[:200] = -torch.inf
    t = t % 100 + 200
    found = gradients(lambda h, w, b: linear_cross_entropy(h, w, t, b), h, w, b)
    truth = gradients(lambda h, w, b: F.cross_entropy(F.linear(h, w, b), t), h.double(), w.double(), b.double())
    for mine, true in zip(found, truth, strict=True):
        assert error(mine, true) < 1e-5


def test_statistics():
    h, w, _, t, _ = Case(tokens=9).tensors()
    t[0] = (h[0] @ w.t()).argmax()
    found = linear_token_losses(h, w, t, with_statistics=True, tokens=4)
    log_probabilities = (h.double() @ w.double().t()).log_softmax(-1)
    counted = t != -100
    entropy = -(log_probabilities.exp() * log_probabilities).sum(-1) * counted
    on_top = (log_probabilities.argmax(-1) == t).float()
    assert error(found.entropy, entropy) < 1e-6
    assert torch.equal(found.is_top, on_top)
    assert error(found.lse, (h.double() @ w.double().t()).logsumexp(-1) * counted) < 1e-6
    assert on_top.sum() >= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "shapes do not fit"),
        ({"weight": torch.zeros(9, 5)}, "shapes do not fit"),
        ({"weight": torch.zeros(9, 4, dtype=torch.bfloat16)}, "dtypes differ"),
        ({"reduction": "average"}, "expected mean, sum or none"),
    ],
)
def test_mistakes(change, message):
    good = {"hidden": torch.zeros(2, 4), "weight": torch.zeros(9, 4), "targets": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{**good, **change})


def test_kernel_equals_twin():
    """Every switch of the kernel against its twin on the same logits, with loops of several blocks."""
    torch.manual_seed(3)
    weights = torch.rand(200, device=DEVICE)
    targets = torch.tensor([0, 199, -100, 64, 5], device=DEVICE)
    upstream = torch.randn(5, device=DEVICE)
    for options in (LossOptions(), LossOptions(-100, 0.1, 0.01, 1.3, 4.0), LossOptions(5, 0.1, class_weight=weights)):
        for lse in (None, "known"):
            logits = torch.randn(5, 256, device=DEVICE) * 3
            kwargs = {"gradient_scale": 2.0, "upstream": upstream, "with_statistics": lse is None}
            if lse:
                kwargs["upstream_of_lse"] = torch.randn(5, device=DEVICE)
                kwargs["known_lse"] = twins.softmax_gradient_(logits, targets, 200, options).lse
            mine, other = logits.clone(), logits.clone()
            mine[:, 200:] = torch.nan
            found = softmax_gradient_(
                mine, targets, 200, options, config=LaunchConfig(64, 1, ahead=lse is None), **kwargs
            )
            expected = twins.softmax_gradient_(other, targets, 200, options, **kwargs)
            torch.testing.assert_close(mine, other, equal_nan=True)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, equal_nan=True)


def test_chunk_size(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1 << 20)
    cpu = torch.device("cpu")
    assert chunks.chunk_tokens(10_000, 1024, cpu) == 1024
    assert chunks.chunk_tokens(10_000, 1000, cpu) == 1024
    assert chunks.chunk_tokens(1500, 1024, cpu) == 768, "two equal chunks"
    assert chunks.chunk_tokens(10_000, 1024, cpu, spare=1 << 19) == 1536, "room that is needed later"
    assert chunks.chunk_tokens(10_000, 1024, cpu, spare=1 << 30) == 2048, "but not more than as much again"
    assert chunks.chunk_tokens(100, 1024, cpu) == 100
    assert chunks.chunk_tokens(100, 1 << 21, cpu) == 1, "a row larger than the budget still goes, alone"
    assert chunks.chunk_tokens(1500, 1024, cpu, unsummed=1 << 20) == 1500, "in place of the sum over chunks"
    assert chunks.chunk_tokens(1500, 1024, cpu, unsummed=1 << 19) == 768, "a sum too small to be worth it"
    assert chunks.chunk_tokens(5000, 1024, cpu, unsummed=3 << 20) == 1024, "more than the sum and a chunk"
    monkeypatch.setattr(chunks, "_SMALL_BYTES", 1 << 10)
    assert chunks.chunk_tokens(100, 1024, cpu) == 50, "logits worth saving are never held whole"


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_not_larger_than_torchs_on_average(dtype, reduction):
    """Over cases of enough tokens; 5 % for chance, and 10 % where fp16 is divided by their number at the end."""
    ratios = []
    for seed in range(8):
        h, w, _, t, _ = Case(tokens=48, hidden=32, vocabulary=200, dtype=dtype, ignored=0.0, seed=seed).tensors()
        found = gradients(
            lambda h, w, b, t=t: linear_cross_entropy(h, w, t, reduction=reduction, tokens=16), h, w, None
        )
        base, truth = (
            gradients(lambda h, w, b, t=t: plain(h, w, None, t, None, LossOptions(), reduction), *pair, None)
            for pair in ((h, w), (h.double(), w.double()))
        )
        ratios.append([error(found[i], truth[i]) / error(base[i], truth[i]) for i in (1, 2)])
    hidden, weight = torch.tensor(ratios).mean(0).tolist()
    assert hidden <= (1.15 if dtype == torch.float16 else 1.05)
    assert weight <= 1.05
