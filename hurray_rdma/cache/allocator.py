"""Who holds which page: leases with reference counts, and quarantine.

Knows page IDs and who holds them; knows neither memory nor peers, and no clock. A page is free, leased (held by at
least one living lease) or quarantined (held only by leases whose late writes cannot be ruled out yet), and the three
always add up to the pool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hurray_rdma.cache._ledger import PageLedger
from hurray_rdma.cache.indices import check_distinct, check_page_ids, dedupe, narrowed
from hurray_rdma.errors import GeometryError, LeaseExpiredError, PoolExhaustedError

__all__ = ["Lease", "LeaseState", "PageAccounts", "PageAllocator"]


class LeaseState(Enum):
    """What has become of a lease."""

    HELD = "held"
    """Its pages are its holder's."""
    QUARANTINED = "quarantined"
    """Nobody's, until `PageAllocator.recover`."""
    RELEASED = "released"
    """Its pages went back."""


@dataclass(frozen=True, slots=True)
class PageAccounts:
    """Where all pages are; ``free + leased + quarantined == num_pages``."""

    num_pages: int
    free: int
    leased: int
    """Held by at least one lease that is in its holder's hands."""
    quarantined: int
    """Held by quarantined leases only."""
    num_leases: int
    """Leases that hold pages, quarantined ones included."""
    num_free_runs: int
    """Stretches of consecutive free pages; 1 when nothing is fragmented."""


class Lease:
    """Pages in somebody's hands. Made by `PageAllocator.lease` and `PageAllocator.retain`."""

    __slots__ = ("_allocator", "_page_ids", "_state", "reason", "revocable")

    def __init__(self, allocator: PageAllocator, page_ids: NDArray[np.uint32]) -> None:
        self._allocator = allocator
        self._page_ids = page_ids
        self._state = LeaseState.HELD
        self.reason: str | None = None
        """Why it was quarantined."""
        self.revocable = False
        """In quarantine: whether renewing the pool's memory ends it."""

    @property
    def state(self) -> LeaseState:
        return self._state

    @property
    def allocator(self) -> PageAllocator:
        """Whose pages they are."""
        return self._allocator

    @property
    def page_ids(self) -> NDArray[np.uint32]:
        """The pages, uint32 ``[count]``, read-only, in the order in which they were leased.

        Raises:
            LeaseExpiredError: they are not this lease's any more.
        """
        if self._state is not LeaseState.HELD:
            why = f": {self.reason}" if self.reason else ""
            raise LeaseExpiredError(f"Lease.page_ids: the lease is {self._state.value}{why}")
        return self._page_ids

    def release(self) -> None:
        """Gives the pages back (or this lease's share in them). Harmless when repeated, or after a quarantine."""
        self._allocator._release(self)

    def trim(self, count: int, /) -> None:
        """Keeps the first ``count`` pages, and gives the others back. Harmless when they are back, or in quarantine.

        Raises:
            GeometryError: there are not so many.
        """
        self._allocator._trim(self, count)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __len__(self) -> int:
        """Pages, whatever the state."""
        return len(self._page_ids)

    def __repr__(self) -> str:
        return f"<Lease of {len(self._page_ids)} pages [{self._state.value}]>"


