"""The happens-before checker and the delay-and-poison harness (DESIGN 7). Production runs without a monitor.

Every actor (a lane, the training thread, the compute stream) owns a vector clock. A ticket carries the clock of its
operation; waiting for the ticket merges it. A buffer remembers the clock times of its last writer and its last
readers. An access that is not ordered behind them by some ticket fails at once, whatever the timing was in this run.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable

import torch

from ..errors import StateError
from ..storage import Ticket, Tracked


class Monitor:
    """Observes lanes and buffers of one engine in tests.

    Args:
        check: fail on any access without a happens-before edge (meaningful on the CPU backend only: on CUDA the
            compute stream's accesses are not observed one by one).
        max_delay: upper bound in seconds of the random delay put before every lane operation.
        poison: fill released and freshly leased buffers with NaN bytes.
        skip: name of one wait that is left out (mutation tests).
        seed: of the random delays.
    """

    def __init__(
        self, *, check: bool = True, max_delay: float = 0.0, poison: bool = True, skip: str | None = None, seed: int = 0
    ) -> None:
        self.check = check
        self.max_delay = max_delay
        self.poison = poison
        self.skip = skip
        self.waits_seen: set[str] = set()
        self._random = random.Random(seed)
        self._clocks: dict[str, dict[str, int]] = {}
        self._lock = threading.Lock()

    def wait(self, actor: str, wait_name: str, ticket: Ticket) -> bool:
        """``actor`` waits for ``ticket``. Returns False when this wait is to be left out."""
        with self._lock:
            self.waits_seen.add(wait_name)
            if wait_name == self.skip:
                return False
        return True

    def merge(self, actor: str, ticket: Ticket) -> None:
        """After the wait: everything the ticket's operation had seen happened before ``actor``'s next access."""
        with self._lock:
            if ticket.clock is not None:
                self._join(self._clock(actor), ticket.clock)

    def fork(self, actor: str) -> dict[str, int]:
        """The clock that work submitted by ``actor`` now starts from."""
        with self._lock:
            return self._publish(actor)

    def issue(self, issuer: str, actor: str) -> None:
        """``issuer`` issues work of ``actor``: what it has done and waited for is before that work. Not the reverse."""
        with self._lock:
            self._join(self._clock(actor), self._publish(issuer))

    def start(self, actor: str, origin: dict[str, int] | None) -> None:
        """A lane starts an operation that was submitted at clock ``origin``."""
        if self.max_delay > 0.0:
            with self._lock:
                pause = self._random.choice((0.0, 0.0, self._random.random())) * self.max_delay
            time.sleep(pause)
        with self._lock:
            clock = self._tick(actor)
            if origin is not None:
                self._join(clock, origin)

    def finish(self, actor: str, ticket: Ticket) -> None:
        """An operation of ``actor`` is over: its ticket carries the clock."""
        with self._lock:
            ticket.clock = self._publish(actor)

    def access(self, actor: str, what: str, reads: Iterable[Tracked] = (), writes: Iterable[Tracked] = ()) -> None:
        """Record accesses of ``actor``; raises StateError on one that nothing orders."""
        if not self.check:
            return
        with self._lock:
            clock = self._clock(actor)
            now = clock[actor]
            for buffer in writes:
                self._require_after_write(actor, what, clock, buffer)
                for reader, (when, reading) in buffer.last_reads.items():
                    if reader != actor and clock.get(reader, 0) < when:
                        raise StateError(
                            f"race: {what} ({actor}) writes {buffer.name} while {reading} ({reader}) may still read it"
                        )
                buffer.last_write = (actor, now, what)
                buffer.last_reads = {}
            for buffer in reads:
                self._require_after_write(actor, what, clock, buffer)
                buffer.last_reads[actor] = (now, what)

    def spoil(self, buffer: Tracked) -> None:
        """Fill a buffer that nobody may read with NaN (all bits one: NaN in every floating dtype)."""
        if self.poison:
            buffer.flat.view(torch.uint8).fill_(255)

    @staticmethod
    def _require_after_write(actor: str, what: str, clock: dict[str, int], buffer: Tracked) -> None:
        if buffer.last_write is None:
            return
        writer, when, writing = buffer.last_write
        if writer != actor and clock.get(writer, 0) < when:
            raise StateError(f"race: {what} ({actor}) uses {buffer.name} before {writing} ({writer}) has finished")

    def _clock(self, actor: str) -> dict[str, int]:
        return self._clocks.setdefault(actor, {actor: 1})

    def _publish(self, actor: str) -> dict[str, int]:
        # what the actor does next is later than what it publishes now
        published = dict(self._clock(actor))
        self._tick(actor)
        return published

    def _tick(self, actor: str) -> dict[str, int]:
        clock = self._clock(actor)
        clock[actor] += 1
        return clock

    @staticmethod
    def _join(clock: dict[str, int], other: dict[str, int]) -> None:
        for name, when in other.items():
            if clock.get(name, 0) < when:
                clock[name] = when
