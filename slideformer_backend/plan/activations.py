"""What a unit's forward and backward take beside its weights: bytes and operations, found on the meta device.

The unit's own code runs on tensors without data, and every storage that comes and goes is counted. That is right for
any architecture whose control flow does not depend on values; for others there is an estimate from parameter shapes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from .partition import Part

KEPT_INPUTS = 2
"""Newest inputs of units that stay on the device where the others leave: their backward comes first."""
STAGED_INPUTS = 4
"""Inputs that pass through host memory on their way to or from files: one is filled by a copy and one written, or read
and emptied; two more, so that neither waits for the other to end."""


class UnitActivity(NamedTuple):
    """One forward and backward of a unit at one batch.

    Attributes:
        boundary: bytes of its inputs, which wait for its backward.
        saved: bytes that its forward saves for backward when nothing is recomputed, the inputs not counted.
        peak: most bytes at once in its backward, the gradient of its output among them; the inputs, the weights and
            their gradients not counted.
        operations: floating-point operations of the forward.
        again: those of them that a recompute repeats: it ends with the last tensor that the backward needs, and so
            leaves a last matrix product out.
        is_estimate: whether all this comes from parameter shapes only.
    """

    boundary: int
    saved: int
    peak: int
    operations: float
    again: float
    is_estimate: bool = False


class LiveBytes(TorchDispatchMode):
    """Counts bytes of storages that operations make, until they are freed, and floating-point operations.

    Attributes: ``live`` and ``peak`` in bytes; ``operations``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.live = 0
        self.peak = 0
        self.operations = 0.0
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.know(args, kwargs)
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            self.operations += formula(*args, **(kwargs or {}), out_val=result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def know(self, *values: Any) -> None:
        """Storages of ``values`` are not counted, now or later."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor):
                self._known.setdefault(leaf.untyped_storage(), True)

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known[storage] = True
        nbytes = storage.nbytes()
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, nbytes).atexit = False

    def _free(self, nbytes: int) -> None:
        self.live -= nbytes


def observe_units(
    model: nn.Module, parts: tuple[Part, ...], run: Callable[[], object], extra_operations: Callable[[], float]
) -> list[UnitActivity]:
    """The activity of each sliding unit while ``run`` drives ``model``, which is on the meta device.

    Args:
        model: in training mode.
        parts: its sliding units.
        run: a forward of the model at the batch in question.
        extra_operations: operations so far that torch's counter does not see (a stand-in for an attention kernel).

    Raises:
        Whatever the model's code raises where it cannot run without data.
    """
    found: dict[int, UnitActivity] = {}
    by_kind: dict[object, UnitActivity] = {}

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], part: Part) -> None:
        key = (type(module), tuple(spec.shape for spec in part.specs), _shapes((args, kwargs)))
        if key not in by_kind:
            by_kind[key] = _observe(module, args, kwargs, extra_operations)
        found.setdefault(id(part.module), by_kind[key])

    handles = []
    for part in parts:
        if part.module is not None:

            def hook(module: nn.Module, args: Any, kwargs: Any, part: Part = part) -> None:
                before(module, args, kwargs, part)

            handles.append(part.module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return [found.get(id(part.module), UnitActivity(0, 0, 0, 0.0, 0.0)) for part in parts]


def estimate_unit(part: Part, tokens: int) -> UnitActivity:
    """The activity of a transformer-like unit from the shapes of its weights, at ``tokens`` tokens.

    Every matrix product saves its input and makes an output; the residual stream is as wide as the narrowest of them.
    """
    matrices = [spec for spec in part.specs if len(spec.shape) >= 2]
    if not matrices:
        return UnitActivity(0, 0, 0, 0.0, 0.0, True)
    saved = sum((spec.shape[-1] + spec.shape[-2]) * spec.working.itemsize for spec in matrices)
    boundary = max(spec.shape[-1] * spec.dtype.itemsize for spec in matrices[:1])
    operations = 2.0 * sum(spec.shape.numel() for spec in matrices) * tokens
    return UnitActivity(boundary * tokens, saved * tokens, saved * tokens * 3 // 2, operations, operations, True)


def _observe(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], extra_operations: Callable[[], float]
) -> UnitActivity:
    boundary = _largest_input(args, kwargs)
    before = extra_operations()
    parameters = list(module.parameters())
    drops = [p.register_post_accumulate_grad_hook(_drop) for p in parameters if p.requires_grad]
    live = LiveBytes()
    again = 0.0

    def done() -> float:
        return live.operations + extra_operations() - before

    def note(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal again
        again = done()
        return tensor

    try:
        with torch.enable_grad(), live:
            args, kwargs = tree_map(partial(_leaf, boundary), (args, kwargs))
            live.know(args, kwargs, parameters, list(module.buffers()))
            live.live = live.peak = 0
            with torch.autograd.graph.saved_tensors_hooks(note, _same):
                output = module.forward(*args, **kwargs)
            operations = done()
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            outputs = sum(leaf.untyped_storage().nbytes() for leaf in tensors[:1])
            saved = max(0, live.live - outputs)
            edges = [torch.autograd.graph.get_gradient_edge(leaf) for leaf in tensors]
            gradients = [torch.empty_like(leaf) for leaf in tensors]
            del output, tensors  # a recompute does not come to its output
            live.peak = live.live
            torch.autograd.backward(edges, gradients)
    finally:
        for drop in drops:
            drop.remove()
    return UnitActivity(boundary, saved, live.peak, operations, again)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None  # it goes to a gradient slot, which is counted elsewhere


def _leaf(boundary: int, value: Any) -> Any:
    """A leaf in place of an input. Only the residual stream asks for a gradient: positions and masks have none."""
    if not isinstance(value, torch.Tensor):
        return value
    is_stream = value.is_floating_point() and value.numel() * value.element_size() == boundary
    return value.detach().requires_grad_(is_stream)


def _largest_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes of the residual stream; what units share (positions, masks) is there once and small."""
    sizes = [
        leaf.numel() * leaf.element_size()
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]
    return max(sizes, default=0)


def _shapes(values: Any) -> tuple[object, ...]:
    return tuple(leaf.shape for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
