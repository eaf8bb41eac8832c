"""Watches the free pages of a receive pool: from the moment a page is free, nothing may change it.

When an arrival's pages go back, they are filled with a pattern before anybody else can have them; the pattern must be
whole whenever it is looked at, and when the page is granted anew. Pages whose release it did not see (an arrival that
ended before the application had it) are not watched until they come by again. It knows allocator, pool and arrivals.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import Lease, PagePool
from hurray_rdma.engine import Arrival
from hurray_rdma.engine.arrival import ArrivalState
from hurray_rdma.testing.chaos.recipe import raw

__all__ = ["Guard"]

_PATTERN = 0xA5


class Guard:
    """Guards one pool, all of whose pages are free; everything on the engine's event loop.

    `violations` grows by what is found, one line each. While `writing` is false the pool is left as it is, as must be
    while it is registered anew: pages that go back meanwhile are not watched.
    """

    def __init__(self, pool: PagePool) -> None:
        self.violations: list[str] = []
        self.writing = True
        self._pool = pool
        self._guarded = np.zeros(pool.num_pages, np.bool_)
        self._arrivals: list[Arrival] = []
        self._fill(np.arange(pool.num_pages, dtype=np.uint32))
        allocator, lease = pool.allocator, pool.allocator.lease

        def guarded_lease(count: int, /) -> Lease:
            leased = lease(count)
            self._check(leased.page_ids, "when it was granted")
            self._guarded[leased.page_ids] = False
            return leased

        vars(allocator)["lease"] = guarded_lease  # there is no other moment between a page's rest and its next writes
        allocator.watch(self._freed)

    def follow(self, arrival: Arrival) -> None:
        """Its pages are watched from the moment they go back."""
        if arrival.state is not ArrivalState.RELEASED:
            self._arrivals.append(arrival)

    def check(self) -> None:
        """Looks at every watched page."""
        self._check(self.watched, "while it was free")

    @property
    def watched(self) -> NDArray[np.intp]:
        """IDs of the pages that are free and watched."""
        return np.flatnonzero(self._guarded)

    def _freed(self) -> None:
        """Under the allocator's lock: some pages were given back."""
        for arrival in [each for each in self._arrivals if each.state is ArrivalState.RELEASED]:
            self._arrivals.remove(arrival)
            if self.writing:
                self._fill(np.unique(arrival.block_table))

    def _fill(self, page_ids: NDArray[np.uint32]) -> None:
        for role, layer in self._pool.spec.tensors:
            raw(self._pool, role, layer)[page_ids] = _PATTERN
        self._guarded[page_ids] = True

    def _check(self, page_ids: NDArray[np.integer], when: str) -> None:
        watched = page_ids[self._guarded[page_ids]]
        for role, layer in self._pool.spec.tensors:
            pages = raw(self._pool, role, layer)
            changed = watched[(pages[watched] != _PATTERN).any(axis=1)]
            for page_id in changed.tolist():
                at = np.flatnonzero(pages[page_id] != _PATTERN)
                self.violations.append(
                    f"free page {page_id} changed {when}: {len(at)} bytes of {role} of layer {layer}, from {at[0]}"
                )
                pages[page_id] = _PATTERN
