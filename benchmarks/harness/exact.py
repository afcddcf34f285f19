"""The exactness check: five steps of one of our configurations against plain PyTorch, bit for bit.

The contender notes what it saw (``observe``); another process trains the same model without an engine and compares
(``verify``). There, weights are bf16, each with an fp32 master on the device, and AdamW is the plain-torch definition
of the update rules (``optim/twins.py``). Losses of all steps, every gradient of one step and every weight at the end
must agree in every bit. Kernels are deterministic in both.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from slideformer_backend.benchmarks.harness.contenders import WEIGHT_DECAY, Ours, accumulate, checkpoint
from slideformer_backend.benchmarks.harness.shapes import SHAPES, make_batches, make_model
from slideformer_backend.benchmarks.harness.spec import MAX_NORMS, Clip, Job, Load

STEPS = 5
LOOK = 3  # the step whose gradients are read: looking voids a prediction, so the others must not be looked at
LEARNING_RATE = 1e-4
_CHUNK = 1 << 24


def clips(loads: Sequence[Load]) -> list[Clip]:
    """The clip of each step: all that the job is timed with, so that predictions are also found wrong."""
    wanted = {load.clip for load in loads}
    if "active" in wanted and "quiet" in wanted:
        return ["quiet", "active", "quiet", "active", "active"]
    return [loads[0].clip] * STEPS


def observe(trainer: Ours, job: Job, device: torch.device) -> dict[str, Any]:
    """Train for ``STEPS`` steps and note what came out, for ``verify``."""
    load, shape = job.loads[0], SHAPES[job.shape].with_layers(job.check_layers)
    exact = job.config.get("update", "exact") == "exact"
    batches = make_batches(shape, STEPS * load.accumulate, load.sequences, load.length, device)
    for group in trainer.optimizer.param_groups:
        kept, group["lr"] = group["lr"], LEARNING_RATE
    losses, gradients, split = [], {}, []
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    with deterministic():
        for number, clip in enumerate(clips(job.loads)):
            losses.append(float(trainer.backward(_of_step(batches, number, load))))
            if number == LOOK and exact:
                gradients = digests({n: p.grad for n, p in trainer.model.named_parameters()}, device)
            trainer.clip(clip)
            trainer.update()
            records = [record for unit in trainer.engine.units if unit.rounds_half_up for record in unit.records]
            split.append([names[id(record.parameter)] for record in records])
        trainer.finish()
        weights = digests(dict(trainer.model.named_parameters()), device)
    for group in trainer.optimizer.param_groups:
        group["lr"] = kept
    order = [names[id(record.parameter)] for unit in trainer.engine.units for record in unit.records]
    return {"losses": losses, "gradients": gradients, "weights": weights, "split": split, "order": order}


def verify(items: Sequence[tuple[Job, Mapping[str, Any]]], device: torch.device) -> list[str]:
    """Train plainly and compare with what contenders saw; for each what differs, or an empty string."""
    found: dict[str, dict[str, Any]] = {}
    verdicts = []
    for job, seen in items:
        key = json.dumps([job.shape, job.check_layers, [vars(load) for load in job.loads], seen["split"]])
        if key not in found:
            found.clear()  # one at a time: weights of a large model fill the device
            found[key] = train_plainly(job, seen["order"], seen["split"], device)
        verdicts.append(_compare(seen, found[key]))
    return verdicts


def train_plainly(
    job: Job, order: Sequence[str], split: Sequence[Sequence[str]], device: torch.device
) -> dict[str, Any]:
    """What ``observe`` notes, of plain PyTorch. ``order`` and ``split`` as ``Reference`` takes them."""
    load, shape = job.loads[0], SHAPES[job.shape].with_layers(job.check_layers)
    batches = make_batches(shape, STEPS * load.accumulate, load.sequences, load.length, device)
    model = make_model(shape, device)
    checkpoint(model)
    reference = Reference(model, order)
    losses, gradients = [], {}
    with deterministic():
        for number, clip in enumerate(clips(job.loads)):
            losses.append(float(accumulate(model, _of_step(batches, number, load))))
            if number == LOOK:
                gradients = digests({n: p.grad for n, p in model.named_parameters()}, device)
            reference.step(MAX_NORMS[clip], set(split[number]))
    return {"losses": losses, "gradients": gradients, "weights": digests(dict(model.named_parameters()), device)}


def _compare(seen: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    for number, (ours, theirs) in enumerate(zip(seen["losses"], plain["losses"], strict=True)):
        if ours != theirs:
            return f"the loss of step {number + 1} is {ours!r}, plain PyTorch has {theirs!r}"
    wrong = _differing(plain["gradients"], seen["gradients"]) if seen["gradients"] else ""
    if wrong:
        return f"in step {LOOK + 1} the gradient of {wrong} differs from plain PyTorch's"
    wrong = _differing(plain["weights"], seen["weights"])
    return f"after {STEPS} steps {wrong} differs from plain PyTorch's" if wrong else ""


class Reference:
    """bf16 weights, fp32 masters and moments on the device, the rules' plain-torch definition.

    Args:
        model: takes the weights.
        order: names in the order in which the norm adds up.
    """

    def __init__(self, model: nn.Module, order: Sequence[str]) -> None:
        parameters = dict(model.named_parameters())
        self._parameters = [(name, parameters[name]) for name in order]
        self._states: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        for name, parameter in self._parameters:
            master = parameter.detach().reshape(-1).float()
            self._states[name] = (master, torch.zeros_like(master), torch.zeros_like(master))
        self._steps = 0

    def step(self, max_norm: float | None, split: set[str]) -> None:
        """Clip, update, round into the weights. ``split``: weights that are the high half of a split master, which
        rounds ties up; the others round to even."""
        from slideformer_backend.optim import twins
        from slideformer_backend.optim.rules import RULES

        coefficient = np.float32(1.0) if max_norm is None else self._coefficient(max_norm)
        self._steps += 1
        rule = RULES["adamw"]
        group = {"lr": LEARNING_RATE, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": WEIGHT_DECAY}
        scalars = rule.scalars({**torch.optim.AdamW([torch.zeros(1)]).param_groups[0], **group}, self._steps)
        for name, parameter in self._parameters:
            if parameter.grad is None:
                continue
            master, first, second = self._states[name]
            weights = parameter.detach().view(-1)
            gradient, parameter.grad = parameter.grad.reshape(-1), None
            twins.commit(rule, master, (first, second), gradient, "bf16", coefficient, scalars)
            if name in split:
                twins.split(master, weights, torch.empty_like(weights, dtype=torch.int16))
            else:
                twins.round_into(master, weights, "bf16")

    def _coefficient(self, max_norm: float) -> np.float32:
        from slideformer_backend.optim import twins
        from slideformer_backend.optim.norm import block_count, clip_coefficient

        total = 0.0
        for _, parameter in self._parameters:
            if parameter.grad is not None:
                flat = parameter.grad.reshape(-1)
                partials = torch.empty(block_count(flat.numel()), dtype=torch.float64, device=flat.device)
                twins.sum_squares(flat, "bf16", partials)
                own = 0.0
                for value in partials.tolist():
                    own += value
                total += own
        return clip_coefficient(math.sqrt(total), max_norm)


def digests(tensors: Mapping[str, Tensor | None], device: torch.device) -> dict[str, int]:
    """A 63-bit digest of each tensor's bits, computed on ``device``; equal bits in equal places give equal digests."""
    return {name: digest(tensor, device) for name, tensor in tensors.items() if tensor is not None}


