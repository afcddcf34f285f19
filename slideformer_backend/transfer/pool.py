"""Gradient buffers on the host: one flat buffer holds one unit's gradient."""

from __future__ import annotations

import collections
import time
import weakref
from typing import Any, Protocol

import torch

from ..storage import HostMemory, Slab, Ticket

LETTING_GO = 0.2
"""Seconds."""


class Content(Protocol):
    """What belongs into a buffer."""

    def write(self) -> Ticket:
        """Start writing it; what the ticket says is over when it is there."""


class GradientBuffer:
    """A flat host buffer for one unit's gradient.

    Attributes:
        slab: the memory.
        drained: the operation after which its content may be overwritten.
        sent: the last transfer that read it (an accumulated gradient on its way back to the device).
        handles: gradient tensors that were shown to user code and may still be held by it.
        is_aliased: user code holds memory of this buffer that no handle covers; it is never recycled.
    """

    __slots__ = ("_content", "_filled", "drained", "handles", "is_aliased", "sent", "slab")

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.drained: Ticket | None = None
        self._filled: Ticket | None = None
        self._content: Content | None = None
        self.sent: Ticket | None = None
        self.handles: dict[int, weakref.ref[Any]] = {}
        self.is_aliased = False

    @property
    def filled(self) -> Ticket | None:
        """The operation after which its content may be read. A content that is elsewhere comes over now."""
        content = self.take_back()
        if content is not None:
            self._filled = content.write()
        return self._filled

    @filled.setter
    def filled(self, ticket: Ticket | None) -> None:
        self._filled = ticket

    def defer(self, content: Content) -> None:
        """Its content is elsewhere, and comes when somebody asks for it."""
        self._content = content

    def take_back(self) -> Content | None:
        """A content that is elsewhere, which will not come by itself any more."""
        content, self._content = self._content, None
        return content

    def is_held(self) -> bool:
        """Whether user code may still look at this buffer."""
        return self.is_aliased or any(handle() is not None for handle in self.handles.values())

    def may_move(self) -> bool:
        """Whether no tensor or array over this memory is left but those in ``handles``, which can be led elsewhere. The
        operations on it are over; lanes may need a moment to let go of their last piece of work."""
        deadline = time.monotonic() + LETTING_GO
        while self.is_aliased and tensors_over(self.slab.flat) > self._own_tensors():
            if time.monotonic() > deadline:
                return False
            time.sleep(1e-3)
        return True

    def _own_tensors(self) -> int:
        handles = [handle for reference in self.handles.values() if (handle := reference()) is not None]
        with torch._C.DisableTorchFunctionSubclass():
            between = sum(handle._base is not None and handle._base is not self.slab.flat for handle in handles)
        return 1 + len(handles) + between


def tensors_over(flat: torch.Tensor) -> int:
    """How many tensors share the memory of ``flat``, itself included (a numpy array holds the one it was made from)."""

    def count(tensor: torch.Tensor) -> int:
        return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))

    return 1 + count(flat) - count(torch.empty(0))


class GradientPool:
    """Interchangeable gradient buffers of one size class.

    A unit takes a buffer when its gradient arrives and gives one back when an update has consumed it, so the pool grows
    to what is in flight at once and no further. Buffers that user code still looks at are left to it.
    """

    def __init__(self, memory: HostMemory, name: str, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = memory
        self._name = name
        self._free: collections.deque[GradientBuffer] = collections.deque()
        self._created = 0

    def take(self, *, spare: int) -> GradientBuffer:
        """A buffer to write once its ``drained`` ticket has passed.

        Args:
            spare: how many returned buffers may stay in flight before a new one is not worth its memory; a buffer
                whose content is already consumed is always preferred. Otherwise the last but one is taken. Units are
                returned in the order of a backward, and the update lane serves those that a forward needs next,
                returned last, before the others, so waiting for an early one would mean waiting for all; but the last
                one's own gradient arrives just before the one that this buffer is for, and there is not a moment left
                between an update that takes as long as a backward and the next arrival.
        """
        for buffer in self._free:
            if self._is_ready(buffer):
                self._free.remove(buffer)
                return buffer
        if self._free and len(self._free) >= spare:
            buffer = self._free[-min(2, len(self._free))]
            self._free.remove(buffer)
            return buffer
        self._created += 1
        slab = self._memory.allocate(f"gradient buffer {self._name}.{self._created}", self.nbytes, dma=True)
        return GradientBuffer(slab)

    def give(self, buffer: GradientBuffer, drained: Ticket | None) -> None:
        """Return a buffer whose content is consumed once ``drained`` has passed."""
        if buffer.is_held():
            return  # HAZARDS: user code keeps what `p.grad` showed it; the memory goes with the last such tensor
        buffer.drained = drained
        buffer.filled = buffer.sent = None
        buffer.handles.clear()
        self._free.append(buffer)

    def shrink(self, *, keep: int) -> None:
        """Free returned buffers beyond ``keep``."""
        while len(self._free) > keep:
            buffer = self._free.popleft()
            if buffer.drained is not None:
                buffer.drained.synchronize()

    @staticmethod
    def _is_ready(buffer: GradientBuffer) -> bool:
        return buffer.drained is None or buffer.drained.is_complete
