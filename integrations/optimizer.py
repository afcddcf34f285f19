"""The prepared optimizer: a real ``AcceleratedOptimizer`` that knows which engine steps it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer, patch_optimizer_step

from slideformer_backend.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from slideformer_backend.api import Engine


class SlideFormerOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # Accelerate is untyped
    """Adds ``step_was_skipped`` of the engine to the stock wrapper. Instances get this class after construction."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was dropped: by the gradient scaler, or by the engine (non-finite gradients)."""
        if super().step_was_skipped:
            return True
        raw = unwrap(self)
        return any(engine.step_was_skipped(raw) for engine in engines_of(raw))

    def follow_step(self) -> None:
        """Takes up the step method that an engine has put on the user's optimizer since this wrapper was made.

        With a gradient scaler the stock wrapper puts the method that it saw at construction back after every step.
        """
        if self.scaler is not None:
            self._optimizer_original_step_method = self.optimizer.step
            self._optimizer_patched_step_method = patch_optimizer_step(self, self.optimizer.step)


def unwrap(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The user's own optimizer object inside Accelerate's wrappers."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def engines_of(optimizer: torch.optim.Optimizer) -> list[Engine]:
    """The engines that own at least one parameter of ``optimizer``."""
    from slideformer_backend import api

    parameters = parameters_of(optimizer)
    return [engine for engine in api.engines() if any(engine.owns([parameter]) for parameter in parameters)]


def bind(optimizer: torch.optim.Optimizer) -> bool:
    """Lets the engine that owns the parameters step the user's optimizer. False when no engine owns any of them.

    Raises:
        UnsupportedError: the parameters belong to two managed models.
    """
    raw = unwrap(optimizer)
    owners = engines_of(raw)
    if len(owners) > 1:
        raise UnsupportedError(
            f"One {type(raw).__name__} holds parameters of {len(owners)} models that SlideFormer manages.",
            found=", ".join(type(engine.model).__name__ for engine in owners),
            remedy="make one optimizer per model, or put the models into one module and prepare that",
        )
    for engine in owners:
        engine.bind(raw)
    return bool(owners)


def refuse_stale(optimizers: Iterable[torch.optim.Optimizer], models: Iterable[torch.nn.Module]) -> None:
    """Refuses an optimizer that holds other tensors than the model it was given with: it would train nothing.

    Raises:
        ConfigError: the optimizer's parameters have the model's shapes but are not the model's.
    """
    wanted = [(model, [p for p in model.parameters() if p.requires_grad]) for model in models]
    known = {id(parameter) for _, parameters in wanted for parameter in parameters}
    for optimizer in optimizers:
        held = parameters_of(optimizer)
        if not held or any(id(parameter) in known for parameter in held):
            continue
        for model, parameters in wanted:
            if sorted(tuple(p.shape) for p in held) == sorted(tuple(p.shape) for p in parameters):
                raise ConfigError(
                    f"The {type(unwrap(optimizer)).__name__} holds copies of the parameters of "
                    f"{type(model).__name__}, not the parameters: a step would change nothing.",
                    remedy="make the optimizer from model.parameters() of the model that is prepared",
                )


_GPU_ONLY = {"bitsandbytes", "torchao", "apex", "transformer_engine", "torch_npu", "torch_xla"}
"""Packages whose optimizers work on device tensors; parameters and states are in host memory here."""
_INSIDE_BACKWARD = {"lomo_optim", "transformers.trainer_pt_utils"}
"""Packages and modules of optimizers that update inside backward (the latter: its dummy for layer-wise ones)."""


def refuse_known(optimizer: torch.optim.Optimizer) -> None:
    """Refuses, by name, optimizers that cannot work on sliding weights.

    Raises:
        UnsupportedError: the optimizer works on device tensors only, or updates inside backward.
    """
    raw = unwrap(optimizer)
    for base in type(raw).__mro__:
        places = {base.__module__, base.__module__.split(".")[0]}
        name = f"{base.__module__}.{base.__name__}"
        if places & _GPU_ONLY or name.startswith("deepspeed.ops.adam.fused_adam"):
            raise UnsupportedError(
                f"{type(raw).__name__} runs on GPU tensors only, and SlideFormer keeps masters and states in host "
                "memory, where they cost no GPU memory in any precision.",
                found=name,
                remedy="take --optim adamw_torch_fused (or sgd, or Lion from lion_pytorch)",
            )
        if places & _INSIDE_BACKWARD:
            raise UnsupportedError(
                f"{type(raw).__name__} updates weights inside backward, where they slide.",
                found=name,
                remedy="take --optim adamw_torch_fused with update: immediate, which updates during backward too",
            )


def is_optimizer(value: Any) -> bool:
    """Whether ``value`` is an optimizer, wrapped or not."""
    return isinstance(value, torch.optim.Optimizer)
