#!/usr/bin/env python3
"""The main job: fine-tune a real language model with an ordinary Accelerate script under SlideFormer.

    python3 benchmarks/finetune/run.py

Needs Python >= 3.10 and a package registry, nothing else: it makes its own environment, fetches model and text, trains,
and checks what was saved. Run again, it starts within seconds.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - whoever starts this may have an older one
    sys.exit("Python 3.10 or newer is needed; this is Python %d.%d." % sys.version_info[:2])  # noqa: UP031 - read by older Pythons

import argparse
import os
import shlex
import subprocess
import time
from pathlib import Path

# What two CPU cores do in a few minutes.
SIZE = ("--max_train_steps", "20")

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import bootstrap  # noqa: E402


def parse(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=bootstrap.ROOT / ".venv", help="folder of the environment")
    parser.add_argument(
        "--cache", type=Path, default=bootstrap.ROOT / ".cache", help="folder of fetched model and text"
    )
    parser.add_argument(
        "--output", type=Path, default=bootstrap.ROOT / "out" / "finetune", help="folder of the results"
    )
    parser.add_argument(
        "--config", type=Path, default=HERE / "slideformer.yaml", help="Accelerate's configuration file"
    )
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, help="after --: arguments for train.py, e.g. -- --max_train_steps 10"
    )
    return parser.parse_args(arguments)


def say(message: str) -> None:
    print(f"[job] {message}", flush=True)


def run(command, environ) -> None:
    """Run a step of the job in the foreground; a failing step ends the job with its exit status."""
    status = subprocess.run([str(part) for part in command], env=environ, check=False).returncode
    if status != 0:
        sys.exit(f"[job] `{shlex.join(map(str, command))}` failed with exit status {status}")


def main(arguments=None) -> None:
    options = parse(arguments)
    options.output = options.output.resolve()
    options.cache = options.cache.resolve()
    try:
        environment = bootstrap.prepare(options.venv, ["bench"])
    except bootstrap.SetupError as error:
        sys.exit(f"[setup] {error}")
    started = time.monotonic()
    # Model and text are local files: nothing may ask a model hub.
    environ = {
        **os.environ,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{environment.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    # Steps that only convert and check run without us, as any other program would.
    plain = {**environ, "SLIDEFORMER_DISABLE": "1"}
    run([environment.python, HERE / "fetch.py", options.cache], plain)
    script = [argument for argument in options.script if argument != "--"]
    data = [
        "--model",
        options.cache / "smollm2-135m",
        "--data",
        options.cache / "human-eval",
        "--output",
        options.output,
    ]
    command = [
        environment.command("accelerate"),
        "launch",
        "--config_file",
        options.config,
        HERE / "train.py",
        *data,
        *SIZE,
        *script,
    ]
    say("accelerate launch " + shlex.join(map(str, command[2:])))
    run(command, environ)
    run([environment.python, HERE / "check.py", *data], plain)
    say(f"finished in {time.monotonic() - started:.0f} s, results in {options.output}")


if __name__ == "__main__":
    main()
