"""Warm processes are what cold ones are to the scripts in them."""

import time

import pytest

from tests.launch import warm
from tests.launch.test_processes import SHOW, result


@pytest.fixture
def script(tmp_path):
    (tmp_path / "sf.yaml").write_text("distributed_type: SLIDEFORMER\nslideformer_config:\n  update: immediate\n")
    (tmp_path / "train.py").write_text(SHOW.format(first="import accelerate"))
    return "train.py"


@pytest.mark.parametrize("start", [[], ["-m", "accelerate.commands.launch", "--config_file", "sf.yaml"]])
def test_a_script_sees_what_it_sees_in_a_cold_process(python, warm_python, script, start):
    words = [*start, script, "--lr", "1"]
    found = result(warm_python(*words, OMP_NUM_THREADS="1"))
    assert found == result(python(*words, OMP_NUM_THREADS="1"))
    assert found["kind"] == ("SlideFormerAccelerator" if start else "Accelerator")
    assert found["update"] == ("immediate" if start else None)


def test_nothing_of_one_is_in_the_next(warm_python, script):
    asked = {"ACCELERATE_USE_SLIDEFORMER": "true", "SLIDEFORMER_UPDATE": "immediate"}
    assert result(warm_python(script, **asked))["kind"] == "SlideFormerAccelerator"
    assert result(warm_python(script))["kind"] == "Accelerator"


@pytest.mark.parametrize("end", ["raise SystemExit(7)", "raise ValueError('seven')", "import os; os._exit(7)",
                                 "import os; os.kill(os.getpid(), 9)"])  # fmt: skip
@pytest.mark.parametrize("launched", [False, True])
def test_failures_are_failures(warm_python, tmp_path, script, end, launched):
    (tmp_path / "bad.py").write_text(end)
    start = ["-m", "accelerate.commands.launch", "--config_file", "sf.yaml"] if launched else []
    with pytest.raises(AssertionError, match="seven" if "seven" in end else None):
        warm_python(*start, "bad.py")


def test_one_that_hangs_is_killed(warm_server, warm_python, tmp_path):
    if warm_server is None:
        pytest.skip("processes are cold beside a GPU")
    (tmp_path / "slow.py").write_text(
        "import time\nwhile True:\n    open('beats', 'a').write('x')\n    time.sleep(0.01)\n"
    )
    with pytest.raises(TimeoutError):
        warm_python("slow.py", timeout=1.0)
    time.sleep(0.2)
    beats = (tmp_path / "beats").stat().st_size
    time.sleep(0.1)
    assert (tmp_path / "beats").stat().st_size == beats > 0


def test_a_worker_has_one_server(warm_server):
    assert warm_server is None or warm.server("unused") == warm_server
