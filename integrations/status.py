"""The status line of a run under Accelerate: counts what passes by and shows what the script logs anyway."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.tracking import GeneralTracker
from torch import nn

from slideformer_backend.status import StatusLine

if TYPE_CHECKING:
    from slideformer_backend.api import Engine
    from slideformer_backend.config import SlideFormerConfig

# Names under which scripts tell their trackers how many optimizer steps they will take.
_TOTALS = ("max_train_steps", "num_training_steps", "max_steps", "total_steps")


class StatusTracker(GeneralTracker):  # type: ignore[misc]  # Accelerate is untyped
    """Feeds a status line from `Accelerator.init_trackers`, `log` and `end_training`."""

    name = "slideformer_status"
    requires_logging_directory = False

    def __init__(self, line: StatusLine) -> None:
        super().__init__()
        self._line = line

    @property
    def tracker(self) -> StatusLine:
        return self._line

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        totals = [values[name] for name in _TOTALS if isinstance(values.get(name), int) and values[name] > 0]
        self._line.expect(totals[0] if totals else None)

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        self._line.log(values)

    def finish(self) -> None:
        self._line.close()


class TokenCounter:
    """A forward pre-hook that counts the tokens of training batches. Copies and pickles of a model get an idle one."""

    def __init__(self, count: Callable[[torch.Tensor | int], None] | None = None) -> None:
        self._count = count

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._count is None or not module.training or not torch.is_grad_enabled():
            return
        mask, ids = kwargs.get("attention_mask"), kwargs.get("input_ids", args[0] if args else None)
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            self._count(mask.sum())
        elif isinstance(ids, torch.Tensor) and not ids.is_floating_point():
            self._count(ids.numel())

    def __reduce__(self) -> tuple[type[TokenCounter], tuple[()]]:
        return TokenCounter, ()


class Status:
    """The status line of one `Accelerator`, drawn from its first engine on; without the setting it does nothing."""

    def __init__(self, config: SlideFormerConfig) -> None:
        self._mode = config.status
        self.line: StatusLine | None = None

    def watch_model(self, model: nn.Module, engine: Engine) -> None:
        """Draws from `engine` and counts the tokens that go into `model`."""
        if self._mode == "off" or self.line is not None:
            return
        self.line = StatusLine(engine.report, engine.device, self._mode)
        model.register_forward_pre_hook(TokenCounter(self.line.tokens), with_kwargs=True)

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Counts the steps of `optimizer`; one that is prepared again is counted already."""
        if self._mode == "off" or isinstance(optimizer, AcceleratedOptimizer):
            return
        optimizer.register_step_post_hook(self._stepped)

    def saw_loss(self, loss: torch.Tensor) -> None:
        """A backward has been called on `loss`."""
        if self.line is not None:
            self.line.micro_batch(loss)

    def join_trackers(self, accelerator: Accelerator, configuration: Mapping[str, Any] | None) -> None:
        """Lets the line see what the script logs from now on."""
        if self.line is not None:
            tracker = StatusTracker(self.line)
            accelerator.trackers.append(tracker)
            tracker.store_init_configuration(configuration or {})

    def _stepped(self, *_: object) -> None:
        if self.line is not None:
            self.line.step()
