"""Gradients of sliding units on their way between the device and the host (DESIGN 4.4).

A unit's backward adds to its gradient in a device slot. The gradient then goes to a host buffer, and where a step has
several micro-batches it comes back for the next one, since autograd adds on the device, in the parameter's dtype. As
long as the window has slots to spare it waits in its slot instead, and goes to the host when somebody asks for it there
or with the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..transfer import Backend, Ticket, copy
from .policy import UpdatePolicy
from .unit import ONE, Unit
from .window import GradientSlot, Window


class Waiting:
    """A gradient that waits in its slot; ``send`` starts its way to the host."""

    def __init__(self, slot: GradientSlot, send: Callable[[], Ticket]) -> None:
        self.slot = slot
        self.write = send


class Gradients:
    """Brings gradients to slots and takes them away.

    Args:
        backend: lanes and device.
        window: slots.
        policy: host buffers, and what is done with a gradient that has arrived in one.
    """

    def __init__(self, backend: Backend, window: Window, policy: UpdatePolicy) -> None:
        self._backend = backend
        self._window = window
        self._policy = policy
        self.measures_slots = backend.device.type == "cuda"
        """Whether norms are taken in the device slot, before the gradient is on the host."""

    def begin(self, unit: Unit) -> None:
        """The backward of ``unit`` begins: it gets a slot, with what earlier micro-batches left if they did."""
        if unit.gradient is None or not unit.with_gradient:
            unit.gradient_slot = self._window.take_gradient_slot(unit)
            return
        if any(record.coefficient != ONE for record in unit.with_gradient):
            self._policy.apply_coefficients(unit)
        # a tensor that the script holds may be looked at during the backward too
        stays = unit.gradient is not unit.logged and not unit.gradient.is_held()
        waiting = unit.gradient.take_back() if stays else None
        if isinstance(waiting, Waiting):
            unit.gradient_slot = waiting.slot
            self._backend.touch(f"pending gradient of {unit.name}", reads=(waiting.slot,))
            return
        unit.gradient_slot = self._window.take_gradient_slot(unit)
        self._bring(unit, unit.gradient_slot)

    def _bring(self, unit: Unit, slot: GradientSlot) -> None:
        buffer = unit.gradient
        if buffer is None:
            return
        size = unit.layout.gradient_bytes
        source, target = buffer.slab.flat[:size], slot.flat[:size]
        buffer.sent = self._backend.h2d.submit(
            f"pending gradient of {unit.name} to the device",
            partial(copy, target, source),
            after={
                "h2d after gradient filled": buffer.filled,
                "h2d after gradient scaled": unit.updated,
                "h2d after gradient slot leased": self._backend.mark("lease of a gradient slot"),
            },
            reads=(buffer.slab,),
            writes=(slot,),
        )
        self._backend.order("compute after pending gradient", buffer.sent)

    def end(self, unit: Unit, *, is_last: bool) -> None:
        """The backward of ``unit`` is over. Its gradient goes to the host; unless ``is_last``, which says that a
        ``step()`` should follow, it may wait on the device instead."""
        slot, unit.gradient_slot = unit.gradient_slot, None
        if slot is None:
            return
        arrived, unit.arrived = unit.arrived, set()
        if not arrived and not (slot.holds and unit.with_gradient):  # hooks may drop what earlier micro-batches left
            slot.drained = unit.gradient.sent if unit.gradient is not None else None
            self._window.give_gradient_slot(unit, slot)
            return
        for record in unit.trainable:
            if id(record) in arrived:
                record.has_gradient, record.square_sum = True, None
        buffer = self._policy.target_buffer(unit)
        waits = not is_last and not buffer.is_held() and self._window.has_spare_gradient_slots(unit)
        if self.measures_slots and not waits:
            self._measure(unit, slot)
        size = unit.layout.gradient_bytes
        source, target = slot.flat[:size], buffer.slab.flat[:size]
        after = {
            "d2h after compute": self._backend.mark(f"backward of {unit.name}"),
            "d2h after gradient buffer drained": buffer.drained,
            "d2h after norm": unit.measured if buffer is unit.gradient else None,
            "d2h after update": unit.updated if buffer is unit.gradient else None,
        }

        def send() -> Ticket:
            slot.drained = ticket = self._backend.d2h.submit(
                f"gradient of {unit.name} to the host",
                partial(copy, target, source),
                after=after,
                reads=(slot,),
                writes=(buffer.slab,),
            )
            self._window.give_gradient_slot(unit, slot)
            return ticket

        slot.holds = waits
        if waits:
            buffer.defer(Waiting(slot, send))
        else:
            buffer.filled = send()
        self._policy.replace_gradient(unit, buffer)
        if not arrived:
            return  # this backward added nothing to it
        if not self.measures_slots and not waits:
            self._policy.measure(unit)
        is_last = is_last and all(visit.is_done for visit in unit.visits)
        self._policy.arrive(unit, is_last=is_last)

    def _measure(self, unit: Unit, slot: GradientSlot) -> None:
        # a device reads the slot at its own bandwidth; the host would spend a tenth of an update on it
        pairs = [(record, slot.view(record).reshape(-1)) for record in unit.with_gradient]
        self._policy.norms.on_device(unit, pairs)
