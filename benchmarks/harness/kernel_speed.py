"""Rows of the kernel benchmark: ours against plain torch, torch.compile and Liger. See ``kernel_command``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from slideformer_backend.benchmarks.harness.kernel_timing import (
    BF16,
    DEVICE,
    TOKENS,
    Bench,
    Head,
    Row,
    median_ms,
    medians_ms,
    randn,
    relative_error,
)

__all__ = ["compiled_head", "heads", "measure_layers"]

# -- linear cross-entropy ----------------------------------------------------------------------------------------------


def torch_loss(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """As Hugging Face's models compute it."""
    return torch.nn.functional.cross_entropy((h @ w.t()).float(), t)


def heads(bench: Bench, sizes: list[tuple[int, int]]) -> None:
    """Rows of linear cross-entropy; share is the time over that of the three products."""
    from slideformer_backend.kernels.linear_cross_entropy import linear_cross_entropy

    def liger() -> Callable[..., torch.Tensor]:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

        return lambda h, w, t: Function.apply(h, w, t)[0]

    for tokens, hidden in sizes:
        what = f"LCE {tokens} x {hidden}"
        head = Head(tokens, hidden)
        repeats = 7 if tokens > 10_000 else 15
        products = partial(head.measure, function=head.products, base=None, repeats=repeats)
        base = bench.add(what, "three products", products).ms

        def ours(row: Row, head: Head = head, base: float | None = base, repeats: int = repeats) -> None:
            head.measure(row, lambda n: head.step(linear_cross_entropy, n), base, repeats)
            row.error = head_error(head, linear_cross_entropy)

        bench.add(what, "ours", ours)

        def ligers(row: Row, head: Head = head, base: float | None = base, repeats: int = repeats) -> None:
            function = liger()
            head.measure(row, lambda n: head.step(function, n), base, repeats)

        bench.add(what, "Liger", ligers)

        def plain(row: Row, head: Head = head, base: float | None = base) -> None:
            head.measure(row, lambda n: head.step(torch_loss, n), base, 5)
            row.error = head_error(head, torch_loss)

        bench.add(what, "torch", plain)
        del head


def compiled_head(bench: Bench, tokens: int, hidden: int) -> None:
    """Row of linear cross-entropy under torch.compile; it takes seconds to compile and so comes late."""
    head = Head(tokens, hidden)
    base = median_ms(head.products, 9, 8_000_000)
    compiled = torch.compile(torch_loss, dynamic=False)
    bench.add(
        f"LCE {tokens} x {hidden}",
        "torch.compile",
        lambda row: head.measure(row, lambda n: head.step(compiled, n), base, 5),
    )


def head_error(head: Head, loss_of: Callable[..., torch.Tensor]) -> float:
    """Largest relative error of both gradients against fp32 products, over the first 2,048 tokens."""
    h, t = head.h[0][:2048].detach(), head.t[0][:2048]
    leaves = [h.clone().requires_grad_(), head.w.detach().clone().requires_grad_()]
    narrow, wide = leaves, [leaf.detach().float().requires_grad_() for leaf in leaves]
    found = torch.autograd.grad(loss_of(*narrow, t), narrow)
    truth = torch.autograd.grad(torch_loss(wide[0], wide[1], t), wide)
    return max(relative_error(a, b) for a, b in zip(found, truth, strict=True))


# -- memory-bound kernels ----------------------------------------------------------------------------------------------

Way = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


@dataclass
class Layer:
    """An operation, the bytes that it must move at least, and its competitors by name."""

    name: str
    inputs: Callable[[], list[torch.Tensor]]
    wanted: int
    forward_bytes: int
    backward_bytes: int
    ways: dict[str, Callable[[], Way]]


