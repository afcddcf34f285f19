"""Values found by the tensor object."""

import gc

import torch

from slideformer_backend.engine.identity import ByIdentity


def test_equal_tensors_are_different_objects():
    known = ByIdentity()
    one, other = torch.zeros(3), torch.zeros(3)
    known[one] = "one"
    assert known.get(one) == "one"
    assert known.get(other) is None
    known[one] = "again"
    assert known.get(one) == "again"
    known.pop(other)
    known.pop(one)
    assert known.get(one) is None
    assert len(known) == 0


def test_an_entry_goes_with_its_tensor_and_a_new_one_at_that_address_has_none():
    known = ByIdentity()
    for _ in range(1000):
        tensor = torch.zeros(1)
        assert known.get(tensor) is None
        known[tensor] = object()
        del tensor
    assert len(known) == 0


def test_an_entry_stays_while_only_autograd_has_the_tensor():
    known = ByIdentity()
    leaf = torch.ones(2, requires_grad=True)
    known[leaf] = "leaf"
    loss = (leaf * 2).sum()
    del leaf
    gc.collect()
    assert len(known) == 1
    seen = loss.grad_fn.next_functions[0][0].next_functions[0][0].variable
    assert known.get(seen) == "leaf"
    del loss, seen
    gc.collect()
    assert len(known) == 0


def test_an_entry_in_a_cycle_goes():
    known = ByIdentity()
    tensor = torch.zeros(1)
    tensor.itself = tensor
    known[tensor] = 1
    del tensor
    gc.collect()
    assert len(known) == 0
