"""Inputs of units that wait for the backward in files: the same bits, little memory, faults that show."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import os
import time
from random import Random

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from slideformer_backend.api import attach
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.engine import spilling
from slideformer_backend.engine.file_shelf import STAGES, DirectShelf
from slideformer_backend.engine.residency import OBSERVED_STEPS
from slideformer_backend.engine.unit import Unit
from slideformer_backend.errors import ConfigError, StorageError
from slideformer_backend.plan.placement import UnitCost, place
from slideformer_backend.storage import PosixTier
from tests.budgets import tight

from .test_boundaries import LAYERS, ROWS, WIDTH, Net, batches, managed, train

SIZE = ROWS * WIDTH * 4
LEAVING = LAYERS - 2


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "nvme"
    path.mkdir(mode=0o700)
    return str(path)


@pytest.fixture(params=["staged", "direct"])
def way(request, device, monkeypatch):
    """Through host memory, and straight between device and file; on a GPU kvikio does that, with or without GDS."""
    if request.param == "staged":
        monkeypatch.setattr(spilling, "direct_tier", lambda *_, **__: None)
    elif device.type == "cpu":
        monkeypatch.setattr(spilling, "StagedShelf", lambda backend, tier, close, _: DirectShelf(backend, tier, close))
    else:
        pytest.importorskip("kvikio", reason="needs the extra [gds]")
        from slideformer_backend.storage.kvikio_tier import KvikioTier

        monkeypatch.setattr(spilling, "direct_tier", KvikioTier)
    return request.param


@pytest.fixture
def filed(device, folder, way):
    """A model whose inputs go to files."""
    model, engine, optimizer = managed(device, "nvme", nvme_path=folder)
    yield model, engine, optimizer
    if not engine.is_detached:
        engine.detach()
    assert os.listdir(folder) == []


def step(model, optimizer, batch, seed=0):
    torch.manual_seed(seed)
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def weights(model):
    return [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()]


def same(expected, found):
    return all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"accumulate": 2}, {"update": "immediate"}])
def test_training_is_bit_equal(device, folder, way, options):
    expected, _ = train(device, "gpu", **options)
    found, blocks = train(device, "nvme", nvme_path=folder, **options)
    assert blocks > 0
    assert same(expected, found)
    assert os.listdir(folder) == []


def test_host_memory_is_staging_and_files_are_used_again(device, filed, way, monkeypatch):
    model, engine, optimizer = filed
    shelf = engine.boundaries.shelf
    slabs = []
    allocate = engine.memory.allocate
    monkeypatch.setattr(
        engine.memory, "allocate", lambda name, n, **o: slabs.append((name, n)) or allocate(name, n, **o)
    )

    def staged():
        """Bytes of inputs in host memory: of slabs that were made, of which there are never more than so many."""
        found = [nbytes for name, nbytes in slabs if "boundar" in name]
        assert all(name == "boundaries on their way" for name, _ in slabs if "boundar" in name)
        return sum(found[-STAGES:])

    for rows in (ROWS, ROWS, 260, ROWS):
        step(model, optimizer, batches(device, (rows,))[0])
    assert staged() == (STAGES * SIZE if way == "staged" else 0)
    assert shelf.pool._created == LEAVING
    assert shelf.describe()["bytes"] == engine.report().inputs["bytes"] == LEAVING * SIZE
    names = set(os.listdir(shelf.tier.directory.path))
    assert len(names) == LEAVING + 1
    step(model, optimizer, batches(device, (2 * ROWS,))[0])  # a longer batch: files grow one by one
    assert staged() == (2 * STAGES * SIZE if way == "staged" else 0)
    assert len([name for name, _ in slabs if "boundar" in name]) == (2 * STAGES if way == "staged" else 0)
    assert sorted(block.room.nbytes for block in shelf.pool._free) == [2 * SIZE] * LEAVING
    assert len(os.listdir(shelf.tier.directory.path)) == LEAVING + 1
    assert sum(os.stat(block.room.region.path).st_size for block in shelf.pool._free) < LEAVING * (2 * SIZE + 65536)


def test_a_shorter_batch_reads_nothing_to_write(device, filed):
    """Its last block takes the place of a longer one's, and is no part of that."""
    model, engine, optimizer = filed
    if not is_posix(engine):
        pytest.skip("counts calls of the POSIX tier")
    step(model, optimizer, batches(device, (2 * ROWS,))[0])
    reads = Broken(engine, "read_at", 0, after=10**6)
    loss = model(batches(device, (ROWS,))[0]).sum()
    for lane in (engine.backend.out, engine.backend.file_out):
        lane.submit("barrier", lambda: None).synchronize()
    assert reads.left == 10**6
    loss.backward()
    assert reads.left == 10**6 - LEAVING


