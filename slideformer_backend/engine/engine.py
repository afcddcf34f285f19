"""The engine of one model: composes the parts and offers what integrations call."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ..config import SlideFormerConfig
from ..errors import SlideFormerError, UnsupportedError
from ..optim.numba_kernels import warm_up
from ..optim.workers import WorkerPool, default_threads
from ..storage import HostMemory
from ..transfer import Monitor, backend_for
from .access import EdgeAccess, ParameterAccess
from .arithmetic import Arithmetic
from .backward import Backward, Visit
from .binding import Binding
from .build import build_units
from .clip import as_tensor, clip_to, total_norm
from .driver import UnitForward
from .edges import Edges
from .guard import guard, unguard
from .immediate import Immediate
from .redo_log import RedoLog
from .report import EngineReport, make_report
from .schedule import Phase, Schedule
from .unit import ONE, ParamRecord, Unit, Weights, Where
from .whole import as_masters
from .window import Window

logger = logging.getLogger(__name__)

MOST_SKIPS = 20
"""Non-finite steps in a row after which training is stopped."""


class Engine:
    """Drives one model. Built by ``attach``; see there for the arguments.

    Attributes:
        last_microbatch: whether the running backward is the last before ``step()``; set by the integration.
        skipped: steps dropped because of non-finite gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        config: SlideFormerConfig,
        device: torch.device,
        autocast_dtype: torch.dtype | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.last_microbatch: Callable[[], bool] = lambda: True
        self.skipped = 0
        self.backend = backend_for(device, monitor)
        self.device = self.backend.device
        pin = self.device.type == "cuda" if config.pin_memory == "auto" else config.pin_memory
        self.memory = HostMemory(pin=pin and self.device.type == "cuda")
        self.units = build_units(model, self.device, autocast_dtype, self.memory)
        self.sliding = [unit for unit in self.units if not unit.is_edge]
        threads = default_threads() if config.cpu_threads == "auto" else config.cpu_threads
        self.workers = WorkerPool(threads)
        depth = 2 if config.prefetch == "auto" else config.prefetch
        self.window = Window(self.backend, self.units, depth)
        policy = Immediate if config.update == "immediate" else RedoLog
        self.policy = policy(self.backend, self.window, self.memory, Arithmetic(self.workers))
        self.edges = Edges(self.backend, [unit for unit in self.units if unit.is_edge], self.policy)
        self.backward = Backward(
            self.backend, self.window, self.policy, self.edges, self._fetch_for_backward, self._expects_step
        )
        self.schedule = Schedule(self.sliding)
        self.is_detached = False
        self._bindings: list[Binding] = []
        self._bind_hooks: list[Callable[[Engine, Binding], None]] = []
        self._records: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._hooks: list[RemovableHandle] = []
        self._forwards: list[UnitForward] = []
        self._skips_in_a_row = 0
        self._usual_count = 1
        self._saw_microbatch = False
        self._install()

    # -- what integrations call ------------------------------------------------------------------------------------

    def bind(self, optimizer: Optimizer) -> None:
        """Make ``optimizer.step`` ours. Idempotent; parameters of other models keep their own step."""
        if any(binding.optimizer is optimizer for binding in self._bindings):
            return
        binding = Binding(self, optimizer)
        self._bindings.append(binding)
        for unit in {record.unit for record, _ in binding.records()}:
            self._prepare_states(unit, binding)
        for hook in self._bind_hooks:
            hook(self, binding)

    def on_bind(self, hook: Callable[[Engine, Binding], None]) -> None:
        """Call ``hook`` for every optimizer bound from now on."""
        self._bind_hooks.append(hook)

    def add_hook(self, handle: RemovableHandle) -> None:
        """Remove ``handle`` when the engine is detached."""
        self._hooks.append(handle)

    def owns(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether every one of ``parameters`` is managed here (and there is one)."""
        found = [self.record_of(parameter) for parameter in parameters]
        return bool(found) and all(record is not None for record in found)

    def record_of(self, parameter: torch.Tensor) -> ParamRecord | None:
        """The record of a managed parameter."""
        record: ParamRecord | None = self._records.get(parameter)
        return record

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """``torch.nn.utils.clip_grad_norm_`` for managed parameters.

        Returns:
            The total norm, 0-dim fp32 on the engine's device.

        Raises:
            UnsupportedError: ``update: immediate`` and ``max_norm`` would clip.
        """
        self.backward.finish_outside()
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if norm_type != 2.0 or not self.owns(tensors):
            return torch.nn.utils.clip_grad_norm_(tensors, max_norm, norm_type)
        records = [record for tensor in tensors if (record := self.record_of(tensor)) is not None]
        if isinstance(self.policy, Immediate):
            return self._norm_of_applied(records, max_norm)
        for record in records:
            if record.coefficient != ONE:
                self._apply_coefficient(record)
        self._measure({record.unit for record in records})
        present = [record for record in records if record.has_gradient]
        norm = total_norm(present)
        if not math.isinf(max_norm):
            clip_to(present, norm, float(max_norm))
        return as_tensor(norm, self.device)

    def step(self, binding: Binding) -> None:
        """``optimizer.step()`` of a bound optimizer."""
        self.backward.finish_outside()
        binding.assign()
        binding.was_skipped = False
        records = [record for record, _ in binding.records()]
        units = {record.unit for record in records}
        for unit in units:
            if unit.is_edge:
                self.edges.copy_gradient(unit, is_last=False)
        if isinstance(self.policy, Immediate):
            self._confirm(records)
        present = [record for record in records if record.has_gradient]
        foreign = binding.foreign()
        if self._is_finite(present):
            self._skips_in_a_row = 0
            if binding.rule is None:
                self._step_whole(binding, present)
            else:
                self.policy.step(present, [binding.entry(record, record.coefficient) for record in present])
            if isinstance(self.policy, RedoLog):
                self.policy.is_clipping = any(record.coefficient != ONE for record in present)
            if foreign and binding.rule is not None:
                binding.run_on(foreign)
            for unit in {record.unit for record in present if record.unit.is_edge}:
                if isinstance(self.policy, Immediate):
                    self.edges.consumed(unit)
                else:
                    self.edges.send_weights(unit)
        else:
            self._skip(binding)
        self._usual_count, self.backward.count = max(1, self.backward.count), 0
        self._fetch_first()

    def step_was_skipped(self, optimizer: Optimizer) -> bool:
        """Whether the last ``step()`` of ``optimizer`` was dropped because of non-finite gradients."""
        return any(binding.was_skipped for binding in self._bindings if binding.optimizer is optimizer)

    def binding_of(self, optimizer: Optimizer) -> Binding | None:
        """The binding of an optimizer."""
        return next((binding for binding in self._bindings if binding.optimizer is optimizer), None)

    def settle(self) -> None:
        """Wait for everything in flight and commit everything: host weights and states are final and idle."""
        self.backward.finish_outside()
        for unit in self.units:
            self.policy.settle(unit)
            self.backend.synchronize("host waits for weights refreshed", unit.refreshed)

    def master_of(self, record: ParamRecord) -> torch.Tensor | None:
        """A copy of the fp32 master of a settled parameter; None where the parameter itself is the master."""
        if record.spec.dtype == torch.float32:
            return None
        return self.policy.master_of(record)

    def load_state(self, record: ParamRecord, state: Mapping[str, Any]) -> None:
        """Take over step count, moments and master of a settled parameter; what is missing starts at zero."""
        self.policy.load_state(record, state)

    def report(self) -> EngineReport:
        """Memory, waits and counters so far."""
        return make_report(self)

    def detach(self) -> None:
        """Undo everything: plain CPU parameters with their gradients, original forwards, original optimizer step."""
        self.settle()
        for hook in self._hooks:
            hook.remove()
        for forward in self._forwards:
            forward.undo()
        for binding in self._bindings:
            binding.undo()
        for unit in self.units:
            for record in unit.records:
                self._release_parameter(record)
        self._bindings.clear()
        self.is_detached = True
        self.backend.close()
        self.workers.close()

    # -- what the driver calls -------------------------------------------------------------------------------------

    def enter(self, unit: Unit, where: Where, *, is_wide: bool, phase: Phase = Phase.INFERENCE) -> None:
        """The forward of ``unit`` begins: its weights are in the window, the next units are on their way."""
        self.backward.finish_outside()
        if is_wide:
            self.policy.settle(unit)
        self.schedule.visit(phase, unit)
        self._fetch(unit)
        self.window.lease(unit, where, is_wide=is_wide)
        self._fetch_ahead(phase, unit)

    def leave(self, unit: Unit) -> None:
        """The forward of ``unit`` is over."""
        self.window.release(unit)

    @contextlib.contextmanager
    def window_open(self, visit: Visit) -> Iterator[None]:
        """Around the forward of a visit."""
        unit = visit.unit
        self.enter(unit, Where.FORWARD, is_wide=visit.is_wide, phase=Phase.FORWARD)
        visit.steps = unit.steps
        try:
            yield
        finally:
            self.leave(unit)

    @contextlib.contextmanager
    def window_reopen(self, visit: Visit) -> Iterator[None]:
        """Around the recompute of a visit. In a backward the window stays open until the visit is closed."""
        if self.backward.is_inside():
            self.backward.open(visit)
            yield
            return
        self.enter(visit.unit, Where.FORWARD, is_wide=visit.is_wide)
        try:
            yield
        finally:
            self.leave(visit.unit)

    def is_wide(self, unit: Unit) -> bool:
        """Whether the forward runs outside autocast although the unit's working weights are narrower than the user's."""
        if torch.is_autocast_enabled(self.device.type):
            return False
        return any(record.shows_master for record in unit.records)

    # -- internals -------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        for unit in self.units:
            for record in unit.records:
                parameter = record.parameter
                self._records[parameter] = record
                if record.spec.is_trainable:
                    accumulated = self.edges.accumulated if unit.is_edge else self.backward.accumulated
                    self._hooks.append(
                        parameter.register_post_accumulate_grad_hook(
                            _Accumulated(self.backward.begin, accumulated, record)
                        )
                    )
                access = EdgeAccess(self, record) if unit.is_edge else ParameterAccess(self, record)
                guard(parameter, access)
                parameter.__class__ = record.guarded_class
            if unit.module is not None:
                self._forwards.append(UnitForward(self, unit, unit.module))
        self._hooks.append(self.model.register_forward_pre_hook(_own_checkpointing_off))

    def _prepare_states(self, unit: Unit, binding: Binding) -> None:
        rule = binding.rule
        is_split = (
            isinstance(self.policy, Immediate)
            and rule is not None
            and all(record.spec.working == record.spec.dtype == torch.bfloat16 for record in unit.trainable)
        )
        elements = unit.layout.state_elements
        if is_split and "master" not in unit.states:
            self._allocate(unit, "low", elements * 2)
        elif not self._is_own_master(unit) and "master" not in unit.states:
            self._allocate(unit, "master", elements * 4)
            self.policy.arithmetic.initialise_masters(unit.trainable)
        for name in rule.state_names if rule is not None else ():
            self._allocate(unit, name, elements * 4)
        if rule is None:
            return
        for record in unit.trainable:
            group = record.group
            states = len(rule.states_used(group)) if group is not None else len(rule.state_names)
            warm_up(rule, record.gradient_kind, record.weight_kind, self.config.update, states=states)

    def _is_own_master(self, unit: Unit) -> bool:
        # immediate: fp32 working weights are updated in place
        return isinstance(self.policy, Immediate) and all(
            record.spec.working == torch.float32 for record in unit.trainable
        )

    def _allocate(self, unit: Unit, name: str, nbytes: int) -> None:
        if name not in unit.states:
            unit.states[name] = self.memory.allocate(f"{name} of {unit.name}", nbytes, dma=False)

    def _fetch(self, unit: Unit) -> None:
        if unit.leases:
            return
        self.policy.absorb(unit)
        slot = unit.weight_slot
        if (slot is None or slot.content != unit.content) and unit.weights_are is not Weights.CURRENT:
            self.policy.refresh(unit)
        self.window.fetch(unit)

    def _fetch_ahead(self, phase: Phase, unit: Unit) -> None:
        for ahead in self.schedule.ahead(phase, unit, self.window.depth):
            if ahead.weights_are is Weights.CURRENT and not ahead.leases:
                self._fetch(ahead)

    def _fetch_for_backward(self, unit: Unit) -> None:
        self.schedule.visit(Phase.BACKWARD, unit)
        self._fetch(unit)
        self._fetch_ahead(Phase.BACKWARD, unit)

    def _fetch_first(self) -> None:
        unit = self.schedule.first
        if unit is None or unit.weights_are is not Weights.CURRENT:
            return
        self._fetch(unit)
        self._fetch_ahead(Phase.FORWARD, unit)

    def _expects_step(self) -> bool:
        # accumulate() and Trainer say so; a loop that accumulates by hand is expected to do as it did last time
        if not self.last_microbatch():
            self._saw_microbatch = True
            return False
        return self._saw_microbatch or self.backward.count >= self._usual_count

    def _measure(self, units: Iterable[Unit]) -> None:
        for unit in units:
            if unit.is_edge:
                self.edges.copy_gradient(unit, is_last=False)
            self.policy.measure(unit)
        for unit in units:
            self.backend.synchronize("host waits for norm", unit.measured)

    def _apply_coefficient(self, record: ParamRecord) -> None:
        if record.unit.is_edge:
            self.edges.apply_coefficient(record)
        else:
            self.policy.apply_coefficients(record.unit)

    def _is_finite(self, records: Sequence[ParamRecord]) -> bool:
        if self.config.nonfinite == "as_plain":
            return True
        self._measure({record.unit for record in records})
        bad = [r.name for r in records if r.square_sum is None or not math.isfinite(r.square_sum)]
        if bad and self.config.nonfinite == "raise":
            raise SlideFormerError(
                f"Non-finite gradients in {len(bad)} parameters, first {bad[0]}; no weight was changed by this step.",
                remedy="look for the cause there, or set nonfinite: skip",
            )
        return not bad

    def _skip(self, binding: Binding) -> None:
        binding.was_skipped = True
        self.skipped += 1
        self._skips_in_a_row += 1
        logger.warning("SlideFormer: step dropped, its gradients are not finite (%d so far).", self.skipped)
        if self._skips_in_a_row >= MOST_SKIPS:
            raise SlideFormerError(
                f"{MOST_SKIPS} steps in a row had non-finite gradients and were dropped.",
                remedy="lower the learning rate, check the data, or set nonfinite: as_plain",
            )

    def _step_whole(self, binding: Binding, records: Sequence[ParamRecord]) -> None:
        """Run an optimizer without a fused rule as itself, on fp32 master views."""
        units = {record.unit for record in records}
        for unit in units:
            self.policy.apply_coefficients(unit)
            self.policy.settle(unit)
            self.backend.synchronize("host waits for gradient", unit.gradient.filled if unit.gradient else None)
            self.backend.synchronize("host waits for norm", unit.measured)
        with as_masters(records):
            binding.run_on(binding.foreign() + [record.parameter for record in records])
        for unit in units:
            self.policy.adopt(unit)

    def _confirm(self, records: Sequence[ParamRecord]) -> None:
        if not isinstance(self.policy, Immediate):
            return
        applied = [record for record in records if id(record) in self.policy.applied]
        self.policy.confirm(records)
        if self.config.nonfinite == "as_plain" or not applied:
            return
        for unit in {record.unit for record in applied}:
            self.backend.synchronize("host waits for norm", unit.measured)
        bad = [r.name for r in applied if r.square_sum is not None and not math.isfinite(r.square_sum)]
        if bad:
            raise SlideFormerError(
                f"Non-finite gradients in {len(bad)} parameters, first {bad[0]}. update: immediate had already applied"
                " them.",
                remedy="restore a checkpoint and set update: exact, which can drop such a step",
            )

    def _norm_of_applied(self, records: Sequence[ParamRecord], max_norm: float) -> torch.Tensor:
        if not math.isinf(max_norm):
            state = "The gradients of this step have been applied already." if self.policy.applied else ""  # type: ignore[union-attr]  # Immediate here
            raise UnsupportedError(
                f"update: immediate updates weights as gradients arrive and cannot clip by norm. {state}".strip(),
                remedy="set update: exact (same speed when clipping is rarely active), or max_grad_norm to 0",
            )
        for unit in {record.unit for record in records}:
            self.policy.measure(unit)
            self.backend.synchronize("host waits for norm", unit.measured)
        return as_tensor(total_norm(records), self.device)

    def _release_parameter(self, record: ParamRecord) -> None:
        parameter = record.parameter
        gradient = parameter.grad
        unguard(parameter)
        parameter.__class__ = record.own_class
        self._records.pop(parameter, None)
        with torch.no_grad():
            parameter.data = parameter.data.to("cpu", copy=True)
            if gradient is not None:
                parameter.grad = gradient.detach().to("cpu", copy=True)


class _Accumulated:
    """Post-accumulate hook of one parameter."""

    def __init__(self, begin: Callable[[], None], accumulated: Callable[[ParamRecord], None], record: ParamRecord) -> None:
        self._begin = begin
        self._accumulated = accumulated
        self._record = record

    def __call__(self, parameter: torch.Tensor) -> None:
        self._begin()
        self._accumulated(self._record)


def _own_checkpointing_off(model: nn.Module, args: object) -> None:
    """Units are recomputed by the engine; Hugging Face's own checkpointing around them would recompute twice."""
    for module in model.modules():
        if module.__dict__.get("gradient_checkpointing") and isinstance(getattr(module.forward, "__func__", None), UnitForward):
            module.__dict__["gradient_checkpointing"] = False
