"""``torch.autograd.grad`` and ``backward(inputs=...)`` for managed parameters.

A parameter is another leaf to autograd whenever its memory is on another device or in another dtype: torch looks for
the leaf of now, which is not in the graph of a forward that ran with the weight in the window. Here the leaf is found
in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

Node = Any
Take = Callable[[torch.Tensor, bool], torch.Tensor]


def differentiate(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    take_of: Callable[[torch.Tensor], Take | None],
) -> Any:
    """``torch.autograd.grad`` or ``torch.autograd.backward`` as torch calls their overrides.

    Args:
        function: which of them.
        args: the outputs, and for ``grad`` the inputs.
        kwargs: the other arguments.
        take_of: of a managed parameter, what turns a gradient of its leaf (and whether that is its only one) into that
            of the parameter; None for other tensors.
    """
    if function is torch.autograd.grad:
        return _grad(args[0], args[1], dict(kwargs), take_of)
    inputs = kwargs.get("inputs")
    if inputs is not None:
        leaves = _leaves(args[0])
        inputs = [
            found for value in inputs for found in ([value] if _take(take_of, value) is None else leaves.of(value))
        ]
        if not inputs:
            return None  # as torch: the graph has none of them
        kwargs = {**kwargs, "inputs": inputs}
    return function(*args, **kwargs)


def _grad(outputs: Any, inputs: Sequence[Any], options: dict[str, Any], take_of: Callable[..., Take | None]) -> Any:
    leaves = _leaves(outputs)
    fills, allows = options.pop("materialize_grads", False), options.get("allow_unused")
    found = [[value] if _take(take_of, value) is None else leaves.of(value) for value in inputs]
    if not allows:
        _check(inputs, found)
    edges = [edge for group in found for edge in group]
    gradients: list[torch.Tensor | None] = []
    if edges:
        gradients += torch.autograd.grad(outputs, edges, **options)
    results: list[torch.Tensor | None] = []
    for value, group in zip(inputs, found, strict=True):
        arrived, gradients = [g for g in gradients[: len(group)] if g is not None], gradients[len(group) :]
        take = _take(take_of, value)
        if take is not None:
            arrived = [take(gradient, len(arrived) == 1) for gradient in arrived]
        total = sum(arrived[1:], start=arrived[0]) if arrived else None
        if total is None and fills:
            total = torch.zeros_like(value, requires_grad=bool(options.get("create_graph")))
        results.append(total)
    return tuple(results)


def _take(take_of: Callable[[torch.Tensor], Take | None], value: Any) -> Take | None:
    return take_of(value) if isinstance(value, torch.Tensor) else None


def _check(inputs: Sequence[Any], found: Sequence[Sequence[Any]]) -> None:
    for value, group in zip(inputs, found, strict=True):
        if isinstance(value, torch.Tensor) and not value.requires_grad:
            raise RuntimeError("One of the differentiated Tensors does not require grad")
        if not group:
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if"
                " this is the desired behavior."
            )


class _Leaves:
    """The leaves of a graph, by tensor."""

    def __init__(self) -> None:
        self._edges: dict[int, list[GradientEdge]] = {}

    def add(self, node: Node) -> None:
        self._edges.setdefault(id(node.variable), []).append(GradientEdge(node, 0))

    def of(self, tensor: torch.Tensor) -> list[GradientEdge]:
        return self._edges.get(id(tensor), [])


def _leaves(outputs: Any) -> _Leaves:
    leaves, waiting, seen = _Leaves(), list(_roots(outputs)), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            leaves.add(node)
        waiting += [following for following, _ in node.next_functions]
    return leaves


def _roots(outputs: Any) -> Iterable[Node]:
    for output in [outputs] if isinstance(outputs, (torch.Tensor, GradientEdge)) else outputs:
        yield output.node if isinstance(output, GradientEdge) else output.grad_fn
