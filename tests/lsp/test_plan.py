"""``slideformer plan`` for ``strategy: lsp``, and its formulas."""

from __future__ import annotations

import json

import pytest
import yaml

from slideformer_backend.cli import main
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.lsp_settings import LspSettings
from slideformer_backend.plan.cores import is_compressed
from slideformer_backend.plan.machine import CONTEXT_BYTES

LLAMA_7B = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000}  # fmt: skip
LSP = ["--set", "strategy=lsp"]


@pytest.fixture
def plan(capsys, tmp_path, monkeypatch):
    """Runs the command on a small model, or one of other sizes: (exit code, stdout, stderr)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments, **sizes):
        content = {**LLAMA_7B, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 512}
        (tmp_path / "config.json").write_text(json.dumps({**content, **sizes}))
        code = 0
        try:
            main(["plan", str(tmp_path), "--dtype", "bfloat16", "--seq", "256", *map(str, arguments)])
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_a_7b_model_takes_what_the_formulas_say(plan):
    """d = 2048, r = 8: 1.9 GB each way instead of 13, moments of 7.5 GB instead of 52, 0.3 GB of projectors."""
    machine = ["--gpu-memory", "40GiB", "--host-memory", "64GiB", "--link", "12GB"]
    code, out, _ = plan(*LSP, "--set", "lsp.rank=2048", "--set", "lsp.nonzeros=8", *machine, "--json", **LLAMA_7B)
    found = json.loads(out)
    assert code == 0
    assert found["decisions"]["compressed_matrices"] == 7 * 32
    assert found["decisions"]["wire_bytes_each_way"] == pytest.approx(1.88e9, rel=0.01)
    host, gpu = found["tiers"]["host"]["contents"], found["tiers"]["gpu"]["contents"]
    assert host["moments of cores"] == pytest.approx(7.5e9, rel=0.01)
    assert gpu["projectors"] < 0.3e9
    assert found["step"]["resources"]["h2d"] == pytest.approx(1.88 / 12, rel=0.01)
    assert found["step"]["seconds"] > found["step"]["resources"]["compute"] > 0


def test_rank_decides_what_travels(plan):
    machine = ["--gpu-memory", "8GiB", "--host-memory", "16GiB"]
    wire = {}
    for rank in (64, 128):
        code, out, _ = plan(*LSP, "--set", f"lsp.rank={rank}", *machine, "--json")
        assert code == 0
        wire[rank] = json.loads(out)["decisions"]["wire_bytes_each_way"]
    assert wire[128] == 4 * wire[64] == 7 * 3 * 128 * 128 * 2


def test_what_does_not_fit_is_said_with_what_would(plan):
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "vocab_size": 32000}
    machine = ["--gpu-memory", "4GiB", "--host-memory", "64GiB"]
    code, out, _ = plan(*LSP, *machine, **sizes)
    assert code == 1
    assert "It does not fit" in out
    assert "a smaller rank (lsp.rank: 1024)" in out
    assert "strategy: lsp, rank 2048" in out


def test_what_the_gpu_has_no_room_for_goes_to_the_host(plan):
    """States of embeddings and head first, then sums of gradients, which only accumulation needs."""
    sums = 2 * 3 * (4 * 256**2 + 3 * 256 * 512)
    options = [*LSP, "--host-memory", "16GiB", "--set", "lsp.rank=64", "--accumulate", 4]
    roomy = json.loads(plan(*options, "--gpu-memory", "8GiB", "--json")[1])
    gpu = roomy["tiers"]["gpu"]
    assert gpu["contents"]["sums of gradients"] == sums
    assert roomy["tiers"]["host"]["contents"]["embeddings, head"] == 0
    short = gpu["peak"] - sums - 1 + CONTEXT_BYTES
    code, out, _ = plan(*options, "--gpu-memory", short, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["tiers"]["host"]["contents"]["sums of gradients"] == sums
    edges = 2 * 512 * 256 + 256
    stages = 3 * 2 * 256 * 512
    assert gpu["peak"] - sums - found["tiers"]["gpu"]["peak"] == 12 * edges - stages
    assert found["tiers"]["host"]["contents"]["embeddings, head"] >= 16 * edges
    out = plan(*options, "--gpu-memory", short)[1]
    assert "Embeddings and head are updated on the host" in out
    assert "sums of gradients are kept in host memory" in out


def test_a_configuration_asks_for_it(plan, tmp_path):
    machine = ["--gpu-memory", "8GiB", "--host-memory", "16GiB"]
    code, _, _ = plan(*LSP, "--set", "lsp.rank=64", *machine, "--yaml", tmp_path / "a.yaml")
    assert code == 0
    config = SlideFormerConfig.from_mapping(yaml.safe_load((tmp_path / "a.yaml").read_text())["slideformer_config"])
    assert (config.strategy, config.lsp) == ("lsp", {"rank": 64})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--set", "update=immediate"], "strategy lsp does without it"),
        (["--set", "lsp.rank=0"], "rank"),
        (["--set", "lsp.ranks=8"], "ranks"),
        (["--mixed-precision", "fp16"], "fp16"),
    ],
)
def test_what_prepare_refuses_is_refused_here(plan, given, words):
    code, _, err = plan(*LSP, *given)
    assert code == 2
    assert words in err


@pytest.mark.parametrize("shape", [(0, 4096), (4096, 0), (0, 0)])
def test_a_matrix_without_elements_has_no_core(shape):
    assert is_compressed((4096, 4096), LspSettings())
    assert not is_compressed(shape, LspSettings())
