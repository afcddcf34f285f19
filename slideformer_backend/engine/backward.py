"""The backward of units: open before the first gradient kernel, close after the last, send the gradient away.

Order of one unit, as in FSDP2: gradient hook on its output (open: weights and gradient slot), recompute, weight
gradients (post-accumulate hooks), identity on its first input (close). Autograd runs ready nodes in reverse order of
creation and gradient accumulation at once, so everything of the unit has run when the identity does.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch

from ..errors import StaleGraphError, UnsupportedError
from ..transfer import Backend
from .edges import Edges, device_gradient, set_device_gradient
from .gradients import Gradients
from .policy import UpdatePolicy
from .unit import ParamRecord, Unit
from .visit import OpenHook, Second, Visit
from .window import GradientSlot, Window


class _Pass:
    """Called when a backward pass is over. Torch keeps it as long as the pass exists: where an exception ended that, it
    goes without having been called, before the exception reaches the script.

    Args:
        end: of a pass that came to its end.
        lost: of one that did not.
    """

    def __init__(self, end: Callable[[], None], lost: Callable[[], None]) -> None:
        self._end = end
        self._lost = lost

    def __call__(self) -> None:
        self._lost = _over
        self._end()

    def __del__(self) -> None:
        self._lost()


def _over() -> None:
    """A pass that has ended leaves nothing to do."""


def _nothing() -> None:
    """No pass yet."""


class Backward:
    """State of the running backward pass (none between passes).

    Args:
        backend: lanes and device.
        window: slots.
        policy: takes arrived gradients.
        edges: the resident units, whose gradients arrive at the end.
        lease: brings a unit's weights to the device (the engine's, which keeps them current), whether as wide as the
            user's or not, and those of the next units towards it.
        expects_step: whether a ``step()`` should follow this backward.
    """

    def __init__(
        self,
        backend: Backend,
        window: Window,
        policy: UpdatePolicy,
        edges: Edges,
        lease: Callable[[Unit, bool], None],
        expects_step: Callable[[], bool],
    ) -> None:
        self.backend = backend
        self.window = window
        self.policy = policy
        self.edges = edges
        self.count = 0
        """Backward passes since the last ``step()``."""
        self.gradients = Gradients(backend, window, policy)
        self._lease = lease
        self._expects_step = expects_step
        self._task = -1
        self._open: list[Visit] = []
        self._apart: set[int] = set()
        """Parameters whose gradient of the open backward has memory of its own until its unit is closed."""
        self.is_last = True
        """Whether a ``step()`` should follow the running backward."""
        self._pass: Callable[[], _Pass | None] = _nothing
        self._failure: Exception | None = None
        """Of the end of a pass that an exception had ended already; raised by whatever follows."""
        self.thread = threading.get_ident()
        """The thread that ran the last forward with gradients: it trains."""

    @property
    def is_running(self) -> bool:
        """Whether a pass has begun and not been finished."""
        return self._task != -1

    @staticmethod
    def is_inside() -> bool:
        """Whether the calling thread runs inside a backward pass."""
        return torch._C._current_graph_task_id() != -1

    def finish_outside(self) -> None:
        """Called by whatever follows a backward: one that an exception ended is finished first."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if not self.is_running or self.is_inside():
            return
        # on the thread that trains it has been ended by an exception, even if torch's own thread still lets go of it
        if threading.get_ident() != self.thread and self._pass() is not None:
            raise UnsupportedError(
                "A thread used a parameter or gradient while another one was in a backward of the model.",
                found=f"thread {threading.current_thread().name}",
                remedy="read parameters on the thread that trains, or between backward and the next one, and give other"
                " threads copies (p.detach().clone())",
            )
        self._abandon()

    def check(self) -> None:
        """Called by a backward that has reached the model's output: raises what ``begin`` would, if it is a new one."""
        if torch._C._current_graph_task_id() != self._task:
            self.policy.check_backward()

    def begin(self) -> None:
        """Called by every hook: the first one of a pass starts it."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        if self.is_running:
            self._abandon()
        self.policy.check_backward()
        self._task = task
        self.count += 1
        self.is_last = self._expects_step()
        running = _Pass(self.finish, self._lost)
        self._pass = weakref.ref(running)
        torch.autograd.Variable._execution_engine.queue_callback(running)

    def open(self, visit: Visit) -> None:
        """Weights and gradient slot of the visit's unit are ready for compute issued from now on."""
        self.begin()
        if visit.is_open:
            return
        unit = visit.unit
        if visit.steps != unit.steps:
            raise StaleGraphError(
                f"{unit.name}: its weights were updated by optimizer.step() after the forward whose backward runs now;"
                " the gradient would mix two models.",
                remedy="call backward before step, or run the forward again",
            )
        visit.is_open = True
        visit.begin()
        if isinstance(visit, Second):
            for kept in visit.kept:
                self.open(kept)
        self._open.append(visit)
        unit.opens += 1
        if unit.opens > 1:
            return
        for again in unit.visits:  # of a graph that was kept: their gradients are still to come
            again.begin_again(self._task)
        self._lease(unit, visit.is_wide)
        if unit.layout.gradient_bytes:
            self.gradients.begin(unit)
            if unit.gradient is not None and unit.gradient_slot is not None:
                self._show_pending(unit, unit.gradient_slot)
        self.backend.begin("backward", unit.name)

    def reach(self, visit: Visit, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of an output of the visit has arrived: open it. May return what takes the gradient's place."""
        if not isinstance(visit, Second):
            # All that was made later has run. Visits that the pass does not leave by their node end here.
            for later in [later for later in self._open if later.number > visit.number and not later.awaited]:
                if not isinstance(later, Second):
                    self.close(later)
        self.open(visit)
        second = self._second(visit.unit)
        if second is None or gradient is None or not gradient.requires_grad:
            return None
        return second.enter_by(gradient, self.leave)

    def leave(self, visit: Visit, gradient: torch.Tensor | None) -> None:
        """The gradient at a node of the visit is complete: with the last one, close it."""
        if not visit.is_open:
            return
        self._enter_by(self._second(visit.unit), gradient)
        if visit.left():
            self.close(visit)

    def arriving(self, record: ParamRecord, gradient: torch.Tensor) -> None:
        """Tensor hook of a sliding parameter, the first one."""
        record.widened = None
        self._enter_by(self._second(record.unit), gradient)

    def _second(self, unit: Unit) -> Second | None:
        """The graph that the running pass makes of the backward of ``unit``. To be asked in hooks and nodes only, where
        torch's grad mode is the pass's."""
        if not torch.is_grad_enabled():
            return None
        if unit.second is not None:
            return unit.second
        visits = [visit for visit in self._open if visit.unit is unit]
        second = Second(unit, visits)
        unit.second = second if visits else None
        return second

    def _enter_by(self, second: Second | None, gradient: torch.Tensor | None) -> None:
        if second is not None and gradient is not None and gradient.requires_grad:
            gradient.register_hook(OpenHook(self.reach, second))

    def close(self, visit: Visit) -> None:
        """The last gradient kernel of the visit has been issued: the unit leaves the window."""
        if not visit.is_open:
            return
        unit = visit.unit
        visit.task = self._task
        visit.is_open, visit.is_done = False, unit.second is None  # with a second one, a later pass comes here again
        self._open.remove(visit)
        unit.opens -= 1
        if unit.opens:
            return
        unit.second = None
        for record in unit.trainable:
            if id(record) in self._apart:
                self._take_apart(record)
            record.parameter.grad = None
        self.backend.end("backward", unit.name)
        self.window.release(unit)
        self.gradients.end(unit, is_last=self.is_last)

    def accumulated(self, record: ParamRecord) -> None:
        """Post-accumulate hook of a sliding parameter: its gradient goes to the gradient slot."""
        unit, parameter = record.unit, record.parameter
        gradient = device_gradient(record) if record.widened is None else record.widened
        record.widened = None
        if unit.gradient_slot is None or not unit.opens:
            self._open_late(record)
        slot = unit.gradient_slot
        if gradient is None or slot is None:
            return
        if gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"{record.name} received a sparse gradient.", remedy="build the layer with sparse=False"
            )
        if torch.is_grad_enabled():  # autograd would add to it in another tensor each time, with a graph
            raise UnsupportedError(
                f"backward(create_graph=True) would leave the gradient of {record.name} on the device, with a graph.",
                remedy="take such gradients with torch.autograd.grad(..., create_graph=True)",
            )
        view = slot.view(record)
        self.backend.touch(f"gradient of {unit.name}", writes=(slot,))
        with torch.no_grad():
            if gradient.data_ptr() == view.data_ptr():
                pass  # autograd added in place
            elif id(record) in self._apart:
                view.copy_(gradient)  # it holds the whole sum
            elif record.has_gradient or id(record) in unit.arrived:
                view.add_(gradient.to(view.device))  # a late one was accumulated on the host
            else:
                view.copy_(gradient)
        unit.arrived.add(id(record))
        if view.dtype != parameter.dtype:
            parameter.grad = None
        elif _has_other_hooks(parameter):  # they may keep what they see, for longer than the slot is this unit's
            if id(record) not in self._apart:
                self._apart.add(id(record))
                parameter.grad = view.clone()
        else:
            parameter.grad = view

    def _open_late(self, record: ParamRecord) -> None:
        """A gradient has arrived while its unit is closed: what only a second backward contributes goes through nodes
        of the forward (a transposed weight), which run after all of that backward."""
        set_device_gradient(record, None)  # whatever follows, autograd must not add to it
        second = next((visit for visit in record.unit.visits if isinstance(visit, Second)), None)
        if second is None:
            unit = record.unit
            if unit.module is not None and unit.module.__dict__.get("forward") is not unit.forward:
                raise UnsupportedError(
                    f"The forward of {unit.name} was replaced after accelerator.prepare() by one that does not call it:"
                    " the layer ran without SlideFormer.",
                    remedy="replace it before prepare, or let the new one call module.forward as it was after prepare",
                )
            raise UnsupportedError(
                f"{record.name} received a gradient outside its block's forward (a loss or a module that"
                " uses a sliding weight directly).",
                remedy="compute such terms inside the block, or exclude this weight from the loss",
            )
        self.open(second)
        self._apart.discard(id(record))  # that one is not in the sum of earlier ones yet

    def _take_apart(self, record: ParamRecord) -> None:
        """What hooks of user code made of a gradient counts."""
        self._apart.discard(id(record))
        unit, gradient = record.unit, record.parameter.grad
        if gradient is None:
            unit.arrived.discard(id(record))
            self.policy.forget(record)
        elif unit.gradient_slot is not None:
            self.backend.touch(f"gradient of {unit.name}", writes=(unit.gradient_slot,))
            with torch.no_grad():
                unit.gradient_slot.view(record).copy_(gradient)

    def finish(self) -> None:
        """Close what is still open and send the gradients of edge units; after an exception too."""
        if not self.is_running:
            return
        self._task = -1
        for visit in list(self._open):
            self.close(visit)
        self.edges.after_backward(is_last=self.is_last)

    def _abandon(self) -> None:
        """Finish a pass that an exception ended: its gradients are partial, and nothing is updated from them."""
        self.is_last = False
        self.finish()
        self.policy.report_unconfirmed()

    def _lost(self) -> None:
        """Torch lets go of a pass that an exception ended: parameters become what the script knows before it sees the
        exception. Where torch's own thread lets go last, the training thread may be further, and ends the pass."""
        if threading.get_ident() == self.thread:
            try:
                self.finish_outside()
            except Exception as error:
                self._failure = error.with_traceback(None)  # its frames hold the graph

    def _show_pending(self, unit: Unit, slot: GradientSlot) -> None:
        # DESIGN 4.4: autograd adds to the gradient of earlier micro-batches, in the parameter's dtype
        for record in unit.with_gradient:
            if record.spec.dtype == record.parameter.dtype:
                view = slot.view(record)
                is_apart = _has_other_hooks(record.parameter)
                if is_apart:
                    self._apart.add(id(record))
                record.parameter.grad = view.clone() if is_apart else view


def _has_other_hooks(parameter: torch.Tensor) -> bool:
    """Whether user code has post-accumulate hooks on it beside ours."""
    return len(parameter._post_accumulate_grad_hooks or ()) > 1
