"""Block tables as arrays: which pages of a batch travel, each of them once.

Knows page IDs only. Both sides of a transfer run these on the offered table and get the same arrays, so that a grant
need say no more than one destination page for each page that `dedupe` finds, in its order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache.indices import dedupe, valid_pages

__all__ = ["PlacedTables", "dedupe", "valid_pages"]


class PlacedTables(NamedTuple):
    """The index arrays of a snapshot in the pages that it was granted; uint32."""

    block_table: NDArray[np.uint32]
    """Aliases kept, ``[seq_ptr[-1]]``."""
    seq_ptr: NDArray[np.uint32]
    """``[num_seqs + 1]``."""
    seq_lens: NDArray[np.uint32]
    """``[num_seqs]``."""
    num_pages: int
    """Distinct ones."""


def look_up(values: NDArray[np.uint32], index: NDArray[np.int64] | NDArray[np.uint32]) -> NDArray[np.uint32]:
    """``values[index]`` for places that are known to exist: the fastest way that NumPy has."""
    return values.take(index, mode="clip")
