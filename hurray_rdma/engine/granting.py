"""From a checked offer to its grant and its arrival: pages found here, pages leased, pages that the application chose.

Knows one pool and no queue: whose turn it is `Receiver` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import Lease, PagePool
from hurray_rdma.control import NONE_RESIDENT, ErrorCode, Grant
from hurray_rdma.engine.arrival import Arrival
from hurray_rdma.engine.granted import Granted
from hurray_rdma.engine.link import Link
from hurray_rdma.engine.parts import GoodOffer, Whole
from hurray_rdma.engine.placement import Placement
from hurray_rdma.engine.untaken import Untaken
from hurray_rdma.errors import GeometryError, HurrayError, PoolExhaustedError, TransferAbortedError
from hurray_rdma.plan import PlacedTables

__all__ = ["Granting"]


class Granting:
    """Runs on the event loop.

    Args:
        pool: whose pages.
        granted: takes what was granted.
        name, arrivals, lease_s, timeout_s: as of `Receiver`.
    """

    def __init__(
        self,
        pool: PagePool,
        granted: Granted,
        *,
        name: str,
        arrivals: Untaken,
        lease_s: float,
        timeout_s: float,
    ) -> None:
        self.generation = 1
        """Of the pool's registration."""
        self._pool = pool
        self._granted = granted
        self._name = name
        self._arrivals = arrivals
        self._lease_s = lease_s
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()

    def grant(self, offer: GoodOffer) -> int:
        """Grants an offer the pages it needs; else says how many are missing now.

        Raises:
            HurrayError: the sender is gone, or accepts no grant of that length.
        """
        allocator, page_map = self._pool.allocator, offer.page_map
        here = None if offer.page_keys is None else self._pool.resident.acquire(offer.page_keys)
        num_written = page_map.num_pages if here is None else int((~here.found).sum())
        try:
            written = allocator.lease(num_written)
        except PoolExhaustedError:
            if here is not None:
                here.lease.release()
            return max(1, num_written - allocator.accounts().free)  # some may have come back just now
        if here is None or offer.page_keys is None:
            nothing = np.zeros(num_written, np.bool_)
            self._begin(offer, written.page_ids, nothing, written=written, resident=None, page_keys=None)
            return 0
        page_ids, found = here.page_ids.copy(), here.found
        page_ids[~found] = written.page_ids
        page_keys = offer.page_keys[~found]
        self._begin(offer, page_ids, found, written=written, resident=here.lease, page_keys=page_keys)
        return 0

    def _begin(
        self,
        offer: GoodOffer,
        page_ids: NDArray[np.uint32],
        found: NDArray[np.bool_],
        *,
        written: Lease,
        resident: Lease | None,
        page_keys: NDArray[np.uint8] | None,
        take: Callable[[Arrival], None] | None = None,
    ) -> None:
        """Grants an offer its pages, of which those ``found`` do not travel, and hands the arrival on."""
        arrival = self.arrival(
            offer.link,
            offer.offer.key,
            offer.page_map.placed(page_ids),
            written=written,
            resident=resident,
            lane=offer.offer.lane,
            path=offer.offer.path,
        )
        whole = Whole(arrival, offer, written, page_keys, len(page_ids) - len(written), self._loop.time())
        try:
            self._grant(whole, offer, page_ids, found)
        except HurrayError as error:
            arrival.stopping(error)
            arrival.ended(quiet=True)  # it was not granted
            raise
        # The application hears of it once its sender has: what it does then keeps nobody waiting.
        offer.link.afterwards(partial(take or self._arrivals.put_nowait, arrival))

    def arrival(
        self,
        link: Link,
        key: str,
        tables: PlacedTables,
        *,
        written: Lease,
        resident: Lease | None,
        lane: str,
        path: str,
    ) -> Arrival:
        """What the application gets."""
        return Arrival(
            self._pool,
            key,
            group=self._name or None,
            tables=tables,
            written=written,
            resident=resident,
            timeout_s=self._timeout_s,
            sender=link.peer.engine_name,
            lane=lane,
            path=path,
            on_abort=self._abort,
        )

    def join(self, whole: Whole, offer: GoodOffer) -> None:
        """Grants a further sender the pages that the others write into, for other heads.

        Raises:
            GeometryError: it brings heads that another one brings, or other sequences.
            HurrayError: it is gone.
        """
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

    def _grant(self, whole: Whole, offer: GoodOffer, page_ids: NDArray[np.uint32], resident: NDArray[np.bool_]) -> None:
        some = resident.any()
        grant = Grant(
            generation=self.generation,
            page_ids=page_ids,
            resident=resident if some else NONE_RESIDENT,
            lease_s=self._lease_s,
        )
        if not offer.link.session.grant(offer.transfer_id, grant, now=self._loop.time()):
            raise TransferAbortedError(f"the sender of {offer.offer.key!r} does not wait for its grant any more")
        self._granted.add(whole, offer, page_ids[~resident] if some else page_ids)
        offer.link.notify()

    def _abort(self, arrival: Arrival, reason: str) -> None:
        """The application does not want the arrival any more."""
        self._granted.abort(arrival, ErrorCode.ABORTED, reason)

    def place(self, offer: GoodOffer, placement: Placement, take: Callable[[Arrival], None] | None) -> None:
        """Grants an offer the pages that the application has chosen.

        Args:
            offer: what is granted.
            placement: where it goes.
            take: as of `Receiver.expect`.

        Raises:
            HurrayError: they do not fit, or the sender is gone.
        """
        page_ids, present = placement.pages_for(offer.page_map)
        if offer.heads != self._pool.spec.heads and present.any():
            raise GeometryError(
                f"the pool has {self._pool.spec.heads}: pages that are present in part cannot be told from others",
                field="heads",
                value=offer.heads,
            )
        written = self._pool.allocator.retain(page_ids[~present])
        self._begin(offer, page_ids, present, written=written, resident=None, page_keys=None, take=take)
