"""The status line: what it shows, how often, and that models with its hook stay ordinary objects."""

import copy
import io
import pickle
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from slideformer_backend.integrations.status import StatusTracker, TokenCounter
from slideformer_backend.status import Sample, StatusLine, waiting


@dataclass
class Report:
    slot_bytes: int = 250_000_000
    waits: dict[str, float] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    repairs: int = 0
    skipped: int = 0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def report():
    return Report()


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def line(report, stream, clock):
    return StatusLine(lambda: report, torch.device("cpu"), "auto", stream, clock)


def test_a_file_gets_lines_with_every_figure(line, report, stream, clock):
    line.expect(8)
    clock.now = 12.0
    report.waits = {"host waits for update": 3.0, "compute after weights": 6.0, "host waits for norm": 0.001}
    line.tokens(torch.tensor(600))
    line.tokens(600)
    line.micro_batch(torch.tensor(1.25, requires_grad=True))
    assert stream.getvalue().startswith("step 0/8  loss 1.2500  100 tokens/s  window 0.25 GB  host ")
    assert stream.getvalue().endswith("waits: compute on weights 50%, host on update 25%\n")


def test_what_happened_and_who_worked_is_shown_when_there_is_something_to_say(report, stream, clock):
    line = StatusLine(lambda: report, torch.device("cpu"), "auto", stream, clock, mfu=lambda: 0.43)
    clock.now = 10.0
    report.busy, report.skipped, report.repairs = {"update": 4.0, "h2d": 0.001}, 2, 7
    line.step()
    assert "tokens/s  MFU 43%  window" in stream.getvalue()
    assert stream.getvalue().endswith("skipped 2  repairs 7  busy: update 40%  waits: none\n")


def test_lines_are_rare_but_the_last_step_is_always_shown_as_logged(line, stream, clock):
    line.expect(3)
    for clock.now in (11.0, 12.0, 13.0):
        line.step()
        line.log({"loss": clock.now})
    line.close()
    shown = [text.split("  ")[:2] for text in stream.getvalue().splitlines()]
    assert shown == [["step 1/3", "0 tokens/s"], ["step 3/3", "loss 13.0000"]]


def test_closing_shows_a_last_step_that_nobody_logged(line, stream, clock):
    line.expect(2)
    for clock.now in (11.0, 12.0):
        line.step()
    line.close()
    line.close()
    assert [text.split("  ")[0] for text in stream.getvalue().splitlines()] == ["step 1/2", "step 2/2"]


def test_logged_values_take_the_place_of_ours(line, stream, clock):
    tracker = StatusTracker(line)
    tracker.store_init_configuration({"max_train_steps": 5, "learning_rate": 1.0})
    tracker.log({"loss": 0.5, "tokens_per_second": 321.0, "note": "text"}, step=1)
    clock.now = 20.0
    line.micro_batch(2.0)
    assert stream.getvalue().startswith("step 0/5  loss 0.5000  321 tokens/s")
    tracker.finish()
    line.step()
    assert len(stream.getvalue().splitlines()) == 1


def test_unknown_total_is_fine(line, stream, clock):
    StatusTracker(line).store_init_configuration({"max_train_steps": -1})
    clock.now = 20.0
    line.step()
    assert stream.getvalue().startswith("step 1  0 tokens/s")


def test_waits_are_shares_of_the_last_seconds():
    first = Sample(10.0, 0.0, {"host waits for update": 5.0}, {})
    last = Sample(20.0, 0.0, {"host waits for update": 6.0, "host waits for norm": 0.01}, {})
    assert waiting(first, last) == "host on update 10%"
    assert waiting(first, first._replace(time=20.0)) == "none"


def test_a_terminal_gets_a_bar(report, stream, clock, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    line = StatusLine(lambda: report, torch.device("cpu"), "bar", stream, clock)
    line.expect(4)
    line.micro_batch(1.5)
    clock.now = 1.0
    line.step()
    line.close()
    assert "1/4" in stream.getvalue()
    assert "loss 1.5000" in stream.getvalue()


def test_tokens_of_training_batches_count():
    counted = []
    model = nn.Embedding(10, 2)
    model.register_forward_pre_hook(TokenCounter(lambda *seen: counted.append(seen)), with_kwargs=True)
    ids = torch.zeros(2, 5, dtype=torch.long)
    model(ids)
    with torch.no_grad():
        model(ids)
    model.eval()
    model(ids)
    assert counted == [(10, 5)]
    counter = TokenCounter(lambda *seen: counted.append(seen))
    counter(nn.Identity(), (), {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]])})
    assert counted[1] == (3, 5)


def test_copies_of_a_watched_model_count_nothing(line):
    model = nn.Embedding(10, 2)
    model.register_forward_pre_hook(TokenCounter(lambda count, length: line.tokens(count)), with_kwargs=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.zeros(2, 5, dtype=torch.long))
    line.step()
    assert line._tokens == 0
