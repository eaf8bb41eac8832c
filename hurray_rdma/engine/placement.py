"""Pages that the caller has chosen for a snapshot to come, where somebody else hands out the pages of a pool: the block
manager of an inference engine. Knows pools and page IDs; knows no peers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hurray_rdma.cache import PagePool
from hurray_rdma.cache.indices import check_page_ids, narrowed
from hurray_rdma.errors import GeometryError
from hurray_rdma.plan import PageMap

__all__ = ["Placement"]


class Placement:
    """Where a snapshot goes: into these pages of the pool, which stay the caller's.

    The caller keeps them from anybody else, under a lease of the pool's allocator (`PagePool.from_arrays` with
    ``external`` has one of all pages), until the transfer is over.

    Args:
        pool: whose pages.
        block_table: page IDs of all sequences, one after the other, each with as many pages of this pool as its tokens
            need: integers ``[entries]``. Where the source's sequences share pages, so must these.
        present: which of them hold their tokens already, and are not written: bool ``[entries]``, the same for all
            entries of a page; None is none.

    Raises:
        GeometryError: a page ID is not below ``pool.num_pages``, or ``present`` has another length.
    """

    __slots__ = ("block_table", "pool", "present")

    def __init__(self, pool: PagePool, block_table: ArrayLike, *, present: ArrayLike | None = None) -> None:
        self.pool = pool
        self.block_table = narrowed(block_table, field="block_table")
        """uint32 ``[entries]``, read-only."""
        check_page_ids(self.block_table, num_pages=pool.num_pages, field="block_table")
        count = len(self.block_table)
        self.present: NDArray[np.bool_] = np.zeros(count, np.bool_) if present is None else np.array(present, np.bool_)
        """bool ``[entries]``, read-only."""
        if self.present.shape != (count,):
            raise GeometryError(
                f"must be the {count} entries of block_table", field="len(present)", value=self.present.size
            )
        for array in (self.block_table, self.present):
            array.setflags(write=False)

    def pages_for(self, page_map: PageMap, /) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
        """The chosen pages in the order of a grant, uint32 ``[num_pages]``, and which of them are not written.

        Raises:
            GeometryError: the snapshot has another number of entries, or shares pages otherwise, or a page is present
                at one entry and not at another.
        """
        entries = page_map.entries
        page_ids = page_map.pages_for(self.block_table)
        in_order = np.sort(page_ids)
        repeated = in_order[1:] == in_order[:-1]
        if repeated.any():
            page_id = int(in_order[repeated.argmax()])
            first, other = _two_of(self.block_table == page_id, entries)
            raise GeometryError(
                f"block_table[{first}] names that page for another one of the snapshot",
                field=f"block_table[{other}]",
                value=page_id,
            )
        present = np.zeros(page_map.num_pages, np.bool_)
        present[entries[self.present]] = True
        wrong = present[entries] & ~self.present
        if wrong.any():
            page = entries[wrong.argmax()]
            first, other = _two_of(entries == page, self.present)
            raise GeometryError(
                f"present[{first}] is {bool(self.present[first])}, of the same page {page_ids[page]}",
                field=f"present[{other}]",
                value=bool(self.present[other]),
            )
        return page_ids, present


def _two_of(chosen: NDArray[np.bool_], values: NDArray[Any]) -> tuple[int, int]:
    """The first of the chosen places, and the next one that has another value."""
    places = np.flatnonzero(chosen)
    return int(places[0]), int(places[(values[places] != values[places[0]]).argmax()])
