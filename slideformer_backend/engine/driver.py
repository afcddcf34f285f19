"""The driver of a unit: its forward with weights fetched, recomputed in backward (DESIGN 3.3, D2)."""

from __future__ import annotations

import contextlib
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..errors import StateError
from .arguments import Arguments
from .guard import tensors_in
from .inputs import Inputs
from .reach import Viewer
from .recompute import Runner, autocast_cache_off, hf_checkpointing_off, unit_context
from .unit import Unit, Where
from .visit import OpenHook, Visit
from .writes import noted, replayed

if TYPE_CHECKING:
    from .engine import Engine


class UnitForward:
    """Takes the place of a unit's ``forward``; ``undo`` puts the original back.

    A deep copy of the module carries this bound to the copy; the copy is not managed and runs the original forward.
    """

    def __init__(self, engine: Engine, unit: Unit, module: nn.Module) -> None:
        self._engine = weakref.ref(engine)
        self._unit = unit
        self._module = weakref.ref(module)
        self._viewer = Viewer()
        self._own = module.__dict__.get("forward")
        # module.compile() compiles what calls `forward`, us included: compiled code runs inside, in its place.
        self._compiled = module.__dict__.pop("_compiled_call_impl", None)
        self.__name__ = "forward"
        self.__doc__ = type(module).forward.__doc__
        self.__signature__ = inspect.signature(type(module).forward)
        module.forward = unit.forward = types.MethodType(self, module)

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine()
        if engine is None or module is not self._module():
            return self._original(module)(*args, **kwargs)
        if torch.is_grad_enabled():
            return self._with_graph(engine, module, args, kwargs)
        unit = self._unit
        if unit.is_resident:
            with noted(unit):
                return self._original(module)(*args, **kwargs)
        watch = engine.enter(unit, Where.FORWARD, is_wide=engine.is_wide(unit))
        try:
            with unit_context(module):
                return self._original(module)(*args, **kwargs)
        finally:
            engine.leave(unit, watch)

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitForward:
        return self

    def undo(self) -> None:
        """Put the original forward back."""
        module = self._module()
        if module is None:
            return
        module.__dict__.pop("forward", None)
        if self._own is not None:
            module.__dict__["forward"] = self._own
        if self._compiled is not None:
            module.__dict__["_compiled_call_impl"] = self._compiled

    def _original(self, module: nn.Module) -> Callable[..., Any]:
        if self._compiled is not None and module is self._module() and not _has_hooks(module):
            return self._run_compiled
        return self._eager(module)

    def _run_compiled(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if module is None or self._compiled is None:
            raise StateError("a compiled unit is gone")
        ours = module.__dict__.pop("forward")
        if self._own is not None:
            module.__dict__["forward"] = self._own
        try:
            return self._compiled(*args, **kwargs)
        finally:
            module.__dict__["forward"] = ours

    def _eager(self, module: nn.Module) -> Callable[..., Any]:
        if self._own is None:
            return types.MethodType(type(module).forward, module)
        function = getattr(self._own, "__func__", None)
        return self._own if function is None else types.MethodType(function, module)

    def _resident(self, engine: Engine, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A unit that lives on the device: no window; recomputed only where the placement says so."""
        forward, backend, name = self._original(module), engine.backend, self._unit.name
        visit = Visit(self._unit, is_wide=False, holds_slot=False)
        is_traced = backend.recorder is not None

        def ended(visit: Visit, gradient: torch.Tensor | None) -> None:
            if visit.left():
                backend.end("backward", name)

        inputs = Inputs(engine.taken, args, kwargs, *((visit, ended) if is_traced else ()))
        args, kwargs = inputs.args, inputs.kwargs
        if is_traced:
            backend.begin("forward", name)
        if engine.recomputes(self._unit):
            run = Runner(name, forward, module, args, kwargs, self._viewer.look(module), autocast_cache=True)
            run.visit = visit
            unit = self._unit
            output = checkpoint(
                run,
                *run.slide(engine.boundaries),
                use_reentrant=False,
                context_fn=lambda: (noted(unit), _Repeated(lambda: replayed(engine, visit))),
                **run.kwargs,
            )
        else:
            arguments = Arguments(name, module, args, kwargs) if inputs.are_aliases else None
            with hf_checkpointing_off(module):
                output = forward(*args, **kwargs)
            if arguments is not None:
                arguments.check_forward(output)  # the aliases changed, and their caller's tensors did not
            for tensor in _computed(output):
                tensor.register_hook(_Reached(visit))
        output = inputs.hand_back(output)
        if is_traced:
            backend.end("forward", name)

            def begun(_: torch.Tensor) -> None:
                visit.begin()
                backend.begin("backward", name)

            for tensor in _computed(output):
                tensor.register_hook(begun)
        return output

    def _with_graph(self, engine: Engine, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = self._unit
        engine.admission.look_at(unit)
        if unit.is_resident:
            return self._resident(engine, module, args, kwargs)
        visit = Visit(unit, is_wide=engine.is_wide(unit), holds_slot=not engine.recomputes(unit))
        backward = engine.backward
        inputs = Inputs(engine.taken, args, kwargs, visit, backward.leave)
        args, kwargs = inputs.args, inputs.kwargs
        if visit.holds_slot:
            arguments = Arguments(unit.name, module, args, kwargs)
            with engine.window_open(visit), unit_context(module):
                output = self._original(module)(*args, **kwargs)
            arguments.check_forward(output)  # the aliases changed, and their caller's tensors did not
        else:
            run = Runner(unit.name, self._original(module), module, args, kwargs, self._viewer.look(module))
            run.first = inputs.first if engine.boundaries.look(args) else None
            with autocast_cache_off():
                output = checkpoint(
                    run,
                    *run.slide(engine.boundaries),
                    use_reentrant=False,
                    context_fn=lambda: (engine.window_open(visit), _Repeated(lambda: engine.window_reopen(visit))),
                    **run.kwargs,
                )
        output = inputs.hand_back(output)
        for tensor in _computed(output):
            if id(tensor) not in inputs.given:  # its gradient is complete much later
                tensor.register_hook(OpenHook(backward.reach, visit))
        return output


def _computed(output: Any) -> Iterator[torch.Tensor]:
    """Tensors of an output that have a graph. A leaf, a parameter say, would keep hooks for ever."""
    return (tensor for tensor in tensors_in(output) if tensor.requires_grad and tensor.grad_fn is not None)


def _has_hooks(module: nn.Module) -> bool:
    # they have run around us already, and the compiled call would run them again
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(getattr(module, name) for name in names)


class _Reached:
    """Gradient hook on the output of a unit that is not recomputed: its graph is used up."""

    def __init__(self, visit: Visit) -> None:
        self._visit = visit

    def __call__(self, gradient: torch.Tensor) -> None:
        self._visit.is_done = True


class _Repeated(contextlib.AbstractContextManager[None]):
    """A context entered anew each time: with ``retain_graph=True`` a graph is recomputed by every backward."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *exception: Any) -> bool | None:
        return self._entered.pop().__exit__(*exception)
