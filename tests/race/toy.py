"""A model of three sliding units and an edge unit, small enough for thousands of runs."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext

import torch
from torch import nn

WIDTH = 4
BLOCKS = 3
AUTOCAST = "autocast"
"""fp32 parameters under bf16 autocast; the other kinds are dtypes of the model."""
KINDS = ("float32", "bfloat16", AUTOCAST)


class Boom(Exception):
    """What the tests make a model raise."""


class _Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        raise Boom("backward")


class Block(nn.Module):
    """16 + 4 + 4 elements; ``scale`` may be left out of a forward, so that it gets no gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, uses_scale: bool = True, explodes: bool = False) -> torch.Tensor:
        if explodes:
            raise Boom("forward")
        y = torch.tanh(self.linear(x))
        return x + (y * self.scale.to(y.dtype) if uses_scale else y)


class Toy(nn.Module):
    """Edge parameters in ``inp`` and ``out``, sliding ones in ``blocks``; one of them frozen."""

    def __init__(self, width: int = WIDTH, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.inp = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.out = nn.Linear(width, width)

    def forward(
        self,
        x: torch.Tensor,
        unscaled: Collection[int] = (),
        explodes_at: int | None = None,
        explodes_behind: int | None = None,
    ) -> torch.Tensor:
        x = self.inp(x)
        for number, block in enumerate(self.blocks):
            if number == explodes_behind:
                x = _Explode.apply(x)
            x = block(x, number not in unscaled, number == explodes_at)
        return self.out(x)


FROZEN = ("blocks.1.linear.bias",)


def make_toy(
    kind: str, seed: int, *, width: int = WIDTH, blocks: int = BLOCKS, frozen: Collection[str] = FROZEN
) -> Toy:
    """A toy with random weights in the dtype of ``kind``; parameters whose names begin like ``frozen`` are frozen."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Toy(width, blocks)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)))
    return model.to(torch.bfloat16) if kind == "bfloat16" else model


def autocast(kind: str, device: str = "cpu"):
    """The context a forward of ``kind`` runs in."""
    return torch.autocast(device, torch.bfloat16) if kind == AUTOCAST else nullcontext()
