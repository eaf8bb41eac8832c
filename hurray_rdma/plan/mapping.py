"""From an offered block table to the pages that the receiver must find for it, whatever the two page sizes.

Both sides run this on the same offer and get the same arrays, so that a grant is one page ID for each page listed here.

A *unit* is the smaller of the two pages: the tokens that lie together on both sides. Where the destination's pages are
smaller, each source page is cut into units, and each distinct unit gets a page of its own. Where they are larger, each
destination page takes several consecutive units of a sequence, and two table entries share a page exactly if all their
units are the same: a shared prefix that ends inside a larger page is written into each sequence's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache.indices import cut_units, dedupe, starts_of, valid_pages
from hurray_rdma.errors import GeometryError
from hurray_rdma.plan.pagemap import PageMap

__all__ = ["map_pages"]

_MAX_UNITS = 1 << 24
"""Of one offer whose page sizes differ: a few bytes of it, from anybody, could ask for tables of gigabytes else."""
_MAX_JOINED = 256
"""Pages of the source in one of the destination: joining them costs a step each."""

Uint32 = NDArray[np.uint32]
Int64 = NDArray[np.int64]


def map_pages(
    block_table: Uint32,
    seq_ptr: Uint32,
    seq_lens: Uint32,
    *,
    num_pages: int,
    src_page_size: int,
    dst_page_size: int,
) -> PageMap:
    """Trims, cuts or joins, and dedupes the pages of an offer. O(entries), but for a sort where pages are joined.

    Args:
        block_table: page IDs of the source, uint32 ``[seq_ptr[-1]]``.
        seq_ptr: uint32 ``[num_seqs + 1]``, pages.
        seq_lens: uint32 ``[num_seqs]``, tokens.
        num_pages: pages of the source's pool.
        src_page_size, dst_page_size: tokens per page of the two sides.

    Raises:
        GeometryError: a page ID is not below ``num_pages``, a sequence has more tokens than its pages hold, neither
            page size divides the other, the destination's is over 256 times the source's, or unlike page sizes cut it
            into more than 2**24 pieces.
    """
    if src_page_size % dst_page_size and dst_page_size % src_page_size:
        raise GeometryError(
            f"must divide the destination's {dst_page_size}, or be a multiple of it",
            field="page_size",
            value=src_page_size,
        )
    table, trimmed_ptr = valid_pages(block_table, seq_ptr, seq_lens, src_page_size)
    page_ids, places = dedupe(table, num_pages=num_pages)
    if src_page_size == dst_page_size:
        return PageMap(
            src_page_size=src_page_size,
            dst_page_size=dst_page_size,
            num_pages=len(page_ids),
            entries=places,
            seq_ptr=trimmed_ptr.copy(),
            seq_lens=seq_lens.copy(),
            src_pages=page_ids,
        )
    dst_ptr = starts_of(seq_lens, dst_page_size)
    if dst_page_size > _MAX_JOINED * src_page_size:
        raise GeometryError(
            f"is above {_MAX_JOINED} times the source's {src_page_size}", field="page_size", value=dst_page_size
        )
    units = int(dst_ptr[-1]) * max(1, dst_page_size // src_page_size)
    if units > _MAX_UNITS:
        raise GeometryError(
            f"pages of {src_page_size} tokens go into pages of {dst_page_size} in at most {_MAX_UNITS} pieces",
            field="pieces of the offer",
            value=units,
            fix="Send fewer sequences at a time, or use page sizes that are closer to each other",
        )
    if src_page_size > dst_page_size:
        per_page = src_page_size // dst_page_size
        mapped = _cut(page_ids, cut_units(places, trimmed_ptr, dst_ptr, per_page), per_page, dst_page_size)
    else:
        per_page = dst_page_size // src_page_size
        rows = np.full((int(dst_ptr[-1]), per_page), len(page_ids), np.int64)  # no page has that place
        rows.reshape(-1)[_padded_entries(trimmed_ptr, dst_ptr, per_page)] = places
        mapped = _join(page_ids, rows, src_page_size)
    return PageMap(
        src_page_size=src_page_size,
        dst_page_size=dst_page_size,
        num_pages=mapped.num_pages,
        entries=mapped.entries,
        seq_ptr=dst_ptr,
        seq_lens=seq_lens.copy(),
        src_pages=mapped.src_pages,
        units=(mapped.src_slots, mapped.pages, mapped.dst_slots),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Mapped:
    """The part of a `PageMap` that depends on which page is the larger."""

    num_pages: int
    entries: Uint32
    src_pages: Uint32
    src_slots: Uint32
    pages: Uint32
    dst_slots: Uint32


def _cut(page_ids: Uint32, unit: NDArray[np.uint64], per_page: int, dst_page_size: int) -> _Mapped:
    """Destination pages are units; ``unit`` is per destination entry, as of `cut_units`."""
    num_units = len(page_ids) * per_page
    distinct: NDArray[Any]
    number: NDArray[Any]
    if num_units < 2**32:
        distinct, number = dedupe(unit.astype(np.uint32), num_pages=num_units)
    else:
        distinct, number = np.unique(unit, return_inverse=True)
    page, part = np.divmod(distinct, per_page)
    return _Mapped(
        len(distinct),
        number.astype(np.uint32, copy=False),
        page_ids[page],
        (part * dst_page_size).astype(np.uint32),
        np.arange(len(distinct), dtype=np.uint32),
        _zeros(len(distinct)),
    )


def _join(page_ids: Uint32, rows: Int64, src_page_size: int) -> _Mapped:
    """Source pages are units; ``rows`` has their places in ``page_ids`` for each destination entry."""
    absent = len(page_ids)
    # Column by column, each distinct beginning of a row gets a number, in the order of the rows.
    number = rows[:, 0]
    for column in range(1, rows.shape[1]):
        _, number = np.unique(number * (absent + 1) + rows[:, column], return_inverse=True)
    _, first, entries = np.unique(number, return_index=True, return_inverse=True)
    units = rows[first]
    page, column_of = np.nonzero(units < absent)
    return _Mapped(
        len(first),
        entries.astype(np.uint32),
        page_ids[units[page, column_of]],
        _zeros(len(page)),
        page.astype(np.uint32),
        (column_of * src_page_size).astype(np.uint32),
    )


def _padded_entries(src_ptr: Uint32, dst_ptr: Uint32, per_page: int) -> Int64:
    """Where each source entry is, when each sequence begins a new destination page."""
    shift = dst_ptr[:-1].astype(np.int64) * per_page - src_ptr[:-1]
    return np.arange(src_ptr[-1]) + np.repeat(shift, _counts(src_ptr))


def _counts(starts: Uint32) -> Uint32:
    return starts[1:] - starts[:-1]


def _zeros(count: int) -> Uint32:
    return np.zeros(count, np.uint32)
