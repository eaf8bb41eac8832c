"""What an arrival says of pages that were here already, and of when."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from hurray_rdma import Engine
from hurray_rdma.cache import snapshot_keys
from tests.hazards.scenes import SPEC, make_pool, snapshot_of


def test_entries_of_pages_that_do_not_travel_are_marked() -> None:
    async def job() -> None:
        with make_pool(SPEC, 8) as source, make_pool(SPEC, 8) as pool:
            async with (
                Engine(pool, listen="127.0.0.1:0", timeout_s=10) as receiver,
                Engine(source, timeout_s=10) as sender,
                sender.connect(receiver.address) as peer,
            ):
                arrivals = receiver.arrivals()
                one, two = snapshot_of(source, [5, 1]), snapshot_of(source, [5, 1, 3], [5, 7])
                prefix = np.arange(8)
                started = time.monotonic()
                stats = await peer.send(one, page_keys=snapshot_keys(one, [prefix]))
                first = await anext(arrivals)
                await first.snapshot()
                assert stats.num_resident == 0
                assert first.resident.tolist() == [False, False]

                tokens = [np.arange(12), np.array([0, 1, 2, 3, 9, 9, 9, 9])]
                stats = await peer.send(two, page_keys=snapshot_keys(two, tokens))
                second = await anext(arrivals)
                await second.snapshot()
                assert stats.num_resident == 2
                assert second.resident.tolist() == [True, True, False, True, False]
                assert second.block_table[:2].tolist() == first.block_table.tolist()
                assert first.completed_s is not None
                assert second.completed_s is not None
                times = [started, first.granted_s, first.completed_s, second.granted_s, second.completed_s]
                assert times == sorted(times)
                assert second.completed_s <= time.monotonic()
                for arrival in (first, second):
                    arrival.release()
                assert second.resident.tolist() == [True, True, False, True, False]

    asyncio.run(job())


def test_an_arrival_that_is_not_complete_has_no_such_time() -> None:
    async def job() -> None:
        with make_pool(SPEC, 8) as source, make_pool(SPEC, 8) as pool:
            async with (
                Engine(pool, listen="127.0.0.1:0", timeout_s=10) as receiver,
                Engine(source, timeout_s=10) as sender,
                sender.connect(receiver.address) as peer,
            ):
                async with peer.begin(snapshot_of(source, [1])) as transfer:
                    arrival = await anext(receiver.arrivals())
                    assert arrival.completed_s is None
                    assert not arrival.resident.any()
                    await transfer.send_rest()
                await arrival.snapshot()
                assert arrival.completed_s is not None
                arrival.release()

    asyncio.run(job())
