"""The CPU kernels: numpy slices in, updated in place. The torch twins have the same names and give the same bits
(those of ``*_zero`` are the twins without it, given zeros).

bf16 and fp16 arrays are uint16 bits, fp32 arrays float32; all 1-D, contiguous, equally long, not overlapping.
"""

from __future__ import annotations

from typing import Literal

from slideformer_backend.optim import numba_convert, numba_update
from slideformer_backend.optim.numba_convert import (
    abs_max,
    join,
    reconcile,
    reconcile_split,
    round_into,
    scale,
    split,
    sum_squares,
    widen,
)
from slideformer_backend.optim.numba_update import (
    advance,
    commit,
    commit_zero,
    peek,
    peek_zero,
    update,
    update_split,
    update_zero,
)
from slideformer_backend.optim.rules import GradientKind, Rule, WeightKind

__all__ = [
    "abs_max",
    "advance",
    "commit",
    "commit_zero",
    "join",
    "peek",
    "peek_zero",
    "reconcile",
    "reconcile_split",
    "round_into",
    "scale",
    "split",
    "sum_squares",
    "update",
    "update_split",
    "update_zero",
    "warm_up",
    "warm_up_zero",
    "widen",
]


def warm_up(
    rule: Rule,
    g_kind: GradientKind,
    w_kind: WeightKind,
    policy: Literal["exact", "immediate"],
    *,
    states: int | None = None,
) -> None:
    """Compile what an engine with this update policy needs for one pair of kinds, so that no step waits for it.

    ``states``: how many states the rule uses (``len(rule.states_used(group))``), all of them if None. What was compiled
    before costs nothing. About 0.1 s per kernel; numba compiles one at a time, so threads would not help.
    """
    count = len(rule.state_names) if states is None else states
    if policy == "exact":
        numba_update.kernels("commit", rule.name, count, g_kind)
        numba_update.kernels("peek", rule.name, count, g_kind, w_kind)
        numba_update.kernels("advance", rule.name, count, g_kind, g_kind, w_kind)
        numba_update.kernels("update", rule.name, count, g_kind, w_kind)
    elif w_kind == "bf16":
        numba_update.kernels("update_split", rule.name, count, g_kind)
    elif w_kind == "fp32":
        numba_update.kernels("commit", rule.name, count, g_kind)
    else:
        numba_update.kernels("update", rule.name, count, g_kind, w_kind)
    if policy == "immediate" and w_kind == "bf16":
        for name in ("split", "join", "reconcile_split"):
            numba_convert.kernels(name)
    for name in ("round", "widen", "reconcile"):
        numba_convert.kernels(name, w_kind)
    for name in ("sum_squares", "abs_max"):
        numba_convert.kernels(name, g_kind)
    if not g_kind.endswith("_as_fp32"):
        numba_convert.kernels("scale", g_kind)


def warm_up_zero(rule: Rule, kind: WeightKind, *, states: int) -> None:
    """As ``warm_up``, for what ``strategy: lsp`` runs on cores of ``kind``."""
    numba_update.kernels("commit_zero", rule.name, states, kind)
    for name in ("peek_zero", "update_zero"):
        numba_update.kernels(name, rule.name, states, kind, kind)
    numba_convert.kernels("scale", kind)