def test_forwards_that_no_backward_follows_return_their_room(device, filed):
    model, engine, _ = filed
    pool, batch = engine.boundaries.shelf.pool, batches(device)[0]
    with torch.no_grad():
        model(batch)
    assert pool._created == 0
    for _ in range(3):
        model(batch)
        gc.collect()
    assert pool._created == len(pool._free) == LEAVING


def test_several_forwards_before_their_backwards(device, folder, way):
    def run(activations, **config):
        model, engine, _ = managed(device, activations, **config)
        torch.manual_seed(5)
        first, second, third = [model(batch).square().sum() for batch in batches(device, (ROWS, 2 * ROWS, 200))]
        second.backward(retain_graph=True)
        (first + third).backward()
        second.backward()
        found = [parameter.grad.cpu().clone() for parameter in model.parameters()]
        engine.detach()
        return found

    assert same(run("gpu"), run("nvme", nvme_path=folder))


def test_an_exception_in_the_middle_of_a_forward(device, folder, way):
    class Boom(Exception):
        pass

    def run(activations, **config):
        model, engine, optimizer = managed(device, activations, **config)
        batch = batches(device)[0]
        for number in range(3):
            step(model, optimizer, batch, number)

            def explode(*_):
                raise Boom

            for hook in (
                model.layers[4].register_forward_pre_hook(explode),
                model.layers[1].register_full_backward_pre_hook(explode),
            ):
                with contextlib.suppress(Boom):
                    model(batch).sum().backward()
                    pytest.fail("no exception")
                hook.remove()
                optimizer.zero_grad()
        found = weights(model)
        engine.detach()
        return found

    assert same(run("gpu"), run("nvme", nvme_path=folder))


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_the_scripts_own_checkpointing_around_layers(device, folder, way, is_reentrant, caplog):
    class Checkpointed(Net):
        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=is_reentrant)
            return self.head(x)

    def run(activations, **config):
        torch.manual_seed(0)
        model = Checkpointed().train()
        settings = SlideFormerConfig(activations=activations, gpu_memory=tight(model), **config)
        engine = attach(model, settings, device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine.bind(optimizer)
        seen = [step(model, optimizer, batch).cpu() for batch in batches(device)]
        seen += weights(model)
        engine.detach()
        return seen

    assert same(run("gpu"), run("nvme", nvme_path=folder))
    words = [record for record in caplog.records if "keeps saved tensors itself" in record.message]
    assert len(words) == (0 if is_reentrant else 1)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("checkpointing", ["off", "reentrant", "not reentrant"])
def test_a_llama_with_frozen_embeddings_and_its_own_checkpointing(device, folder, way, checkpointing):
    """Sequences of several lengths."""

    def run(activations, **config):
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "vocab_size": 128}
        llama = LlamaConfig(**sizes, use_cache=False, attn_implementation="eager")
        model = LlamaForCausalLM(llama).train()
        model.get_input_embeddings().requires_grad_(False)
        if checkpointing != "off":
            kwargs = {"use_reentrant": checkpointing == "reentrant"}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        config = SlideFormerConfig(activations=activations, gpu_memory=tight(model), **config)
        engine = attach(model, config, device=device)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        engine.bind(optimizer)
        seen = []
        for length in (128, 300, 64, 257):
            generator = torch.Generator().manual_seed(length)
            tokens = torch.randint(0, 128, (2, length), generator=generator).to(device)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach().cpu())
        seen += weights(model)
        created = engine.boundaries.shelf.pool._created
        engine.detach()
        return seen, created

    expected, _ = run("gpu")
    found, created = run("nvme", nvme_path=folder)
    assert created > 0
    assert same(expected, found)


