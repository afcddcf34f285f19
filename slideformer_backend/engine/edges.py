"""Edge units: embeddings, final norm, head. Their parameters and gradients stay on the device between steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import UnsupportedError
from ..transfer import Backend, copy
from .device_kernels import scale
from .device_units import DeviceUnits
from .guard import plain
from .policy import UpdatePolicy
from .unit import ONE, ParamRecord, Unit


class Edges:
    """Moves gradients of edge units to the host and updated weights back.

    The device gradient is the truth; ``unit.gradient`` is a copy of it on the host, which goes out of date when a
    backward adds to the gradient or user code gets hold of it.
    """

    def __init__(
        self, backend: Backend, units: Sequence[Unit], policy: UpdatePolicy, device_units: DeviceUnits
    ) -> None:
        self.backend = backend
        self.device_units = device_units
        self.units = list(units)
        self.policy = policy
        self._outdated: set[int] = set()
        self._shown: dict[int, int] = {}
        """Version, when last looked at, of each gradient that user code has been given and may still hold."""

    def outdate(self, record: ParamRecord) -> None:
        """The device gradient of ``record`` is no longer what the host copy holds."""
        self._outdated.add(id(record))
        if record.unit.updates_on_device:
            record.square_sum = None

    def show(self, record: ParamRecord) -> torch.Tensor | None:
        """The device gradient, for user code to read or write now or, if it keeps it, at any later time."""
        self.apply_coefficient(record)
        self.outdate(record)
        self.before_write(record.unit)
        gradient = device_gradient(record)
        if gradient is not None:
            self._shown[id(record)] = gradient._version
        return gradient

    def notice(self, unit: Unit) -> None:
        """Find what user code has written through a gradient that it kept."""
        for record in unit.trainable if self._shown else ():
            version, gradient = self._shown.get(id(record)), device_gradient(record)
            if version is None:
                continue
            if gradient is None:
                del self._shown[id(record)]
            elif gradient._version != version:
                self._shown[id(record)] = gradient._version
                self.apply_coefficient(record)
                self.outdate(record)

    def accumulated(self, record: ParamRecord, *, is_last: bool) -> None:
        """Post-accumulate hook of a resident parameter; ``is_last``: a ``step()`` should follow this backward."""
        gradient = device_gradient(record)
        if gradient is not None and gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"{record.name} received a sparse gradient.", remedy="build the embedding with sparse=False"
            )
        if record.core is None:
            self.outdate(record)
        if record.unit.updates_on_device:
            self.device_units.accumulated(record, is_last=is_last)

    def after_backward(self, *, is_last: bool) -> None:
        """Start copying new gradients to the host when a ``step()`` should follow."""
        if is_last:
            for unit in self.units:
                if not unit.updates_on_device:
                    self.copy_gradient(unit, is_last=True)
        self.device_units.collect()

    def copy_gradient(self, unit: Unit, *, is_last: bool) -> None:
        """Bring the host copy of the unit's gradient up to date (nothing if it is, or if there is none to be)."""
        self.notice(unit)
        if unit.updates_on_device:
            self.device_units.observe(unit)
            return
        records = [record for record in unit.trainable if device_gradient(record) is not None]
        if not any(id(record) in self._outdated for record in records):
            return
        self._outdated.difference_update(id(record) for record in records)
        buffer = self.policy.target_buffer(unit)
        pairs = [
            (record.gradient_view(buffer.slab.flat), plain(gradient))
            for record in records
            if (gradient := device_gradient(record)) is not None
        ]

        def run() -> None:
            for target, source in pairs:
                copy(target, source)

        unit.copied = buffer.filled = self.backend.d2h.submit(
            f"gradient of {unit.name} to the host",
            run,
            after={
                "d2h after compute": self.backend.mark(f"gradient of {unit.name}"),
                "d2h after gradient buffer drained": buffer.drained,
                "d2h after norm": unit.measured if buffer is unit.gradient else None,
                "d2h after update": unit.updated if buffer is unit.gradient else None,
            },
            reads=(unit.resident_gradient,),
            writes=(buffer.slab,),
            keep=pairs,
        )
        if any(id(record) in self._shown for record in records):
            self.before_write(unit)  # whoever kept one may write it with no word to us
        for record in records:
            record.has_gradient, record.coefficient, record.square_sum = True, ONE, None
        self.policy.replace_gradient(unit, buffer)
        self.policy.measure(unit)
        self.policy.arrive(unit, is_last=is_last)
        spent = self.drop_spent(unit)
        if spent:
            self.send_weights(unit, spent)

    def drop_spent(self, unit: Unit) -> list[ParamRecord]:
        """Under ``immediate`` an applied gradient is spent: as for sliding units, ``grad`` is None afterwards."""
        spent = [r for r in unit.trainable if not r.has_gradient and device_gradient(r) is not None]
        for record in spent:
            set_device_gradient(record, None)
        return spent

    def before_write(self, unit: Unit) -> None:
        """Compute issued from now on may write the device gradients: the last copy of them has been taken."""
        self.backend.order("compute after resident gradient copied", unit.copied)
        self.backend.touch(f"gradient of {unit.name}", writes=(unit.resident_gradient,))

    def before_accumulation(self, record: ParamRecord) -> None:
        """Tensor hook of an edge parameter: autograd is about to add to its gradient."""
        self.backend.touch(f"backward with {record.unit.name}", reads=(record.unit.resident,))
        self.before_write(record.unit)

    def clip(self, records: Sequence[ParamRecord]) -> None:
        """Apply the clip just recorded to device gradients, as torch does: autograd may add to them before any hook of
        ours runs. The host copies stay as they are; their log entries carry the coefficient."""
        for record in records:
            gradient = device_gradient(record)
            if record.unit.updates_on_device:
                self.device_units.clip(record)
            elif record.coefficient != ONE and gradient is not None:
                self.before_write(record.unit)
                with torch.no_grad():
                    scale(plain(gradient), record.coefficient)
                if id(record) in self._shown:
                    self._shown[id(record)] = gradient._version

    def apply_coefficient(self, record: ParamRecord) -> None:
        """Let the next host copy be that of the clipped device gradient."""
        self.device_units.apply_coefficient(record)
        if record.coefficient != ONE:
            record.coefficient = ONE
            self.outdate(record)

    def send_weights(self, unit: Unit, records: Sequence[ParamRecord]) -> None:
        """Copy updated working weights into resident parameters, behind the update and all compute so far.

        Only ``records`` (of ``unit``) were stepped; the host weights of others may hold an unconfirmed prediction.
        """
        pairs = [(plain(record.parameter), record.weight_view(unit.weights.flat)) for record in records]

        def run() -> None:
            for target, source in pairs:
                copy(target, source)

        unit.sent = unit.refreshed = self.backend.h2d.submit(
            f"weights of {unit.name} to the device",
            run,
            after={
                "h2d after weights updated": unit.made,
                "h2d after compute released weights": self.backend.mark(f"compute with {unit.name}"),
            },
            reads=(unit.weights,),
            writes=(unit.resident,),
            keep=pairs,
        )


def device_gradient(record: ParamRecord) -> torch.Tensor | None:
    """The gradient that autograd holds for a parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        return record.parameter.grad


def set_device_gradient(record: ParamRecord, value: torch.Tensor | None) -> None:
    """Set the gradient that autograd holds for a parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        record.parameter.grad = value
