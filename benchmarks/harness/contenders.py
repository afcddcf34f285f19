"""Who trains: ours, the peers, and the ceilings. Each takes one optimizer step at a time on micro-batches of tokens."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from slideformer_backend.benchmarks.harness.shapes import SHAPES, make_model
from slideformer_backend.benchmarks.harness.spec import MAX_NORMS, Clip, Job

WEIGHT_DECAY = 0.01


class Step(NamedTuple):
    """What a script sees of one optimizer step: loss (0-dim, on the device) and gradient norm, if one is computed."""

    loss: Tensor
    norm: float | None


class Trainer(Protocol):
    """A contender at work."""

    model: nn.Module

    def step(self, micro_batches: Sequence[Tensor], clip: Clip) -> Step:
        """Forward, backward, clip, update; ``micro_batches`` are int64 [sequences, length]."""

    def finish(self) -> None:
        """Wait until every update of the steps so far is done, on the device and on the host."""


def make_trainer(job: Job, device: torch.device, *, layers: int | None = None) -> Trainer:
    """Build the model (``layers`` deep, if given) and the contender.

    Raises:
        ImportError: the peer is not installed.
        SlideFormerError: our configuration is refused.
    """
    model = make_model(SHAPES[job.shape].with_layers(layers), device)
    if job.contender == "ours":
        return Ours(model, job, device)
    if job.contender in ("zero2", "zero3"):
        return DeepSpeed(model, job, 2 if job.contender == "zero2" else 3)
    if job.contender == "torchao":
        return TorchAO(model, job)
    if job.contender in ("ceiling", "ceiling-all"):
        return Ceiling(model, recomputes=job.contender == "ceiling")
    return Plain(model, job)


class Ours:
    """Managed by our engine, with torch's own AdamW, as a script would."""

    def __init__(self, model: nn.Module, job: Job, device: torch.device) -> None:
        from slideformer_backend.api import attach
        from slideformer_backend.config import SlideFormerConfig

        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate, weight_decay=WEIGHT_DECAY)
        self.engine = attach(model, SlideFormerConfig.from_mapping(job.config), device=device)
        self.engine.bind(self.optimizer)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the weights came from the device

    def fuse(self) -> None:
        """Our own kernels and lazy logits, as ``Accelerator.prepare`` puts them in. They round less than the model's
        own code, so exactness is checked before."""
        from slideformer_backend.integrations import kernel_swap, lazy_logits

        kernel_swap.install(self.engine)
        lazy_logits.install(self.engine)

    def step(self, micro_batches: Sequence[Tensor], clip: Clip) -> Step:
        loss = self.backward(micro_batches)
        norm = self.clip(clip)
        self.update()
        return Step(loss, norm)

    def backward(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """Forward and backward of all micro-batches; the sum of their losses."""
        count = len(micro_batches)
        losses = []
        for number, tokens in enumerate(micro_batches):
            self.engine.last_microbatch = partial(bool, number == count - 1)
            loss = self.model(input_ids=tokens, labels=tokens).loss / count
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def clip(self, clip: Clip) -> float | None:
        """Clip by norm; the norm, or None where clipping is off."""
        max_norm = MAX_NORMS[clip]
        if max_norm is None:
            return None
        return float(self.engine.clip_grad_norm_(self.model.parameters(), max_norm))

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self) -> None:
        self.engine.settle()
        _synchronize(self.engine.device)


class DeepSpeed:
    """ZeRO-Offload, one process, no launcher. On the CPU its accelerator of that name runs the same code."""

    def __init__(self, model: nn.Module, job: Job, stage: int) -> None:
        on_cpu = job.device == "cpu"
        os.environ.update(single_process_environment(), DS_ACCELERATOR="cpu" if on_cpu else "cuda")
        os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
        import deepspeed

        if on_cpu:  # gloo serves one process as well, without compiling a library first
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.model = model
        checkpoint(model)
        self.engine = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=zero_config(job, stage)
        )[0]

    def step(self, micro_batches: Sequence[Tensor], clip: Clip) -> Step:
        losses = []
        for tokens in micro_batches:
            loss = self.engine(input_ids=tokens, labels=tokens).loss
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        norm = self.engine.get_global_grad_norm() if clip != "off" else None
        return Step(torch.stack(losses).mean(), None if norm is None else float(norm))

    def finish(self) -> None:
        _synchronize(next(self.model.parameters()).device)


