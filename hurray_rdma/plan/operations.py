"""Plans: which bytes go where, as three arrays that an executor follows without thinking.

Knows page IDs, strides and byte offsets; knows no memory and no peers. Offsets count from the place of page 0, so one
plan serves all roles and layers of equal geometry: only the bases differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Plan"]

Offsets = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Pieces to move: ``lengths[i]`` bytes from source base + ``src_offsets[i]`` to destination base +
    ``dst_offsets[i]``. No two pieces touch one destination byte. The arrays are read-only."""

    src_offsets: Offsets
    """Bytes, uint64 ``[num_operations]``."""
    dst_offsets: Offsets
    """Bytes, uint64 ``[num_operations]``."""
    lengths: Offsets
    """Bytes, each > 0, uint64 ``[num_operations]``."""
    num_pages: int
    """Pages that the pieces are of."""
    nbytes: int
    """Sum of the lengths."""

    def __post_init__(self) -> None:
        for array in (self.src_offsets, self.dst_offsets, self.lengths):
            array.setflags(write=False)

    @property
    def num_operations(self) -> int:
        """Pieces: puts, gets or copies to be made."""
        return len(self.lengths)

    def __repr__(self) -> str:
        return f"<Plan of {self.num_operations} operations for {self.num_pages} pages, {self.nbytes} bytes>"
