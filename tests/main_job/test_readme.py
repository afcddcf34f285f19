"""README.md, read by a machine: its commands exist, its table is the configuration."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slideformer_backend.config import SlideFormerConfig, keys

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def shell_lines() -> list[str]:
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", README, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip() and not line.startswith("#")]


def python_commands() -> list[list[str]]:
    return [shlex.split(line, comments=True) for line in shell_lines() if line.startswith("python3 ")]


def test_the_two_commands_are_there():
    scripts = {command[1] for command in python_commands()}
    assert scripts >= {"benchmarks/finetune/run.py", "tests/run.py"}


@pytest.mark.parametrize("script", sorted({command[1] for command in python_commands()}))
def test_commands_start(script):
    subprocess.run([sys.executable, ROOT / script, "--help"], check=True, capture_output=True)


def test_ci_runs_the_test_command():
    run = (ROOT / ".ci" / "run").read_text()
    assert "python3 tests/run.py" in run
    assert ["python3", "tests/run.py"] in python_commands()


def test_make_targets_are_aliases_of_the_commands():
    recipes = re.findall(r"^\t(python3 .*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipes
    for recipe in recipes:
        assert (ROOT / shlex.split(recipe)[1]).is_file()


def test_linked_files_exist():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_config_table_is_the_configuration():
    """Paste what this shows as expected when a key changes or its part is built."""
    expected = [
        f"| `{key.name}` | {key.metadata['kind'].text} | `{yaml_word(key.default)}` | {key.metadata['doc']} |"
        for key in keys()
        if key.metadata["built"]
    ]
    assert [line for line in README.splitlines() if re.match(r"\| `\w+` \|", line)] == expected


def test_keys_that_are_not_built_are_said_to_be():
    names = ", ".join(f"`{key.name}`" for key in keys() if not key.metadata["built"])
    assert f"Recognised, but refused until their part is built: {names}." in README


def test_example_configuration_is_valid():
    example = yaml.safe_load((ROOT / "benchmarks" / "finetune" / "slideformer.yaml").read_text())
    SlideFormerConfig.from_mapping(example["slideformer_config"])


def test_the_script_of_the_main_job_is_ordinary():
    source = (ROOT / "benchmarks" / "finetune" / "train.py").read_text()
    assert "slideformer" not in source.lower()
    modules = {
        name
        for node in ast.walk(ast.parse(source))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    outside = {module.split(".")[0] for module in modules} - set(sys.stdlib_module_names)
    assert outside == {"accelerate", "torch", "transformers"}


def test_every_command_of_ours_is_run_by_a_test():
    ours = [line for line in shell_lines() if line.startswith("slideformer ")]
    assert [line for line in ours if not line.startswith((*ALONE, "slideformer convert ", "slideformer export "))] == []


def yaml_word(value: object) -> str:
    return value if isinstance(value, str) else yaml.safe_dump(value).splitlines()[0]


# `convert` and `export` need the files of the lines before them: tests/checkpoint/test_readme_pages.py
ALONE = ("slideformer plan ", "slideformer doctor")


@pytest.mark.parametrize("command", [line for line in shell_lines() if line.startswith(ALONE)])
def test_our_own_commands_do_what_is_said(command, tmp_path):
    """They run as written: a plan that the README calls possible fits, and the doctor finds no error."""
    arguments = shlex.split(command)[1:]
    done = subprocess.run(
        [sys.executable, "-m", "slideformer_backend.cli", *arguments],
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) > 5
