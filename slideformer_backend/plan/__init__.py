"""What slides and where it lies: discovery of units, flat layouts, size classes, the memory ledger."""

from .blocks import Block, find_blocks
from .layout import ParamSpec, UnitLayout, size_classes
from .ledger import Ledger, ledger_of
from .working_dtype import autocast_weights

__all__ = [
    "Block",
    "Ledger",
    "ParamSpec",
    "UnitLayout",
    "autocast_weights",
    "find_blocks",
    "ledger_of",
    "size_classes",
]
