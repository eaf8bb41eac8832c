"""A decode worker's prefix cache: pages of finished requests that are kept under leases until room is needed.

Knows page IDs, leases and their order; what is in the pages is the engine's to find by key. The page that was used
longest ago goes first, and of one request the end of the sequence before its beginning.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from hurray_rdma.cache import Lease, PageAllocator

__all__ = ["KeptPages"]


class KeptPages:
    """Keeps whole pages. Not thread-safe.

    Args:
        allocator: of the pool.
        headroom: free pages that `make_room` provides.
    """

    def __init__(self, allocator: PageAllocator, *, headroom: int) -> None:
        self._allocator = allocator
        self._headroom = headroom
        self._uses: Counter[int] = Counter()
        self._idle: OrderedDict[int, Lease] = OrderedDict()
        self._used: dict[int, Lease] = {}
        self.num_evicted = 0
        """Pages given up by `make_room`."""

    def __len__(self) -> int:
        """Pages that are kept and that no request uses."""
        return len(self._idle)

    def use(self, page_ids: list[int]) -> None:
        """A request has come that uses these pages: they are not given up before `done`."""
        self._uses.update(page_ids)
        for page_id in self._idle.keys() & page_ids:
            self._used[page_id] = self._idle.pop(page_id)

    def done(self, page_ids: list[int]) -> None:
        """The request ends, and still holds its pages; those that no other uses are kept."""
        for page_id in reversed(page_ids):
            self._uses[page_id] -= 1
            if not self._uses[page_id]:
                del self._uses[page_id]
                lease = self._used.pop(page_id, None)
                self._idle[page_id] = lease if lease is not None else self._allocator.retain([page_id])

    def forget(self, page_ids: list[int]) -> None:
        """The request came to nothing, and holds its pages no more; what was kept before is kept on."""
        for page_id in reversed(page_ids):
            self._uses[page_id] -= 1
            if not self._uses[page_id]:
                del self._uses[page_id]
                if (lease := self._used.pop(page_id, None)) is not None:
                    self._idle[page_id] = lease

    def make_room(self) -> None:
        """Gives up pages until the headroom is free, or none is left to give up."""
        while self._idle and (short := self._headroom - self._allocator.accounts().free) > 0:
            for _ in range(min(short, len(self._idle))):
                _, lease = self._idle.popitem(last=False)
                lease.release()
                self.num_evicted += 1

    def clear(self) -> None:
        """Gives up everything."""
        for lease in (*self._idle.values(), *self._used.values()):
            lease.release()
        self._idle.clear()
        self._used.clear()
