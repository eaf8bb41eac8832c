"""One side may not ptrace the other, as in most containers: cma cannot work, and another lane must, loudly."""

from __future__ import annotations

import asyncio
import logging
from multiprocessing.connection import Connection

import pytest

from hurray_rdma import Engine
from hurray_rdma.testing.processes import Child
from tests.hazards.scenes import (
    SPEC,
    connected,
    counts,
    digest,
    drop_ptrace,
    fill,
    make_pool,
    run,
    settled,
    snapshot_of,
)


def sender_without_ptrace(connection: Connection, address: str) -> None:
    if not drop_ptrace():
        connection.send(None)
        return
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hurray_rdma").addHandler(handler)

    async def run() -> None:
        with make_pool(SPEC, 16) as pool:
            fill(pool, 1)
            sent = snapshot_of(pool, [3, 1, 4], [3, 5])
            async with connected(pool, address, timeout_s=8) as peer:
                stats = await peer.send(sent, key="first")
                connection.send((digest(sent), stats.lane, stats.path, warnings))

    asyncio.run(run())


def test_sender_that_may_not_ptrace_takes_another_lane_and_names_it() -> None:
    async def job() -> None:
        with make_pool(SPEC, 16, "caller's") as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine:
                with Child(sender_without_ptrace, engine.address) as child:
                    said = await asyncio.to_thread(child.receive)
                    if said is None:
                        pytest.skip("no CAP_SYS_PTRACE to take away")
                    arrival = await anext(engine.arrivals())
                    expected, lane, path, warnings = said
                    assert digest(await arrival.snapshot()) == expected
                    arrival.release()
                    await settled(pool, 16, 0, 0)
                    assert (lane, path) == ("tcp", "stream")
                    assert any("allow ptrace" in warning for warning in warnings)
            assert counts(pool) == (16, 0, 0)

    run(job())
