"""Senders of another memory domain that say of their lane what they like: what they leave comes back."""

from __future__ import annotations

import asyncio
import signal
from multiprocessing.connection import Connection

import pytest

from hurray_rdma import Engine, PeerLostError
from hurray_rdma.control import Granted, PoolsAnnounced
from hurray_rdma.engine.processes import process_id
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Context, default_context
from tests.engine.hands import shaken
from tests.hazards.scenes import SPEC, counts, eventually, make_pool, run, settled, snapshot_of
from tests.hazards.test_quarantine import whole_pool_is_usable

TCP = {"TLS": "tcp"}
CLAIMS = [("cma", "put"), ("tcp", "put"), ("sysv", "mapped"), ("of its own", "put")]


def liar(connection: Connection, address: str, lane: str, path: str) -> None:
    """Offers four pages, seen on this host, as one of another memory domain; told to, it hangs up; told again, ends."""

    async def job() -> None:
        default_context(TCP)
        with make_pool(SPEC, 8) as pool:
            async with shaken(address, says_quiet=False, process_id=process_id()) as hand:
                await hand.expect(PoolsAnnounced)
                hand.offer(snapshot_of(pool, [1, 3, 5, 7]), path=path, lane=lane)
                await hand.expect(Granted)
                connection.send("granted")
                await asyncio.to_thread(connection.recv)
                assert hand.channel is not None
                hand.channel.abort()
                connection.send("hung up")
                await asyncio.to_thread(connection.recv)

    asyncio.run(job())


@pytest.mark.parametrize(("lane", "path"), CLAIMS)
def test_pages_of_a_killed_sender_come_back_whatever_it_said(lane: str, path: str) -> None:
    async def job() -> None:
        with make_pool(SPEC, 8, context=Context(TCP)) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10, lease_s=60) as engine:
                with Child(liar, engine.address, lane, path) as child:
                    assert await asyncio.to_thread(child.receive) == "granted"
                    assert counts(pool) == (4, 4, 0)
                    arrival = await anext(engine.arrivals())
                    child.signal(signal.SIGKILL)
                    with pytest.raises(PeerLostError):
                        await arrival.snapshot()
                    await settled(pool, 8, 0, 0)
                    await asyncio.to_thread(child.join)
                stats = engine.stats()
                assert stats.num_quarantined == stats.num_recovered
                await eventually(lambda: not engine._reception._owing)  # type: ignore[union-attr]
                if (lane, path) == ("cma", "put"):
                    await whole_pool_is_usable(pool, engine)

    run(job())


@pytest.mark.parametrize("lane", ["cma", "tcp"])
def test_pages_of_one_that_hangs_up_wait_for_its_end_only_where_it_might_reach_them(lane: str) -> None:
    async def job() -> None:
        with make_pool(SPEC, 8, context=Context(TCP)) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10, lease_s=60) as engine:
                with Child(liar, engine.address, lane, "put") as child:
                    assert await asyncio.to_thread(child.receive) == "granted"
                    child.send("hang up")
                    assert await asyncio.to_thread(child.receive) == "hung up"
                    await eventually(lambda: engine.stats().num_sessions == 0)
                    await eventually(lambda: not engine._reception._endings)  # type: ignore[union-attr]
                    assert counts(pool) == ((4, 0, 4) if lane == "cma" else (8, 0, 0))
                    child.send("end")
                    await settled(pool, 8, 0, 0)
                assert (engine.stats().num_quarantined, engine.stats().num_recovered) == (4, 4)

    run(job())


@pytest.mark.parametrize(("lane", "path"), CLAIMS)
@pytest.mark.parametrize("process", [b"", b"other kernel/4026531836:1:77"], ids=["nameless", "of another kernel"])
def test_pages_of_a_process_that_cannot_be_seen_here_come_back_with_its_connection(
    lane: str, path: str, process: bytes
) -> None:
    """Nobody would tell of its end; but addresses and memory of this host are none of its."""

    async def job() -> None:
        with make_pool(SPEC, 8, context=Context(TCP)) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10, lease_s=60) as engine:
                async with shaken(engine.address, says_quiet=False, process_id=process) as hand:
                    await hand.expect(PoolsAnnounced)
                    hand.offer(snapshot_of(pool, [1, 3, 5, 7]), path=path, lane=lane)
                    await hand.expect(Granted)
                    assert hand.channel is not None
                    hand.channel.abort()
                    await settled(pool, 8, 0, 0)
                assert (engine.stats().num_quarantined, engine.stats().num_recovered) == (4, 4)
                assert not engine._reception._owing  # type: ignore[union-attr]

    run(job())
