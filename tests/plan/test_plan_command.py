"""``slideformer plan``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slideformer_backend.cli import main
from slideformer_backend.config import SlideFormerConfig

ROOT = Path(__file__).resolve().parents[2]
DESCRIBED = ["--gpu-memory", "24GiB", "--host-memory", "128GiB"]


@pytest.fixture
def plan(capsys):
    """Runs the command; (exit code, stdout, stderr)."""

    def run(*arguments):
        code = 0
        try:
            main(["plan", *map(str, arguments)])
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


def config_json(folder, **values):
    content = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
               "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, **values}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_a_plan_on_a_terminal(plan):
    code, out, _ = plan("llama-3b", "--batch", 8, *DESCRIBED, "--set", "gpu_memory=20GiB")
    assert code == 0
    for part in ("3.21 G parameters, 28 layers", "GPU", "host", "activations", "20.0 GiB", "tokens/s", "the limit is",
                 "It fits.", "(assumed)"):  # fmt: skip
        assert part in out, out


def test_json_holds_the_same_figures(plan):
    code, out, _ = plan("llama-3b", "--batch", 8, *DESCRIBED, "--json")
    values = json.loads(out)
    assert code == 0
    assert values["parameters"] == 3_212_749_824
    assert values["verdict"] == "fits"
    for tier in values["tiers"].values():
        assert tier["peak"] == sum(tier["contents"].values()) <= tier["budget"]
    assert values["step"]["seconds"] > 0
    assert values["rates"]["gemm"]["source"] == "assumed"
    assert values["changes"] == []


def test_123b_says_what_is_possible(plan):
    """24 GiB, 256 GiB and NVMe: exact does not fit, the paper's mode does; both with numbers."""
    machine = ["--gpu-memory", "24GiB", "--host-memory", "256GiB", "--nvme", "2TB"]
    code, out, _ = plan("mistral-large", *machine)
    assert code == 1
    assert "122.61 G parameters, 88 layers" in out
    assert "update: immediate" in out
    code, out, _ = plan("mistral-large", *machine, "--set", "update=immediate", "--json")
    values = json.loads(out)
    assert code == 0
    assert values["verdict"] in ("fits", "tight")
    assert values["step"]["bottleneck"] == "nvme"
    assert values["tiers"]["nvme"]["peak"] > 1e12


def test_inputs_of_layers_on_nvme_are_shown(plan, tmp_path):
    file = tmp_path / "slideformer.yaml"
    machine = ["--gpu-memory", "24GiB", "--host-memory", "200GiB", "--nvme", "1TB"]
    filed = ["llama-8b", "--batch", 16, *machine, "--set", "activations=nvme"]
    code, out, _ = plan(*filed)
    assert code == 0
    for part in ("NVMe    3.8 GiB", "activations 3.8 GiB", "Inputs of layers wait on NVMe: 3.8 GiB are written"):
        assert part in out
    code, _, _ = plan(*filed, "--yaml", file)
    assert code == 0
    assert file.read_text().startswith("# missing in slideformer_config: nvme_path")
    code, out, _ = plan(*filed, "--set", f"nvme_path={tmp_path}", "--json", "--yaml", file)
    values = json.loads(out)
    assert values["tiers"]["nvme"]["contents"] == {"states": 0, "weights": 0, "activations": 30 * 16 * 1024 * 4096 * 2}
    assert values["step"]["resources"]["nvme"] > 0
    assert values["decisions"]["inputs_on_nvme"]
    config = SlideFormerConfig.from_mapping(yaml.safe_load(file.read_text())["slideformer_config"])
    assert (config.activations, config.nvme_path) == ("nvme", str(tmp_path))
    code, out, _ = plan("llama-8b", "--batch", 16, *machine, "--json")
    assert not json.loads(out)["decisions"]["inputs_on_nvme"]


def test_what_does_not_fit_names_changes(plan):
    code, out, _ = plan("llama-8b", "--batch", 32, "--gpu-memory", "12GiB", "--host-memory", "64GiB")
    assert code == 1
    assert "It does not fit" in out
    assert "GPU memory" in out
    assert "host memory" in out
    assert "a machine with" in out


def test_given_rates_decide_the_step(plan):
    def seconds(*rates):
        always = "--set", "recompute=always"  # rates decide who recomputes, too
        return json.loads(plan("llama-1b", "--batch", 8, *DESCRIBED, *rates, *always, "--json")[1])["step"]

    wide = ("--gpu-bandwidth", "1000000GB", "--link", "200GB")  # updates on the GPU take no time
    slow, fast = seconds("--gpu-tflops", 10, *wide), seconds("--gpu-tflops", 1000, *wide)
    assert slow["bottleneck"] == "compute"
    assert slow["resources"]["compute"] == pytest.approx(100 * fast["resources"]["compute"], rel=1e-3)
    narrow = seconds("--gpu-tflops", 1000, "--gpu-bandwidth", "1GB")
    assert narrow["resources"]["compute"] > 1.0 + fast["resources"]["compute"]
    assert slow["seconds"] > fast["seconds"]


