"""``python -m slideformer_backend.run [options] script.py ...``: SlideFormer without the launcher or the entry point.

Also under the stock launcher: ``accelerate launch -m slideformer_backend.run script.py ...``.
"""

from __future__ import annotations

import argparse
import atexit
import errno
import importlib.util
import json
import os
import runpy
import sys
from collections.abc import Mapping, Sequence

from slideformer_backend.config import DISABLE_VARIABLE, SlideFormerConfig, environment_settings, is_true, keys
from slideformer_backend.errors import ConfigError
from slideformer_backend.mistakes import check_output, said_in_one_line


def parser(prog: str) -> argparse.ArgumentParser:
    """The options before the script; everything after the script's name belongs to the script."""
    result = argparse.ArgumentParser(
        prog=prog, description="Run a training script with SlideFormer.", allow_abbrev=False
    )
    result.add_argument("--slideformer_config", metavar="FILE", help="YAML or JSON file with SlideFormer's keys")
    for key in keys():
        text = key.metadata["doc"] if key.metadata["built"] else argparse.SUPPRESS
        result.add_argument(f"--slideformer_{key.name}", metavar="VALUE", help=text.replace("%", "%%"))
    result.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    result.add_argument("script", help="the script, or with -m the module")
    result.add_argument("script_args", nargs=argparse.REMAINDER, help="arguments of the script")
    return result


def read_file(path: str) -> Mapping[str, object]:
    """Settings from a file: SlideFormer's keys alone, or a launch configuration with a ``slideformer_config`` section.

    Raises:
        ConfigError: the file is not there, not readable, or holds no mapping.
    """
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file) if path.endswith(".json") else yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    content = {} if content is None else content
    if isinstance(content, dict) and "slideformer_config" in content:
        content = content["slideformer_config"] or {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold keys and values.", found=type(content).__name__)
    return content


def prepare(options: argparse.Namespace) -> str | None:
    """Writes the configuration into the environment and installs the hooks. Runs before torch is imported.

    Returns:
        The file that a trace of the run goes to, if one was asked for.

    Raises:
        ConfigError: a bad key or value, or a trace that cannot be written.
    """
    from slideformer_backend.integrations.hooks import install
    from slideformer_backend.integrations.launch_request import show_one_gpu, write_environment

    given = {key.name: getattr(options, f"slideformer_{key.name}") for key in keys()}
    flags = {name: value for name, value in given.items() if value is not None}
    in_file = read_file(options.slideformer_config) if options.slideformer_config else {}
    merged = {**in_file, **environment_settings(), **flags}
    config = SlideFormerConfig.from_mapping(merged, source="slideformer_config")
    if config.trace is not None:
        check_output(config.trace)
    values = config.to_mapping()
    environ = dict(os.environ)
    write_environment(environ, {name: values[name] for name in merged})
    if "ACCELERATE_DYNAMO_BACKEND" in environ and environ.get("OMP_NUM_THREADS") == "1":
        del environ["OMP_NUM_THREADS"]  # the default of Accelerate's launcher, and the optimizer runs on the CPU
    show_one_gpu(environ, _gpu_count)
    os.environ.clear()
    os.environ.update(environ)
    install()
    return config.trace


def check_script(script: str, *, is_module: bool) -> None:
    """Whether there is something to run.

    Raises:
        ConfigError: there is not, in the words of Python; ``sys.path`` is that of the run.
    """
    if is_module:
        top = script.partition(".")[0]
        if importlib.util.find_spec(top) is None:
            raise ConfigError(f"No module named {top}")
    elif not os.access(script, os.R_OK):
        code = errno.EACCES if os.path.exists(script) else errno.ENOENT
        raise ConfigError(f"can't open file {os.path.abspath(script)!r}: [Errno {code}] {os.strerror(code)}")


def _modified(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


def _say_if_untouched(trace: str, modified: int | None) -> None:
    """The file tells whether this process, or one that it started, has written a trace."""
    if _modified(trace) == modified:
        print("[slideformer] no trace: no model was prepared, or none was trained", file=sys.stderr, flush=True)


def _gpu_count() -> int:
    """How many NVIDIA devices the driver shows, without importing torch: OpenMP would be set up too early."""
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0


def main(argv: Sequence[str] | None = None, prog: str = "python -m slideformer_backend.run") -> None:
    """Runs the script as ``__main__``, as ``python script.py ...`` would."""
    options = parser(prog).parse_args(argv)
    with said_in_one_line(prog):
        trace = None if is_true(os.environ.get(DISABLE_VARIABLE)) else prepare(options)
        sys.path[0] = os.getcwd() if options.module else os.path.dirname(os.path.abspath(options.script))
        check_script(options.script, is_module=options.module)
    if trace is not None:  # registered before the recorder's own, so that it runs after it
        atexit.register(_say_if_untouched, os.path.abspath(trace), _modified(trace))
    sys.argv = [options.script, *options.script_args]
    if options.module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
