"""State in and out: model state dicts that keep every tensor, optimizer state dicts that keep every bit."""

from .model_state import install_state_hooks
from .optimizer_state import install_optimizer_hooks

__all__ = ["install_optimizer_hooks", "install_state_hooks"]
