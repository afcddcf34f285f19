"""Sequences in which every wait of the engine is needed at least once."""

from __future__ import annotations

from random import Random

from .runner import IMMEDIATE, Events, Setting, random_events, random_setting
from .sides import START
from .toy import BLOCKS

MICRO = ("backward", next(seed for seed in range(100) if Random(seed).random() > 0.75))
"""A backward that no step follows, so that nothing is predicted."""
EXPLODES_LAST = ("explode_backward", next(seed for seed in range(100) if Random(seed).randrange(BLOCKS) == BLOCKS - 1))
"""A backward that ends behind its first unit."""
DIRECTED: tuple[tuple[str | tuple[str, int], ...], ...] = (
    (MICRO, "clip_all", "clip_all", "clip_all", "step_all"),
    (MICRO, "zero_none", "zero_none", MICRO, "step_all"),
    ("train", "backward", "write_weights", "step_all", "write_weights", "write_weights", "train", "evaluate"),
    ("backward", "write_weights", "write_weights", "step_all", "write_weights", "train"),
    ("backward", "backward_inputs", "zero_none", "train"),
    ("backward", "backward_inputs", "scale_gradient", "step_all"),
    ("backward", "backward_inputs", "clip_all", "clip_all", "clip_all", "step_all"),
    ("backward_last", "backward_inputs", "clip_all", "clip_all", "step_all", "train"),
    ("backward", "backward_inputs", "hold_gradient", "write_held", "train"),
    ("backward", "clip_all", "clip_all", "clip_all", "step_all", "train"),
    ("train", "clipped", "backward", "clip_all", "backward", "clip_all", "clip_all", "step_all"),
    ("backward", "step_all", "zero_none", "train", "save", "train", "load", "train"),
    ("backward", "scale_gradient_data", "train", "write_held", "train"),
    ("backward", "hold_gradient", "step_all", "backward", "read_held", "write_held", "step_all"),
    ("train", "backward", "evaluate", "step_all", "train"),
    ("train", "write_edges", "backward_last", "write_edges", "write_edges", "step_all", "train"),
    ("backward_last", "write_edges", "step_all", "train"),
    ("train", "move", "train", "clip_all", "train", "clipped", "backward", "clip_all", "clip_all", "step_all"),
    ("train", "move", "move", "backward", "clip_all", "scale_gradient", "clip_all", "step_all"),
    ("explode_backward", "zero_none", "train", "explode_backward", "discard", "train"),
    ("train", "hyperparameters", "train", "backward", "zero_false", "backward", "step_all"),
    (MICRO, "unfreeze_all", "backward"),
    (MICRO, "zero_none", "unfreeze_all", "backward"),
    (MICRO, "backward_inputs", "unfreeze_all", "backward"),
)


def workload() -> list[tuple[Events, Setting]]:
    """Directed sequences with several seeds, random ones, and some under ``immediate``."""
    made: list[tuple[Events, Setting]] = []
    for number, names in enumerate(DIRECTED):
        for seed in range(4):
            events = tuple(
                (name, 1000 * number + 17 * seed + place) if isinstance(name, str) else name
                for place, name in enumerate(names)
            )
            made.append((events, random_setting(seed, poison=seed != 3, eagerness=0.3 * (seed % 2),
                                                nonfinite="as_plain" if seed % 2 else "skip")))  # fmt: skip
    for seed in range(24):
        made.append((random_events(seed, 10), random_setting(seed, poison=seed % 3 != 0)))
    for seed in range(6):
        setting = random_setting(seed, update="immediate", optimizers=1, nonfinite="as_plain", poison=seed != 2)
        made.append((random_events(seed, 10, IMMEDIATE), setting))
        names = ("train", "assign_gradient", "step_all", "zero_none", "train")
        made.append((tuple((name, seed + place) for place, name in enumerate(names)), setting))
    for seed in range(4):  # every unit has a room, and keeps it while its states are written back
        roomy = {"rooms": 5, "frames": 0, "optimizers": 1, "eagerness": 0.0, "kind": "bfloat16"}
        roomy["nonfinite"] = "as_plain"
        names = ("train", "save_optimizers", "train", "load_optimizers", "train")
        made.append((tuple((name, seed + place) for place, name in enumerate(names)), random_setting(seed, **roomy)))
        for name in ("write_weights", "write_edges"):
            events = (("train", seed), (name, seed), ("train", seed + 1))
            made.append((events, random_setting(seed, update="immediate", **roomy)))
    for seed, inputs in ((1, "staged"), (3, "direct"), (5, "staged"), (9, "direct")):
        # a backward ends while inputs of units are on their way back to it
        away = {"inputs": inputs, "optimizers": 1, "eagerness": 0.7, "rooms": 0}
        names = ("train", EXPLODES_LAST, "zero_none", "train", "train")
        events = tuple((name, seed + place) if isinstance(name, str) else name for place, name in enumerate(names))
        made.append((events, random_setting(seed, kind="bfloat16", **away)))
    found = (("backward", 237307109), ("backward_inputs", 470662271), ("clip_all", 797121232))
    lazy = {"kind": "bfloat16", "eagerness": 0.0, "nonfinite": "skip"}
    made.append((found, random_setting(49, optimizers=2, rule="adamw", **lazy)))
    for seed in (21, 23, 25, 27):  # odd seeds measure norms in device slots, so that no norm waits for the gradient
        clips = (MICRO, ("clip_all", seed), ("clip_all", seed + 1), ("clip_all", seed + 2), ("step_all", seed))
        made.append((clips, random_setting(seed, optimizers=1, **lazy)))
        made.append((clips, random_setting(seed, optimizers=1, **{**lazy, "kind": "float32"})))
    lent = (MICRO, ("zero_none", 1), ("assign_gradient", 5), ("unfreeze_all", 0), ("backward", 1))
    made.append((lent, random_setting(2, optimizers=1, poison=True, start=START, **lazy)))
    # a commit is the first to use the gradient of a step, whose weights nobody has made yet
    late = (("backward", 909990628), ("scale_gradient_data", 279823433), ("clip", 954714481), ("step_all", 977175829))
    late += (("retain", 184198446), ("train", 441580072))
    made.append((late, random_setting(23, frames=4, kind="bfloat16", optimizers=1, poison=False)))
    for seed in (1, 2):  # what user code wrote is looked at by an update, and the weights leave right behind it
        events = (("train", seed), ("write_weights", seed + 1), ("evaluate", seed + 2))
        alone = {"update": "immediate", "frames": 1, "rooms": 0, "start": START, "inputs": "gpu", "optimizers": 1}
        made.append((events, random_setting(seed, kind="bfloat16", eagerness=0.0, nonfinite="as_plain", **alone)))
    for seed in range(3):  # weights are read ahead of a forward that ends before they are used
        names = ("train", "explode_forward", "read", "evaluate", "explode_forward", "save", "train")
        events = tuple((name, seed + place) for place, name in enumerate(names))
        made.append((events, random_setting(seed, frames=2, prefetch=0, optimizers=1, poison=True, rooms=0, **lazy)))
    held = (("backward", 793346834), ("backward", 846618888), ("scale_gradient_data", 668432235), ("train", 732844484))
    made.append((held, random_setting(190, poison=True)))
    return made
