"""Kills a training that saves after every step, again and again, and looks at what is left.

    python -m tests.checkpoint.killing FOLDER --kind accelerate --kills 300

Each life is a fork of this process, which has imported everything, compiled the kernels, and computed nothing with
autograd. It resumes from the newest complete checkpoint, compares every weight with an uninterrupted run, and trains on
until it is killed: at a random time, or right before one of the calls that make a save (file by file, fsync, rename,
delete). ``save_total_limit`` is 1: there is never a spare checkpoint.
"""

import argparse
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import safetensors.torch
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, trainer_utils

from slideformer_backend import api
from slideformer_backend.checkpoint import optimizer_files
from slideformer_backend.integrations import checkpoints, hooks
from tests.checkpoint.scripts import Script, batch, model_of

STEPS = 12  # of one run; then the next one starts
CALLS = (
    *((os, name) for name in ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir")),
    (pathlib.Path, "write_text"),
    (optimizer_files, "save_file"),
    (safetensors.torch, "save_file"),
)


def digest(model):
    """Of all weights."""
    result = hashlib.sha256()
    for tensor in model.state_dict().values():
        result.update(tensor.contiguous().numpy().tobytes())
    return result.hexdigest()


class Accelerated:
    """A loop with ``save_state`` and automatic names."""

    def newest(self, folder):
        found = checkpoints.newest(folder / "checkpoints")
        return 0 if found is None else int(found.name.split("_")[1])

    def live(self, folder, loaded, taken):
        first = self.newest(folder)
        run = Script(folder=folder, limit=1, clip=None, seed=first)
        if first:
            run.accelerator.load_state()
            loaded(first, digest(run.model))
        for step in range(first, STEPS):
            run.train(step, 1)
            taken(step + 1, run.model)
            run.accelerator.project_configuration.iteration = step + 1
            run.accelerator.save_state()

    def entries(self, folder):
        return sorted(path.name for path in (folder / "checkpoints").iterdir())


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 2 * STEPS

    def __getitem__(self, index):
        return {name: value[0] for name, value in batch(index).items()}


class Watch(TrainerCallback):
    def __init__(self, taken):
        self.taken = taken

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.taken(state.global_step, model)


class Trained:
    """``Trainer`` with ``resume_from_checkpoint=True``."""

    def newest(self, folder):
        found = trainer_utils.get_last_checkpoint(folder) if folder.exists() else None
        return 0 if found is None else int(found.rsplit("-")[-1])

    def live(self, folder, loaded, taken):
        os.environ.update(ACCELERATE_USE_SLIDEFORMER="true", SLIDEFORMER_STATUS="off")
        arguments = TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="steps",
            save_steps=1,
            save_total_limit=1,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            optim="adamw_torch_fused",
            learning_rate=1e-2,
        )
        first = self.newest(folder)
        trainer = Trainer(model=model_of(seed=first), args=arguments, train_dataset=Rows(), callbacks=[Watch(taken)])
        load = trainer._load_from_checkpoint

        def watched(path, *rest):
            load(path, *rest)
            loaded(first, digest(trainer.model))

        trainer._load_from_checkpoint = watched
        trainer.train(resume_from_checkpoint=True if first else None)

    def entries(self, folder):
        return sorted(path.name for path in folder.iterdir())


class Life:
    """One process: what it reported through a pipe, and how it ended."""

    def __init__(self, kind, folder, *, at_call=None, after=None):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            status = 1
            try:
                _live(kind, folder, write, at_call)
                status = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(status)
        os.close(write)
        with os.fdopen(read, encoding="utf-8") as pipe:
            if after is not None:
                time.sleep(after)
                os.kill(pid, signal.SIGKILL)
            self.said = [json.loads(line) for line in pipe if line.endswith("\n")]
        status = os.waitpid(pid, 0)[1]
        self.was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if not self.was_killed and status:
            raise AssertionError(f"a life ended with status {status}")


def _live(kind, folder, pipe, at_call):
    hooks.install()
    counter, lock = 0, threading.Lock()

    def say(**values):
        os.write(pipe, (json.dumps(values) + "\n").encode())

    def counted(call):
        def wrapper(*args, **kwargs):
            nonlocal counter
            with lock:
                counter += 1
                if counter == at_call:
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapper

    def loaded(step, found):
        say(loaded=step, digest=found)

    def taken(step, model):
        say(taken=step, digest=digest(model), calls=counter)

    for owner, name in CALLS:
        setattr(owner, name, counted(getattr(owner, name)))
    kind.live(folder, loaded, taken)
    say(calls=counter)


def warm_up():
    """Compile what the first step needs, without autograd, which does not survive a fork."""
    torch.set_num_threads(1)
    hooks.install()
    Script(clip=None)
    for engine in api.engines():
        engine.detach()


def run(kind, folder, kills, seed=0):
    """Kill ``kills`` lives; returns figures.

    Raises:
        AssertionError: a checkpoint did not load, was not what it should be, or more than one interval was lost.
    """
    warm_up()
    chance = random.Random(seed)
    start = time.perf_counter()
    whole = Life(kind, folder / "whole")
    span = time.perf_counter() - start
    expected = {entry["taken"]: entry["digest"] for entry in whole.said if "taken" in entry}
    calls = whole.said[-1]["calls"]
    per_save = (calls - whole.said[0]["calls"]) / STEPS
    done, late, most_lost, run_number = 0, 0, 0, 0
    folder_of_run = folder / "run0"
    while done < kills:
        if kind.newest(folder_of_run) >= STEPS - 3:
            shutil.rmtree(folder_of_run)
            run_number += 1
            folder_of_run = folder / f"run{run_number}"
        before = kind.newest(folder_of_run)
        if done % 3 == 2:
            life = Life(kind, folder_of_run, after=chance.uniform(0.0, span / 2))
        else:
            life = Life(kind, folder_of_run, at_call=1 + int((done * 0.618034 % 1.0) * 2.5 * per_save))
        done += life.was_killed
        late += not life.was_killed
        for entry in life.said:
            step = entry.get("loaded", entry.get("taken"))
            if step is not None and entry["digest"] != expected[step]:
                raise AssertionError(f"step {step} is not what it is without a kill: {entry}")
        taken = max((entry["taken"] for entry in life.said if "taken" in entry), default=before)
        found = kind.newest(folder_of_run)
        most_lost = max(most_lost, taken - found)
        if found < before or taken - found > 1:
            raise AssertionError(f"{taken} steps were taken, {before} were saved before, and {found} are left")
    last = Life(kind, folder_of_run)
    if [entry["digest"] for entry in last.said if entry.get("taken") == STEPS] != [expected[STEPS]]:
        raise AssertionError("the last life did not end where the uninterrupted run did")
    entries = kind.entries(folder_of_run)
    if len(entries) != 1:
        raise AssertionError(f"left behind: {entries}")
    return {"kills": done, "lives that ended first": late, "calls per save": per_save, "most steps lost": most_lost}


KINDS = {"accelerate": Accelerated, "trainer": Trained}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="accelerate")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps(run(KINDS[options.kind](), options.folder, options.kills, options.seed)))


if __name__ == "__main__":
    main()
