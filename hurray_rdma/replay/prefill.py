"""A prefill worker of a replay: "computes" the blocks of its requests into its pool and sends them when they are due.

A request whose decode worker died is sent again once that worker is back, also if it had been delivered there and its
output had not been given yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence

from hurray_rdma.cache import Lease, PagePool, Snapshot
from hurray_rdma.demo.child import Link
from hurray_rdma.demo.messages import Ready
from hurray_rdma.engine import Engine, Peer
from hurray_rdma.errors import HurrayError, PeerLostError, PoolExhaustedError
from hurray_rdma.replay.decode import NEWS_S
from hurray_rdma.replay.messages import Begin, Delivery, Ended, Failure, PrefillNews, Restarted
from hurray_rdma.replay.work import Work
from hurray_rdma.transport import default_context

__all__ = ["prefill"]


async def prefill(link: Link, work: Work, worker: int, addresses: Sequence[str]) -> None:
    """Life of a prefill worker.

    Args:
        link: to the supervisor.
        work: the replay.
        worker: number of this one.
        addresses: of the decode workers.
    """
    config = work.config
    with PagePool.allocate(
        work.spec, num_pages=config.workers.prefill_pages, context=default_context(work.ucx_options)
    ) as pool:
        async with contextlib.AsyncExitStack() as stack:
            engine = await stack.enter_async_context(Engine(pool, timeout_s=config.run.timeout_s))
            peers = [await stack.enter_async_context(engine.connect(address)) for address in addresses]
            link.send(Ready())
            begin = await link.receive(Begin)
            desk = _Desk(work, pool, peers, worker=worker, start_s=begin.start_s)
            lane = peers[0].lane
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(desk.dispatch(tasks)), tasks.create_task(desk.tell(link))]
                while isinstance(message := await link.receive(object), Restarted):
                    desk.restarted(message)
                for task in running:
                    task.cancel()
            link.send(desk.news())
            stats = engine.stats()
    link.send(Ended(stats, lane=lane, num_evicted=0))


class _Desk:
    """What one prefill worker has to do."""

    def __init__(self, work: Work, pool: PagePool, peers: Sequence[Peer], *, worker: int, start_s: float) -> None:
        self._work = work
        self._pool = pool
        self._peers = peers
        self._start_s = start_s
        self._todo = deque(each for each in range(len(work.trace)) if work.prefill_of(each) == worker)
        self._again: deque[int] = deque()
        self._changed = asyncio.Event()
        self._slots = asyncio.Semaphore(work.config.workers.in_flight)
        self._lives = [0] * len(peers)
        self._parked: list[list[int]] = [[] for _ in peers]
        self._delivered: list[set[int]] = [set() for _ in peers]
        self._deliveries: list[Delivery] = []
        self._failures: list[Failure] = []
        self._num_again = 0

    async def dispatch(self, tasks: asyncio.TaskGroup) -> None:
        """Begins each request when it is due and there is room for it, in order, until it is cancelled."""
        while True:
            request = await self._next()
            await self._slots.acquire()
            lease = await self._pages(len(self._work.trace.blocks_of(request)))
            tasks.create_task(self._send(request, lease))

    async def _next(self) -> int:
        while not self._again:
            wait_s = None
            if self._todo:
                wait_s = self._start_s + self._work.due_s(self._todo[0]) - time.monotonic()
                if wait_s <= 0:
                    return self._todo.popleft()
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
        return self._again.popleft()

    async def _pages(self, count: int) -> Lease:
        while True:
            try:
                return self._pool.allocator.lease(count)
            except PoolExhaustedError:
                self._changed.clear()
                await self._changed.wait()

    async def _send(self, request: int, lease: Lease) -> None:
        worker = int(self._work.decode_of[request])
        life, started_s = self._lives[worker], time.monotonic()
        try:
            snapshot = self._compute(request, lease)
            keys = self._work.keys_of(request)
            stats = await self._peers[worker].send(snapshot, key=str(request), page_keys=keys)
        except PeerLostError:
            if self._lives[worker] > life:
                self._repeat([request])
            else:
                self._parked[worker].append(request)
        except HurrayError as error:
            self._failures.append(Failure(request, type(error).__name__, str(error)))
        else:
            self._delivered[worker].add(request)
            self._deliveries.append(
                Delivery(
                    request=request,
                    started_s=started_s,
                    acknowledged_s=time.monotonic(),
                    num_entries=stats.num_table_entries,
                    num_resident=stats.num_resident,
                    logical_nbytes=stats.logical_nbytes,
                    sent_nbytes=stats.sent_nbytes,
                )
            )
        finally:
            lease.release()
            self._slots.release()
            self._changed.set()

    def _compute(self, request: int, lease: Lease) -> Snapshot:
        """Writes the request's blocks, every layer and role."""
        blocks = self._work.trace.blocks_of(request)
        for tensor, (role, layer) in enumerate(self._work.spec.tensors):
            self._work.content.fill(
                self._pool.pages(role, layer), tensor=tensor, page_ids=blocks, places=lease.page_ids
            )
        return Snapshot.from_block_tables(
            self._pool, [lease.page_ids], seq_lens=self._work.num_tokens[request : request + 1]
        )

    def restarted(self, message: Restarted) -> None:
        """What the worker's death took with it is to be sent again."""
        worker = message.worker
        self._lives[worker] += 1
        lost = self._delivered[worker] - message.finished
        self._delivered[worker] -= lost
        parked, self._parked[worker] = self._parked[worker], []
        self._repeat(sorted({*parked, *lost}))

    def _repeat(self, requests: list[int]) -> None:
        self._again.extend(requests)
        self._num_again += len(requests)
        self._changed.set()

    async def tell(self, link: Link) -> None:
        """Reports until it is cancelled."""
        while True:
            await asyncio.sleep(NEWS_S)
            link.send(self.news())

    def news(self) -> PrefillNews:
        """What is new since the last call."""
        news = PrefillNews(tuple(self._deliveries), tuple(self._failures), self._num_again)
        self._deliveries, self._failures, self._num_again = [], [], 0
        return news
