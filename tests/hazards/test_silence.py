"""A receiver that is stopped says nothing: whoever sends to it is told so in time, of whom, and what came before."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from hurray_rdma import DeadlineExceededError, PagePool, Peer
from hurray_rdma.control import channel
from hurray_rdma.testing.processes import Child
from tests.hazards.scenes import SPEC, connected, fill, make_pool, receiver, run, settled, snapshot_of, stopped


@asynccontextmanager
async def sender_to_a_stopped_one(*, peer_timeout_s: float) -> AsyncIterator[tuple[Peer, PagePool]]:
    """A peer that took a transfer and was stopped; it goes on at the end, and all pages are back then."""
    with make_pool(SPEC, 8) as pool, Child(receiver, {"lane": "mapped"}) as child:
        fill(pool, 1)
        address = await asyncio.to_thread(child.receive)
        async with connected(pool, address, timeout_s=20, peer_timeout_s=peer_timeout_s) as peer:
            await peer.send(snapshot_of(pool, [1, 2]), key="before")
            await asyncio.to_thread(child.receive)
            child.signal(signal.SIGSTOP)
            await stopped(child.pid)
            try:
                yield peer, pool
            finally:
                child.signal(signal.SIGCONT)
            await peer.send(snapshot_of(pool, [1, 2]), key="after")
        await settled(pool, 8, 0, 0)
        child.send("end")


def test_time_that_ends_before_the_session_is_lost() -> None:
    async def job() -> None:
        async with sender_to_a_stopped_one(peer_timeout_s=6.0) as (peer, pool):
            with pytest.raises(DeadlineExceededError) as caught:
                await peer.send(snapshot_of(pool, [1, 2]), key="stuck", timeout_s=3.0)
            assert peer.address in str(caught.value)
            assert "Nothing was heard from it for " in str(caught.value)
            assert "stuck or stopped" in str(caught.value)

    run(job())


def test_time_that_ends_while_it_connects_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes the connection for a process that is stopped; last words to that one are not waited for."""
    monkeypatch.setattr(channel, "_LINGER_S", 600.0)

    async def job() -> None:
        async with sender_to_a_stopped_one(peer_timeout_s=0.6) as (peer, pool):
            with pytest.raises(DeadlineExceededError) as caught:
                await peer.send(snapshot_of(pool, [1, 2]), key="stuck", timeout_s=2.5)
            words = ["did not introduce itself within", peer.address, "the session before was lost: nothing was heard"]
            words += ["stuck or stopped"]
            assert [word for word in words if word not in str(caught.value)] == []

    run(job())
