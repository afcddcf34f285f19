"""Sums of micro-batches' gradients, which a clip needs for their norm: cores are added, and do not know it.

‖ΣG‖² has the products of all pairs of micro-batches in it, and neither cores (they lack a part of the gradient) nor the
norms of the parts give those. So the sum itself is kept, in the gradient's dtype and as autograd would add it: on the
device where that has room, else in host memory, from which it comes back once per micro-batch. Nothing but the norm is
taken from it; a script that accumulates and does not clip is found out at its first step, and pays no longer. One that
accumulates by hand says so by its second micro-batch only: in the first step each gradient is kept that the device has
room for.
"""

from __future__ import annotations

import collections
import logging
import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ..plan.host_budget import probe_host_budget
from ..plan.lsp_plan import SUM_STAGES, SUMS_MARGIN
from ..plan.remedies import gib
from ..storage import HostMemory, Slab, Ticket, Tracked
from ..transfer import Backend, copy
from .device_kernels import scale
from .norms import Norms
from .unit import ONE, ParamRecord

if TYPE_CHECKING:
    from .core import Core

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class GradientSum:
    """The gradient of a matrix so far: ``kept`` (on the device) or ``slab`` (on the host, when ``stored`` is over).
    ``clips`` are to be applied before anything is added."""

    kept: torch.Tensor | None = None
    slab: Slab | None = None
    stored: Ticket | None = None
    clips: list[np.float32] = field(default_factory=list)


class _Stage(Tracked):
    """A device buffer as large as the largest gradient. ``used`` is the last compute with it, ``drained`` the last
    transfer that read it."""

    used: Ticket | None = None
    drained: Ticket | None = None


class _Arrival(NamedTuple):
    record: ParamRecord
    sum: GradientSum
    gradient: torch.Tensor
    stage: _Stage
    fetched: Ticket
    clips: tuple[np.float32, ...]
    is_last: bool


