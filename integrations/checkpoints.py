"""``save_state`` and ``load_state``: the files of a checkpoint, written aside, and no pickle among them.

A checkpoint has the model's weights where Accelerate and transformers have them; ``optimizer/`` (one folder per
optimizer) holds its states; ``training_state.json`` the schedulers, the scaler and the random generators.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slideformer_backend.integrations.patches import Patch

if TYPE_CHECKING:
    import torch

    from slideformer_backend.api import Engine

STATE = "training_state.json"
_AUTOMATIC = re.compile(r"^checkpoint_(\d+)$")

_models: ContextVar[Sequence[torch.nn.Module] | None] = ContextVar("slideformer_saving", default=None)
"""The models of the ``Accelerator`` whose ``save_state`` runs now, if SlideFormer drives one of them."""
_loading: ContextVar[Sequence[torch.nn.Module] | None] = ContextVar("slideformer_loading", default=None)
"""Those of one whose ``load_state`` runs now: a hook that loads models itself takes them off the list that comes along,
but the optimizers' parameters still have the names that they have there."""


def managing(models: Iterable[object]) -> list[Engine]:
    """The engines that drive ``models``. Imports the engine only if there is one."""
    api = sys.modules.get("slideformer_backend.api")
    if api is None:
        return []
    found = [api.engine_of(model) for model in models if hasattr(model, "modules")]
    return [engine for engine in found if engine is not None]


@contextlib.contextmanager
def written_in_place(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside, the state dicts of ``models`` are the host memory itself, and ``save_accelerator_state`` is ours."""
    token = _models.set(models)
    try:
        with _borrowed(models):
            yield
    finally:
        _models.reset(token)


@contextlib.contextmanager
def loading(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside, ``load_accelerator_state`` names parameters as in ``models``, whatever list it is given."""
    token = _loading.set(models)
    try:
        yield
    finally:
        _loading.reset(token)


def optimizer_folder(folder: Path, number: int) -> Path:
    """Where the states of an optimizer lie."""
    return folder / (f"optimizer_{number}" if number else "optimizer")


def save_training_state(
    folder: Path,
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any] = (),
    scaler: Any = None,
    **more: Any,
) -> None:
    """Write optimizers, schedulers, scaler, random generators and the plain values ``more``."""
    from slideformer_backend.checkpoint import pack, random_states, save_optimizer
    from slideformer_backend.integrations.optimizer import engines_of, unwrap

    for number, optimizer in enumerate(optimizers):
        raw = unwrap(optimizer)
        engine = next(iter(engines_of(raw)), None)
        save_optimizer(raw, models, optimizer_folder(folder, number), engine)
    content = {
        "optimizers": len(optimizers),
        "schedulers": [pack(scheduler.state_dict(), type(scheduler).__name__) for scheduler in schedulers],
        "scaler": pack(None if scaler is None else scaler.state_dict()),
        "random": random_states(),
        **{name: pack(value, name) for name, value in more.items()},
    }
    (folder / STATE).write_text(json.dumps(content), encoding="utf-8")


def read_training_state(folder: Path) -> dict[str, Any] | None:
    """What ``save_training_state`` wrote, still packed; None in a checkpoint that is not ours."""
    try:
        content: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return content


