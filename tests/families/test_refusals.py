"""What cannot be managed is refused at prepare, with the reason, and nothing has been changed by then."""

import pytest
import torch
from torch import nn

from slideformer_backend.api import attach
from slideformer_backend.errors import UnsupportedError
from tests.parity.models import HIDDEN, Block, Stack, batch, language_loss


def lazy():
    model = Stack()
    model.blocks[1].extra = nn.LazyLinear(4)
    return model


def double():
    return Stack().double()


def complex_weight():
    model = Stack()
    model.blocks[0].phases = nn.Parameter(torch.zeros(16, dtype=torch.complex64))
    return model


def scripted():
    model = Stack()
    model.blocks = nn.ModuleList(torch.jit.script(Block()) for _ in range(3))
    return model


def scripted_head():
    model = Stack()
    model.head = torch.jit.script(model.head)
    return model


def on_meta():
    with torch.device("meta"):
        return Stack()


def sparse_gradients():
    model = Stack()
    model.embed = nn.Embedding(64, HIDDEN, sparse=True)
    return model


def sparse_weight():
    model = Stack()
    model.blocks[0].mask = nn.Parameter(torch.eye(16).to_sparse())
    return model


class Wrapped(torch.Tensor):
    """Stands for quantised and distributed tensors: a subclass whose memory is elsewhere."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=True)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        own = torch.utils._pytree.tree_map_only(cls, lambda tensor: tensor.inner, (args, kwargs or {}))
        result = func(*own[0], **own[1])
        return cls(result) if isinstance(result, torch.Tensor) else result


def wrapped_in_a_block():
    model = Stack()
    model.blocks[0].up.weight = nn.Parameter(Wrapped(torch.zeros(2 * HIDDEN, HIDDEN)))
    return model


def wrapped_head():
    model = Stack()
    model.head.weight = nn.Parameter(Wrapped(torch.zeros(64, HIDDEN)))
    return model


def views_of_one_memory():
    model = Stack()
    model.head.weight = nn.Parameter(model.embed.weight.data.t().contiguous().t())
    model.extra = nn.Parameter(model.head.weight.data.t())
    return model


REASONS = {
    views_of_one_memory: r"are two parameters over the same memory",
    lazy: r"blocks\.1\.extra\.weight has no shape yet",
    double: r"embed\.weight cannot be trained.*float64",
    complex_weight: r"blocks\.0\.phases cannot be trained.*complex64",
    scripted: r"blocks\.0 was compiled by torch\.jit",
    scripted_head: r"head was compiled by torch\.jit",
    on_meta: r"embed\.weight is on the meta device",
    sparse_gradients: r"embed has sparse gradients",
    sparse_weight: r"blocks\.0\.mask is a Parameter, whose memory",
    wrapped_in_a_block: r"blocks\.0\.up\.weight is a Wrapped, whose memory",
    wrapped_head: r"head\.weight is a Wrapped, whose memory",
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:Lazy modules")
@pytest.mark.parametrize("make", REASONS, ids=lambda make: make.__name__)
def test_refused_before_anything_is_changed(device, make):
    model = make()
    before = {name: (parameter, type(parameter)) for name, parameter in model.named_parameters()}
    with pytest.raises(UnsupportedError, match=REASONS[make]):
        attach(model, device=device)
    after = {name: (parameter, type(parameter)) for name, parameter in model.named_parameters()}
    assert after.keys() == before.keys()
    if make not in (scripted, scripted_head):  # torch makes their parameters anew at each look
        assert all(after[name][0] is before[name][0] for name in before)
    assert all(after[name][1] is before[name][1] for name in before)
    assert not model._forward_pre_hooks


def test_blocks_whose_parts_are_called_one_by_one(device):
    """Nothing fetches the weights of a block that is never called: known at the first backward, before any step."""

    class Parts(Stack):
        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = x + block.down(block.up(block.norm(x)))
            return self.head(x)

    model = Parts()
    engine = attach(model, device=device)
    ids = batch(0, device=device)
    try:
        with pytest.raises(UnsupportedError, match=r"blocks\.2\.down\.bias received a gradient outside its block"):
            language_loss(model(ids), ids).backward()
    finally:
        engine.detach()