def zero_config(job: Job, stage: int) -> dict[str, Any]:
    """DeepSpeed's configuration: what its documentation recommends for offload to pinned host memory.

    On the CPU the optimizer is torch's AdamW in place of DeepSpeedCPUAdam, which would have to be compiled first; the
    arithmetic and everything around it is the same.
    """
    load = job.loads[0]
    on_cpu = job.device == "cpu"
    place = {"device": "cpu", "pin_memory": not on_cpu}
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": place, "overlap_comm": True}
    zero["contiguous_gradients"] = True
    if stage == 3:
        zero["offload_param"] = dict(place)
    parameters: dict[str, Any] = {"lr": job.learning_rate, "weight_decay": WEIGHT_DECAY}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": load.sequences,
        "gradient_accumulation_steps": load.accumulate,
        "train_batch_size": load.sequences * load.accumulate,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": parameters | ({"torch_adam": True} if on_cpu else {})},
        "steps_per_print": 10**9,
    }
    if on_cpu:
        config["zero_force_ds_cpu_optimizer"] = False
    max_norm = MAX_NORMS[load.clip]
    if max_norm is not None:
        config["gradient_clipping"] = max_norm
    return config


def single_process_environment() -> dict[str, str]:
    """What a launcher would set for the only process of a job, with a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


class TorchAO:
    """Weights on the GPU, gradients and AdamW states in host memory, bf16, no master weights, no clipping."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        from torchao.optim import CPUOffloadOptimizer

        self.model = model
        checkpoint(model)
        self.optimizer = CPUOffloadOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            offload_gradients=True,
            fused=True,
            lr=job.learning_rate,
            weight_decay=WEIGHT_DECAY,
        )

    def step(self, micro_batches: Sequence[Tensor], clip: Clip) -> Step:
        if clip != "off" or len(micro_batches) > 1:
            raise ValueError("torchao's CPUOffloadOptimizer with offload_gradients neither clips nor accumulates")
        loss = self.model(input_ids=micro_batches[0], labels=micro_batches[0]).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Step(loss.detach(), None)

    def finish(self) -> None:
        _synchronize(next(self.model.parameters()).device)


class Ceiling:
    """Everything on the GPU and no optimizer at all: nobody who updates weights can be faster."""

    def __init__(self, model: nn.Module, *, recomputes: bool) -> None:
        self.model = model
        if recomputes:
            checkpoint(model)

    def step(self, micro_batches: Sequence[Tensor], clip: Clip) -> Step:
        loss = accumulate(self.model, micro_batches)
        for parameter in self.model.parameters():
            parameter.grad = None
        return Step(loss, None)

    def finish(self) -> None:
        _synchronize(next(self.model.parameters()).device)


class Plain:
    """bf16 model, fp32 master weights, torch's AdamW on them: what ZeRO-Offload computes, without offload."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        self.model = model
        self.weights = list(model.parameters())
        self.masters = [weight.detach().float() for weight in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=job.learning_rate, weight_decay=WEIGHT_DECAY)

    def step(self, micro_batches: Sequence[Tensor], clip: Clip) -> Step:
        loss = accumulate(self.model, micro_batches)
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        max_norm = MAX_NORMS[clip]
        norm = None if max_norm is None else float(torch.nn.utils.clip_grad_norm_(self.masters, max_norm))
        self.optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)
        return Step(loss, norm)

    def finish(self) -> None:
        _synchronize(self.weights[0].device)


def accumulate(model: nn.Module, micro_batches: Sequence[Tensor]) -> Tensor:
    """Plain PyTorch's forward and backward of one step; the sum of the micro-batches' losses."""
    losses = []
    for tokens in micro_batches:
        loss = model(input_ids=tokens, labels=tokens).loss / len(micro_batches)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def checkpoint(model: nn.Module) -> None:
    """Hugging Face's own recompute of layers, under either of its names."""
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
