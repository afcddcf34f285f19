"""``Trainer``: our figures in its logs; checkpoints that are complete or do not count, and resume from those."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from slideformer_backend.integrations import checkpoints
from slideformer_backend.integrations.patches import Patch

_TRAINER = "transformers.trainer"
_UTILS = "transformers.trainer_utils"
_PREFIX = "checkpoint-"

_writing: ContextVar[Path | None] = ContextVar("slideformer_writing", default=None)
"""The folder of the checkpoint that is being written."""


def wrap_save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Trainer._save_checkpoint``: the folder does not count before all of it is on the disk."""

    @functools.wraps(original)
    def _save_checkpoint(self: Any, model: Any, trial: Any) -> Any:
        if not checkpoints.managing([self.model]):
            return original(self, model, trial)
        from slideformer_backend.checkpoint import disk_reported
        from slideformer_backend.storage.directory import begin

        folder = Path(self._get_output_dir(trial=trial)) / f"{_PREFIX}{self.state.global_step}"
        with disk_reported(folder):
            begin(folder)
            token = _writing.set(folder)
            try:
                with checkpoints.written_in_place([self.model]):
                    result = original(self, model, trial)
            finally:
                _writing.reset(token)
            _complete(folder)  # done already where the original has deleted old ones
        return result

    return _save_checkpoint


def wrap_save_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Trainer._save_optimizer_and_scheduler``: ours, with scaler and random generators."""

    @functools.wraps(original)
    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> Any:
        if not checkpoints.managing([self.model]):
            return original(self, output_dir)
        scaler = getattr(self.accelerator, "scaler", None)
        folder, schedulers = Path(output_dir), [self.lr_scheduler]
        checkpoints.save_training_state(
            folder, [self.model], [self.optimizer], schedulers, scaler, weights="pretrained"
        )

    return _save_optimizer_and_scheduler


def wrap_included(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Trainer._save_scaler`` and ``_save_rng_state``: nothing is left to save."""

    @functools.wraps(original)
    def save(self: Any, output_dir: str) -> Any:
        if checkpoints.managing([self.model]) and (Path(output_dir) / checkpoints.STATE).exists():
            return None
        return original(self, output_dir)

    return save


def wrap_load_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Trainer._load_from_checkpoint``: checksums first.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged; nothing was changed.
    """

    @functools.wraps(original)
    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> Any:
        from slideformer_backend.storage.directory import verify

        verify(Path(resume_from_checkpoint))
        return original(self, resume_from_checkpoint, model)

    return _load_from_checkpoint


def wrap_load_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Trainer._load_optimizer_and_scheduler``: what we saved is loaded by us, in plain runs too."""

    @functools.wraps(original)
    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> Any:
        state = _ours(checkpoint)
        if checkpoint is None or state is None:
            return original(self, checkpoint)
        checkpoints.load_optimizers(Path(checkpoint), [self.model], [self.optimizer])
        checkpoints.load_rest(state, [self.lr_scheduler])

    return _load_optimizer_and_scheduler


def wrap_load_scaler(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Trainer._load_scaler``: from our file."""

    @functools.wraps(original)
    def _load_scaler(self: Any, checkpoint: str | None) -> Any:
        state = _ours(checkpoint)
        if state is None:
            return original(self, checkpoint)
        checkpoints.load_rest({**state, "schedulers": []}, scaler=self.accelerator.scaler)

    return _load_scaler


def wrap_load_random(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Trainer._load_rng_state``: from our file."""

    @functools.wraps(original)
    def _load_rng_state(self: Any, checkpoint: str | None) -> Any:
        state = _ours(checkpoint)
        if state is None:
            return original(self, checkpoint)
        from slideformer_backend.checkpoint import restore_random_states

        restore_random_states(state["random"])

    return _load_rng_state


def wrap_last(original: Callable[..., Any]) -> Callable[..., Any]:
    """``get_last_checkpoint``: the newest complete one."""

    @functools.wraps(original)
    def get_last_checkpoint(folder: str) -> Any:
        found = original(folder)
        if found is None or not _is_incomplete(Path(found)):
            return found
        from slideformer_backend.storage.directory import is_complete

        complete = [path for path in _numbered(Path(folder)) if is_complete(path)]
        return os.path.join(folder, complete[-1].name) if complete else None

    return get_last_checkpoint


def wrap_rotate(original: Callable[..., Any]) -> Callable[..., Any]:
    """``rotate_checkpoints``: the new checkpoint is complete before an old one goes, and incomplete ones go first."""

    @functools.wraps(original)
    def rotate_checkpoints(output_dir: str, *args: Any, **kwargs: Any) -> Any:
        current = _writing.get()
        if current is not None:
            from slideformer_backend.storage.directory import discard, sweep

            _complete(current)
            sweep(Path(output_dir), _PREFIX)
            for folder in _numbered(Path(output_dir)):
                if _is_incomplete(folder):
                    discard(folder)
        return original(output_dir, *args, **kwargs)

    return rotate_checkpoints


def wrap_log(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Trainer.log``: our figures beside those of a training step."""

    @functools.wraps(original)
    def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        status = getattr(self.accelerator, "slideformer_status", None)
        if status is not None and "loss" in logs and checkpoints.managing([self.model]):
            logs = {**logs, **status.figures()}
        return original(self, logs, *args, **kwargs)

    return log


def _complete(folder: Path) -> None:
    from slideformer_backend.storage.directory import seal

    if _is_incomplete(folder):
        seal(folder)


def _is_incomplete(folder: Path) -> bool:
    from slideformer_backend.storage.directory import is_complete

    return not is_complete(folder)


def _ours(checkpoint: str | None) -> dict[str, Any] | None:
    return None if checkpoint is None else checkpoints.read_training_state(Path(checkpoint))


def _numbered(folder: Path) -> list[Path]:
    found = []
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(ValueError):
            found.append((int(path.name.removeprefix(_PREFIX)), path))
    return [path for _, path in sorted(found)]


def patches() -> tuple[Patch, ...]:
    """The patches of Trainer's checkpoints."""
    purpose = "checkpoints of Trainer that are complete or do not count"
    methods = {
        "_save_checkpoint": wrap_save_checkpoint,
        "_save_optimizer_and_scheduler": wrap_save_optimizer,
        "_save_scaler": wrap_included,
        "_save_rng_state": wrap_included,
        "_load_from_checkpoint": wrap_load_weights,
        "_load_optimizer_and_scheduler": wrap_load_optimizer,
        "_load_scaler": wrap_load_scaler,
        "_load_rng_state": wrap_load_random,
    }
    return (
        *(Patch(module, "get_last_checkpoint", wrap_last, purpose, ("folder",)) for module in (_UTILS, _TRAINER)),
        *(Patch(module, "rotate_checkpoints", wrap_rotate, purpose, ("output_dir",)) for module in (_UTILS, _TRAINER)),
        Patch(_TRAINER, "Trainer.log", wrap_log, "logging SlideFormer's figures", ("logs",)),
        *(Patch(_TRAINER, f"Trainer.{name}", wrap, purpose) for name, wrap in methods.items()),
    )
