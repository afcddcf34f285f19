"""The plot: tokens per second of every contender, one panel per load."""

from __future__ import annotations

from pathlib import Path

from slideformer_backend.benchmarks.harness.report import Report, groups_of

COLOURS = {"ours": "tab:blue", "ceiling": "lightgrey", "ceiling-all": "silver", "plain": "tan"}


def draw(report: Report, path: Path) -> bool:
    """Write a PNG; False where matplotlib is not installed (extra ``bench``) or there is nothing to draw."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = {title: [r for r in results if not r.error] for title, results in groups_of(report).items()}
    groups = {title: results for title, results in groups.items() if results}
    if not groups:
        return False
    heights = [0.4 + 0.28 * len(results) for results in groups.values()]
    figure, axes = pyplot.subplots(
        len(groups), 1, figsize=(8, sum(heights) + 0.5), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for axis, (title, results) in zip(axes[:, 0], groups.items(), strict=True):
        names = [f"{r.contender} {r.label} {'' if r.load.clip == 'off' else r.load.clip}" for r in results]
        bars = axis.barh(
            names, [r.rate for r in results], color=[COLOURS.get(r.contender, "tab:orange") for r in results]
        )
        axis.bar_label(bars, [f"{r.rate:,.0f}" for r in results], padding=2, fontsize=7)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=9, loc="left")
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("tokens per second", fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
