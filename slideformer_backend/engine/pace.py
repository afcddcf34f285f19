"""After the first steps: how many units are read ahead, from what the drive and everybody else have shown."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import NamedTuple

from ..config import SlideFormerConfig
from ..plan.depth import rooms_for
from ..plan.host_budget import probe_host_budget
from ..storage import BlockTier, HostMemory
from ..transfer import Backend, Lane
from .residency import OBSERVED_STEPS
from .ring import Ring
from .spill import Spill

logger = logging.getLogger(__name__)

FIRST, LAST = OBSERVED_STEPS + 1, OBSERVED_STEPS + 3
"""Steps between which is measured, once layers have moved to the device."""
SHARE = 2
"""One in so many parts of host memory that is free may become rooms."""


class _Sample(NamedTuple):
    """Seconds and bytes since the start."""

    now: float
    reading: float
    writing: float
    read: int
    written: int
    waited: dict[str, float]


class Pace:
    """Gives a ring more rooms where updates or copies have waited for a drive that stood idle at other times.

    Args:
        config: ``host_memory`` caps what rooms may take.
        backend: whose lanes tell what they did.
        spill: the rings.
        memory: what is allocated.
    """

    def __init__(self, config: SlideFormerConfig, backend: Backend, spill: Spill, memory: HostMemory) -> None:
        self._cap = config.host_memory
        self._backend = backend
        self._spill = spill
        self._memory = memory
        self._steps = 0
        self._first: _Sample | None = None

    def after_step(self) -> None:
        """A step has been taken."""
        tier = self._spill.tier
        self._steps += 1
        if not isinstance(tier, BlockTier) or self._steps > LAST:
            return
        if self._steps == FIRST:
            self._first = self._sample(tier)
        elif self._steps == LAST and self._first is not None:
            self._decide(self._first, self._sample(tier))

    def _sample(self, tier: BlockTier) -> _Sample:
        lanes = self._backend
        return _Sample(
            time.perf_counter(),
            lanes.load.busy_seconds + lanes.weights_in.busy_seconds,
            lanes.store.busy_seconds + lanes.weights_out.busy_seconds,
            tier.bytes_read,
            tier.bytes_written,
            {ring.names.what: sum(lane.waited[name] for lane, name in self._waits(ring)) for ring in self._rings},
        )

    @property
    def _rings(self) -> tuple[Ring, Ring]:
        return self._spill.states, self._spill.weights

    def _waits(self, ring: Ring) -> Iterator[tuple[Lane, str]]:
        yield self._backend.update, ring.names.update_loaded
        yield self._backend.h2d, ring.names.sent_loaded

    def _decide(self, first: _Sample, last: _Sample) -> None:
        steps, span = LAST - FIRST, last.now - first.now
        reading, writing = last.reading - first.reading, last.writing - first.writing
        read, written = last.read - first.read, last.written - first.written
        if not read or reading <= 0.0:
            return
        idle = max(0.0, span - reading - writing) / steps
        for ring in self._rings:
            waited = (last.waited[ring.names.what] - first.waited[ring.names.what]) / steps
            rooms = rooms_for(
                ring.rooms, len(ring.units), ring.largest, read / reading, idle=idle, waited=waited, memory=self._room()
            )  # fmt: skip
            if rooms > ring.rooms:
                logger.info(
                    "SlideFormer: %s of %d units are in host memory at once from now on, not %d: the drive reads %.2f"
                    " GB/s and writes %.2f GB/s, was idle for %.2f s of a step of %.2f s, and was waited for %.2f s.",
                    ring.names.what, rooms, ring.rooms, read / reading / 1e9, written / max(writing, 1e-9) / 1e9, idle,
                    span / steps, waited,
                )  # fmt: skip
                ring.set_rooms(rooms)

    def _room(self) -> int:
        free = probe_host_budget().available // SHARE
        return free if self._cap == "auto" else min(free, self._cap - self._memory.allocated)
