"""Optimizers without a fused rule run whole, as themselves, on fp32 master views (DESIGN 4.7)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from .edges import device_gradient
from .guard import plain
from .states import join_master, split_master
from .unit import ParamRecord


@contextlib.contextmanager
def as_masters(records: Sequence[ParamRecord]) -> Iterator[None]:
    """For the time of an optimizer's own step, parameters are their fp32 masters and gradients fp32 host tensors.

    The host gradients must have arrived and everything must be committed. Afterwards the parameters show their own
    memory again; the caller derives the working weights from the stepped masters.
    """
    kept: list[tuple[ParamRecord, torch.Tensor, torch.Tensor | None]] = []
    try:
        for record in records:
            parameter = record.parameter
            gradient = _gradient(record)
            with torch._C.DisableTorchFunctionSubclass():
                kept.append((record, parameter.data, device_gradient(record)))
                parameter.grad = None
            parameter.__class__ = record.own_class
            parameter.data = join_master(record)
            parameter.grad = None if gradient is None else gradient.float()
        yield
    finally:
        for record, data, device_held in kept:
            parameter = record.parameter
            parameter.grad = None
            split_master(record, parameter.data)
            parameter.data = data
            parameter.grad = device_held
            parameter.__class__ = record.guarded_class


def _gradient(record: ParamRecord) -> torch.Tensor | None:
    if not record.has_gradient:
        return None
    if record.unit.updates_on_device:
        gradient = device_gradient(record)
        return None if gradient is None else plain(gradient)
    buffer = record.unit.gradient
    return None if buffer is None else record.gradient_view(buffer.slab.flat)


def move_own_states(record: ParamRecord, device: torch.device) -> None:
    """Move what an optimizer without a fused rule keeps for itself to where it steps the parameter. Step counts stay
    where they are unless it counts on the device, as in torch."""
    binding = record.binding
    if binding is None or binding.rule is not None:
        return
    group = record.group or {}
    counts_there = bool(group.get("fused") or group.get("capturable"))
    state = binding.optimizer.state.get(record.parameter, {})
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and (counts_there or name != "step"):
            state[name] = value.to(device)
