"""Readers of published snapshots: however long they ask for, the source's pages come back."""

from __future__ import annotations

import time

import pytest

from hurray_rdma import Engine
from hurray_rdma.control import AbortRequested, Fetch, PoolsAnnounced, PublishedHeard
from tests.engine.hands import shaken
from tests.hazards.scenes import SPEC, counts, make_pool, run, settled, snapshot_of

DAYS_S = 7 * 86400.0


@pytest.mark.parametrize(("lease_s", "timeout_s"), [(0.4, 0.2), (0.2, 0.4)])
def test_a_reader_that_asks_for_days_has_what_the_engine_allows(lease_s: float, timeout_s: float) -> None:
    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            async with (
                Engine(pool, listen="127.0.0.1:0", lease_s=lease_s, timeout_s=timeout_s) as engine,
                shaken(engine.address) as hand,
            ):
                await hand.expect(PoolsAnnounced)
                with pool.allocator.lease(3) as lease:
                    engine.publish("short", snapshot_of(pool, lease.page_ids.tolist()), lease_s=60)
                asked = hand.do("fetch", Fetch(key="short", deadline_s=DAYS_S), timeout_s=DAYS_S)
                started = time.monotonic()
                heard = await hand.expect(PublishedHeard)
                assert (heard.transfer_id, heard.published.lease_s) == (asked, 0.4)
                engine.unpublish("short")
                assert counts(pool) == (5, 3, 0), "it is being read"
                ended = await hand.expect(AbortRequested)
                assert ended.transfer_id == asked
                assert "the reader took longer" in str(ended.error)
                await settled(pool, 8, 0, 0)
                assert 0.3 < time.monotonic() - started < 3
                assert engine.stats().serve.failures == {"LeaseExpiredError": 1}

    run(job())


def test_a_reader_that_asks_for_less_has_less() -> None:
    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            async with Engine(pool, listen="127.0.0.1:0", lease_s=30) as engine, shaken(engine.address) as hand:
                await hand.expect(PoolsAnnounced)
                with pool.allocator.lease(3) as lease:
                    engine.publish("short", snapshot_of(pool, lease.page_ids.tolist()))
                hand.do("fetch", Fetch(key="short", deadline_s=0.2), timeout_s=10)
                assert (await hand.expect(PublishedHeard)).published.lease_s == 0.2
                engine.unpublish("short")
                await hand.expect(AbortRequested)
                await settled(pool, 8, 0, 0)

    run(job())
