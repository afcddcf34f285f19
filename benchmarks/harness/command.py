"""``slideformer bench``: the command line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

import torch
import yaml
from rich.console import Console

from slideformer_backend.benchmarks.harness.driver import Driver, Options, read_lines
from slideformer_backend.benchmarks.harness.plot import draw
from slideformer_backend.benchmarks.harness.reach import ROWS, TOY, Row, jobs_of
from slideformer_backend.benchmarks.harness.report import make_report, markdown, print_tables
from slideformer_backend.benchmarks.harness.shapes import SHAPES
from slideformer_backend.benchmarks.harness.spec import CONTENDERS, Clip, Result


def parser() -> argparse.ArgumentParser:
    """All options."""
    result = argparse.ArgumentParser(
        prog="slideformer bench",
        description="Train one model with SlideFormer, with other offload systems and with none, in one run on this"
        " machine, and measure what the machine can do. Contenders that are not installed, fail or hang are reported."
        " `slideformer bench kernels` measures the fused kernels alone.",
    )
    names = ", ".join(row.name for row in (*ROWS, *TOY))
    result.add_argument("--rows", help=f"comma-separated rows of the table of goals, or all: {names}")
    result.add_argument("--shape", choices=SHAPES, help="instead of --rows: one model")
    result.add_argument("--sequences", type=int, default=32, help="with --shape: sequences per micro-batch (32)")
    result.add_argument("--length", type=int, default=1024, help="with --shape: tokens per sequence (1024)")
    result.add_argument("--accumulate", type=int, default=1, help="with --shape: micro-batches per step (1)")
    result.add_argument("--check-layers", type=int, help="with --shape: depth at which exactness is checked (all)")
    result.add_argument("--contenders", default="", help=f"comma-separated, of {', '.join(CONTENDERS)}; default: all")
    result.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of our configuration")
    result.add_argument(
        "--steps",
        type=int,
        default=20,
        help="timed steps (20): the last one's updates, which no forward hides, count too",
    )
    result.add_argument(
        "--peer-steps", type=int, help="timed steps of other systems, whose steps do not overlap (--steps)"
    )
    result.add_argument("--clips", default="", help="of ours, only these, of off, quiet, active; default: all of a row")
    result.add_argument("--warmup", type=int, default=5, help="steps before them (5)")
    result.add_argument("--peer-warmup", type=int, help="steps before those of all others (--warmup)")
    result.add_argument("--rounds", type=int, default=1, help="interleaved repetitions of everything (1)")
    result.add_argument("--timeout", type=float, default=300.0, help="seconds for one contender (300)")
    result.add_argument("--budget", type=float, help="seconds after which nothing more is started")
    result.add_argument(
        "--kernels", choices=("liger", "ours", "none"),
        help="of every contender (liger on a GPU); ours: SlideFormer has its own, the others Liger's",
    )  # fmt: skip
    result.add_argument("--device", choices=("cuda", "cpu"), help="cuda where there is one")
    result.add_argument("--threads", type=int, help="of torch on the CPU")
    result.add_argument("--learning-rate", type=float, default=1e-5)
    result.add_argument("--keep-free", type=float, default=3, help="GiB of host memory: who leaves less is stopped (3)")
    result.add_argument("--no-limits", action="store_true", help="do not measure the machine's limits")
    result.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of the report (out/bench)")
    result.add_argument(
        "--resume", type=Path, action="append", default=[], metavar="FILE",
        help="results.jsonl of an earlier run on this machine; what succeeded there is not run again",
    )  # fmt: skip
    result.add_argument("--report-only", action="store_true", help="run nothing: a report of the --resume files")
    return result


def rows_of(options: argparse.Namespace) -> list[Row]:
    """The rows that the options name.

    Raises:
        SystemExit: an unknown row.
    """
    if options.shape is not None:
        row = Row(
            name=options.shape,
            shape=options.shape,
            sequences=options.sequences,
            length=options.length,
            accumulate=options.accumulate,
            peers=("ceiling", "ceiling-all", "zero2", "zero3", *(("torchao",) if options.accumulate == 1 else ())),
            check_layers=options.check_layers,
        )
        immediate = dataclasses.replace(row, config={"update": "immediate"}, label="immediate", clips=("off",))
        return [row, immediate]
    known = {row.name: row for row in (*ROWS, *TOY)}
    default = "all" if options.device == "cuda" else "toy,toy-immediate"
    text = options.rows or default
    return list(ROWS) if text == "all" else [known[name] for name in _names(text, known, "row")]


def _names(text: str, known: Iterable[str], what: str) -> list[str]:
    """Comma-separated names.

    Raises:
        SystemExit: one that is not known.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"slideformer bench: no {what} {unknown[0]!r}; there are {', '.join(known)}")
    return names


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and report. The exit status is 1 when one of our own configurations has no result."""
    options = parser().parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    console = Console(width=None if sys.stdout.isatty() else 170)
    rows = rows_of(options)
    machine: dict[str, str] = {}
    previous: list[Result] = []
    limits: dict[str, float] = {}
    for path in options.resume:
        earlier = read_lines(path)
        previous += earlier.results
        limits, machine = limits or earlier.limits, machine or earlier.machine
    results = [r for r in previous if not (r.earlier and dataclasses.replace(r, earlier=False) in previous)]
    if not options.report_only:
        common = {
            "device": options.device,
            "kernels": options.kernels or ("liger" if options.device == "cuda" else "none"),
            "steps": options.steps,
            "warmup": options.warmup,
            "timeout": options.timeout,
            "threads": options.threads,
            "learning_rate": options.learning_rate,
        }
        overrides = {key: yaml.safe_load(value) for key, _, value in (item.partition("=") for item in options.set)}
        wanted = _names(options.contenders, CONTENDERS, "contender")
        clips = _names(options.clips, get_args(Clip), "clip")
        driver = Driver(
            Options(
                out=options.out,
                rounds=options.rounds,
                budget=options.budget,
                previous=previous,
                keep_free=int(options.keep_free * 2**30),
                say=lambda line: console.print(line, markup=False, highlight=False),
            )
        )
        if not limits and not options.no_limits:
            driver.measure_limits(options.device, quick=options.device == "cpu")
        run = driver.run_all(jobs_of(rows, wanted, common, overrides, options.peer_steps, clips, options.peer_warmup))
        results, limits, machine = run.results, limits or run.limits, run.machine
    write(rows, results, limits, options.out, console, machine)
    if any(result.contender == "ours" and result.error for result in results):
        sys.exit(1)


def write(
    rows: Sequence[Row],
    results: Sequence[Result],
    limits: dict[str, float],
    out: Path,
    console: Console,
    machine: dict[str, str] | None = None,
) -> None:
    """report.json, report.md, report.png in ``out``, and the tables on the terminal.

    ``machine``: where it was measured, if not here.
    """
    report = make_report(rows, results, limits, machine)
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(report.to_dict(), indent=1))
    drawn = draw(report, out / "report.png")
    (out / "report.md").write_text(markdown(report, "report.png" if drawn else None))
    print_tables(report, console)
    console.print(f"report: {out / 'report.md'}", markup=False, highlight=False)
