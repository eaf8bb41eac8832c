"""The receiving side of an engine: offers in, grants out, arrivals handed to the application.

Grants go out in the order of arrival, all pages of an offer at once; an offer that does not fit now waits, one that
never fits is refused at once. Senders that hold slices of the heads fill one arrival together: their offers have one
key. Runs on the event loop and owns no socket: each connection is a `Link`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import CacheSpec, Lease, PagePool
from hurray_rdma.control import (
    AbortRequested,
    AllEnded,
    DescriptorEnded,
    ErrorCode,
    Event,
    Grant,
    Offer,
    Offered,
    PeerBusyError,
    Quiesced,
    ServerSession,
    SessionClosed,
    SessionOpened,
    StaleGenerationError,
    TransferFailed,
)
from hurray_rdma.engine.arrival import Arrival, ArrivalState
from hurray_rdma.engine.compat import announcement, check_offer
from hurray_rdma.errors import (
    DeadlineExceededError,
    GeometryError,
    HurrayError,
    PeerLostError,
    PoolExhaustedError,
    RegistrationError,
    TransferAbortedError,
)
from hurray_rdma.format import Dialect
from hurray_rdma.plan import PageMap, common_heads, map_keys

__all__ = ["Link", "Receiver"]

_log = logging.getLogger(__name__)

_MAX_WAITING = 1024
"""Offers that may wait for pages; more are refused as busy."""


class Link(Protocol):
    """One connection of a sender, as the receiver needs it; a `Channel` is most of one."""

    @property
    def session(self) -> ServerSession: ...

    def notify(self) -> None:
        """Sends what the session has to send."""


@dataclass(slots=True, eq=False)
class _Offer:
    """An offer that was found good."""

    link: Link
    transfer_id: int
    offer: Offer
    source: CacheSpec
    page_map: PageMap
    heads: tuple[int, int]
    """The model's heads that it brings: first, and the one after the last."""
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class _Part:
    """A granted offer: what one sender brings to an arrival."""

    offer: _Offer
    whole: _Whole
    tensors: tuple[tuple[str, int], ...]
    heard: float
    lease_timer: asyncio.TimerHandle


@dataclass(slots=True, eq=False)
class _Whole:
    """An arrival, and what has been granted for it."""

    arrival: Arrival
    offer: _Offer
    written: Lease
    page_keys: NDArray[np.uint8] | None
    """Keys of the written pages, uint8 ``[len(written), key_nbytes]``."""
    parts: list[_Part] = field(default_factory=list)
    """Those whose end is not known yet."""
    heads: list[tuple[int, int]] = field(default_factory=list)
    """Granted so far."""
    num_loud: int = 0
    """Parts that ended in such a way that their writes may still land."""


