"""``Accelerator`` with SlideFormer: a real subclass that attaches engines in ``prepare`` and keeps every other meaning.

Accelerate sees one process without distribution, an unwrapped model and valid parameters, so what is not overridden
here (``backward``, ``accumulate``, ``no_sync``, ``unwrap_model``, ``save_state``, ...) is the stock code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn

from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.errors import ConfigError, UnsupportedError
from slideformer_backend.integrations import checkpoints, hooks, placement, quantised
from slideformer_backend.integrations import optimizer as optimizers
from slideformer_backend.integrations.session import session
from slideformer_backend.integrations.status import Status, StatusTracker

if TYPE_CHECKING:
    from slideformer_backend.api import Engine

logger = logging.getLogger(__name__)

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class SlideFormerAccelerator(Accelerator):  # type: ignore[misc]  # Accelerate is untyped
    """What an ``Accelerator`` becomes when SlideFormer was asked for; see :func:`enable`."""

    slideformer_config: SlideFormerConfig
    slideformer_status: Status

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Attaches engines to all modules first, so that the order of the arguments does not matter."""
        models = [item for item in args if isinstance(item, nn.Module)]
        given = [item for item in args if optimizers.is_optimizer(item)]
        for optimizer in given:
            optimizers.refuse_known(optimizer)
        optimizers.refuse_stale(given, models)
        for model in models:
            self._attach(model, given)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """The same object, driven by an engine, never moved whole.

        A model prepared for evaluation slides too (``Trainer.evaluate`` before ``train`` prepares the model that will
        be trained); nothing for training is allocated before an optimizer is prepared. A model that cannot slide may
        still be evaluated: it is placed as without SlideFormer.
        """
        try:
            self._attach(model)
        except UnsupportedError as error:
            if not evaluation_mode:
                raise
            session.say_once(f"A {type(model).__name__} is evaluated without SlideFormer: {error}")
            placement.forget(model)
            return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        with self._without_whole_model_compile():
            return super().prepare_model(model, device_placement=False, evaluation_mode=evaluation_mode)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """A real ``AcceleratedOptimizer`` over the user's own object, whose step the engine makes."""
        optimizers.refuse_known(optimizer)
        # Bound first: with a gradient scaler, the wrapper remembers the step method that it finds.
        optimizers.bind(optimizer)
        self.slideformer_status.watch_optimizer(optimizer, optimizers.engines_of(optimizer))
        prepared = super().prepare_optimizer(optimizer, device_placement=False)
        if type(prepared) is AcceleratedOptimizer:
            prepared.__class__ = optimizers.SlideFormerOptimizer
        return prepared

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """As ever; the status line sees the loss."""
        super().backward(loss, **kwargs)
        self.slideformer_status.saw_loss(loss)

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """As ever; the status line is one more tracker."""
        super().init_trackers(project_name, config, init_kwargs)
        self.slideformer_status.join_trackers(self, config)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """As ever, with our figures (``slideformer/...``) beside the script's."""
        if any(not isinstance(tracker, StatusTracker) for tracker in self.trackers):
            values = {**values, **self.slideformer_status.figures()}
        super().log(values, step=step, log_kwargs=log_kwargs or {})

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> Any:
        """Clips by the global norm; ours where one engine owns all gradients, torch's in place otherwise."""
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        engine, owned = self._owner(tensors) if float(norm_type) == 2.0 else (None, [])
        if engine is None:
            return super().clip_grad_norm_(tensors, max_norm, norm_type=norm_type)
        self.unscale_gradients()
        return engine.clip_grad_norm_(owned, float(max_norm), 2.0)

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Any:
        """As ever, but whole or not at all: a kill at any moment leaves the checkpoints that were there before.

        With ``automatic_checkpoint_naming`` old checkpoints are deleted after the new one is complete, not before.

        Raises:
            StorageError: the disk is full or fails; checkpoints that were there stay.
        """
        from slideformer_backend.storage.directory import is_complete, staged

        if not checkpoints.managing(self._models):
            return super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)
        from slideformer_backend.checkpoint import disk_reported

        settings = self.project_configuration
        automatic = bool(settings.automatic_checkpoint_naming)
        if output_dir is None and not automatic:
            raise ConfigError("save_state() needs a folder.", remedy="pass output_dir")
        folder = checkpoints.automatic_folder(self) if automatic else Path(str(output_dir)).expanduser()
        if automatic and is_complete(folder):
            raise ValueError(
                f"Checkpoint directory {folder} ({self.save_iteration}) already exists. Please manually override "
                "`self.save_iteration` with what iteration to start with."
            )
        settings.automatic_checkpoint_naming = False
        try:
            with checkpoints.written_in_place(self._models), disk_reported(folder), staged(folder) as aside:
                super().save_state(str(aside), safe_serialization, **save_model_func_kwargs)
        finally:
            settings.automatic_checkpoint_naming = automatic
        if automatic:
            checkpoints.rotate(folder.parent, settings.total_limit)
        return folder

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """As ever; every file is compared with its checksum first, and without ``input_dir`` the newest complete
        checkpoint is taken.

        Raises:
            CheckpointError: the checkpoint is incomplete or damaged; nothing was changed.
        """
        from slideformer_backend.storage.directory import recover, verify

        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            found = checkpoints.newest(Path(self.project_dir) / "checkpoints")
            if found is None:
                raise ValueError(f"No complete checkpoint in {self.project_dir}/checkpoints")
            input_dir = str(found)
        if input_dir is not None:
            folder = Path(input_dir).expanduser()
            recover(folder)
            if folder.is_dir():
                verify(folder)
        with checkpoints.loading(list(self._models)):
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)

    def free_memory(self, *objects: Any) -> Any:
        """Detaches the engines of the prepared models (plain CPU models again), then frees as ever."""
        for model in [*self._models, *(item for item in objects if isinstance(item, nn.Module))]:
            engine = placement.engine_around(model)
            if engine is not None:
                engine.detach()
        return super().free_memory(*objects)

    def _attach(self, model: nn.Module, given: Sequence[torch.optim.Optimizer] = ()) -> None:
        """Attaches an engine to ``model`` unless one drives it, and binds the optimizers that waited for it.

        ``given``: optimizers prepared in the same call, for the plan.
        """
        from slideformer_backend import api

        if next(model.parameters(), None) is None:
            return
        if placement.engine_around(model) is None:
            self._refuse_model(model)
            placement.forget(model)
            engine = api.attach(
                model,
                self.slideformer_config,
                device=self.device,
                autocast_dtype=self._autocast_dtype(),
                optimizers=[optimizers.unwrap(optimizer) for optimizer in given],
            )
            logger.info("SlideFormer drives %s (update: %s)", type(model).__name__, self.slideformer_config.update)
            quantised.install(engine)
            state = self.gradient_state
            engine.last_microbatch = lambda: bool(state.sync_gradients)
            self.slideformer_status.watch_model(model, engine)
            if self.slideformer_config.kernels != "off":
                from slideformer_backend.integrations import kernel_swap

                kernel_swap.install(engine, self._autocast_dtype())
            if self.slideformer_config.lazy_logits:
                from slideformer_backend.integrations import lazy_logits

                lazy_logits.install(engine)
        for prepared in self._optimizers:
            if optimizers.bind(prepared) and isinstance(prepared, optimizers.SlideFormerOptimizer):
                prepared.follow_step()

    def _refuse_model(self, model: nn.Module) -> None:
        name = type(model).__name__
        quantised.refuse(model)
        if self.scaler is not None and self.slideformer_config.update == "immediate":
            raise ConfigError(
                "update: immediate cannot scale the loss, whose overflow is known only after the last gradient.",
                found="mixed_precision: fp16",
                remedy="take update: exact, or bf16",
            )
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise UnsupportedError(
                f"SlideFormer drives one model on one GPU, not a {name}.", remedy="pass the model itself"
            )
        if hasattr(model, "_orig_mod"):
            raise UnsupportedError(
                "SlideFormer cannot drive a model that torch.compile has wrapped whole: weights come and go inside it.",
                remedy="pass the model itself to prepare()",
            )
        if self.verify_device_map(model):
            raise UnsupportedError(
                f"This {name} was spread over devices by a device_map before SlideFormer was switched on.",
                remedy="load it without device_map, or create the Accelerator first",
            )

    def _autocast_dtype(self) -> torch.dtype | None:
        """The dtype of the autocast that ``prepare_model`` puts around the forward; None when there is none."""
        handler = self.autocast_handler
        if not self.native_amp or (handler is not None and not handler.enabled):
            return None
        return _AUTOCAST.get(str(self.mixed_precision))

    def _owner(self, tensors: list[torch.Tensor]) -> tuple[Engine | None, list[torch.Tensor]]:
        """The engine that owns all gradients among ``tensors``, and its part of them.

        Tensors of others count only if they have a gradient.
        """
        from slideformer_backend import api

        for engine in api.engines():
            owned = tensors if engine.owns(tensors) else [tensor for tensor in tensors if engine.owns([tensor])]
            mine = {id(tensor) for tensor in owned}
            if owned and all(tensor.grad is None for tensor in tensors if id(tensor) not in mine):
                return engine, owned
        return None, []

    @contextlib.contextmanager
    def _without_whole_model_compile(self) -> Iterator[None]:
        plugin = self.state.dynamo_plugin
        if plugin.backend == DynamoBackend.NO:
            yield
            return
        session.say_once(
            "SlideFormer leaves out torch.compile of the whole model: weights come and go inside it. Results are the "
            "same. To silence this, remove torch_compile or dynamo_backend."
        )
        self.state.dynamo_plugin = dataclasses.replace(plugin, backend=DynamoBackend.NO)
        try:
            yield
        finally:
            self.state.dynamo_plugin = plugin


