"""The same state outside: plain PyTorch and FSDP2 read it through ``torch.distributed.checkpoint``."""

import multiprocessing
import os
import re
import socket

import pytest
import torch

from tests.checkpoint.scripts import Script, batch, model_of
from tests.launch.conftest import ROOT

README = ROOT / "README.md"

NO_DROPOUT = {"attention_dropout": 0.0}


def load(*arguments):
    """What README tells users who leave for several GPUs."""
    code = next(
        code for code in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if "dcp.load" in code
    )
    names = {}
    exec(code, names)
    names["load"](*arguments)


def continued(folder, shard=lambda model: model):
    """Losses of steps 5 to 9 in fp32 from the checkpoint, without SlideFormer."""
    model = shard(model_of(seed=11, **NO_DROPOUT))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=False)
    load(folder, model, optimizer)
    losses = []
    for number in range(5, 10):
        loss = model(**batch(number)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded(rank, port, folder, results):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))

    def shard(model):
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    results.put((rank, continued(folder, shard)))
    torch.distributed.destroy_process_group()


class Saved(Script):
    """One learning rate, no dropout, no clipping, as ``continued`` has it."""

    def __init__(self, **more):
        super().__init__(clip=None, **more)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] = 1e-2
        self.scheduler.scheduler.base_lrs = [1e-2, 1e-2]
        self.scheduler.scheduler.end_factor = 1.0
        self.model.config.attention_dropout = 0.0
        for layer in self.model.model.layers:
            layer.self_attn.attention_dropout = 0.0


@pytest.fixture(params=["fp32", "bf16 model"])
def checkpoint(request, tmp_path):
    """A checkpoint after 5 steps, and the losses with which SlideFormer goes on in fp32 from the masters."""
    run = Saved(precision=request.param).train(0, 5)
    run.accelerator.save_state(str(tmp_path / "state"))
    if request.param == "fp32":
        return str(tmp_path / "state"), run.train(5, 5).losses[5:]
    state = run.optimizer.state_dict()["state"]
    params = [p for group in run.optimizer.param_groups for p in group["params"]]
    masters = {id(p): state[number]["master"] for number, p in enumerate(params)}
    model = model_of(**NO_DROPOUT)
    with torch.no_grad():
        for (_, target), (_, source) in zip(model.named_parameters(), run.model.named_parameters(), strict=True):
            target.copy_(masters[id(source)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    by_name = {name: state[[id(q) for q in params].index(id(p))] for name, p in run.model.named_parameters()}
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {k: v.clone() for k, v in by_name[name].items() if k != "master"}
    losses = []
    for number in range(5, 10):
        loss = model(**batch(number)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return str(tmp_path / "state"), losses


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # it says what this test is about
def test_plain_pytorch(checkpoint):
    folder, losses = checkpoint
    assert continued(folder) == pytest.approx(losses, rel=1e-6)


@pytest.mark.timeout(180)
def test_fsdp2_on_two_processes(checkpoint):
    folder, losses = checkpoint
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # the libraries are imported once, in a process without threads
    results = context.Queue()
    processes = [context.Process(target=sharded, args=(rank, port, folder, results)) for rank in range(2)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=150) for _ in processes)
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert found[0] == found[1] == pytest.approx(losses, rel=1e-5)