def digest(tensor: Tensor, device: torch.device) -> int:
    """Sum over all elements of bits times a weight of the place, modulo 2^63."""
    flat = tensor.detach().reshape(-1).contiguous().view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)
    total = 0
    for start in range(0, flat.numel(), _CHUNK):
        bits = flat[start : start + _CHUNK].to(device).to(torch.int64) & 0xFFFFFFFF
        place = torch.arange(start, start + bits.numel(), dtype=torch.int64, device=device)
        weight = (place * 2654435761 + 0x9E3779B97F4A7C15 % (1 << 62)) ^ (place >> 7)
        total += int((bits * weight).sum())
    return total % (1 << 63)


def _differing(mine: Mapping[str, int], theirs: Mapping[str, int]) -> str:
    wrong = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    return "" if not wrong else wrong[0] if len(wrong) == 1 else f"{wrong[0]} (and {len(wrong) - 1} others)"


def _of_step(batches: Sequence[Tensor], number: int, load: Load) -> Sequence[Tensor]:
    return batches[number * load.accumulate : (number + 1) * load.accumulate]


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Deterministic kernels, attention's backward included: two plain runs agree in every bit."""
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False  # memory is written before it is read, and is large
    torch.use_deterministic_algorithms(True)  # as a mere wish (warn_only) flash attention's backward would ignore it
    try:
        # cuDNN's and the memory-efficient backward add in any order whatever is asked of them
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        settings.fill_uninitialized_memory = fills
