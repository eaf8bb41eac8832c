"""What both sides of a transfer know of its pages: which must be granted, and what the receiver's table will say.

Made by `hurray_rdma.plan.mapping`. Knows tables, page sizes and page IDs; knows no strides and no memory.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hurray_rdma.cache.indices import valid_tokens
from hurray_rdma.errors import GeometryError
from hurray_rdma.plan.tables import PlacedTables, look_up

__all__ = ["PageMap"]

Uint32 = NDArray[np.uint32]


class PageMap:
    """Which tokens of which source pages make up which destination pages. Arrays are uint32 and read-only.

    Args:
        src_page_size, dst_page_size, num_pages, entries, seq_ptr, seq_lens: as of the attributes.
        src_pages: ``unit_src_pages``.
        units: ``unit_src_slots``, ``unit_pages``, ``unit_dst_slots``; None where units are whole pages on both sides.
    """

    def __init__(
        self,
        *,
        src_page_size: int,
        dst_page_size: int,
        num_pages: int,
        entries: Uint32,
        seq_ptr: Uint32,
        seq_lens: Uint32,
        src_pages: Uint32,
        units: tuple[Uint32, Uint32, Uint32] | None = None,
    ) -> None:
        self.src_page_size = src_page_size
        """Tokens per page of the source."""
        self.dst_page_size = dst_page_size
        """Tokens per page of the destination; one divides the other."""
        self.num_pages = num_pages
        """Distinct destination pages: the length of a grant."""
        self.entries = entries
        """The destination's block table in terms of the grant: for each entry a place in it, ``[seq_ptr[-1]]``."""
        self.seq_ptr = seq_ptr
        """Where each sequence starts in ``entries``, ``[num_seqs + 1]``."""
        self.seq_lens = seq_lens
        """Tokens of each sequence, ``[num_seqs]``."""
        self.unit_src_pages = src_pages
        """Per unit the source page it is in, ``[num_units]``; ascending by destination page."""
        self._units = units
        for array in (entries, seq_ptr, seq_lens, src_pages, *(units or ())):
            array.setflags(write=False)

    def __repr__(self) -> str:
        sizes = f"{self.src_page_size} to {self.dst_page_size} tokens"
        return f"<PageMap of {self.num_pages} pages, {sizes}, {len(self.entries)} entries>"

    @cached_property
    def valid_tokens(self) -> Uint32:
        """Tokens of each destination page that some sequence has, ``[num_pages]``; the slots after them are
        undefined."""
        valid = valid_tokens(
            self.entries, self.seq_ptr, self.seq_lens, num_pages=self.num_pages, page_size=self.dst_page_size
        )
        valid.setflags(write=False)
        return valid

    @property
    def unit_src_slots(self) -> Uint32:
        """Per unit its first slot in the source page."""
        return self._units_of_pages[0]

    @property
    def unit_pages(self) -> Uint32:
        """Per unit the destination page it goes to, as a place in the grant."""
        return self._units_of_pages[1]

    @property
    def unit_dst_slots(self) -> Uint32:
        """Per unit its first slot in the destination page."""
        return self._units_of_pages[2]

    @cached_property
    def _units_of_pages(self) -> tuple[Uint32, Uint32, Uint32]:
        if self._units is not None:
            return self._units
        slots, pages = np.zeros(self.num_pages, np.uint32), np.arange(self.num_pages, dtype=np.uint32)
        slots.setflags(write=False)
        pages.setflags(write=False)
        return slots, pages, slots

    @property
    def nbytes(self) -> int:
        """What its arrays take, those that are made when they are asked for left out."""
        arrays = (self.entries, self.seq_ptr, self.seq_lens, self.unit_src_pages, *(self._units or ()))
        return sum(array.nbytes for array in arrays)

    @property
    def unit_size(self) -> int:
        """Tokens per unit."""
        return min(self.src_page_size, self.dst_page_size)

    @property
    def num_units(self) -> int:
        """Pieces of pages that travel when nothing is resident."""
        return len(self.unit_src_pages)

    @property
    def src_page_ids(self) -> Uint32:
        """The source page behind each destination page, ``[num_pages]``, where page sizes are equal: ascending."""
        return self.unit_src_pages

    def block_table(self, dst_page_ids: ArrayLike, /) -> Uint32:
        """The block table of the receiver, aliases kept. uint32 ``[seq_ptr[-1]]``.

        Args:
            dst_page_ids: the grant, integers ``[num_pages]``.

        Raises:
            GeometryError: it has another length.
        """
        return look_up(self.check_grant(dst_page_ids), self.entries)

    def placed(self, dst_page_ids: ArrayLike, /) -> PlacedTables:
        """The receiver's tables. Arguments and errors as of `block_table`."""
        return PlacedTables(self.block_table(dst_page_ids), self.seq_ptr, self.seq_lens, self.num_pages)

    def check_grant(self, dst_page_ids: ArrayLike, /) -> Uint32:
        """``dst_page_ids`` as uint32 ``[num_pages]``.

        Raises:
            GeometryError: it has another length.
        """
        page_ids = np.asarray(dst_page_ids, np.uint32)
        if page_ids.shape != (self.num_pages,):
            raise GeometryError(
                f"must be the {self.num_pages} pages of the offer", field="len(dst_page_ids)", value=page_ids.size
            )
        return page_ids

    def pages_for(self, block_table: NDArray[np.uint32], /) -> Uint32:
        """The grant that yields a block table which exists already: several senders fill slices of one snapshot, or
        the receiver has chosen its pages.

        Args:
            block_table: the receiver's, uint32 ``[seq_ptr[-1]]``, for the same sequences.

        Raises:
            GeometryError: the snapshot has another number of entries, or shares pages otherwise.
        """
        if len(block_table) != len(self.entries):
            raise GeometryError(
                f"must be the {len(self.entries)} entries of the snapshot",
                field="len(block_table)",
                value=len(block_table),
            )
        page_ids = np.empty(self.num_pages, np.uint32)
        page_ids[self.entries] = block_table
        wrong = page_ids[self.entries] != block_table
        if wrong.any():
            at = int(wrong.argmax())
            raise GeometryError(
                "the snapshot shares pages here that the table does not",
                field=f"block_table[{at}]",
                value=int(block_table[at]),
            )
        return page_ids
