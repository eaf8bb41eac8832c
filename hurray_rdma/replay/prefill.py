"""A prefill worker of a replay: "computes" the blocks of its requests into its pool and sends them when they are due.

A request whose decode worker died is sent again once that worker is back, also if it had been delivered there and its
output had not been given yet. One whose session broke, while the worker lives, is sent again after a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hurray_rdma.cache import Lease, PagePool, Snapshot
from hurray_rdma.demo.child import Link
from hurray_rdma.demo.messages import Ready
from hurray_rdma.engine import Engine, Peer
from hurray_rdma.errors import (
    DeadlineExceededError,
    HurrayError,
    PeerLostError,
    PoolExhaustedError,
    TransferAbortedError,
    TransportError,
)
from hurray_rdma.replay.decode import NEWS_S
from hurray_rdma.replay.messages import Begin, Delivery, Ended, Failure, Killed, PrefillNews, Restarted
from hurray_rdma.replay.work import Work
from hurray_rdma.transport import default_context

__all__ = ["prefill"]

_PAUSE_S = 0.3
"""Before a worker that was lost is tried again."""
_NOTICE_S = 5.0
"""A session that breaks may be known as broken so much later than a send that failed by it."""


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
                while isinstance(message := await link.receive(object), Killed | Restarted):
                    desk.hear(message)
                for task in running:
                    task.cancel()
            link.send(desk.news())
            stats = engine.stats()
    link.send(Ended(stats, lane=lane, num_evicted=0))


@dataclass(slots=True)
class _Way:
    """To one decode worker."""

    peer: Peer
    num_deaths: int = 0
    down: bool = False
    """It was killed and is not back."""
    lost_since_s: float | None = None
    """When it was lost for the first time since a send came through."""
    lost_s: float = 0.0
    """When it was lost for the last time."""
    parked: list[int] = field(default_factory=list)
    """Requests that wait until it is reached again."""
    delivered: set[int] = field(default_factory=set)


class _Desk:
    """What one prefill worker has to do."""

    def __init__(self, work: Work, pool: PagePool, peers: Sequence[Peer], *, worker: int, start_s: float) -> None:
        self._work = work
        self._pool = pool
        self._ways = [_Way(peer) for peer in peers]
        self._start_s = start_s
        self._todo = deque(each for each in range(len(work.trace)) if work.prefill_of(each) == worker)
        self._again: deque[int] = deque()
        self._changed = asyncio.Event()
        self._slots = asyncio.Semaphore(work.config.workers.in_flight)
        self._deliveries: list[Delivery] = []
        self._failures: list[Failure] = []
        self._sent_again: list[int] = []

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
        way = self._ways[int(self._work.decode_of[request])]
        num_deaths, started_s = way.num_deaths, time.monotonic()
        try:
            snapshot = self._compute(request, lease)
            keys = self._work.keys_of(request)
            stats = await way.peer.send(snapshot, key=str(request), page_keys=keys)
        except HurrayError as error:
            if await self._is_loss(error, way, num_deaths, started_s):
                self._lost(way, request, error, died=way.num_deaths > num_deaths)
            else:
                self._fail(request, error)
        else:
            way.delivered.add(request)
            way.lost_since_s = None
            self._unpark(way)
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

    async def _is_loss(self, error: HurrayError, way: _Way, num_deaths: int, started_s: float) -> bool:
        """Whether a send failed since its session broke; over some lanes another error is there first."""
        if isinstance(error, PeerLostError):
            return True
        if not isinstance(error, TransportError | TransferAbortedError | DeadlineExceededError):
            return False
        until_s = time.monotonic() + _NOTICE_S
        while not (broke := way.num_deaths > num_deaths or way.lost_s > started_s or not way.peer.connected):
            if time.monotonic() > until_s:
                break
            await asyncio.sleep(0.05)
        return broke

    def _lost(self, way: _Way, request: int, error: HurrayError, *, died: bool) -> None:
        """A send failed with its session: it waits for another one, but not for ever."""
        now = way.lost_s = time.monotonic()
        if way.lost_since_s is None:
            way.lost_since_s = now
        if died and not way.down:  # it is back already
            self._repeat([request])
        elif way.down or now - way.lost_since_s < self._work.config.run.timeout_s:
            way.parked.append(request)
            asyncio.get_running_loop().call_later(_PAUSE_S, self._knock, way)
        else:
            parked, way.parked = way.parked, []
            for each in (request, *parked):
                self._fail(each, error)

    def _knock(self, way: _Way) -> None:
        """Tries a lost worker with one request; those that wait with it follow when that one is through."""
        if way.parked and not way.down:
            self._repeat([way.parked.pop(0)])

    def _unpark(self, way: _Way) -> None:
        parked, way.parked = way.parked, []
        self._repeat(parked)

    def _fail(self, request: int, error: HurrayError) -> None:
        self._failures.append(Failure(request, type(error).__name__, str(error)))

    def hear(self, message: Killed | Restarted) -> None:
        """Requests for a worker that was killed wait for its return; what its death took with it is sent again."""
        way = self._ways[message.worker]
        if isinstance(message, Killed):
            way.num_deaths += 1
            way.down = True
            return
        way.down, way.lost_since_s = False, None
        lost = way.delivered - message.finished
        way.delivered -= lost
        self._unpark(way)
        self._repeat(sorted(lost))

    def _repeat(self, requests: list[int]) -> None:
        self._again.extend(requests)
        self._sent_again.extend(requests)
        self._changed.set()

    async def tell(self, link: Link) -> None:
        """Reports until it is cancelled."""
        while True:
            await asyncio.sleep(NEWS_S)
            link.send(self.news())

    def news(self) -> PrefillNews:
        """What is new since the last call."""
        news = PrefillNews(tuple(self._deliveries), tuple(self._failures), tuple(self._sent_again))
        self._deliveries, self._failures, self._sent_again = [], [], []
        return news
