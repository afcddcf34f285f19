"""What slides and where it lies: discovery of units, flat layouts, size classes, the memory ledger."""

from .blocks import Block, find_blocks
from .layout import ParamSpec, UnitLayout, size_classes
from .ledger import Ledger, Terms, ledger_of
from .partition import Part, Partition, partition
from .working_dtype import autocast_weights

__all__ = [
    "Block",
    "Ledger",
    "ParamSpec",
    "Part",
    "Partition",
    "Terms",
    "UnitLayout",
    "autocast_weights",
    "find_blocks",
    "ledger_of",
    "partition",
    "size_classes",
]
