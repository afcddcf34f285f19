"""Binding a user's optimizer object: its ``step`` becomes ours, everything else about it stays (DESIGN 3.2)."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.optim import Optimizer

from ..errors import UnsupportedError
from ..optim.numba_kernels import warm_up, warm_up_zero
from ..optim.rules import rule_for
from .guard import drop_gradient
from .unit import ONE, Entry, ParamRecord

if TYPE_CHECKING:
    from .engine import Engine

_TORCH_ZERO_GRAD = inspect.unwrap(Optimizer.zero_grad)
_REPLACED = ("step", "zero_grad", "_step_supports_amp_scaling")


class Binding:
    """One optimizer of an engine.

    ``rule`` is the fused rule, None for an optimizer that runs as itself on master views. ``was_skipped`` tells whether
    its last ``step()`` was dropped.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        _refuse_closure(optimizer)
        self._engine = weakref.ref(engine)
        self._optimizer = weakref.ref(optimizer)
        self.rule = rule_for(optimizer)
        self.was_skipped = False
        self.lost: str | None = None
        """A parameter whose moments ended when a later optimizer took it over."""
        # Our step takes unscaled gradients only. A gradient scaler leaves unscaling, and the decision to step at all,
        # to optimizers that say they can (fused ones do).
        self._previous = {name: optimizer.__dict__[name] for name in _REPLACED if name in optimizer.__dict__}
        optimizer.__dict__["_step_supports_amp_scaling"] = False
        step = Optimizer.profile_hook_step(_Step(self))
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # a scheduler made before us counts calls through this mark
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # torch's own mark
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]  # with an undo, by design
        is_own = inspect.unwrap(type(optimizer).zero_grad) is not _TORCH_ZERO_GRAD or "zero_grad" in self._previous
        if not is_own:
            # it stands between an update and the next forward: torch's own looks at every gradient first
            optimizer.zero_grad = types.MethodType(_zero_grad, optimizer)  # type: ignore[method-assign]  # likewise

    def is_bound_to(self, optimizer: Optimizer) -> bool:
        """Whether this is the binding of ``optimizer``; False once the bound optimizer is gone."""
        return self._optimizer() is optimizer

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer object."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError("the optimizer of this binding is gone")
        return optimizer

    @property
    def is_alive(self) -> bool:
        """Whether the user still has the optimizer."""
        return self._optimizer() is not None

    def holds(self, record: ParamRecord) -> bool:
        """Whether the optimizer has this parameter in a group now."""
        optimizer = self._optimizer()
        groups = optimizer.param_groups if optimizer is not None else ()
        return any(parameter is record.parameter for group in groups for parameter in group["params"])

    def assign(self, *, takes_over: bool = False) -> list[ParamRecord]:
        """Tell each record its optimizer and live param group (groups may be added or replaced at any time).

        Args:
            takes_over: this optimizer is new; parameters of an older one are its from now on.

        Returns:
            The records that this optimizer steps for the first time.

        Raises:
            UnsupportedError: another optimizer that was prepared later has the same parameters.
        """
        new = []
        for record, group in self.records():
            other = record.binding
            if other is not self:
                if other is not None and not takes_over and other.holds(record):
                    raise UnsupportedError(
                        f"{record.name} is a parameter of two optimizers, and the one prepared first steps again.",
                        found=f"{type(self.optimizer).__name__} and {type(other.optimizer).__name__}",
                        remedy="give each parameter to one optimizer",
                    )
                if other is not None and other.rule is not None and record.steps:
                    other.lost = record.name
                new.append(record)
                self.lost = None
            record.binding, record.group = self, group
        return new

    def claim(self, records: Iterable[ParamRecord]) -> list[ParamRecord]:
        """Of ``records`` those that this optimizer holds and no other one has claimed; they are its from now on."""
        wanted, mine = {id(record) for record in records}, []
        for record, group in self.records():
            is_free = record.binding is None or record.binding is self or not record.binding.is_alive
            if id(record) in wanted and is_free:
                record.binding, record.group = self, group
                mine.append(record)
        return mine

    def records(self) -> Iterator[tuple[ParamRecord, dict[str, Any]]]:
        """Our parameters among the optimizer's, with their groups."""
        engine = self._engine()
        if engine is None:
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                record = engine.record_of(parameter)
                if record is not None:
                    yield record, group

    def foreign(self) -> list[torch.Tensor]:
        """The optimizer's parameters that this engine does not manage and that have a gradient."""
        engine = self._engine()
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return [p for p in parameters if engine is None or (engine.record_of(p) is None and p.grad is not None)]

    def entry(self, record: ParamRecord, coefficient: np.float32) -> Entry:
        """The log entry of the next update of ``record`` with the hyper-parameters of now."""
        rule, group = self.rule, record.group
        if rule is None or group is None:
            raise RuntimeError("an optimizer without a fused rule has no log entries")
        return Entry(rule, rule.states_used(group), rule.scalars(group, record.steps + 1), coefficient)

    def entries(self, records: Sequence[ParamRecord], *, with_clip: bool) -> list[Entry]:
        """``entry`` of each; scalars are computed once for all parameters of a group that share a step count."""
        known: dict[tuple[int, int], Entry] = {}
        entries = []
        for record in records:
            key = id(record.group), record.steps
            if key not in known:
                known[key] = self.entry(record, ONE)
            coefficient = record.coefficient if with_clip else ONE
            entries.append(known[key]._replace(coefficient=coefficient) if coefficient != ONE else known[key])
        return entries

    def warm_up(self, records: Sequence[ParamRecord], update: Literal["exact", "immediate"]) -> None:
        """Compile the kernels that these parameters need under this policy, before the first step."""
        for record in records:
            if self.rule is not None and record.group is not None:
                states = len(self.rule.states_used(record.group))
                if record.core is not None:
                    warm_up_zero(self.rule, record.core.kind, states=states)
                    continue
                warm_up(self.rule, record.gradient_kind, record.weight_kind, update, states=states)

    def run_whole(self) -> None:
        """The optimizer's own step on all it has: its groups may hold lists beside ``params``, in the same order."""
        step = type(self.optimizer).step
        getattr(step, "__wrapped__", step)(self.optimizer)  # hooks have run already

    def run_on(self, parameters: Sequence[torch.Tensor]) -> None:
        """As ``run_whole`` on some of its parameters only; for the optimizers of torch that a fused rule stands for."""
        wanted = {id(parameter) for parameter in parameters}
        groups = self.optimizer.param_groups
        kept = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) in wanted]
            self.run_whole()
        finally:
            for group, original in zip(groups, kept, strict=True):
                group["params"] = original

    def undo(self) -> None:
        """Give the optimizer its own ``step`` back."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        for name in _REPLACED:
            optimizer.__dict__.pop(name, None)
        optimizer.__dict__.update(self._previous)


def _refuse_closure(optimizer: Optimizer) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(
            f"{type(optimizer).__name__} evaluates the model inside its step, where it would see master weights.",
            remedy="take an optimizer whose step needs no closure, such as AdamW",
        )


@torch._disable_dynamo  # type: ignore[attr-defined]  # loads no compiler, as torch.compiler.disable would
def _zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """Resets the gradients of all optimized parameters, as ``torch.optim.Optimizer.zero_grad`` does."""
    if not set_to_none:
        _TORCH_ZERO_GRAD(optimizer, set_to_none=False)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            drop_gradient(parameter)


class _Step:
    """The function behind the replaced ``optimizer.step``."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self.__name__ = "step"

    def __call__(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler made before prepare checks
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engine = self._binding._engine()
        if engine is None:
            self._binding.undo()
            optimizer.step()
        else:
            engine.step(self._binding)
        return loss
