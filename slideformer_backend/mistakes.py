"""Mistakes in what a command was asked for: one line and one exit status, whichever command and whichever mistake."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from slideformer_backend.errors import ConfigError, SlideFormerError

STATUS = 2
"""Of a command that was asked for what cannot be done; argparse's own."""


@contextlib.contextmanager
def said_in_one_line(prog: str) -> Iterator[None]:
    """Inside, a command does what the user asked for; none of the user's own code runs in it.

    Raises:
        SystemExit: with ``STATUS``, in place of our errors and of what the system says of a path; it was said.
    """
    try:
        yield
    except (OSError, SlideFormerError) as error:
        if isinstance(error, OSError) and error.errno is None:
            raise  # a library's own, of no path
        lines = (line.strip() for line in str(error).splitlines())
        print(f"{prog}: {' '.join(filter(None, lines))}", file=sys.stderr)
        raise SystemExit(STATUS) from error


def check_output(path: str | os.PathLike[str]) -> None:
    """Asked before the work whose result goes to the file ``path``.

    Raises:
        ConfigError: no such file can be written.
    """
    path = os.path.abspath(path)
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise ConfigError(f"{path} cannot be written: there is no folder {folder}.", remedy=f"mkdir -p {folder}")
    if os.path.isdir(path):
        raise ConfigError(f"{path} cannot be written: it is a folder.", remedy="name a file in it")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ConfigError(f"{path} cannot be written: permission denied.", remedy="name another file")
