"""The core of one matrix under ``strategy: lsp``: its projector, its buffers on the host, and the host arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..lsp import GradientProjector
from ..optim import numba_kernels as kernels
from ..optim.norm import BLOCK
from ..optim.workers import WorkerPool
from ..storage import HostMemory, Slab, Tracked, numpy_view
from ..transfer import Ticket
from .unit import Entry, Kind, SquareSum

if TYPE_CHECKING:
    from numpy.typing import NDArray


class CoreEntry(NamedTuple):
    """One update of a matrix: that of its core, and the decay of the whole weight (which the core has no part in)."""

    entry: Entry
    decay: float


class Ready(NamedTuple):
    """An update after ``step()`` that its weight has not got yet. It is on the device when ``sent`` is over."""

    update: torch.Tensor
    tracked: Tracked
    sent: Ticket
    decay: float
    seed: int


class Partial(SquareSum):
    """Sums of squares of several micro-batches: whether their gradients are finite, not the norm of their sum."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[SquareSum]) -> None:
        self.parts = tuple(parts)

    @property
    def value(self) -> float | None:  # type: ignore[override]  # the base holds a plain value
        """The sum of the parts, None while one of them is not there yet."""
        values = [part.value for part in self.parts]
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(values) else None


@dataclass(eq=False, slots=True)
class Core:
    """State of one matrix.

    ``gradient`` and ``update`` are host buffers in the dtype of the wire, that of the parameter; ``landing`` is a
    second arrival buffer for micro-batches. Moments are fp32 as of the last committed step.

    Tickets: ``filled`` is the last transfer of a core to the host, ``updated`` the last host operation, ``sent`` the
    last transfer of an update to the device.
    """

    name: str
    projector: GradientProjector
    dtype: torch.dtype
    kind: Kind
    line: int
    """On every lane: what the next forward needs first goes first."""
    number: int
    """Of the matrix, for seeds."""
    gradient: Slab
    update: Slab
    landing: Slab | None = None
    states: dict[str, Slab] = field(default_factory=dict)
    residual: torch.Tensor | None = None
    predicted: CoreEntry | None = None
    arriving: tuple[torch.Tensor, Tracked] | None = None
    """The predicted update on its way to the device."""
    ready: Ready | None = None
    filled: Ticket | None = None
    updated: Ticket | None = None
    sent: Ticket | None = None
    is_measured_whole: bool = True
    """Whether the norm under way is that of all micro-batches so far, and not of the last one."""
    errors: list[float] = field(default_factory=list)
    """Relative error found by each look at the projector."""
    learned: int = 0
    """How many times the projector was replaced."""

    @classmethod
    def of(
        cls, name: str, projector: GradientProjector, dtype: torch.dtype, kind: Kind, line: int, number: int,
        memory: HostMemory,
    ) -> Core:  # fmt: skip
        """A core without a gradient."""
        count = projector.core_shape[0] * projector.core_shape[1]
        gradient, update = (
            memory.allocate(f"{what} of {name}", count * dtype.itemsize, dma=True) for what in ("core", "update")
        )
        return cls(name, projector, dtype, kind, line, number, gradient, update)

    @property
    def numel(self) -> int:
        """Elements of the core."""
        rows, columns = self.projector.core_shape
        return rows * columns

    def view(self, slab: Slab) -> torch.Tensor:
        """A buffer of the wire as a core."""
        return slab.view(self.dtype, 0, self.numel).view(self.projector.core_shape)

    def moment(self, name: str) -> torch.Tensor:
        """A moment as fp32 core; the memory is the core's own."""
        return self.states[name].view(torch.float32, 0, self.numel).view(self.projector.core_shape)

    def allocate_states(self, names: Sequence[str], memory: HostMemory) -> None:
        """Moments of zeros, for those that are not there yet."""
        for name in names:
            if name not in self.states:
                self.states[name] = memory.allocate(f"{name} of {self.name}", self.numel * 4, dma=False)


class CoreArithmetic:
    """The rules of ``optim`` on cores: a parameter of zeros, whose updated value is the update.

    Runs on the update lane, one operation at a time; slices are spread over the workers.
    """

    def __init__(self, workers: WorkerPool) -> None:
        self._workers = workers

    def peek(self, core: Core, entry: Entry) -> None:
        """``core.update`` becomes the update; moments stay."""
        rule, names, scalars, c = entry
        states, gradient, update, kind = *_arrays(core, names), core.kind

        def on_slice(part: slice) -> None:
            held = tuple(state[part] for state in states)
            kernels.peek_zero(rule, held, gradient[part], kind, c, scalars, update[part], kind)

        self._run(on_slice, core.numel)

    def commit(self, core: Core, entry: Entry) -> None:
        """Moments after the update."""
        rule, names, scalars, c = entry
        states, gradient, _ = _arrays(core, names)

        def on_slice(part: slice) -> None:
            kernels.commit_zero(rule, tuple(state[part] for state in states), gradient[part], core.kind, c, scalars)

        self._run(on_slice, core.numel)

    def update(self, core: Core, entry: Entry) -> None:
        """``peek`` and ``commit`` in one pass over memory."""
        rule, names, scalars, c = entry
        states, gradient, update, kind = *_arrays(core, names), core.kind

        def on_slice(part: slice) -> None:
            held = tuple(state[part] for state in states)
            kernels.update_zero(rule, held, gradient[part], kind, c, scalars, update[part], kind)

        self._run(on_slice, core.numel)

    def add(self, core: Core, arrived: Slab) -> None:
        """The core of one more micro-batch, added in the dtype of the wire as autograd adds gradients."""
        core.view(core.gradient).add_(core.view(arrived))

    def scale(self, core: Core, coefficient: np.float32) -> None:
        """The core of a clipped gradient."""
        kernels.scale(_array(core, core.gradient), core.kind, coefficient)

    def _run(self, on_slice: Callable[[slice], None], count: int) -> None:
        size = -(-count // (BLOCK * self._workers.threads)) * BLOCK
        self._workers.run(
            [partial(on_slice, slice(start, min(start + size, count))) for start in range(0, count, size)]
        )


def _arrays(core: Core, names: Sequence[str]) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
    """Moments, gradient and update of a core, flat."""
    states = tuple(numpy_view(core.moment(name).view(-1)) for name in names)
    return states, _array(core, core.gradient), _array(core, core.update)


def _array(core: Core, slab: Slab) -> NDArray[Any]:
    return numpy_view(core.view(slab).view(-1))
