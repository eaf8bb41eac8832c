"""Pages of one pool that senders hold ready for small snapshots, granted before there is anything to write.

They save a small transfer the wait for its grant, and are nobody's right: they are recalled as soon as an offer has to
wait for pages, when nothing was committed for a lease, and before the pool is registered anew. What holds of grants
holds here: pages of a sender that fell silent stay out of use until no late write of it can land.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from hurray_rdma.cache import BELLS_NBYTES, Lease, PagePool
from hurray_rdma.control import ErrorCode, Grant, Reserve, error_code
from hurray_rdma.engine.deadlines import Deadlines
from hurray_rdma.engine.link import Link
from hurray_rdma.engine.mover import INLINE_NBYTES
from hurray_rdma.engine.reach import NEVER_LATE, Reach, reach_of
from hurray_rdma.engine.tally import Tally
from hurray_rdma.errors import HurrayError, PoolExhaustedError
from hurray_rdma.transport import Bell, Bells

__all__ = ["Reservation", "Reservations"]

_COPY_S = 50e-6
_COPY_NBYTES_PER_S = 8e9
"""As slow as a copy is at most, unless its process waits for a core, or has ended."""


@dataclass(slots=True, eq=False)
class Reservation:
    """Pages that a sender holds ready."""

    reserve: Reserve
    """What it asked for."""
    lease: Lease
    heard: float
    bell: Bell | None
    reach: Reach
    """How its sender writes."""
    filling: bool = False
    """Whether it counts as being filled, no more as held ready: its sender has said what is being copied into it."""
    recalled: bool = False


class Reservations:
    """Runs on the event loop.

    Args:
        pool: where the pages are.
        max_pages: what may be held ready, all senders together. As much again may be in use while it is filled: only
            so long is what a sender has said that it fills not counted as held ready.
        lease_s: one that is not used for this long is recalled; then its sender has as long to say QUIET.
        tally: counts what happens.
    """

    def __init__(self, pool: PagePool, *, max_pages: int, lease_s: float, tally: Tally) -> None:
        self._pool = pool
        self._max_pages = max_pages
        self._lease_s = lease_s
        self._tally = tally
        self._loop = asyncio.get_running_loop()
        self._held: dict[tuple[Link, int], Reservation] = {}
        self._loud: dict[tuple[Link, int], Reservation] = {}
        self._leases = Deadlines()
        self._num_ready = 0
        self._num_filling = 0
        self._idle = asyncio.Event()
        at = pool.bells_offset_nbytes
        self._bells = Bells(pool.regions[0], offset_nbytes=at, nbytes=BELLS_NBYTES) if at is not None else None

    @property
    def busy(self) -> bool:
        """Whether any is held, or a late write into one still possible."""
        return bool(self._held or self._loud)

    def grant(self, link: Link, transfer_id: int, reserve: Reserve, *, generation: int) -> None:
        """Holds pages for a sender.

        Raises:
            PoolExhaustedError: too many are held already, or there are too few.
            ConfigError: the grant is larger than what the sender accepts.
        """
        allowed = self._max_pages - self._num_ready
        if reserve.num_pages > allowed:
            raise PoolExhaustedError(
                f"is above the {max(0, allowed)} pages that may still be granted ahead",
                field="num_pages",
                value=reserve.num_pages,
            )
        lease = self._pool.allocator.lease(reserve.num_pages)
        now, reach = self._loop.time(), reach_of(reserve.path, reserve.lane)
        bell = self._bells.take() if self._bells is not None and reach is Reach.MAPPING else None
        granted = False
        try:
            grant = Grant(
                generation=generation,
                page_ids=lease.page_ids,
                lease_s=self._lease_s,
                bell_offset_nbytes=bell.offset_nbytes if bell is not None else 0,
                bell_token=bell.token if bell is not None else 0,
            )
            granted = link.session.grant(transfer_id, grant, now=now)
        finally:
            if not granted:
                lease.release()
                self._hang_up(bell)
        if not granted:
            return
        key = link, transfer_id
        self._held[key] = Reservation(reserve, lease, now, bell, reach)
        self._watch(key, self._lease_s)
        self._num_ready += len(lease)
        if reach is Reach.STREAM:
            link.permits.begin(transfer_id, self._pool, lease.page_ids, writes=True)

    def held(self, link: Link, transfer_id: int) -> Reservation | None:
        """What a sender holds; None if it was recalled."""
        held = self._held.get((link, transfer_id))
        return None if held is None or held.recalled else held

    def listen(self, held: Reservation, *, nbytes: int) -> bool:
        """Whether its sender tells, about as soon as it can have copied so much, that it has.

        Nothing else is done meanwhile: so it is listened to once, whatever a sender says. From now on it counts as
        being filled, unless too many pages do.
        """
        bell, held.bell = held.bell, None
        if self._bells is None or bell is None:
            return False
        num_pages = len(held.lease)
        if self._num_filling + num_pages <= self._max_pages:  # else whoever never rings could have the whole pool
            held.filling = True
            self._num_ready -= num_pages
            self._num_filling += num_pages
        timeout_s = _COPY_S + nbytes / _COPY_NBYTES_PER_S
        heard = nbytes <= INLINE_NBYTES and self._bells.listen(bell, timeout_s=timeout_s)
        self._bells.give_back(bell)
        return heard

    def _hang_up(self, bell: Bell | None) -> None:
        if self._bells is not None and bell is not None:
            self._bells.give_back(bell)

    def use(self, link: Link, transfer_id: int) -> Lease:
        """Its pages, which are not held here any more."""
        return self._forget((link, transfer_id)).lease

    # Ends.

    def fail(self, link: Link, transfer_id: int, error: HurrayError) -> None:
        """What was committed cannot be: the sender is told, and has one lease to say QUIET."""
        self._recall((link, transfer_id), ErrorCode(error_code(error)), str(error))

    def recall(self, reason: str) -> None:
        """Asks for all of them back."""
        for key in list(self._held):
            self._recall(key, ErrorCode.ABORTED, reason)

    async def wait_idle(self) -> None:
        """Returns when none is held."""
        while self._held:
            self._idle.clear()
            await self._idle.wait()

    def stopped(self, link: Link, transfer_id: int) -> None:
        """The sender gives it back; its QUIET is to follow."""
        held = self._held.get((link, transfer_id))
        if held is not None and not held.recalled:
            held.recalled, held.heard = True, self._loop.time()

    def quiet(self, link: Link, transfer_id: int) -> None:
        """Nothing is in flight into it any more."""
        key = link, transfer_id
        if key in self._held:
            self._forget(key).lease.release()
        elif key in self._loud:
            self._hush(key)

    def lost(self, link: Link) -> None:
        """The connection has ended."""
        for key in [key for key in self._held if key[0] is link]:
            self._quarantine(key, "the sender was lost")

    def silenced(self, link: Link, reaches: Iterable[Reach]) -> None:
        """Late writes of a peer have become impossible, of those that reach here in one of these ways."""
        for key in [key for key, held in self._loud.items() if key[0] is link and held.reach in reaches]:
            self._hush(key)

    def renewed(self, revoked: Iterable[Reach]) -> None:
        """The pool was registered anew, which ends late writes that reach here in these ways."""
        for key in [key for key, held in self._loud.items() if held.reach in revoked]:
            self._hush(key)

    def owed_by(self, link: Link) -> bool:
        """Whether late writes of a peer are still possible."""
        return any(of_link is link for of_link, _ in self._loud)

    def _recall(self, key: tuple[Link, int], code: ErrorCode, reason: str) -> None:
        held = self._held[key]
        if not held.recalled:
            held.recalled, held.heard = True, self._loop.time()
            link, transfer_id = key
            link.permits.end(transfer_id)
            link.session.abort(transfer_id, code, reason, now=held.heard)
            link.notify()

    def _watch(self, key: tuple[Link, int], after_s: float) -> None:
        self._leases.begin(key, time.monotonic() + after_s, partial(self._due, key))

    def _due(self, key: tuple[Link, int]) -> None:
        held = self._held[key]
        left_s = held.heard + self._lease_s - self._loop.time()
        if left_s <= 0 and held.recalled:
            self._quarantine(key, "the sender did not say that it is quiet")
            return
        if left_s <= 0:
            self._recall(key, ErrorCode.LEASE_EXPIRED, "pages that were granted ahead were not used")
            left_s = self._lease_s
        self._watch(key, left_s)

    def _quarantine(self, key: tuple[Link, int], reason: str) -> None:
        held = self._forget(key)
        if held.reach in NEVER_LATE:
            held.lease.release()
            return
        self._loud[key] = held
        self._pool.allocator.quarantine(held.lease, reason=reason, revocable=held.reach is not Reach.ADDRESS)
        self._tally.quarantined(len(held.lease))

    def _hush(self, key: tuple[Link, int]) -> None:
        held = self._loud.pop(key)
        self._pool.allocator.recover(held.lease)
        self._tally.recovered(len(held.lease))

    def _forget(self, key: tuple[Link, int]) -> Reservation:
        held = self._held.pop(key)
        self._leases.end(key)
        self._hang_up(held.bell)
        if held.reach is Reach.STREAM:
            link, transfer_id = key
            link.permits.end(transfer_id)
        if held.filling:
            self._num_filling -= len(held.lease)
        else:
            self._num_ready -= len(held.lease)
        if not self._held:
            self._idle.set()
        return held
