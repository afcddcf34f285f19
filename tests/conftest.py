"""For all tests: kernels run in Triton's interpreter where there is no GPU; what tests measured is shown at the end of
the output, also when worker processes ran them."""

from __future__ import annotations

import gc
import importlib
import os
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parent
KERNELS = TESTS.parent / "kernels"
LONGEST = (
    "main_job/test_job.py",  # fetches the real model, which lsp/test_real_model.py uses too, much later
    "race/test_events.py",
    "families/test_families.py",
    "engine/test_spill.py",
    "engine/test_file_shelf.py",
    "parity/test_state.py",
    "race/test_waits.py",
    "checkpoint/test_memory.py",
    "parity/test_double_backward.py",
    "launch/test_processes.py",
    "checkpoint/test_resume.py",
    "parity/test_steps.py",
    "parity/test_clips.py",
    "kernels/test_convergence.py",
    "features/test_peft.py",
    "parity/test_parameters.py",
    "bench/test_zero_offload.py",
    "parity/test_unfreezing.py",
    "lsp/test_real_model.py",
    "checkpoint/test_kills.py",
    "checkpoint/test_readme_pages.py",
    "packaging/test_source.py",
)
"""Files of tests that take half a minute or more, the longest first: no worker is to be left alone with one at the
end."""
_STARTED_WITH = frozenset(os.environ)


def _import_interpreted() -> None:
    """Imports all kernels with the interpreter switched on; whatever runs later in this process does not see it.

    Here, since Triton's own library (``tl.sum``) is made for the interpreter, or not, when it is first imported.
    """
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        for path in sorted(KERNELS.glob("*.py")):
            importlib.import_module(f"slideformer_backend.kernels.{path.stem}")
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def _queue_no_seeds() -> None:
    """``torch.manual_seed`` writes down, with its whole stack, what to do once a GPU is initialised, each time."""
    for module in (torch.cuda.random, torch.xpu.random):
        module._lazy_call = lambda call, **options: None


if not torch.cuda.is_available():
    _import_interpreted()
    _queue_no_seeds()


@pytest.fixture(autouse=True)
def environment_stays():
    """A test that leaves behind what makes later ones a distributed run is the one that fails."""
    yield
    left = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} & os.environ.keys() - _STARTED_WITH
    assert not left, f"the test left {sorted(left)} in the environment"


@pytest.fixture(scope="module", autouse=True)
def kept_by_modules():
    """What a module of tests leaves behind stays too: kernels it compiled, libraries it imported."""
    yield
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    places = {TESTS / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish():
    """What imports and collection made stays for good: collections, which tests ask for too, need not look at it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # or libraries report as leaked what the interpreter's end does not find


def pytest_terminal_summary(terminalreporter):
    reports = [report for found in terminalreporter.stats.values() for report in found]
    lines = [
        f"{report.nodeid.rpartition('::')[2]}: {value}"
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == "measured"
    ]
    if lines:
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.write_line(line)
