"""Sliding activation checkpoints: the input of a unit waits elsewhere until its recompute (DESIGN 6, 7).

A unit that recomputes keeps one tensor per forward, its input (its *boundary*). With many tokens these are the largest
thing on the device. Here all but the newest few leave for a shelf (host memory, or files) on lanes of their own while
the forward goes on, and come back on others, ahead of the backward that needs them.
"""

from __future__ import annotations

import collections
import logging
import weakref
from collections.abc import Callable, Sequence

import torch

from ..errors import StateError
from ..plan.activations import KEPT_INPUTS
from ..storage import HostMemory, Tracked
from ..transfer import Backend, Ticket
from .shelf import Boundary, HostShelf, Shelf, is_lost

logger = logging.getLogger(__name__)


class Boundaries:
    """Moves boundaries out and back.

    Args:
        backend: lanes and device.
        memory: host allocator.
        is_on: whether boundaries leave the device; may be changed between steps.

    Attributes:
        shelf: where those go that leave from now on.
        lacks_room: asked with the bytes of the first boundary of a forward that would stay: whether all of them should
            leave instead.
    """

    kept = KEPT_INPUTS
    """Newest boundaries that stay on the device: their backward comes first."""
    ahead = 2
    """Boundaries that are on their way back before their unit's backward begins."""
    least = 1 << 16
    """Smaller tensors, in bytes, stay: a transfer of a few microseconds buys nothing."""

    def __init__(self, backend: Backend, memory: HostMemory, *, is_on: bool) -> None:
        self.is_on = is_on
        self.lacks_room: Callable[[int], bool] = _never
        self.shelf: Shelf = HostShelf(backend, memory)
        self._shelves: list[Shelf] = [self.shelf]
        self._backend = backend
        self._order: list[weakref.ref[Boundary]] = []
        self._leaving: collections.deque[tuple[Ticket, Tracked]] = collections.deque()
        self._seen = 0
        self._most_seen = 0
        self._has_given_way = False
        self._is_host_full = False

    @property
    def device(self) -> torch.device:
        """Where units compute."""
        return self._backend.device

    def find(self, args: Sequence[object]) -> int | None:
        """Which of the positional arguments of a unit is its boundary: the first tensor, if it is large and dense."""
        for number, value in enumerate(args):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return number if self._may_leave(value) else None
        return None

    def look(self, args: Sequence[object]) -> bool:
        """Whether boundaries leave; the first one of a forward, among positional arguments of a unit, may begin it."""
        if not self.is_on and not self._seen:
            found = self.find(args)
            tensor = None if found is None else args[found]
            if isinstance(tensor, torch.Tensor) and self.lacks_room(_bytes(tensor)):
                self.is_on = True
                logger.info(
                    "SlideFormer: inputs of layers wait in host memory: they would take half of the GPU's room."
                )
        return self.is_on

    def use(self, shelf: Shelf) -> None:
        """Boundaries leave from now on, for ``shelf``, which is closed here."""
        self.is_on, self.shelf = True, shelf
        self._shelves.append(shelf)

    def place(self, *, away: bool) -> None:
        """Between forwards: whether boundaries leave from now on. If not, nothing is kept of those that have left."""
        self.is_on = away
        if not away:
            self._let_go(most=0)
            self.close()

    def give_way(self) -> None:
        """The script has hooks for saved tensors of its own, which get the inputs of units in our place."""
        if self.is_on and not self._has_given_way:
            self._has_given_way = True
            logger.warning(
                "SlideFormer: the script keeps saved tensors itself (TRL's activation_offloading, torch's save_on_cpu,"
                " or a checkpoint of its own around layers), so inputs of layers go its way and not where `activations`"
                " sends them. Switch that off to have them moved here."
            )

    def begin_forward(self) -> None:
        """A forward of the whole model begins."""
        lost = [gone.error for gone, _ in self._leaving if gone.error is not None]
        self._leaving = collections.deque(pair for pair in self._leaving if pair[0].error is None)
        self.shelf.mend(lost[0] if lost else None)
        self._most_seen, self._seen = max(self._most_seen, self._seen), 0

    def freeable(self, units: int) -> int:
        """Device bytes that leaving frees, or would free, with ``units`` units: all but the newest and the one in
        use."""
        staying = min(units, self.kept + 1)
        return self._most_seen * (units - staying) // max(1, units)

    def share(self, units: int) -> int:
        """Device bytes that one of ``units`` units would hold on to, if the others' leave. None where they leave
        already: its recompute was seen to take in one more, which it fetches ahead."""
        return 0 if self.is_on else self._most_seen // max(1, units)

    def put(self, name: str, tensor: torch.Tensor) -> Boundary:
        """Take charge of the input of a forward of unit ``name``; an older one may start to leave."""
        try:
            return self._put(name, tensor)
        except Exception as error:
            self._settle(self.shelf, error)
            raise

    def note(self, tensor: torch.Tensor) -> None:
        """Count a boundary, so that the plan knows what leaving frees."""
        self._seen += _bytes(tensor)

    def get(self, boundary: Boundary) -> torch.Tensor:
        """The tensor for compute issued from now on; those needed next are on their way."""
        tensor = self._fetch(boundary)
        position = next(i for i, ref in enumerate(self._order) if ref() is boundary)
        for ref in reversed(self._order[max(0, position - self.ahead) : position]):
            ahead = ref()
            if ahead is not None:
                self._fetch(ahead)
        if boundary.loaded is not None:
            try:
                self._backend.order("compute after boundary loaded", boundary.loaded)
            except Exception as error:
                self._read_again(boundary.shelf, error)
                raise
            boundary.loaded.keep = None  # compute is behind the transfer, and so is whoever gets the memory next
            boundary.tensor = boundary.loaded = None  # the recompute holds it from here on
        self._backend.touch(f"recompute of {boundary.name}", reads=(boundary.tracked,))
        return tensor.detach()

    def close(self) -> None:
        """Free what no boundary uses."""
        for shelf in self._shelves:
            shelf.close()

    def abandon(self) -> None:
        """All lanes have ended: free what boundaries still hold."""
        for shelf in self._shelves:
            shelf.abandon()

    def _put(self, name: str, tensor: torch.Tensor) -> Boundary:
        self.note(tensor)
        self._let_go(most=self.shelf.exits - 1)
        boundary = Boundary(name, tensor, self.shelf)
        self._order = [ref for ref in self._order if ref() is not None]
        self._order.append(weakref.ref(boundary))
        if len(self._order) > self.kept:
            oldest = self._order[-1 - self.kept]()
            if oldest is not None and oldest.block is None:
                self._store_if_room(oldest)
        return boundary

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.device == self._backend.device
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and _bytes(tensor) >= self.least
        )

    def _settle(self, shelf: Shelf, error: Exception) -> None:
        """A transfer has failed, and the step with it. Whatever else of the step fails, also what is still under way,
        is waited for here: met by the next step, it would end that one too."""
        for gone, _ in self._leaving:
            is_lost(gone)
        shelf.mend(error)

    def _read_again(self, shelf: Shelf, error: Exception) -> None:
        """A transfer has failed: a backward that is tried again, with its graph kept, finds none that has."""
        self._settle(shelf, error)
        for boundary in [boundary for ref in self._order if (boundary := ref()) is not None]:
            if is_lost(boundary.loaded):
                boundary.tensor = boundary.loaded = None

    def _store_if_room(self, boundary: Boundary) -> None:
        try:
            self._store(boundary)
        except MemoryError as error:
            if not self._is_host_full:
                self._is_host_full = True
                logger.warning("SlideFormer: inputs of layers stay on the device where the host has no room: %s", error)

    def _store(self, boundary: Boundary) -> None:
        tensor = boundary.tensor
        if tensor is None:
            return
        gone = boundary.shelf.store(boundary, tensor.detach())
        boundary.tensor = None  # not before: there may be no room
        self._leaving.append((gone, boundary.tracked))

    def _let_go(self, most: int) -> None:
        """Compute issued from now on may use the memory of boundaries that have left, of all but the last ``most``. The
        host is layers ahead of the device: it would find that memory taken as long as the transfer has not been done,
        and take more. A disk that is behind is waited for."""
        while len(self._leaving) > most:
            gone, tracked = self._leaving.popleft()
            self._backend.order("compute after boundary stored", gone)
            gone.keep = None
            self._backend.touch(f"memory of {tracked.name}", writes=(tracked,))

    def _fetch(self, boundary: Boundary) -> torch.Tensor:
        """Start loading unless it is here."""
        if boundary.tensor is not None:
            return boundary.tensor
        if boundary.block is None:
            raise StateError(f"The boundary of {boundary.name} is neither on the device nor anywhere else.")
        target = torch.empty(boundary.shape, dtype=boundary.dtype, device=self._backend.device)
        boundary.tracked = Tracked(f"boundary of {boundary.name}", torch.empty(0))
        self._backend.touch("earlier use of the memory", writes=(boundary.tracked,))
        boundary.shelf.load(boundary, target)
        boundary.tensor = target
        return target


def _never(nbytes: int) -> bool:
    return False


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
