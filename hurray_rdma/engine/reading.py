"""Readings of published snapshots at their source: each under a lease of its own, for as long as its reader goes on.

A reader that falls silent can only have read what is not there any more, and is told so: it needs no quarantine. One
that reaches no memory is sent the pages (`hurray_rdma.engine.serving`). Knows neither keys nor who may read what.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import Lease, PagePool, Snapshot
from hurray_rdma.control import (
    AbortRequested,
    AllEnded,
    ErrorCode,
    Event,
    LeaseRenewed,
    Quiesced,
    SessionClosed,
    Take,
    Taken,
    TransferFailed,
    error_code,
)
from hurray_rdma.engine.frames import FRAMES_LANE, FRAMES_PATH
from hurray_rdma.engine.link import Link
from hurray_rdma.engine.serving import Delivery, Serving
from hurray_rdma.engine.tally import Tally
from hurray_rdma.errors import HurrayError, LeaseExpiredError, TransferAbortedError

__all__ = ["ReadingEnd", "Readings"]


class ReadingEnd(Enum):
    """How a reading has ended."""

    READ = auto()
    """To its end."""
    DECLINED = auto()
    """The reader needs nothing of it, and asks no more."""
    OPEN = auto()
    """Otherwise: it may ask again."""


@dataclass(slots=True, eq=False)
class _Reading:
    """One fetch under way; it has a lease of its own, so that the end of the publication does not disturb it."""

    snapshot: Snapshot
    nbytes: int
    lease: Lease
    lease_s: float
    heard: float
    """When its reader last said that it goes on."""
    until: float
    """The end of the time that it asked for."""
    timer: asyncio.TimerHandle
    on_end: Callable[[ReadingEnd], None]
    delivery: Delivery | None = None
    """Where the pages are sent, since the reader reaches no memory."""


class Readings:
    """Those of one engine. Runs on the event loop.

    Args:
        tally: counts what happens.
    """

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._loop = asyncio.get_running_loop()
        self._readings: dict[tuple[Link, int], _Reading] = {}
        self._servings: dict[Link, Serving] = {}
        self._endings: set[asyncio.Task[None]] = set()

    def begin(
        self,
        link: Link,
        transfer_id: int,
        snapshot: Snapshot,
        *,
        lease: Lease,
        nbytes: int,
        lease_s: float,
        time_s: float,
        streamed: NDArray[np.uint32] | None,
        on_end: Callable[[ReadingEnd], None],
    ) -> None:
        """The reader is being told of the snapshot.

        Args:
            link: its connection.
            transfer_id: of the fetch.
            snapshot: what it reads.
            lease: of the pages; released at the end.
            nbytes: page bytes of the snapshot.
            lease_s: how long the reader may be silent, seconds.
            time_s: how long it may read at all, seconds.
            streamed: what it may read by page stream, if it may come by one: pages, uint32, distinct.
            on_end: told how it has ended.
        """
        if streamed is not None:
            link.permits.begin(transfer_id, snapshot.pool, streamed, writes=False)
        now = self._loop.time()
        timer = self._loop.call_at(now + min(lease_s, time_s), self._due, link, transfer_id)
        self._readings[link, transfer_id] = _Reading(snapshot, nbytes, lease, lease_s, now, now + time_s, timer, on_end)

    def handle(self, link: Link, event: Event) -> None:
        """Takes one event of a reader's session."""
        match event:
            case Taken(transfer_id=transfer_id, take=take):
                self._taken(link, transfer_id, take)
            case LeaseRenewed(transfer_id=transfer_id):
                reading = self._readings.get((link, transfer_id))
                if reading is not None:
                    reading.heard = self._loop.time()
            case AllEnded(transfer_id=transfer_id):
                self._all_read(link, transfer_id)
            case AbortRequested(transfer_id=transfer_id, code=ErrorCode.UNREAD):
                self._end((link, transfer_id))
            case AbortRequested(transfer_id=transfer_id, code=ErrorCode.DECLINED):
                self._end((link, transfer_id), ReadingEnd.DECLINED)
            case (
                AbortRequested(transfer_id=transfer_id, error=error)
                | TransferFailed(transfer_id=transfer_id, error=error)
            ):
                self._failed((link, transfer_id), error)
            case Quiesced(transfer_id=transfer_id):
                self._end((link, transfer_id))
            case SessionClosed(error=error):
                for key in [key for key in self._readings if key[0] is link]:
                    self._failed(key, error or LeaseExpiredError("the reader has gone"))
                self._stop_serving(link)
            case _:
                pass

    def revoke(self, pool: PagePool, error: HurrayError) -> None:
        """Ends the reading of a pool: what readers know of its memory is void. They may ask again."""
        for (link, transfer_id), reading in list(self._readings.items()):
            if reading.snapshot.pool is pool:
                self._stop(link, transfer_id, ErrorCode.STALE_GENERATION, error)

    async def close(self) -> None:
        """Returns when nothing is sent any more. The sessions must be closed before."""
        while self._endings:
            await asyncio.wait(self._endings)

    def _taken(self, link: Link, transfer_id: int, take: Take) -> None:
        """The reader reaches no memory: its pages are sent to it."""
        reading = self._readings.get((link, transfer_id))
        if reading is None:
            return
        reading.delivery = Delivery(transfer_id, reading.snapshot, take)
        if link not in self._servings:
            self._servings[link] = Serving(link, failed=partial(self._undeliverable, link))
        self._servings[link].add(reading.delivery)

    def _undeliverable(self, link: Link, delivery: Delivery, error: HurrayError) -> None:
        self._stop(link, delivery.transfer_id, ErrorCode(error_code(error)), error)

    def _all_read(self, link: Link, transfer_id: int) -> None:
        reading = self._readings.get((link, transfer_id))
        if reading is None:
            return
        if reading.snapshot.pool.closed:
            # What was read since is whatever is there now. Nobody was told: it is the reader's last word that counts.
            error = TransferAbortedError("the pool of the snapshot was closed while it was read")
            self._stop(link, transfer_id, ErrorCode.ABORTED, error)
            return
        link.session.acknowledge(transfer_id, now=link.now)
        self._end((link, transfer_id), ReadingEnd.READ)
        if reading.delivery is None:
            self._tally.served(nbytes=reading.nbytes)
        else:
            self._tally.served(nbytes=reading.delivery.sent_nbytes, lane=FRAMES_LANE, path=FRAMES_PATH)

    def _stop_serving(self, link: Link) -> None:
        serving = self._servings.pop(link, None)
        task = serving.stop() if serving is not None else None
        if task is not None and not task.done():
            self._endings.add(task)
            task.add_done_callback(self._endings.discard)

    def _due(self, link: Link, transfer_id: int) -> None:
        """The lease of a reading ends, unless its reader has renewed it."""
        reading, now = self._readings[link, transfer_id], self._loop.time()
        due = min(reading.heard + reading.lease_s, reading.until)
        if now < due:
            reading.timer = self._loop.call_at(due, self._due, link, transfer_id)
            return
        self._tally.lease_expired()
        if now >= reading.until:
            rule = "the reader took longer than it had asked for, or than this engine's max_transfer_s"
        else:
            rule = f"the reader did not renew its lease of {reading.lease_s:.3g} s"
        error = LeaseExpiredError(f"{rule}; what it has read may be gone")
        self._stop(link, transfer_id, ErrorCode.LEASE_EXPIRED, error)

    def _stop(self, link: Link, transfer_id: int, code: ErrorCode, error: HurrayError) -> None:
        self._failed((link, transfer_id), error)
        link.session.abort(transfer_id, code, str(error), now=link.now)
        link.notify()

    def _failed(self, key: tuple[Link, int], error: HurrayError) -> None:
        if self._end(key):
            self._tally.failed("serve", error)

    def _end(self, key: tuple[Link, int], how: ReadingEnd = ReadingEnd.OPEN) -> bool:
        """False if it had ended before."""
        reading = self._readings.pop(key, None)
        if reading is None:
            return False
        reading.timer.cancel()
        link, transfer_id = key
        link.permits.end(transfer_id)
        if reading.delivery is not None:
            self._servings[link].drop(transfer_id)
        reading.lease.release()
        reading.on_end(how)
        return True
