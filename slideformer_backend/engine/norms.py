"""Sums of squares of gradients, where the gradient is: in a device slot, in device gradients, or in a host buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..optim.norm import block_count
from ..storage import HostMemory, Slab, Tracked
from ..transfer import Backend, GradientBuffer, copy
from .arithmetic import Arithmetic, sequential_sum
from .device_kernels import sum_squares
from .unit import ParamRecord, SquareSum, Unit

FIRST = -(1 << 30)
"""Line of partial sums on ``d2h``: a clip stands still until they arrive, and they are small."""


class Norms:
    """Fills ``record.square_sum``; ``unit.measured`` says when. All three ways give the same bits (DESIGN 4.5)."""

    def __init__(self, backend: Backend, memory: HostMemory, arithmetic: Arithmetic) -> None:
        self._backend = backend
        self._memory = memory
        self._arithmetic = arithmetic
        self._landing: dict[int, Slab] = {}
        self._on_device: dict[int, torch.Tensor] = {}

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
        """Measure flat device gradients of ``unit`` on the current stream; only the partial sums travel."""
        for record, gradient in pairs:
            self.launch(record, gradient)
        self.collect(unit.name, [record for record, _ in pairs])

    def launch(self, record: ParamRecord, gradient: torch.Tensor) -> None:
        """Compute the partial sums of one flat device gradient on the current stream."""
        sum_squares(gradient, self._partials(record))

    def collect(self, name: str, records: Sequence[ParamRecord]) -> None:
        """Bring the partial sums of ``records`` to the host, with one transfer, and add them up there."""
        parts = [self._partials(record) for record in records]
        counts = [part.numel() for part in parts]
        partials = torch.cat(parts)  # a copy: the next launch may write the parts while this one travels
        buffer = Tracked(f"partial sums of {name}", partials)
        self._backend.touch(f"norm of {name}", writes=(buffer,))
        landing = self._landing_of(records[0], sum(counts))
        target = landing.view(torch.float64, 0, sum(counts))
        arrived = self._backend.d2h.submit(
            f"norm of {name} to the host",
            lambda: copy(target, partials),
            after={
                "d2h after compute": self._backend.mark(f"norm of {name}"),
                "d2h after norm": records[0].unit.measured,
            },
            reads=(buffer,),
            writes=(landing,),
            keep=partials,
            line=FIRST,
        )
        results = _expect(records)

        def run() -> None:
            for result, part in zip(results, target.split(counts), strict=True):
                result.value = sequential_sum(part.numpy())

        units = {id(record.unit): record.unit for record in records}.values()
        ticket = self._backend.norms.submit(
            f"norm of {name}",
            run,
            after={"norm after partial sums arrived": arrived},
            reads=(landing,),
            writes=tuple(unit.norms for unit in units),
        )
        for unit in units:
            unit.measured = ticket

    def _partials(self, record: ParamRecord) -> torch.Tensor:
        key = id(record)
        if key not in self._on_device:
            self._on_device[key] = torch.zeros(
                block_count(record.numel), dtype=torch.float64, device=self._backend.device
            )
        return self._on_device[key]

    def _landing_of(self, record: ParamRecord, count: int) -> Slab:
        slab = self._landing.get(record.unit.index)
        if slab is None or slab.nbytes < count * 8:
            slab = self._memory.allocate(f"norms of {record.unit.name}", count * 8, dma=True)
            self._landing[record.unit.index] = slab
        return slab


def _expect(records: Sequence[ParamRecord]) -> list[SquareSum]:
    results = [SquareSum() for _ in records]
    for record, result in zip(records, results, strict=True):
        record.square_sum = result
    return results
