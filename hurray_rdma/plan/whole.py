"""Plans between pools whose pages are the same bytes on both sides: a multiplication for each page, and no more.

What a small transfer waits for is not its bytes, but that its plan is made; `hurray_rdma.plan.transfer` makes all
others. Knows layouts and page IDs; knows no memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import PoolLayout
from hurray_rdma.plan._offsets import whole_pages
from hurray_rdma.plan.operations import Plan

__all__ = ["WholePages"]


class WholePages:
    """The place of each part of a page in two pools. Made by `between`."""

    def __init__(self, places: NDArray[np.uint64]) -> None:
        self._places = places
        self._page_nbytes = int(places[:, 4].sum())

    @classmethod
    def between(cls, source: PoolLayout, dest: PoolLayout) -> WholePages | None:
        """None unless both have pages of one size, heads and order, without gaps inside, in one region.

        Args:
            source: layout of the pool that holds the pages.
            dest: layout of the pool that receives them; of a peer, so `PoolLayout.check_inside` comes first.
        """
        if source.spec != dest.spec:
            return None
        places = []
        for index, (src, dst) in enumerate(zip(source.segments, dest.segments, strict=True)):
            nbytes = source.page_nbytes(index)
            inside = src.token_stride_nbytes, src.head_stride_nbytes
            if (
                src.region_index
                or dst.region_index
                or inside != (dst.token_stride_nbytes, dst.head_stride_nbytes)
                or source.extent_nbytes(index) != nbytes
            ):
                return None
            places.append(
                (src.offset_nbytes, src.page_stride_nbytes, dst.offset_nbytes, dst.page_stride_nbytes, nbytes)
            )
        return cls(np.array(places, np.uint64))

    def plan(self, src_page_ids: NDArray[np.uint32], dst_page_ids: NDArray[np.uint32]) -> Plan:
        """Each page of the one list to the page at the same place of the other; offsets count from the regions' starts.

        Args:
            src_page_ids: below the source's pages, uint32 ``[num_pages]``.
            dst_page_ids: below the destination's, none twice, uint32 ``[num_pages]``.
        """
        offsets = whole_pages(self._places, src_page_ids, dst_page_ids)
        num_pages = len(src_page_ids)
        return Plan(*offsets, num_pages=num_pages, nbytes=num_pages * self._page_nbytes)
