"""What one session may do over its page stream, transfer by transfer: which pages, and whether to write or to read.

A permit begins before the peer hears of its pages and ends with the transfer; when `end` returns, nothing moves under
it any more. So what comes too late lands nowhere, and its pages need no quarantine. Runs on the event loop.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import PagePool, PoolLayout
from hurray_rdma.transport import Memory, Path, Permits

__all__ = ["SessionPermits", "can_stream"]


def can_stream(layout: PoolLayout) -> bool:
    """Whether a byte of one page is never between two of another, as permits for pages need it."""
    return layout.num_pages == 1 or all(
        layout.extent_nbytes(index) <= layout.segments[index].page_stride_nbytes for index in set(layout.alike)
    )


class SessionPermits:
    """Of one session of the listening side.

    Args:
        permits: what its page stream is held to; None where it can have none.
    """

    def __init__(self, permits: Permits | None) -> None:
        self._permits = permits
        self._held: dict[int, tuple[Memory, ...]] = {}

    def begin(self, transfer_id: int, path: str, pool: PagePool, page_ids: NDArray[np.uint32], *, writes: bool) -> None:
        """Permits a transfer to write into pages of a pool, or else to read them, if it is to come by stream.

        Args:
            transfer_id: of the session.
            path: as the peer's request has it.
            pool: on the host, and open until `end`; else nothing is permitted.
            page_ids: uint32, in any order.
            writes: which of the two.
        """
        if self._permits is None or path != Path.STREAM.value or pool.closed or pool.device != "cpu":
            return
        if not can_stream(pool.layout):
            return
        self.end(transfer_id)
        held = self._held[transfer_id] = tuple(region.memory for region in pool.regions)
        for memory in held:
            memory.hold()
        regions, segments = _places(pool)
        self._permits.add(transfer_id, writes, regions, segments, np.unique(page_ids).astype(np.uint32, copy=False))

    def end(self, transfer_id: int) -> None:
        """The transfer is over. Harmless where nothing was permitted."""
        held = self._held.pop(transfer_id, None)
        if held is not None and self._permits is not None:
            self._permits.remove(transfer_id)
            for memory in held:
                memory.release()


def _places(pool: PagePool) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Regions and segments as `Permits.add` takes them."""
    layout = pool.layout
    order = sorted(range(len(layout.segments)), key=lambda index: layout.segments[index].region_index)
    segments, counts = [], [0] * len(pool.regions)
    for index in order:
        segment, extent = layout.segments[index], layout.extent_nbytes(index)
        counts[segment.region_index] += 1
        stride = segment.page_stride_nbytes if layout.num_pages > 1 else extent
        segments.append((segment.offset_nbytes, stride, extent))
    regions, first = [], 0
    for region, count in zip(pool.regions, counts, strict=True):
        regions.append((region.address, region.nbytes, first, count))
        first += count
    return np.array(regions, np.uint64), np.array(segments, np.uint64)