@pytest.mark.parametrize("place_of_inputs", ["host", "nvme"])
def test_ours_stay_out_of_the_way_of_a_scripts_own_offloading(device, folder, place_of_inputs, caplog):
    """TRL's ``activation_offloading`` is a ``saved_tensors_hooks`` too: it gets the tensors, once it is said."""
    model, engine, optimizer = managed(device, place_of_inputs, nvme_path=folder)
    plain, other, plain_optimizer = managed(device, "gpu")
    for batch in batches(device, (ROWS, ROWS)):
        with torch.autograd.graph.save_on_cpu():
            found = step(model, optimizer, batch)
        assert torch.equal(found, step(plain, plain_optimizer, batch))
    assert engine.boundaries.shelf.pool._created == 0
    assert len([record for record in caplog.records if "activation_offloading" in record.message]) == 1
    assert same(weights(plain), weights(model))
    engine.detach()
    other.detach()


def test_a_slow_disk_holds_the_forward_back(device, filed, way, monkeypatch):
    """Boundaries on their way are on the device still: no more than the shelf lets out at once."""
    model, engine, optimizer = filed
    if not isinstance(engine.boundaries.shelf.tier, PosixTier):
        pytest.skip("slows the calls of the POSIX tier")
    store, tickets, most = PosixTier.store, [], []

    def slow(*arguments):
        time.sleep(0.03)
        store(*arguments)

    monkeypatch.setattr(PosixTier, "store", slow)
    lane = engine.backend.file_out if way == "direct" else engine.backend.out
    submit = lane.submit
    monkeypatch.setattr(lane, "submit", lambda *a, **k: tickets.append(submit(*a, **k)) or tickets[-1])
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: most.append(sum(not ticket.is_complete for ticket in tickets)))
    for number in range(3):
        step(model, optimizer, batches(device)[0], number)
    assert len(tickets) == 3 * LEAVING
    assert max(most) <= engine.boundaries.shelf.exits
    if way == "direct":
        assert max(most) > 0


# -- faults ------------------------------------------------------------------------------------------------------------


class Broken:
    """Calls of ``name`` of a shelf's system fail from number ``after`` on, until it is mended; each after a while."""

    def __init__(self, engine, name, code, after=0, most=10**9, seconds=0.0):
        self.system = engine.boundaries.shelf.tier.directory.system
        self.name, self.code, self.left, self.most, self.seconds = name, code, after, most, seconds
        self.original, self.__name__ = getattr(self.system, name), name
        setattr(self.system, name, self)

    def __call__(self, *arguments):
        self.left -= 1
        if -self.most <= self.left < 0:
            time.sleep(self.seconds)
            raise OSError(self.code, os.strerror(self.code))
        return self.original(*arguments)

    def mend(self):
        setattr(self.system, self.name, self.original)


def is_posix(engine):
    return isinstance(engine.boundaries.shelf.tier, PosixTier)


@functools.cache
def after_steps(device, *numbers, rows=(ROWS,)):
    """The weights of a run in memory that took the steps ``numbers`` only, on batches of ``rows`` in turn."""
    model, engine, optimizer = managed(device, "gpu")
    data = batches(device, rows)
    for number in numbers:
        step(model, optimizer, data[number % len(data)], number)
    found = weights(model)
    engine.detach()
    return found


def failed_step(model, optimizer, batch, number):
    """The error of a step, without the frames it came through."""
    with pytest.raises(StorageError) as caught:
        step(model, optimizer, batch, number)
    return caught.value.with_traceback(None)


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize(
    ("name", "code"), [("write_at", errno.ENOSPC), ("write_at", errno.EIO), ("read_at", errno.EIO)]
)
def test_a_failing_disk_ends_the_step_and_the_next_one_is_right(device, filed, name, code, after):
    """File, offset, errno and remedy; weights of the last completed step; the error again until the disk works."""
    model, engine, optimizer = filed
    if not is_posix(engine):
        pytest.skip("fails calls of the POSIX tier")
    batch = batches(device)[0]
    step(model, optimizer, batch, 0)
    broken = Broken(engine, name, code, after)
    for number in (1, 2):
        error = failed_step(model, optimizer, batch, number)
        gc.collect()  # what pytest keeps
        assert error.errno == code
        assert errno.errorcode[code] in str(error)
        assert error.path.startswith(engine.boundaries.shelf.tier.directory.path)
        assert error.offset is not None
        assert error.remedy
        assert same(after_steps(device, 0), weights(model))
        optimizer.zero_grad()
    broken.mend()
    for number in (3, 4):
        step(model, optimizer, batch, number)
    assert same(after_steps(device, 0, 3, 4), weights(model))
    # what failed keeps neither its graph nor its room
    assert engine.boundaries.shelf.describe()["bytes"] == LEAVING * SIZE
    assert not [ref for ref in engine.boundaries._order if ref() is not None]


