"""The arithmetic of every update rule, written once for numba (element by element) and torch (whole tensors) alike.

A definition takes the primitive :class:`Operations` of an executor and returns ``update(p, states, g, s)``, which gives
the new ``(p, states)``. Operands are fp32; ``s`` holds the fp32 scalars that the ``*_scalars`` function beside it makes
from a param group, computed in double. Nothing is contracted besides the explicit ``fma``; square root and division are
correctly rounded. Written this way, the rules equal torch's fused CPU optimizers (Lion: lion_pytorch) bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Scalars = tuple[np.float32, ...]
"""Everything an update needs besides arrays: hashable, and equal exactly when the update is the same."""

Value: TypeAlias = Any
"""An fp32 number: one element in numba, a whole tensor in torch."""
Values: TypeAlias = Any
"""A tuple of them."""
Update: TypeAlias = Callable[[Value, Values, Value, Values], tuple[Value, Values]]


class Operations(NamedTuple):
    """Primitive operations of one executor, all on fp32."""

    fma: Callable[[Value, Value, Value], Value]
    """``fma(a, b, c)``: a·b + c, rounded once."""
    sqrt: Callable[[Value], Value]
    """Correctly rounded square root."""
    select: Callable[[Any, Value, Value], Value]
    """``select(flag, a, b)``: a where flag, else b."""
    sign: Callable[[Value], Value]
    """-1, 0 or 1; 0 for NaN."""


def fp32(*values: float) -> Scalars:
    """Round doubles to fp32, to ±inf beyond its range, as a C cast does."""
    with np.errstate(over="ignore", under="ignore"):
        return tuple(np.float32(value) for value in values)


def _direction(group: Mapping[str, Any]) -> float:
    return -1.0 if group.get("maximize", False) else 1.0


def adam_scalars(group: Mapping[str, Any], step: int, *, decoupled: bool) -> Scalars:
    """Scalars of Adam (arXiv 1412.6980) and AdamW (arXiv 1711.05101) for update number ``step``, from 1."""
    lr, decay, eps = float(group["lr"]), float(group["weight_decay"]), float(group["eps"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    correction1, correction2 = 1.0 - beta1**step, 1.0 - beta2**step
    (lerp,) = fp32(1.0 - beta1)
    # torch's lerp starts from the gradient when its weight, rounded to fp32, is 0.5 or more.
    towards = bool(lerp >= np.float32(0.5))
    return (
        *fp32(_direction(group), 1.0 - lr * decay if decoupled else decay),
        lerp - np.float32(1.0) if towards else lerp,
        *fp32(float(towards), beta2, 1.0 - beta2, -(lr / correction1), correction2**0.5, eps),
    )


def adam(ops: Operations, *, decoupled: bool) -> Update:
    """Adam, or AdamW when ``decoupled``: states are (exp_avg, exp_avg_sq)."""
    fma, sqrt, select = ops.fma, ops.sqrt, ops.select

    def update(p: Value, states: Values, g: Value, s: Values) -> tuple[Value, Values]:
        direction, decay, lerp, towards, beta2, rest2, step, root, eps = s
        m, v = states
        g = g * direction
        if decoupled:
            p = p * decay
        else:
            g = select(decay != 0, fma(p, decay, g), g)
        m = fma(lerp, g - m, select(towards != 0, g, m))
        v = fma(rest2 * g, g, beta2 * v)
        return p + step * m / (sqrt(v) / root + eps), (m, v)

    return update


def sgd_scalars(group: Mapping[str, Any], step: int) -> Scalars:
    """Scalars of SGD; ``step`` is 1 exactly when the momentum buffer does not exist yet."""
    lr, momentum, dampening = float(group["lr"]), float(group["momentum"]), float(group["dampening"])
    return fp32(
        _direction(group),
        float(group["weight_decay"]),
        -lr,
        momentum,
        1.0 - dampening,
        float(step == 1),
        float(bool(group["nesterov"])),
    )


def sgd(ops: Operations, *, momentum: bool) -> Update:
    """SGD: states are (momentum_buffer,) with ``momentum``, else ()."""
    fma, select = ops.fma, ops.select

    def plain(p: Value, states: Values, g: Value, s: Values) -> tuple[Value, Values]:
        direction, decay, step, _, _, _, _ = s
        g = g * direction
        g = select(decay != 0, fma(p, decay, g), g)
        return fma(g, step, p), states

    def with_buffer(p: Value, states: Values, g: Value, s: Values) -> tuple[Value, Values]:
        direction, decay, step, momentum, fresh, first, nesterov = s
        g = g * direction
        g = select(decay != 0, fma(p, decay, g), g)
        buffer = select(first != 0, g, fma(g, fresh, states[0] * momentum))
        g = select(nesterov != 0, fma(buffer, momentum, g), buffer)
        return fma(g, step, p), (buffer,)

    return with_buffer if momentum else plain


def lion_scalars(group: Mapping[str, Any], step: int) -> Scalars:
    """Scalars of Lion (arXiv 2302.06675); they do not depend on ``step``."""
    lr = float(group["lr"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    decay = 1.0 - lr * float(group["weight_decay"])
    return fp32(_direction(group), decay, -lr, beta1, 1.0 - beta1, beta2, 1.0 - beta2)


def lion(ops: Operations) -> Update:
    """Lion: states are (exp_avg,)."""
    fma, sign = ops.fma, ops.sign

    def update(p: Value, states: Values, g: Value, s: Values) -> tuple[Value, Values]:
        direction, decay, step, beta1, rest1, beta2, rest2 = s
        m = states[0]
        g = g * direction
        move = sign(fma(g, rest1, m * beta1))
        return fma(move, step, p * decay), (fma(g, rest2, m * beta2),)

    return update


def definition(name: str, states: int, ops: Operations) -> Update:
    """The update of rule ``name`` with ``states`` state arrays, on primitives ``ops``; KeyError if there is none."""
    return {
        ("adamw", 2): lambda: adam(ops, decoupled=True),
        ("adam", 2): lambda: adam(ops, decoupled=False),
        ("sgd", 0): lambda: sgd(ops, momentum=False),
        ("sgd", 1): lambda: sgd(ops, momentum=True),
        ("lion", 1): lambda: lion(ops),
    }[name, states]()
