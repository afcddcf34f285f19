"""Working weights in files: the same bits as in memory, less memory, user code that need not know, faults that show."""

from __future__ import annotations

import copy
import errno
import os
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slideformer_backend.api import attach
from slideformer_backend.checkpoint import borrowed_state
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.engine import spilling
from slideformer_backend.engine.filed import Filed
from slideformer_backend.engine.pace import _Sample
from slideformer_backend.errors import ConfigError, StorageError, UnsupportedError
from slideformer_backend.storage import SpillDirectory
from tests.budgets import tight
from tests.storage.faults import FaultySystem

from .test_residency import Net
from .test_spill import (
    Job,
    _assert_same,
    _Fails,
    _go_on,
    _named_as_lost,
    _Slow,
    _train,
    _weights_by_step,
    clipped,
    folder,
    plain,
)

__all__ = ["folder"]
EVERYTHING = {"weights": "nvme", "optimizer_states": "nvme"}


class _Logits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        config = LlamaConfig(
            vocab_size=20, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        self.llama = LlamaForCausalLM(config)

    def forward(self, tokens):
        return self.llama(tokens, use_cache=False).logits


@pytest.fixture
def llama(monkeypatch):
    monkeypatch.setattr("tests.engine.test_spill.Net", lambda **_: _Logits())


def _accumulate(job, number, max_norm=None):
    job.backward(2 * number, is_last=False)
    job.backward(2 * number + 1)
    if max_norm is not None:
        norm = job.engine.clip_grad_norm_(job.model.parameters(), max_norm)
        assert norm > max_norm, "clipping is active"
    job.step()


def _generate(job):
    prompt = torch.tensor([[3, 4, 5]], device=job.device)
    with torch.no_grad():
        return job.model.llama.generate(prompt, max_new_tokens=3, do_sample=False).cpu()


@pytest.mark.parametrize("update", ["exact", "immediate"])
@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_a_llama_trains_to_the_same_bits(folder, device, llama, update, kind):
    seen = []
    for where in ({}, {**EVERYTHING, "nvme_path": folder}):
        job = Job(device, kind=kind, update=update, **where)
        assert bool(where) == all(unit.filed is not None for unit in job.engine.sliding)
        found = []
        for number in range(4):
            _accumulate(job, number, 0.05 if update == "exact" else None)
            found += job.weights() if number == 2 else [_generate(job)] if number == 1 else []
        found += job.states() + list(copy.deepcopy(job.model.state_dict()).values())
        job.engine.detach()
        seen.append([*found, *job.weights()])
    _assert_same(*seen)
    assert os.listdir(folder) == []


CASES = [
    ("clipped", "exact", "autocast", "adamw", "host"),
    ("plain", "exact", "bf16", "lion", "nvme"),
    ("plain", "exact", "bf16", "sgd", "host"),
    ("looked_at", "immediate", "bf16", "adamw", "nvme"),
    ("saved_and_loaded", "exact", "fp32", "adamw", "host"),
    ("nonfinite", "exact", "bf16", "adamw", "nvme"),
]


@pytest.mark.parametrize(("script", "update", "kind", "rule", "states"), CASES)
def test_the_same_bits_as_in_memory(folder, device, script, update, kind, rule, states):
    options = {"update": update, "kind": kind, "rule": rule}
    expected = _train(Job(device, **options), script, steps=4)
    files = {"weights": "nvme", "nvme_fraction": 0.7, "optimizer_states": states, "nvme_path": folder}
    _assert_same(expected, _train(Job(device, **options, **files), script, steps=4))


# -- user code ---------------------------------------------------------------------------------------------------------


def _held_aliases(job):
    """Tensors over the memory of all weights, kept and written in the end."""
    kept = [parameter.data for parameter in job.model.layers.parameters()]
    for tensor in kept:
        tensor.mul_(0.5)


def _foreach(job):
    parameters = list(job.model.layers.parameters())
    averages = [torch.zeros_like(parameter) for parameter in parameters]
    with torch.no_grad():
        torch._foreach_add_(averages, parameters, alpha=0.5)
        torch._foreach_mul_(parameters, 0.9)
        torch._foreach_add_(parameters, averages)


def _loaded(job):
    saved = {name: value * 0.5 for name, value in job.model.state_dict().items()}
    job.model.load_state_dict(saved)


def _arrays(job):
    for parameter in job.model.layers.parameters():
        parameter.detach().numpy()[...] *= 0.5


@pytest.mark.parametrize("update", ["exact", "immediate"])
@pytest.mark.parametrize("use", [_held_aliases, _foreach, _loaded, _arrays])
def test_what_user_code_writes_reaches_the_files(folder, device, update, use):
    if device.type == "cuda" and use is _foreach:
        pytest.skip("edge parameters are elsewhere")
    seen = []
    for where in ({}, {**EVERYTHING, "nvme_path": folder}):
        job = Job(device, kind="fp32", update=update, **where)
        plain(job, 0)
        use(job)
        plain(job, 1)
        seen.append(job.weights())
        use(job)
        job.engine.detach()
        seen[-1] += job.weights()
    _assert_same(*seen)


def test_a_state_that_is_saved_is_pages_of_the_files(folder, device):
    """It takes no memory, is written nowhere first, and holds what a run in memory has."""
    jobs = [Job(device), Job(device, **EVERYTHING, nvme_path=folder)]
    for job in jobs:
        plain(job, 0)
        with torch.no_grad():
            job.model.layers[1].up.weight.zero_()
    expected = jobs[0].model.state_dict()
    job = jobs[1]
    with borrowed_state(job.engine):
        for unit in job.engine.sliding:
            if unit.filed.stored is not None:
                unit.filed.stored.synchronize()
        written = job.engine.spill.tier.bytes_written
        state = job.model.state_dict()
        staged = [unit for unit in job.engine.sliding if unit.filed.are is not Filed.FILED]
        assert len(staged) <= job.engine.spill.weights.rooms + 1
        assert job.engine.spill.tier.bytes_written == written
        assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == len(state)
        _assert_same([value.cpu() for value in expected.values()], [value.cpu() for value in state.values()])
        del state
    for job in jobs:
        plain(job, 1)
    _assert_same(jobs[0].weights(), jobs[1].weights())
    unit = job.engine.sliding[2]
    with borrowed_state(job.engine):
        region = unit.filed.parts["weights"].region
        unit.filed.stored.synchronize()
        _flip(region.path)
        with pytest.raises(StorageError, match="checksum"):
            job.model.state_dict()
        _flip(region.path)
    jobs[0].engine.detach()
    with pytest.raises(StorageError):
        job.engine.detach()


def _flip(path):
    fd = os.open(path, os.O_RDWR)
    (old,) = os.pread(fd, 1, 100)
    os.pwrite(fd, bytes([old ^ 4]), 100)
    os.close(fd)


def test_memory_holds_the_frames_and_no_more(folder, device, monkeypatch):
    """Also after user code has held all weights at once."""
    job = Job(device, layers=12, **EVERYTHING, nvme_path=folder)
    monkeypatch.setattr(job.engine.pace, "after_step", lambda: None)
    ledger, weights = job.engine._preflight.plan.first, job.engine.spill.weights
    assert ledger.host_frames < ledger.nvme_weights / 2
    for number in range(3):
        plain(job, number)
        kept = [parameter.data for parameter in job.model.layers.parameters()]
        staged = [unit for unit in job.engine.sliding if unit.filed.are is not Filed.FILED]
        assert len(staged) == 12, "what user code has stays"
        del kept
        job.backward(number)
        staged = [unit for unit in job.engine.sliding if unit.filed.are is not Filed.FILED]
        assert len(staged) <= weights.rooms
        job.step()
    job.engine.settle()
    assert job.engine.memory.allocated <= ledger.host + 12 * 4096  # frames are whole pages
    assert job.engine.report().filed_bytes == sum(unit.weights.nbytes for unit in job.engine.sliding)
    job.engine.detach()


def test_weights_that_a_clip_changes_are_not_read_in_forward(folder, device):
    """They are made of masters just ahead of their use."""
    job = Job(device, **EVERYTHING, nvme_path=folder)
    clipped(job, 1)
    clipped(job, 3)
    job.backward(0)
    job.engine.clip_grad_norm_(job.model.parameters(), 0.01)
    names = []
    read = job.engine.spill.tier.read
    job.engine.spill.tier.read = lambda region, *rest: (names.append(region.name), read(region, *rest))[1]
    job.step()
    with torch.no_grad():
        job.model(torch.zeros(1, 4, dtype=torch.long, device=device))
    weights = [name for name in names if name.endswith(".weights")]
    assert any(name.endswith("exp_avg") for name in names)
    assert weights == []
    job.engine.detach()


def test_reads_writes_and_updates_of_different_units_overlap(folder, device, monkeypatch):
    job = Job(device, layers=10, update="immediate", weights="nvme", nvme_path=folder)
    plain(job, 0)
    job.engine.settle()
    for lane in (job.engine.backend.weights_in, job.engine.backend.weights_out):
        lane.submit("barrier", lambda: None).synchronize()
    slow = _Slow(monkeypatch, 0.02)
    submit = job.engine.backend.update.submit

    def noted(name, run, **options):
        def timed():
            begin = time.perf_counter()
            time.sleep(0.02 if name.startswith("update") else 0.0)
            run()
            slow.spans.append(("update", begin, time.perf_counter()))

        return submit(name, timed, **options)

    monkeypatch.setattr(job.engine.backend.update, "submit", noted)
    start = time.perf_counter()
    plain(job, 1)
    job.engine.settle()
    elapsed = time.perf_counter() - start
    loads, stores, updates = slow.busy("load"), slow.busy("store"), slow.busy("update")
    assert loads > 0.2, "in forward and backward"
    assert slow.busy("store", "update") > 0.4 * min(stores, updates)
    assert slow.busy("load", "update") + slow.busy("load", "store") > 0.2 * min(loads, updates)
    assert elapsed < 0.85 * (loads + stores + updates)
    job.engine.detach()


def test_weights_are_read_ahead(folder, device):
    job = Job(device, layers=10, prefetch=1, **EVERYTHING, nvme_path=folder)
    plain(job, 0)
    job.engine.settle()
    rooms, staged = job.engine.spill.weights.rooms, []
    unit = job.engine.sliding[5]

    def look(*_):
        staged.append([other.index for other in job.engine.sliding if other.filed.room is not None])

    handle = unit.module.register_forward_hook(look)
    with torch.no_grad():
        job.model(torch.zeros(1, 4, dtype=torch.long, device=device))
    handle.remove()
    assert set(range(5, min(10, 5 + rooms))) <= set(staged[0])
    assert rooms == 1 + 3
    job.engine.detach()


def test_a_drive_that_is_waited_for_reads_further_ahead(folder, device, caplog):
    """And the bits stay the same."""
    caplog.set_level("INFO")
    expected = _weights_by_step(device, 4)[-1]
    job = Job(device, **EVERYTHING, nvme_path=folder)
    plain(job, 0)
    pace, rings = job.engine.pace, (job.engine.spill.states, job.engine.spill.weights)
    before = [ring.rooms for ring in rings]
    per_unit = rings[0].largest / 1e6
    first = _Sample(0.0, 0.0, 0.0, 0, 0, {"states": 0.0, "weights": 0.0})
    last = _Sample(20.0, 2.0, 1.0, 2_000_000, 500_000, {"states": 2 * per_unit * 2, "weights": 0.0})
    pace._decide(first, last)
    assert [ring.rooms for ring in rings] == [before[0] + 2, before[1]]
    assert f"states of {before[0] + 2} units are in host memory" in caplog.text
    assert "reads 0.00 GB/s" in caplog.text
    for number in range(1, 4):
        plain(job, number)
    assert sum(unit.spill.are is not Filed.FILED for unit in job.engine.units) <= before[0] + 2
    _assert_same(expected, job.weights())
    assert pace._steps == 4
    plain(job, 4)
    assert pace._first is not None
    job.engine.detach()


def test_frozen_layers_wait_in_files_too_and_may_train_later(folder, device):
    if device.type == "cuda":
        pytest.skip("what cuBLAS allocates is more than the whole budget, and nothing may train later")
    seen = []
    for where in ({}, {**EVERYTHING, "nvme_path": folder}):
        torch.manual_seed(0)
        model = Net(width=32, layers=5)
        model.layers[:4].requires_grad_(False)
        config = SlideFormerConfig(gpu_memory=tight(model), cpu_threads=1, **where)
        engine = attach(model, config, device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine.bind(optimizer)
        for number in range(4):
            if number == 2:
                model.layers[2].requires_grad_(True)
            tokens = torch.full((2, 4), number, device=device)
            torch.nn.functional.cross_entropy(model(tokens).view(-1, 20), tokens.view(-1)).backward()
            engine.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        assert all(unit.filed is not None for unit in engine.sliding) == bool(where)
        engine.detach()
        seen.append([parameter.detach().clone() for parameter in model.parameters()])
    _assert_same(*seen)


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["exact", "immediate"])
@pytest.mark.parametrize(("name", "code"), [("read_at", errno.EIO), ("write_at", errno.ENOSPC)])
def test_a_failing_disk_ends_the_step_with_an_error(folder, device, name, code, update):
    job = Job(device, update=update, weights="nvme", nvme_path=folder)
    plain(job, 0)
    job.engine.settle()
    _Fails(job.engine.spill.tier.directory.system, name, 2, code)
    with pytest.raises(StorageError, match=errno.errorcode[code]) as caught:
        _go_on(job, range(1, 3))
    assert caught.value.path.startswith(folder)
    assert ".weights" in caught.value.path
    assert caught.value.offset is not None
    assert caught.value.remedy
    with pytest.raises(StorageError):
        job.engine.detach()
    assert os.listdir(folder) == []


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize(("name", "code"), [("read_at", errno.EIO), ("write_at", errno.ENOSPC)])
@pytest.mark.parametrize("script", [plain, clipped])
def test_weights_are_those_of_the_last_completed_step(folder, device, name, code, after, script, caplog):
    expected = _weights_by_step(device, 5, script)
    job = Job(device, weights="nvme", nvme_path=folder)
    script(job, 0)
    completed = []
    _Fails(job.engine.spill.tier.directory.system, name, after, code)
    with pytest.raises(StorageError):
        _go_on(job, range(1, 5), completed, script)
    with pytest.raises(StorageError):
        job.engine.detach()
    lost = _named_as_lost(job, caplog)
    if name == "write_at":
        assert not lost, "what could not be written is still in memory"
    names = [name for name, _ in job.model.named_parameters()]
    found = dict(zip(names, job.weights(), strict=True))
    wrong = [n for n, a in zip(names, expected[1 + len(completed)], strict=True) if not torch.equal(a, found[n])]
    assert [n for n in wrong if n not in lost] == []
    assert os.listdir(folder) == []


def test_a_disk_without_room_is_found_before_anything_changes(folder, device, monkeypatch):
    model = Net(width=32, layers=4)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    _fail_all(monkeypatch, "allocate", errno.ENOSPC, after=2)
    with pytest.raises(StorageError, match="ENOSPC") as caught:
        attach(model, SlideFormerConfig(weights="nvme", nvme_path=folder), device=device)
    assert "free space" in caught.value.remedy
    _assert_untouched(model, weights, folder)


def test_a_disk_that_fails_while_weights_move_gives_them_back(folder, device, monkeypatch):
    model = Net(width=32, layers=12)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    _fail_all(monkeypatch, "write_at", errno.EIO, after=3)
    with pytest.raises(StorageError, match="EIO"):
        attach(model, SlideFormerConfig(weights="nvme", nvme_path=folder), device=device)
    _assert_untouched(model, weights, folder)


def _fail_all(monkeypatch, name, code, after):
    def failing(path):
        directory = SpillDirectory(path)
        _Fails(directory.system, name, after, code)
        return directory

    monkeypatch.setattr(spilling, "SpillDirectory", failing)


def _assert_untouched(model, weights, folder):
    assert {type(parameter) for parameter in model.parameters()} == {torch.nn.Parameter}
    assert all(torch.equal(a, b.cpu()) for a, b in zip(weights, model.parameters(), strict=True))
    assert os.listdir(folder) == []


def test_short_reads_and_writes_are_completed(folder, device, monkeypatch):
    expected = _weights_by_step(device, 3, clipped)[-1]
    system = FaultySystem(set(range(0, 10**5, 3)), "short")
    monkeypatch.setattr(spilling, "SpillDirectory", lambda path: SpillDirectory(path, system))
    job = Job(device, **EVERYTHING, nvme_path=folder)
    for number in range(3):
        clipped(job, number)
    _assert_same(expected, job.weights())
    assert {"read_at", "write_at"} <= set(system.injected)
    job.engine.detach()


def test_a_flipped_bit_ends_the_forward_with_an_error(folder, device):
    job = Job(device, weights="nvme", nvme_path=folder)
    plain(job, 0)
    job.engine.settle()
    job.engine.spill.write_back()
    unit = next(unit for unit in job.engine.sliding if unit.filed.are is Filed.FILED)
    unit.filed.stored.synchronize()
    region = unit.filed.parts["weights"].region
    _flip(region.path)
    with pytest.raises(StorageError, match="checksum") as caught:
        plain(job, 1)
    assert caught.value.path == region.path
    with pytest.raises(StorageError):
        job.engine.detach()
    expected = _weights_by_step(device, 1)[1]
    _assert_same(expected, job.weights())  # made of masters again


def test_what_is_lost_shows(folder, device, caplog):
    """Under `immediate` the weights are halves of their masters: nothing can make them anew."""
    job = Job(device, update="immediate", weights="nvme", nvme_path=folder)
    plain(job, 0)
    job.engine.settle()
    for unit in job.engine.sliding:
        unit.filed.loaded.synchronize()
    _Fails(job.engine.spill.tier.directory.system, "read_at", 0, errno.EIO)
    gone = [unit for unit in job.engine.sliding if unit.filed.are is Filed.FILED]
    with pytest.raises(StorageError, match="EIO"):
        job.engine.detach()
    parameters = dict(job.model.named_parameters())
    lost = [u for u in job.engine.sliding if all(parameters[record.name].isnan().all() for record in u.records)]
    assert gone
    assert set(gone) <= set(lost)
    assert all(f"the weights of {unit.name} cannot be read" in caplog.text for unit in lost)
    assert not any(parameter.isnan().any() for name, parameter in parameters.items() if name not in _names(lost))


def _names(units):
    return {record.name for unit in units for record in unit.records}


def test_what_cannot_be_is_refused(folder, device):
    with pytest.raises(ConfigError, match="weights: nvme needs a folder"):
        attach(Net(), SlideFormerConfig(weights="nvme"), device=device)
    with pytest.raises(ConfigError, match="stay on the GPU"):
        attach(Net(), SlideFormerConfig(weights="nvme", nvme_path=folder, strategy="lsp"), device=device)
    model = Net()
    engine = attach(model, SlideFormerConfig(weights="nvme", nvme_path=folder), device=device)
    with pytest.raises(UnsupportedError, match="RMSprop"):
        engine.bind(torch.optim.RMSprop(model.parameters()))
    engine.detach()
