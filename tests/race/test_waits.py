"""Leaving out any single wait of the engine must turn a run red (DESIGN 7)."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
import torch

from .runner import run
from .waits import Wait, WaitMonitor, names_in_source
from .workload import workload


def _run(index: int, leave_out: Wait | None = None) -> WaitMonitor:
    events, setting = workload()[index]
    monitor = WaitMonitor(leave_out, poison=setting.poison, seed=setting.seed)
    run(events, setting, monitor)
    return monitor


@pytest.fixture(scope="module")
def seen() -> dict[Wait, list[int]]:
    """In which sequences of the workload each wait occurs; none of them is red."""
    torch.set_num_threads(1)
    found: dict[Wait, list[int]] = defaultdict(list)
    for index in range(len(workload())):
        for wait in _run(index).seen:
            found[wait].append(index)
    return found


def test_workload_reaches_every_wait(seen):
    """No wait that is written in the source is forgotten."""
    assert names_in_source() == {wait.name for wait in seen}


def test_every_wait_is_needed(seen, caplog):
    caplog.set_level("CRITICAL")
    sequences, reds = workload(), Counter()

    def cost(index):
        """First what was red before, then what runs as late as it may, then what is short."""
        events, setting = sequences[index]
        return -reds[index], setting.eagerness, len(events)

    unobserved = []
    for wait in sorted(seen):
        red = next((index for index in sorted(seen[wait], key=cost) if _is_red(index, wait)), None)
        reds[red] += 1
        if red is None:
            unobserved.append(str(wait))
    assert not unobserved, "remove these waits, or extend the workload or the checker"


def _is_red(index: int, wait: Wait) -> bool:
    try:
        _run(index, wait)
    except Exception:
        return True
    return False
