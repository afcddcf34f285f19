"""What the loss of a token is, and what is known of a chunk of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LossOptions(NamedTuple):
    """What the loss of one token is, with ``l`` the row of logits.

    ``z = softcap·tanh(scale·l/softcap)`` (no softcap: ``z = scale·l``), ``lse = logsumexp(z)``, and

        (1-smoothing)·w[y]·(lse - z[y]) + smoothing/V·sum_c w[c]·(lse - z[c]) + z_loss·lse²

    as in ``torch.nn.functional.cross_entropy`` (w: class weights, 1 without) plus the z-loss of PaLM (2204.02311).
    Tokens whose target is ``ignore_index`` have loss and gradient 0; other targets outside the vocabulary give NaN.
    """

    ignore_index: int = -100
    smoothing: float = 0.0
    z_loss: float = 0.0
    scale: float = 1.0
    softcap: float = 0.0
    class_weight: torch.Tensor | None = None
    """fp32 [V]"""


class ChunkResult(NamedTuple):
    """Per row, fp32 [rows]: loss, logsumexp of z, and on request the entropy and whether the target is on top (0/1)."""

    loss: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor | None
    is_top: torch.Tensor | None
