"""Measured rates of this machine, kept between runs: one small file per machine, library version and driver."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from .machine import Machine

CACHED = ("gemm", "gpu_memory", "h2d", "d2h", "host")
"""Rates of the machine. Those of a drive belong to a folder and are measured each time."""
VERSION = 2
"""Of what is measured and how; a change makes earlier files count no more."""


def cache_file(machine: Machine, environ: Mapping[str, str] | None = None) -> Path:
    """Where the rates of ``machine`` are kept: below ``XDG_CACHE_HOME``, or ``~/.cache``."""
    variables = os.environ if environ is None else environ
    base = variables.get("XDG_CACHE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path(variables.get("HOME", "/")) / ".cache"
    facts = [VERSION, machine.name, machine.gpu_total, machine.threads, _cpu(), torch.__version__, torch.version.cuda]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return folder / "slideformer" / f"machine-{key}.json"


def load_rates(file: Path) -> dict[str, float]:
    """The rates in ``file``; empty where there is none or it cannot be read."""
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(values, dict):
        return {}
    return {
        name: float(rate)
        for name, rate in values.items()
        if name in CACHED and isinstance(rate, (int, float)) and not isinstance(rate, bool) and rate > 0
    }


def save_rates(file: Path, rates: Mapping[str, float]) -> bool:
    """Keep the rates; whether that worked. A cache that cannot be written is no error."""
    temporary: str | None = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".machine-")
        with os.fdopen(handle, "w") as out:
            json.dump({name: rate for name, rate in rates.items() if name in CACHED}, out)
        os.replace(temporary, file)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False
    return True


def with_cached_rates(machine: Machine) -> Machine:
    """``machine`` with the rates that were measured on it earlier, if any."""
    return machine.with_rates(load_rates(cache_file(machine)), "measured")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