def test_the_limit_is_what_works_longest(plan):
    for more in ([], ["--accumulate", 8], ["--accumulate", 4, "--set", "update=immediate"]):
        step = json.loads(plan("llama-3b", "--batch", 8, *DESCRIBED, *more, "--json")[1])["step"]
        assert step["resources"][step["bottleneck"]] == max(step["resources"].values())


@pytest.mark.parametrize(
    ("option", "value"), [("--gpu-tflops", "-3"), ("--gpu-tflops", "nan"), ("--gpu-memory", "24"), ("--link", "0")]
)
def test_numbers_that_no_machine_has_are_refused(plan, option, value):
    code, _, err = plan("llama-1b", *DESCRIBED, f"{option}={value}")
    assert code == 2
    assert option in err


def test_a_machine_that_is_proposed_is_large_enough(plan):
    arguments = ["llama-70b", "--batch", 16, "--accumulate", 4, "--gpu-memory", "80GiB"]
    _, out, _ = plan(*arguments, "--host-memory", "1TiB")
    (size,) = re.findall(r"a machine with ([\d,.]+) GiB of host memory", out)
    assert plan(*arguments, "--host-memory", size.replace(",", "") + "GiB")[0] == 0


@pytest.mark.parametrize(
    ("gpu", "host", "nvme"),
    [("24GiB", "10MiB", None), ("24GiB", "3100MiB", None), ("24GiB", "5GiB", None), ("10MiB", "64GiB", None),
     ("900MiB", "1GiB", None), ("5000MiB", "2GiB", "200GiB"), ("600MiB", "4100MiB", "1GiB")],
)  # fmt: skip
def test_a_small_machine_is_told_what_suffices(plan, gpu, host, nvme):
    """Also where what is kept back is more than there is, and where states and weights go to files."""

    def planned(gpu, host, nvme):
        return plan("llama-3b", "--gpu-memory", gpu, "--host-memory", host, *(("--nvme", nvme) if nvme else ()))

    code, out, _ = planned(gpu, host, nvme)
    assert code == 1
    assert not re.search(r"-[\d,.]+ [GM]iB", out), out
    (line,) = [line for line in out.splitlines() if "a machine with" in line]
    found = {
        tier: size.replace(" ", "") for size, tier in re.findall(r"([\d.]+ [GM]iB) of (GPU|host memory|NVMe)", line)
    }
    code, out, _ = planned(found.get("GPU", gpu), found.get("host memory", host), found.get("NVMe", nvme))
    assert code == 0, f"{line}: {out}"


def test_what_is_kept_back_is_named(plan):
    _, out, _ = plan("llama-1b", "--gpu-memory", "500MiB", "--host-memory", "1GiB")
    assert "Nothing of 500.0 MiB of GPU memory is left: 600.0 MiB are in use or a context's." in out
    assert "Nothing of 1.0 GiB of host memory is left: 2.0 GiB are in use or the system's, and 2.0 GiB are for" in out
    assert "is left" not in plan("llama-1b", "--gpu-memory", "700MiB", "--host-memory", "5GiB")[1]


def test_a_local_config_and_precision(plan, tmp_path):
    """A folder, the file itself; fp32 under autocast takes bytes of both dtypes."""
    folder = config_json(tmp_path, dtype="float32")
    peaks = {}
    for precision in ("no", "bf16"):
        code, out, err = plan(folder, *DESCRIBED, "--mixed-precision", precision, "--json")
        assert code == 0, err
        peaks[precision] = json.loads(out)["tiers"]["host"]["contents"]
    assert peaks["bf16"]["weights"] < peaks["no"]["weights"]
    assert peaks["bf16"]["states"] == peaks["no"]["states"]
    assert plan(folder / "config.json", *DESCRIBED)[0] == 0
    states = [
        json.loads(plan(folder, *DESCRIBED, "--optimizer", name, "--json")[1])["tiers"]["host"]["contents"]["states"]
        for name in ("adamw", "lion", "sgd-plain")
    ]
    assert states[0] > states[1] > states[2] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-model"], "is no model that can be planned for"),
        (["llama-1b", "--set", "updaet=exact"], "did you mean 'update'"),
        (["llama-1b", "--set", "update"], "KEY=VALUE"),
        (["llama-1b", "--set", "optimizer_states=ssd"], "auto, host, nvme"),
        (["llama-1b", "--config", "/nowhere.yaml"], "/nowhere.yaml"),
        (["llama-1b", "--nvme-path", "/nowhere"], "nvme_path: /nowhere does not exist"),
        (["llama-1b", "--nvme-path", __file__], "is no folder"),
        (["llama-1b", "--yaml", "/nowhere/x.yaml"], "/nowhere/x.yaml cannot be written: there is no folder /nowhere"),
        (["llama-1b", "--yaml", str(ROOT)], "it is a folder"),
        (["llama-1b", "--set", "optimizer_states=host", "--set", "nvme_fraction=0.5"], "nothing to be a share of"),
    ],
)
def test_mistakes_are_explained(plan, arguments, words):
    code, out, err = plan(*arguments, *DESCRIBED)
    assert code == 2
    assert out == ""
    assert words in err
    assert len(err.splitlines()) == 1


