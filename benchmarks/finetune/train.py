"""Fine-tune a causal language model on a file of texts: an ordinary Accelerate script.

    accelerate launch train.py --model FOLDER --data FOLDER --output FOLDER

The data folder holds `train.jsonl` and `test.jsonl`, one {"text": ...} a line. Evaluation loss on the test file is
taken before and after training. In the output folder, `history.json` holds every figure of the run and `model` the
trained model.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator, get_scheduler


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--block_size", type=int, default=128, help="tokens per training example")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--num_train_epochs", type=int, default=1)
    parser.add_argument("--max_train_steps", type=int, help="overrides --num_train_epochs")
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--warmup_steps", type=int, default=4)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def read_blocks(path: Path, tokenizer, block_size: int) -> list[dict[str, list[int]]]:
    """The texts of a file, joined by the end-of-text token and cut into blocks of equal length, the rest dropped."""
    ids: list[int] = []
    for line in path.read_text().splitlines():
        ids += [*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id]
    starts = range(0, len(ids) - block_size + 1, block_size)
    blocks = [ids[start : start + block_size] for start in starts]
    return [{"input_ids": block, "labels": block} for block in blocks]


@torch.no_grad()
def evaluate(model, loader, accelerator: Accelerator) -> float:
    """Mean loss per example over a loader."""
    model.eval()
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
    model.train()
    return torch.cat(losses).mean().item()


def main() -> None:
    args = parse()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    model.config.use_cache = False
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()

    train_set = read_blocks(args.data / "train.jsonl", tokenizer, args.block_size)
    test_set = read_blocks(args.data / "test.jsonl", tokenizer, args.block_size)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, collate_fn=default_data_collator)
    test_loader = DataLoader(test_set, batch_size=args.batch_size, collate_fn=default_data_collator)

    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, fused=True)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    steps_per_epoch = math.ceil(len(train_loader) / args.gradient_accumulation_steps)
    max_steps = args.max_train_steps or args.num_train_epochs * steps_per_epoch
    scheduler = get_scheduler("cosine", optimizer, args.warmup_steps * accelerator.num_processes, max_steps)
    scheduler = accelerator.prepare(scheduler)

    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    accelerator.print(f"{trained / 1e6:.1f} M parameters, {len(train_set)} + {len(test_set)} blocks, {max_steps} steps")
    before = evaluate(model, test_loader, accelerator)
    accelerator.print(f"evaluation loss before training: {before:.4f}")

    accelerator.init_trackers("finetune", config={"max_train_steps": max_steps, "learning_rate": args.learning_rate})
    steps: list[dict[str, float]] = []
    losses: list[float] = []
    tokens = 0
    started = time.perf_counter()
    while len(steps) < max_steps:
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            tokens += batch["input_ids"].numel()
            if accelerator.sync_gradients:
                values = {
                    "loss": sum(losses) / len(losses),
                    "grad_norm": float(norm),
                    "learning_rate": scheduler.get_last_lr()[0],
                    "tokens_per_second": tokens / (time.perf_counter() - started),
                }
                losses.clear()
                steps.append(values)
                accelerator.log(values, step=len(steps))
                if len(steps) == max_steps:
                    break
    seconds = time.perf_counter() - started
    accelerator.print(f"{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s")

    after = evaluate(model, test_loader, accelerator)
    accelerator.print(f"evaluation loss after training: {after:.4f}")
    accelerator.end_training()

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        args.output.mkdir(parents=True, exist_ok=True)
        unwrapped = accelerator.unwrap_model(model)
        unwrapped.save_pretrained(args.output / "model", state_dict=accelerator.get_state_dict(model))
        tokenizer.save_pretrained(args.output / "model")
        figures = {
            "arguments": {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()},
            "device": str(accelerator.device),
            "parameters": trained,
            "tokens": tokens,
            "seconds": seconds,
            "evaluation_loss": {"before": before, "after": after},
            "steps": steps,
        }
        (args.output / "history.json").write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
