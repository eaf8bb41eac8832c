"""Plans: which bytes go where, as three arrays that an executor follows without thinking.

Knows page IDs, strides and byte offsets; knows no memory and no peers. Offsets count from the place of page 0, so one
plan serves all roles and layers of equal geometry: only the bases differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.errors import GeometryError
from hurray_rdma.plan.tables import check_paired

__all__ = ["Plan", "build_plan"]

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


def build_plan(
    src_page_ids: NDArray[np.uint32],
    dst_page_ids: NDArray[np.uint32],
    *,
    page_nbytes: int,
    src_stride_nbytes: int,
    dst_stride_nbytes: int,
) -> Plan:
    """Moves whole pages; pages that follow each other without a gap on both sides become one operation.

    Args:
        src_page_ids: uint32 ``[n]``.
        dst_page_ids: where each goes, uint32 ``[n]``, no page twice.
        page_nbytes: bytes of a page.
        src_stride_nbytes: from one page of the source to the next, >= ``page_nbytes``.
        dst_stride_nbytes: the same of the destination.

    Raises:
        GeometryError: the lists differ in length, or a stride is below the page.
    """
    check_paired(src_page_ids, dst_page_ids)
    for field, stride in (("src_stride_nbytes", src_stride_nbytes), ("dst_stride_nbytes", dst_stride_nbytes)):
        if stride < page_nbytes:
            raise GeometryError(f"is below the {page_nbytes} bytes of a page", field=field, value=stride)
    num_pages = len(src_page_ids)
    src = src_page_ids.astype(np.uint64)
    dst = dst_page_ids.astype(np.uint64)
    if num_pages and src_stride_nbytes == page_nbytes == dst_stride_nbytes:
        first = np.ones(num_pages, np.bool_)
        one = np.uint64(1)
        # Unsigned differences wrap, so a step of exactly one is the only way to equal one.
        np.logical_or(np.diff(src) != one, np.diff(dst) != one, out=first[1:])
        heads = np.flatnonzero(first)
        pages_per_run = np.diff(heads, append=num_pages).astype(np.uint64)
        src, dst = src[heads], dst[heads]
    else:
        pages_per_run = np.ones(num_pages, np.uint64)
    return Plan(
        src_offsets=src * np.uint64(src_stride_nbytes),
        dst_offsets=dst * np.uint64(dst_stride_nbytes),
        lengths=pages_per_run * np.uint64(page_nbytes),
        num_pages=num_pages,
        nbytes=num_pages * page_nbytes,
    )
