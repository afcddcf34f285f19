#!/usr/bin/env python3
"""The tests: every suite that this machine can run, lint and strict types among them.

    python3 tests/run.py                    # everything
    python3 tests/run.py -- -k clipping     # after --: arguments for pytest

Needs Python >= 3.10 and a package registry, nothing else. GPU tests run when an NVIDIA GPU is there.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - whoever starts this may have an older one
    sys.exit("Python 3.10 or newer is needed; this is Python %d.%d." % sys.version_info[:2])  # noqa: UP031

import argparse
import os
import shlex
import subprocess
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import bootstrap

ROOT = bootstrap.ROOT


def parse(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache", help="folder of fetched model and text")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest")
    return parser.parse_args(arguments)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def stages(options: argparse.Namespace, gpu: bool) -> dict[str, list[str]]:
    """The pytest command of each stage, as arguments for the environment's Python."""
    tests = ["-m", "pytest", "--durations=10"]
    # Every worker computes on one thread (see `test_environment`), so workers share nothing but memory.
    # A file stays with one worker: what its tests share is made once. The longest begin (tests/conftest.py).
    by_file = ["--dist", "loadfile", "--no-loadscope-reorder"]
    workers = ["-n", str(min(cores(), 8)), *by_file] if cores() > 1 else []
    found = {"gpu": [*tests, "-m", "gpu", *options.pytest]} if gpu else {}
    found["tests"] = [*tests, "-m", "not gpu", *workers, *options.pytest]
    return found


def test_environment(options: argparse.Namespace) -> dict[str, str]:
    """One thread per process; no model hub; the cache for tests that use the real model.

    Tests start more than a hundred processes, which read the byte code that the first of them wrote.
    """
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        **threads,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "SLIDEFORMER_TEST_CACHE": str(options.cache.resolve()),
    }


def main(arguments=None) -> None:
    options = parse(arguments)
    try:
        environment = bootstrap.prepare(options.venv, ["bench", "test"])
    except bootstrap.SetupError as error:
        sys.exit(f"[setup] {error}")
    environ = test_environment(options)
    failed = []
    for name, command in stages(options, environment.gpu).items():
        print(f"[{name}] python {shlex.join(command)}", flush=True)
        started = time.monotonic()
        whole = [environment.python, *command]
        status = subprocess.run(whole, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, check=False).returncode
        # 5: pytest found no test, which is right when only CPU tests match what was asked for.
        if status != 0 and not (name == "gpu" and status == 5):
            failed.append(name)
        print(f"[{name}] {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
