"""An application hears that offers wait for pages, and how many the first of them lacks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from hurray_rdma import ConfigError, Engine, PagePool, Peer, Shortage, sync
from tests.hazards.scenes import SPEC, counts, eventually, fill, make_pool, run, settled, snapshot_of


@contextlib.asynccontextmanager
async def full_pool() -> AsyncIterator[tuple[PagePool, Engine, PagePool, Peer]]:
    """Of eight pages, and a sender to it."""
    with make_pool(SPEC, 8) as pool, make_pool(SPEC, 8) as source:
        fill(source, 4)
        async with (
            Engine(pool, listen="127.0.0.1:0", timeout_s=20) as engine,
            Engine(source, timeout_s=20) as sender,
            sender.connect(engine.address) as peer,
        ):
            yield pool, engine, source, peer


def test_who_releases_what_is_missing_serves_the_offer() -> None:
    async def job() -> None:
        async with full_pool() as (pool, engine, source, peer):
            kept = [pool.allocator.lease(1) for _ in range(8)]
            shortages = engine.shortages()
            first = asyncio.create_task(peer.send(snapshot_of(source, [0, 1, 2, 3, 4])))
            assert await anext(shortages) == Shortage(group=None, num_missing=5, num_waiting=1)
            again = asyncio.create_task(anext(shortages))
            second = asyncio.create_task(peer.send(snapshot_of(source, [5, 6])))
            await eventually(lambda: engine.stats().num_waiting == 2)
            assert not again.done(), "nothing has changed for the first one"
            for _ in range(2):
                kept.pop().release()
            assert await again == Shortage(group=None, num_missing=3, num_waiting=2)
            assert engine.num_missing() == engine.num_missing(pool) == 3
            for _ in range(4):
                kept.pop().release()
            await first
            assert await anext(shortages) == Shortage(group=None, num_missing=1, num_waiting=1), "for the second one"
            kept.pop().release()
            await second
            assert engine.num_missing() == 0
            for lease in kept:
                lease.release()
            arrivals = engine.arrivals()
            for _ in range(2):
                (await anext(arrivals)).release()
            await settled(pool, 8, 0, 0)

    run(job())


def test_nothing_is_told_of_an_offer_that_has_gone() -> None:
    async def job() -> None:
        async with full_pool() as (pool, engine, source, peer):
            with pool.allocator.lease(8):
                sending = asyncio.create_task(peer.send(snapshot_of(source, [0, 1])))
                await eventually(lambda: engine.stats().num_waiting == 1)
                sending.cancel()
                await eventually(lambda: engine.stats().num_waiting == 0)
                following = asyncio.create_task(anext(engine.shortages()))
                sending = asyncio.create_task(peer.send(snapshot_of(source, [0, 1, 2])))
                assert (await following).num_missing == 3
            await sending
            (await anext(engine.arrivals())).release()

    run(job())


def test_a_cache_that_evicts_serves_any_number_of_senders() -> None:
    """All pages are kept until somebody wants them: without shortages each send would wait for ever."""

    async def job() -> None:
        async with full_pool() as (pool, engine, source, peer):
            kept = []

            def evict() -> None:
                while kept and engine.num_missing():
                    kept.pop(0).release()

            async def keep() -> None:
                async for arrival in engine.arrivals():
                    await arrival.snapshot()
                    kept.append(arrival)
                    evict()  # one that waits may have been told of when there was nothing to give back

            async def listen() -> None:
                async for _ in engine.shortages():
                    evict()

            tasks = [asyncio.create_task(keep()), asyncio.create_task(listen())]
            for round_ in range(4):
                tables = [[(3 * n + round_) % 8, (3 * n + round_ + 1) % 8, (3 * n + round_ + 2) % 8] for n in range(6)]
                await asyncio.gather(*(peer.send(snapshot_of(source, table)) for table in tables))
            assert counts(pool)[0] < 3, "no more was given back than was wanted"
            await engine.close()
            await asyncio.gather(*tasks)  # both end with it
            for arrival in kept:
                arrival.release()
            assert counts(pool) == (8, 0, 0)

    run(job())


def test_who_does_not_listen_waits_for_nobody() -> None:
    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            async with Engine(pool) as engine:
                with pytest.raises(ConfigError, match="does not listen"):
                    await anext(engine.shortages())

    run(job())


def test_without_asyncio() -> None:
    with make_pool(SPEC, 8) as pool, make_pool(SPEC, 8) as source:
        fill(source, 4)
        with (
            sync.Engine(pool, listen="127.0.0.1:0", timeout_s=20) as engine,
            sync.Engine(source, timeout_s=20) as sender,
            sender.connect(engine.address) as peer,
        ):
            lease = pool.allocator.lease(6)
            sending = peer.send_async(snapshot_of(source, [0, 1, 2, 3]))
            shortages = engine.shortages()
            assert next(shortages) == Shortage(group=None, num_missing=2, num_waiting=1)
            assert engine.num_missing() == 2
            lease.release()
            assert sending.result(timeout=20).num_pages == 4
            next(engine.arrivals()).release()
            engine.close()
            assert list(shortages) == []
