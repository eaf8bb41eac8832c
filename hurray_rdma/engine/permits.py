"""What one session may do over its page stream, transfer by transfer: which pages, and whether to write or to read.

A permit begins before the peer hears of its pages, and ends when the transfer is over or is asked to stop; when `end`
returns, nothing is written under it any more, and nothing more is handed out to be read: what was, on this host, may
be taken later, and is not acknowledged. So what comes too late lands nowhere, and its pages need no quarantine.
Permits begin on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import PagePool, PoolLayout
from hurray_rdma.errors import RegistrationError
from hurray_rdma.transport import Memory, Permits
from hurray_rdma.transport.memory import hold

__all__ = ["SessionPermits", "can_stream"]

_Places: TypeAlias = tuple[NDArray[np.uint64], NDArray[np.uint64]]


def can_stream(layout: PoolLayout) -> bool:
    """Whether pages are whole stretches of memory, as permits for pages need it: nothing of anybody else's lies in
    one, and no byte of one between two of another."""
    return all(_is_dense(layout, index) for index in set(layout.alike))


def _is_dense(layout: PoolLayout, index: int) -> bool:
    extent_nbytes = layout.extent_nbytes(index)
    if extent_nbytes != layout.page_nbytes(index):
        return False
    return layout.num_pages == 1 or extent_nbytes <= layout.segments[index].page_stride_nbytes


@dataclass(slots=True, eq=False)
class _Held:
    pool: PagePool
    memories: list[Memory]
    end: Callable[[], None]


class SessionPermits:
    """Of one session of the listening side.

    Args:
        permits: what its page stream is held to; None where it can have none.
    """

    def __init__(self, permits: Permits | None) -> None:
        self._permits = permits
        self._held: dict[int, _Held] = {}
        self._places: WeakKeyDictionary[PagePool, tuple[tuple[Memory, ...], _Places | None]] = WeakKeyDictionary()

    def begin(self, transfer_id: int, pool: PagePool, page_ids: NDArray[np.uint32], *, writes: bool) -> None:
        """Permits a transfer to write into pages of a pool, or else to read them; until `end`, or until the pool is
        closed.

        Args:
            transfer_id: of the session.
            pool: on the host and open; else nothing is permitted.
            page_ids: uint32, distinct, in any order.
            writes: which of the two.
        """
        if self._permits is None or pool.closed or pool.device != "cpu":
            return
        self.end(transfer_id)
        try:
            memories = tuple(region.memory for region in pool.regions)
            places = self._places_of(pool, memories)
            if places is None:
                return
            held = self._held[transfer_id] = _Held(pool, [], partial(self.end, transfer_id))
            for memory in memories:
                hold(memory)
                held.memories.append(memory)
        except RegistrationError:  # another thread closes the pool just now
            self.end(transfer_id)
            return
        self._permits.add(transfer_id, writes, *places, np.sort(page_ids).astype(np.uint32, copy=False))
        pool.watch_close(held.end)

    def end(self, transfer_id: int) -> None:
        """The transfer is over, or is to be. Harmless where nothing was permitted. On any thread."""
        held = self._held.pop(transfer_id, None)
        if held is not None and self._permits is not None:
            self._permits.remove(transfer_id)
            held.pool.unwatch_close(held.end)
            for memory in held.memories:
                memory.release()

    def _places_of(self, pool: PagePool, memories: tuple[Memory, ...]) -> _Places | None:
        """Made once for each registration: with many layers it is most of what a small transfer costs."""
        known = self._places.get(pool)
        if known is None or known[0] != memories:
            known = self._places[pool] = memories, _places(pool) if can_stream(pool.layout) else None
        return known[1]


def _places(pool: PagePool) -> _Places:
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
