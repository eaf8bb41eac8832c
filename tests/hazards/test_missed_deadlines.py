"""A send that runs out of time between two healthy processes costs nobody pages."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from hurray_rdma import CacheSpec, DeadlineExceededError
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Context
from tests.hazards.scenes import LANES, connected, make_pool, receiver, snapshot_of

SPEC = CacheSpec(num_layers=8, num_heads=8, head_dim=128, page_size=16, dtype="bfloat16")
NUM_PAGES = 256


@pytest.mark.parametrize("lane", LANES)
def test_a_missed_deadline_gives_the_pages_back(lane: str) -> None:
    kind, options = LANES[lane]
    context = Context(options)
    settings = {"lane": lane, "spec": SPEC, "num_pages": NUM_PAGES, "lease_s": 0.5}
    with Child(receiver, settings) as child, make_pool(SPEC, NUM_PAGES, kind, context) as pool:
        address = child.receive()
        everything = snapshot_of(pool, np.random.default_rng(1).permutation(NUM_PAGES).tolist())
        one_page = snapshot_of(pool, [1])

        async def counts() -> Any:
            child.send("counts")
            while len(message := await asyncio.to_thread(child.receive)) != 3:
                pass  # what arrived in time
            return message

        async def job() -> None:
            async with asyncio.timeout(25), connected(pool, address, timeout_s=10) as peer:
                for timeout_s in (0.004, 0.008, 0.012, 0.05) if lane == "tcp" else (0.005,):
                    with pytest.raises(DeadlineExceededError):
                        await peer.send(everything, timeout_s=timeout_s)
                    while await counts() != (NUM_PAGES, 0, 0):  # noqa: ASYNC110 - the deadline above ends it
                        await asyncio.sleep(0.02)
                assert (await peer.send(one_page, timeout_s=10)).num_pages == 1

        asyncio.run(job())
        child.send("end")
