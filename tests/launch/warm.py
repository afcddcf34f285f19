"""Python processes that start warm: forks of one that has imported the libraries, for scripts whose imports are not
what is tested (``test_processes.py`` tests those, in processes that start from nothing).

    python -m tests.launch.warm SOCKET      # serves until its standard input ends

A fork gets arguments, environment, folder and output of its own. The server got
our hooks when it imported torch, before everything else, as every process does where we are installed. What depends on
the environment when a cold process starts is done again in a fork, ``sitecustomize`` among it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

from slideformer_backend.integrations import hooks

LIBRARIES = (
    "torch", "numpy", "accelerate.commands.launch", "accelerate.test_utils", "datasets", "peft", "trl",
    "transformers.trainer", "transformers.trainer_seq2seq", "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert",
    "transformers.tokenization_utils_tokenizers", "torch._dynamo", "slideformer_backend.engine",
)  # fmt: skip
CLASSES = ("SFTTrainer", "DPOTrainer", "RewardTrainer", "GRPOTrainer")
"""Of TRL, which imports them when they are asked for."""
OWN = "SLIDEFORMER_TEST_WARM"
"""Variable with the socket, so that a launcher's child is a fork too."""
LIMIT = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


_SERVERS: list[str] = []


def server(path):
    """The socket of the one server of this process; it is started with ``path`` as PYTHONPATH, and ends with us."""
    if not _SERVERS:
        _SERVERS.append(_start_server(path))
    return _SERVERS[0]


def _start_server(path):
    folder = tempfile.mkdtemp(prefix="warm")
    drop = ("SLIDEFORMER_", "ACCELERATE_", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    environ |= {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": folder}
    environ["PYTHONPATH"] = path
    command = [sys.executable, "-m", "tests.launch.warm", f"{folder}/socket"]
    process = subprocess.Popen(command, env=environ, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    @atexit.register
    def end():
        process.stdin.close()
        process.stdout.close()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)

    if process.stdout.readline() != b"ready\n":
        raise RuntimeError("the server of warm processes did not start")
    return f"{folder}/socket"


class Ended:
    """A warm process: the part of ``subprocess.Popen`` that launchers use."""

    def __init__(self, arguments, environ, *, cwd=None, outputs=(1, 2)):
        request = {"arguments": list(map(str, arguments)), "environ": dict(environ), "cwd": str(cwd or os.getcwd())}
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(environ[OWN])
        socket.send_fds(self._connection, [json.dumps(request).encode() + b"\n"], outputs)
        self.returncode = None

    def wait(self, timeout=None):
        """The exit status; when time is up, the process is killed and TimeoutError raised."""
        self._connection.settimeout(timeout)
        with self._connection:  # the server kills what nobody waits for any more
            self.returncode = int(self._connection.recv(64) or b"-1")
        return self.returncode


def main():
    """Serves; a fork returns from that, and runs what was asked for as the last thing that the process does."""
    for name in LIBRARIES:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    with contextlib.suppress(ModuleNotFoundError):
        for name in CLASSES:
            getattr(importlib.import_module("trl"), name)
    _compile()
    gc.collect()
    gc.freeze()
    arguments = _serve(sys.argv[1])
    status = 0 if arguments is None else _status(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _compile():
    """The kernels that AdamW on fp32 and on bf16 weights needs."""
    from slideformer_backend.optim.numba_kernels import warm_up
    from slideformer_backend.optim.rules import RULES

    for kind in ("fp32", "bf16"):
        warm_up(RULES["adamw"], kind, kind, "exact")


def _serve(path):
    """Arguments, in a fork; None at the end."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(16)
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [], 1.0)
            while _reaped():
                pass
            if sys.stdin in ready:
                return None
            if listener in ready:
                connection, _ = listener.accept()
                if os.fork() == 0:
                    listener.close()
                    return _attend(connection)
                connection.close()


def _reaped():
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(-1, os.WNOHANG)[0]
    return 0


def _attend(connection):
    """Forks once more; the outer one tells the client how that ended, or kills it when the client is gone."""
    text, outputs, _, _ = socket.recv_fds(connection, LIMIT, 2)
    while not text.endswith(b"\n"):
        text += connection.recv(LIMIT)
    pid = os.fork()
    if pid == 0:
        connection.close()
        return _become(json.loads(text), outputs)
    process = os.pidfd_open(pid)
    ready, _, _ = select.select([process, connection], [], [])
    if process not in ready:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(str(status).encode())
    os._exit(0)


def _become(request, outputs):
    """What the operating system and the interpreter's start give a process."""
    for source, target in zip(outputs, (1, 2), strict=True):
        os.dup2(source, target)
        os.close(source)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*own, *(path for path in sys.path[1:] if path not in before)]
    importlib.invalidate_caches()
    hooks.keep_off_gpu()  # as our hook does when accelerate is imported, depending on the environment
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    return request["arguments"]


def _status(arguments):
    """Runs a program to its end, as the interpreter does, but does not take the shared libraries down."""
    status = 0
    try:
        _run(arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    return status


def _run(arguments):
    first, *rest = arguments
    if first == "-m":
        if rest[0].startswith("accelerate.commands"):
            subprocess.Popen = _start
        sys.path.insert(0, os.getcwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(first).resolve().parent))
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


def _start(command, *arguments, env=None, **options):
    """``subprocess.Popen`` of a launcher: its script starts warm as well."""
    if command[0] == sys.executable and not arguments and not options:
        return Ended(command[1:], os.environ if env is None else env)
    return _POPEN(command, *arguments, env=env, **options)


_POPEN = subprocess.Popen


if __name__ == "__main__":
    main()
