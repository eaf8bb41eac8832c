"""The receiving side of an engine: offers in, grants out, arrivals handed to the application.

Grants go out in the order of arrival, all pages of an offer at once; an offer that does not fit now waits, one that
never fits is refused at once. Runs on the event loop and owns no socket: each connection is a `Link`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from hurray_rdma.cache import PagePool
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
from hurray_rdma.engine.arrival import Arrival
from hurray_rdma.engine.batch import Batch
from hurray_rdma.engine.compat import announcement, check_offer
from hurray_rdma.errors import DeadlineExceededError, HurrayError, PoolExhaustedError

__all__ = ["Link", "Receiver"]

_MAX_WAITING = 1024
"""Offers that may wait for pages; more are refused as busy."""
_POOL_ID = 0


class Link(Protocol):
    """One connection of a sender, as the receiver needs it; a `Channel` is most of one."""

    @property
    def session(self) -> ServerSession: ...

    def notify(self) -> None:
        """Sends what the session has to send."""


@dataclass(slots=True, eq=False)
class _Waiting:
    link: Link
    transfer_id: int
    offer: Offer
    batch: Batch
    timer: asyncio.TimerHandle


@dataclass(slots=True, eq=False)
class _Transfer:
    arrival: Arrival
    heard: float
    lease_timer: asyncio.TimerHandle


class Receiver:
    """Grants pages of one pool to any number of senders.

    Args:
        pool: where arrivals go.
        lease_s: a grant of which nothing is heard for this long is aborted.
        timeout_s: what `Arrival.wait_layer` and `Arrival.snapshot` wait by default.
        clock: the event loop's.
    """

    def __init__(self, pool: PagePool, *, lease_s: float, timeout_s: float, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._generation = 1
        self._lease_s = lease_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._waiting: deque[_Waiting] = deque()
        self._transfers: dict[tuple[Link, int], _Transfer] = {}
        self._arrivals: asyncio.Queue[Arrival | None] = asyncio.Queue()

    async def next_arrival(self) -> Arrival | None:
        """The next granted transfer; None when the engine has closed."""
        arrival = await self._arrivals.get()
        if arrival is None:
            self._arrivals.put_nowait(None)  # for the next one who asks
        return arrival

    def handle(self, link: Link, event: Event) -> None:
        """Takes one event of a connection's session; the channel that delivers it sends what this session answers."""
        match event:
            case SessionOpened():
                pool = announcement(self._pool, pool_id=_POOL_ID, generation=self._generation)
                link.session.announce(pool, now=self._clock())
            case Offered(transfer_id=transfer_id, offer=offer):
                self._offered(link, transfer_id, offer)
            case DescriptorEnded(transfer_id=transfer_id, descriptor_index=index):
                self._descriptor_ended(link, transfer_id, index)
            case AllEnded(transfer_id=transfer_id):
                self._all_ended(link, transfer_id)
            case AbortRequested(transfer_id=transfer_id):
                self._aborted(link, transfer_id, event.error)
            case Quiesced(transfer_id=transfer_id):
                self._quiesced(link, transfer_id)
            case TransferFailed(transfer_id=transfer_id, error=error):
                self._aborted(link, transfer_id, error)
            case SessionClosed(error=error):
                self._lost(link, error)
            case _:
                pass

    def close(self) -> None:
        """Ends the arrivals: those under way fail, those waiting for pages are refused by the end of their session."""
        while self._waiting:
            self._waiting.popleft().timer.cancel()
        for transfer in self._transfers.values():
            transfer.lease_timer.cancel()
        self._arrivals.put_nowait(None)

    def _offered(self, link: Link, transfer_id: int, offer: Offer) -> None:
        try:
            if offer.pool_id != _POOL_ID or offer.generation != self._generation:
                raise StaleGenerationError(
                    f"the pool is {_POOL_ID} in generation {self._generation}",
                    field="(pool_id, generation)",
                    value=(offer.pool_id, offer.generation),
                )
            first = check_offer(offer, self._pool)
            batch = Batch.of(
                offer.block_table,
                offer.seq_ptr,
                offer.seq_lens,
                page_size=self._pool.spec.page_size,
                num_pages=first.num_pages,
            )
            if self._pool.allocator.never_fits(batch.num_pages):
                raise PoolExhaustedError(
                    f"is above all {self._pool.num_pages} pages of the receiving pool: it never fits",
                    field="num_pages of the offer",
                    value=batch.num_pages,
                    fix="Send fewer sequences at a time, or make the receiving pool larger",
                )
            if len(self._waiting) >= _MAX_WAITING:
                raise PeerBusyError("offers wait for pages already", field="waiting", value=len(self._waiting))
        except HurrayError as error:
            link.session.refuse(transfer_id, error, now=self._clock())
            return
        timer = asyncio.get_running_loop().call_later(
            offer.deadline_s, partial(self._grant_came_too_late, link, transfer_id)
        )
        self._waiting.append(_Waiting(link, transfer_id, offer, batch, timer))
        self._grant_in_order()

    def _grant_in_order(self) -> None:
        """Grants from the head of the queue while pages last; never past an offer that must wait."""
        while self._waiting:
            head = self._waiting[0]
            if self._pool.allocator.accounts().free < head.batch.num_pages:
                return
            self._waiting.popleft()
            head.timer.cancel()
            self._grant(head)

    def _grant(self, waiting: _Waiting) -> None:
        link, transfer_id = waiting.link, waiting.transfer_id
        lease = self._pool.allocator.lease(waiting.batch.num_pages)
        arrival = Arrival(
            self._pool,
            waiting.offer.key,
            lease=lease,
            batch=waiting.batch,
            timeout_s=self._timeout_s,
            on_abort=partial(self._abort, link, transfer_id),
            on_freed=self._grant_in_order,
        )
        timer = self._lease_timer(link, transfer_id, self._lease_s)
        self._transfers[link, transfer_id] = _Transfer(arrival, self._clock(), timer)
        grant = Grant(generation=self._generation, page_ids=lease.page_ids, lease_s=self._lease_s)
        link.session.grant(transfer_id, grant, now=self._clock())
        link.notify()
        self._arrivals.put_nowait(arrival)

    def _lease_timer(self, link: Link, transfer_id: int, after_s: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(after_s, partial(self._lease_due, link, transfer_id))

    def _descriptor_ended(self, link: Link, transfer_id: int, index: int) -> None:
        transfer = self._transfers.get((link, transfer_id))
        if transfer is not None:
            transfer.heard = self._clock()
            transfer.arrival.layer_ended(index // len(self._pool.spec.roles))

    def _all_ended(self, link: Link, transfer_id: int) -> None:
        transfer = self._forget(link, transfer_id)
        if transfer is not None:
            transfer.arrival.completed()
            link.session.acknowledge(transfer_id, now=self._clock())

    def _abort(self, link: Link, transfer_id: int, reason: str) -> None:
        link.session.abort(transfer_id, ErrorCode.ABORTED, reason, now=self._clock())
        link.notify()

    def _aborted(self, link: Link, transfer_id: int, error: HurrayError) -> None:
        """The sender wants out, or broke the protocol: its pages wait for QUIET, or for the end of the session."""
        if not self._stop_waiting(link, transfer_id):
            transfer = self._transfers.get((link, transfer_id))
            if transfer is not None:
                transfer.arrival.stopping(error)

    def _quiesced(self, link: Link, transfer_id: int) -> None:
        transfer = self._forget(link, transfer_id)
        if transfer is not None:
            transfer.arrival.ended(quiet=True)

    def _lease_due(self, link: Link, transfer_id: int) -> None:
        """Nothing heard for too long: once to ask for the end, once more to stop waiting for it."""
        transfer = self._transfers[link, transfer_id]
        left_s = transfer.heard + self._lease_s - self._clock()
        if left_s > 0:
            transfer.lease_timer = self._lease_timer(link, transfer_id, left_s)
            return
        error = DeadlineExceededError("the sender let the lease run out", field="lease_s", value=self._lease_s)
        if transfer.arrival.stopping(error):
            link.session.abort(transfer_id, ErrorCode.DEADLINE, str(error), now=self._clock())
            link.notify()
            transfer.lease_timer = self._lease_timer(link, transfer_id, self._lease_s)
        else:
            self._forget(link, transfer_id)
            transfer.arrival.ended(quiet=False)

    def _lost(self, link: Link, error: HurrayError | None) -> None:
        for waiting in [waiting for waiting in self._waiting if waiting.link is link]:
            self._stop_waiting(link, waiting.transfer_id)
        cause = error if error is not None else DeadlineExceededError("the engine closed")
        for of_link, transfer_id in [key for key in self._transfers if key[0] is link]:
            transfer = self._forget(of_link, transfer_id)
            if transfer is not None:
                transfer.arrival.stopping(cause)
                transfer.arrival.ended(quiet=False)
        self._grant_in_order()

    def _grant_came_too_late(self, link: Link, transfer_id: int) -> None:
        waiting = self._stop_waiting(link, transfer_id)
        if waiting is not None:
            error = DeadlineExceededError(
                "no pages became free in time", field="deadline_s", value=waiting.offer.deadline_s
            )
            link.session.refuse(transfer_id, error, now=self._clock())
            link.notify()
            self._grant_in_order()

    def _stop_waiting(self, link: Link, transfer_id: int) -> _Waiting | None:
        for waiting in self._waiting:
            if waiting.link is link and waiting.transfer_id == transfer_id:
                self._waiting.remove(waiting)
                waiting.timer.cancel()
                return waiting
        return None

    def _forget(self, link: Link, transfer_id: int) -> _Transfer | None:
        transfer = self._transfers.pop((link, transfer_id), None)
        if transfer is not None:
            transfer.lease_timer.cancel()
        return transfer
