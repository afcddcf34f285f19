"""Launch parameters of every kernel, best first, and what the parts of linear cross-entropy cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from slideformer_backend.benchmarks.harness.kernel_timing import (
    DEVICE,
    IS_REAL,
    TOKENS,
    VOCABULARY,
    Bench,
    Head,
    Row,
    median_ms,
    randn,
)


def report(bench: Bench) -> None:
    """Adds rows for the best configurations and for the parts of linear cross-entropy."""
    parts(bench)
    softmax(bench)
    norm(bench)
    gated(bench)
    rotary(bench)
    chunks(bench)


def best(
    bench: Bench,
    what: str,
    configs: Iterable[Any],
    run: Callable[[Any, int], object],
    bytes_moved: int,
    shown: int = 5,
) -> None:
    """Tries all configurations and adds rows for the best ones."""
    tried: list[tuple[float, Any]] = []
    failed: list[str] = []
    for config in configs:
        try:
            tried.append((median_ms(partial(run, config), 9, 500_000), config))
        except Exception as error:  # a configuration that cannot be launched is one of the answers
            failed.append(f"{config}: {type(error).__name__} {str(error)[:80]}")
    tried.sort(key=lambda pair: pair[0])
    for place, (ms, config) in enumerate(tried[:shown] + tried[-1:]):

        def fill(row: Row, ms: float = ms, config: Any = config) -> None:
            row.ms, row.share, row.note = ms, bytes_moved / ms / 1e9 / bench.copy, str(config)

        bench.add(what, f"number {place + 1}" if place < shown else "worst", fill)
    for text in failed[:3]:
        bench.add(what, "failed", partial(Row.set_note, text=text))


def parts(bench: Bench) -> None:
    """The pieces of one chunk of 4,096 tokens, hidden 3,072."""
    from slideformer_backend.kernels import chunks as module
    from slideformer_backend.kernels.scaled_cast import scaled_cast

    tokens, hidden = (4096, 3072) if IS_REAL else (64, 32)
    h, w, g = randn(tokens, hidden), randn(VOCABULARY, hidden, scale=0.02), randn(tokens, VOCABULARY, scale=0.01)
    total = torch.zeros(VOCABULARY, hidden, device=DEVICE)
    dh, narrow, one = torch.empty_like(h), torch.empty_like(w), torch.ones((), device=DEVICE)
    pieces = {
        "logits = h w'": lambda _: torch.mm(h, w.t(), out=g),
        "dh = g w (addmm, beta 0)": lambda _: torch.addmm(dh, g, w, beta=0, out=dh),
        "dh = g w (mm)": lambda _: torch.mm(g, w, out=dh),
        "dw = g' h, fp32": lambda _: module._add_product(total, g.t(), h, 1.0, is_first=True),
        "dw += g' h, fp32": lambda _: module._add_product(total, g.t(), h, 1.0, is_first=False),
        "dw = g' h, bf16 (mm)": lambda _: torch.mm(g.t(), h, out=narrow),
        "cast of dw": lambda _: scaled_cast(total, one, narrow),
        "cast of dw (torch.mul)": lambda _: torch.mul(total, one, out=narrow),
        "mem_get_info": lambda _: module.chunk_tokens(32768, VOCABULARY * 2, h.device),
    }
    for name, run in pieces.items():
        bench.add("part of LCE, 4096 x 3072", name, partial(Row.set_time, of=run))
    left, right = randn(tokens, hidden), randn(VOCABULARY, hidden, scale=0.02)
    truth = left[:64].float() @ right.float().t()
    out = torch.empty(64, VOCABULARY, device=DEVICE)

    def check(row: Row) -> None:
        module._add_product(out, left[:64], right.t(), 0.5, is_first=True)
        module._add_product(out, left[:64], right.t(), 0.5, is_first=False)
        row.error = ((out - truth).norm() / truth.norm()).item()
        row.note = f"in place: {DEVICE.type == 'cuda' and module._has_wide_sum(out.device, left.dtype)}"

    bench.add("part of LCE, 4096 x 3072", "error of fp32 sum", check)


def softmax(bench: Bench) -> None:
    """The pass over a chunk of logits: bytes of one read and one write."""
    from slideformer_backend.kernels.loss import LossOptions
    from slideformer_backend.kernels.softmax_gradient import LaunchConfig, softmax_gradient_

    tokens = 4096 if IS_REAL else 64
    logits = randn(tokens, VOCABULARY)
    targets = torch.randint(0, VOCABULARY, (tokens,), device=DEVICE)
    shapes = [(16384, 32), (16384, 16), (8192, 16), (8192, 8), (4096, 8), (32768, 32)]
    configs = [
        LaunchConfig(b, w, hints, ahead) for b, w in shapes for hints in (True, False) for ahead in (True, False)
    ]

    def run(config: Any, _: int) -> None:
        softmax_gradient_(logits, targets, VOCABULARY, LossOptions(), gradient_scale=1.0, config=config)

    best(bench, "softmax and gradient", configs, run, 2 * logits.nbytes, 8)


def norm(bench: Bench) -> None:
    """RMSNorm of 3,072 and 4,096 columns."""
    from slideformer_backend.kernels.rms_norm import NormConfig

    for width in (3072, 4096):
        sets = [(randn(TOKENS, width), randn(TOKENS, width)) for _ in range(2)]
        weight = randn(width)
        rstd = torch.rand(TOKENS, device=DEVICE)
        shapes = [(1, 4), (1, 8), (1, 16), (2, 8), (2, 16), (4, 16)]
        best(
            bench,
            f"RMSNorm {width} forward",
            [NormConfig(rows, warps) for rows, warps in shapes],
            partial(_norm_forward, sets, weight),
            2 * sets[0][0].nbytes,
            3,
        )
        best(
            bench,
            f"RMSNorm {width} backward",
            [NormConfig(*s, programs, stages) for s in shapes for programs in (1, 2, 3, 4) for stages in (1, 2, 3, 4)],
            partial(_norm_backward, sets, weight, rstd),
            3 * sets[0][0].nbytes,
        )


def _norm_forward(sets: list[tuple[torch.Tensor, torch.Tensor]], weight: torch.Tensor, config: Any, n: int) -> object:
    from slideformer_backend.kernels.rms_norm import launch_forward

    return launch_forward(sets[n % 2][0], None, weight, 1e-6, 0.0, config)


def _norm_backward(
    sets: list[tuple[torch.Tensor, torch.Tensor]], weight: torch.Tensor, rstd: torch.Tensor, config: Any, n: int
) -> object:
    from slideformer_backend.kernels.rms_norm import launch_backward

    dy, x = sets[n % 2]
    return launch_backward(dy, None, x, weight, rstd, 0.0, (True, True), config)


def _chunked(head: Head, tokens: int, n: int) -> None:
    from slideformer_backend.kernels.linear_cross_entropy import linear_cross_entropy

    head.step(partial(linear_cross_entropy, tokens=tokens), n)


def gated(bench: Bench) -> None:
    """SwiGLU of 14,336 columns."""
    from slideformer_backend.kernels.gated import SILU, GateConfig, launch_backward, launch_forward

    g, u, d = (randn(TOKENS, 14336) for _ in range(3))
    configs = [GateConfig(b, w) for b in (1024, 2048, 4096, 8192) for w in (2, 4, 8, 16) if 4 <= b // w // 32 <= 64]
    best(bench, "SwiGLU forward", configs, lambda c, _: launch_forward(g, u, SILU, c), 3 * g.nbytes, 3)
    best(bench, "SwiGLU backward", configs, lambda c, _: launch_backward(d, g, u, SILU, c), 5 * g.nbytes, 3)


def rotary(bench: Bench) -> None:
    """RoPE of 32 + 8 heads of 128."""
    from slideformer_backend.kernels.rotary import RotaryConfig, launch

    q, k = (randn(4, TOKENS // 4, heads, 128).transpose(1, 2) for heads in (32, 8))
    c, s = (torch.rand(4, TOKENS // 4, 128, device=DEVICE).bfloat16() for _ in range(2))
    moved = 2 * TOKENS * (2 * 40 * 128 + 128)
    configs = [RotaryConfig(warps) for warps in (1, 2, 4, 8, 16)]
    best(bench, "RoPE", configs, lambda config, _: launch(q, k, c, s, interleaved=False, config=config), moved)


def chunks(bench: Bench) -> None:
    """Linear cross-entropy by tokens per chunk; share is bytes of nothing: read the times."""
    for tokens, hidden in ((8192, 3072), (32768, 3072)) if IS_REAL else ((64, 32),):
        head = Head(tokens, hidden)
        best(
            bench,
            f"LCE {tokens} x {hidden} by chunk",
            (2048, 3072, 4096, 8192),
            partial(_chunked, head),
            0,
            4,
        )
        del head
