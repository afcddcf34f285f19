"""The ledger: a closed form of what each tier holds at its peak (DESIGN 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .layout import UnitLayout, size_classes


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Predicted peaks, in bytes.

    Attributes:
        host_weights: working weights of all units.
        host_states: masters and moments.
        host_gradients: pending and arriving gradients.
        device_slots: weight and gradient slots of the window.
        device_edges: resident parameters and their gradients.
    """

    host_weights: int
    host_states: int
    host_gradients: int
    device_slots: int
    device_edges: int

    @property
    def host(self) -> int:
        """Host bytes in total."""
        return self.host_weights + self.host_states + self.host_gradients

    @property
    def device(self) -> int:
        """Device bytes in total, activations and the user's own tensors not counted."""
        return self.device_slots + self.device_edges


def ledger_of(
    sliding: Sequence[UnitLayout],
    edges: Sequence[UnitLayout],
    *,
    update: Literal["exact", "immediate"],
    state_bytes: int,
    prefetch: int,
    spare_buffers: int = 2,
    gradient_slots: int = 2,
) -> Ledger:
    """The ledger of a model.

    Args:
        sliding: layouts of the sliding units.
        edges: layouts of the edge units.
        update: the policy; ``exact`` keeps one gradient per unit, ``immediate`` only what is in flight.
        state_bytes: bytes per trained parameter of masters and moments together.
        prefetch: units fetched ahead.
        spare_buffers: gradient buffers in flight beyond the kept ones, per size class.
        gradient_slots: device gradient slots per size class.
    """
    layouts = [*sliding, *edges]
    weight_class = size_classes(layout.weight_bytes for layout in sliding)
    gradient_class = size_classes(layout.gradient_bytes for layout in layouts if layout.gradient_bytes)
    slots = 0
    for size in set(weight_class.values()):
        members = sum(weight_class[layout.weight_bytes] == size for layout in sliding)
        slots += size * min(prefetch + 2, members)
    sliding_classes = {gradient_class[layout.gradient_bytes] for layout in sliding if layout.gradient_bytes}
    slots += sum(sliding_classes) * gradient_slots
    gradients = 0
    for size in set(gradient_class.values()):
        members = sum(layout.gradient_bytes > 0 and gradient_class[layout.gradient_bytes] == size for layout in layouts)
        in_flight = min(members, 1) * spare_buffers
        gradients += size * ((members if update == "exact" else 0) + in_flight)
    return Ledger(
        host_weights=sum(layout.weight_bytes for layout in layouts),
        host_states=sum(layout.state_elements for layout in layouts) * state_bytes,
        host_gradients=gradients,
        device_slots=slots,
        device_edges=sum(layout.weight_bytes + layout.gradient_bytes for layout in edges),
    )