def test_one_failure_costs_one_step(device, filed):
    model, engine, optimizer = filed
    if not is_posix(engine):
        pytest.skip("fails calls of the POSIX tier")
    batch = batches(device)[0]
    for name, first in (("write_at", 0), ("read_at", 10)):
        before = weights(model)
        broken = Broken(engine, name, errno.EIO, 1, most=1)
        with pytest.raises(StorageError, match="EIO"):
            step(model, optimizer, batch, first)
        optimizer.zero_grad()
        broken.mend()
        assert same(before, weights(model))
        step(model, optimizer, batch, first + 1)
    assert same(after_steps(device, 1, 11), weights(model))


@pytest.mark.parametrize("name", ["write_at", "read_at"])
def test_what_fails_after_the_error_belongs_to_the_step_that_failed(device, filed, name):
    """The host meets the first error while the next transfer is under way, which fails as well; the next step is not
    told of it."""
    model, engine, optimizer = filed
    if not is_posix(engine):
        pytest.skip("fails calls of the POSIX tier")
    batch = batches(device)[0]
    step(model, optimizer, batch, 0)
    broken = Broken(engine, name, errno.EIO, most=2, seconds=0.2)
    failed_step(model, optimizer, batch, 1)
    optimizer.zero_grad()
    end = time.monotonic() + 60
    while broken.left > -2 and time.monotonic() < end:
        time.sleep(0.001)
    assert broken.left <= -2
    step(model, optimizer, batch, 2)
    assert same(after_steps(device, 0, 2), weights(model))


@pytest.mark.parametrize(("name", "after"), [("write_at", 0), ("write_at", LEAVING - 1), ("read_at", 1)])
def test_the_next_forward_frees_the_graph_of_a_step_that_failed(device, filed, name, after):
    """Without the collector: errors hold frames, and those hold the graph, which fills the device."""
    model, engine, optimizer = filed
    if not is_posix(engine):
        pytest.skip("fails calls of the POSIX tier")
    batch = batches(device)[0]
    step(model, optimizer, batch, 0)
    broken = Broken(engine, name, errno.EIO, after)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(StorageError):
            step(model, optimizer, batch, 1)
            pytest.fail("no error")
        optimizer.zero_grad()
        broken.mend()
        old = list(engine.boundaries._order)
        step(model, optimizer, batch, 2)
        assert [ref() for ref in old if ref() is not None] == []
    finally:
        gc.enable()
    assert same(after_steps(device, 0, 2), weights(model))


def test_a_failure_that_nobody_waits_for_is_said(device, filed, caplog):
    """Of a loss that is dropped: the next step is right, and a word in the log."""
    model, engine, optimizer = filed
    if not is_posix(engine):
        pytest.skip("fails calls of the POSIX tier")
    batch = batches(device)[0]
    step(model, optimizer, batch, 0)
    broken = Broken(engine, "write_at", errno.EIO, LEAVING - 1)
    loss = model(batch).square().mean()
    for lane in (engine.backend.out, engine.backend.file_out):
        lane.submit("barrier", lambda: None).synchronize()
    assert broken.left < 0
    del loss
    gc.collect()
    broken.mend()
    step(model, optimizer, batch, 2)
    assert len([record for record in caplog.records if "take other files" in record.message]) == 1
    assert same(after_steps(device, 0, 2), weights(model))


