"""Loss against wall time over a narrow link: exact sliding, LSP, its orthonormal baseline and LoRA on a real model.

    python3 benchmarks/finetune/fetch.py out/cache
    python benchmarks/lsp.py --cache out/cache --seconds 120 --gbps 12 --threads 4 --out out/lsp
    python benchmarks/lsp.py --shape 3b --rank 1536 --sequences 4 --length 512 --gpu-memory 12GiB   # time alone

Each method trains in a process of its own, on the same batches, until its time is over. Copies between host and device
take at least their bytes over ``--gbps`` in each direction, as on a laptop or a desktop with PCIe 3 or 4; the optimizer
on the CPU has ``--threads`` threads. LoRA keeps everything on the device and needs no link. The clock stands still
while held-out loss is measured, and no step counts before its update has arrived. Without a GPU the same methods run on
the CPU, where a step is so slow that a link of ``12`` GB/s is free: ``--gbps`` then says what the link would be.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from train_llama import SHAPES, make_model

METHODS = ("exact", "lsp", "orthonormal", "lora")
RATES = {"exact": 5e-5, "lsp": 2e-4, "orthonormal": 2e-4, "lora": 1e-3}
"""Learning rates by default; see ``--rates``. Adam moves a core, and so the weight, by other amounts than a weight."""


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="folder that benchmarks/finetune/fetch.py has filled")
    parser.add_argument("--model", type=Path, help="another model folder")
    parser.add_argument("--shape", choices=SHAPES, help="random weights and tokens instead: for time, not for loss")
    parser.add_argument("--layers", type=int, help="cut the model to its first layers, for machines without a GPU")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--out", type=Path, default=Path("out/lsp"))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seconds", type=float, default=120.0, help="of training per method")
    parser.add_argument("--steps", type=int, default=10**9, help="end earlier, after so many")
    parser.add_argument("--held-out", type=int, default=16, help="batches of held-out text")
    parser.add_argument("--gbps", type=float, default=12.0, help="GB/s of the link, in each direction")
    parser.add_argument("--threads", type=int, default=4, help="of the optimizer on the CPU")
    parser.add_argument("--rank", type=int, default=288, help="of cores")
    parser.add_argument("--nonzeros", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=0.3)
    parser.add_argument("--timeout", type=int, default=50)
    parser.add_argument("--check-interval", type=int, default=50)
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--rates", default="", help="such as lsp=1e-4,lora=2e-3")
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--evaluate-every", type=float, default=20.0, help="seconds of training")
    parser.add_argument("--gpu-memory", default="auto", help="cap for exact, such as 8GiB")
    parser.add_argument("--worker", choices=METHODS, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def throttle(engine: Any, bytes_per_second: float) -> None:
    """Let every copy between host and device take its bytes over the rate, on the lane that makes it."""
    for lane in (engine.backend.h2d, engine.backend.d2h):
        lane.submit = _slow(lane.submit, bytes_per_second)


def _slow(submit: Callable[..., Any], rate: float) -> Callable[..., Any]:
    def slowly(name: str, run: Callable[[], None], **options: Any) -> Any:
        reads, writes = (sum(buffer.flat.numel() for buffer in options.get(side, ())) for side in ("reads", "writes"))
        seconds = (min(reads, writes) if reads and writes else max(reads, writes)) / rate

        def run_slowly() -> None:
            time.sleep(seconds)
            run()

        return submit(name, run_slowly, **options)

    return slowly


def tokens(args: argparse.Namespace, name: str) -> torch.Tensor:
    """The texts of a split, one after another: int64 [rows, length]."""
    if args.shape:
        generator = torch.Generator().manual_seed(len(name))
        return torch.randint(0, SHAPES[args.shape]["vocab_size"], (64, args.length), generator=generator)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model or args.cache / "smollm2-135m")
    lines = (args.cache / "human-eval" / f"{name}.jsonl").read_text().splitlines()
    text = "\n".join(json.loads(line)["text"] for line in lines)
    ids = torch.tensor(tokenizer(text).input_ids)
    rows = len(ids) // args.length
    return ids[: rows * args.length].view(rows, args.length)


def batches(rows: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Shuffled batches without end, the same for every method."""
    generator = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(len(rows), generator=generator)
        for start in range(0, len(order) - size + 1, size):
            yield rows[order[start : start + size]]