def load_optimizers(folder: Path, models: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> None:
    """Take the states of all optimizers from a checkpoint of ours, with SlideFormer or without."""
    from slideformer_backend.checkpoint import load_optimizer
    from slideformer_backend.integrations.optimizer import engines_of, unwrap

    for number, optimizer in enumerate(optimizers):
        raw = unwrap(optimizer)
        engine = next(iter(engines_of(raw)), None)
        load_optimizer(raw, models, optimizer_folder(folder, number), engine)


def load_rest(state: dict[str, Any], schedulers: Sequence[Any] = (), scaler: Any = None) -> None:
    """Take schedulers and scaler from a packed training state."""
    from slideformer_backend.checkpoint import unpack

    for scheduler, saved in zip(schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(unpack(saved))
    if scaler is not None and state["scaler"] is not None:
        scaler.load_state_dict(unpack(state["scaler"]))


def wrap_save(original: Callable[..., Any]) -> Callable[..., Any]:
    """``save_accelerator_state``: ours while a managed ``Accelerator`` saves."""

    @functools.wraps(original)
    def save_accelerator_state(
        output_dir: str,
        model_states: list[dict[str, Any]],
        optimizers: list[Any],
        schedulers: list[Any],
        dataloaders: list[Any],
        process_index: int,
        step: int,
        scaler: Any = None,
        save_on_each_node: bool = False,
        safe_serialization: bool = True,
    ) -> Any:
        models = _models.get()
        if models is None:
            return original(
                output_dir,
                model_states,
                optimizers,
                schedulers,
                dataloaders,
                process_index,
                step,
                scaler,
                save_on_each_node=save_on_each_node,
                safe_serialization=safe_serialization,
            )
        folder = Path(output_dir)
        _save_weights(folder, models, model_states, safe_serialization)
        stateful = [getattr(item, "use_stateful_dataloader", False) for item in dataloaders]
        loaders = [item.state_dict() if own else None for item, own in zip(dataloaders, stateful, strict=True)]
        save_training_state(
            folder, models, optimizers, schedulers, scaler, weights="module", step=step, dataloaders=loaders
        )
        return folder

    return save_accelerator_state


def wrap_load(original: Callable[..., Any]) -> Callable[..., Any]:
    """``load_accelerator_state``: what is ours in a checkpoint is loaded by us, in plain runs too."""

    @functools.wraps(original)
    def load_accelerator_state(
        input_dir: str,
        models: list[Any],
        optimizers: list[Any],
        schedulers: list[Any],
        dataloaders: list[Any],
        process_index: int,
        scaler: Any = None,
        map_location: Any = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> Any:
        state = read_training_state(Path(input_dir))
        if state is None:
            return original(
                input_dir,
                models,
                optimizers,
                schedulers,
                dataloaders,
                process_index,
                scaler,
                map_location,
                load_kwargs,
                **load_model_func_kwargs,
            )
        from slideformer_backend.checkpoint import restore_random_states, unpack

        with _borrowed(models):  # the loader looks at a state dict first
            _load_weights(Path(input_dir), models, **load_model_func_kwargs)
        load_optimizers(Path(input_dir), _loading.get() or models, optimizers)
        load_rest(state, schedulers, scaler)
        for loader, saved in zip(dataloaders, state["dataloaders"], strict=False):
            if saved is not None and getattr(loader, "use_stateful_dataloader", False):
                loader.load_state_dict(unpack(saved))
        restore_random_states(state["random"])
        return {"step": state["step"]}

    return load_accelerator_state


def automatic_folder(accelerator: Any) -> Path:
    """Where ``automatic_checkpoint_naming`` puts the next checkpoint."""
    return Path(accelerator.project_dir) / "checkpoints" / f"checkpoint_{accelerator.save_iteration}"


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint of ``automatic_checkpoint_naming``."""
    from slideformer_backend.storage.directory import is_complete

    complete = [path for path in _automatic(folder) if is_complete(path)]
    return complete[-1] if complete else None


def rotate(folder: Path, limit: int | None) -> None:
    """Delete the oldest checkpoints beyond ``limit``, never the newest complete one, and all incomplete ones."""
    from slideformer_backend.storage.directory import discard, is_complete, sweep

    sweep(folder, "checkpoint_")
    checkpoints = _automatic(folder)
    complete = [path for path in checkpoints if is_complete(path)]
    kept = complete if limit is None else complete[-max(limit, 1) :]
    for path in checkpoints:
        if path not in kept and (path in complete or not is_complete(path)):
            discard(path)


def _automatic(folder: Path) -> list[Path]:
    found = [(int(match[1]), path) for path in folder.glob("checkpoint_*") if (match := _AUTOMATIC.match(path.name))]
    return [path for _, path in sorted(found)]


@contextlib.contextmanager
def _borrowed(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    engines = managing(models)
    with contextlib.ExitStack() as stack:
        if engines:
            from slideformer_backend.checkpoint import borrowed_state

            for engine in engines:
                stack.enter_context(borrowed_state(engine))
        yield


def _save_weights(
    folder: Path, models: Sequence[torch.nn.Module], states: Sequence[dict[str, Any]], safe_serialization: bool
) -> None:
    from accelerate.utils import save
    from safetensors.torch import save_file

    for number, state in enumerate(states):
        ending = f"_{number}" if number else ""
        if safe_serialization:
            untied = _untied(models, number, state)
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in untied.items()}
            save_file(tensors, folder / f"model{ending}.safetensors", metadata={"format": "pt"})
        else:
            save(state, folder / f"pytorch_model{ending}.bin", safe_serialization=False)
    for model in models[:1]:
        _save_description(model, folder)


def _load_weights(folder: Path, models: Sequence[torch.nn.Module], **options: Any) -> None:
    from accelerate.utils import load
    from safetensors.torch import load_model

    for number, model in enumerate(models):
        ending = f"_{number}" if number else ""
        file = folder / f"model{ending}.safetensors"
        if file.exists():
            load_model(model, file, **options)  # the file's pages, parameter by parameter
        else:  # the script saved with safe_serialization=False
            model.load_state_dict(load(folder / f"pytorch_model{ending}.bin", map_location="cpu"), **options)


def _untied(models: Sequence[torch.nn.Module], number: int, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Each tensor once: under the name that the model's own ``save_pretrained`` keeps, else under its first name."""
    import torch

    tied = getattr(models[number], "all_tied_weights_keys", None) if number < len(models) else None
    droppable = set(tied or ())
    owners: dict[Any, str] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        if place not in owners or owners[place] in droppable:
            owners[place] = name
    kept = set(owners.values())
    return {name: tensor for name, tensor in state.items() if name in kept}


def _save_description(model: Any, folder: Path) -> None:
    """What ``slideformer export`` needs to make a model of the weights: a configuration, or a PEFT model's adapter."""
    if getattr(model, "peft_config", None) and hasattr(model, "save_pretrained"):
        model.save_pretrained(folder / "adapter")
        return
    for name in ("config", "generation_config"):
        part: Any = getattr(model, name, None)
        if not hasattr(part, "save_pretrained"):
            continue
        if name == "config" and not part.architectures:
            part.architectures = [type(model).__name__]
        part.save_pretrained(folder)


def patches() -> tuple[Patch, ...]:
    """The patches of Accelerate's saving and loading."""
    module, purpose = "accelerate.accelerator", "saving and loading checkpoints without pickles"
    return (
        Patch(module, "save_accelerator_state", wrap_save, purpose, ("model_states", "safe_serialization")),
        Patch(module, "load_accelerator_state", wrap_load, purpose, ("models", "load_kwargs")),
    )
