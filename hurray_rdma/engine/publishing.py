"""The source side of pulls: what is published, under which lease, and who has asked for it.

What becomes of a fetch once it is answered is `hurray_rdma.engine.reading`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import Lease, PagePool, Snapshot
from hurray_rdma.control import (
    AbortRequested,
    Event,
    Fetch,
    Fetched,
    NotPublishedError,
    Published,
    Quiesced,
    SessionClosed,
    TransferFailed,
)
from hurray_rdma.control.checks import seconds
from hurray_rdma.engine.compat import pages_nbytes, pages_of
from hurray_rdma.engine.exchange import retain
from hurray_rdma.engine.link import Link
from hurray_rdma.engine.marks import Mark
from hurray_rdma.engine.reach import Reach, reach_of
from hurray_rdma.engine.reading import ReadingEnd, Readings
from hurray_rdma.engine.receiver import Receiver
from hurray_rdma.engine.tally import Tally
from hurray_rdma.errors import ConfigError, GeometryError, HurrayError
from hurray_rdma.format import Dialect

__all__ = ["Publishing"]


@dataclass(slots=True, eq=False)
class _Publication:
    """A snapshot that may be fetched."""

    key: str
    snapshot: Snapshot
    page_keys: NDArray[np.uint8]
    nbytes: int
    lease: Lease
    lease_s: float
    ready: asyncio.Future[None] | None
    """Done when its pages hold their content; None where they do."""
    max_readers: int | None
    on_end: Callable[[str, int], None]
    timer: asyncio.TimerHandle | None = None
    """The end of its lease, which begins when it is ready."""
    waiting: dict[tuple[Link, int], Fetch] = field(default_factory=dict)
    """Fetches that cannot be answered yet."""
    num_reading: int = 0
    num_read: int = 0
    num_declined: int = 0
    over: bool = False


class Publishing:
    """Published snapshots of one engine. Runs on the event loop.

    Args:
        receiver_of: the announced pool that a peer may know of, by the pool itself; None where it may not.
        max_lease_s: how long a reader may be silent at most, however long it asked for.
        max_transfer_s: how long it may read.
        tally: counts what happens.
    """

    def __init__(
        self,
        receiver_of: Callable[[PagePool, Link], Receiver | None],
        *,
        max_lease_s: float,
        max_transfer_s: float,
        tally: Tally,
    ) -> None:
        self._receiver_of = receiver_of
        self._max_lease_s = max_lease_s
        self._max_transfer_s = max_transfer_s
        self._tally = tally
        self._loop = asyncio.get_running_loop()
        self._publications: dict[str, _Publication] = {}
        self._waiting: dict[tuple[Link, int], _Publication] = {}
        self._readings = Readings(tally)

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
            ConfigError: the key is taken, or a number is out of range.
            GeometryError: ``page_keys`` are not one for each entry.
        """
        seconds("lease_s", lease_s)
        if max_readers is not None and max_readers < 1:
            raise ConfigError("must be 1 or more", field="max_readers", value=max_readers, fix="None is any number")
        if key in self._publications:
            raise ConfigError("is published already", field="key", value=key, fix="Take it back first: unpublish")
        if page_keys is not None and (page_keys.ndim != 2 or len(page_keys) != len(snapshot.block_table)):
            raise GeometryError(
                f"must have a row for each of the {len(snapshot.block_table)} entries of block_table",
                field="page_keys.shape",
                value=page_keys.shape,
            )
        publication = _Publication(
            key,
            snapshot,
            page_keys if page_keys is not None else np.empty((0, 0), np.uint8),
            len(pages_of(snapshot)) * pages_nbytes(snapshot.pool.spec),
            retain(snapshot),
            lease_s,
            mark.passed() if mark is not None else None,
            max_readers,
            on_end if on_end is not None else _nobody_asks,
        )
        self._publications[key] = publication
        if publication.ready is None:
            self._begin_lease(publication)
        else:
            publication.ready.add_done_callback(lambda _: self._is_ready(publication))

    def unpublish(self, key: str) -> bool:
        """Takes a snapshot back; who is reading it goes on. False if it was not there (any more)."""
        publication = self._publications.pop(key, None)
        if publication is None:
            return False
        if publication.timer is not None:
            publication.timer.cancel()
        publication.lease.release()
        publication.over = True
        self._answer_waiting(publication)
        self._look_ended(publication)
        return True

    def handle(self, link: Link, event: Event) -> None:
        """Takes one event of a reader's session."""
        match event:
            case Fetched(transfer_id=transfer_id, fetch=fetch):
                self._asked(link, transfer_id, fetch)
                return
            case (
                AbortRequested(transfer_id=transfer_id)
                | TransferFailed(transfer_id=transfer_id)
                | Quiesced(transfer_id=transfer_id)
            ):
                self._forget_waiting((link, transfer_id))
            case SessionClosed():
                for key in [key for key in self._waiting if key[0] is link]:
                    self._forget_waiting(key)
            case _:
                pass
        self._readings.handle(link, event)

    def revoke(self, pool: PagePool, error: HurrayError) -> None:
        """Ends the reading of a pool: what readers know of its memory is void. They may ask again."""
        self._readings.revoke(pool, error)
        self.look_again(pool)

    def look_again(self, pool: PagePool) -> None:
        """Answers who waits for snapshots of a pool, now that it is there again, or gone."""
        for publication in list(self._publications.values()):
            if publication.snapshot.pool is pool:
                self._answer_waiting(publication)

    async def close(self) -> None:
        """Takes everything back. The sessions must be closed before."""
        for key in list(self._publications):
            self.unpublish(key)
        await asyncio.sleep(0)  # whoever published is told before the engine has ended
        await self._readings.close()

    # Leases of what is published.

    def _is_ready(self, publication: _Publication) -> None:
        if not publication.over:
            self._begin_lease(publication)
            self._answer_waiting(publication)

    def _begin_lease(self, publication: _Publication) -> None:
        if publication.timer is not None:
            publication.timer.cancel()
        publication.timer = self._loop.call_later(publication.lease_s, self._expired, publication)

    def _expired(self, publication: _Publication) -> None:
        if publication.waiting:  # for its pool
            self._begin_lease(publication)
            return
        self._tally.lease_expired()
        self.unpublish(publication.key)

    # Who asks.

    def _asked(self, link: Link, transfer_id: int, fetch: Fetch) -> None:
        try:
            self._answer(link, transfer_id, fetch)
        except HurrayError as error:
            self._tally.failed("serve", error)
            link.session.refuse(transfer_id, error, now=link.now)
        link.notify()

    def _answer_waiting(self, publication: _Publication) -> None:
        """Those that still cannot be answered go on waiting."""
        for (link, transfer_id), fetch in list(publication.waiting.items()):
            self._forget_waiting((link, transfer_id))
            self._asked(link, transfer_id, fetch)

    def _forget_waiting(self, key: tuple[Link, int]) -> None:
        publication = self._waiting.pop(key, None)
        if publication is not None:
            del publication.waiting[key]

    def _answer(self, link: Link, transfer_id: int, fetch: Fetch) -> None:
        publication = self._publications.get(fetch.key)
        receiver = self._receiver_of(publication.snapshot.pool, link) if publication is not None else None
        if publication is None or receiver is None:
            raise NotPublishedError(
                "nothing is published under it (any more)",
                field="key",
                value=fetch.key,
                fix="Publish it first, and fetch it before its lease ends",
            )
        ready = publication.ready
        if ready is None or ready.done():
            self._begin_lease(publication)
        # While a pool is registered anew, its rkeys are about to be void: it is answered with those that come after.
        if receiver.holding or (ready is not None and not ready.done()):
            publication.waiting[link, transfer_id] = fetch
            self._waiting[link, transfer_id] = publication
            return
        if ready is not None:
            ready.result()
        snapshot, spec = publication.snapshot, publication.snapshot.pool.spec
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
            lease_s=min(fetch.deadline_s, self._max_lease_s),
        )
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
        self._readings.begin(
            link,
            transfer_id,
            snapshot,
            lease=lease,
            nbytes=publication.nbytes,
            lease_s=published.lease_s,
            time_s=min(fetch.deadline_s, self._max_transfer_s),
            streamed=pages_of(snapshot) if reach_of(fetch.path, fetch.lane) is Reach.STREAM else None,
            on_end=partial(self._read, publication),
        )

    def _read(self, publication: _Publication, how: ReadingEnd) -> None:
        """A reading has ended."""
        publication.num_reading -= 1
        publication.num_read += how is ReadingEnd.READ
        publication.num_declined += how is ReadingEnd.DECLINED
        if publication.over:
            self._look_ended(publication)
        elif publication.num_read + publication.num_declined == publication.max_readers:
            self.unpublish(publication.key)

    def _look_ended(self, publication: _Publication) -> None:
        """Tells whoever published it, once nobody reads it any more and nobody can begin to."""
        if not publication.num_reading:
            # From the loop: what it raises is the loop's to tell, and harms neither reader nor session.
            self._loop.call_soon(publication.on_end, publication.key, publication.num_read)


def _nobody_asks(_key: str, _num_read: int) -> None:
    """The end of a publication that is of no interest."""
