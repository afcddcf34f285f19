"""Find the repeated blocks of any model: the units that slide.

Hugging Face's ``GradientCheckpointingLayer`` and ``_no_split_modules`` are hints; any ``nn.Module`` with a stack of
equal blocks works without them. The class is found by name, so that this module imports no other library.
"""

from __future__ import annotations

import collections
from typing import NamedTuple

from torch import nn


class Block(NamedTuple):
    """One repeated block: its qualified name in the model, the module, and how it was recognised."""

    name: str
    module: nn.Module
    how: str


class _Stack(NamedTuple):
    blocks: list[Block]
    elements: int


def find_blocks(model: nn.Module) -> list[Block]:
    """All sliding blocks of ``model`` in registration order (forward order in every model we know).

    A stack is an ``nn.ModuleList`` or ``nn.Sequential`` whose items all are checkpointing layers, or all are named in
    ``_no_split_modules``, or (when no such hint exists anywhere) an outermost list of two or more items of one class.
    Blocks without parameters, and modules that occur twice, are left out.
    """
    hinted: list[_Stack] = []
    plain: list[_Stack] = []
    no_split = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    taken: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or _is_inside(name, taken):
            continue
        items = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
        how = _recognise([child for _, child in items], no_split)
        if how is None:
            continue
        elements = sum(parameter.numel() for _, child in items for parameter in child.parameters())
        if elements == 0:
            continue
        taken.append(name)
        stack = _Stack([Block(item_name, child, how) for item_name, child in items], elements)
        (plain if how == "same class" else hinted).append(stack)
    stacks = hinted or _main_stacks(plain)
    return _once([block for stack in stacks for block in stack.blocks])


def _recognise(children: list[nn.Module], no_split: set[str]) -> str | None:
    if not children:
        return None
    if all(_is_checkpointing_layer(child) for child in children):
        return "GradientCheckpointingLayer"
    if all(type(child).__name__ in no_split for child in children):
        return "_no_split_modules"
    has_forward = all(type(child).forward is not nn.Module.forward for child in children)
    if len(children) >= 2 and len({type(child) for child in children}) == 1 and has_forward:
        return "same class"
    return None


def _is_checkpointing_layer(module: nn.Module) -> bool:
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)


def _main_stacks(stacks: list[_Stack]) -> list[_Stack]:
    # Without a hint, short lists of small modules (heads, routers, adapters) must not become units of their own.
    if not stacks:
        return []
    largest = max(stack.elements for stack in stacks)
    return [stack for stack in stacks if stack.elements * 4 >= largest]


def _once(blocks: list[Block]) -> list[Block]:
    seen: collections.Counter[int] = collections.Counter(id(block.module) for block in blocks)
    return [block for block in blocks if seen[id(block.module)] == 1 and any(True for _ in block.module.parameters())]


def _is_inside(name: str, taken: list[str]) -> bool:
    return any(name == outer or outer == "" or name.startswith(outer + ".") for outer in taken)
