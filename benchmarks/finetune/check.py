"""Check what train.py left: plain Transformers loads the saved model and finds the loss that training reported.

    python check.py --model FOLDER --data FOLDER --output FOLDER

Writes `loss.png` and prints the figures. Takes the folders that train.py took.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from torch.utils.data import DataLoader
from train import evaluate, read_blocks
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator

# The saved weights are the trained ones bit for bit; on a GPU a kernel may add in another order in another process.
LOSS_TOLERANCE = 1e-3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--model", "--data", "--output"):
        parser.add_argument(name, type=Path, required=True)
    return parser.parse_args()


def reloaded_loss(model_folder: Path, data: Path, block_size: int, batch_size: int) -> float:
    """Held-out loss of a saved model, computed by Transformers and Accelerate alone."""
    accelerator = Accelerator()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    blocks = read_blocks(data / "test.jsonl", tokenizer, block_size)
    loader = DataLoader(blocks, batch_size=batch_size, collate_fn=default_data_collator)
    model, loader = accelerator.prepare(model, loader)
    return evaluate(model, loader, accelerator)


def compare_files(before: Path, after: Path) -> tuple[int, int]:
    """(tensors in the saved model, how many of them training changed).

    Raises ValueError when one is missing or not finite.
    """
    with safe_open(before / "model.safetensors", "pt") as old, safe_open(after / "model.safetensors", "pt") as new:
        missing = set(old.keys()) - set(new.keys())
        if missing:
            raise ValueError(f"the saved model lacks {len(missing)} tensors, among them {min(missing)}")
        changed = 0
        for name in new.keys():  # noqa: SIM118 - a safetensors file is no mapping
            tensor = new.get_tensor(name)
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{name} holds values that are not finite")
            changed += not torch.equal(old.get_tensor(name).to(tensor.dtype), tensor)
        return len(new.keys()), changed


def plot(figures: dict[str, Any], target: Path) -> None:
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    losses = [step["loss"] for step in figures["steps"]]
    evaluation = figures["evaluation_loss"]
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="tab:blue", linewidth=1.5, label="training loss")
    held_out = [evaluation["before"], evaluation["after"]]
    axes.plot([0, len(losses)], held_out, "o", color="tab:orange", label="held-out loss, before and after")
    for x, loss, side in ((0, held_out[0], "left"), (len(losses), held_out[1], "right")):
        axes.annotate(f"{loss:.3f}", (x, loss), textcoords="offset points", xytext=(0, 8), ha=side)
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)", title="SmolLM2-135M on HumanEval tasks")
    axes.margins(y=0.12)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target)


def main() -> None:
    args = parse()
    figures = json.loads((args.output / "history.json").read_text())
    before, after = figures["evaluation_loss"]["before"], figures["evaluation_loss"]["after"]
    tensors, changed = compare_files(args.model, args.output / "model")
    trained_with = figures["arguments"]
    again = reloaded_loss(args.output / "model", args.data, trained_with["block_size"], trained_with["batch_size"])
    plot(figures, args.output / "loss.png")

    table = Table(title="Result", show_header=False, title_justify="left", pad_edge=False)
    table.add_row("held-out loss", f"{before:.4f} before, {after:.4f} after")
    table.add_row("held-out perplexity", f"{math.exp(before):.2f} before, {math.exp(after):.2f} after")
    table.add_row("reloaded by plain Transformers", f"{again:.4f}, {tensors} tensors, {changed} changed by training")
    table.add_row("trained on", f"{figures['device']}, {figures['parameters'] / 1e6:.1f} M parameters")
    table.add_row("tokens", f"{figures['tokens']} in {figures['seconds']:.1f} s")
    table.add_row("tokens/s", f"{figures['tokens'] / figures['seconds']:.0f}")
    table.add_row("plot", str(args.output / "loss.png"))
    table.add_row("model", str(args.output / "model"))
    Console().print(table)
    if not math.isclose(again, after, abs_tol=LOSS_TOLERANCE):
        raise SystemExit(f"the saved model has held-out loss {again:.4f}, training reported {after:.4f}")
    if changed == 0:
        raise SystemExit("training changed no weight")
    if not after < before:
        Console().print("[bold yellow]training did not lower the held-out loss")


if __name__ == "__main__":
    main()
