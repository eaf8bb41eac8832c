"""A decode worker of a replay: takes requests, compares every byte, "computes" the output, keeps prefixes.

What a request must hold follows from its number in the trace: nothing about content comes from the sender.
"""

from __future__ import annotations

import asyncio
import time

from hurray_rdma.cache import PagePool
from hurray_rdma.demo.child import Link
from hurray_rdma.demo.content import MismatchError
from hurray_rdma.demo.decode import compare
from hurray_rdma.demo.messages import Listening
from hurray_rdma.engine import Arrival, Engine
from hurray_rdma.errors import HurrayError
from hurray_rdma.replay.kept import KeptPages
from hurray_rdma.replay.messages import Begin, DecodeNews, Ended, Finish, Sample, Service
from hurray_rdma.replay.work import Work
from hurray_rdma.transport import default_context

__all__ = ["NEWS_S", "decode"]

NEWS_S = 0.1
"""Between two reports to the supervisor, seconds."""


async def decode(link: Link, work: Work, listen: str) -> None:
    """Life of a decode worker.

    Args:
        link: to the supervisor.
        work: the replay.
        listen: ``host:port``, port 0 for any.
    """
    config = work.config
    with PagePool.allocate(
        work.spec, num_pages=config.workers.decode_pages, context=default_context(work.ucx_options)
    ) as pool:
        async with Engine(pool, listen=listen, timeout_s=config.run.timeout_s) as engine:
            link.send(Listening(engine.address))
            await link.receive(Begin)
            desk = _Desk(work, engine, pool)
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(desk.take(tasks)), tasks.create_task(desk.tell(link))]
                await link.receive(Finish)
                for task in running:
                    task.cancel()
            link.send(desk.news())
            desk.kept.clear()
            stats = engine.stats()
    link.send(Ended(stats, lane="", num_evicted=desk.kept.num_evicted))


class _Desk:
    """What one decode worker has under way."""

    def __init__(self, work: Work, engine: Engine, pool: PagePool) -> None:
        self._work = work
        self._engine = engine
        self._pool = pool
        self.kept = KeptPages(pool.allocator, headroom=work.headroom_pages)
        self._services: list[Service] = []
        self._num_failed = 0

    async def take(self, tasks: asyncio.TaskGroup) -> None:
        """Takes arrivals until it is cancelled."""
        async for arrival in self._engine.arrivals():
            seen_s = time.monotonic()
            request = int(arrival.key)
            page_ids = arrival.block_table.tolist()
            if self._work.trace.ragged[request]:
                del page_ids[-1]  # no other request begins with it
            self.kept.use(page_ids)
            self.kept.make_room()
            free = self._pool.allocator.accounts().free
            tasks.create_task(self._serve(arrival, request, page_ids, seen_s, free))

    async def _serve(self, arrival: Arrival, request: int, page_ids: list[int], seen_s: float, free: int) -> None:
        try:
            snapshot = await arrival.snapshot()
        except HurrayError:
            self._num_failed += 1
            self.kept.forget(page_ids)
            return
        batch = self._work.batch_of(request)
        try:
            nbytes = await asyncio.to_thread(compare, snapshot, batch, self._work.content)
        except MismatchError as error:
            error.add_note(f"in the request of line {self._work.trace.lines[request]}")
            raise
        await asyncio.sleep(self._work.decode_s(request))
        released_s = time.monotonic()
        self.kept.done(page_ids)
        arrival.release()
        self.kept.make_room()
        assert arrival.completed_s is not None
        self._services.append(
            Service(
                request=request,
                granted_s=arrival.granted_s,
                seen_s=seen_s,
                completed_s=arrival.completed_s,
                released_s=released_s,
                free_when_seen=free,
                free_when_released=self._pool.allocator.accounts().free,
                resident=arrival.resident,
                compared_nbytes=nbytes,
            )
        )

    async def tell(self, link: Link) -> None:
        """Reports until it is cancelled."""
        while True:
            await asyncio.sleep(NEWS_S)
            link.send(self.news())

    def news(self) -> DecodeNews:
        """What is new since the last call."""
        stats = self._engine.stats()
        accounts = stats.pools["default"]
        services, self._services = tuple(self._services), []
        sample = Sample(
            at_s=time.monotonic(),
            free=accounts.free,
            kept=len(self.kept),
            in_use=accounts.num_pages - accounts.free - len(self.kept),
            num_waiting=stats.num_waiting,
        )
        return DecodeNews(services, self._num_failed, sample)
