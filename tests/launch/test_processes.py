"""Whole processes: every way to start a script, what an unrelated program pays, and the switch that turns all off."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHOW = """
import json, os, sys
{first}
import torch
from accelerate import Accelerator
accelerator = Accelerator()
config = getattr(accelerator, "slideformer_config", None)
print("RESULT" + json.dumps({{
    "kind": type(accelerator).__name__,
    "update": getattr(config, "update", None),
    "argv": sys.argv[1:],
    "omp": os.environ.get("OMP_NUM_THREADS"),
    "main": __name__,
}}))
"""
OURS = {"kind": "SlideFormerAccelerator", "update": "immediate", "argv": ["--lr", "1"], "omp": None, "main": "__main__"}


@pytest.fixture
def script(tmp_path):
    """Writes a script that shows what it got; its first import can be chosen."""

    def write(first="from accelerate import Accelerator"):
        path = tmp_path / "train.py"
        path.write_text(SHOW.format(first=first))
        (tmp_path / "sf.yaml").write_text("distributed_type: SLIDEFORMER\nslideformer_config:\n  update: immediate\n")
        (tmp_path / "plain.yaml").write_text("distributed_type: 'NO'\nmixed_precision: 'no'\n")
        return path.name

    return write


def result(output):
    (line,) = [line for line in output.splitlines() if line.startswith("RESULT")]
    return json.loads(line[len("RESULT") :])


class TestStarting:
    def test_accelerate_launch(self, python, script):
        cli = ["-m", "accelerate.commands.accelerate_cli", "launch"]
        assert result(python(*cli, "--config_file", "sf.yaml", script(), "--lr", "1")) == OURS

    def test_the_launch_module_itself(self, python, script):
        words = ["--use_slideformer", "--slideformer_update", "immediate", script(), "--lr", "1"]
        assert result(python("-m", "accelerate.commands.launch", *words)) == OURS

    @pytest.mark.parametrize("first", ["import torch", "import transformers", "import accelerate"])
    def test_whatever_the_script_imports_first(self, python, script, first):
        """Hazard: with accelerate first, accelerate.accelerator is half imported when torch calls us."""
        environment = {"ACCELERATE_USE_SLIDEFORMER": "true", "SLIDEFORMER_UPDATE": "immediate"}
        assert result(python(script(first), "--lr", "1", **environment)) == OURS

    def test_our_command_with_autoload_off(self, python, script):
        output = python(
            "-m", "slideformer_backend.cli", "launch", "--config", "sf.yaml", script(), "--lr", "1",
            TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        )  # fmt: skip
        assert result(output) == OURS

    def test_the_runner_with_autoload_off(self, python, script):
        words = ["--slideformer_config", "sf.yaml", script(), "--lr", "1"]
        output = python("-m", "slideformer_backend.run", *words, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        assert result(output) == OURS

    def test_the_runner_under_the_stock_launcher_with_autoload_off(self, python, script):
        output = python(
            "-m", "accelerate.commands.launch", "--config_file", "plain.yaml", "-m", "slideformer_backend.run",
            "--slideformer_update", "immediate", script(), "--lr", "1", TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        )  # fmt: skip
        assert result(output) == OURS

    def test_a_plugin_with_autoload_off(self, python, tmp_path):
        (tmp_path / "s.py").write_text(
            "from accelerate import Accelerator\nfrom slideformer_backend import SlideFormerPlugin\n"
            "print(type(Accelerator(kwargs_handlers=[SlideFormerPlugin()])).__name__)\n"
        )
        assert "SlideFormerAccelerator" in python("s.py", TORCH_DEVICE_BACKEND_AUTOLOAD="0")

    def test_spawned_workers_of_a_script_under_the_runner(self, python, tmp_path):
        (tmp_path / "s.py").write_text(
            "import torch\n"
            "class Squares(torch.utils.data.Dataset):\n"
            "    def __len__(self): return 4\n"
            "    def __getitem__(self, i): return i * i\n"
            "if __name__ == '__main__':\n"
            "    loader = torch.utils.data.DataLoader(Squares(), num_workers=1, multiprocessing_context='spawn')\n"
            "    print([int(x) for x in loader])\n"
        )
        assert "[0, 1, 4, 9]" in python("-m", "slideformer_backend.run", "s.py", TORCH_DEVICE_BACKEND_AUTOLOAD="0")

    def test_a_module_under_the_runner(self, python, tmp_path):
        (tmp_path / "pkg").mkdir()
        (tmp_path / "pkg" / "__init__.py").touch()
        (tmp_path / "pkg" / "train.py").write_text("import os, sys\nprint(__name__, __package__, sys.argv[1:])\n")
        assert "__main__ pkg ['a', '-b']" in python("-m", "slideformer_backend.run", "-m", "pkg.train", "a", "-b")


class TestErrors:
    def test_the_runner_says_what_is_wrong(self, python, tmp_path):
        (tmp_path / "bad.yaml").write_text("slideformer_config: {updat: exact}\n")
        for words, reason in (
            (["--slideformer_config", "bad.yaml", "s.py"], "did you mean 'update'"),
            (["--slideformer_config", "none.yaml", "s.py"], "none.yaml cannot be read"),
            (["--slideformer_update", "x", "s.py"], "exact, immediate"),
        ):
            assert reason in python("-m", "slideformer_backend.run", *words, fails=True)

    @pytest.mark.parametrize("command", ["run", "trace"])
    @pytest.mark.parametrize(
        ("words", "reason"),
        [
            (["none.py"], "can't open file '{here}/none.py': [Errno 2] No such file or directory"),
            (["-m", "no_such.module"], "No module named no_such"),
            (["--slideformer_update", "x", "s.py"], "slideformer_config: update: not a value of this key."),
        ],
    )
    def test_what_cannot_be_run_is_one_line(self, tmp_path, command, words, reason):
        (tmp_path / "s.py").touch()
        root = Path(__file__).resolve().parents[2]
        done = subprocess.run(
            [sys.executable, "-m", "slideformer_backend.cli", command, *words],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, check=False,
            timeout=120,
        )  # fmt: skip
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2
        assert line.startswith(f"slideformer {command}: {reason.format(here=tmp_path)}")

    def test_errors_of_a_script_are_its_own(self, python, tmp_path):
        (tmp_path / "s.py").write_text("open('/no/such/file')\n")
        assert "Traceback" in python("-m", "slideformer_backend.cli", "run", "s.py", fails=True)

    def test_the_runner_leaves_one_gpu_visible(self, clean):
        from slideformer_backend import run

        clean.setattr(os, "environ", dict(os.environ))
        clean.setattr(run, "_gpu_count", lambda: 4)
        run.prepare(run.parser("run").parse_args(["--slideformer_prefetch", "3", "s.py"]))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
        assert json.loads(os.environ["SLIDEFORMER_CONFIG"]) == {"prefetch": 3}

    def test_the_command_lists_what_there_is(self, python):
        output = python("-m", "slideformer_backend.cli", "--help")
        for command in ("launch", "run", "bench", "trace", "plan", "doctor", "export", "convert"):
            assert f"  {command}" in output


class TestUnrelatedPrograms:
    def test_switched_off_nothing_is_touched(self, python, tmp_path):
        (tmp_path / "s.py").write_text(
            "import sys, inspect, torch, accelerate, accelerate.commands.launch as launch\n"
            "mine = [name for name in sys.modules if name.startswith('slideformer_backend.integrations')]\n"
            "print('MINE', mine, [type(f).__name__ for f in sys.meta_path if 'PostImport' in type(f).__name__])\n"
            "things = [accelerate.Accelerator.__init__, torch.nn.Module.to, launch._validate_launch_command,\n"
            "    accelerate.commands.utils.CustomArgumentParser.parse_known_args,\n"
            "    launch.prepare_simple_launcher_cmd_env,\n"
            "    accelerate.commands.config.config_args.ClusterConfig.__init__]\n"
            "print('STOCK', [inspect.unwrap(thing) is thing for thing in things])\n"
            "print('FILES', [thing.__code__.co_filename for thing in things])\n"
        )
        output = python("s.py", SLIDEFORMER_DISABLE="1", ACCELERATE_USE_SLIDEFORMER="true")
        assert "MINE [] []" in output
        assert "False" not in output
        assert "slideformer" not in output
        assert "False" in python("s.py")  # the check would notice

    def test_not_asked_for_torch_is_not_touched_and_the_rest_passes_through(self, python, tmp_path):
        (tmp_path / "s.py").write_text(
            "import torch, inspect, sys\n"
            "from accelerate import Accelerator\n"
            "print('TO', inspect.unwrap(torch.nn.Module.to) is torch.nn.Module.to)\n"
            "print('KIND', type(Accelerator()).__name__)\n"
            "print('HEAVY', [name for name in ('numba', 'kvikio', 'slideformer_backend.api') if name in sys.modules])\n"
        )
        assert "TO False" in python("s.py", ACCELERATE_USE_SLIDEFORMER="true")
        output = python("s.py")
        assert "TO True" in output
        assert "KIND Accelerator\n" in output
        assert "HEAVY []" in output

    def test_a_failure_of_ours_does_not_break_import_torch(self, python, tmp_path):
        (tmp_path / "s.py").write_text(
            "import sys\n"
            "class Broken:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            "        if name == 'slideformer_backend.integrations.hooks': raise RuntimeError('broken')\n"
            "sys.meta_path.insert(0, Broken())\n"
            "import warnings\n"
            "with warnings.catch_warnings(record=True) as caught:\n"
            "    warnings.simplefilter('always')\n"
            "    import torch\n"
            "print([str(w.message) for w in caught if 'slideformer' in str(w.message)], torch.ones(1))\n"
        )
        output = python("s.py")
        assert "could not register its import hooks" in output
        assert "tensor([1.])" in output

    def test_the_import_is_lean(self, python, tmp_path):
        """Nothing heavy, no CUDA, and under a second beyond torch (it is some milliseconds)."""
        (tmp_path / "s.py").write_text(
            "import sys, time, torch\n"
            "start = time.perf_counter()\n"
            "import slideformer_backend, slideformer_backend.config\n"
            "slideformer_backend.SlideFormerConfig, slideformer_backend.SlideFormerPlugin\n"
            "print('SECONDS', time.perf_counter() - start)\n"
            "heavy = ('numba', 'kvikio', 'accelerate', 'transformers', 'triton', 'rich', 'psutil')\n"
            "print('HEAVY', [name for name in heavy if name in sys.modules and name != 'triton'])\n"
            "print('CUDA', torch.cuda.is_initialized())\n"
        )
        output = python("s.py")
        assert float(output.split("SECONDS ")[1].split()[0]) < 1.0
        assert "HEAVY []" in output
        assert "CUDA False" in output

    def test_importing_us_does_not_import_torch(self, python):
        code = "import sys, slideformer_backend; slideformer_backend.SlideFormerConfig(); print('torch' in sys.modules)"
        assert "False" in python("-c", code)


def test_python_of_the_children_is_ours(python):
    assert python("-c", "import sys; print(sys.executable)").strip() == sys.executable


DRAWS = """
import random

import torch
from accelerate import Accelerator

random.seed(0)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(3)))
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
print("DRAWN", random.random(), type(accelerator).__name__)
"""


def test_the_scripts_own_random_numbers_are_not_drawn(python, tmp_path):
    """A library that we import draws from Python's generator: data order and augmentation would change."""
    script = tmp_path / "draws.py"
    script.write_text(DRAWS)
    drawn = [
        next(line.split()[1:] for line in python(script, **variables).splitlines() if line.startswith("DRAWN"))
        for variables in ({}, {"ACCELERATE_USE_SLIDEFORMER": "true"})
    ]
    assert drawn[0][0] == drawn[1][0]
    assert drawn[0][1] != drawn[1][1]
