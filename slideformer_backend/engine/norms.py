"""Sums of squares of gradients, where the gradient is: in a device slot, in device gradients, or in a host buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..storage import HostMemory, Slab
from ..transfer import Backend, GradientBuffer, copy
from .arithmetic import Arithmetic, sequential_sum
from .device_kernels import sum_squares
from .unit import ParamRecord, SquareSum, Unit

BLOCK = 65536


class Norms:
    """Fills ``record.square_sum``; ``unit.measured`` says when. All three ways give the same bits (DESIGN 4.5)."""

    def __init__(self, backend: Backend, memory: HostMemory, arithmetic: Arithmetic) -> None:
        self._backend = backend
        self._memory = memory
        self._arithmetic = arithmetic
        self._landing: dict[int, Slab] = {}

    def on_host(self, unit: Unit, records: Sequence[ParamRecord], buffer: GradientBuffer) -> None:
        """Measure gradients in a host buffer, on the norm lane."""
        results = _expect(records)

        def run() -> None:
            for result, total in zip(results, self._arithmetic.square_sums(records, buffer.slab), strict=True):
                result.value = total

        unit.measured = self._backend.norms.submit(
            f"norm of {unit.name}",
            run,
            after={"norm after gradient filled": buffer.filled, "norm after gradient scaled": unit.updated},
            reads=(buffer.slab,),
            writes=(unit.norms,),
        )

    def on_device(self, unit: Unit, pairs: Sequence[tuple[ParamRecord, torch.Tensor]]) -> None:
        """Measure flat device gradients on the current stream; only the partial sums travel."""
        counts = [-(-gradient.numel() // BLOCK) for _, gradient in pairs]
        partials = torch.empty(sum(counts), dtype=torch.float64, device=self._backend.device)
        for (_, gradient), out in zip(pairs, partials.split(counts), strict=True):
            sum_squares(gradient, out)
        landing = self._landing_of(unit)
        target = landing.view(torch.float64, 0, partials.numel())
        arrived = self._backend.d2h.submit(
            f"norm of {unit.name} to the host",
            lambda: copy(target, partials),
            after={"d2h after compute": self._backend.mark(f"norm of {unit.name}"), "d2h after norm": unit.measured},
            writes=(landing,),
            keep=partials,
        )
        results = _expect([record for record, _ in pairs])

        def run() -> None:
            for result, part in zip(results, target.split(counts), strict=True):
                result.value = sequential_sum(part.numpy())

        unit.measured = self._backend.norms.submit(
            f"norm of {unit.name}",
            run,
            after={"norm after partial sums arrived": arrived},
            reads=(landing,),
            writes=(unit.norms,),
        )

    def _landing_of(self, unit: Unit) -> Slab:
        if unit.index not in self._landing:
            blocks = sum(-(-record.numel // BLOCK) for record in unit.trainable)
            self._landing[unit.index] = self._memory.allocate(f"norms of {unit.name}", blocks * 8, dma=True)
        return self._landing[unit.index]


def _expect(records: Sequence[ParamRecord]) -> list[SquareSum]:
    results = [SquareSum() for _ in records]
    for record, result in zip(records, results, strict=True):
        record.square_sum = result
    return results
