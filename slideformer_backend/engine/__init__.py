"""The engine: units, window, update policies, and what drives them."""

from .engine import Engine
from .report import EngineReport

__all__ = ["Engine", "EngineReport"]
