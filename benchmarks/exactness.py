"""Compare managed training with the unmanaged model: losses, every gradient, every weight.

    python benchmarks/exactness.py --shape 1b --steps 10 --max-norm 1.0
    python benchmarks/exactness.py --shape tiny --update immediate

The reference is the same bf16 model without an engine, with an fp32 master per weight that takes the same rule
(DESIGN 4.5), in plain torch operations: forward, backward, norm, clip, update, weights written back. It runs twice.
Where its two runs agree in every bit, as with deterministic kernels, the managed run must agree in every bit too;
elsewhere its gradients may differ by at most twice what those of the two runs differ by. Prints one JSON line and exits
with 1 when they do not agree.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from typing import NamedTuple

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import Tensor, nn
from train_llama import SHAPES, batches, make_model

from slideformer_backend.api import attach
from slideformer_backend.benchmarks.harness.exact import LEARNING_RATE, WEIGHT_DECAY, Reference, deterministic
from slideformer_backend.config import SlideFormerConfig

BEGAN = time.perf_counter()


class Seen(NamedTuple):
    """What a run showed: the loss of each step, gradients of the steps looked at (before any clip), final weights."""

    losses: list[float]
    gradients: dict[int, dict[str, Tensor]]
    weights: dict[str, Tensor]


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--layers", type=int, help="cut the model to so many")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--max-norm", type=float, default=0.0)
    parser.add_argument("--update", choices=("exact", "immediate"), default="exact")
    parser.add_argument("--gpu-memory", default="auto", help="cap of the plan: how many layers move to the GPU")
    parser.add_argument("--activations", choices=("auto", "gpu", "host", "nvme"), default="auto")
    for key in ("weights", "optimizer-states"):
        parser.add_argument(f"--{key}", default="auto", choices=("auto", "host", "nvme"))
    parser.add_argument("--nvme-path", help="folder for files of what waits on NVMe")
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
    return parser.parse_args()


def main() -> int:
    """Run all three, compare, print."""
    args = parse()
    if args.layers is not None:
        SHAPES[args.shape]["num_hidden_layers"] = args.layers
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = batches(args.steps * args.accumulate, args.sequences, args.length, SHAPES[args.shape]["vocab_size"], device)
    with deterministic():
        managed, repairs, order = train_managed(args, data, device)
        say("managed run done")
        first = train_plainly(args, data, device, order)
        second = train_plainly(args, data, device, order)
        say("plain runs done")
    noise, ours = difference(first, second, device), difference(first, managed, device)
    is_repeatable = not any(noise.values()) and first.losses == second.losses
    agrees = (
        not any(ours.values()) and first.losses == managed.losses
        if is_repeatable
        else all(ours[key] <= 2 * noise[key] for key in ours)
    )
    result = {
        **vars(args),
        "agrees": agrees,
        "plain_runs_equal": is_repeatable,
        "losses_equal": first.losses == managed.losses,
        "loss": [round(first.losses[0], 5), round(first.losses[-1], 5)],
        "difference": {key: f"{value:.3g}" for key, value in ours.items()},
        "noise": {key: f"{value:.3g}" for key, value in noise.items()},
        "wrong": differing(first, managed)[:5],
        "repairs": repairs,
    }
    print("EXACT " + json.dumps(result), flush=True)
    return int(not agrees)


def say(what: str) -> None:
    """A line to the error stream: where a run that is cut short was."""
    print(f"{time.perf_counter() - BEGAN:6.1f} s {what}", file=sys.stderr, flush=True)


def make(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """The model to train."""
    model = make_model(args.shape, torch.bfloat16, device)
    model.set_attn_implementation(args.attention)
    return model.train()


def looked_at(args: argparse.Namespace) -> set[int]:
    """Steps whose gradients are read: reading voids a prediction, so most must not be. None under ``immediate``."""
    return {2, args.steps - 1} if args.update == "exact" else set()


def train_plainly(args: argparse.Namespace, data: list[Tensor], device: torch.device, order: list[str]) -> Seen:
    """The reference. ``order``: names in the order in which the norm adds up."""
    model = make(args, device)
    reference = Reference(model, order)
    split = set(order) if args.update == "immediate" else set()
    losses, gradients = [], {}
    for step in range(args.steps):
        losses.append(micro_batches(model, data, step, args.accumulate))
        if step in looked_at(args):
            gradients[step] = {name: kept(p.grad) for name, p in model.named_parameters()}
        reference.step(args.max_norm or None, split)
    return Seen(losses, gradients, {name: kept(p) for name, p in model.named_parameters()})


def train_managed(args: argparse.Namespace, data: list[Tensor], device: torch.device) -> tuple[Seen, int, list[str]]:
    """Under the engine; also the repairs and the order in which its norm adds up."""
    model = make(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    config = SlideFormerConfig(
        update=args.update,
        gpu_memory=args.gpu_memory,
        activations=args.activations,
        weights=args.weights,
        optimizer_states=args.optimizer_states,
        nvme_path=args.nvme_path,
    )
    engine = attach(model, config, device=device)
    engine.bind(optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(record.parameter)] for unit in engine.units for record in unit.records]
    losses, gradients = [], {}
    for step in range(args.steps):
        losses.append(micro_batches(model, data, step, args.accumulate, engine))
        if step in looked_at(args):
            gradients[step] = {name: kept(p.grad) for name, p in model.named_parameters()}
        if args.max_norm and args.update == "exact":
            engine.clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        say(f"step {step + 1} issued")
    engine.settle()
    seen = Seen(losses, gradients, {name: kept(p) for name, p in model.named_parameters()})
    repairs = engine.policy.repairs
    engine.detach()
    del model, optimizer, engine
    gc.collect()
    return seen, repairs, order


def kept(tensor: Tensor | None) -> Tensor:
    """A copy in host memory."""
    if tensor is None:
        raise ValueError("a parameter of the model has no gradient")
    return tensor.detach().to("cpu", copy=True)


def pairs(one: Seen, other: Seen) -> list[tuple[str, str, Tensor, Tensor]]:
    """(what, name, tensor of one, tensor of the other)."""
    found = [("weights", name, tensor, other.weights[name]) for name, tensor in one.weights.items()]
    for step, gradients in one.gradients.items():
        found += [(f"gradients {step}", name, value, other.gradients[step][name]) for name, value in gradients.items()]
    return found


def difference(one: Seen, other: Seen, device: torch.device) -> dict[str, float]:
    """2-norm of the difference of all weights, and of all gradients of each step looked at."""
    total: dict[str, float] = {}
    for what, _, a, b in pairs(one, other):
        delta = a.to(device).float() - b.to(device).float()
        total[what] = total.get(what, 0.0) + float(delta.double().square().sum())
    return {what: value**0.5 for what, value in total.items()}


def differing(one: Seen, other: Seen) -> list[str]:
    """What differs in any bit."""
    return [f"{what}: {name}" for what, name, a, b in pairs(one, other) if not torch.equal(a, b)]


def micro_batches(model: nn.Module, data: list[Tensor], step: int, count: int, engine: object | None = None) -> float:
    """Forward and backward of one step's micro-batches; the sum of their losses."""
    total = 0.0
    for number in range(count):
        if engine is not None:
            engine.last_microbatch = lambda number=number: number == count - 1  # type: ignore[attr-defined]
        tokens = data[step * count + number]
        loss = model(input_ids=tokens, labels=tokens).loss / count
        loss.backward()
        total += loss.item()
    return total


if __name__ == "__main__":
    sys.exit(main())
