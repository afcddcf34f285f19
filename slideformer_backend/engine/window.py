"""The window: device slots for weights and gradients, and the moves between host and device."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from ..errors import StateError
from ..plan.layout import SIZE_TOLERANCE, size_classes
from ..storage import Tracked
from ..transfer import Backend, Ticket, copy
from .ring import Ring
from .unit import ParamRecord, Unit, Weights, Where


class WeightSlot(Tracked):
    """A flat device buffer for one unit's working weights.

    ``loaded`` is the transfer that filled it; ``released`` marks the last compute that read it. Between two leases a
    slot keeps its content: ``unit`` and ``content`` say whose, and of which update.
    """

    def __init__(self, name: str, flat: torch.Tensor) -> None:
        super().__init__(name, flat)
        self.unit: Unit | None = None
        self.content = -1
        self.loaded: Ticket | None = None
        self.released: Ticket | None = None
        self.is_leased = False
        self.is_awaited = False
        self.last_used = 0
        self._views: dict[tuple[int, torch.dtype, torch.Size], torch.Tensor] = {}

    def view(self, record: ParamRecord) -> torch.Tensor:
        """The parameter's part of the slot. Units of one kind share their views: making three tensors per parameter
        took a tenth of the main thread's time in a step of small layers."""
        key = record.place.weight, record.spec.working, record.spec.shape
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = record.weight_view(self.flat)
        return found


class GradientSlot(Tracked):
    """A flat device buffer for one unit's gradient; ``drained`` is the transfer that took its last content away.
    ``holds``: the host does not have what earlier micro-batches left in it."""

    def __init__(self, name: str, flat: torch.Tensor) -> None:
        super().__init__(name, flat)
        self.drained: Ticket | None = None
        self.holds = False
        self._views: dict[tuple[int, torch.dtype, torch.Size], torch.Tensor] = {}

    def view(self, record: ParamRecord) -> torch.Tensor:
        """The parameter's part of the slot; made once, as for weights."""
        key = record.place.gradient, record.spec.dtype, record.spec.shape
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = record.gradient_view(self.flat)
        return found


