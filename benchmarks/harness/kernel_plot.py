"""The plot of the kernel benchmark: time and memory of head and loss over the number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slideformer_backend.benchmarks.harness.kernel_timing import Row

COLOURS = {
    "ours": "tab:blue",
    "Liger": "tab:orange",
    "torch": "tab:grey",
    "torch.compile": "tab:green",
    "three products": "lightgrey",
}


def draw(rows: Sequence[Row], device: str, path: Path) -> bool:
    """Write a PNG: a row of panels per hidden size, time on the left, memory on the right.

    Returns:
        False where matplotlib is not installed (extra ``bench``) or there is nothing to draw.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [row for row in rows if row.tokens and row.ms is not None]
    sizes = sorted({row.hidden for row in measured})
    if not sizes:
        return False
    figure, axes = pyplot.subplots(
        len(sizes), 2, figsize=(9, 3.2 * len(sizes)), squeeze=False, layout="constrained", sharex="row"
    )
    for size, (times, memory) in zip(sizes, axes, strict=True):
        for who, colour in COLOURS.items():
            of_who = sorted((r for r in measured if (r.hidden, r.who) == (size, who)), key=lambda r: r.tokens)
            # per thousand tokens: what grows faster than the work shows as a slope
            points = [(row.tokens, 1e3 * row.ms / row.tokens) for row in of_who if row.ms is not None]
            if points:
                times.plot(*zip(*points, strict=True), "o-", color=colour, label=who, markersize=3)
            held = [(row.tokens, row.gib) for row in of_who if row.gib is not None and who != "three products"]
            if held:
                memory.plot(*zip(*held, strict=True), "o-", color=colour, label=who, markersize=3)
        times.set_title(
            f"head and loss, hidden {size}: ms per 1,000 tokens, forward and backward", fontsize=8, loc="left"
        )
        memory.set_title("GiB beyond inputs, gradients and an fp32 sum", fontsize=8, loc="left")
        for axis in (times, memory):
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.tick_params(labelsize=7)
            axis.spines[["top", "right"]].set_visible(False)
        times.legend(fontsize=7, frameon=False)
    figure.suptitle(f"{device}, bf16", fontsize=9)
    figure.supxlabel("tokens", fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
