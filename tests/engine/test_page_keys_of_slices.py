"""Page keys: what a sender of some heads may not spare, and what an offer that must wait for pages costs meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import pytest

from hurray_rdma import CacheSpec, Engine, Snapshot
from hurray_rdma.cache import snapshot_keys
from hurray_rdma.engine.offer_queue import OfferQueue
from hurray_rdma.testing.processes import Child
from tests.hazards.scenes import SPEC as WHOLE
from tests.hazards.scenes import connected, counts, digest, eventually, fill, make_pool, run, settled, snapshot_of

SPEC = CacheSpec(num_layers=2, num_heads=4, head_dim=8, page_size=8, dtype="bfloat16", total_heads=4)
LOW, HIGH = (replace(SPEC, num_heads=2, head_offset=offset) for offset in (0, 2))
NUM_TOKENS = 24


def slices(connection: Connection, address: str) -> None:
    """Two engines with half of the heads each. Told ("send", key, low, high) both send the same tokens with the same
    page keys, all elements ``low`` and ``high``; answers how many pages each has written and was spared."""

    async def job() -> None:
        with make_pool(LOW, 8) as low, make_pool(HIGH, 8) as high:
            async with connected(low, address, timeout_s=10) as one, connected(high, address, timeout_s=10) as other:
                while (order := await asyncio.to_thread(connection.recv)) != "end":
                    _, key, *values = order
                    sending = []
                    for pool, peer, value in ((low, one, values[0]), (high, other, values[1])):
                        for tensor in pool.spec.tensors:
                            pool.pages(*tensor)[...] = value
                        snapshot = Snapshot.from_block_tables(pool, [[1, 2, 3]], seq_lens=[NUM_TOKENS])
                        keys = snapshot_keys(snapshot, [np.arange(NUM_TOKENS)])
                        sending.append(peer.send(snapshot, key=key, page_keys=keys))
                    connection.send([(stats.num_pages, stats.num_resident) for stats in await asyncio.gather(*sending)])

    asyncio.run(job())


def heads(snapshot: Snapshot) -> set[tuple[float, ...]]:
    """What the heads hold, over all tokens of all tensors."""
    found: set[tuple[float, ...]] = set()
    for role, layer in SPEC.tensors:
        tokens = snapshot.tokens(role, layer=layer, seq=0).astype(np.float32)
        assert tokens.shape == (NUM_TOKENS, 4, 8)
        found |= {tuple(row) for row in np.unique(tokens.min(axis=2), axis=0).tolist()}
        found |= {tuple(row) for row in np.unique(tokens.max(axis=2), axis=0).tolist()}
    return found


def test_a_sender_that_joins_writes_no_page_that_an_earlier_arrival_holds() -> None:
    """The first sender of the second arrival was spared its pages; the second wrote its heads into those of the first
    arrival, which the application still had."""

    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine:
                with Child(slices, engine.address) as child:
                    arrivals = engine.arrivals()
                    child.send(("send", "one", 1, 2))
                    assert await asyncio.to_thread(child.receive) == [(3, 0), (3, 0)]
                    first = await anext(arrivals)
                    one = await first.snapshot()
                    assert heads(one) == {(1, 1, 2, 2)}

                    child.send(("send", "two", 3, 9))
                    assert await asyncio.to_thread(child.receive) == [(3, 0), (3, 0)]
                    second = await anext(arrivals)
                    two = await second.snapshot()
                    assert heads(one) == {(1, 1, 2, 2)}, "pages of an arrival were written after it was complete"
                    assert heads(two) == {(3, 3, 9, 9)}
                    assert not set(one.block_table.tolist()) & set(two.block_table.tolist())
                    first.release()
                    second.release()
                    child.send("end")
                await settled(pool, 8, 0, 0)

    run(job())


def keyed_sender(connection: Connection, address: str) -> None:
    """Sends three pages with page keys; reports what was sent, and when it is there."""

    async def job() -> None:
        with make_pool(WHOLE, 16) as pool:
            fill(pool, 1)
            sent = snapshot_of(pool, [1, 2, 3])
            keys = snapshot_keys(sent, [np.arange(3 * WHOLE.page_size)])
            async with connected(pool, address, timeout_s=15) as peer:
                connection.send(digest(sent))
                await peer.send(sent, key="waits", page_keys=keys)
                connection.send("there")

    asyncio.run(job())


def test_an_offer_with_page_keys_that_waits_for_pages_waits_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for resident pages, and giving them back, woke the queue that looked again: for ever."""

    async def job() -> None:
        count, grant_in_order = 0, OfferQueue.grant_in_order

        def counted(queue: OfferQueue) -> None:
            nonlocal count
            count += 1
            grant_in_order(queue)

        monkeypatch.setattr(OfferQueue, "grant_in_order", counted)
        with make_pool(WHOLE, 4) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine:
                held = [pool.allocator.lease(1) for _ in range(4)]
                with Child(keyed_sender, engine.address) as child:
                    expected = await asyncio.to_thread(child.receive)
                    await eventually(lambda: engine.stats().num_waiting == 1)
                    count = 0
                    await asyncio.sleep(0.5)
                    assert count < 10
                    held.pop().release()  # not enough yet: looked at once, and no more
                    await asyncio.sleep(0.2)
                    assert 1 <= count < 10
                    held.pop().release()
                    held.pop().release()
                    arrival = await anext(engine.arrivals())
                    assert digest(await arrival.snapshot()) == expected
                    assert await asyncio.to_thread(child.receive) == "there"
                    arrival.release()
                held.pop().release()
                assert counts(pool) == (4, 0, 0)

    run(job())