class Receiver:
    """Grants pages of one pool to any number of senders.

    Args:
        pool: where pages of arrivals are.
        pool_id: its number in the engine.
        group: its name, if it is one of several cache groups.
        arrivals: where granted transfers go.
        lease_s: a grant of which nothing is heard for this long is aborted.
        timeout_s: what `Arrival.wait_layer` and `Arrival.snapshot` wait by default.
        clock: the event loop's.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        pool_id: int,
        group: str | None,
        arrivals: asyncio.Queue[Arrival | None],
        lease_s: float,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._pool_id = pool_id
        self._group = group
        self._arrivals = arrivals
        self._generation = 1
        self._lease_s = lease_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._waiting: deque[_Offer] = deque()
        self._parts: dict[tuple[Link, int], _Part] = {}
        self._unfilled: dict[str, _Whole] = {}
        self._given_up: dict[tuple[Link, int], _Whole] = {}  # a late QUIET brings the pages back
        self._loop = asyncio.get_running_loop()
        pool.allocator.watch(self._pages_freed)

    def handle(self, link: Link, event: Event) -> None:
        """Takes one event of a connection's session; the channel that delivers it sends what this session answers."""
        match event:
            case SessionOpened():
                if self._pool.closed:
                    _log.error("%s connected, but the receiving pool is closed", event.peer.engine_name)
                    return
                pool = announcement(self._pool, pool_id=self._pool_id, generation=self._generation)
                link.session.announce(pool, now=self._clock())
            case Offered(transfer_id=transfer_id, offer=offer) if offer.pool_id == self._pool_id:
                self._offered(link, transfer_id, offer)
            case DescriptorEnded(transfer_id=transfer_id, descriptor_index=index):
                self._descriptor_ended(link, transfer_id, index)
            case AllEnded(transfer_id=transfer_id):
                self._all_ended(link, transfer_id)
            case (
                AbortRequested(transfer_id=transfer_id, error=error)
                | TransferFailed(transfer_id=transfer_id, error=error)
            ):
                self._stopped(link, transfer_id, error)
            case Quiesced(transfer_id=transfer_id):
                self._quiesced(link, transfer_id)
            case SessionClosed(error=error):
                self._lost(link, error or PeerLostError("the session was closed"))
            case _:
                pass

    def close(self) -> None:
        """Ends what is not complete. The sessions must be closed before. Idempotent."""
        self._pool.allocator.unwatch(self._pages_freed)
        for whole in list(self._unfilled.values()):
            self._abort(whole.arrival, "the engine closed")

    # Offers.

    def _offered(self, link: Link, transfer_id: int, offer: Offer) -> None:
        try:
            checked = self._checked(link, transfer_id, offer)
            whole = self._unfilled.get(offer.key)
            if whole is not None:
                self._join(whole, checked)
                return
            if len(self._waiting) >= _MAX_WAITING:
                raise PeerBusyError("offers wait for pages already", field="waiting", value=len(self._waiting))
        except HurrayError as error:
            link.session.refuse(transfer_id, error, now=self._clock())
            return
        checked.timer = self._loop.call_later(offer.deadline_s, partial(self._grant_came_too_late, link, transfer_id))
        self._waiting.append(checked)
        self._grant_in_order()

    def _checked(self, link: Link, transfer_id: int, offer: Offer) -> _Offer:
        if self._pool.closed:
            raise RegistrationError("the receiving pool is closed")
        if offer.generation != self._generation:
            raise StaleGenerationError(
                f"the pool is in generation {self._generation}", field="generation", value=offer.generation
            )
        peer = link.session.peer
        dialect = Dialect(peer.dialect) if peer is not None else Dialect.ADR_024
        source, page_map = check_offer(offer, self._pool.spec, dialect=dialect)
        if self._pool.allocator.never_fits(page_map.num_pages):
            raise PoolExhaustedError(
                f"is above all {self._pool.num_pages} pages of the receiving pool: it never fits",
                field="num_pages of the offer",
                value=page_map.num_pages,
                fix="Send fewer sequences at a time, or make the receiving pool larger",
            )
        return _Offer(link, transfer_id, offer, source, page_map, common_heads(source, self._pool.spec))

    def _pages_freed(self) -> None:
        """On any thread: looks at the queue again, once, soon."""
        self._loop.call_soon_threadsafe(self._grant_in_order)

    def _grant_in_order(self) -> None:
        """Grants from the head of the queue while pages last; never past an offer that must wait."""
        while self._waiting and not self._pool.closed:
            head = self._waiting.popleft()
            whole = self._unfilled.get(head.offer.key)
            try:
                if whole is not None:
                    self._join(whole, head)
                elif not self._reserve(head):
                    self._waiting.appendleft(head)
                    return
            except HurrayError as error:
                head.link.session.refuse(head.transfer_id, error, now=self._clock())
                head.link.notify()
            if head.timer is not None:
                head.timer.cancel()

    def _reserve(self, offer: _Offer) -> bool:
        """Grants an offer the pages it needs; False if there are too few of them now."""
        allocator, page_map = self._pool.allocator, offer.page_map
        resident, page_keys = None, None
        page_ids = np.empty(page_map.num_pages, np.uint32)
        found = np.zeros(page_map.num_pages, np.bool_)
        if offer.offer.page_keys.shape[1]:
            page_keys, _ = map_keys(page_map, offer.offer.page_keys, offer.offer.seq_ptr)
            here = self._pool.resident.acquire(page_keys)
            found, resident, page_ids = here.found, here.lease, here.page_ids.copy()
            page_keys = page_keys[~found]
        num_written = int((~found).sum())
        try:
            written = allocator.lease(num_written)
        except PoolExhaustedError:
            if resident is not None:
                resident.release()
            return False
        page_ids[~found] = written.page_ids
        arrival = Arrival(
            self._pool,
            offer.offer.key,
            group=self._group,
            page_map=page_map,
            page_ids=page_ids,
            written=written,
            resident=resident,
            timeout_s=self._timeout_s,
            on_abort=self._abort,
        )
        whole = _Whole(arrival, offer, written, page_keys)
        try:
            self._grant(whole, offer, page_ids, found)
        except HurrayError as error:
            arrival.stopping(error)
            arrival.ended(quiet=True)  # it was not granted
            raise
        if offer.heads != self._pool.spec.heads:
            self._unfilled[offer.offer.key] = whole
            self._watch_unfilled(whole)
        self._arrivals.put_nowait(arrival)
        return True

    def _join(self, whole: _Whole, offer: _Offer) -> None:
        """Grants a further sender the pages that the others write into, for other heads."""
        first, last = offer.heads
        for held in whole.heads:
            if first < held[1] and held[0] < last:
                raise GeometryError(
                    f"another sender of {offer.offer.key!r} brings heads {held[0]} to {held[1] - 1}",
                    field="heads",
                    value=offer.heads,
                )
        if not np.array_equal(offer.page_map.seq_lens, whole.offer.page_map.seq_lens):
            raise GeometryError(
                f"another sender of {offer.offer.key!r} has other sequence lengths",
                field="seq_lens",
                value=offer.page_map.seq_lens.tolist()[:8],
            )
        page_ids = offer.page_map.pages_for(whole.arrival.block_table)
        self._grant(whole, offer, page_ids, np.zeros(len(page_ids), np.bool_))
        if sum(end - start for start, end in whole.heads) == self._pool.spec.num_heads:
            self._unfilled.pop(offer.offer.key)

    def _grant(self, whole: _Whole, offer: _Offer, page_ids: NDArray[np.uint32], resident: NDArray[np.bool_]) -> None:
        link, transfer_id = offer.link, offer.transfer_id
        grant = Grant(generation=self._generation, page_ids=page_ids, resident=resident, lease_s=self._lease_s)
        if not link.session.grant(transfer_id, grant, now=self._clock()):
            raise TransferAbortedError(f"the sender of {offer.offer.key!r} does not wait for its grant any more")
        link.notify()
        timer = self._lease_timer(link, transfer_id, self._lease_s)
        part = _Part(offer, whole, offer.source.tensors, self._clock(), timer)
        self._parts[link, transfer_id] = part
        whole.parts.append(part)
        whole.heads.append(offer.heads)

    def _grant_came_too_late(self, link: Link, transfer_id: int) -> None:
        waiting = self._stop_waiting(link, transfer_id)
        if waiting is not None:
            error = DeadlineExceededError(
                "no pages became free in time", field="deadline_s", value=waiting.offer.deadline_s
            )
            link.session.refuse(transfer_id, error, now=self._clock())
            link.notify()
            self._grant_in_order()

    def _stop_waiting(self, link: Link, transfer_id: int) -> _Offer | None:
        for waiting in self._waiting:
            if waiting.link is link and waiting.transfer_id == transfer_id:
                self._waiting.remove(waiting)
                if waiting.timer is not None:
                    waiting.timer.cancel()
                return waiting
        return None

    # Grants.

    def _descriptor_ended(self, link: Link, transfer_id: int, index: int) -> None:
        part = self._parts.get((link, transfer_id))
        if part is not None:
            part.heard = self._clock()
            _, layer = part.tensors[index]
            first, last = part.offer.heads
            part.whole.arrival.layer_ended(layer, num_heads=last - first)

    def _all_ended(self, link: Link, transfer_id: int) -> None:
        part = self._forget(link, transfer_id)
        if part is None:
            return
        link.session.acknowledge(transfer_id, now=self._clock())
        whole = part.whole
        whole.parts.remove(part)
        if whole.parts or self._unfilled.get(part.offer.offer.key) is whole:
            return
        if whole.arrival.state is ArrivalState.ABORTING:
            whole.arrival.ended(quiet=whole.num_loud == 0)
        elif whole.arrival.state is ArrivalState.ARRIVING:
            if whole.page_keys is not None:
                self._pool.resident.insert(whole.page_keys, whole.written)
            whole.arrival.completed()

    def _abort(self, arrival: Arrival, reason: str) -> None:
        """The application does not want the arrival any more."""
        for part in [part for part in self._parts.values() if part.whole.arrival is arrival]:
            self._abort_part(part, ErrorCode.ABORTED, reason)
        self._end_if_over(arrival)

    def _abort_part(self, part: _Part, code: ErrorCode, reason: str) -> None:
        part.heard = self._clock()  # from now on it has one lease to say QUIET
        part.offer.link.session.abort(part.offer.transfer_id, code, reason, now=self._clock())
        part.offer.link.notify()

    def _stopped(self, link: Link, transfer_id: int, error: HurrayError) -> None:
        """The sender wants out, or broke the protocol: its pages wait for QUIET, or for the end of the session."""
        if self._stop_waiting(link, transfer_id) is not None:
            self._grant_in_order()
            return
        part = self._parts.get((link, transfer_id))
        if part is not None:
            self._stop_whole(part.whole, error, but=part)

    def _stop_whole(self, whole: _Whole, error: HurrayError, *, but: _Part) -> None:
        """One part will not come: the arrival fails, and the other senders are told to stop."""
        if whole.arrival.stopping(error):
            self._unfill(whole)
            for part in whole.parts:
                if part is not but:
                    self._abort_part(part, ErrorCode.ABORTED, f"another sender failed: {error}")

    def _quiesced(self, link: Link, transfer_id: int) -> None:
        part = self._forget(link, transfer_id)
        if part is not None:
            self._part_ended(part, quiet=True)
            return
        late = self._given_up.pop((link, transfer_id), None)
        if late is not None:
            late.num_loud -= 1
            if late.num_loud == 0 and late.arrival.state is ArrivalState.QUARANTINED:
                late.arrival.recovered()

    def _part_ended(self, part: _Part, *, quiet: bool) -> None:
        """A part that will not be complete has ended."""
        whole = part.whole
        whole.num_loud += not quiet
        whole.parts.remove(part)
        self._stop_whole(whole, PeerLostError(f"the sender gave up on {whole.arrival.key!r}"), but=part)
        if not whole.parts:
            whole.arrival.ended(quiet=whole.num_loud == 0)

    def _end_if_over(self, arrival: Arrival) -> None:
        """An arrival that was aborted while no sender was busy with it, since further ones had not come yet."""
        for whole in [whole for whole in self._unfilled.values() if whole.arrival is arrival]:
            self._unfill(whole)
            if not whole.parts:
                arrival.ended(quiet=whole.num_loud == 0)

    def _watch_unfilled(self, whole: _Whole) -> None:
        """Senders of the remaining heads have one lease to come, counted from the last that did."""
        self._loop.call_later(self._lease_s, partial(self._unfilled_due, whole, len(whole.heads)))

    def _unfilled_due(self, whole: _Whole, num_parts: int) -> None:
        if self._unfilled.get(whole.offer.offer.key) is not whole:
            return
        if len(whole.heads) > num_parts or whole.parts:
            self._watch_unfilled(whole)
            return
        error = DeadlineExceededError(
            f"senders of the other heads of {whole.arrival.key!r} did not come", field="lease_s", value=self._lease_s
        )
        if whole.arrival.stopping(error):
            self._unfill(whole)
            whole.arrival.ended(quiet=whole.num_loud == 0)

    def _unfill(self, whole: _Whole) -> None:
        if self._unfilled.get(whole.offer.offer.key) is whole:
            del self._unfilled[whole.offer.offer.key]

    def _lost(self, link: Link, error: HurrayError) -> None:
        for waiting in [waiting for waiting in self._waiting if waiting.link is link]:
            self._stop_waiting(link, waiting.transfer_id)
        for of_link, transfer_id in [key for key in self._parts if key[0] is link]:
            part = self._forget(of_link, transfer_id)
            if part is not None:
                self._stop_whole(part.whole, error, but=part)
                self._part_ended(part, quiet=False)
        for key in [key for key in self._given_up if key[0] is link]:
            del self._given_up[key]
        self._grant_in_order()

    # Leases.

    def _lease_timer(self, link: Link, transfer_id: int, after_s: float) -> asyncio.TimerHandle:
        return self._loop.call_later(after_s, partial(self._lease_due, link, transfer_id))

    def _lease_due(self, link: Link, transfer_id: int) -> None:
        """Nothing heard for too long: once to ask for the end, once more to stop waiting for it."""
        part = self._parts[link, transfer_id]
        left_s = part.heard + self._lease_s - self._clock()
        if left_s > 0:
            part.lease_timer = self._lease_timer(link, transfer_id, left_s)
            return
        error = DeadlineExceededError("the sender let the lease run out", field="lease_s", value=self._lease_s)
        if part.whole.arrival.state is ArrivalState.ARRIVING:
            self._stop_whole(part.whole, error, but=part)
            self._abort_part(part, ErrorCode.LEASE_EXPIRED, str(error))
            part.lease_timer = self._lease_timer(link, transfer_id, self._lease_s)
        else:
            self._forget(link, transfer_id)
            self._given_up[link, transfer_id] = part.whole
            self._part_ended(part, quiet=False)

    def _forget(self, link: Link, transfer_id: int) -> _Part | None:
        part = self._parts.pop((link, transfer_id), None)
        if part is not None:
            part.lease_timer.cancel()
        return part
