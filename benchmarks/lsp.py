"""Loss against wall time over a narrow link: exact sliding, LSP, its orthonormal baseline, LoRA and ZeRO-Offload.

    python3 benchmarks/finetune/fetch.py out/cache
    python benchmarks/lsp.py --cache out/cache --seconds 120 --gbps 12 --threads 4 --out out/lsp
    python benchmarks/lsp.py --shape 3b --rank 1536 --sequences 4 --length 512 --gpu-memory 12GiB   # time alone

Each method trains in a process of its own, on the same batches, for ``--seconds`` of wall time from its first step on,
held-out loss included. The training clock stands still while held-out loss is measured, and no figure is taken before
the updates of its steps have arrived. What is found is in ``--out`` as soon as it is found; a method that overruns its
time, or does not begin, is stopped, and what it had said counts.

Copies between host and device take at least their bytes over ``--gbps`` in each direction, as on a laptop or a desktop
with PCIe 3 or 4; the optimizer on the CPU has ``--threads`` threads. LoRA keeps everything on the device and needs no
link. ZeRO-Offload (``zero``, where DeepSpeed is installed) copies by itself, so a step of it takes the time that its
bytes would have taken: gradients travel during its backward, which ends no sooner than they could have arrived; updated
weights travel after its update. That is the best that its schedule could do, and it is told of no other limit.

Without a GPU the same methods run on the CPU, where a step is so slow that a link of ``12`` GB/s is free: ``--gbps``
then says what the link would be. With a large GPU give ``--gpu-memory``, or exact moves all layers there and needs no
link either (``layers_on_device`` in its last line says how many it moved).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import lsp_worker
from train_llama import SHAPES

METHODS = tuple(lsp_worker.RATES)
SETUP_SECONDS = 240.0
"""A method that has not begun by then is stopped."""
GRACE_SECONDS = 10.0
"""A method that is over its time by so much is stopped: a step took longer than the one before it."""


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="folder that benchmarks/finetune/fetch.py has filled")
    parser.add_argument("--text", type=Path, help="folder of Python sources to train on instead of HumanEval")
    parser.add_argument("--model", type=Path, help="another model folder")
    parser.add_argument("--shape", choices=SHAPES, help="random weights and tokens instead: for time, not for loss")
    parser.add_argument("--layers", type=int, help="cut the model to its first layers, for machines without a GPU")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--out", type=Path, default=Path("out/lsp"))
    parser.add_argument("--methods", default=",".join(METHODS), help="any of " + ", ".join(METHODS))
    parser.add_argument("--seconds", type=float, default=120.0, help="of wall time per method, from its first step")
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


def main() -> None:
    """Run all methods one after another and write what is found as it is found."""
    args = parse()
    if args.cache is None and not args.shape:
        raise SystemExit("--cache or --shape is needed")
    if args.worker:
        lsp_worker.work(args)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[dict[str, Any]]] = {}
    for method in args.methods.split(","):
        results[method] = []
        run(args, method, results)
        print(row(method, results[method]), flush=True)


def run(args: argparse.Namespace, method: str, results: dict[str, list[dict[str, Any]]]) -> None:
    """Run one method; its lines go to its file and into the report as they come."""
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", method]
    environment = {**os.environ, **({"OMP_NUM_THREADS": str(args.threads)} if method == "zero" else {})}
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process,
        (args.out / f"{method}.jsonl").open("w") as file,
    ):
        timer = _kill_after(SETUP_SECONDS, process)
        for line in process.stdout or ():
            if not line.startswith("{"):
                continue
            point = json.loads(line)
            if "began" in point:
                timer.cancel()
                timer = _kill_after(args.seconds + GRACE_SECONDS, process)
            results[method].append(point)
            file.write(line)
            file.flush()
            report(args.out, results)
        status = process.wait()
        timer.cancel()
        if status:
            stopped = {"error": "stopped: out of time" if status == -9 else f"ended with exit status {status}"}
            results[method].append(stopped)
            file.write(json.dumps(stopped) + "\n")
    report(args.out, results)


def _kill_after(seconds: float, process: subprocess.Popen[str]) -> threading.Timer:
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    return timer


def report(folder: Path, results: dict[str, list[dict[str, Any]]]) -> None:
    """Write the table of what is known so far."""
    lines = ["| method | learning rate | seconds per step | held-out loss |", "|---|---|---|---|"]
    lines += [row(method, found) for method, found in results.items()]
    (folder / "report.md").write_text("\n".join(lines) + "\n")


def row(method: str, found: list[dict[str, Any]]) -> str:
    """A line of the report."""
    known = {name: value for point in found for name, value in point.items()}
    timed = [point for point in found if point.get("steps") and "seconds" in point]
    pace = f"{timed[-1]['seconds'] / timed[-1]['steps']:.2f}" if timed else "-"
    held = [
        f"{point['held_out']:.4f} at {point['seconds']:.0f} s, step {point['steps']}"
        for point in found
        if "held_out" in point
    ]
    words = "; ".join([*held, *([known["error"]] if "error" in known else [])])
    rate = f"{known['rate']:g}" if "rate" in known else "-"
    return f"| {method} | {rate} | {pace} | {words or '-'} |"


if __name__ == "__main__":
    main()
