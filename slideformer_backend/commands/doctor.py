"""``slideformer doctor``: look at this machine, say what was found, and what to do about it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from .findings import Check, Finding, run_check

if TYPE_CHECKING:
    from ..plan.machine import Machine

MARKS = {"ok": ("ok", "green"), "note": ("note", "cyan"), "warning": ("warn", "yellow"), "error": ("ERROR", "bold red")}


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = argparse.ArgumentParser(prog="slideformer doctor", description=__doc__)
    result.add_argument("--nvme-path", metavar="FOLDER", help="folder for spill files, to check and measure")
    result.add_argument("--json", action="store_true", help="as JSON, for bug reports")
    result.add_argument("--no-measure", action="store_true", help="measure nothing; rates measured earlier are shown")
    result.add_argument("--quick", action="store_true", help="measure with small sizes, which says less")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was found. Returns 1 when something is in the way of training, else 0."""
    options = parser().parse_args(arguments)
    findings = examine(options.nvme_path, measure=not options.no_measure, quick=options.quick)
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1, default=str))
    else:
        _show(findings)
    return 1 if any(finding.level == "error" for finding in findings) else 0


def examine(nvme_path: str | None, *, measure: bool, quick: bool) -> list[Finding]:
    """All findings, in order. Without ``measure`` no rates are taken and nothing is written to ``nvme_path``."""
    from . import check_gpu, check_host, check_software

    machine, failure = _machine(measure=measure, quick=quick)
    folder, size = nvme_path if measure else None, 1 << 26 if quick else 1 << 30
    checks: list[tuple[str, Check]] = [
        ("versions", check_software.versions),
        ("hook", check_software.hook),
        ("configuration", check_software.environment),
        ("GPU", check_gpu.gpu),
        ("PCIe", partial(check_gpu.link, machine)),
        ("pinning", partial(check_gpu.pinning, (1 << 26,)) if quick else check_gpu.pinning),
        ("host memory", check_host.memory),
        ("CPU", partial(check_host.processors, machine)),
        ("cache", partial(check_host.cache, machine)),
        ("NVMe folder", partial(check_host.spill_folder, folder, size)),
        ("GPUDirect Storage", check_gpu.gpu_direct),
    ]
    found = [finding for topic, check in checks for finding in run_check(topic, check)]
    return found if failure is None else [*found, failure]


def _machine(*, measure: bool, quick: bool) -> tuple[Machine, Finding | None]:
    from ..plan.machine import probe_machine
    from ..plan.rates_cache import with_cached_rates
    from .calibrate import calibrated

    machine = probe_machine()
    if not measure:
        return with_cached_rates(machine), None
    print("measuring (some 20 s; --no-measure skips it) ...", file=sys.stderr)
    try:
        return calibrated(machine, quick=quick, refresh=True), None
    except Exception as error:  # a driver's or an allocator's own
        text = f"{type(error).__name__}: {error}"
        remedy = "free GPU and host memory, or see what --no-measure finds"
        return machine, Finding(topic="calibration", level="warning", found=f"failed: {text}", remedy=remedy)


def _show(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in findings:
        mark, style = MARKS[finding.level]
        text = Text(finding.found)
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", style=style)
        table.add_row(Text(mark, style), finding.topic, text)
    console.print(table)
    errors = sum(finding.level == "error" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    console.print(
        "Training cannot work before the errors are gone."
        if errors
        else f"Nothing is in the way of training{f' ({warnings} warnings)' if warnings else ''}.",
        style="bold",
    )
