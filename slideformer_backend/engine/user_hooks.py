"""Gradient hooks of user code on parameters that compute in a narrower dtype (a fp32 model under bf16 autocast).

Autograd's leaf is then the narrow working weight, whose gradients are narrow. Hooks see them as plain autocast hands
them on: widened to the dtype of the parameter. What they return or change counts in that dtype.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnsupportedError
from .edges import device_gradient, set_device_gradient
from .guard import access_of, guard

if TYPE_CHECKING:
    from .engine import Engine
    from .unit import ParamRecord

Hook = Callable[..., Any]


class _Wide:
    """Takes the place of ``hook``. Refers to the engine weakly, as our own hooks do."""

    def __init__(self, engine: Engine, record: ParamRecord, hook: Hook) -> None:
        self._engine = weakref.ref(engine)
        self._record = weakref.ref(record)
        self.hook = hook


class WideTensorHook(_Wide):
    """A tensor hook. ``record.widened`` is what those before it, and then this one, have made of the gradient."""

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        record = self._record()
        if record is None or gradient.dtype == record.spec.dtype:
            found: torch.Tensor | None = self.hook(gradient)
            return found
        seen = gradient.to(record.spec.dtype) if record.widened is None else record.widened
        result = self.hook(seen)
        if result is None:
            result = seen
        elif (result.dtype, result.shape, result.device) != (seen.dtype, seen.shape, seen.device):
            raise RuntimeError(
                f"hook {getattr(self.hook, '__name__', self.hook)!r} of {record.name} has changed the type of its value"
                f" (was {tuple(seen.shape)} {seen.dtype} on {seen.device}, got {tuple(result.shape)} {result.dtype} on"
                f" {result.device})"
            )
        record.widened = result
        return None


class WidePostHook(_Wide):
    """A post-accumulate hook. It runs behind ours, which has put the sum into the gradient slot."""

    def __call__(self, parameter: torch.Tensor) -> None:
        engine, record = self._engine(), self._record()
        slot = record.unit.gradient_slot if record is not None else None
        if engine is None or record is None or slot is None or parameter.dtype == record.spec.dtype:
            self.hook(parameter)
            return
        view = slot.view(record)
        with torch.no_grad():
            is_there = id(record) in record.unit.arrived  # a hook before this one may have dropped it
            left = self._shown(engine, record, view.clone() if is_there else None)
            if left is not None:
                engine.backend.touch(f"gradient of {record.unit.name}", writes=(slot,))
                record.unit.arrived.add(id(record))
                view.copy_(left)
            elif is_there:
                record.unit.arrived.discard(id(record))
                engine.policy.forget(record)

    def _shown(self, engine: Engine, record: ParamRecord, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Runs the hook on the parameter in its own dtype with ``gradient``; returns the gradient that it leaves."""
        parameter, usual = record.parameter, access_of(record.parameter)
        narrow, access = parameter.data, _Shown(engine, record)
        guard(parameter, access)
        parameter.data = torch.zeros(1, dtype=record.spec.dtype, device=narrow.device).expand(record.spec.shape)
        parameter.grad = gradient
        parameter.__class__ = record.guarded_class
        try:
            self.hook(parameter)
            access.check()
            return device_gradient(record)
        finally:
            parameter.__class__ = record.own_class
            parameter.grad = None
            parameter.data = narrow
            if usual is not None:
                guard(parameter, usual)


class _Shown:
    """Access to a parameter while a post-accumulate hook sees it: its weight comes from the host when looked at."""

    def __init__(self, engine: Engine, record: ParamRecord) -> None:
        self._engine = engine
        self._record = record
        self._weight: torch.Tensor | None = None
        self._is_lent = False

    def before(self, writes: bool) -> None:
        """See ``Access``."""
        if writes:
            raise self._refusal()
        if self._weight is None:
            self._weight = self._read()
            with torch._C.DisableTorchFunctionSubclass():
                self._record.parameter.data = self._weight

    def after(self, aliased: bool) -> None:
        """See ``Access``."""
        self._is_lent |= aliased

    def lent(self, aliases: Sequence[torch.Tensor]) -> None:
        """See ``Access``."""

    def over(self) -> None:
        """See ``Access``."""

    def get_grad(self) -> torch.Tensor | None:
        """See ``Access``."""
        return device_gradient(self._record)

    def set_grad(self, value: torch.Tensor | None) -> None:
        """See ``Access``."""
        set_device_gradient(self._record, value)

    def set_data(self, value: torch.Tensor) -> None:
        """See ``Access``."""
        raise self._refusal()

    def hooked(self, register: str, hook: Hook) -> Hook:
        """See ``Access``."""
        return hook

    def taken(self, gradient: torch.Tensor, is_only: bool) -> torch.Tensor:
        """See ``Access``."""
        return gradient.to(self._record.spec.dtype)

    def check(self) -> None:
        """Refuse what the hook wrote through an alias."""
        if self._is_lent and self._weight is not None and not torch.equal(self._weight, self._read()):
            raise self._refusal()

    def _read(self) -> torch.Tensor:
        self._engine.policy.settle(self._record.unit)
        return self._record.host.to(self._engine.device, copy=True)

    def _refusal(self) -> UnsupportedError:
        return UnsupportedError(
            f"A post-accumulate hook writes the weight {self._record.name}, with which the running backward computes.",
            remedy="write it after the backward",
        )


class UserHooks:
    """The hooks on a parameter: ours come first, those of user code are wrapped until ``remove``."""

    def __init__(self, engine: Engine, record: ParamRecord, ours: Sequence[Any]) -> None:
        self._parameter = record.parameter
        numbers = {handle.id for handle in ours}
        for hooks, wide in self._tables():
            first = {number: hook for number, hook in hooks.items() if number in numbers}
            others = {number: wide(engine, record, hook) for number, hook in hooks.items() if number not in numbers}
            hooks.clear()  # and filled anew: torch goes through the underlying dict, whose order move_to_end leaves
            hooks.update(first | others)

    def remove(self) -> None:
        """Give user code its hooks back."""
        for hooks, _ in self._tables():
            for number, hook in list(hooks.items()):
                if isinstance(hook, _Wide):
                    hooks[number] = hook.hook

    def _tables(self) -> list[tuple[Any, type[_Wide]]]:
        tensor_hooks, post_hooks = self._parameter._backward_hooks, self._parameter._post_accumulate_grad_hooks
        return [(tensor_hooks or {}, WideTensorHook), (post_hooks or {}, WidePostHook)]


def widened_hook(engine: Engine, record: ParamRecord, register: str, hook: Hook) -> Hook:
    """What to give to the method ``register`` of a parameter in the place of ``hook``.

    Raises:
        UnsupportedError: it is one of ``register_multi_grad_hook(mode="all")``, which counts leaves that the parameters
            had when it was made; those of a forward in the window are others.
    """
    is_counting = getattr(hook, "__qualname__", "").startswith("register_multi_grad_hook.<locals>.get_inner_hook")
    if is_counting and (record.shows_master or engine.device.type != "cpu"):
        raise UnsupportedError(
            f"register_multi_grad_hook cannot tell when the gradients of {record.name} and others have all arrived.",
            remedy='take mode="any", a hook on each parameter, or what follows the backward',
        )
    if not record.shows_master:
        return hook
    return (WideTensorHook if register == "register_hook" else WidePostHook)(engine, record, hook)