def layers() -> list[Layer]:
    """The operations at the sizes of an 8B model (and 3B for the norm)."""
    from slideformer_backend.kernels.gated import geglu, swiglu
    from slideformer_backend.kernels.rms_norm import rms_norm, rms_norm_add
    from slideformer_backend.kernels.rotary import rotary

    functional = torch.nn.functional

    def plain_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def plain_add(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return plain_norm(x + r, w), x + r

    def plain_swiglu(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return functional.silu(g) * u

    def plain_geglu(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return functional.gelu(g, approximate="tanh") * u

    def plain_rotary(q: torch.Tensor, k: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def half(x: torch.Tensor) -> torch.Tensor:
            first, second = x.chunk(2, -1)
            return torch.cat((-second, first), -1)

        c, s = c.unsqueeze(1), s.unsqueeze(1)
        return q * c + half(q) * s, k * c + half(k) * s

    def liger(module: str, name: str, *extra: object) -> Callable[[], Way]:
        def load() -> Way:
            function: Any = getattr(__import__(f"liger_kernel.ops.{module}", fromlist=[name]), name)
            return lambda *tensors: function.apply(*tensors, *extra)

        return load

    def ways(ours: Way, plain: Way, **more: Callable[[], Way]) -> dict[str, Callable[[], Way]]:
        return {"ours": lambda: ours, **more, "torch": lambda: plain, "torch.compile": lambda: torch.compile(plain)}

    def rows(*widths: int) -> list[torch.Tensor]:
        return [randn(TOKENS, width) for width in widths]

    def normed(width: int) -> list[torch.Tensor]:
        return [*rows(width), randn(width)]

    def turned() -> list[torch.Tensor]:
        q, k = (randn(4, TOKENS // 4, heads, 128).transpose(1, 2) for heads in (32, 8))
        angle = torch.rand(4, TOKENS // 4, 64, device=DEVICE).mul(6.28)
        angle = torch.cat([angle, angle], -1)
        return [q, k, angle.cos().to(BF16), angle.sin().to(BF16)]

    unit = 2 * TOKENS
    found = []
    for width in (3072, 4096):
        norm = {"Liger": liger("rms_norm", "LigerRMSNormFunction", 1e-6, 0.0, "llama", False)}
        found.append(
            Layer(
                f"RMSNorm {width}",
                partial(normed, width),
                2,
                2 * unit * width,
                3 * unit * width,
                ways(rms_norm, plain_norm, **norm),
            )
        )
    return [
        *found,
        Layer(
            "RMSNorm+add 4096",
            lambda: [*rows(4096, 4096), randn(4096)],
            3,
            4 * unit * 4096,
            4 * unit * 4096,
            ways(rms_norm_add, plain_add),
        ),
        Layer(
            "SwiGLU 14336",
            lambda: rows(14336, 14336),
            2,
            3 * unit * 14336,
            5 * unit * 14336,
            ways(swiglu, plain_swiglu, Liger=liger("swiglu", "LigerSiLUMulFunction")),
        ),
        Layer(
            "GeGLU 14336",
            lambda: rows(14336, 14336),
            2,
            3 * unit * 14336,
            5 * unit * 14336,
            ways(geglu, plain_geglu, Liger=liger("geglu", "LigerGELUMulFunction")),
        ),
        Layer(
            "RoPE 32+8 heads x 128",
            turned,
            2,
            unit * (2 * 40 * 128 + 128),
            unit * (2 * 40 * 128 + 128),
            ways(rotary, plain_rotary, Liger=liger("rope", "LigerRopeFunction")),
        ),
    ]


def measure_layer(bench: Bench, layer: Layer, names: Sequence[str]) -> None:
    """Forward and backward rows of every way to compute a layer; the ways take turns on the same inputs."""
    sets = [layer.inputs() for _ in range(2)]
    for tensors in sets:
        for tensor in tensors[: layer.wanted]:
            tensor.requires_grad_()
    found: dict[str, Way] = {}
    failed: dict[str, Exception] = {}
    for who in names:
        try:
            function = layer.ways[who]()
            function(*sets[0])
            found[who] = function
        except Exception as error:  # its row says so
            failed[who] = error

    def timed(steps: dict[str, Callable[[int], object]], what: str, nbytes: int) -> None:
        times = dict(zip(steps, medians_ms(list(steps.values())), strict=True))

        def fill(row: Row, who: str) -> None:
            if who in failed:
                raise failed[who]
            row.ms = times[who]
            row.set_share(nbytes, bench.copy)
            if what == "backward" and who in ("ours", "torch"):
                row.error = layer_error(layer, found[who])

        for who in names:
            bench.add(f"{layer.name} {what}", who, partial(fill, who=who))

    def forward(way: Way, number: int) -> object:
        return way(*sets[number % 2])

    timed({who: partial(forward, way) for who, way in found.items()}, "forward", layer.forward_bytes)
    steps: dict[str, Callable[[int], object]] = {}
    upstream: list[torch.Tensor] = []
    for who, way in found.items():
        upstream = upstream or [torch.randn_like(output) for output in _tuple(way(*sets[0]))]
        steps[who] = _backward(way, sets, upstream, layer.wanted)
    timed(steps, "backward", layer.backward_bytes)


def _backward(
    way: Way, sets: Sequence[list[torch.Tensor]], upstream: Sequence[torch.Tensor], wanted: int
) -> Callable[[int], object]:
    graphs = [(_tuple(way(*tensors)), tensors[:wanted]) for tensors in sets]

    def step(number: int) -> None:
        outputs, inputs = graphs[number % 2]
        torch.autograd.grad(outputs, inputs, upstream, retain_graph=True)

    return step


def measure_layers(bench: Bench, names: Sequence[str]) -> None:
    """Rows of all layers, one layer after the other, until the time is up."""
    for layer in layers():
        if not bench.is_over():
            measure_layer(bench, layer, [who for who in names if who in layer.ways])


def _tuple(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def layer_error(layer: Layer, function: Way) -> float:
    """Largest relative error of outputs and gradients against plain torch in fp32."""
    tensors = layer.inputs()
    results = []
    for dtype, way in ((BF16, function), (torch.float32, layer.ways["torch"]())):
        cast = [tensor.detach().to(dtype) for tensor in tensors]
        wanted = [tensor.requires_grad_() for tensor in cast[: layer.wanted]]
        outputs = _tuple(way(*cast))
        torch.manual_seed(1)
        upstream = [randn(*output.shape).to(dtype) for output in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, wanted, upstream)])
    return max(relative_error(a.detach(), b.detach()) for a, b in zip(*results, strict=True))
