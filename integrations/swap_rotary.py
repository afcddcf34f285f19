"""Rotary embedding in transformers' attention: a function of the modelling module, replaced while ours run.

The function is recognised by what it computes. Its replacement in the module does nothing of its own unless an
attention layer of a managed model calls it, so other models, and this one when it is detached, are as before.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn

from slideformer_backend.engine.engine import Engine
from slideformer_backend.integrations.bound_method import BoundMethod, is_eager
from slideformer_backend.integrations.kernel_check import TOLERANCE, Case, generator, mismatch
from slideformer_backend.kernels.rotary import rotary

__all__ = ["AttentionForward", "Patched", "Turn", "functions_of", "recognise"]

_PARAMETERS = ["q", "k", "cos", "sin"]
_ROWS, _HEADS, _LENGTH, _SIZE = 2, 3, 5, 16
_WIDTHS = {False: _SIZE, True: 6}
"""Turned elements, by whether that is a part: neither half nor a quarter, which functions could take by themselves."""

Style = Literal["halves", "pairs", "pairs of halves"]
"""What is turned against what, and where the angles are: halves of a head, angles twice one after the other (Llama);
neighbours, each angle twice in a row (Cohere); neighbours, angles twice one after the other (GLM)."""


class Turn:
    """One way to turn queries and keys, and where the kernel reproduces it.

    Args:
        style: see :data:`Style`.
        known: (dtype of q and k, dtype of cos and sin, whether only a part of the head is turned).
    """

    def __init__(self, style: Style, known: frozenset[tuple[torch.dtype, torch.dtype, bool]]) -> None:
        self.style = style
        self.known = known

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys [batch, heads, length, D] turned by cos and sin [batch or 1, length, R]."""
        if self.style == "pairs":
            cos, sin = (torch.cat((tensor[..., ::2],) * 2, -1) for tensor in (cos, sin))
        return rotary(q, k, cos, sin, interleaved=self.style != "halves")

    def fits(self, q: object, k: object, cos: object, sin: object) -> bool:
        """Whether these are what the kernel was compared on."""
        tensors = [tensor for tensor in (q, k, cos, sin) if type(tensor) is torch.Tensor]
        if len(tensors) != 4 or [tensor.dim() for tensor in tensors] != [4, 4, 3, 3]:
            return False
        queries, keys, c, s = tensors
        are_alike = queries.dtype == keys.dtype and c.dtype == s.dtype and c.shape == s.shape
        if not are_alike or c.requires_grad or s.requires_grad:
            return False
        (batch, _, length, size), (rows, places, width) = queries.shape, c.shape
        if (keys.shape[0], *keys.shape[2:]) != (batch, length, size):
            return False
        if width % 2 or width > size or places != length or rows not in (1, batch):
            return False
        return (queries.dtype, c.dtype, width < size) in self.known

    def reads_all_of(self, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Whether the angles lie as the style has them: each twice. (The kernel reads them once.)"""
        if self.style == "pairs of halves":
            return True  # the model's own function reads them once, too
        for tensor in (cos, sin):
            first, second = (tensor[..., ::2], tensor[..., 1::2]) if self.style == "pairs" else tensor.chunk(2, -1)
            if not torch.equal(first, second):
                return False
        return True


class _Running(threading.local):
    """The attention layer of a managed model whose forward runs in this thread."""

    layer: AttentionForward | None = None


_running = _Running()


class Patched:
    """Stands for a rotary function in its module. Counts who needs it; the last one to leave puts the original back."""

    def __init__(self, module: ModuleType, name: str) -> None:
        self.original: Callable[..., Any] = getattr(module, name)
        self.users = 0
        self._module = module
        self.__name__ = name
        self.__doc__ = self.original.__doc__
        self.__signature__ = inspect.signature(self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = _running.layer
        if layer is not None and len(args) == 4 and not kwargs and is_eager():
            turn = layer.turn_of(self, *args)
            if turn is not None:
                return turn(*args)
        return self.original(*args, **kwargs)

    @staticmethod
    def of(module: ModuleType, name: str) -> Patched:
        """The replacement, put in place if it is not there yet."""
        found = getattr(module, name)
        if not isinstance(found, Patched):
            found = Patched(module, name)
            setattr(module, name, found)
        found.users += 1
        return found

    def leave(self) -> None:
        """One user less."""
        self.users -= 1
        if self.users == 0 and getattr(self._module, self.__name__, None) is self:
            setattr(self._module, self.__name__, self.original)


class AttentionForward(BoundMethod):
    """The forward of an attention layer that calls rotary functions: while it runs, they are ours."""

    def __init__(self, engine: Engine, module: nn.Module, turns: dict[str, Turn]) -> None:
        super().__init__(engine, module)
        home = sys.modules[_function(module).__module__]
        self._turns = {Patched.of(home, name): turn for name, turn in turns.items()}
        self._verdicts: dict[tuple[Patched, int], bool] = {}

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_eager() or not self.is_in_charge(module):
            return super().__call__(module, *args, **kwargs)
        outer, _running.layer = _running.layer, self
        try:
            return super().__call__(module, *args, **kwargs)
        finally:
            _running.layer = outer

    def turn_of(self, function: Patched, q: Any, k: Any, cos: Any, sin: Any) -> Turn | None:
        """How to compute this call; None: by the model's own function."""
        turn = self._turns.get(function)
        if turn is None or not turn.fits(q, k, cos, sin):
            return None
        # once per layer and width, since it waits for the device: a model makes its angles in one way
        key = (function, cos.shape[-1])
        if key not in self._verdicts:
            if not sin.any():
                return None  # place 0 only: there all ways to lay angles out look alike
            self._verdicts[key] = turn.reads_all_of(cos, sin)
        return turn if self._verdicts[key] else None

    def remove(self) -> None:
        """Put the original forward back, and the functions that nobody else needs."""
        super().remove()
        for function in self._turns:
            function.leave()
        self._turns = {}


def functions_of(module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions of its modelling module that the forward of ``module`` calls to turn queries and keys, by name."""
    function = _function(module)
    home = sys.modules.get(getattr(function, "__module__", ""))
    code = getattr(function, "__code__", None)
    for name in code.co_names if code is not None and home is not None else ():
        found = getattr(home, name, None)
        if name.startswith("apply_rotary") and callable(found):
            original = found.original if isinstance(found, Patched) else found
            if list(inspect.signature(original).parameters)[:4] == _PARAMETERS:
                yield name, original


def recognise(function: Callable[..., Any], dtypes: list[torch.dtype], device: torch.device) -> tuple[Turn | None, str]:
    """How ``function(q, k, cos, sin)`` turns; None and why, if no kernel reproduces it."""
    source, reason = generator(), ""
    q = torch.randn(_ROWS, _HEADS, _LENGTH, _SIZE, generator=source)
    k = torch.randn(_ROWS, 1, _LENGTH, _SIZE, generator=source)
    styles: tuple[Style, ...] = ("halves", "pairs of halves", "pairs")
    for style in styles:
        known = set()
        for is_partial in (False, True):
            angle = _angles(style, _WIDTHS[is_partial], source)
            for kind, of_angle in _pairs(dtypes):
                cos, sin = (tensor.to(device, of_angle) for tensor in (angle.cos(), angle.sin()))
                problem = _problem(function, Turn(style, frozenset()), [q, k], (cos, sin), kind)
                if problem is None:
                    known.add((kind, of_angle, is_partial))
                elif not is_partial:
                    reason = reason or problem
        if known:
            return Turn(style, frozenset(known)), ""
    return None, reason or "a dtype without a kernel"


def _angles(style: Style, width: int, source: torch.Generator) -> torch.Tensor:
    """Random angles [rows, length, width], the second half of it arbitrary where a style does not read it."""
    drawn = torch.rand(2, _ROWS, _LENGTH, width // 2, generator=source) * 6
    angle, other = drawn[0], drawn[1]
    if style == "pairs":
        return angle.repeat_interleave(2, -1)
    return torch.cat([angle, other if style == "pairs of halves" else angle], -1)


def _pairs(dtypes: list[torch.dtype]) -> list[tuple[torch.dtype, torch.dtype]]:
    found = [(kind, of_angle) for kind in dtypes for of_angle in (kind, torch.float32)]
    return [pair for pair in dict.fromkeys(found) if pair[0] in TOLERANCE]


def _problem(
    function: Callable[..., Any],
    turn: Turn,
    inputs: list[torch.Tensor],
    angles: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
) -> str | None:
    cos, sin = angles

    def at(way: Callable[..., Any]) -> Callable[..., Any]:
        # the check in fp32 takes angles in fp32, which changes their dtype and no value
        return lambda q, k: way(q, k, *(a.to(q.dtype) if q.dtype == torch.float32 else a for a in (cos, sin)))

    placed = [tensor.to(cos.device) for tensor in inputs]
    return mismatch(at(function), at(turn), placed, [dtype] * 2, Case(dtype, None))


def _function(module: nn.Module) -> Any:
    """The function behind ``forward`` of its class, below decorators."""
    return inspect.unwrap(type(module).forward)
