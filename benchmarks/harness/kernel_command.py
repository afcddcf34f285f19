"""``slideformer bench kernels``: speed, memory and error of the kernels on this GPU, against plain torch, torch.compile
and Liger (if installed).

Device time between CUDA events, median of many repeats over fresh random inputs; the launches of a repeat are queued
behind a pause, so that the host's speed does not count. Memory-bound rows, those of the sparse projectors of
``strategy: lsp`` among them, give the fewest possible bytes, and these over the time as a share of the copy bandwidth
of the same run; linear cross-entropy gives its time over that of its three matrix products, and its peak memory beyond
inputs, gradients and the fp32 sum of the weight's gradient.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch._functorch.config

from slideformer_backend.benchmarks.harness import kernel_sparse, kernel_speed, kernel_tuning
from slideformer_backend.benchmarks.harness.kernel_plot import draw
from slideformer_backend.benchmarks.harness.kernel_timing import IS_REAL, Bench, copy_bandwidth

PARTS = ("lce", "layers", "sparse", "sweep", "tune", "compile")
GOALS = [(32768, 3072), (8192, 3072), (8192, 4096), (32768, 4096)]
SWEEP = [(tokens, 3072) for tokens in (1024, 2048, 4096, 16384, 65536)]  # and those of the goals


def parser() -> argparse.ArgumentParser:
    """All options."""
    result = argparse.ArgumentParser(
        prog="slideformer bench kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--out", type=Path, default=Path("out/kernels"), help="folder of the figures (out/kernels)")
    result.add_argument("--json", type=Path, help="another file for the figures")
    result.add_argument("--budget", type=float, default=300.0, help="seconds after which rows are left out (300)")
    result.add_argument("--autotune-report", action="store_true", help="also try launch parameters")
    result.add_argument("--only", default="", help=f"comma-separated parts, of {', '.join(PARTS)}")
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write ``kernels.json`` and ``kernels.png``."""
    args = parser().parse_args(arguments)
    parts = [name for name in args.only.split(",") if name] or [
        name for name in PARTS if name != "tune" or args.autotune_report
    ]
    unknown = [name for name in parts if name not in PARTS]
    if unknown:
        parser().error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    torch.manual_seed(time.time_ns() % 2**31)
    bench = Bench(args.budget)
    bench.copy = copy_bandwidth()
    name = torch.cuda.get_device_name() if IS_REAL else "CPU (a smoke test: figures mean nothing)"
    print(f"{name}, torch {torch.__version__}, copy {bench.copy:.2f} TB/s", flush=True)
    measure(bench, parts)
    figures = {"device": name, "torch": torch.__version__, "copy_tb_s": bench.copy}
    text = json.dumps({**figures, "rows": [asdict(row) for row in bench.rows]}, indent=1)
    args.out.mkdir(parents=True, exist_ok=True)
    for path in (args.out / "kernels.json", *([args.json] if args.json is not None else [])):
        path.write_text(text)
    drawn = draw(bench.rows, name, args.out / "kernels.png")
    print(f"figures: {args.out / 'kernels.json'}" + (f", plot: {args.out / 'kernels.png'}" if drawn else ""))


def measure(bench: Bench, parts: Sequence[str]) -> None:
    """The rows of these parts; what takes long to compile comes last."""
    if "lce" in parts:
        kernel_speed.heads(bench, GOALS if IS_REAL else [(64, 32)])
    if "layers" in parts:
        kernel_speed.measure_layers(bench, ("ours", "Liger", "torch"))
    if "sparse" in parts:
        kernel_sparse.measure_sparse(bench)
    if "sweep" in parts:
        kernel_speed.heads(bench, SWEEP if IS_REAL else [(16, 32), (128, 32)])
    if "tune" in parts:
        kernel_tuning.report(bench)
    if "compile" in parts:
        torch._functorch.config.donated_buffer = False  # backward runs many times over one forward here
        kernel_speed.measure_layers(bench, ("torch.compile",))
        for tokens, hidden in [(8192, 3072), (32768, 3072)] if IS_REAL else [(64, 32)]:
            kernel_speed.compiled_head(bench, tokens, hidden)


if __name__ == "__main__":
    main()
