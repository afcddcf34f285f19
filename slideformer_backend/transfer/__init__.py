"""Asynchronous operations: lanes (FIFO queues of work), tickets (their results) and the monitor that checks them."""

from ..storage import Ticket
from .backend import Backend, CpuBackend, CudaBackend, backend_for
from .lane import Lane, copy
from .monitor import Monitor
from .pool import GradientBuffer, GradientPool, tensors_over

__all__ = [
    "Backend",
    "CpuBackend",
    "CudaBackend",
    "GradientBuffer",
    "GradientPool",
    "Lane",
    "Monitor",
    "Ticket",
    "backend_for",
    "copy",
    "tensors_over",
]
