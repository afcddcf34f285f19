"""``slideformer bench kernels`` on a machine without a GPU: everything runs, on sizes that say nothing about speed."""

import json
import subprocess
import sys

import pytest

from slideformer_backend.benchmarks.harness.kernel_plot import draw
from slideformer_backend.benchmarks.harness.kernel_timing import IS_REAL, Row
from slideformer_backend.cli import main

pytestmark = pytest.mark.skipif(IS_REAL, reason="a GPU measures real sizes, which takes minutes")


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


def test_rows_figures_and_plot(tmp_path):
    # a process of its own: in this one the kernels were imported for Triton's interpreter
    command = [sys.executable, "-m", "slideformer_backend.cli", "bench", "kernels", "--only", "lce,layers,sparse,sweep"]
    command += ["--out", str(tmp_path), "--json", str(tmp_path / "copy")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "kernels.json").read_text())
    assert json.loads((tmp_path / "copy").read_text()) == figures
    rows = figures["rows"]
    ours = [row for row in rows if row["who"] == "ours"]
    layers = {"LCE", "RMSNorm", "RMSNorm+add", "SwiGLU", "GeGLU", "RoPE"}
    assert {row["what"].split()[0] for row in ours} == layers | {"compress", "apply"}
    assert all(row["ms"] > 0 for row in ours)
    by_name = {(row["what"], row["who"]): row for row in rows}
    for row in ours:
        plain = by_name[row["what"], "torch"]
        if row["error"] is not None:
            assert row["error"] <= plain["error"] + 2**-9, row["what"]
    sparse = {row["what"]: row for row in ours if row["what"].split()[0] in ("compress", "apply")}
    factors = 8 * 4 * (40 + 24)  # position and value of each of four nonzeros a row
    assert sparse["compress 40 x 24"]["moved"] * 1e6 == pytest.approx(2 * 40 * 24 + 2 * 16 * 16 + factors)
    assert sparse["apply 40 x 24"]["moved"] * 1e6 == pytest.approx(2 * 2 * 40 * 24 + 2 * 16 * 16 + factors)
    assert all(row["share"] > 0 for row in sparse.values())
    assert by_name["apply 40 x 24", "ours"]["error"] < 1e-6 < by_name["apply 40 x 24", "dense product"]["error"]
    assert sorted({row["tokens"] for row in rows if row["tokens"]}) == [16, 64, 128]
    assert "three products" in done.stdout
    assert is_png(tmp_path / "kernels.png")


def test_what_is_not_installed_or_fails_is_said_in_its_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    main(["bench", "kernels", "--only", "lce", "--out", str(tmp_path), "--budget", "1e9"])
    (liger,) = [row for row in json.loads((tmp_path / "kernels.json").read_text())["rows"] if row["who"] == "Liger"]
    assert liger["note"].startswith("not installed: liger_kernel")
    assert liger["ms"] is None
    with pytest.raises(SystemExit):
        main(["bench", "kernels", "--only", "lce,spead"])
    assert "no part 'spead'" in capsys.readouterr().err


def test_the_plot_needs_rows(tmp_path):
    assert not draw([Row("RMSNorm", "ours", ms=1.0)], "x", tmp_path / "a.png")
    rows = [
        Row("LCE", who, ms=n / 1000, gib=n / 5000, tokens=n, hidden=8) for who in ("ours", "torch") for n in (64, 128)
    ]
    assert draw(rows, "x", tmp_path / "a.png")
    assert is_png(tmp_path / "a.png")