class GradientSums:
    """Measures gradients of matrices, and keeps their sums while a clip is to be expected.

    Args:
        backend: lanes and device.
        memory: host allocator.
        norms: measures gradients.
        gpu_memory: caps what sums may take of the device.
    """

    def __init__(self, backend: Backend, memory: HostMemory, norms: Norms, gpu_memory: int | str) -> None:
        self._backend = backend
        self._memory = memory
        self._norms = norms
        self._cap = gpu_memory
        self._total = self._largest = 0
        self._sums: dict[int, GradientSum] = {}
        self._slabs: dict[int, Slab] = {}
        self._is_wanted = True
        self._is_asked = self._has_summed = False
        self._steps = 0
        self._where: str | None = None
        self._stages: list[_Stage] = []
        self._turn = 0
        self._waiting: collections.deque[_Arrival] = collections.deque()

    def expect(self, record: ParamRecord) -> None:
        """A matrix whose gradients will come."""
        size = record.numel * record.spec.dtype.itemsize
        self._total, self._largest = self._total + size, max(self._largest, size)

    def measure(self, record: ParamRecord, core: Core, gradient: torch.Tensor, *, is_last: bool) -> bool:
        """Start the norm of the gradient so far, this micro-batch included.

        Args:
            record: ``has_gradient`` and ``coefficient`` as they are before this gradient.
            core: its core.
            gradient: [m, n], contiguous, on the device; nobody writes it any more.
            is_last: whether a ``step()`` should follow.

        Returns:
            Whether it is the norm of the whole gradient; False: that of this micro-batch.
        """
        if not record.has_gradient:
            self._norms.launch(record, gradient.view(-1))
            self._sums.pop(id(record), None)
            if self._may_grow(is_last=is_last):
                self._begin(record, core, gradient)
            return True
        self._has_summed = True
        found = self._sums.get(id(record))
        if found is None:
            self._norms.launch(record, gradient.view(-1))
            return False
        if record.coefficient != ONE:
            found.clips.append(record.coefficient)
        clips, found.clips = tuple(found.clips), []
        if found.kept is not None:
            found.kept = _clipped(found.kept, clips) + gradient
            self._norms.launch(record, found.kept.view(-1))
            return True
        self._fetch(record, core, found, gradient, clips, is_last=is_last)
        return True

    def clip(self, record: ParamRecord, coefficient: np.float32) -> None:
        """A clip of the gradient so far, which another one follows."""
        if id(record) in self._sums:
            self._sums[id(record)].clips.append(coefficient)

    def finish(self) -> None:
        """All norms of this backward have been started when this returns."""
        while self._waiting:
            self._add(self._waiting.popleft())

    def forget(self, record: ParamRecord) -> None:
        """``grad = None``."""
        self._sums.pop(id(record), None)

    def expects_clip(self) -> None:
        """A clip was asked for."""
        self._is_wanted = self._is_asked = True

    def after_step(self) -> None:
        """What the script did since the last ``step()`` is what it is expected to do next."""
        if self._has_summed:
            self._is_wanted = self._is_asked
        self._has_summed = self._is_asked = False
        self._steps += 1
        if not self._is_wanted or self._steps == 1:
            self._sums.clear()
        if not self._is_wanted:
            self._slabs.clear()
            self._stages.clear()

    def reason(self) -> str:
        """Why the sum of a gradient is not known."""
        if self._where == "nowhere":
            return f"neither the GPU nor host memory has room for the {gib(self._total)} of all gradients"
        return "nothing said beforehand that more micro-batches would follow, or that they would be clipped"

    # -- internals -------------------------------------------------------------------------------------------------

    def _may_grow(self, *, is_last: bool) -> bool:
        """Whether another micro-batch may add to a gradient, and the norm of the sum will be asked for."""
        if not self._is_wanted or (is_last and self._steps):
            return False
        place = self._place()
        return place == "on the device" if is_last else place is not None

    def _place(self) -> str | None:
        """Where sums are kept, decided in the backward of the first: most other memory is taken then."""
        if self._where is None:
            self._where = place_of(self._total, self._backend.device, self._cap)
            if self._where != "on the device":
                words = "SlideFormer: sums of gradients, for their norm, take %s: %s; the GPU has no room for them."
                logger.info(words, gib(self._total), self._where)
        return None if self._where == "nowhere" else self._where

    def _begin(self, record: ParamRecord, core: Core, gradient: torch.Tensor) -> None:
        made = self._sums[id(record)] = GradientSum()
        if self._where == "on the device":
            made.kept = gradient
            return
        if id(record) not in self._slabs:
            size = gradient.numel() * gradient.element_size()
            self._slabs[id(record)] = self._memory.allocate(f"sum of gradients of {core.name}", size, dma=True)
        made.slab = self._slabs[id(record)]
        stage = self._take_stage()
        self._backend.order("compute after stage of gradient sums drained", stage.drained)
        self._backend.touch(f"sum of gradients of {core.name}", writes=(stage,))
        _view(stage.flat, gradient).copy_(gradient)
        self._store(core, made, gradient, stage)

    def _fetch(
        self,
        record: ParamRecord,
        core: Core,
        found: GradientSum,
        gradient: torch.Tensor,
        clips: tuple[np.float32, ...],
        *,
        is_last: bool,
    ) -> None:
        slab, stage = found.slab, self._take_stage()
        if slab is None:
            return
        fetched = self._backend.h2d.submit(
            f"sum of gradients of {core.name} to the device",
            partial(copy, _view(stage.flat, gradient), _view(slab.flat, gradient)),
            after={
                "h2d after sum of gradients stored": found.stored,
                "h2d after stage of gradient sums used": stage.used,
                "h2d after stage of gradient sums drained": stage.drained,
            },
            reads=(slab,),
            writes=(stage,),
            keep=(slab, stage),
            line=core.line,
        )
        self._waiting.append(_Arrival(record, found, gradient, stage, fetched, clips, is_last))

    def _add(self, arrival: _Arrival) -> None:
        record, found, gradient, stage, fetched, clips, is_last = arrival
        core = record.core
        self._backend.order("compute after sum of gradients fetched", fetched)
        self._backend.touch(f"sum of gradients of {record.name}", writes=(stage,))
        total = _view(stage.flat, gradient)
        for coefficient in clips:
            scale(total, coefficient)
        total.add_(gradient)
        self._norms.launch(record, total.view(-1))
        stage.used = self._backend.mark(f"sum of gradients of {record.name}")
        if is_last:
            self._sums.pop(id(record), None)  # another micro-batch would be one too many
        elif core is not None:
            self._store(core, found, gradient, stage)

    def _store(self, core: Core, found: GradientSum, gradient: torch.Tensor, stage: _Stage) -> None:
        slab = found.slab
        if slab is None:
            return
        stage.used = self._backend.mark(f"sum of gradients of {core.name}")
        stage.drained = found.stored = self._backend.d2h.submit(
            f"sum of gradients of {core.name} to the host",
            partial(copy, _view(slab.flat, gradient), _view(stage.flat, gradient)),
            after={"d2h after sum of gradients added": stage.used},
            reads=(stage,),
            writes=(slab,),
            keep=(slab, stage),
            line=core.line,
        )

    def _take_stage(self) -> _Stage:
        if not self._stages:
            for number in range(SUM_STAGES):
                flat = torch.empty(self._largest, dtype=torch.uint8, device=self._backend.device)
                self._stages.append(_Stage(f"stage {number} of sums of gradients", flat))
        self._turn = (self._turn + 1) % SUM_STAGES
        stage = self._stages[self._turn]
        while any(arrival.stage is stage for arrival in self._waiting):
            self._add(self._waiting.popleft())
        return stage


def place_of(needed: int, device: torch.device, cap: int | str) -> str:
    """Where sums of ``needed`` bytes are kept: on the device, in host memory, or nowhere."""
    if device.type != "cuda":
        return "on the device"
    free, _ = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    limit = free + torch.cuda.memory_reserved(device)
    room = (limit if isinstance(cap, str) else min(limit, cap)) - allocated
    if needed + limit // SUMS_MARGIN <= room:
        return "on the device"
    return "in host memory" if needed <= probe_host_budget().available else "nowhere"


def _clipped(gradient: torch.Tensor, clips: tuple[np.float32, ...]) -> torch.Tensor:
    """A copy where there is anything to clip: whoever kept the gradient keeps it as it was."""
    if not clips:
        return gradient
    made = gradient.clone()
    for coefficient in clips:
        scale(made, coefficient)
    return made


def _view(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return flat[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def is_clip(max_norm: float) -> bool:
    """Whether a call of ``clip_grad_norm_`` is more than a measurement."""
    return not math.isinf(max_norm)
