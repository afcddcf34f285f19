"""A sparse factor: a matrix [rows, rank] with the same small number of nonzeros in every row (arXiv 2406.10181)."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["SparseFactor", "make_factor"]


class SparseFactor(NamedTuple):
    """A factor of ``rows`` rows with r nonzeros each. All tensors are contiguous and on one device; O(rows · r) bytes.

    Slots come first, so that neighbouring rows are neighbours in memory.
    """

    positions: torch.Tensor
    """int32 [r, rows]: the columns of a row's nonzeros, distinct within the row."""
    values: torch.Tensor
    """fp32 [r, rows]."""
    starts: torch.Tensor
    """int32 [rank + 1]: where each column begins in ``entries``; columns may be empty."""
    entries: torch.Tensor
    """int32 [r · rows]: flat indices into ``values``, by column, within a column by row."""

    @property
    def rows(self) -> int:
        """Length of a column."""
        return int(self.values.shape[1])

    @property
    def nonzeros(self) -> int:
        """r, the nonzeros of a row."""
        return int(self.values.shape[0])

    @property
    def rank(self) -> int:
        """Number of columns."""
        return int(self.starts.numel()) - 1

    @property
    def nbytes(self) -> int:
        """Device memory of the factor."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self)

    def dense(self) -> torch.Tensor:
        """fp32 [rows, rank]."""
        full = self.values.new_zeros(self.rows, self.rank)
        return full.scatter_(1, self.positions.t().long(), self.values.t())


def make_factor(positions: torch.Tensor, values: torch.Tensor, rank: int) -> SparseFactor:
    """Index the columns of a factor.

    Args:
        positions: integers [r, rows] below ``rank``, distinct within each row.
        values: fp32 [r, rows].
        rank: number of columns.

    Raises:
        ValueError: a row has the same position twice, which would lose one of its values.
    """
    ordered = positions.sort(0).values
    if bool((ordered[1:] == ordered[:-1]).any()):
        raise ValueError("the positions of a row must be distinct")
    slots, rows = positions.shape
    by_row = positions.t().reshape(-1).long()
    order = torch.argsort(by_row, stable=True)  # row-major numbers: within a column, rows ascend
    entries = (order % slots) * rows + order // slots
    counts = torch.bincount(by_row, minlength=rank)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return SparseFactor(
        positions.to(torch.int32).contiguous(),
        values.float().contiguous(),
        starts.to(torch.int32),
        entries.to(torch.int32),
    )
