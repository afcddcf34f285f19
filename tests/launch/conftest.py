"""Shared pieces: an installed look of the source tree for child processes, and a small stand-in for the engine."""

import configparser
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import slideformer_backend
from slideformer_backend.integrations import hooks
from slideformer_backend.integrations.session import session
from tests.launch import warm

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """A folder with the distribution's metadata: with it and the tree on its path, a child sees us installed."""
    folder = tmp_path_factory.mktemp("site")
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    info = folder / f"slideformer_backend-{slideformer_backend.__version__}.dist-info"
    info.mkdir()
    version = slideformer_backend.__version__
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: slideformer-backend\nVersion: {version}\n")
    groups = metadata["options.entry_points"]
    (info / "entry_points.txt").write_text("".join(f"[{group}]{text}\n" for group, text in groups.items()))
    return folder


@pytest.fixture
def environ(site, tmp_path):
    """Environment of a child process: SlideFormer installed, nothing asked for, no user's configuration."""
    drop = ("SLIDEFORMER_", "ACCELERATE_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hf"),
    }


@pytest.fixture
def python(environ, tmp_path):
    """Runs Python in a child process; returns its output, or fails with it."""

    def call(*arguments, fails=False, **variables):
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            env={**environ, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout + (done.stderr if fails else "")

    return call


@pytest.fixture(scope="session")
def warm_server(site):
    """The socket of this worker's server of warm processes; None beside a GPU, whose driver no fork inherits."""
    return None if torch.cuda.is_available() else warm.server(os.pathsep.join([str(site), str(ROOT)]))


@pytest.fixture
def warm_python(warm_server, environ, tmp_path):
    """As ``python``, in a process that has its imports already; on request in another folder."""

    def call(*arguments, cwd=tmp_path, timeout=280, **variables):
        given = {**environ, **variables}
        with open(tmp_path / "stdout", "w+") as out, open(tmp_path / "stderr", "w+") as errors:
            if warm_server is None:
                command = [sys.executable, *map(str, arguments)]
                options = {"stdin": subprocess.DEVNULL, "timeout": timeout, "check": False}
                status = subprocess.run(command, env=given, cwd=cwd, stdout=out, stderr=errors, **options).returncode
            else:
                outputs = out.fileno(), errors.fileno()
                started = warm.Ended(arguments, {**given, warm.OWN: str(warm_server)}, cwd=cwd, outputs=outputs)
                status = started.wait(timeout)
            said, problem = ((out.seek(0), out.read())[1], (errors.seek(0), errors.read())[1])
        assert status == 0, said + problem
        return said

    return call


@pytest.fixture
def clean(monkeypatch):
    """Nothing asked for in this process, hooks installed, and all of it undone afterwards."""
    for name in list(os.environ):
        if name.startswith(("SLIDEFORMER_", "ACCELERATE_")):
            monkeypatch.delenv(name)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    session.reset()
    hooks.install()
    yield monkeypatch
    hooks.uninstall()
    session.reset()


class FakeEngine:
    """Keeps the contract of the engine that the integrations rely on, doing the plain thing."""

    def __init__(self, model, config, device, autocast_dtype):
        self.model, self.config, self.device, self.autocast_dtype = model, config, device, autocast_dtype
        self.last_microbatch = lambda: True
        self.bound, self.clips, self.skip, self.detached = [], [], False, False
        self._ids = {id(parameter) for parameter in model.parameters()}
        self.hooks = []

    @property
    def is_detached(self):
        return self.detached

    def add_hook(self, handle):
        self.hooks.append(handle)

    def record_of(self, parameter):
        return None

    def bind(self, optimizer):
        if optimizer in self.bound:
            return
        self.bound.append(optimizer)
        plain = type(optimizer).step

        def step(self_, closure=None):
            return None if self.skip else plain(self_, closure)

        optimizer.step = types.MethodType(step, optimizer)

    def owns(self, parameters):
        return all(id(parameter) in self._ids for parameter in parameters)

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2.0):
        self.clips.append((list(parameters), max_norm, norm_type))
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def step_was_skipped(self, optimizer):
        return self.skip

    def detach(self):
        for hook in self.hooks:
            hook.remove()
        for optimizer in self.bound:
            optimizer.__dict__.pop("step", None)
        self.detached = True
        sys.modules["slideformer_backend.api"].made.remove(self)


@pytest.fixture
def fake_api(clean):
    """``slideformer_backend.api`` with :class:`FakeEngine`; ``made`` lists the engines that are attached."""
    api = types.ModuleType("slideformer_backend.api")
    api.made = []

    def engine_of(module):
        return next((e for e in api.made if any(part is e.model for part in module.modules())), None)

    def attach(model, config, *, device, autocast_dtype=None, optimizers=()):
        if getattr(model, "refuse", None) is not None:
            raise model.refuse
        if engine_of(model) is None:
            api.made.append(FakeEngine(model, config, device, autocast_dtype))
        return engine_of(model)

    api.attach, api.engine_of, api.engines = attach, engine_of, lambda: list(api.made)
    clean.setitem(sys.modules, api.__name__, api)
    clean.setattr(slideformer_backend, "api", api, raising=False)
    return api


@pytest.fixture
def active(clean):
    """SlideFormer asked for by the launcher."""
    clean.setenv("ACCELERATE_USE_SLIDEFORMER", "true")
    hooks.keep_off_gpu()
    return clean


@pytest.fixture(autouse=True)
def fresh_state():
    """Accelerate's process-wide state does not leak from test to test."""
    yield
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
