"""One method of ``lsp.py``: the model, its training, and figures of it as JSON lines."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from train_llama import SHAPES, make_model

RATES = {"exact": 5e-5, "lsp": 2e-4, "orthonormal": 2e-4, "lora": 1e-3, "zero": 5e-5}
"""Learning rates by default; see ``--rates``. Adam moves a core, and so the weight, by other amounts than a weight."""
MAX_NORM = 1.0
FIRST_STEPS = 3
"""Each of which is reported, and what it has done so far: a step that never ends says where it is."""


class Wire(NamedTuple):
    """Seconds that the copies of a step take over the link, down to the host and up to the device."""

    down: float
    up: float


def zero_wire_seconds(parameters: int, dtype: torch.dtype, rate: float) -> Wire:
    """What ZeRO-Offload (stage 2, DeepSpeed 0.19) copies per step: gradients in the dtype of its fp32 masters, cast on
    the device (``async_inplace_copy_grad_to_fp32_buffer_from_gpu``), and updated weights in their own (``step``)."""
    return Wire(4 * parameters / rate, dtype.itemsize * parameters / rate)


def throttle(engine: Any, bytes_per_second: float) -> None:
    """Let every copy between host and device take its bytes over the rate, on the lane that makes it, beside the copy's
    own time."""
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


def texts(args: argparse.Namespace, name: str) -> list[str]:
    """The texts of a split: HumanEval, or the sources in ``--text``, of which every tenth is held out."""
    if args.text is None:
        lines = (args.cache / "human-eval" / f"{name}.jsonl").read_text().splitlines()
        return [json.loads(line)["text"] for line in lines]
    files = sorted(args.text.glob("*.py"))
    if len(files) < 10:
        raise SystemExit(f"{args.text} has {len(files)} Python sources; ten are the least")
    return [file.read_text(errors="replace") for n, file in enumerate(files) if (n % 10 == 9) == (name == "test")]


def tokens(args: argparse.Namespace, name: str) -> torch.Tensor:
    """The texts of a split, one after another: int64 [rows, length]."""
    if args.shape:
        generator = torch.Generator().manual_seed(len(name))
        return torch.randint(0, SHAPES[args.shape]["vocab_size"], (64, args.length), generator=generator)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model or args.cache / "smollm2-135m")
    ids = torch.tensor(tokenizer("\n".join(texts(args, name))).input_ids)
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
        self.zero: Any = None
        self.taken = 0
        self.mixes = args.worker == "lora" and args.dtype == "bfloat16"
        torch.manual_seed(0)
        self.model = _model(args)
        if args.layers is not None:
            self.model.model.layers = self.model.model.layers[: args.layers]
            self.model.config.num_hidden_layers = args.layers
        self.model.config.use_cache = False
        rates = {**RATES, **{k: float(v) for k, v in (pair.split("=") for pair in args.rates.split(",") if pair)}}
        self.rate = rates[args.worker]
        take = {"lora": self._take_lora, "zero": self._take_zero}.get(args.worker, self._take_engine)
        take()

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

    def _take_zero(self) -> None:
        from slideformer_backend.benchmarks.harness.contenders import (
            checkpoint,
            single_process_environment,
            zero_config,
        )
        from slideformer_backend.benchmarks.harness.spec import Job, Load

        on_cpu = self.device.type == "cpu"
        os.environ.update(single_process_environment(), DS_ACCELERATOR="cpu" if on_cpu else "cuda")
        os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
        import deepspeed

        if on_cpu:
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        load = Load(sequences=self.args.sequences, length=self.args.length, clip="quiet")
        job = Job(contender="zero2", shape="", loads=(load,), device=self.device.type, learning_rate=self.rate)
        config = zero_config(job, 2)
        config["gradient_clipping"] = MAX_NORM
        config["bf16"] = {"enabled": self.args.dtype == "bfloat16"}
        config["optimizer"]["params"]["weight_decay"] = 0.0
        checkpoint(self.model)
        self.model.to(self.device)
        self.zero = deepspeed.initialize(
            model=self.model, model_parameters=list(self.model.parameters()), config=config
        )[0]
        _allocate_moments(self.zero.optimizer.optimizer)
        count = sum(parameter.numel() for parameter in self.model.parameters())
        self.wire = zero_wire_seconds(count, getattr(torch, self.args.dtype), self.args.gbps * 1e9)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """Mean loss of a batch."""
        moved = rows.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixes):
            return self.model(input_ids=moved, labels=moved).loss

    def step(self, rows: torch.Tensor) -> torch.Tensor:
        """One step with clipping at 1.0, as recipes have it."""
        if self.zero is not None:
            return self._zero_step(rows)
        loss = self.loss(rows)
        loss.backward()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        clip = torch.nn.utils.clip_grad_norm_ if self.engine is None else self.engine.clip_grad_norm_
        clip(trained, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _zero_step(self, rows: torch.Tensor) -> torch.Tensor:
        moved = rows.to(self.device)
        begun = time.perf_counter()
        loss = self.zero(input_ids=moved, labels=moved).loss
        self.settle()
        start = self._say_done("forward", begun)
        self.zero.backward(loss)
        self.settle()
        time.sleep(max(0.0, start + self.wire.down - time.perf_counter()))
        start = self._say_done("backward", start)
        self.zero.step()
        self.settle()
        time.sleep(self.wire.up)
        self._say_done("update", start)
        self.taken += 1
        return loss.detach()

    def _say_done(self, part: str, start: float) -> float:
        """Report a part of one of the first steps; the time now."""
        now = time.perf_counter()
        if self.taken < FIRST_STEPS:
            say({"step": self.taken + 1, "done": part, "part_seconds": now - start})
        return now

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


def _allocate_moments(optimizer: torch.optim.Optimizer) -> None:
    """The moments that the first step would allocate, so that set-up pays for memory as it does for the other methods:
    a machine may take longer to hand out 8 bytes per parameter for the first time than a step takes.

    Values as ``DeepSpeedCPUAdam.step`` and torch's AdamW begin with; only the count is of a kind of its own.
    """
    is_torch = isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros(()) if is_torch else 0,
                "exp_avg": torch.zeros_like(parameter.data),
                "exp_avg_sq": torch.zeros_like(parameter.data),
            }


def _model(args: argparse.Namespace) -> Any:
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, args.dtype)
    if args.shape:
        # billions of random weights take a CPU minutes
        return make_model(args.shape, dtype, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    folder = args.model or args.cache / "smollm2-135m"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")


def work(args: argparse.Namespace) -> None:
    """Train one method; a JSON line per measurement. It ends when ``--seconds`` are over, held-out loss included."""
    begun = time.perf_counter()
    try:
        trainer, held = Trainer(args), tokens(args, "test")
    except ImportError as error:
        say({"error": f"not installed: {error.name}"})
        return
    say({"done": "set-up of model and optimizer", "part_seconds": time.perf_counter() - begun})
    source = batches(tokens(args, "train"), args.sequences)
    trainer.held_out(held[: args.sequences])  # what a first forward compiles and loads is setup
    say({"began": True, "rate": trainer.rate})
    begun, spent, due, count = time.perf_counter(), 0.0, 0.0, 0
    evaluation = last = 0.0
    while True:
        is_over = time.perf_counter() - begun + last + evaluation >= args.seconds or count >= args.steps
        if spent >= due or is_over:
            start = time.perf_counter()
            say({"seconds": spent, "steps": count, "held_out": trainer.held_out(held)})
            evaluation = time.perf_counter() - start
            due += args.evaluate_every
        if is_over:
            break
        start = time.perf_counter()
        loss = trainer.step(next(source))
        if spent + time.perf_counter() - start >= due or count % 10 == 9:
            trainer.settle()
        last = time.perf_counter() - start
        spent += last
        count += 1
        if count <= FIRST_STEPS:  # without waiting for anything: the clock stands still here
            say({"step": count, "done": "all" if trainer.zero is not None else "issued", "part_seconds": last})
        if count == 1 or count % 10 == 0:
            say({"seconds": spent, "steps": count, "loss": float(loss)})
    say(_figures(trainer, spent, count))


def say(figures: dict[str, Any]) -> None:
    """One line, at once: whatever happens later, it has been said."""
    print(json.dumps(figures), flush=True)


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
        moved = [unit.name for unit in trainer.engine.units if unit.updates_on_device and unit.module is not None]
        figures |= {
            "host_bytes": report.host_bytes,
            "waits": report.stalls,
            "busy": report.busy,
            "layers_on_device": len(moved),
        }
        if cores:
            figures["matrices"] = len(cores)
            figures["learned"] = sum(core.learned for core in cores)
            figures["mean_error_before_learning"] = sum(core.errors[-1] for core in cores) / len(cores)
    return figures
