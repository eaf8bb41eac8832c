"""Whether the index arrays of a batch fit together and into a pool (ADR-024, storage invariants).

Knows arrays of page IDs and token counts only; of a caller's or of a peer's, nothing is used before it was here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.errors import GeometryError

__all__ = ["DENSE_FACTOR", "check_distinct", "check_indices", "check_page_ids", "check_seq_lens"]

DENSE_FACTOR = 8
"""An array over all pages of a pool is made up to this many pages per page ID; fewer IDs than that are sorted."""


def check_indices(
    block_table: NDArray[np.uint32],
    seq_ptr: NDArray[np.uint32],
    seq_lens: NDArray[np.uint32],
    *,
    num_pages: int,
    page_size: int,
) -> None:
    """Checks all that a batch must keep to.

    Args:
        block_table: page IDs, uint32 ``[seq_ptr[-1]]``.
        seq_ptr: uint32 ``[num_seqs + 1]``, pages.
        seq_lens: uint32 ``[num_seqs]``, tokens.
        num_pages: pages of the pool.
        page_size: tokens per page.

    Raises:
        GeometryError: with the place and the numbers on both sides.
    """
    if len(seq_ptr) != len(seq_lens) + 1:
        raise GeometryError(
            f"must be one more than the {len(seq_lens)} entries of seq_lens", field="len(seq_ptr)", value=len(seq_ptr)
        )
    if seq_ptr[0] != 0:
        raise GeometryError("must be 0", field="seq_ptr[0]", value=int(seq_ptr[0]))
    falls = seq_ptr[1:] < seq_ptr[:-1]
    if falls.any():
        at = int(falls.argmax()) + 1
        raise GeometryError(
            f"is below seq_ptr[{at - 1}] = {seq_ptr[at - 1]}", field=f"seq_ptr[{at}]", value=int(seq_ptr[at])
        )
    if seq_ptr[-1] != len(block_table):
        raise GeometryError(
            f"must be the {len(block_table)} entries of block_table",
            field=f"seq_ptr[{len(seq_ptr) - 1}]",
            value=int(seq_ptr[-1]),
        )
    check_page_ids(block_table, num_pages=num_pages, field="block_table")
    check_seq_lens(seq_lens, seq_ptr, page_size=page_size)


def check_page_ids(page_ids: NDArray[np.uint32], *, num_pages: int, field: str) -> None:
    """Raises GeometryError unless every page ID is below ``num_pages``."""
    if len(page_ids) and int(page_ids.max()) >= num_pages:
        at = int((page_ids >= num_pages).argmax())
        raise GeometryError(f"is not below num_pages {num_pages}", field=f"{field}[{at}]", value=int(page_ids[at]))


def check_distinct(page_ids: NDArray[np.uint32], *, num_pages: int, field: str) -> None:
    """Raises GeometryError unless every page ID is below ``num_pages`` and none is there twice."""
    check_page_ids(page_ids, num_pages=num_pages, field=field)
    if (page_ids[1:] > page_ids[:-1]).all():
        return
    if num_pages <= DENSE_FACTOR * len(page_ids):
        used = np.zeros(num_pages, np.bool_)
        used[page_ids.astype(np.int64)] = True
        if np.count_nonzero(used) == len(page_ids):
            return
    in_order = np.sort(page_ids)
    twice = in_order[1:][in_order[1:] == in_order[:-1]]
    if len(twice):
        raise GeometryError("must not name a page twice", field=field, value=int(twice[0]))


def check_seq_lens(seq_lens: NDArray[np.uint32], seq_ptr: NDArray[np.uint32], *, page_size: int) -> None:
    """Raises GeometryError unless the pages of each sequence have room for its tokens."""
    starts = seq_ptr.astype(np.int64)
    room = (starts[1:] - starts[:-1]) * page_size  # below 0 where ``seq_ptr`` falls
    too_long = seq_lens > room
    if too_long.any():
        at = int(too_long.argmax())
        raise GeometryError(
            f"is above the {room[at]} tokens of its {room[at] // page_size} pages of {page_size}",
            field=f"seq_lens[{at}]",
            value=int(seq_lens[at]),
            fix="Give the sequence more pages in the block table",
        )
