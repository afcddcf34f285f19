"""The unit record: the one place that holds all facts of a unit, and of each of its parameters."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from ..optim.rules import Rule
from ..plan import UnitLayout
from ..plan.layout import ParamSpec, Place
from ..storage import Slab, Tracked, numpy_view
from ..transfer import GradientBuffer, Ticket
from .operation import Operation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .binding import Binding
    from .core import Core
    from .filed import Spilled
    from .visit import Second, Visit
    from .window import GradientSlot, WeightSlot

ONE = np.float32(1.0)
Kind = Literal["bf16", "fp16", "fp32"]
KINDS: dict[torch.dtype, Kind] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Where(Enum):
    """Where a unit's parameters are."""

    HOST = auto()
    """Outside the window: each parameter is its guarded host tensor; user code may look at it at any time."""
    FORWARD = auto()
    """Leased to a running forward (or recompute): parameters are views of a weight slot."""
    BACKWARD = auto()
    """Between the recompute and the last weight gradient: parameters in a weight slot, gradients in a gradient slot."""
    RESIDENT = auto()
    """An edge unit: parameters are on the device for good, guarded."""


class Weights(Enum):
    """What the host working weights of a unit hold."""

    CURRENT = auto()
    """The weights after every ``step()`` so far."""
    SPECULATIVE = auto()
    """The weights after the predicted next ``step()``, which has not been called (DESIGN 4.1)."""
    STALE = auto()
    """To be recomputed from (p, m, v, logged gradient) before their next use."""


class SquareSum:
    """The sum of squares of one gradient, once the norm lane has filled it in. A gradient whose content changes gets a
    new one, so that a measurement still in flight cannot be taken for the new content's."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None


class Entry(NamedTuple):
    """A redo-log entry: one update of one parameter. Two equal entries update to the same bits."""

    rule: Rule
    states: tuple[str, ...]
    scalars: tuple[np.float32, ...]
    coefficient: np.float32


class Before(NamedTuple):
    """What a parameter held before its unit's forward wrote it; None: the write changed nothing."""

    record: ParamRecord
    value: torch.Tensor | None
    is_replaced: bool


class _WeaklyReferable:
    __slots__ = ("__weakref__",)


