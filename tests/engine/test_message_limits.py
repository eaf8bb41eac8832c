"""Peers that accept only short messages: what is too long for one of them harms nobody else, and leaves no lease."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from hurray_rdma import CacheSpec, Engine, PagePool, Placement
from hurray_rdma.control import (
    Fetch,
    PeerBusyError,
    PoolAnnounced,
    PoolsAnnounced,
    PublishedHeard,
    Refused,
    SessionClosed,
)
from hurray_rdma.control.framing import encode_parts
from hurray_rdma.engine import offer_queue
from hurray_rdma.engine.compat import announcement
from tests.engine.hands import shaken
from tests.hazards.scenes import SPEC, connected, counts, make_pool, run, settled, snapshot_of

SHORT = 64 * 1024
"""The least that a session may accept, bytes."""


def announced_nbytes(pool: PagePool) -> int:
    nbytes, _ = encode_parts(announcement(pool, pool_id=1, generation=1, name="more"), 1)
    return int(nbytes)


def test_a_published_snapshot_too_long_for_its_reader_is_refused_and_leaves_no_lease() -> None:
    async def job() -> None:
        with make_pool(SPEC, 512) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine:
                with pool.allocator.lease(300) as many, pool.allocator.lease(3) as few:
                    long, short = (snapshot_of(pool, lease.page_ids.tolist()) for lease in (many, few))
                    engine.publish("long", long, page_keys=np.zeros((300, 256), np.uint8))
                    engine.publish("short", short)
                    async with shaken(engine.address, max_message_nbytes=SHORT) as hand:
                        await hand.expect(PoolsAnnounced)
                        for _ in range(3):
                            asked = hand.do("fetch", Fetch(key="long", deadline_s=10.0), timeout_s=10)
                            assert (await hand.expect(Refused)).transfer_id == asked
                        assert pool.allocator.accounts().num_leases == 4, "two leases, two publications"
                        asked = hand.do("fetch", Fetch(key="short", deadline_s=10.0), timeout_s=10)
                        heard = await hand.expect(PublishedHeard)  # the session has borne it
                        assert (heard.transfer_id, heard.published.block_table.tolist()) == (
                            asked,
                            short.block_table.tolist(),
                        )
                    engine.unpublish("long")
                    engine.unpublish("short")
                await settled(pool, 512, 0, 0)
                assert pool.allocator.accounts().num_leases == 0
                assert sum(engine.stats().serve.failures.values()) == 4  # three refused, one who hung up

    run(job())


def test_tables_of_offers_that_wait_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def job() -> None:
        with make_pool(SPEC, 512) as pool, make_pool(SPEC, 512) as source:
            small, large = snapshot_of(source, [1]), snapshot_of(source, list(range(400)))
            # What is made of the tables is kept beside them: 2 more numbers a page, and 2 a sequence.
            bound = sum(len(each.encode_descriptors()) + 12 * len(each.block_table) + 64 for each in (small, large))
            monkeypatch.setattr(offer_queue, "_MAX_WAITING_NBYTES", bound)
            async with (
                Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine,
                connected(source, engine.address, timeout_s=10) as peer,
            ):
                with pool.allocator.lease(512):
                    sending = [asyncio.create_task(peer.send(each)) for each in (small, large)]
                    while engine.stats().num_waiting < 2:  # noqa: ASYNC110 - the sends' own deadline ends it
                        await asyncio.sleep(0.005)
                    with pytest.raises(PeerBusyError, match=f"{bound} bytes"):
                        await peer.send(large)
                await asyncio.gather(*sending)
                for _ in range(2):
                    arrival = await anext(engine.arrivals())
                    await arrival.snapshot()
                    arrival.release()
                await peer.send(large)
                (await anext(engine.arrivals())).release()
                await settled(pool, 512, 0, 0)

    run(job())


def test_tables_of_offers_that_nobody_expects_yet_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = 8, *SPEC.page_shape
    arrays = {role: [np.zeros(shape, SPEC.storage_dtype) for _ in range(SPEC.num_layers)] for role in SPEC.roles}

    async def job() -> None:
        with PagePool.from_arrays(SPEC, arrays, external=True) as pool, make_pool(SPEC, 8) as source:
            sent = snapshot_of(source, [1])
            bound = len(sent.encode_descriptors()) + 64
            monkeypatch.setattr(offer_queue, "_MAX_WAITING_NBYTES", bound)
            async with (
                Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine,
                connected(source, engine.address, timeout_s=10) as peer,
            ):
                engine.expect("another", Placement(pool, [0]))
                sending = asyncio.create_task(peer.send(sent, key="first"))
                while engine.stats().num_waiting < 1:  # noqa: ASYNC110 - the send's own deadline ends it
                    await asyncio.sleep(0.005)
                with pytest.raises(PeerBusyError, match=f"{bound} bytes"):
                    await peer.send(sent, key="second")
                sending.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await sending

    run(job())


def test_a_peer_that_cannot_be_told_of_a_pool_is_cut_off_alone() -> None:
    long = CacheSpec(num_layers=3000, num_heads=1, head_dim=8, page_size=4, dtype="bfloat16")

    async def job() -> None:
        with make_pool(SPEC, 4) as base, PagePool.allocate(long, 1) as more:
            assert SHORT < announced_nbytes(more) < 1024 * 1024
            async with (
                Engine(base, listen="127.0.0.1:0", timeout_s=10) as engine,
                shaken(engine.address) as before,
                shaken(engine.address, max_message_nbytes=SHORT) as small,
                shaken(engine.address) as after,
            ):
                for hand in (before, small, after):
                    await hand.expect(PoolsAnnounced)
                    hand.events = asyncio.Queue()
                engine.add_pool(more, name="more")
                await small.expect(SessionClosed)
                for hand in (before, after):
                    pool = (await hand.expect(PoolAnnounced)).pool
                    assert (pool.name, pool.pool_id, pool.generation, pool.num_pages) == ("more", 1, 1, 1)
                # Who comes again hears of all pools, or is cut off again.
                async with shaken(engine.address, max_message_nbytes=SHORT) as again:
                    await again.expect(SessionClosed)
                await engine.reregister("more")
                for hand in (before, after):
                    pool = (await hand.expect(PoolAnnounced)).pool
                    assert (pool.name, pool.generation) == ("more", 2)
                assert engine.stats().generations == {"default": 1, "more": 2}
                assert engine.stats().num_sessions == 2
                engine.remove_pool("more")
                async with shaken(engine.address, max_message_nbytes=SHORT) as again:
                    await again.expect(PoolsAnnounced)
                assert counts(base) == (4, 0, 0)

    run(job())
