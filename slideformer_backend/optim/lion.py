"""Lion (arXiv 2302.06675) as a plain torch optimizer, since torch has none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class Lion(Optimizer):
    """p ← p·(1 - lr·wd) - lr·sign(β1·m + (1 - β1)·g), then m ← β2·m + (1 - β2)·g.

    One moment (``exp_avg``, like the parameter) instead of AdamW's two. The paper advises an lr 3 to 10 times smaller
    than AdamW's and a weight decay larger by as much. The arithmetic is that of ``lion_pytorch.Lion``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        """``params``: as torch's optimizers take them. Raises ValueError for hyper-parameters out of range."""
        if float(lr) < 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"Invalid betas: {betas}, expected both in [0, 1)")
        if weight_decay < 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient. ``closure``: recomputes the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, decay, (beta1, beta2) = float(group["lr"]), float(group["weight_decay"]), group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = -p.grad if group["maximize"] else p.grad
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                move = m.mul(beta1).add_(grad, alpha=1.0 - beta1).sign_()
                p.mul_(1.0 - lr * decay).add_(move, alpha=-lr)
                m.mul_(beta2).add_(grad, alpha=1.0 - beta2)
        return loss
