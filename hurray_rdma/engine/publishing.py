"""The source side of pulls: what is published, under which lease, and who is reading it.

A reader that falls silent can only have read what is not there any more, and is told so: it needs no quarantine. One
that reaches no memory is sent the pages (`hurray_rdma.engine.serving`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import Lease, PagePool, Snapshot
from hurray_rdma.control import (
    AbortRequested,
    AllEnded,
    ErrorCode,
    Event,
    Fetch,
    Fetched,
    NotPublishedError,
    Published,
    Quiesced,
    SessionClosed,
    Take,
    Taken,
    TransferFailed,
    error_code,
)
from hurray_rdma.engine.compat import pages_nbytes
from hurray_rdma.engine.exchange import retain
from hurray_rdma.engine.frames import FRAMES_LANE, FRAMES_PATH
from hurray_rdma.engine.link import Link
from hurray_rdma.engine.marks import Mark
from hurray_rdma.engine.receiver import Receiver
from hurray_rdma.engine.serving import Delivery, Serving
from hurray_rdma.engine.tally import Tally
from hurray_rdma.errors import ConfigError, GeometryError, HurrayError, LeaseExpiredError
from hurray_rdma.format import Dialect

__all__ = ["Publishing"]

_LOOK_AGAIN_S = 0.01


@dataclass(slots=True, eq=False)
class _Publication:
    """A snapshot that may be fetched."""

    snapshot: Snapshot
    page_keys: NDArray[np.uint8]
    lease: Lease
    lease_s: float
    timer: asyncio.TimerHandle
    ready: asyncio.Future[None] | None
    """Done when its pages hold their content; None where they do."""
    max_readers: int | None
    on_end: Callable[[str, int], None]
    num_reading: int = 0
    num_read: int = 0
    over: bool = False


@dataclass(slots=True, eq=False)
class _Reading:
    """One fetch under way; it has a lease of its own, so that the end of the publication does not disturb it."""

    key: str
    publication: _Publication
    snapshot: Snapshot
    nbytes: int
    lease: Lease
    timer: asyncio.TimerHandle
    delivery: Delivery | None = None
    """Where the pages are sent, since the reader reaches no memory."""


class Publishing:
    """Published snapshots of one engine. Runs on the event loop.

    Args:
        receiver_of: the announced pool that a peer may know of, by the pool itself; None where it may not.
        max_read_s: how long a reader may take at most, whatever it asked for.
        tally: counts what happens.
    """

    def __init__(
        self, receiver_of: Callable[[PagePool, Link], Receiver | None], *, max_read_s: float, tally: Tally
    ) -> None:
        self._receiver_of = receiver_of
        self._max_read_s = max_read_s
        self._tally = tally
        self._loop = asyncio.get_running_loop()
        self._publications: dict[str, _Publication] = {}
        self._readings: dict[tuple[Link, int], _Reading] = {}
        self._servings: dict[Link, Serving] = {}
        self._endings: set[asyncio.Task[None]] = set()

    def publish(
        self,
        key: str,
        snapshot: Snapshot,
        *,
        lease_s: float,
        page_keys: NDArray[np.uint8] | None,
        max_readers: int | None,
        on_end: Callable[[str, int], None] | None,
        mark: Mark | None,
    ) -> None:
        """Lets peers fetch a snapshot; see `Engine.publish`.

        Raises:
            ConfigError: the key is taken.
            GeometryError: ``page_keys`` are not one for each entry.
        """
        if key in self._publications:
            raise ConfigError("is published already", field="key", value=key, fix="Take it back first: unpublish")
        if page_keys is not None and (page_keys.ndim != 2 or len(page_keys) != len(snapshot.block_table)):
            raise GeometryError(
                f"must have a row for each of the {len(snapshot.block_table)} entries of block_table",
                field="page_keys.shape",
                value=page_keys.shape,
            )
        self._publications[key] = _Publication(
            snapshot,
            page_keys if page_keys is not None else np.empty((0, 0), np.uint8),
            retain(snapshot),
            lease_s,
            self._loop.call_later(lease_s, self._expired, key),
            mark.passed() if mark is not None else None,
            max_readers,
            on_end if on_end is not None else _nobody_asks,
        )

    def unpublish(self, key: str) -> bool:
        """Takes a snapshot back; who is reading it goes on. False if it was not there (any more)."""
        publication = self._publications.pop(key, None)
        if publication is None:
            return False
        publication.timer.cancel()
        publication.lease.release()
        publication.over = True
        self._look_ended(key, publication)
        return True

    def handle(self, link: Link, event: Event) -> None:
        """Takes one event of a reader's session."""
        match event:
            case Fetched(transfer_id=transfer_id, fetch=fetch):
                try:
                    self._answer(link, transfer_id, fetch)
                except HurrayError as error:
                    self._tally.failed("serve", error)
                    link.session.refuse(transfer_id, error, now=link.now)
                link.notify()
            case Taken(transfer_id=transfer_id, take=take):
                self._taken(link, transfer_id, take)
            case AllEnded(transfer_id=transfer_id):
                self._all_read(link, transfer_id)
            case AbortRequested(transfer_id=transfer_id, code=ErrorCode.UNREAD):
                self._end((link, transfer_id))
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
        """Takes everything back. The sessions must be closed before."""
        for key in list(self._publications):
            self.unpublish(key)
        await asyncio.sleep(0)  # whoever published is told before the engine has ended
        while self._endings:
            await asyncio.wait(self._endings)

    def _expired(self, key: str) -> None:
        self._tally.lease_expired()
        self.unpublish(key)

    def _answer(self, link: Link, transfer_id: int, fetch: Fetch) -> None:
        publication = self._publications.get(fetch.key)
        snapshot = publication.snapshot if publication is not None else None
        receiver = self._receiver_of(snapshot.pool, link) if snapshot is not None else None
        if publication is None or snapshot is None or receiver is None:
            raise NotPublishedError(
                "nothing is published under it (any more)",
                field="key",
                value=fetch.key,
                fix="Publish it first, and fetch it before its lease ends",
            )
        if publication.ready is not None:
            if not publication.ready.done():
                again = Fetched(transfer_id, fetch)
                publication.ready.add_done_callback(lambda _: self.handle(link, again))
                return
            publication.ready.result()
        if receiver.holding:
            # Its rkeys are about to be void: look again soon, at those that come after.
            self._loop.call_later(_LOOK_AGAIN_S, self.handle, link, Fetched(transfer_id, fetch))
            return
        spec, read_s = snapshot.pool.spec, min(fetch.deadline_s, self._max_read_s)
        published = Published(
            pool_id=receiver.pool_id,
            generation=receiver.generation,
            descriptors=snapshot.encode_descriptors(dialect=Dialect(link.peer.dialect)),
            block_table=snapshot.block_table,
            seq_ptr=snapshot.seq_ptr,
            seq_lens=snapshot.seq_lens,
            order=str(spec.order),
            head_offset=spec.head_offset,
            total_heads=spec.heads_of_model,
            page_keys=publication.page_keys,
            lease_s=read_s,
        )
        publication.timer.cancel()
        publication.timer = self._loop.call_later(publication.lease_s, self._expired, fetch.key)
        lease = retain(snapshot)
        try:
            told = link.session.publish(transfer_id, published, now=link.now)
        except BaseException:
            lease.release()
            raise
        if not told:
            lease.release()
            return
        publication.num_reading += 1
        self._readings[link, transfer_id] = _Reading(
            fetch.key,
            publication,
            snapshot,
            len(lease) * pages_nbytes(spec),
            lease,
            self._loop.call_later(read_s, self._too_late, link, transfer_id),
        )

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
        if (link, transfer_id) not in self._readings:
            return
        link.session.acknowledge(transfer_id, now=link.now)
        reading = self._end((link, transfer_id), complete=True)
        if reading is None:
            return
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

    def _too_late(self, link: Link, transfer_id: int) -> None:
        """The reader has had all the time that it asked for."""
        self._tally.lease_expired()
        error = LeaseExpiredError("the reader took longer than it had asked for; what it has read may be gone")
        self._stop(link, transfer_id, ErrorCode.LEASE_EXPIRED, error)

    def _stop(self, link: Link, transfer_id: int, code: ErrorCode, error: HurrayError) -> None:
        self._failed((link, transfer_id), error)
        link.session.abort(transfer_id, code, str(error), now=link.now)
        link.notify()

    def _failed(self, key: tuple[Link, int], error: HurrayError) -> None:
        if self._end(key) is not None:
            self._tally.failed("serve", error)

    def _end(self, key: tuple[Link, int], *, complete: bool = False) -> _Reading | None:
        reading = self._readings.pop(key, None)
        if reading is None:
            return None
        reading.timer.cancel()
        if reading.delivery is not None:
            link, transfer_id = key
            self._servings[link].drop(transfer_id)
        reading.lease.release()
        publication = reading.publication
        publication.num_reading -= 1
        publication.num_read += complete
        if publication.over:
            self._look_ended(reading.key, publication)
        elif publication.num_read == publication.max_readers:
            self.unpublish(reading.key)
        return reading

    def _look_ended(self, key: str, publication: _Publication) -> None:
        """Tells whoever published it, once nobody reads it any more and nobody can begin to."""
        if not publication.num_reading:
            # From the loop: what it raises is the loop's to tell, and harms neither reader nor session.
            self._loop.call_soon(publication.on_end, key, publication.num_read)


def _nobody_asks(_key: str, _num_read: int) -> None:
    """The end of a publication that is of no interest."""