class Trainer:
    """One method on the model."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.engine: Any = None
        self.mixes = args.worker == "lora" and args.dtype == "bfloat16"
        torch.manual_seed(0)
        self.model = _model(args)
        if args.layers is not None:
            self.model.model.layers = self.model.model.layers[: args.layers]
            self.model.config.num_hidden_layers = args.layers
        self.model.config.use_cache = False
        rates = {**RATES, **{k: float(v) for k, v in (pair.split("=") for pair in args.rates.split(",") if pair)}}
        self.rate = rates[args.worker]
        if args.worker == "lora":
            self._take_lora()
        else:
            self._take_engine()

    def _take_lora(self) -> None:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=self.args.lora_rank, lora_alpha=2 * self.args.lora_rank, target_modules="all-linear")
        self.model = get_peft_model(self.model, config).to(self.device)
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.enable_input_require_grads()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.data = parameter.data.float()  # as Hugging Face keeps adapters
        self.optimizer = torch.optim.AdamW(trained, lr=self.rate, weight_decay=0.0, fused=True)

    def _take_engine(self) -> None:
        from slideformer_backend.api import attach
        from slideformer_backend.config import SlideFormerConfig

        args = self.args
        options: dict[str, Any] = {"cpu_threads": args.threads}
        if args.worker == "exact":
            options["gpu_memory"] = args.gpu_memory
        else:
            options["strategy"] = "lsp"
            options["lsp"] = {
                "rank": args.rank, "nonzeros": args.nonzeros, "alpha": args.alpha, "timeout": args.timeout,
                "check_interval": args.check_interval, "projector": args.worker,
            }  # fmt: skip
        self.engine = attach(self.model, SlideFormerConfig(**options), device=self.device)
        throttle(self.engine, args.gbps * 1e9)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.rate, weight_decay=0.0, fused=False)
        self.engine.bind(self.optimizer)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """Mean loss of a batch."""
        moved = rows.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixes):
            return self.model(input_ids=moved, labels=moved).loss

    def step(self, rows: torch.Tensor) -> torch.Tensor:
        """One step with clipping at 1.0, as recipes have it."""
        loss = self.loss(rows)
        loss.backward()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        clip = torch.nn.utils.clip_grad_norm_ if self.engine is None else self.engine.clip_grad_norm_
        clip(trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def settle(self) -> None:
        """All updates so far have arrived."""
        if self.engine is not None:
            self.engine.settle()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @torch.no_grad()
    def held_out(self, rows: torch.Tensor) -> float:
        """Mean loss over held-out rows."""
        self.model.eval()
        parts = rows[: self.args.held_out * self.args.sequences].split(self.args.sequences)
        found = sum(float(self.loss(part)) for part in parts) / len(parts)
        self.model.train()
        return found


def _model(args: argparse.Namespace) -> Any:
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, args.dtype)
    if args.shape:
        return make_model(args.shape, dtype, torch.device("cpu"))
    folder = args.model or args.cache / "smollm2-135m"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")


def work(args: argparse.Namespace) -> None:
    """Train one method; a JSON line per measurement."""
    trainer, held = Trainer(args), tokens(args, "test")
    source = batches(tokens(args, "train"), args.sequences)
    trainer.model.train()
    spent, due, count = 0.0, 0.0, 0
    while True:
        is_over = spent >= args.seconds or count >= args.steps
        if spent >= due or is_over:
            print(json.dumps({"seconds": spent, "steps": count, "held_out": trainer.held_out(held)}), flush=True)
            due += args.evaluate_every
        if is_over:
            break
        start = time.perf_counter()
        loss = trainer.step(next(source))
        if spent + time.perf_counter() - start >= min(due, args.seconds) or count + 1 >= args.steps:
            trainer.settle()
        spent += time.perf_counter() - start
        count += 1
        if count % 10 == 0:
            print(json.dumps({"seconds": spent, "steps": count, "loss": float(loss)}), flush=True)
    print(json.dumps(_figures(trainer, spent, count)), flush=True)


def _figures(trainer: Trainer, spent: float, count: int) -> dict[str, Any]:
    cuda = trainer.device.type == "cuda"
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "rate": trainer.rate,
        "steps": count,
        "seconds_per_step": spent / max(1, count),
        "gpu_peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
    }
    if trainer.engine is not None:
        report = trainer.engine.report()
        cores = [r.core for unit in trainer.engine.units for r in unit.records if r.core is not None]
        figures |= {"host_bytes": report.host_bytes, "waits": report.stalls, "busy": report.busy}
        if cores:
            figures["matrices"] = len(cores)
            figures["learned"] = sum(core.learned for core in cores)
            figures["mean_error_before_learning"] = sum(core.errors[-1] for core in cores) / len(cores)
    return figures


def main() -> None:
    """Run all methods one after another and write what was found."""
    args = parse()
    if args.cache is None and not args.shape:
        raise SystemExit("--cache or --shape is needed")
    if args.worker:
        work(args)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[dict[str, Any]]] = {}
    for method in args.methods.split(","):
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", method]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        results[method] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        (args.out / f"{method}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in results[method]))
        print(row(method, results[method]), flush=True)
    lines = ["| method | learning rate | seconds per step | held-out loss |", "|---|---|---|---|"]
    lines += [row(method, found) for method, found in results.items()]
    (args.out / "report.md").write_text("\n".join(lines) + "\n")


def row(method: str, found: list[dict[str, Any]]) -> str:
    """A line of the report."""
    last = found[-1]
    held = [
        f"{point['held_out']:.4f} at {point['seconds']:.0f} s, step {point['steps']}"
        for point in found
        if "held_out" in point
    ]
    return f"| {method} | {last['rate']:g} | {last['seconds_per_step']:.2f} | {'; '.join(held)} |"


if __name__ == "__main__":
    main()
