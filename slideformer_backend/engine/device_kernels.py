"""The device's own kernels: Triton on CUDA; on a CPU-only machine the host kernels, which give the same bits."""

from __future__ import annotations

import torch

from ..optim import numba_kernels, twins
from ..optim.twins import split
from ..storage import numpy_view
from .unit import KINDS, ONE, Entry


def sum_squares(gradient: torch.Tensor, out: torch.Tensor) -> None:
    """Sum of squares of each 64 Ki-element block of a flat gradient into ``out`` (fp64, same device)."""
    if gradient.is_cuda:
        from ..kernels.sum_squares import sum_squares as on_device

        on_device(gradient, out)
    else:
        numba_kernels.sum_squares(numpy_view(gradient), KINDS[gradient.dtype], out.numpy())


def update(
    entry: Entry,
    master: torch.Tensor,
    states: tuple[torch.Tensor, ...],
    gradient: torch.Tensor,
    weights: torch.Tensor,
    *,
    half_up: bool = False,
) -> None:
    """One update of a parameter whose states are on the device; all flat. ``weights`` may be ``master``.

    ``half_up``: bf16 weights are rounded as the high half of a split master is (``update: immediate``).
    """
    if gradient.is_cuda:
        from ..kernels.fused_update import fused_update

        scalars = [float(value) for value in entry.scalars]
        c = float(entry.coefficient)
        fused_update(entry.rule.name, master, states, gradient, c, scalars, weights, half_up=half_up)
        return
    numba_kernels.update(
        entry.rule,
        numpy_view(master),
        tuple(numpy_view(state) for state in states),
        numpy_view(gradient),
        KINDS[gradient.dtype],
        entry.coefficient,
        entry.scalars,
        numpy_view(weights),
        KINDS[weights.dtype],
    )
    if half_up and weights.dtype == torch.bfloat16:
        round_half_up(master, weights)


def round_half_up(master: torch.Tensor, weights: torch.Tensor) -> None:
    """``weights`` (flat, bf16) become the high half of the split ``master``."""
    split(master, weights, torch.empty_like(weights, dtype=torch.int16))


def reconcile(master: torch.Tensor, weights: torch.Tensor, *, half_up: bool = False) -> None:
    """Where flat ``weights`` are not what ``master`` rounds to, they were written by user code: take them over."""
    if master.is_cuda:
        from ..kernels.reconcile import reconcile as on_device

        on_device(master, weights, half_up=half_up)
    elif half_up and weights.dtype == torch.bfloat16:
        expected = torch.empty_like(weights)
        round_half_up(master, expected)
        differs = expected.view(torch.int16) != weights.view(torch.int16)
        differs &= ~(expected.isnan() & weights.isnan())
        master.copy_(torch.where(differs, weights.float(), master))
    else:
        twins.reconcile(master, weights, KINDS[weights.dtype])


def scale(gradient: torch.Tensor, coefficient: object) -> None:
    """Multiply a gradient in place as a clip does: the product of the fp32 coefficient, rounded to its dtype."""
    if coefficient != ONE:
        gradient.mul_(torch.tensor(coefficient))  # a host scalar: a device scalar would be rounded to bf16 first
