"""State in and out: model state dicts that keep every tensor, optimizer states that keep every bit."""

from .full_disk import disk_reported
from .model_state import alias, borrowed_state, install_state_hooks
from .optimizer_files import load_optimizer, save_optimizer
from .optimizer_state import install_optimizer_hooks
from .values import pack, random_states, restore_random_states, unpack

__all__ = [
    "alias",
    "borrowed_state",
    "disk_reported",
    "install_optimizer_hooks",
    "install_state_hooks",
    "load_optimizer",
    "pack",
    "random_states",
    "restore_random_states",
    "save_optimizer",
    "unpack",
]