def test_bad_files_are_explained(plan, tmp_path):
    for content, words in (("{", "cannot be read"), ("[]", "JSON object"), ("{}", "model_type"),
                           ('{"model_type": "martian"}', "transformers cannot make this model")):  # fmt: skip
        (tmp_path / "config.json").write_text(content)
        code, _, err = plan(tmp_path, *DESCRIBED)
        assert (code, words in err) == (2, True), err


@pytest.mark.parametrize(
    "values", [{"hidden_size": 10, "num_attention_heads": 3}, {"num_attention_heads": 0}, {"vocab_size": -1}]
)
def test_a_configuration_that_transformers_rejects(plan, tmp_path, values):
    code, _, err = plan(config_json(tmp_path, **values), *DESCRIBED)
    assert code == 2, err
    (line,) = err.splitlines()
    assert line.startswith(f"slideformer plan: {tmp_path}: transformers cannot make this model: ")


def test_a_model_without_blocks_is_refused(plan, tmp_path):
    code, _, err = plan(config_json(tmp_path, num_hidden_layers=0), *DESCRIBED)
    assert code == 2
    assert "no repeated blocks" in err


def test_yaml_is_a_configuration_that_the_launcher_takes(plan, tmp_path):
    given = tmp_path / "given.yaml"
    section = {"gpu_memory": "20GiB", "update": "immediate"}
    given.write_text(yaml.safe_dump({"mixed_precision": "bf16", "slideformer_config": section}))
    file = tmp_path / "slideformer.yaml"
    code, _, _ = plan("llama-1b", *DESCRIBED, "--config", given, "--set", "prefetch=1", "--yaml", file)
    assert code == 0
    written = yaml.safe_load(file.read_text())
    assert written["mixed_precision"] == "bf16"
    config = SlideFormerConfig.from_mapping(written["slideformer_config"])
    assert (config.update, config.prefetch, config.gpu_memory) == ("immediate", 1, 20 << 30)
    script = tmp_path / "script.py"
    script.write_text("from slideformer_backend.config import SlideFormerConfig\nprint(SlideFormerConfig.from_env())\n")
    done = subprocess.run(
        [sys.executable, "-m", "slideformer_backend.cli", "launch", "--cpu", "--config_file", str(file), str(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert "gpu_memory=21474836480" in done.stdout, done.stdout + done.stderr


def test_yaml_is_not_written_for_what_does_not_fit(plan, tmp_path):
    file = tmp_path / "slideformer.yaml"
    code, _, err = plan("llama-8b", "--gpu-memory", "24GiB", "--host-memory", "32GiB", "--yaml", file)
    assert code == 2
    assert "does not fit" in err
    assert not file.exists()


def test_yaml_never_asks_for_what_this_version_refuses(plan, tmp_path):
    """Either the launcher takes what is written, or nothing is written and the reason said."""
    file = tmp_path / "slideformer.yaml"
    arguments = ["llama-8b", "--gpu-memory", "24GiB", "--host-memory", "64GiB", "--nvme", "1TB", "--yaml", file]
    code, _, err = plan(*arguments)
    if file.exists():
        assert code == 0
        SlideFormerConfig.from_mapping(yaml.safe_load(file.read_text())["slideformer_config"])
    else:
        assert code == 2
        assert "cannot do optimizer_states yet" in err


def test_help_needs_no_library_and_shapes_no_transformers():
    code = (
        "import sys\n"
        "from slideformer_backend import cli\n"
        "for arguments in (['--help'], ['plan', '--help'], ['doctor', '--help'], ['plan', '--shapes']):\n"
        "    assert 'torch' not in sys.modules, arguments\n"
        "    try:\n"
        "        cli.main(arguments)\n"
        "    except SystemExit as stop:\n"
        "        assert stop.code in (0, None)\n"
        "assert 'transformers' not in sys.modules\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "mistral-large" in done.stdout
