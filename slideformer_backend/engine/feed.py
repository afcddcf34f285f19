"""What compute and updates need next comes ahead of them: weights to the window, weights and states from files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .schedule import Phase
from .unit import Unit, Weights, Where

if TYPE_CHECKING:
    from .engine import Engine


class Feed:
    """Starts transfers in the order in which the schedule of ``engine`` needs them; blocks for none."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def fetch(self, unit: Unit) -> None:
        """Bring the weights of ``unit`` to the device, made current first."""
        engine = self._engine
        if unit.leases:
            return
        engine.policy.absorb(unit)
        if not engine.window.holds(unit) and unit.weights_are is not Weights.CURRENT:
            engine.policy.make(unit)
        engine.window.fetch(unit)

    def fetch_ahead(self, phase: Phase, unit: Unit) -> None:
        """``unit`` is visited: fetch what follows, and read from files what follows that."""
        engine = self._engine
        depth, files = engine.window.depth, engine.spill.weights
        for number, ahead in enumerate(engine.schedule.ahead(phase, unit, max(depth, files.rooms - 1))):
            is_current = ahead.weights_are is Weights.CURRENT
            if ahead.leases or ahead.is_resident or not (is_current or _is_made_late(ahead)):
                continue
            if number < depth:
                self.fetch(ahead)
            elif is_current and not engine.window.holds(ahead):
                files.stage(ahead)

    def lease_for_backward(self, unit: Unit, is_wide: bool) -> None:
        """The backward of ``unit`` opens: its weights are in the window. What follows is fetched behind it, as in the
        forward: before, it could take the very slot, of weights that a prediction has changed on the host."""
        engine = self._engine
        engine.schedule.visit(Phase.BACKWARD, unit)
        if engine.spill.tier is not None:
            policy, is_last = engine.policy, engine.backward.is_last
            order = [unit, *engine.schedule.ahead(Phase.BACKWARD, unit, len(engine.sliding))]
            if policy.expects_update(unit, is_last=is_last):
                engine.spill.read_ahead(order)
            if policy.expects_new_weights(is_last=is_last):  # also of what the window holds: updates are on the host
                engine.spill.weights.read_ahead(order)
        self.fetch(unit)
        engine.window.lease(unit, Where.BACKWARD, is_wide=is_wide)
        self.fetch_ahead(Phase.BACKWARD, unit)

    def fetch_first(self) -> None:
        """A step has been taken: the next forward should begin with this unit."""
        unit = self._engine.schedule.first
        if unit is None or unit.is_resident:
            return
        if unit.weights_are is Weights.CURRENT or _is_made_late(unit):
            self.fetch(unit)
            self.fetch_ahead(Phase.FORWARD, unit)

    def read_ahead(self) -> None:
        """A step has been taken: states that changed leave, and those that are needed next come."""
        engine = self._engine
        engine.spill.write_back()
        is_late = any(map(_is_made_late, engine.sliding))
        engine.spill.read_ahead(engine.sliding if is_late else engine.schedule.backward_order())


def _is_made_late(unit: Unit) -> bool:
    """Whether its weights wait in a file and are made when they are fetched: earlier, they would only be read again."""
    return unit.filed is not None and unit.weights_are is Weights.STALE
