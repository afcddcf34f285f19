"""Residency: after the first steps, spare device memory takes in whole units (DESIGN 6)."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Literal

import torch

from ..config import SlideFormerConfig
from ..errors import StorageError
from ..plan.host_budget import probe_host_budget
from ..plan.ledger import resident_bytes
from ..plan.machine import free_space
from ..plan.placement import (
    Placement,
    Steps,
    UnitCost,
    begin_away,
    edges_may_update_on_device,
    place,
    spare_device_bytes,
)
from ..storage import HostMemory
from ..transfer import Backend
from .boundaries import Boundaries
from .file_shelf import FileShelf
from .policy import UpdatePolicy
from .spill import Spill
from .spilling import open_shelf
from .states import master_of
from .unit import ParamRecord, Unit, Where
from .whole import move_own_states
from .window import Window

logger = logging.getLogger(__name__)

Away = Literal["host", "nvme"]
OBSERVED_STEPS = 3
"""Steps measured before units move. The first compiles and takes memory, the second still waits for its update."""


class Residency:
    """Moves units to the device.

    Args:
        config: ``gpu_memory`` caps what the device may hold, ``recompute`` whether recompute may be skipped.
        backend: lanes and device.
        window: whose slots a moved unit leaves.
        policy: settles a unit before it moves.
        memory: host allocator.
    """

    def __init__(
        self, config: SlideFormerConfig, backend: Backend, window: Window, policy: UpdatePolicy, memory: HostMemory
    ) -> None:
        self.placement: Placement | None = None
        self._config = config
        self._backend = backend
        self._window = window
        self._policy = policy
        self._memory = memory
        self._steps = 0
        self._stepped = -math.inf
        self._step_seconds = math.inf
        self._peak = 0
        self._worked: dict[str, float] = {}
        self._busiest: float | None = None
        self._activations: dict[int, int] = {}
        self._held: int | None = None
        self._first_recompute = self._risen = 0
        self._highest: tuple[int, int] | None = None
        self._surplus: dict[int, int] = {}

    @property
    def budget(self) -> int:
        """Device bytes the plan may use; 0 where nothing is measured (a CPU-only machine without ``gpu_memory``)."""
        if self._backend.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self._backend.device)
        usable = free + torch.cuda.memory_reserved(self._backend.device)
        cap = self._config.gpu_memory
        return min(usable, total) if cap == "auto" else min(usable, cap)

    @property
    def room(self) -> int | None:
        """Device bytes that are free within the budget at this moment; None where nothing is measured."""
        device = self._backend.device
        return self.budget - torch.cuda.memory_allocated(device) if device.type == "cuda" else None

    @property
    def spare(self) -> int | None:
        """Device bytes that were free at the peak; None where nothing is measured."""
        device = self._backend.device
        if device.type != "cuda":
            return None
        return spare_device_bytes(self.budget, torch.cuda.max_memory_allocated(device))

    def start_edges(self, units: Sequence[Unit]) -> None:
        """Before states are allocated: edge units update on the device.

        Their gradients arrive last and their weights are needed first, so their update is exposed in every step.
        """
        for unit in units:
            unit.updates_on_device = True
            unit.weights = self._memory.allocate(f"weights of {unit.name}", 0, dma=False)

    def may_start_edges(self, units: Sequence[Unit]) -> bool:
        """Whether a quarter of the budget holds these edge units with their states."""
        return edges_may_update_on_device(sum(map(_resident_bytes, units)), self.budget)

    def before_recompute(self) -> int | None:
        """Device bytes in use, while that is observed. The first recompute of a step also notes by how much the peak so
        far lies above them: at least what forward and loss held beside them."""
        device = self._backend.device
        if self._steps >= OBSERVED_STEPS or device.type != "cuda":
            return None
        held = torch.cuda.memory_allocated(device)
        if self._held is None:
            self._held, self._risen = held, torch.cuda.max_memory_allocated(device) - held
        return held

    def observe_recompute(self, unit: Unit, before: int | None) -> None:
        """A recompute of ``unit`` left activations on the device, where ``before`` bytes were in use; each graph that
        still waits for its backward would hold as much, if it kept them."""
        if before is None:
            return
        nbytes = torch.cuda.memory_allocated(self._backend.device) - before
        self._first_recompute = self._first_recompute or nbytes
        waiting = sum(not visit.is_done for visit in unit.visits)
        self._activations[unit.index] = max(nbytes * max(1, waiting), self._activations.get(unit.index, 0))

    def after_step(self) -> None:
        """Count a step and, while steps are observed, note its peak and what host and link did in it."""
        self._steps += 1
        now = time.perf_counter()
        seconds, self._stepped = now - self._stepped, now
        is_fastest, self._step_seconds = seconds < self._step_seconds, min(seconds, self._step_seconds)
        if self._steps > OBSERVED_STEPS:
            return
        busiest = self._busiest_share(seconds)
        if is_fastest:
            self._busiest = busiest
        if self._backend.device.type == "cuda":
            self._note_peak(torch.cuda.max_memory_allocated(self._backend.device))

    def _note_peak(self, peak: int) -> None:
        """Note the peak so far, with what was held at the first recompute of the step that last exceeded those before,
        and how large that was. What forward and loss of a step held beside is known to be no more than the peak until
        then; the least such bound of steps with as many tokens or more counts, since later ones begin with what the
        first update allocates and the allocator's peak only grows. Recomputes of the same tokens differ: the first of
        all takes workspaces too."""
        if self._held is not None:
            size = self._first_recompute
            self._surplus[size] = min(self._risen, self._surplus.get(size, self._risen))
        if peak > self._peak:
            self._peak = peak
            self._highest = None if self._held is None else (self._held, self._first_recompute)
        self._held, self._first_recompute = None, 0

    @property
    def _recomputed(self) -> int:
        """Device bytes of a recompute by which the peak lies above what its step held until its backward."""
        if self._highest is None:
            return 0
        held, size = self._highest
        surplus = min(found for other, found in self._surplus.items() if other >= size)
        return max(0, min(size, self._peak - held - surplus))

    def _busiest_share(self, seconds: float) -> float | None:
        """Which share of a step, of so many seconds, the busiest of host and link has worked, if that is what it would
        work in others too: updates are computed once, and no drive is waited for."""
        before, self._worked = self._worked, self._backend.busy()
        worked = {name: total - before.get(name, 0.0) for name, total in self._worked.items()}
        busiest = max(worked["update"], worked["h2d"] + worked["back"], worked["d2h"] + worked["out"])
        is_typical = self._policy.spill.tier is None and not self._policy.is_clipping
        return busiest / seconds if is_typical else None

    def is_due(self) -> bool:
        """Whether units should be moved before the next forward."""
        if self._config.strategy == "lsp":
            return False  # all are there
        return self.placement is None and self._steps >= OBSERVED_STEPS and self.budget > 0

    def lacks_room(self, nbytes: int) -> bool:
        """Whether inputs of units, of ``nbytes`` each, leave while the first steps are observed."""
        room = self.room if self.placement is None else None
        return room is not None and begin_away(nbytes * self._window.units, room, self._host_room())

    def decide(self, sliding: list[Unit], boundaries: Boundaries, micro_batches: int) -> Placement:
        """Choose what moves, from what the first steps have shown."""
        budget, slot = self.budget, self._window.weight_slot_bytes
        gradient = self._window.gradient_slot_bytes
        saved, boundary = self._activations, boundaries.share(len(sliding))
        costs = [
            UnitCost(u.index, _resident_bytes(u), saved.get(u.index, 0), slot(u), gradient(u), boundary)
            for u in sliding
        ]
        leaving, were_away = boundaries.freeable(len(costs)), boundaries.is_on
        spare = spare_device_bytes(budget, self._peak) - (leaving if were_away else 0)
        away: Away = "host" if were_away or leaving <= self._host_room() // 2 else "nvme"
        keeps, where = self._config.recompute, self._config.activations
        slots = max(map(self._window.weight_slots, sliding), default=0)
        steps = Steps(micro_batches, slots, self._busiest, self._recomputed if micro_batches == 1 else 0)

        def placed(leaving: int) -> Placement:
            return place(
                costs, spare, recompute=keeps, activations=where, boundaries=leaving, steps=steps, away=away
            )  # fmt: skip

        self.placement = placed(leaving)
        if away == "nvme" and self.placement.activations == "nvme" and not boundaries.is_on:
            shelf = self._files_for(leaving, micro_batches)
            if shelf is not None:
                boundaries.use(shelf)
            else:
                self.placement = placed(0)  # neither the host nor a disk has room for them
        logger.info("SlideFormer: %s", self.placement.reason)
        return self.placement

    def _files_for(self, leaving: int, micro_batches: int) -> FileShelf | None:
        """Files for ``leaving`` bytes of inputs per forward, if the disk has room for them and carries them out and
        back in half the time of a step, as measured so far."""
        path = self._config.nvme_path
        if path is None or not leaving or free_space(path) < 2 * leaving:
            return None
        shelf = None
        try:
            shelf = open_shelf(self._config, self._backend, self._memory)
            seconds = shelf.seconds(leaving) * micro_batches
        except StorageError as error:
            logger.warning("SlideFormer: inputs of units stay on the device: %s", error)
            seconds = math.inf
        if shelf is not None and seconds > self._step_seconds / 2:
            logger.info("SlideFormer: inputs of units stay: NVMe would take %.2f s of a step for them.", seconds)
            shelf.abandon()
            shelf = None
        return shelf

    def _host_room(self) -> int:
        """Host bytes that are still free, within ``host_memory``."""
        cap, room = self._config.host_memory, probe_host_budget().available
        return room if cap == "auto" else min(room, cap - self._memory.allocated)

    def can_move(self, unit: Unit) -> bool:
        """Whether nothing of the unit is in use or in flight that a move would lose."""
        self._policy.settle(unit)
        return not unit.leases and unit.gradient is None and all(visit.is_done for visit in unit.visits)

    def move_to_device(self, unit: Unit) -> None:
        """Weights, masters and moments of a settled unit go to the device; its host memory is given back."""
        device = self._backend.device
        self._policy.spill.present(unit, writes=True)
        self._window.forget(unit)
        for record in unit.records:
            parameter = record.parameter
            states = _states_of(record, unit, self._policy.spill)
            record.host = record.host.to(device, copy=True)
            parameter.__class__ = record.own_class
            parameter.data = record.host  # not read back: through the guard, that would be the user's access
            parameter.__class__ = record.guarded_class
            record.spec = record.spec._replace(working=record.spec.dtype)
            record.device_states = {name: state.to(device) for name, state in states.items()}
            move_own_states(record, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the host memory is unregistered next
        unit.where = Where.RESIDENT
        unit.updates_on_device = True
        unit.updated = unit.made = unit.sent = unit.measured = None
        self._policy.spill.release(unit)
        unit.states.clear()
        unit.weights = self._memory.allocate(f"weights of {unit.name}", 0, dma=False)
        self._policy.release_pool(unit)


def _states_of(record: ParamRecord, unit: Unit, spill: Spill) -> dict[str, torch.Tensor]:
    """Host masters and moments, flat fp32; the master only where the parameter is not its own."""
    if not record.spec.is_trainable:
        return {}
    offset, count = record.place.state, record.numel
    states = {name: slab.view(torch.float32, offset * 4, count) for name, slab in unit.states.items() if name != "low"}
    if "low" in unit.states:
        master = master_of(record, spill)
        if master is not None:
            states["master"] = master.view(-1)
    if record.spec.dtype == torch.float32:
        states.pop("master", None)
    return states


def _resident_bytes(unit: Unit) -> int:
    """Weights, gradient, master and two moments of a unit on the device."""
    return resident_bytes([record.spec for record in unit.records])
