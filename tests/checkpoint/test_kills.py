"""SIGKILL at random times and before every call of a save: always loads, loses at most one interval.

Twenty kills here. `SLIDEFORMER_TEST_KILLS=300 python -m pytest tests/checkpoint/test_kills.py` makes it three hundred.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.launch.conftest import ROOT

KILLS = int(os.environ.get("SLIDEFORMER_TEST_KILLS", "20"))
SHARES = {"accelerate": KILLS * 3 // 5, "trainer": KILLS - KILLS * 3 // 5}
LIMIT = 90 + 8 * KILLS  # seconds


@pytest.mark.timeout(LIMIT + 10)
@pytest.mark.parametrize("kind", SHARES)
def test_kills(environ, tmp_path, kind):
    command = [sys.executable, "-m", "tests.checkpoint.killing", tmp_path / "runs", "--kind", kind]
    done = subprocess.run(
        [*command, "--kills", str(SHARES[kind])],
        env={**environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    print(figures)
    assert figures["kills"] == SHARES[kind]
    assert figures["most steps lost"] <= 1
    assert figures["calls per save"] > 30
