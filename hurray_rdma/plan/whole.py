"""Pools whose pages are the same bytes on both sides: what goes where is a multiplication for each page, and no plan.

What a small transfer waits for is not its bytes, but that its plan is made; `hurray_rdma.plan.transfer` makes those of
all others. Knows layouts; knows no page IDs and no memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import PoolLayout

__all__ = ["WholePages"]


class WholePages(NamedTuple):
    """The place of each part of a page in two pools. Made by `between`."""

    places: NDArray[np.uint64]
    """Where the part of page 0 is in the source, from one page to the next, the same two of the destination, and its
    length; all in bytes, from the starts of the regions, uint64 ``[num_parts, 5]``."""
    page_nbytes: int
    """Bytes of all parts of one page."""

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
        return cls(np.array(places, np.uint64), sum(place[4] for place in places))