def test_a_backward_that_failed_can_be_done_again(device, filed):
    """With the graph kept, as in torch: what could not be read is read again."""
    model, engine, _ = filed
    if not is_posix(engine):
        pytest.skip("fails calls of the POSIX tier")
    batch = batches(device)[0]
    torch.manual_seed(0)
    model(batch).square().mean().backward()
    expected = [parameter.grad.cpu().clone() for parameter in model.parameters()]
    model.zero_grad()
    for after in range(LEAVING):
        torch.manual_seed(0)
        loss = model(batch).square().mean()
        broken = Broken(engine, "read_at", errno.EIO, after, most=1)
        with pytest.raises(StorageError, match="EIO"):
            loss.backward(retain_graph=True)
        broken.mend()
        model.zero_grad()
        loss.backward()
        assert same(expected, [parameter.grad.cpu() for parameter in model.parameters()])
        model.zero_grad()


def test_a_full_disk_is_said_when_a_larger_batch_comes(device, filed):
    model, engine, optimizer = filed
    small, large = batches(device, (ROWS, 2 * ROWS))
    step(model, optimizer, small, 0)
    broken = Broken(engine, "allocate", errno.ENOSPC)
    with pytest.raises(StorageError, match=r"Reserving .*ENOSPC") as caught:
        step(model, optimizer, large, 1)
    for words in ("free space", "smaller micro-batches", "activations: host"):
        assert words in caught.value.remedy
    optimizer.zero_grad()
    assert same(after_steps(device, 0), weights(model))
    broken.mend()
    step(model, optimizer, small, 3)
    assert same(after_steps(device, 0, 3), weights(model))


@pytest.mark.parametrize("damage", ["bit", "shortened"])
def test_damage_between_forward_and_backward_shows(device, filed, damage):
    model, engine, optimizer = filed
    batch = batches(device)[0]
    step(model, optimizer, batch, 0)
    loss = model(batch).square().mean()
    for lane in (engine.backend.out, engine.backend.file_out):
        lane.submit("barrier", lambda: None).synchronize()
    path = next(b.block.room.region.path for ref in engine.boundaries._order if (b := ref()) is not None and b.block)
    if damage == "bit":
        fd = os.open(path, os.O_RDWR)
        (old,) = os.pread(fd, 1, 4321)
        os.pwrite(fd, bytes([old ^ 8]), 4321)
        os.fsync(fd)
        os.close(fd)
    else:
        os.truncate(path, 4096)
    with pytest.raises(StorageError) as caught:
        loss.backward()
    assert caught.value.path == path
    assert caught.value.remedy
    optimizer.zero_grad()
    assert same(after_steps(device, 0), weights(model))
    del loss
    gc.collect()
    step(model, optimizer, batch, 3)
    assert same(after_steps(device, 0, 3), weights(model))


@pytest.mark.parametrize("batch", range(3))
def test_no_fault_is_silent(device, folder, way, batch):
    """Random calls fail, or move less than asked for: a step ends with an error, or with the right bits, and none ends
    for what failed in another."""
    rows = (ROWS, 2 * ROWS, 200)
    data = batches(device, rows)
    errors = injected = 0
    for seed in range(batch * 20, batch * 20 + 20):
        random = Random(seed)
        model, engine, optimizer = managed(device, "nvme", nvme_path=folder)
        if not is_posix(engine):
            pytest.skip("fails calls of the POSIX tier")
        name = random.choice(["read_at", "write_at", "read_at", "write_at", "allocate", "open", "unlink"])
        code = random.choice([errno.EIO, errno.ENOSPC, errno.EINTR])
        broken = Broken(engine, name, code, random.randrange(20), most=random.choice([1, 3]))
        done = []
        for number in range(5):
            try:
                step(model, optimizer, data[number % 3], number)
            except StorageError as error:
                errors += error.errno == code
                optimizer.zero_grad()
            else:
                done.append(number)
        injected += broken.left < 0
        broken.mend()
        assert len(done) >= 5 - broken.most, f"seed {seed}"
        found = weights(model)
        engine.detach()
        assert os.listdir(folder) == [] or name == "unlink"
        for left in os.listdir(folder):
            assert os.path.isdir(os.path.join(folder, left))
        assert same(after_steps(device, *done, rows=rows), found), f"seed {seed}: wrong bits after {done}"
    assert injected > 10
    assert errors > 2


