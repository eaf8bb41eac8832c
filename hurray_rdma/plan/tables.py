"""Block tables as arrays: which pages of a batch travel, each of them once.

Knows page IDs only. Both sides of a transfer run these on the offered table and get the same arrays, so that a grant
need say no more than one destination page for each page that `dedupe` finds, in its order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache.indices import DENSE_FACTOR, check_page_ids, check_seq_lens

__all__ = ["dedupe", "valid_pages"]


def valid_pages(
    block_table: NDArray[np.uint32], seq_ptr: NDArray[np.uint32], seq_lens: NDArray[np.uint32], page_size: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Leaves out the table entries that hold no valid token: pages that were allocated ahead.

    Args:
        block_table: page IDs, uint32 ``[seq_ptr[-1]]``.
        seq_ptr: uint32 ``[num_seqs + 1]``, pages.
        seq_lens: uint32 ``[num_seqs]``, tokens.
        page_size: tokens per page.

    Returns:
        ``block_table`` and ``seq_ptr`` without them; the arguments themselves when there are none.

    Raises:
        GeometryError: a sequence has more tokens than its pages hold.
    """
    check_seq_lens(seq_lens, seq_ptr, page_size=page_size)
    trimmed_ptr = starts_of(seq_lens, page_size)
    if (trimmed_ptr == seq_ptr).all():
        return block_table, seq_ptr
    shift = seq_ptr[:-1] - trimmed_ptr[:-1]
    entries = np.arange(trimmed_ptr[-1]) + np.repeat(shift, trimmed_ptr[1:] - trimmed_ptr[:-1])
    return block_table[entries], trimmed_ptr.astype(np.uint32)


def starts_of(seq_lens: NDArray[np.uint32], page_size: int) -> NDArray[np.int64]:
    """Where each sequence starts in a block table without pages allocated ahead, int64 ``[num_seqs + 1]``."""
    starts = np.zeros(len(seq_lens) + 1, np.int64)
    np.cumsum((seq_lens.astype(np.int64) + (page_size - 1)) // page_size, out=starts[1:])
    return starts


def dedupe(block_table: NDArray[np.uint32], *, num_pages: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Each physical page once, however many entries alias it.

    Args:
        block_table: page IDs, uint32 ``[num_entries]``.
        num_pages: pages of the pool they are of.

    Returns:
        ``(page_ids, inverse)``: the distinct page IDs, ascending (so that consecutive pages are neighbours), and for
        each entry its place in ``page_ids``; both uint32.

    Raises:
        GeometryError: a page ID is not below ``num_pages``.
    """
    check_page_ids(block_table, num_pages=num_pages, field="block_table")
    if num_pages > DENSE_FACTOR * len(block_table):
        page_ids, inverse = np.unique(block_table, return_inverse=True)
        return page_ids.astype(np.uint32), inverse.astype(np.uint32)
    index = block_table.astype(np.int64)  # NumPy looks up by uint32 several times slower
    used = np.zeros(num_pages, np.bool_)
    used[index] = True
    distinct = np.flatnonzero(used)
    place = np.empty(num_pages, np.uint32)
    place[distinct] = np.arange(len(distinct), dtype=np.uint32)
    return distinct.astype(np.uint32), look_up(place, index)


def look_up(values: NDArray[np.uint32], index: NDArray[np.int64]) -> NDArray[np.uint32]:
    """``values[index]`` for places that are known to exist: the fastest way that NumPy has."""
    return values.take(index, mode="clip")
