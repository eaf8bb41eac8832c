"""What both sides of a transfer derive from the offered tables, each for itself, and get the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.plan import dedupe, valid_pages

__all__ = ["Batch"]

Uint32Array = NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A batch of sequences with its pages listed once each; all arrays uint32."""

    page_ids: Uint32Array
    """The sender's pages that hold valid tokens, ascending, each once, ``[num_pages]``: the order of a grant."""
    inverse: Uint32Array
    """For each entry of the trimmed block table its place in ``page_ids``, ``[seq_ptr[-1]]``."""
    seq_ptr: Uint32Array
    """Offsets into the trimmed table, ``[num_seqs + 1]``."""
    seq_lens: Uint32Array
    """Tokens, ``[num_seqs]``."""

    @classmethod
    def of(
        cls, block_table: Uint32Array, seq_ptr: Uint32Array, seq_lens: Uint32Array, *, page_size: int, num_pages: int
    ) -> Batch:
        """Trims pages without valid tokens, then dedupes.

        Args:
            block_table, seq_ptr, seq_lens: as in a snapshot.
            page_size: tokens per page.
            num_pages: pages of the sender's pool.

        Raises:
            GeometryError: the arrays do not fit together.
        """
        table, trimmed_ptr = valid_pages(block_table, seq_ptr, seq_lens, page_size)
        page_ids, inverse = dedupe(table, num_pages=num_pages)
        return cls(page_ids=page_ids, inverse=inverse, seq_ptr=trimmed_ptr, seq_lens=seq_lens)

    @property
    def num_pages(self) -> int:
        """Pages that travel, of one role of one layer."""
        return len(self.page_ids)