def test_detach_with_a_graph_that_is_alive(device, filed):
    model, engine, _ = filed
    loss = model(batches(device)[0]).sum()
    before = weights(model)
    engine.detach()
    assert same(before, weights(model))
    del loss
    gc.collect()


def test_detach_after_a_failure(device, filed, folder):
    model, engine, optimizer = filed
    batch = batches(device)[0]
    step(model, optimizer, batch, 0)
    if is_posix(engine):
        Broken(engine, "write_at", errno.EIO)
        with pytest.raises(StorageError):
            step(model, optimizer, batch, 1)
        optimizer.zero_grad()
    engine.detach()
    assert os.listdir(folder) == []
    assert same(after_steps(device, 0), weights(model))


def test_an_abandoned_engine_leaves_no_file(device, folder, way):
    model, engine, optimizer = managed(device, "nvme", nvme_path=folder)
    step(model, optimizer, batches(device)[0])
    assert os.listdir(folder)
    del model, engine, optimizer
    deadline = time.monotonic() + 10
    while os.listdir(folder) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    assert os.listdir(folder) == []


# -- choice ------------------------------------------------------------------------------------------------------------


def test_a_folder_is_needed(device):
    model = Net()
    classes = {type(parameter) for parameter in model.parameters()}
    for config, words in (({}, "activations: nvme needs a folder"), ({"nvme_path": "/nowhere/at/all"}, "not exist")):
        with pytest.raises(ConfigError, match=words):
            attach(model, SlideFormerConfig(activations="nvme", **config), device=device)
    assert {type(parameter) for parameter in model.parameters()} == classes


def test_states_and_inputs_both_in_files(device, folder, way):
    expected, _ = train(device, "gpu")
    found, _ = train(device, "nvme", nvme_path=folder, optimizer_states="nvme")
    assert same(expected, found)
    assert os.listdir(folder) == []


def test_the_plan_sends_inputs_to_files_only_where_that_takes_in_more_units():
    units = [UnitCost(number, 10, 0) for number in range(4)]
    assert place(units, 15, boundaries=3, away="nvme").activations == "gpu"
    assert place(units, 15, boundaries=5, away="nvme")[0:3:2] == ((0, 1), "nvme")
    assert "on NVMe" in place(units, 15, boundaries=5, away="nvme").reason
    assert place(units, 15, activations="nvme").activations == "nvme"


@pytest.mark.parametrize("has_room", [True, False], ids=["host has room", "host is full"])
@pytest.mark.parametrize("has_folder", [True, False], ids=["folder", "no folder"])
@pytest.mark.parametrize("is_fast", [True, False], ids=["fast disk", "slow disk"])
def test_auto_goes_to_files_only_where_the_host_is_full(device, folder, monkeypatch, has_room, has_folder, is_fast):
    settings = {"nvme_path": folder} if has_folder else {}
    model, engine, optimizer = managed(device, "auto", **settings)
    residency, batch = engine.residency, batches(device)[0]
    for number in range(OBSERVED_STEPS):
        step(model, optimizer, batch, number)
    leaving = engine.boundaries.freeable(LAYERS)
    assert leaving == 3 * SIZE
    cost = 16 * sum(parameter.numel() for parameter in model.layers[0].parameters())
    monkeypatch.setattr("slideformer_backend.engine.residency.spare_device_bytes", lambda *_: cost - leaving)
    monkeypatch.setattr(residency, "_host_room", lambda: 2 * leaving if has_room else leaving)
    monkeypatch.setattr(residency, "_step_seconds", 1e6 if is_fast else 1e-9)
    monkeypatch.setattr(type(residency), "budget", property(lambda self: 1 << 40))
    step(model, optimizer, batch, OBSERVED_STEPS)
    is_filed = has_folder and is_fast and not has_room
    assert residency.placement.activations == ("host" if has_room else "nvme" if is_filed else "gpu")
    assert bool(os.listdir(folder)) == is_filed
    step(model, optimizer, batch, OBSERVED_STEPS + 1)
    assert (engine.boundaries.shelf.pool._created > 0) == (has_room or is_filed)
    assert isinstance(engine.sliding[0], Unit)
    assert same(after_steps(device, *range(OBSERVED_STEPS + 2)), weights(model))
    engine.detach()
    assert os.listdir(folder) == []
