"""The ``slideformer`` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from slideformer_backend import __version__
from slideformer_backend.mistakes import said_in_one_line


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script.

    The commands take their own arguments, so only the first word is read here.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="slideformer", description="Fine-tune models larger than the GPU.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("launch", add_help=False, help="accelerate launch, with SlideFormer switched on")
    commands.add_parser("run", add_help=False, help="run one script in this process, without a launcher")
    commands.add_parser("trace", add_help=False, help="run one script and write a timeline of it; or summarise one")
    commands.add_parser("bench", add_help=False, help="measure training beside others; bench kernels: the kernels")
    commands.add_parser("plan", add_help=False, help="what a model needs of a machine, from its config alone")
    commands.add_parser("doctor", add_help=False, help="check this machine and explain what it finds")
    commands.add_parser("export", add_help=False, help="write a checkpoint as a plain model folder")
    commands.add_parser("convert", add_help=False, help="turn a DeepSpeed configuration into one of SlideFormer")
    command = parser.parse_args(arguments[:1]).command
    scripts: dict[str, Callable[[Sequence[str]], None]] = {"run": run, "trace": trace}
    if command in scripts:  # whose errors are their own: they run in this process
        scripts[command](arguments[1:])
        return
    others: dict[str, Callable[[Sequence[str]], int | None]] = {
        "launch": launch, "bench": bench, "plan": plan, "doctor": doctor, "export": export, "convert": convert
    }  # fmt: skip
    with said_in_one_line(f"slideformer {command}"):
        status = others[command](arguments[1:])
    if status:
        sys.exit(status)


def launch(arguments: Sequence[str]) -> None:
    """``accelerate launch --use_slideformer ...``, also where torch's autoload is switched off."""
    from slideformer_backend.integrations.launch import start

    start(arguments)


def run(arguments: Sequence[str]) -> None:
    """``slideformer run script.py ...``: see ``run.py``."""
    from slideformer_backend.run import main as run_script

    run_script(arguments, prog="slideformer run")


def trace(arguments: Sequence[str]) -> None:
    """``slideformer trace [-o FILE] script.py ...`` runs and records; ``slideformer trace --show FILE`` summarises."""
    parser = argparse.ArgumentParser(
        prog="slideformer trace",
        description="Run a training script and record what waits for what.",
        allow_abbrev=False,
    )
    parser.add_argument("--show", metavar="FILE", help="summarise a trace that was written earlier, and run nothing")
    parser.add_argument("-o", "--output", default="trace.json", help="file to write (.gz compresses); trace.json")
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, help="the script and its arguments, as for `slideformer run`, whose options"
        " may stand before it"
    )  # fmt: skip
    options, before = parser.parse_known_args(arguments)  # options of `run` that stand before the script
    if options.show is not None:
        from slideformer_backend.trace import load
        from slideformer_backend.trace_summary import describe

        with said_in_one_line(parser.prog):
            print(describe(load(options.show)))
        return
    if not options.script:
        parser.error("name a script to run, or a trace with --show")
    from slideformer_backend.run import main as run_script

    output = os.path.abspath(options.output)  # the script may go elsewhere
    run_script(["--slideformer_trace", output, *before, *options.script], prog=parser.prog)


def bench(arguments: Sequence[str]) -> None:
    """``slideformer bench`` and ``slideformer bench kernels``: see ``benchmarks/harness``."""
    if arguments[:1] == ["kernels"]:
        from slideformer_backend.benchmarks.harness.kernel_command import main as run_kernels

        run_kernels(arguments[1:])
        return
    from slideformer_backend.benchmarks.harness.command import main as run_bench

    run_bench(arguments)


def plan(arguments: Sequence[str]) -> int:
    """``slideformer plan MODEL ...``: see ``commands/plan.py``."""
    from slideformer_backend.commands.plan import main as run_plan

    return run_plan(arguments)


def doctor(arguments: Sequence[str]) -> int:
    """``slideformer doctor``: see ``commands/doctor.py``."""
    from slideformer_backend.commands.doctor import main as run_doctor

    return run_doctor(arguments)


def export(arguments: Sequence[str]) -> None:
    """``slideformer export CHECKPOINT OUT``: see ``integrations/export.py``."""
    from slideformer_backend.integrations.export import main as run_export

    run_export(arguments)


def convert(arguments: Sequence[str]) -> None:
    """``slideformer convert ds_config.json``: see ``integrations/deepspeed_config.py``."""
    from slideformer_backend.integrations.deepspeed_config import main as run_convert

    run_convert(arguments)


if __name__ == "__main__":
    main()
