"""Compare managed training with the unmanaged model, every gradient and every weight, bit for bit where it can be.

    python benchmarks/exactness.py --shape 1b --steps 10 --max-norm 1.0
    python benchmarks/exactness.py --shape tiny --update immediate

The reference is the same bf16 model without an engine, with an fp32 master per weight that takes the same rule on the
host (DESIGN 4.5): forward and backward of plain PyTorch, gradients copied to the host, norm, clip, update, weights
copied back. With deterministic kernels both runs must agree in every bit; without, within twice the difference of two
reference runs. Prints one JSON line and exits with 1 when they do not agree.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import numpy as np
import torch
from train_llama import SHAPES, batches, make_model

from slideformer_backend.api import attach
from slideformer_backend.benchmarks.harness.exact import deterministic
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.optim import numba_kernels as kernels
from slideformer_backend.optim.norm import block_count, clip_coefficient
from slideformer_backend.optim.rules import RULES


class Reference:
    """bf16 model + fp32 masters + AdamW, each parameter by itself."""

    def __init__(self, model: torch.nn.Module, group: dict[str, object], *, is_split: bool) -> None:
        self.is_split = is_split
        self.model = model
        self.group = group
        self.steps = 0
        self.states = {}
        for name, parameter in model.named_parameters():
            bits = _bits(parameter.detach())
            master = np.empty(bits.size, np.float32)
            kernels.widen(bits, "bf16", master)
            self.states[name] = (master, np.zeros_like(master), np.zeros_like(master))

    def step(self, order: list[str], max_norm: float, *, is_looked_at: bool) -> dict[str, str]:
        """Clip, update, write back. Returns a digest of each gradient as the backward left it, if it is looked at."""
        gradients = {name: _bits(parameter.grad) for name, parameter in self.model.named_parameters()}
        total = 0.0
        if max_norm:
            for partials in _in_parallel(_partials, [gradients[name] for name in order]):
                for value in partials.tolist():
                    total += value
        coefficient = clip_coefficient(math.sqrt(total), max_norm) if max_norm else np.float32(1.0)
        self.steps += 1
        scalars = RULES["adamw"].scalars(self.group, self.steps)

        def update(item: tuple[str, torch.nn.Parameter]) -> None:
            name, parameter = item
            master, first, second = self.states[name]
            weights = np.empty(master.size, np.uint16)
            kernels.commit(RULES["adamw"], master, (first, second), gradients[name], "bf16", coefficient, scalars)
            if self.is_split:  # immediate: the weight is the high half of the master, which rounds ties up (DESIGN 5)
                kernels.split(master, weights, np.empty_like(weights))
            else:
                kernels.round_into(master, weights, "bf16")
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(weights).view(torch.bfloat16).view(parameter.shape))
            parameter.grad = None

        _in_parallel(update, list(self.model.named_parameters()))
        return digests(gradients) if is_looked_at else {}


def _in_parallel(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(function, items))


def _partials(bits: np.ndarray) -> np.ndarray:
    partials = np.zeros(block_count(bits.size))
    kernels.sum_squares(bits, "bf16", partials)
    return partials


def _bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", copy=True).reshape(-1).view(torch.uint16).numpy()


def digests(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """A digest of the bits of each array."""
    found = _in_parallel(lambda bits: hashlib.blake2b(bits, digest_size=16).hexdigest(), list(arrays.values()))
    return dict(zip(arrays, found, strict=True))


def differing(now: Mapping[str, str], then: Mapping[str, str]) -> list[str]:
    """Names whose digests differ."""
    return [name for name, digest in now.items() if then[name] != digest]


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--max-norm", type=float, default=0.0)
    parser.add_argument("--update", choices=("exact", "immediate"), default="exact")
    parser.add_argument("--gpu-memory", default="auto", help="cap of the plan: how many layers move to the GPU")
    return parser.parse_args()


def main() -> int:
    """Run both, compare, print."""
    with deterministic():
        return compare(parse())


def compare(args: argparse.Namespace) -> int:
    """Train plainly and managed, and print what differs; 1 if anything does."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = batches(args.steps * args.accumulate, args.sequences, args.length, SHAPES[args.shape]["vocab_size"], device)
    model = make_model(args.shape, torch.bfloat16, device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    # the norm adds up in unit order: blocks first, then edge units (DESIGN 4.5)
    names = [name for name, _ in model.named_parameters()]
    order = [name for name in names if ".layers." in name] + edge_order(model, names)
    looked_at = {2, args.steps - 1} if args.update == "exact" else set()
    plain_losses, gradients = [], []
    reference = Reference(model, optimizer.param_groups[0], is_split=args.update == "immediate")
    for step in range(args.steps):
        plain_losses.append(micro_batches(model, data, step, args.accumulate))
        gradients.append(reference.step(order, args.max_norm, is_looked_at=step in looked_at))
    final = digests({name: _bits(parameter) for name, parameter in model.named_parameters()})
    del model, optimizer, reference
    model = make_model(args.shape, torch.bfloat16, device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = attach(model, SlideFormerConfig(update=args.update, gpu_memory=args.gpu_memory), device=device)
    engine.bind(optimizer)
    losses, wrong_gradients = [], []
    for step in range(args.steps):
        engine.last_microbatch = lambda: True
        losses.append(micro_batches(model, data, step, args.accumulate, engine))
        if step in looked_at:  # looking voids the prediction, so most steps must not be looked at
            now = digests({name: _bits(p.grad) for name, p in model.named_parameters()})
            wrong_gradients += [f"{step}:{name}" for name in differing(now, gradients[step])]
        if args.max_norm and args.update == "exact":
            engine.clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    engine.settle()
    wrong_weights = differing(digests({name: _bits(p) for name, p in model.named_parameters()}), final)
    result = {
        **vars(args),
        "losses_equal": losses == plain_losses,
        "wrong_gradients": wrong_gradients[:5],
        "wrong_weights": wrong_weights[:5],
        "loss": [round(losses[0], 5), round(losses[-1], 5)],
        "repairs": engine.policy.repairs,
    }
    print("EXACT " + json.dumps(result), flush=True)
    return int(losses != plain_losses or bool(wrong_gradients) or bool(wrong_weights))


def edge_order(model: torch.nn.Module, names: list[str]) -> list[str]:
    """Edge parameters in unit order: large ones first, each a unit, then the small ones together."""
    from slideformer_backend.plan.partition import OWN_EDGE_UNIT

    sizes = dict(model.named_parameters())
    edges = [name for name in names if ".layers." not in name]
    return [n for n in edges if sizes[n].numel() >= OWN_EDGE_UNIT] + [
        n for n in edges if sizes[n].numel() < OWN_EDGE_UNIT
    ]


def micro_batches(
    model: torch.nn.Module, data: list[torch.Tensor], step: int, count: int, engine: object | None = None
) -> float:
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
