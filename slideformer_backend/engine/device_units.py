"""Units that live on the device altogether: weights, masters, moments and updates (DESIGN 6, residency).

Everything happens on the compute stream, in program order: no transfer, no prediction, no log. The update waits for
``step()``, when the clip is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..optim.rules import Rule
from ..optim.twins import round_into
from .device_kernels import reconcile, round_half_up, scale, update
from .guard import plain
from .norms import Norms
from .states import can_split
from .unit import KINDS, ONE, Entry, ParamRecord, Unit


class DeviceUnits:
    """Steps units whose states are on the device. ``record.device_states`` holds them, flat fp32 each.

    Args:
        norms: measures gradients.
        in_place: the policy is ``immediate``: bf16 weights round as the high half of the split master that a host
            would keep, so that placement changes nothing.
    """

    def __init__(self, norms: Norms, *, in_place: bool) -> None:
        self._norms = norms
        self._in_place = in_place
        self._launched: dict[int, ParamRecord] = {}

    def allocate(self, unit: Unit, rule: Rule | None) -> None:
        """Masters (unless the parameter is fp32, its own master) and moments of ``unit``."""
        if all("master" not in record.device_states for record in unit.trainable):
            unit.rounds_half_up = self._in_place and can_split(unit, rule)
        for record in (record for record in unit.trainable if record.core is None):
            parameter = plain(record.parameter).reshape(-1)
            states = record.device_states
            if parameter.dtype != torch.float32 and "master" not in states:
                states["master"] = parameter.float()
            for name in rule.state_names if rule is not None else ():
                if name not in states:
                    states[name] = torch.zeros_like(parameter, dtype=torch.float32)

    def observe(self, unit: Unit) -> None:
        """Note which parameters have a gradient now."""
        for record in unit.trainable:
            record.has_gradient = _gradient(record) is not None

    def accumulated(self, record: ParamRecord, *, is_last: bool) -> None:
        """Its gradient is complete unless the backward accumulates again (``is_last``: it should not): measure it while
        the backward goes on."""
        gradient = _gradient(record)
        if is_last and gradient is not None:
            self._norms.launch(record, plain(gradient).reshape(-1))
            self._launched[id(record)] = record

    def collect(self) -> None:
        """The backward is over: bring what was measured in it to the host."""
        records = list(self._launched.values())
        self._launched.clear()
        if records:
            for record in records:
                record.has_gradient = True
            self._norms.collect("device units", records)

    def measure(self, unit: Unit) -> None:
        """Start the norms of gradients that have not been measured since they changed."""
        self.observe(unit)
        pairs = [
            (record, plain(gradient).reshape(-1))
            for record in unit.trainable
            if record.square_sum is None and (gradient := _gradient(record)) is not None
        ]
        if pairs:
            self._norms.on_device(unit, pairs)

    def knows_norm(self, records: Sequence[ParamRecord], max_norm: float) -> bool:
        """Whether the norm of these gradients can be had; raises UnsupportedError where a clip needs it in vain."""
        return True

    def present(self, record: ParamRecord) -> None:
        """The weight is about to be used: it is that of the last ``step()`` from here on."""

    def apply_coefficient(self, record: ParamRecord) -> None:
        """A recorded clip becomes a clipped gradient; gradients that are here are clipped already."""

    def clip(self, record: ParamRecord) -> None:
        """Apply a clip at once: the gradient is here."""
        gradient = _gradient(record)
        if record.coefficient != ONE and gradient is not None:
            with torch.no_grad():
                scale(plain(gradient), record.coefficient)
            record.coefficient = ONE
            record.square_sum = None

    def absorb(self, unit: Unit) -> None:
        """Take over what user code wrote into parameters: where the weight is not the rounded master, it counts."""
        for record in unit.exposed:
            record.is_exposed = record.is_lent = False
            master = record.device_states.get("master")
            if master is not None:
                reconcile(master, plain(record.parameter).reshape(-1), half_up=unit.rounds_half_up)

    def settle(self, unit: Unit) -> None:
        """Weights and states of ``unit`` are final and idle when this returns."""
        self.absorb(unit)

    @staticmethod
    def adopt(unit: Unit) -> None:
        """Masters were stepped by an optimizer that ran as itself: weights follow them."""
        for record in unit.trainable:
            master = record.device_states.get("master")
            if master is None:
                continue
            weights = plain(record.parameter).view(-1)
            if unit.rounds_half_up and weights.dtype == torch.bfloat16:
                round_half_up(master, weights)
            else:
                round_into(master, weights, KINDS[record.spec.dtype])

    def step(self, records: Sequence[ParamRecord], entries: Sequence[Entry]) -> None:
        """Update on the current stream."""
        with torch.no_grad():
            for record, entry in zip(records, entries, strict=True):
                gradient = _gradient(record)
                if gradient is None:
                    continue
                weights = plain(record.parameter).view(-1)
                master = record.device_states.get("master", weights)
                states = tuple(record.device_states[name] for name in entry.states)
                half_up = record.unit.rounds_half_up
                update(entry, master, states, plain(gradient).reshape(-1), weights, half_up=half_up)
                torch.autograd.graph.increment_version(weights)  # a graph from before the step is stale
                record.steps += 1


def _gradient(record: ParamRecord) -> torch.Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():
        return record.parameter.grad
