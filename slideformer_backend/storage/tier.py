"""The contract of storage tiers: named regions of bytes that tensors are written to and read from (DESIGN 8)."""

from __future__ import annotations

import abc
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from ..errors import StateError
from .ticket import Ticket, forked_while

Piece = Callable[[], object]


class Region:
    """A range of bytes in a tier; zeros until it is written. ``nbytes`` is its exact length, ``space`` the longest it
    can have."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self.space = nbytes

    def resize(self, nbytes: int) -> None:
        """See ``Tier.renew``, which also forgets the contents."""
        if not 0 <= nbytes <= self.space:
            raise StateError(f"{self.name} cannot hold that.", found=f"{nbytes} bytes", expected=f"0 to {self.space}")
        self.nbytes = nbytes

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.nbytes} bytes>"


class Tier(abc.ABC):
    """Where bytes wait. Reads and writes are asynchronous: the ticket is the only way to know that one is over.

    Operations that touch the same bytes are ordered by the caller, who waits for a ticket before he goes on; others
    may overlap freely. Until its ticket is complete, the tensor of an operation belongs to the tier. A tensor on a
    device must be ready when it is handed in (the tier knows no streams).

    Args:
        threads: I/O threads, which start with the first operation. They sleep while there is nothing to do.

    Raises (all operations): StateError for a range outside its region or a tensor that is not contiguous; what the
    tickets raise is a StorageError with file, offset and errno.
    """

    name: str

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._regions: set[Region] = set()
        self._executor: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._owner = os.getpid()

    @abc.abstractmethod
    def allocate(self, name: str, nbytes: int) -> Region:
        """A region of exactly ``nbytes`` bytes. Its space is there when this returns.

        Raises:
            StorageError: there is not enough space; nothing is left behind.
        """

    @abc.abstractmethod
    def read(self, region: Region, offset: int, target: torch.Tensor) -> Ticket:
        """Fill ``target`` (contiguous, any dtype) with the bytes from ``offset`` on."""

    @abc.abstractmethod
    def write(self, region: Region, offset: int, source: torch.Tensor) -> Ticket:
        """Put the bytes of ``source`` (contiguous, any dtype) at ``offset``."""

    @abc.abstractmethod
    def renew(self, region: Region, nbytes: int) -> None:
        """Forget what ``region`` holds: from now on it is one of ``nbytes``, in the space that it has.

        For data of other lengths that takes its place; none of its operations may be in flight.

        Raises:
            StateError: ``nbytes`` is more than its space.
        """

    @abc.abstractmethod
    def free(self, region: Region) -> None:
        """Give the space of a region back; none of its operations may be in flight."""

    def describe(self) -> dict[str, object]:
        """Settings in effect, for reports."""
        return {"tier": self.name, "threads": self.threads}

    def close(self) -> None:
        """Finish what was submitted, end the threads and free the regions that are left."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()
        for region in list(self._regions):
            self.free(region)

    def _start(self, name: str, pieces: Sequence[Piece], keep: object) -> Ticket:
        """Run ``pieces`` on the threads; the ticket is issued after the last one and carries the first one's error."""
        ticket = Ticket(name)
        ticket.keep = keep
        if not pieces:
            ticket.issue()
            return ticket
        if os.getpid() != self._owner:
            ticket.issue(error=forked_while(name))  # it would change the files under its parent
            return ticket
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self.threads, thread_name_prefix="slideformer-io")
            executor = self._executor
        operation = _Operation(ticket, len(pieces))
        for number, piece in enumerate(pieces):
            executor.submit(operation.run, number, piece)
        return ticket


class _Operation:
    """The pieces of one read or write."""

    def __init__(self, ticket: Ticket, pieces: int) -> None:
        self._ticket = ticket
        self._left = pieces
        self._errors: dict[int, BaseException] = {}
        self._lock = threading.Lock()
        _OPERATIONS.add(self)

    def run(self, number: int, piece: Piece) -> None:
        """Run one piece, unless another one has failed."""
        error: BaseException | None = None
        if not self._errors:
            try:
                piece()
            except BaseException as caught:  # the ticket carries it to whoever waits
                error = caught
        with self._lock:
            if error is not None:
                self._errors[number] = error
            self._left -= 1
            if self._left:
                return
        self._ticket.keep = None
        self._ticket.issue(error=self._errors[min(self._errors)] if self._errors else None)

    def fail(self) -> None:
        """In a forked child, which has no thread to finish it."""
        if not self._ticket.is_issued:
            self._ticket.issue(error=forked_while(self._ticket.name))


_OPERATIONS: weakref.WeakSet[_Operation] = weakref.WeakSet()


def _fail_all() -> None:
    for operation in list(_OPERATIONS):
        operation.fail()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fail_all)


def flat_bytes(region: Region, offset: int, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as flat uint8, checked to be contiguous and to lie inside ``region`` at ``offset``."""
    if not tensor.is_contiguous():
        raise StateError(f"A tensor for {region.name} is not contiguous.", found=f"strides {tensor.stride()}")
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if offset < 0 or offset + flat.numel() > region.nbytes:
        raise StateError(
            f"A range outside {region.name}.",
            found=f"bytes {offset} to {offset + flat.numel()}",
            expected=f"0 to {region.nbytes}",
        )
    return flat