@dataclass(eq=False, slots=True)
class ParamRecord(_WeaklyReferable):
    """One parameter of a unit.

    ``entry`` is the logged, uncommitted update; ``predicted`` the update that the working weights already contain and
    ``step()`` has not confirmed. ``coefficient`` is a clip that was recorded and not yet applied to the gradient.
    """

    name: str
    parameter: nn.Parameter
    unit: Unit
    spec: ParamSpec
    place: Place
    host: torch.Tensor
    own_class: type
    guarded_class: type
    leased_class: type
    has_gradient: bool = False
    coefficient: np.float32 = ONE
    square_sum: SquareSum | None = None
    steps: int = 0
    binding: Binding | None = None
    group: dict[str, Any] | None = None
    entry: Entry | None = None
    predicted: Entry | None = None
    is_exposed: bool = False
    is_lent: bool = False
    """Exposed through memory that user code got hold of, and may write at any time before the unit is used."""
    aliases: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    """What user code may hold over the parameter's memory."""
    device_states: dict[str, torch.Tensor] = field(default_factory=dict)
    """Master and moments of a parameter whose unit updates on the device, flat fp32."""
    widened: torch.Tensor | None = None
    """What user code's hooks have made of an arriving gradient that is narrower than the parameter."""
    core: Core | None = None
    """Of a matrix whose gradients are compressed (``strategy: lsp``)."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.spec.shape.numel()

    @property
    def gradient_kind(self) -> Kind:
        """The kernels' name of the gradient's dtype."""
        return KINDS[self.spec.dtype]

    @property
    def weight_kind(self) -> Kind:
        """The kernels' name of the working dtype."""
        return KINDS[self.spec.working]

    @property
    def shows_master(self) -> bool:
        """Whether the tensor shown outside the window is the fp32 master and not the working weight."""
        return self.spec.working != self.spec.dtype

    def weight_array(self, count: int | None = None) -> NDArray[Any]:
        """The host working weights, flat; ``count`` elements from there on, when that is more than this parameter."""
        return numpy_view(self.unit.weights.view(self.spec.working, self.place.weight, count or self.numel))

    def state_array(self, name: str, count: int | None = None) -> NDArray[np.float32]:
        """One fp32 state array (``master`` included), flat; ``count`` as for ``weight_array``."""
        return numpy_view(self.unit.states[name].view(torch.float32, self.place.state * 4, count or self.numel))

    def gradient_view(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter's part of a flat gradient buffer or slot, in the parameter's shape and dtype."""
        start, dtype = self.place.gradient, self.spec.dtype
        return flat[start : start + self.numel * dtype.itemsize].view(dtype).view(self.spec.shape)

    def weight_view(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter's part of a flat weight slab or slot, in the parameter's shape and working dtype."""
        start, dtype = self.place.weight, self.spec.working
        return flat[start : start + self.numel * dtype.itemsize].view(dtype).view(self.spec.shape)


@dataclass(eq=False, slots=True)
class Unit:
    """What slides (a repeated block), or an edge unit that stays on the device.

    Tickets: ``updated`` is the last operation that wrote host working weights or states, ``made`` the last one that
    wrote the weights, ``sent`` the last transfer that read them, ``measured`` the last norm of the gradient,
    ``refreshed`` (edge units) the last transfer into the resident parameters, ``pulled`` the last one that brought them
    to the host, ``copied`` the last one that read the device gradients.
    """

    index: int
    name: str
    module: nn.Module | None
    layout: UnitLayout
    weights: Slab
    where: Where
    records: list[ParamRecord] = field(default_factory=list)
    states: dict[str, Slab] = field(default_factory=dict)
    updates_on_device: bool = False
    """States and updates are on the device too (``DeviceUnits``); the host keeps nothing of the unit."""
    rounds_half_up: bool = False
    """bf16 weights are the high half of a split master (``immediate``), on the device as on the host."""
    weights_are: Weights = Weights.CURRENT
    gradient: GradientBuffer | None = None
    logged: GradientBuffer | None = None
    weight_slot: WeightSlot | None = None
    gradient_slot: GradientSlot | None = None
    content: int = 0
    """Counts changes of the working weights: a slot filled at another count is out of date."""
    spill: Spilled | None = None
    """States that wait in files; None: all are in ``states`` for good."""
    filed: Spilled | None = None
    """Working weights that wait in a file; None: they are in ``weights`` for good."""
    steps: int = 0
    """Counts ``step()`` calls that changed this unit: a graph of another count is stale."""
    leases: int = 0
    lent: list[tuple[ParamRecord, torch.Tensor | None]] = field(default_factory=list)
    """What was handed out as ``parameter.data`` during the lease; None: ``parameter.data`` was assigned."""
    notes_writes: bool = False
    """Resident: its forward runs, and graphs keep what was there before a write."""
    forward: object = None
    """What stands for the module's forward while the unit is managed."""
    opens: int = 0
    arrived: set[int] = field(default_factory=set)
    """``id`` of the records whose gradient was written in the open backward."""
    visits: weakref.WeakSet[Visit] = field(default_factory=weakref.WeakSet)
    """Forwards whose graph is alive."""
    second: Second | None = None
    """The graph that the open backward leaves (``create_graph=True``)."""
    resident: Tracked = field(default_factory=lambda: Tracked("resident parameters", torch.empty(0)))
    """Stands for the parameters of an edge unit on the device, for the monitor."""
    resident_gradient: Tracked = field(default_factory=lambda: Tracked("resident gradients", torch.empty(0)))
    """Stands for the gradients that autograd holds of an edge unit."""
    norms: Tracked = field(default_factory=lambda: Tracked("sums of squares", torch.empty(0)))
    """Stands for the results of the last norm."""
    updated: Ticket | None = None
    made: Ticket | None = None
    operations: list[Operation] = field(default_factory=list)
    """Those not known to have succeeded, in order: from the first that failed on, none has been done."""
    sent: Ticket | None = None
    measured: Ticket | None = None
    refreshed: Ticket | None = None
    pulled: Ticket | None = None
    copied: Ticket | None = None

    @property
    def is_resident(self) -> bool:
        """Whether the unit stays on the device."""
        return self.where is Where.RESIDENT

    @property
    def line(self) -> int:
        """Its line on the update lane: edge units are needed first and last, blocks in forward order."""
        return -1 - self.index if self.is_resident else self.index

    @property
    def trainable(self) -> list[ParamRecord]:
        """The parameters that own a gradient and states."""
        return [record for record in self.records if record.spec.is_trainable]

    @property
    def with_gradient(self) -> list[ParamRecord]:
        """The parameters whose ``grad`` is not None."""
        return [record for record in self.records if record.has_gradient]

    @property
    def exposed(self) -> list[ParamRecord]:
        """The parameters that user code may have written since their last use."""
        return [record for record in self.records if record.is_exposed]

    @property
    def unfrozen(self) -> list[ParamRecord]:
        """The parameters that were frozen when the unit was laid out, and train now."""
        with torch._C.DisableTorchFunctionSubclass():
            return [r for r in self.records if not r.spec.is_trainable and r.parameter.requires_grad]