class PageAllocator:
    """Hands out the pages of one pool. Thread-safe; each call costs time per page that it is about.

    Args:
        num_pages: pages in the pool, >= 1.
    """

    def __init__(self, num_pages: int) -> None:
        if not 1 <= num_pages <= 2**32 - 1:
            raise GeometryError("must be from 1 to 2**32 - 1", field="num_pages", value=num_pages)
        self._num_pages = num_pages
        self._lock = threading.Lock()
        self._ledger = PageLedger(num_pages)
        self._leases: set[Lease] = set()
        self._watchers: list[Callable[[], None]] = []

    @property
    def num_pages(self) -> int:
        return self._num_pages

    def lease(self, count: int, /) -> Lease:
        """Takes ``count`` free pages, all or none; consecutive ones where there are.

        Args:
            count: pages, >= 0.

        Raises:
            PoolExhaustedError: ``value`` is ``count``. ``fix`` tells "not now" from "never": see `never_fits`.
        """
        if count < 0:
            raise GeometryError("must be 0 or more", field="count", value=count)
        with self._lock:
            if count > self._ledger.num_free:
                raise self._exhausted(count)
            return self._new_lease(self._ledger.take(count))

    def never_fits(self, count: int, /) -> bool:
        """True if no wait can make room for ``count`` pages."""
        return count > self._num_pages

    def retain(self, page_ids: ArrayLike, /) -> Lease:
        """A further lease of pages that are leased already: they go back when the last lease of them has.

        Args:
            page_ids: integers ``[count]``, none twice.

        Raises:
            GeometryError: a page ID is out of range or repeated.
            LeaseExpiredError: nobody holds one of the pages; none was retained.
        """
        wanted = self._checked_ids(page_ids)
        with self._lock:
            at = self._ledger.hold(wanted)
            if at >= 0:
                raise LeaseExpiredError(
                    "nobody holds the page", field=f"page_ids[{at}]", value=int(wanted[at]), fix="Lease pages first"
                )
            return self._new_lease(wanted)

    def births(self, page_ids: ArrayLike, /) -> NDArray[np.uint32]:
        """How often each page was leased afresh, uint32 ``[count]``: remembered, it tells `retain_current` a page apart
        from what it held before.

        Raises:
            GeometryError: a page ID is out of range or repeated.
        """
        wanted = self._checked_ids(page_ids)
        with self._lock:
            return self._ledger.births(wanted)

    def current(self, page_ids: ArrayLike, births: NDArray[np.uint32], /) -> NDArray[np.bool_]:
        """Which pages somebody holds and nobody has leased afresh since, bool ``[count]``: see `retain_current`.

        Raises:
            GeometryError: a page ID is out of range or repeated.
        """
        wanted = self._checked_ids(page_ids)
        with self._lock:
            return self._current(wanted, births)

    def retain_current(self, page_ids: ArrayLike, births: NDArray[np.uint32], /) -> tuple[NDArray[np.bool_], Lease]:
        """As `retain`, but leaves out pages that nobody holds any more, or that were leased afresh since.

        Args:
            page_ids: integers ``[count]``, none twice.
            births: what `births` said when they held what is wanted, ``[count]``.

        Returns:
            Which pages were retained, bool ``[count]``, and the lease of those.

        Raises:
            GeometryError: a page ID is out of range or repeated.
        """
        wanted = self._checked_ids(page_ids)
        with self._lock:
            current = self._current(wanted, births)
            return current, self._held_lease(wanted[current])

    def retain_held(self, page_ids: ArrayLike, /) -> Lease:
        """As `retain`, but leaves out pages that nobody holds: those of whoever hands pages out without the allocator.

        Args:
            page_ids: integers ``[count]``, some perhaps repeatedly.

        Raises:
            GeometryError: a page ID is out of range.
        """
        if not self._leases:
            return Lease(self, np.empty(0, np.uint32))
        named = narrowed(page_ids, field="page_ids")
        check_page_ids(named, num_pages=self._num_pages, field="page_ids")
        distinct, _ = dedupe(named, num_pages=self._num_pages)
        with self._lock:
            return self._held_lease(distinct[self._ledger.leased(distinct)])

    def quarantine(self, lease: Lease, /, *, reason: str, revocable: bool = False) -> None:
        """Takes the pages out of use, since a late write into them cannot be ruled out. Harmless unless ``HELD``.

        Args:
            lease: whose pages.
            reason: for people.
            revocable: whether renewing the pool's memory rules late writes out.
        """
        with self._lock:
            self._quarantine(lease, reason)
            lease.revocable = revocable

    def recover(self, lease: Lease, /) -> None:
        """Puts a quarantined lease's pages back into use: late writes are impossible now. Harmless when repeated.

        Raises:
            GeometryError: the lease was never quarantined, and is still held.
        """
        with self._lock:
            if lease.state is LeaseState.HELD:
                raise GeometryError("only a quarantined lease can be recovered", field="lease", value=repr(lease))
            if lease.state is LeaseState.QUARANTINED:
                self._ledger.recover(lease._page_ids)
                self._end(lease)

    def quarantined(self) -> tuple[Lease, ...]:
        """The leases in quarantine."""
        with self._lock:
            return tuple(lease for lease in self._leases if lease.state is LeaseState.QUARANTINED)

    def watch(self, freed: Callable[[], None], /) -> None:
        """Has ``freed`` called whenever pages may have become free, on whatever thread gave them back.

        It is called under the allocator's lock: it must not call the allocator, nor wait.
        """
        with self._lock:
            self._watchers.append(freed)

    def unwatch(self, freed: Callable[[], None], /) -> None:
        """Ends `watch`. Harmless when it was ended before."""
        with self._lock:
            self._watchers = [each for each in self._watchers if each != freed]

    def accounts(self) -> PageAccounts:
        """Where all pages are, at one moment."""
        with self._lock:
            return self._accounts()

    def _accounts(self) -> PageAccounts:
        ledger = self._ledger
        return PageAccounts(
            num_pages=self._num_pages,
            free=ledger.num_free,
            leased=self._num_pages - ledger.num_free - ledger.num_quarantined,
            quarantined=ledger.num_quarantined,
            num_leases=len(self._leases),
            num_free_runs=ledger.num_free_runs,
        )

    def _exhausted(self, count: int) -> PoolExhaustedError:
        if self.never_fits(count):
            return PoolExhaustedError(
                f"is above the pool's {self._num_pages} pages: it never fits",
                field="count",
                value=count,
                fix="Make the pool larger, or ask for less",
            )
        now = self._accounts()
        return PoolExhaustedError(
            f"is above the {now.free} free pages "
            f"({now.leased} leased, {now.quarantined} quarantined, of {now.num_pages})",
            field="count",
            value=count,
            fix="Wait until leases are released",
        )

    def _checked_ids(self, page_ids: ArrayLike) -> NDArray[np.uint32]:
        ids = narrowed(page_ids, field="page_ids")
        check_distinct(ids, num_pages=self._num_pages, field="page_ids")
        return ids

    def _current(self, page_ids: NDArray[np.uint32], births: NDArray[np.uint32]) -> NDArray[np.bool_]:
        current: NDArray[np.bool_] = self._ledger.leased(page_ids) & (self._ledger.births(page_ids) == births)
        return current

    def _held_lease(self, page_ids: NDArray[np.uint32]) -> Lease:
        """Of pages that were just found leased, under the same lock."""
        self._ledger.hold(page_ids)
        return self._new_lease(page_ids)

    def _new_lease(self, page_ids: NDArray[np.uint32]) -> Lease:
        page_ids.setflags(write=False)
        lease = Lease(self, page_ids)
        self._leases.add(lease)
        return lease

    def _trim(self, lease: Lease, count: int) -> None:
        with self._lock:
            page_ids = lease._page_ids
            if not 0 <= count <= len(page_ids):
                raise GeometryError(f"must be from 0 to {len(page_ids)}", field="count", value=count)
            if count < len(page_ids) and lease.state is LeaseState.HELD:
                self._ledger.drop(page_ids[count:])
                lease._page_ids = page_ids[:count]
                self._tell_freed()

    def _release(self, lease: Lease) -> None:
        with self._lock:
            if lease.state is LeaseState.HELD:
                self._ledger.drop(lease._page_ids)
                self._end(lease)

    def _quarantine(self, lease: Lease, reason: str) -> None:
        if lease.state is LeaseState.HELD:
            self._ledger.suspect(lease._page_ids)
            lease._state = LeaseState.QUARANTINED
            lease.reason = reason

    def _end(self, lease: Lease) -> None:
        self._leases.discard(lease)
        lease._state = LeaseState.RELEASED
        self._tell_freed()

    def _tell_freed(self) -> None:
        for freed in self._watchers:
            freed()
