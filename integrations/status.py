"""The status line of a run under Accelerate: counts what passes by and shows what the script logs anyway."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.tracking import GeneralTracker
from torch import nn

from slideformer_backend.metrics import Meter, Operations, peak_of
from slideformer_backend.status import StatusLine

if TYPE_CHECKING:
    from slideformer_backend.api import Engine, EngineReport
    from slideformer_backend.config import SlideFormerConfig

logger = logging.getLogger(__name__)

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
    """A forward pre-hook that counts the tokens of training batches, and tells how long their rows are. Copies and
    pickles of a model get an idle one."""

    def __init__(self, count: Callable[[torch.Tensor | int, int], None] | None = None) -> None:
        self._count = count

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._count is None or not module.training or not torch.is_grad_enabled():
            return
        mask, ids = kwargs.get("attention_mask"), kwargs.get("input_ids", args[0] if args else None)
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            self._count(mask.sum(), mask.shape[-1])
        elif isinstance(ids, torch.Tensor) and not ids.is_floating_point():
            self._count(ids.numel(), ids.shape[-1] if ids.dim() else 1)

    def __reduce__(self) -> tuple[type[TokenCounter], tuple[()]]:
        return TokenCounter, ()


class Status:
    """The status line of one `Accelerator`, drawn from its first engine on, and the meter behind what is logged."""

    def __init__(self, config: SlideFormerConfig) -> None:
        self._mode = config.status
        self.line: StatusLine | None = None
        self.meter: Meter | None = None
        self._engine: Callable[[], Engine | None] = lambda: None

    def watch_model(self, model: nn.Module, engine: Engine) -> None:
        """Counts the tokens that go into `model`; reads `engine` unless one that is alive is read."""
        current = self._engine()
        if current is None or current.is_detached:
            self._follow(engine)
        if self.line is None and self._mode != "off":
            self.line = StatusLine(engine.report, engine.device, self._mode, mfu=self._mfu)
        counter = TokenCounter(functools.partial(self._tokens, weakref.ref(engine)))
        engine.add_hook(model.register_forward_pre_hook(counter, with_kwargs=True))

    def watch_optimizer(self, optimizer: torch.optim.Optimizer, engines: Sequence[Engine]) -> None:
        """Reads the engine that is trained, and counts steps; an optimizer prepared again is counted already."""
        if engines and engines[0] is not self._engine():
            self._follow(engines[0])
        if not isinstance(optimizer, AcceleratedOptimizer):
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

    def figures(self) -> dict[str, float]:
        """What is logged beside the script's own values; says aloud what slows the run down, once."""
        if self.meter is None:
            return {}
        advice = self.meter.advice()
        if advice is not None:
            logger.warning(advice)
        return self.meter.read()

    def _follow(self, engine: Engine) -> None:
        self._engine = reference = weakref.ref(engine)

        def report() -> EngineReport | None:
            found = reference()
            return None if found is None or found.is_detached else found.report()

        self.meter = Meter(Operations.of(engine.model), peak_of(engine.device))
        self.meter.follow(report)

    def _tokens(self, engine: weakref.ref[Engine], count: torch.Tensor | int, length: int) -> None:
        if self.meter is not None and engine() is self._engine():
            self.meter.tokens(count, length)
        if self.line is not None:
            self.line.tokens(count)

    def _mfu(self) -> float | None:
        return None if self.meter is None else self.meter.mfu()

    def _stepped(self, *_: object) -> None:
        if self.meter is not None:
            self.meter.step()
        if self.line is not None:
            self.line.step()
