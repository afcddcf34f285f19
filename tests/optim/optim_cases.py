"""Arrays and comparisons for the optimizer tests."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from slideformer_backend.optim import numba_kernels as kernels
from slideformer_backend.optim.rules import RULES, Rule

F32 = np.float32
SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-39, 3e38, -3e38, 1.0, -1.0, 65504.0, 65520.0, 6e-8, 2e-8],
    F32,
)
_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Case(NamedTuple):
    """One slice to update, as numpy arrays; ``twin()`` gives the same as tensors."""

    rule: Rule
    p: Any
    states: tuple[Any, ...]
    g: Any
    g_kind: str
    w: Any
    w_kind: str

    def copy(self) -> Case:
        return self._replace(p=self.p.copy(), states=tuple(s.copy() for s in self.states), w=self.w.copy())

    def twin(self, device: str = "cpu") -> Case:
        return self._replace(
            p=torch.from_numpy(self.p.copy()).to(device),
            states=tuple(torch.from_numpy(s.copy()).to(device) for s in self.states),
            g=as_tensor(self.g, self.g_kind).to(device),
            w=as_tensor(self.w, self.w_kind).to(device),
        )


def as_tensor(array: Any, kind: str) -> torch.Tensor:
    """A copy of a numpy array of a kind, as a tensor of its dtype."""
    if kind == "fp32":
        return torch.from_numpy(array.copy())
    return torch.from_numpy(array.copy().view(np.int16)).view(_TORCH_DTYPES[kind.removesuffix("_as_fp32")])


def stored(values: Any, kind: str) -> Any:
    """fp32 values rounded to a kind by torch, as the numpy array that kernels take."""
    if kind == "fp32":
        return values.copy()
    tensor = torch.from_numpy(values.copy()).to(_TORCH_DTYPES[kind.removesuffix("_as_fp32")])
    return tensor.view(torch.int16).numpy().view(np.uint16).copy()


def hostile(n: int, seed: int, scale: float = 1.0) -> Any:
    """fp32 values: a third ordinary, a third any bit pattern, a third special."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(n) * scale).astype(F32)
    which = rng.integers(0, 3, n)
    values[which == 1] = rng.integers(0, 2**32, n, dtype=np.uint64).astype(np.uint32).view(F32)[which == 1]
    values[which == 2] = rng.choice(SPECIAL, n)[which == 2]
    return values


def make_case(name: str, count: int, g_kind: str, w_kind: str, n: int, seed: int, *, special: bool = True) -> Case:
    """A slice with hostile numbers, or ordinary ones."""
    rng = np.random.default_rng(seed)

    def draw(offset: int, scale: float) -> Any:
        return hostile(n, seed + offset, scale) if special else (rng.standard_normal(n) * scale).astype(F32)

    states = [draw(1, 1e-2), draw(2, 1e-3)][:count]
    if len(states) == 2:
        with np.errstate(all="ignore"):
            states[1] = np.abs(states[1]) ** 2
    w = np.zeros(n, F32 if w_kind == "fp32" else np.uint16)
    return Case(RULES[name], draw(3, 5e-2), tuple(states), stored(draw(4, 1e-2), g_kind), g_kind, w, w_kind)


def numbers(array: Any, kind: str = "fp32") -> Any:
    """fp32 values of an array or tensor of a kind."""
    if isinstance(array, torch.Tensor):
        return array.float().cpu().numpy()
    out = np.empty(array.size, F32)
    kernels.widen(array, kind.removesuffix("_as_fp32"), out)
    return out


def assert_same(actual: Any, expected: Any, kind: str = "fp32") -> None:
    """Bit for bit, where NaNs are one class: IEEE 754 leaves their payload open."""
    a, e = numbers(actual, kind), numbers(expected, kind)
    differs = (a.view(np.uint32) != e.view(np.uint32)) & ~(np.isnan(a) & np.isnan(e))
    assert not differs.any(), (
        f"{differs.sum()} of {a.size}, first at {differs.argmax()}: {a[differs][:3]} {e[differs][:3]}"
    )


def assert_same_case(actual: Case, expected: Case) -> None:
    assert_same(actual.p, expected.p)
    for a, e in zip(actual.states, expected.states, strict=True):
        assert_same(a, e)
    assert_same(actual.w, expected.w, actual.w_kind)