def enable(accelerator: Accelerator, config: SlideFormerConfig) -> None:
    """Turns a constructed ``Accelerator`` (or an instance of a user's subclass) into a SlideFormer one.

    Raises:
        UnsupportedError: the process is part of a distributed run, or its device or precision is not supported.
    """
    if accelerator.distributed_type != DistributedType.NO:
        raise UnsupportedError(
            "SlideFormer trains on one GPU with one process.",
            found=f"distributed type {accelerator.distributed_type.value}",
            remedy="launch with --num_processes 1; to use several GPUs take FSDP or DeepSpeed instead",
        )
    if accelerator.device.type not in ("cuda", "cpu"):
        raise UnsupportedError(
            "SlideFormer runs on CUDA GPUs, and on the CPU for tests.", found=f"device {accelerator.device}"
        )
    if accelerator.mixed_precision == "fp8":
        raise UnsupportedError(
            "SlideFormer does not support mixed_precision: fp8.", expected="no, bf16 or fp16", remedy="take bf16"
        )
    hooks.keep_off_gpu()
    accelerator.__class__ = _subclass(type(accelerator))
    accelerator.slideformer_config = config
    accelerator.slideformer_status = Status(config)


def _subclass(kind: type) -> type:
    if issubclass(kind, SlideFormerAccelerator):
        return kind
    if kind is Accelerator:
        return SlideFormerAccelerator
    return type(f"SlideFormer{kind.__name__}", (SlideFormerAccelerator, kind), {"__module__": kind.__module__})
