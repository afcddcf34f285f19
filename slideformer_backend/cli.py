"""The ``slideformer`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from slideformer_backend import __version__


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script.

    ``launch`` and ``run`` take their own arguments, so only the first word is read here.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="slideformer", description="Fine-tune models larger than the GPU.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("launch", add_help=False, help="accelerate launch, with SlideFormer switched on")
    commands.add_parser("run", add_help=False, help="run one script in this process, without a launcher")
    command = parser.parse_args(arguments[:1]).command
    if command == "launch":
        launch(arguments[1:])
    else:
        from slideformer_backend.run import main as run

        run(arguments[1:], prog="slideformer run")


def launch(arguments: Sequence[str]) -> None:
    """``accelerate launch --use_slideformer ...``, also where torch's autoload is switched off."""
    from slideformer_backend.integrations.launch import start

    start(arguments)


if __name__ == "__main__":
    main()
