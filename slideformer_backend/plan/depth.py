"""How far ahead data is read from a drive: as far as it has time to, and as waits for it are long."""

from __future__ import annotations

import math


def rooms_for(
    rooms: int, units: int, size: int, rate: float, *, idle: float, waited: float = math.inf, memory: int = 0
) -> int:
    """For how many units' data there should be room in host memory at once.

    In a steady pipeline a few suffice: one is read, one used, one written back. Where that is not enough, the drive is
    behind in one part of a step and stands idle in another, and what it reads there in time needs room until its use.
    A room beyond those would only save what a unit that stays in memory saves too, and more.

    Args:
        rooms: that there are.
        units: whose data is in files.
        size: bytes of the largest of them.
        rate: byte/s that the drive reads.
        idle: seconds of a step in which it neither reads nor writes.
        waited: seconds of a step in which somebody waits for such data.
        memory: bytes of host memory that more rooms may take.
    """
    if not size or rate <= 0.0:
        return rooms
    seconds = size / rate
    more = min(idle / seconds, waited / seconds + 0.5, memory / size, units - rooms)
    return rooms + max(0, math.floor(more))
