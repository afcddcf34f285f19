"""Train a Llama shape with random weights, plain or managed, and print what it reached as one JSON line.

    python benchmarks/train_llama.py --shape 1b --sequences 8 --mode managed --max-norm 1.0
    python benchmarks/train_llama.py --shape 1b --sequences 8 --mode plain

``plain`` keeps everything on the device: bf16 weights, Hugging Face's own checkpointing, torch's fused AdamW with
states in the dtype of the weights. Both modes run the same loop; the clock stops after the last update has finished.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from functools import partial

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 256},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip


def make_model(shape: str, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    """A Llama of ``shape`` with random weights of a fixed seed."""
    torch.manual_seed(0)
    tied = shape in ("tiny", "1b", "3b")
    config = LlamaConfig(
        **SHAPES[shape], max_position_embeddings=8192, tie_word_embeddings=tied, use_cache=False, rope_theta=500000.0
    )
    with torch.device(device):
        return LlamaForCausalLM._from_config(config, dtype=dtype)


def batches(steps: int, sequences: int, length: int, vocabulary: int, device: torch.device) -> list[torch.Tensor]:
    """Random tokens of a fixed seed, int64 [sequences, length] each."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocabulary, (sequences, length), generator=generator).to(device) for _ in range(steps)]


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=5, help="units move to the device after three")
    parser.add_argument("--mode", choices=("plain", "managed"), default="managed")
    parser.add_argument("--update", choices=("exact", "immediate"), default="exact")
    parser.add_argument("--max-norm", type=float, default=0.0, help="0: no clipping")
    parser.add_argument("--gpu-memory", default="auto", help="cap of the plan, such as 24GiB")
    parser.add_argument("--recompute", default="auto", choices=("auto", "always", "never"))
    parser.add_argument("--activations", default="auto", choices=("auto", "gpu", "host", "nvme"))
    for key in ("weights", "optimizer-states"):
        parser.add_argument(f"--{key}", default="auto", choices=("auto", "host", "nvme"))
    parser.add_argument("--host-memory", default="auto", help="cap of the plan, such as 48GiB")
    parser.add_argument("--nvme-fraction", type=float, help="share of the units whose states wait on NVMe")
    parser.add_argument("--nvme-path", help="folder for files of what waits on NVMe")
    parser.add_argument("--trace", help="file for a timeline of the run")
    parser.add_argument("--liger", action="store_true", help="use Liger's kernels in both modes")
    parser.add_argument("--fused", action="store_true", help="managed: our kernels and lazy logits, as in Accelerator")
    return parser.parse_args()


def main() -> None:
    """Run and print."""
    args = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    base = psutil.Process().memory_info().rss
    model = make_model(args.shape, torch.bfloat16, device)
    model.train()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    engine = None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda" and args.mode == "plain")
    if args.mode == "managed":
        from slideformer_backend.api import attach
        from slideformer_backend.config import SlideFormerConfig

        config = SlideFormerConfig(
            update=args.update,
            gpu_memory=args.gpu_memory,  # type: ignore[arg-type]  # the config parses sizes
            host_memory=args.host_memory,  # type: ignore[arg-type]
            recompute=args.recompute,
            activations=args.activations,
            weights=args.weights,
            optimizer_states=args.optimizer_states,
            nvme_fraction=args.nvme_fraction,
            nvme_path=args.nvme_path,
            trace=args.trace,
        )
        engine = attach(model, config, device=device)
        engine.bind(optimizer)
        if args.fused:
            from slideformer_backend.integrations import kernel_swap, lazy_logits

            kernel_swap.install(engine)
            lazy_logits.install(engine)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    elif args.recompute != "never":
        model.gradient_checkpointing_enable()
    count = args.accumulate
    data = batches((args.steps + args.warmup) * count, args.sequences, args.length, model.config.vocab_size, device)
    losses, norms = [], []
    start = time.perf_counter()
    for number in range(args.steps + args.warmup):
        if number == args.warmup:
            finish(engine, device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
        for micro, tokens in enumerate(data[number * count : (number + 1) * count]):
            if engine is not None:
                engine.last_microbatch = partial(bool, micro == count - 1)
            loss = model(input_ids=tokens, labels=tokens).loss / count
            loss.backward()
        if args.max_norm:
            clip = torch.nn.utils.clip_grad_norm_ if engine is None else engine.clip_grad_norm_
            norms.append(clip(model.parameters(), args.max_norm))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    finish(engine, device)
    seconds = (time.perf_counter() - start) / args.steps
    result = {
        **vars(args),
        "parameters": parameters,
        "seconds_per_step": round(seconds, 4),
        "tokens_per_second": round(args.sequences * args.length * count / seconds),
        "gpu_peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else 0.0,
        "rss_bytes_per_parameter": round((psutil.Process().memory_info().rss - base) / parameters, 2),
        "losses": [round(float(loss), 4) for loss in losses],
        "norms": [round(float(norm), 4) for norm in norms],
        "pid": os.getpid(),
    }
    if engine is not None:
        report = engine.report()
        result["host_bytes_per_parameter"] = round(report.host_bytes_per_parameter, 2)
        result["slot_gib"] = round(report.slot_bytes / 2**30, 2)
        result["repairs"] = report.repairs
        result["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2) if device.type == "cuda" else 0.0
        placement = engine.residency.placement
        result["placement"] = placement.reason if placement is not None else ""
        result["waits"] = {name: round(value, 3) for name, value in report.waits.items() if value > 0.01}
        result["lanes"] = {name: round(value, 3) for name, value in report.busy.items()}
    print("RESULT " + json.dumps(result), flush=True)


def finish(engine: object, device: torch.device) -> None:
    """Wait for the device and for every update on the host."""
    if engine is not None:
        engine.settle()  # type: ignore[attr-defined]  # an Engine
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
