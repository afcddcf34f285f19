"""From results to figures, and from figures to a terminal table, JSON and Markdown."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from slideformer_backend import __version__
from slideformer_backend.benchmarks.harness.memory import meminfo
from slideformer_backend.benchmarks.harness.reach import Row, Verdict, find, judge
from slideformer_backend.benchmarks.harness.shapes import SHAPES
from slideformer_backend.benchmarks.harness.spec import CONTENDERS, Contender, Result, result_to_dict

PACKAGES = ("torch", "transformers", "accelerate", "numba", "deepspeed", "torchao", "liger-kernel", "triton")


@dataclass(kw_only=True)
class Report:
    """Everything a run found, ready to be shown.

    ``results`` are medians over the rounds; ``spread`` gives (lowest, highest) tokens/s by ``id`` of the result, and
    ``limits_of`` the times in seconds that each resource alone would need for a step.
    """

    machine: dict[str, str]
    limits: dict[str, float]
    results: list[Result]
    spread: dict[int, tuple[float, float]]
    limits_of: dict[int, dict[str, float]]
    verdicts: list[Verdict]

    def ratio(self, result: Result) -> float | None:
        """Step time over the largest limit."""
        limits = self.limits_of.get(id(result))
        return result.seconds / max(limits.values()) if limits and result.seconds else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = []
        for result in self.results:
            row = result_to_dict(result) | {
                "tokens_per_second": result.rate,
                "tflops": tflops(result, recomputed=0.0),
                "tflops_with_recompute": tflops(result, recomputed=result.recomputed),
                "host_bytes_per_parameter": result.host_per_parameter,
                "limits_seconds": self.limits_of.get(id(result), {}),
                "ratio_to_largest_limit": self.ratio(result),
                "spread": self.spread.get(id(result)),
            }
            rows.append(row)
        goals = [
            {"row": v.row, "clip": v.goal.clip, "asked": v.goal.words, "found": v.found, "reached": v.reached}
            for v in self.verdicts
        ]
        return {"machine": self.machine, "limits": self.limits, "results": rows, "goals": goals}


def make_report(
    rows: Sequence[Row],
    results: Sequence[Result],
    limits: Mapping[str, float],
    measured_on: Mapping[str, str] | None = None,
) -> Report:
    """Medians over rounds, limits, verdicts. ``measured_on``: what ``machine`` says there; None: here."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        groups.setdefault((result.contender, result.shape, result.label, result.load), []).append(result)
    chosen, spread = [], {}
    for members in groups.values():
        good = sorted((result for result in members if not result.error), key=lambda result: result.rate)
        result = good[(len(good) - 1) // 2] if good else members[0]
        chosen.append(result)
        if len(good) > 1:
            spread[id(result)] = (good[0].rate, good[-1].rate)
    limits_of = {id(result): step_limits(result, chosen, limits) for result in chosen if not result.error}
    report = Report(
        machine=dict(measured_on or machine()),
        limits=dict(limits),
        results=chosen,
        spread=spread,
        limits_of=limits_of,
        verdicts=[],
    )
    ratios = {id(result): ratio for result in chosen if (ratio := report.ratio(result)) is not None}
    report.verdicts = judge(rows, chosen, ratios)
    return report


def tflops(result: Result, *, recomputed: float) -> float:
    """Model operations per second, in 10^12."""
    return SHAPES[result.shape].operations(result.load.length, recomputed=recomputed) * result.rate / 1e12


def step_limits(result: Result, results: Sequence[Result], limits: Mapping[str, float]) -> dict[str, float]:
    """Seconds that each resource alone needs for one step of ours: the GPU as in the ceiling (at the measured rate of
    matrix products, where no ceiling was measured), each direction of the link and the host's memory at their rates
    while all are busy."""
    if result.contender != "ours" or not limits:
        return {}
    name: Contender = "ceiling" if result.recomputed > 0.5 else "ceiling-all"
    ceiling = find(results, name, result.shape, result.load, any_clip=True)
    operations = SHAPES[result.shape].operations(result.load.length, recomputed=result.recomputed)
    product = operations * result.load.tokens / limits["gemm"]
    found = {"compute": ceiling.seconds if ceiling is not None else product, "matrix products": product}
    for track, limit in (("h2d", "h2d_both"), ("d2h", "d2h_both"), ("update", "host_mix_dma")):
        rate = limits.get(limit) or limits.get("host_mix" if track == "update" else track)
        if rate and result.moved.get(track):
            found[track] = result.moved[track] / rate
    return found


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    found = {"slideformer_backend": __version__, "python": platform.python_version(), "cpu": _cpu()}
    found["cores"] = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    found["host memory"] = f"{meminfo().get('MemTotal', 0) / 2**30:.0f} GiB"
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["gpu memory"] = f"{torch.cuda.mem_get_info()[1] / 2**30:.1f} GiB"
        found["cuda"] = str(torch.version.cuda)
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


COMPARED: tuple[Contender, ...] = ("ceiling", "zero2")
HEAD = (
    "contender", "clip", "tokens/s", "x ceiling", "x ZeRO-2", "TFLOPS", "+recomp.", "GPU GiB", "reserved", "host B/p",
    "busy: GPU", "h2d", "d2h", "CPU", "repaired", "x limit",
)  # fmt: skip


def cells(report: Report, result: Result) -> list[str]:
    """One line of the table."""
    name = f"{result.contender} {result.label}".strip() + ("*" if result.earlier else "")
    if result.error:
        return [name, result.load.clip, *[""] * (len(HEAD) - 2)]
    compared = [
        _times(result, find(report.results, other, result.shape, result.load, any_clip=True)) for other in COMPARED
    ]
    busy = [_share(result.busy.get(track)) for track in ("compute", "h2d", "d2h", "update")]
    ratio = report.ratio(result)
    rate = f"{result.rate:,.0f}"
    if id(result) in report.spread:
        low, high = report.spread[id(result)]
        rate += f" ({low:,.0f}-{high:,.0f})"
    return [
        name,
        result.load.clip,
        rate,
        *compared,
        f"{tflops(result, recomputed=0.0):.1f}",
        f"{tflops(result, recomputed=result.recomputed):.1f}",
        f"{result.allocated / 2**30:.1f}",
        f"{result.reserved / 2**30:.1f}",
        f"{result.host_per_parameter:.1f}",
        *busy,
        _share(result.repaired) if result.contender == "ours" else "",
        "" if ratio is None else f"{ratio:.2f}",
    ]


def _times(result: Result, other: Result | None) -> str:
    return "" if other is None or not other.rate else f"{result.rate / other.rate:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def groups_of(report: Report) -> dict[str, list[Result]]:
    """Results by what they trained."""
    found: dict[str, list[Result]] = {}
    for result in report.results:
        found.setdefault(f"{result.shape}, {result.load.batch} sequences of {result.load.length}", []).append(result)
    return found


def print_tables(report: Report, console: Console) -> None:
    """Errors first, then the tables and the verdicts, so that the end of the output holds the figures."""
    for result in report.results:
        if result.error:
            console.print(
                f"no result: {result.contender} {result.label} {result.load.batch}: {result.error}", markup=False
            )
    console.print(limits_text(report), markup=False, highlight=False)
    for title, results in groups_of(report).items():
        table = Table(*HEAD, title=title, title_justify="left", pad_edge=False, padding=(0, 1, 0, 0), box=None)
        for column in table.columns[2:]:
            column.justify = "right"
        for result in results:
            table.add_row(*cells(report, result))
        console.print(table)
    for verdict in report.verdicts:
        console.print(verdict_text(verdict), markup=False, highlight=False)


def verdict_text(verdict: Verdict) -> str:
    """One line per goal."""
    mark = {True: "reached", False: "MISSED", None: "not measured"}[verdict.reached]
    found = "" if verdict.found is None else f" ({verdict.found:.3g})"
    return f"{mark:<12} {verdict.row} {verdict.goal.clip}: {verdict.goal.words}{found}"


def limits_text(report: Report) -> str:
    """The machine's limits in one line."""
    limits = report.limits
    if not limits:
        return "limits of the machine: not measured"
    words = [f"matrix product {limits['gemm'] / 1e12:.1f} TFLOP/s"]
    for key, name in (("h2d", "H2D"), ("d2h", "D2H"), ("h2d_both", "each way at once")):
        if key in limits:
            words.append(f"{name} {limits[key] / 1e9:.1f} GB/s")
    for key, name in (("host_mix", "host memory, update's mix"), ("host_mix_dma", "same while copying")):
        if key in limits:
            words.append(f"{name} {limits[key] / 1e9:.1f} GB/s")
    for key, name in (("advance", "CPU update"), ("advance_dma", "CPU update while copying")):
        if key in limits:
            mix = limits.get("host_mix_dma" if key.endswith("dma") else "host_mix", 0.0)
            share = f" ({limits[key] * 30 / mix:.0%} of that mix)" if mix else ""
            words.append(f"{name} {limits[key] / 1e9:.2f} G parameters/s{share}")
    return "; ".join(words)


def markdown(report: Report, plot: str | None) -> str:
    """The report as a page."""
    lines = ["# Training side by side", ""]
    lines += [", ".join(f"{name} {value}" for name, value in report.machine.items()), "", limits_text(report), ""]
    lines += [
        "tokens/s counts real tokens over whole optimizer steps; the clock stops when device and host updates are done."
        " x: ratio within this run. TFLOPS: model operations, then with recompute counted. GPU: peak allocated and"
        " reserved over the timed steps. host B/p: peak host bytes per parameter beyond the process before the model."
        " busy: share of the time, from a trace of further steps. x limit: step time over the largest limit. clip:"
        " `quiet` asks for clipping that never takes effect, `active` clips every step. *: from an earlier run on this"
        " machine.",
        "",
    ]
    if plot is not None:
        lines += [f"![tokens per second]({plot})", ""]
    for title, results in groups_of(report).items():
        lines += [f"## {title}", "", f"| {' | '.join(HEAD)} |", "|---" * 2 + "|---:" * (len(HEAD) - 2) + "|"]
        lines += [f"| {' | '.join(cells(report, result))} |" for result in results if not result.error]
        lines.append("")
        for result in results:
            name = f"{CONTENDERS[result.contender]} {result.label} ({result.load.clip})".replace("  ", " ")
            if result.error:
                lines.append(f"- {name}: no result: {result.error}")
            elif result.contender == "ours":
                waits = ", ".join(f"{wait} {share:.1%}" for _, wait, share in result.waits[:3])
                lines.append(f"- {name}: {result.checked}. {result.plan} Longest waits: {waits}.")
        lines.append("")
    if report.verdicts:
        lines += ["## Goals", "", *(f"- {verdict_text(verdict)}" for verdict in report.verdicts), ""]
    return "\n".join(lines)