class Window:
    """Leases weight slots and gradient slots to units.

    Args:
        backend: lanes and device.
        units: all units. Those that slide get slots; edge units only have a gradient class, for buffers on the host.
        depth: how many units are fetched ahead of the one that computes.
        files: brings weights that wait in files.
    """

    GRADIENT_SLOTS = 2
    """One drains to the host while the next unit's gradients are written."""

    def __init__(self, backend: Backend, units: Iterable[Unit], depth: int, files: Ring) -> None:
        self.backend = backend
        self.depth = depth
        self._files = files
        known = list(units)
        sliding = [unit for unit in known if not unit.is_resident]
        self.units = len(sliding)
        self._weight_class = size_classes(unit.layout.weight_bytes for unit in sliding)
        self._gradient_class = size_classes(unit.layout.gradient_bytes for unit in known if unit.layout.gradient_bytes)
        self._weight_slots: dict[int, list[WeightSlot]] = {size: [] for size in set(self._weight_class.values())}
        sizes = {self.gradient_class(unit) for unit in sliding if unit.layout.gradient_bytes}
        self._gradient_slots: dict[int, list[GradientSlot]] = {size: [] for size in sizes}
        self._gradient_slot_bytes = 0
        self._turn = itertools.count(1)
        for size in self._weight_slots:
            self._weight_slots[size] = self._new_weight_slots(size, sliding)
        for size, free in self._gradient_slots.items():
            free.extend(self._new_gradient_slot(size) for _ in range(self.GRADIENT_SLOTS))

    @property
    def device_bytes(self) -> int:
        """Bytes of all slots."""
        slots = itertools.chain(*self._weight_slots.values())
        return sum(slot.flat.numel() for slot in slots) + self._gradient_slot_bytes

    def gradient_class(self, unit: Unit) -> int:
        """Size in bytes of the buffers that hold this unit's gradient."""
        return self._gradient_class[unit.layout.gradient_bytes]

    def relearn(self, units: Iterable[Unit]) -> list[int]:
        """Weights or gradients of some of ``units`` (all there are) have another size from now on, or slide now. Sizes
        that were known keep their class, so that buffers in use stay where they belong.

        Returns:
            Classes of gradients that no unit needs any more. Their device slots are gone.
        """
        known = list(units)
        sliding = [unit for unit in known if not unit.is_resident]
        _extend(self._weight_class, {unit.layout.weight_bytes for unit in sliding})
        _extend(self._gradient_class, {unit.layout.gradient_bytes for unit in known if unit.layout.gradient_bytes})
        for size in {self._weight_class[unit.layout.weight_bytes] for unit in sliding} - self._weight_slots.keys():
            self._weight_slots[size] = self._new_weight_slots(size, sliding)
        needed = {self.gradient_class(unit) for unit in sliding if unit.layout.gradient_bytes}
        for size in self._gradient_slots.keys() - needed:
            for slot in self._gradient_slots.pop(size):
                self._gradient_slot_bytes -= size
                self.backend.order("compute after gradient slot drained", slot.drained)  # which gets this memory next
                self.backend.touch(f"end of {slot.name}", writes=(slot,))
        for size in needed - self._gradient_slots.keys():
            self._gradient_slots[size] = [self._new_gradient_slot(size) for _ in range(self.GRADIENT_SLOTS)]
        kept = {self.gradient_class(unit) for unit in known if unit.layout.gradient_bytes}
        gone = set(self._gradient_class.values()) - kept
        self._gradient_class = {size: found for size, found in self._gradient_class.items() if found in kept}
        return sorted(gone)

    @staticmethod
    def holds(unit: Unit) -> bool:
        """Whether a slot has the weights of ``unit`` as they are now."""
        return unit.weight_slot is not None and unit.weight_slot.content == unit.content

    def fetch(self, unit: Unit) -> None:
        """Start bringing the working weights of ``unit`` to the device; does not block.

        The host working weights must be current or about to be (``unit.made``).
        """
        slot = unit.weight_slot
        if slot is not None and slot.content == unit.content:
            slot.is_awaited = not slot.is_leased
            return
        if unit.leases:
            raise StateError(f"the weights of {unit.name} changed while it computes with them")
        if unit.weights_are is not Weights.CURRENT:
            raise StateError(f"fetch of {unit.name} while its working weights are {unit.weights_are.name}")
        slot = slot or self._victim(unit)
        self._evict(slot)
        slot.unit, slot.content, slot.is_awaited, slot.last_used = unit, unit.content, True, next(self._turn)
        unit.weight_slot = slot
        size = unit.layout.weight_bytes
        weights, target = unit.weights, slot.flat[:size]

        def run() -> None:
            copy(target, weights.memory[:size])  # which is a frame's while they are on their way from a file

        slot.loaded = unit.sent = self.backend.h2d.submit(
            f"weights of {unit.name} to the device",
            run,
            after={
                "h2d after slot released": slot.released,
                "h2d after weights updated": unit.made,
                self._files.names.sent_loaded: self._files.stage(unit),
            },
            reads=(unit.weights,),
            writes=(slot,),
        )

    def lease(self, unit: Unit, where: Where, *, is_wide: bool = False) -> None:
        """Put the unit's parameters into its slot; compute issued from now on finds the weights there.

        ``is_wide``: outside autocast, parameters whose working dtype is narrower than the user's come from the master.
        """
        if unit.leases == 0:
            self.fetch(unit)
            slot = unit.weight_slot
            if slot is None:
                raise StateError(f"{unit.name} has no weight slot after its fetch")
            slot.is_leased, slot.is_awaited = True, False
            self.backend.order("compute after weights loaded", slot.loaded)
            self.backend.touch(f"compute of {unit.name}", reads=(slot,))
            if torch.is_inference_mode_enabled():  # a parameter over a tensor made there would not count its writes
                with torch.inference_mode(False):
                    self._show(unit, slot, is_wide=is_wide)
            else:
                self._show(unit, slot, is_wide=is_wide)
        unit.leases += 1
        if unit.where is not Where.BACKWARD:
            unit.where = where

    def _show(self, unit: Unit, slot: WeightSlot, *, is_wide: bool) -> None:
        for record in unit.records:
            parameter = record.parameter
            parameter.__class__ = record.own_class  # a plain assignment to `data`, which nothing follows
            if is_wide and record.shows_master:
                parameter.data = record.host.to(self.backend.device, copy=True)
            else:
                parameter.data = slot.view(record)
            parameter.__class__ = record.leased_class

    def release(self, unit: Unit) -> None:
        """Undo one lease; with the last, the parameters are their guarded host tensors again."""
        unit.leases -= 1
        slot = unit.weight_slot
        if unit.leases or slot is None:
            return
        for record in unit.records:
            parameter = record.parameter
            parameter.__class__ = record.own_class
            parameter.data = record.host
            parameter.__class__ = record.guarded_class
        unit.lent.clear()
        unit.where = Where.HOST
        slot.is_leased = False
        slot.last_used = next(self._turn)
        monitor = self.backend.monitor
        self.backend.touch(f"compute of {unit.name}", reads=(slot,))
        if monitor is not None and monitor.poison and not self._is_held(slot):
            self.backend.touch(f"poison of {slot.name}", writes=(slot,))
            monitor.spoil(slot)
            self._evict(slot)
        slot.released = self.backend.mark(f"compute of {unit.name}")

    def grow(self, units: Iterable[Unit], count: int) -> None:
        """``count`` weight slots more, though no more than ``units``, which still slide, can fill: weights that are
        not evicted stay until they change."""
        for size, members in Counter(self._weight_class[unit.layout.weight_bytes] for unit in units).most_common():
            slots = self._weight_slots[size]
            added = min(count, max(0, members - len(slots)))
            slots.extend(self._new_weight_slot(size) for _ in range(added))
            count -= added

    def grow_gradients(self, units: Iterable[Unit], count: int) -> None:
        """``count`` gradient slots more, though no more than ``units``, which still slide, can fill: gradients wait in
        them for the next micro-batch. To be called while no gradient is pending."""
        for size, members in Counter(self.gradient_class(unit) for unit in units if unit.trainable).most_common():
            slots = self._gradient_slots[size]
            added = min(count, max(0, members + self.GRADIENT_SLOTS - len(slots)))
            slots.extend(self._new_gradient_slot(size) for _ in range(added))
            count -= added

    def gradient_slot_bytes(self, unit: Unit) -> int:
        """What a gradient slot for ``unit`` takes on the device."""
        return self.gradient_class(unit) if unit.layout.gradient_bytes else 0

    def weight_slots(self, unit: Unit) -> int:
        """How many slots units like this one share."""
        return len(self._weight_slots[self._weight_class[unit.layout.weight_bytes]])

    def weight_slot_bytes(self, unit: Unit) -> int:
        """What a weight slot for ``unit`` takes on the device."""
        return self._weight_class[unit.layout.weight_bytes]

    def forget(self, unit: Unit) -> None:
        """The unit leaves the window for good: its slot is free for others."""
        if unit.weight_slot is not None:
            self._evict(unit.weight_slot)

    def take_gradient_slot(self, unit: Unit) -> GradientSlot:
        """A gradient slot for ``unit``; compute issued from now on may write it."""
        free = self._gradient_slots[self.gradient_class(unit)]
        slot = free.pop(0) if free else self._new_gradient_slot(self.gradient_class(unit))
        self.backend.order("compute after gradient slot drained", slot.drained)
        monitor = self.backend.monitor
        if monitor is not None:
            self.backend.touch(f"lease of {slot.name}", writes=(slot,))
            monitor.spoil(slot)
        return slot

    def has_spare_gradient_slots(self, unit: Unit) -> bool:
        """Whether the slot of ``unit`` may keep its content: enough others are free for gradients on their way."""
        return len(self._gradient_slots[self.gradient_class(unit)]) >= self.GRADIENT_SLOTS

    def give_gradient_slot(self, unit: Unit, slot: GradientSlot) -> None:
        """Return a slot whose content is gone once ``slot.drained`` has passed."""
        slot.holds = False
        self._gradient_slots[self.gradient_class(unit)].append(slot)

    def _victim(self, unit: Unit) -> WeightSlot:
        slots = self._weight_slots[self._weight_class[unit.layout.weight_bytes]]
        idle = [slot for slot in slots if not slot.is_leased and not self._is_held(slot)]
        settled = [slot for slot in idle if not slot.is_awaited]
        if settled:
            return min(settled, key=lambda slot: slot.last_used)
        if idle:  # only slots fetched ahead for units that did not come: the latest guess goes first
            return max(idle, key=lambda slot: slot.last_used)
        slots.append(self._new_weight_slot(self._weight_class[unit.layout.weight_bytes]))
        return slots[-1]

    @staticmethod
    def _is_held(slot: WeightSlot) -> bool:
        """Whether a graph has saved views of the slot: it stays its unit's."""
        return slot.unit is not None and any(visit.holds_slot for visit in slot.unit.visits)

    @staticmethod
    def _evict(slot: WeightSlot) -> None:
        if slot.unit is not None:
            slot.unit.weight_slot = None
            slot.unit = None
        slot.is_awaited = False

    def _new_weight_slots(self, size: int, sliding: Sequence[Unit]) -> list[WeightSlot]:
        members = sum(self._weight_class[unit.layout.weight_bytes] == size for unit in sliding)
        return [self._new_weight_slot(size) for _ in range(min(self.depth + 2, members))]

    def _new_weight_slot(self, size: int) -> WeightSlot:
        flat = torch.zeros(size, dtype=torch.uint8, device=self.backend.device)
        slot = WeightSlot(f"weight slot {next(self._turn)}", flat)
        # the allocator gives memory that compute issued earlier may still use, and the zeros are written behind that
        self.backend.touch(f"start of {slot.name}", writes=(slot,))
        slot.released = self.backend.mark(f"start of {slot.name}")
        return slot

    def _new_gradient_slot(self, size: int) -> GradientSlot:
        flat = torch.zeros(size, dtype=torch.uint8, device=self.backend.device)
        self._gradient_slot_bytes += size
        return GradientSlot(f"gradient slot {next(self._turn)}", flat)


def _extend(classes: dict[int, int], sizes: set[int]) -> None:
    """Map further sizes: to a class that is there already, if one is near enough."""
    for size in sorted(sizes - classes.keys(), reverse=True):
        fitting = [found for found in set(classes.values()) if size <= found <= size * SIZE_TOLERANCE]
        classes[size] = min(fitting, default=size)
