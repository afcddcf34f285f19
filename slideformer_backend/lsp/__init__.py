"""LSP-Offload (arXiv 2406.10181): gradients of matrices as small cores, by sparse learned or orthonormal projectors."""

from .moments import Beta, carry_moments
from .orthonormal import OrthonormalProjector
from .projector import GradientProjector, Learned
from .sparse import SparseProjector

__all__ = ["Beta", "GradientProjector", "Learned", "OrthonormalProjector", "SparseProjector", "carry_moments"]
