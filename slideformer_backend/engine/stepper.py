"""``optimizer.step()`` and gradient clipping of a managed model (DESIGN 4)."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence

import torch

from ..config import SlideFormerConfig
from ..errors import SlideFormerError, UnsupportedError
from ..transfer import Backend
from .binding import Binding
from .clip import as_tensor, clip_to, norm_as_torch, total_norm
from .edges import Edges
from .immediate import Immediate
from .redo_log import RedoLog
from .unit import ONE, ParamRecord, SquareSum, Unit
from .whole import as_masters, move_own_states

logger = logging.getLogger(__name__)

MOST_SKIPS = 20
"""Non-finite steps in a row after which training is stopped."""


class Stepper:
    """Takes steps and clips; keeps count of dropped steps.

    Args:
        config: ``nonfinite`` decides about gradients that are not finite.
        backend: lanes and device.
        policy: where updates go.
        edges: the resident units.
    """

    def __init__(self, config: SlideFormerConfig, backend: Backend, policy: RedoLog | Immediate, edges: Edges) -> None:
        self.skipped = 0
        self._config = config
        self._backend = backend
        self._policy = policy
        self._edges = edges
        self._skips_in_a_row = 0

    def clip(self, records: Sequence[ParamRecord], max_norm: float) -> torch.Tensor:
        """Clip by global 2-norm as ``torch.nn.utils.clip_grad_norm_`` does.

        Returns:
            The total norm before clipping, 0-dim fp32 on the engine's device.
        """
        if isinstance(self._policy, Immediate):
            return self._norm_of_applied(self._policy, records, max_norm)
        for record in records:
            if record.coefficient != ONE:
                self._apply_coefficient(record)
        self.measure({record.unit for record in records})
        present = [record for record in records if record.has_gradient]
        if not self._edges.device_units.knows_norm(present, max_norm):
            return as_tensor(math.nan, self._backend.device)  # a mere measurement, of what nobody has
        as_torch = self._norm_as_torch(present) if self._backend.device.type == "cpu" else None
        norm = total_norm(present) if as_torch is None else as_torch.item()
        if not math.isinf(max_norm):
            clip_to(present, norm, max_norm)
            self._edges.clip([record for record in present if record.unit.is_resident])
        return as_tensor(norm, self._backend.device)

    def step(self, binding: Binding) -> None:
        """One ``step()`` of a bound optimizer: log it, drop it, or let the optimizer run as itself."""
        binding.was_skipped = False
        records = [record for record, _ in binding.records()]
        for unit in {record.unit for record in records if record.unit.is_resident}:
            self._edges.copy_gradient(unit, is_last=False)
        if isinstance(self._policy, Immediate):
            self._confirm(self._policy, records)
        present = [record for record in records if record.has_gradient]
        if not self._is_finite(present):
            self._skip(binding)
            return
        self._skips_in_a_row = 0
        self._policy.spill.check()  # from here on the step counts: what fails later is raised by the next call
        if binding.rule is None:
            present = self._step_whole(binding, records)
        else:
            on_device = [record for record in present if record.unit.updates_on_device]
            on_host = [record for record in present if not record.unit.updates_on_device]
            for unit in {record.unit for record in on_device}:
                self._edges.device_units.absorb(unit)
            self._edges.device_units.step(on_device, binding.entries(on_device, with_clip=True))
            self._policy.step(on_host, binding.entries(on_host, with_clip=True))
            foreign = binding.foreign()
            if foreign:
                binding.run_on(foreign)
        if isinstance(self._policy, RedoLog):
            self._policy.is_clipping = any(record.coefficient != ONE for record in present)
        for unit in {
            record.unit for record in present if record.unit.is_resident and not record.unit.updates_on_device
        }:
            self._edges.drop_spent(unit)
            self._edges.send_weights(unit, [record for record in present if record.unit is unit])

    def _norm_as_torch(self, records: Sequence[ParamRecord]) -> torch.Tensor | None:
        if any(record.spec.dtype != torch.float32 for record in records):
            return None
        for unit in {record.unit for record in records}:
            if unit.gradient is not None:
                self._backend.synchronize("host waits for gradient", unit.gradient.filled)
                self._backend.touch_host(f"norm of {unit.name}", reads=(unit.gradient.slab,))
        return norm_as_torch(records)

    def measure(self, units: Iterable[Unit]) -> None:
        """The sums of squares of these units' gradients are known when this returns."""
        for unit in units:
            if unit.is_resident:
                self._edges.notice(unit)
            if unit.updates_on_device:
                self._edges.device_units.measure(unit)
                continue
            if unit.is_resident:
                self._edges.copy_gradient(unit, is_last=False)
            self._policy.measure(unit)
        for unit in units:
            self._backend.synchronize("host waits for norm", unit.measured)
            self._backend.touch_host(f"norm of {unit.name}", reads=(unit.norms,))

    def _apply_coefficient(self, record: ParamRecord) -> None:
        if record.unit.is_resident:
            self._edges.apply_coefficient(record)
        else:
            self._policy.apply_coefficients(record.unit)

    def _is_finite(self, records: Sequence[ParamRecord]) -> bool:
        if self._config.nonfinite == "as_plain":
            return True
        self.measure({record.unit for record in records})
        bad = _nonfinite(records)
        if bad and self._config.nonfinite == "raise":
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

    def _step_whole(self, binding: Binding, records: Sequence[ParamRecord]) -> list[ParamRecord]:
        """Returns what the optimizer may have written: beside parameters that have a gradient those that lie with them.
        All others it has are guarded, as for any user code."""
        units = {record.unit for record in records if record.has_gradient}
        records = [record for record in records if record.unit in units and record.spec.is_trainable]
        for record in records:
            self._apply_coefficient(record)
        for unit in units:
            if unit.is_resident:
                self._edges.copy_gradient(unit, is_last=False)
            self._policy.settle(unit)
            if unit.updates_on_device:
                self._edges.device_units.absorb(unit)
            self._backend.synchronize("host waits for gradient", unit.gradient.filled if unit.gradient else None)
            self._backend.synchronize("host waits for norm", unit.measured)
        with as_masters(records):
            for record in records:
                move_own_states(record, record.parameter.device)  # of a loaded state_dict, say
            binding.run_whole()
        for unit in units:
            if unit.updates_on_device:
                self._edges.device_units.adopt(unit)
            else:
                self._policy.adopt(unit)
        return records

    def _confirm(self, policy: Immediate, records: Sequence[ParamRecord]) -> None:
        applied = [record for record in records if id(record) in policy.applied]
        policy.confirm(records)
        if self._config.nonfinite == "as_plain" or not applied:
            return
        for unit in {record.unit for record in applied}:
            self._backend.synchronize("host waits for norm", unit.measured)
            self._backend.touch_host(f"norm of {unit.name}", reads=(unit.norms,))
        bad = _nonfinite(applied)
        if bad:
            raise SlideFormerError(
                f"Non-finite gradients in {len(bad)} parameters, first {bad[0]}; update: immediate had applied them.",
                remedy="restore a checkpoint and set update: exact, which can drop such a step",
            )

    def _norm_of_applied(self, policy: Immediate, records: Sequence[ParamRecord], max_norm: float) -> torch.Tensor:
        if not math.isinf(max_norm):
            applied = "The gradients of this step have been applied already." if policy.applied else ""
            raise UnsupportedError(
                f"update: immediate updates weights as gradients arrive and cannot clip by norm. {applied}".strip(),
                remedy="set update: exact (as fast while clipping is rarely active), or switch clipping off"
                " (max_grad_norm: 0)",
            )
        self.measure({record.unit for record in records})
        return as_tensor(total_norm(records), self._backend.device)


def _nonfinite(records: Sequence[ParamRecord]) -> list[str]:
    return [r.name for r in records if not _is_finite_sum(r.square_sum)]


def _is_finite_sum(result: SquareSum | None) -> bool:
    return result is not None and result.value is not None and math.isfinite(result.value)
