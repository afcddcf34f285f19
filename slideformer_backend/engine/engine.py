"""The engine of one model: composes the parts and offers what integrations call."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..config import SlideFormerConfig
from ..optim.workers import WorkerPool, default_threads
from ..storage import HostMemory
from ..trace import Recorder
from ..transfer import Monitor, backend_for
from .admission import Admission
from .arithmetic import Arithmetic
from .backward import Backward
from .binding import Binding
from .build import checked_parts, frozen_overlaps
from .custody import release_parameters, salvage, take_parameters
from .edges import Edges
from .feed import Feed
from .hooks import Removable
from .identity import ByIdentity
from .immediate import Immediate
from .inputs import Taken
from .moves import move_to_device
from .norms import Norms
from .pace import Pace
from .redo_log import RedoLog
from .report import EngineReport, make_report
from .residency import Residency
from .schedule import Phase, Schedule
from .spilling import begin_spill, check_nvme, open_boundaries, open_spill, open_tier, refuse_whole
from .stand_in import StandIn
from .states import allocate_states, load_states, master_of, moment_names, moment_of
from .stepper import Stepper
from .strategy import check_strategy, device_units_for, preflight_for, units_for
from .unit import ParamRecord, Unit, Where
from .visit import Visit
from .window import Window
from .writes import Watch, carry_over, replayed

SWITCH_INTERVAL = 2e-4
"""Seconds after which a thread that wants the GIL gets it. Workers need it for microseconds at both ends of a kernel;
at Python's 5 ms they stand still for as long as the kernel runs (measured: an advance of 100 M parameters took 57 ms
instead of 38)."""


class Engine:
    """Drives one model. Built by ``attach``; see there for the arguments.

    Attributes:
        last_microbatch: whether the running backward is the last before ``step()``; set by the integration.
    """

    def __init__(
        self,
        model: nn.Module,
        config: SlideFormerConfig,
        device: torch.device,
        autocast_dtype: torch.dtype | None = None,
        monitor: Monitor | None = None,
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        check_nvme(config)  # refuses what it must before anything is changed
        check_strategy(config)
        parts, overlaps = checked_parts(model, autocast_dtype), frozen_overlaps(model)
        self._preflight = preflight_for(model, parts, config, device, autocast_dtype, optimizers)
        terms = self._preflight.check()
        tier = open_tier(config, terms)
        self.model = model
        self.config = config
        self.last_microbatch: Callable[[], bool] = lambda: True
        self.backend = backend_for(device, monitor)
        self.device = self.backend.device
        self.backend.record(Recorder(self.device, config.trace) if config.trace is not None else None)
        pin = self.device.type == "cuda" if config.pin_memory == "auto" else config.pin_memory
        self.memory = HostMemory(pin=pin and self.device.type == "cuda")
        self.spill = open_spill(self.backend, self.memory, parts, terms, tier)
        self.boundaries = open_boundaries(config, self.backend, self.memory)
        self.units = units_for(config, parts, self.device, model, self.memory, self.spill, terms)
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch_interval, SWITCH_INTERVAL))
        self.sliding = [unit for unit in self.units if not unit.is_resident]
        threads = default_threads() if config.cpu_threads == "auto" else config.cpu_threads
        self.workers = WorkerPool(threads)
        self.window = Window(self.backend, self.units, terms.prefetch, self.spill.weights)
        policy = Immediate if config.update == "immediate" else RedoLog
        arithmetic = Arithmetic(self.workers)
        norms = Norms(self.backend, self.memory, arithmetic)
        self.policy = policy(self.backend, self.window, self.memory, arithmetic, norms, self.spill)
        self.policy.spare_buffers = terms.spares
        edges = [unit for unit in self.units if unit.is_resident]
        device_units = device_units_for(config, self.backend, norms, self.memory, self.workers, self.policy, self.units)
        self.edges = Edges(self.backend, edges, self.policy, device_units)
        self.residency = Residency(config, self.backend, self.window, self.policy, self.memory)
        if config.activations == "auto":
            self.boundaries.lacks_room = self.residency.lacks_room
        if terms.edges_update_on_device and config.strategy == "slide":  # lsp makes them so
            self.residency.start_edges(edges)
        begin_spill(self.spill, self.units, terms)
        self.feed, self.pace = Feed(self), Pace(config, self.backend, self.spill, self.memory)
        lease, expects = self.feed.lease_for_backward, self._expects_step
        self.backward = Backward(self.backend, self.window, self.policy, self.edges, lease, expects)
        self.stepper = Stepper(config, self.backend, self.policy, self.edges)
        self.schedule = Schedule(self.sliding)
        self.taken = Taken()
        self.is_detached = False
        self._bindings: list[Binding] = []
        self._bind_hooks: list[Callable[[Engine, Binding], None]] = []
        self._detach_hooks: list[Callable[[], None]] = []
        self._records: ByIdentity[ParamRecord] = ByIdentity()
        self._usual_count, self._saw_microbatch = 1, False
        self._hooks, self._forwards = take_parameters(self, self._records)
        self.admission = Admission(self, self._preflight, self._records, overlaps)

    # -- what integrations call ------------------------------------------------------------------------------------

    def bind(self, optimizer: Optimizer) -> None:
        """Make ``optimizer.step`` ours. Idempotent; parameters of other models keep their own step.

        An optimizer bound later takes over parameters of an earlier one, and starts with fresh states as in torch.

        Raises:
            UnsupportedError: its step cannot run on master weights (it needs a closure).
            PlanError: its states cannot fit the host's memory; nothing was allocated.
        """
        self._bindings = [binding for binding in self._bindings if binding.is_alive]
        self.admission.look()
        if self.binding_of(optimizer) is not None:
            return
        self._preflight.before_bind(optimizer)
        binding = Binding(self, optimizer)
        self._bindings.append(binding)
        self.prepare_states(binding, binding.assign(takes_over=True))
        for hook in self._bind_hooks:
            hook(self, binding)

    def on_bind(self, hook: Callable[[Engine, Binding], None]) -> None:
        """Call ``hook`` for every optimizer bound from now on."""
        self._bind_hooks.append(hook)

    def on_detach(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` when all has settled and nothing is undone yet."""
        self._detach_hooks.append(hook)

    def add_hook(self, *handles: Removable) -> None:
        """Remove ``handles`` when the engine is detached."""
        self._hooks += handles

    def owns(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether every one of ``parameters`` is managed here (and there is one)."""
        found = [self.record_of(parameter) for parameter in parameters]
        return bool(found) and None not in found

    @property
    def newest_bindings(self) -> list[Binding]:
        """The optimizers that are alive, the one bound last first."""
        return [binding for binding in reversed(self._bindings) if binding.is_alive]

    def record_of(self, parameter: torch.Tensor) -> ParamRecord | None:
        """The record of a managed parameter."""
        return self._records.get(parameter)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """``torch.nn.utils.clip_grad_norm_``; parameters of other models and other norms go the way of torch.

        Returns:
            The total norm before clipping, 0-dim fp32 on the engine's device.

        Raises:
            UnsupportedError: under ``update: immediate``, unless ``max_norm`` is infinite (a mere measurement).
        """
        self.backward.finish_outside()
        self.admission.look_behind()
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        ours = [(tensor, self.record_of(tensor)) for tensor in tensors]
        records = [record for _, record in ours if record is not None]
        is_mixed = any(record is None and tensor.grad is not None for tensor, record in ours)  # not merely frozen
        if norm_type != 2.0 or not records or is_mixed:
            return torch.nn.utils.clip_grad_norm_(tensors, max_norm, norm_type)
        return self.stepper.clip(records, float(max_norm))

    def step(self, binding: Binding) -> None:
        """``optimizer.step()`` of a bound optimizer."""
        self.backward.finish_outside()
        self.admission.look_behind()
        self.prepare_states(binding, binding.assign())
        self.backend.step()
        self.stepper.step(binding)
        self._usual_count, self.backward.count = max(1, self.backward.count), 0
        self.residency.after_step()
        self.pace.after_step()
        self.feed.fetch_first()
        self.feed.read_ahead()

    def step_was_skipped(self, optimizer: Optimizer) -> bool:
        """Whether the last ``step()`` of ``optimizer`` was dropped because of non-finite gradients."""
        binding = self.binding_of(optimizer)
        return binding is not None and binding.was_skipped

    def binding_of(self, optimizer: Optimizer) -> Binding | None:
        """The binding of an optimizer."""
        return next((found for found in self._bindings if found.is_bound_to(optimizer)), None)

    def settle(self) -> None:
        """Wait for everything in flight and commit everything: host weights and states are final and idle."""
        self.backward.finish_outside()
        for unit in self.units:
            if unit.updates_on_device:
                self.edges.device_units.settle(unit)
        self.policy.settle(*self.units)
        self.spill.check()

    def master_of(self, record: ParamRecord) -> torch.Tensor | None:
        """A copy of the fp32 master of a settled parameter; None where the parameter itself is the master."""
        return master_of(record, self.spill)

    def moment_of(self, record: ParamRecord, name: str) -> torch.Tensor:
        """A copy on the host of a moment of a settled parameter, in its shape."""
        return moment_of(record, name, self.spill).to("cpu", copy=True)

    def load_state(self, record: ParamRecord, state: Mapping[str, Any]) -> None:
        """Take over step count, moments and master of a settled parameter; what is missing starts at zero."""
        if not record.spec.is_trainable:
            if not state:
                return  # it has none and gets none
            self.admission.admit([record.parameter])
        binding, group = record.binding, record.group
        names = binding.rule.states_used(group) if binding is not None and binding.rule and group is not None else ()
        load_states(record, state, names, self.spill)

    def report(self) -> EngineReport:
        """Memory, waits and counters so far."""
        return make_report(self)

    def detach(self) -> None:
        """Undo everything: plain CPU parameters with their gradients, original forwards, original optimizer step.

        After an operation has failed its exception is raised once more, when everything is undone: parameters then hold
        the weights of the last completed step as far as they could be reached, without gradients.
        """
        gradients: dict[int, torch.Tensor] = {}
        is_settled = False
        try:
            self.settle()
            for record in (record for unit in self.units for record in unit.records):
                gradient = record.parameter.grad
                if gradient is not None and not isinstance(gradient, StandIn):
                    gradients[id(record)] = gradient.detach().to("cpu", copy=True)
            for leave in self._detach_hooks:
                leave()
            is_settled = True
        finally:
            if not is_settled:
                salvage(self)
            self._undo(gradients if is_settled else {}, is_failing=not is_settled)

    def _undo(self, gradients: Mapping[int, torch.Tensor], *, is_failing: bool) -> None:
        hooks = [hook.remove for hook in self._hooks]
        for undo in (*hooks, *[forward.undo for forward in self._forwards], *[b.undo for b in self._bindings]):
            undo()
        lost = release_parameters(self, gradients)
        self._records.clear()
        self._bindings.clear()
        self.is_detached = True
        self.boundaries.close()
        sys.setswitchinterval(self._switch_interval)
        self.backend.close()
        self.workers.close()
        self.boundaries.abandon()
        self.spill.close()
        if lost is not None and not is_failing:
            raise lost

    # -- what the driver calls -------------------------------------------------------------------------------------

    def enter(self, unit: Unit, where: Where, *, is_wide: bool, phase: Phase = Phase.INFERENCE) -> Watch:
        """The forward of ``unit`` begins: its weights are in the window, the next units are on their way."""
        self.backward.finish_outside()
        if is_wide:
            self.policy.settle(unit)
        self.schedule.visit(phase, unit)
        self.feed.fetch(unit)
        self.window.lease(unit, where, is_wide=is_wide)
        self.feed.fetch_ahead(phase, unit)
        self.backend.begin("forward", unit.name)
        return Watch(unit)

    def leave(self, unit: Unit, watch: Watch) -> None:
        """The forward of ``unit`` is over; what it wrote into its own parameters counts."""
        self.backend.end("forward", unit.name)
        writes = watch.take()
        self.window.release(unit)
        if writes:
            carry_over(self, unit, writes)

    @contextlib.contextmanager
    def window_open(self, visit: Visit) -> Iterator[None]:
        """Around the forward of a visit."""
        unit = visit.unit
        watch = self.enter(unit, Where.FORWARD, is_wide=visit.is_wide, phase=Phase.FORWARD)
        visit.steps = unit.steps
        try:
            yield
        finally:
            self.leave(unit, watch)

    @contextlib.contextmanager
    def window_reopen(self, visit: Visit) -> Iterator[None]:
        """Around the recompute of a visit. In a backward the window stays open until the visit is closed."""
        if self.backward.is_inside():
            self.backward.open(visit)
            before = self.residency.before_recompute()
            self.backend.begin("recompute", visit.unit.name)
            try:
                with replayed(self, visit):
                    yield
            finally:  # a recompute usually ends by the exception that stops it early
                self.backend.end("recompute", visit.unit.name)
                self.residency.observe_recompute(visit.unit, before)
            return
        self.enter(visit.unit, Where.FORWARD, is_wide=visit.is_wide)
        try:
            with replayed(self, visit):
                yield
        finally:
            self.backend.end("forward", visit.unit.name)
            self.window.release(visit.unit)

    def is_wide(self, unit: Unit) -> bool:
        """Whether the forward runs outside autocast although working weights are narrower than the user's."""
        return not torch.is_autocast_enabled(self.device.type) and any(record.shows_master for record in unit.records)

    def begin_forward(self) -> None:
        """A forward of the whole model with gradients begins: the time to move units, if they should move."""
        self.backward.thread = threading.get_ident()
        self.backward.finish_outside()
        self.boundaries.begin_forward()
        self.spill.check()
        self.admission.look()
        if not self.residency.is_due():
            return
        if not all(self.residency.can_move(unit) for unit in self.sliding):
            return  # gradients are being accumulated: after the next step
        placement = self.residency.decide(self.sliding, self.boundaries, self._usual_count)
        chosen = set(placement.resident)
        self.boundaries.place(away=placement.activations != "gpu")
        for unit in [unit for unit in self.sliding if unit.index in chosen]:
            self.move_to_device(unit)
        self.window.grow(self.sliding, placement.slots)
        self.window.grow_gradients(self.sliding, placement.gradients)

    def move_to_device(self, unit: Unit) -> None:
        """Make a sliding unit resident: weights, states, updates on the device. Training goes on bit for bit."""
        move_to_device(self, unit)

    def recomputes(self, unit: Unit) -> bool:
        """Whether a unit recomputes its activations in backward; one that does not keeps its weight slot till then."""
        placement = self.residency.placement
        return placement is None or unit.index not in placement.kept_activations

    # -- internals -------------------------------------------------------------------------------------------------

    def prepare_states(self, binding: Binding, records: Sequence[ParamRecord]) -> None:
        """States and kernels for parameters that an optimizer steps for the first time."""
        refuse_whole(binding, records)
        for unit in {record.unit for record in records}:
            self.policy.settle(unit)
            if unit.updates_on_device:
                self.edges.device_units.settle(unit)
                self.edges.device_units.allocate(unit, binding.rule)
                continue
            allocate_states(unit, binding.rule, self.spill, in_place=isinstance(self.policy, Immediate))
        for record in records:
            if record.steps:
                load_states(record, {}, moment_names(record), self.spill)
        binding.warm_up(records, self.config.update)

    def _expects_step(self) -> bool:
        # accumulate() and Trainer say so; a loop that accumulates by hand is expected to do as it did last time
        if not self.last_microbatch():
            self._saw_microbatch = True
            return False
        return self._saw_microbatch or self.backward.count >= self._usual_count
