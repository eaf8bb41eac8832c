"""One pull as its reader sees it: ask for a published snapshot, find pages, read, and hear that it was still valid."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import CacheSpec, Lease, PageAllocator, PagePool, Snapshot
from hurray_rdma.control import (
    AllEnded,
    DescriptorsEnded,
    Fetch,
    Published,
    StaleGenerationError,
    Take,
    TensorData,
)
from hurray_rdma.engine.asking import Asking
from hurray_rdma.engine.compat import check_published, pages_nbytes
from hurray_rdma.engine.exchange import Route
from hurray_rdma.engine.marks import give_back, mark_soon
from hurray_rdma.engine.nudge import Nudge
from hurray_rdma.engine.placement import Placement
from hurray_rdma.engine.remote_pool import RemotePool
from hurray_rdma.engine.stats import TransferStats
from hurray_rdma.engine.taking import Taking
from hurray_rdma.engine.tally import Tally
from hurray_rdma.errors import DeadlineExceededError, HurrayError, PoolExhaustedError, TransferAbortedError
from hurray_rdma.plan import PageMap, check_pair, map_keys, plan_transfer
from hurray_rdma.transport import Path

__all__ = ["FetchedSnapshot", "Fetching"]


class FetchedSnapshot(Snapshot):
    """A snapshot that was read from a peer, in pages of this engine. Made by `Peer.fetch`; a context manager.

    Release it when its pages are no longer needed: they stay leased until then.
    """

    def __init__(
        self, pool: PagePool, page_map: PageMap, page_ids: NDArray[np.uint32], leases: list[Lease], stats: TransferStats
    ) -> None:
        super().__init__(
            pool, block_table=page_map.block_table(page_ids), seq_ptr=page_map.seq_ptr, seq_lens=page_map.seq_lens
        )
        self.stats = stats
        """Facts of the transfer."""
        self._leases = leases

    def release(self, *, stream: Any = None) -> None:
        """Gives the pages back. Harmless when repeated.

        Args:
            stream: as of `Arrival.release`: of the last work that uses the pages, where it has not run yet.

        Raises:
            ConfigError: as of it.
        """
        if self._leases:
            mark = mark_soon(self.pool, stream)
            leases, self._leases = self._leases, []
            give_back(leases, mark)

    def __enter__(self) -> FetchedSnapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Fetching(Asking[Published]):
    """A published snapshot on its way here.

    Args:
        connect, key, timeout_s, tally: as of `Asking`.
        into: the pool that is to take pages of a cache from the peer's device, or the very pages.
    """

    def __init__(
        self,
        connect: Callable[[float], Awaitable[Route]],
        key: str,
        *,
        into: Callable[[CacheSpec, str], PagePool] | Placement,
        timeout_s: float,
        tally: Tally,
    ) -> None:
        super().__init__(connect, key, timeout_s=timeout_s, tally=tally, direction="fetch")
        self._into = into
        self._leases: list[Lease] = []
        self._taking: Taking | None = None

    async def run(self) -> FetchedSnapshot:
        """All of it.

        Raises:
            HurrayError: as `Peer.fetch`; no page stays leased, those that may still be written are in quarantine.
                With a `Placement` there are none of these any more.
        """
        try:
            fetched = await self._begin(self._fetch)
        except BaseException as error:
            self._failed(error)
            raise
        self._tally.fetched(fetched.stats)
        return fetched

    async def abort(self, reason: str) -> None:
        """Ends it; `run` raises."""
        self.fail(TransferAbortedError(f"the fetch of {self._key!r} was aborted here: {reason}"))
        await self._give_up(reason)

    def hear_data(self, event: TensorData | DescriptorsEnded | AllEnded) -> None:
        """Pages come in frames."""
        if self._taking is not None:
            self._taking.hear(event)

    def fail(self, error: HurrayError) -> None:
        super().fail(error)
        if self._taking is not None:
            self._taking.fail(error)

    async def _fetch(self) -> FetchedSnapshot:
        session, remote = self._route.session, self._route.first_pool()
        self._remote, self._taking = remote, None
        num_streams = self._route.num_tensors()
        path = Path.STREAM.value if self._route.streams else remote.path  # the pool may be another than the first
        fetch = Fetch(key=self._key, deadline_s=self._left_s, lane=remote.lane, path=path, num_streams=num_streams)
        transfer_id = session.fetch(fetch, now=self._loop.time(), timeout_s=self._left_s)
        try:
            published = await self._asked(transfer_id, "an answer")
            if published.num_descriptors > num_streams:
                raise StaleGenerationError(f"pool {published.pool_id} of the peer is newer than the fetch")
            return await self._read(transfer_id, published)
        except BaseException as error:
            try:
                await self._give_up("the reader failed")
            finally:  # also where that is cancelled
                await self._let_go(error)  # it may be asked for again
            raise

    async def _read(self, transfer_id: int, published: Published) -> FetchedSnapshot:
        await self._route.open_pools(self._deadline)  # the pool may have been announced anew meanwhile
        remote = self._route.pool_by_id(published.pool_id)
        if remote is None or remote.pool.generation != published.generation:
            raise StaleGenerationError(f"pool {published.pool_id} of the peer was registered anew meanwhile")
        self._remote = remote
        pool = (
            self._into.pool if isinstance(self._into, Placement) else self._into(remote.layout.spec, remote.pool.device)
        )
        remote = self._remote = remote.seen_from(pool.device)
        check_pair(remote.layout.spec, pool.spec)
        source, page_map = check_published(
            published, remote.layout, pool.spec, dialect=self._route.dialect(), device=remote.pool.device
        )
        page_keys = None
        if isinstance(self._into, Placement):
            page_ids, found = self._into.pages_for(page_map)
            written = pool.allocator.retain(page_ids[~found])
            self._leases.append(written)
        else:
            pool.check_grantable()
            page_keys, found, page_ids = self._find_here(pool, page_map, published)
            written = await self._lease(pool, int((~found).sum()))
            page_ids[~found] = written.page_ids
        resident = found if found.any() else None
        if (whole := remote.whole_into(pool)) is not None:
            src_pages, dst_pages = page_map.unit_src_pages[~found], page_ids[~found]
            work = partial(self._in_steps, pool, whole, src_pages, dst_pages, remote.memories[0].read_rows)
            await self._move(pool, work, len(src_pages) * whole.page_nbytes)
        elif remote.memories:
            plan = plan_transfer(remote.layout, pool.layout, page_map, page_ids, resident=resident)
            mover = self._mover_of(pool, plan)
            await self._move(pool, lambda: mover.move(pool.spec.layer_indices, lambda _: None), plan.nbytes)
        else:
            await self._take(transfer_id, Taking(source, pool, page_ids[~found]), pool.spec, resident)
        session = self._route.session
        session.read_end(transfer_id, now=self._loop.time())
        self._route.notify()
        await self._wait(self._acknowledged, "the acknowledgement")
        self._forget()
        if page_keys is not None:
            pool.resident.insert(page_keys[~found], written)
        stats = self._collect(page_map, pool.spec, remote, num_written=int((~found).sum()))
        fetched = FetchedSnapshot(pool, page_map, page_ids, self._leases, stats)
        self._leases = []  # it has them from now on
        return fetched

    async def _take(
        self, transfer_id: int, taking: Taking, spec: CacheSpec, resident: NDArray[np.bool_] | None
    ) -> None:
        """Where the peer's memory cannot be reached: it sends the pages, as they are to lie here."""
        take = Take(page_size=spec.page_size, head_offset=spec.head_offset, num_heads=spec.num_heads)
        if resident is not None:
            take = replace(take, resident=resident)
        async with taking.writing(self._deadline):
            if self._error is not None:
                raise self._error
            self._taking = taking
            try:
                self._route.session.take(transfer_id, take, now=self._loop.time())
                self._route.notify()
                await self._wait(taking.whole, "the pages")
            finally:
                self._taking = None
        self._moves.add(taking.moves)

    def _find_here(
        self, pool: PagePool, page_map: PageMap, published: Published
    ) -> tuple[NDArray[np.uint8] | None, NDArray[np.bool_], NDArray[np.uint32]]:
        """Keys of the pages, which of them are here, and where."""
        if not published.page_keys.shape[1]:
            return None, np.zeros(page_map.num_pages, np.bool_), np.empty(page_map.num_pages, np.uint32)
        page_keys, _ = map_keys(page_map, published.page_keys, published.seq_ptr)
        here = pool.resident.acquire(page_keys)
        self._leases.append(here.lease)
        return page_keys, here.found, here.page_ids.copy()

    async def _lease(self, pool: PagePool, count: int) -> Lease:
        """Free pages, as soon as there are enough of them."""
        allocator = pool.allocator
        if (lease := self._lease_now(allocator, count)) is not None:
            return lease
        freed = asyncio.Event()
        tell = Nudge(freed.set)
        allocator.watch(tell)
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                while (lease := self._lease_now(allocator, count)) is None:
                    freed.clear()
                    await self._either(freed)
                return lease
        except TimeoutError:
            if self._error is not None:
                raise self._error from None
            raise DeadlineExceededError(
                f"no {count} pages for {self._key!r} became free in time", field="timeout_s", value=self._timeout_s
            ) from None
        finally:
            allocator.unwatch(tell)

    def _lease_now(self, allocator: PageAllocator, count: int) -> Lease | None:
        """None where they may become free."""
        if self._error is not None:
            raise self._error
        try:
            lease = allocator.lease(count)
        except PoolExhaustedError:
            if allocator.never_fits(count):
                raise
            return None
        self._leases.append(lease)
        return lease

    async def _either(self, freed: asyncio.Event) -> None:
        """Until pages are freed, or the fetch has failed."""
        waiting = asyncio.create_task(freed.wait())
        outcomes: set[asyncio.Future[Any]] = {waiting, self._acknowledged}
        try:
            await asyncio.wait(outcomes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()

    async def _let_go(self, error: BaseException) -> None:
        """Pages go back, or into quarantine while UCX may still write them; those of a `Placement` are waited for."""
        leases, self._leases = self._leases, []
        if not self._in_doubt:
            for lease in leases:
                lease.release()
            return
        quiet = [self._quarantine(lease, error) for lease in leases]
        if isinstance(self._into, Placement):
            self._log.warning("pages for %r may still be written: waiting until they cannot", self._key)
            await _done(quiet)

    def _quarantine(self, lease: Lease, error: BaseException) -> asyncio.Future[None]:
        """Done when its pages are out of it."""
        allocator = lease.allocator
        allocator.quarantine(lease, reason=str(error))
        self._tally.quarantined(len(lease))
        quiet: asyncio.Future[None] = self._loop.create_future()

        def settled() -> None:
            allocator.recover(lease)
            self._tally.recovered(len(lease))
            quiet.set_result(None)

        self._route.when_settled(settled)
        return quiet

    def _collect(self, page_map: PageMap, spec: CacheSpec, remote: RemotePool, *, num_written: int) -> TransferStats:
        num_entries = len(page_map.entries)
        return TransferStats(
            key=self._key,
            num_sequences=len(page_map.seq_lens),
            num_tokens=int(page_map.seq_lens.sum(dtype=np.uint64)),
            num_table_entries=num_entries,
            num_pages=num_written,
            num_resident=page_map.num_pages - num_written,
            logical_nbytes=num_entries * pages_nbytes(spec),
            sent_nbytes=self._moves.nbytes,
            num_operations=self._moves.num_operations,
            seconds=time.monotonic() - self._started,
            write_seconds=self._moves.seconds,
            lane=remote.lane,
            path=remote.path,
        )


async def _done(futures: list[asyncio.Future[None]]) -> None:
    """All of them; pages are in use, so a cancellation waits, too."""
    cancelled = None
    while not all(future.done() for future in futures):
        try:
            await asyncio.wait(futures)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
