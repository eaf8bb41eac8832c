"""Pages of a snapshot that is being sent stay its own until the end, whoever lets go of them meanwhile."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from hurray_rdma import (
    DeadlineExceededError,
    Engine,
    GeometryError,
    PagePool,
    Peer,
    PeerLostError,
    PoolExhaustedError,
    Snapshot,
    TransferAbortedError,
)
from hurray_rdma.cache import Lease
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Context
from tests.hazards.scenes import (
    LANES,
    SPEC,
    connected,
    counts,
    digest,
    fill,
    make_pool,
    raw,
    receiver,
    run,
    settled,
    snapshot_of,
    stopped,
)

application: dict[PagePool, Lease] = {}
"""What the application holds of each pool."""


@asynccontextmanager
async def leased(lane: str, **settings: object) -> AsyncIterator[tuple[PagePool, Snapshot, Peer, Child]]:
    """A sender's pool of eight pages with four leased; the application lets go of them when it has offered them."""
    kind, options = LANES[lane]
    with make_pool(SPEC, 8, kind, Context(options)) as pool, Child(receiver, {"lane": lane, **settings}) as child:
        fill(pool, 1)
        address = await asyncio.to_thread(child.receive)
        lease = application[pool] = pool.allocator.lease(4)
        sent = snapshot_of(pool, lease.page_ids.tolist())
        async with connected(pool, address, timeout_s=10) as peer:
            yield pool, sent, peer, child
        application.pop(pool).release()
        await settled(pool, 8, 0, 0)


def evict(pool: PagePool, sent: Snapshot) -> None:
    """What an engine under pressure does: gives the pages up, takes all that are free, and writes over them."""
    application[pool].release()
    with pytest.raises(PoolExhaustedError):
        pool.allocator.lease(5)
    with pool.allocator.lease(4) as others:
        assert not set(others.page_ids.tolist()) & set(sent.block_table.tolist())
        for tensor in SPEC.tensors:
            raw(pool, *tensor)[others.page_ids] = 0xEE
    assert counts(pool) == (4, 4, 0)


@pytest.mark.parametrize("lane", LANES)
def test_pages_evicted_between_offer_and_send_arrive_whole(lane: str) -> None:
    async def job() -> None:
        async with leased(lane) as (pool, sent, peer, child):
            expected = digest(sent)
            async with peer.begin(sent, key="evicted") as transfer:
                evict(pool, sent)
                await transfer.send_layer(0)
                assert counts(pool) == (4, 4, 0)
                await transfer.send_layer(1)
            await settled(pool, 8, 0, 0)
            assert await asyncio.to_thread(child.receive) == ("evicted", expected)
            child.send("end")

    run(job())


def test_an_abort_gives_evicted_pages_back_at_once() -> None:
    async def job() -> None:
        async with leased("mapped") as (pool, sent, peer, child):
            with pytest.raises(TransferAbortedError, match="enough"):
                async with peer.begin(sent, key="aborted") as transfer:
                    evict(pool, sent)
                    await transfer.send_layer(0)
                    await transfer.abort("enough")
                    assert counts(pool) == (8, 0, 0)
                    await transfer.send_layer(1)
            assert await asyncio.to_thread(child.receive) == ("aborted", "TransferAbortedError")
            child.send("end")

    run(job())


def test_a_cancelled_send_gives_evicted_pages_back() -> None:
    async def job() -> None:
        async with leased("mapped") as (pool, sent, peer, child):
            reached = asyncio.Event()

            async def send() -> None:
                async with peer.begin(sent, key="cancelled") as transfer:
                    await transfer.send_layer(0)
                    reached.set()
                    await asyncio.Event().wait()

            sending = asyncio.create_task(send())
            await reached.wait()
            evict(pool, sent)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            assert counts(pool) == (8, 0, 0)
            assert (await asyncio.to_thread(child.receive))[0] == "cancelled"
            child.send("end")

    run(job())


def test_a_refused_offer_gives_source_pages_back_at_once() -> None:
    """Refused for its geometry, for its size, for want of time: none strands pages of the sender."""

    async def job() -> None:
        async with leased("mapped", num_pages=3) as (pool, sent, peer, child):
            with pytest.raises(PoolExhaustedError, match="never fits"):
                await peer.send(sent)
            assert counts(pool) == (4, 4, 0)
            with pytest.raises(GeometryError, match="'other'"):
                await peer.send(sent, pool="other")
            assert counts(pool) == (4, 4, 0)
            small = snapshot_of(pool, sent.block_table[:2].tolist())
            child.signal(signal.SIGSTOP)
            await stopped(child.pid)
            with pytest.raises(DeadlineExceededError):
                await peer.send(small, timeout_s=0.2)
            child.signal(signal.SIGCONT)
            assert pool.allocator.accounts().num_leases == 1
            application[pool].release()
            assert counts(pool) == (8, 0, 0)
            child.send("end")

    run(job())


@pytest.mark.parametrize("lane", LANES)
def test_a_lost_receiver_gives_source_pages_back(lane: str) -> None:
    async def job() -> None:
        async with leased(lane) as (pool, sent, peer, child):
            with pytest.raises(PeerLostError):
                async with peer.begin(sent) as transfer:
                    await transfer.send_layer(0)
                    evict(pool, sent)
                    child.signal(signal.SIGKILL)
                    await asyncio.to_thread(child.join)
                    await transfer._acknowledged
            await settled(pool, 8, 0, 0)

    run(job())


def test_two_sends_of_one_snapshot_hold_its_pages_until_the_second_ends() -> None:
    async def job() -> None:
        async with leased("mapped") as (pool, sent, peer, child):
            async with peer.begin(sent, key="second") as second:
                async with peer.begin(sent, key="first") as first:
                    evict(pool, sent)
                    await first.send_rest()
                assert counts(pool) == (4, 4, 0)
                await second.send_rest()
            assert counts(pool) == (8, 0, 0)
            received = dict([await asyncio.to_thread(child.receive) for _ in range(2)])
            assert received == dict.fromkeys(("first", "second"), digest(sent))
            child.send("end")

    run(job())


def test_pages_that_the_application_keeps_account_of_itself_are_left_alone() -> None:
    async def job() -> None:
        with make_pool(SPEC, 8) as pool, make_pool(SPEC, 8) as target:
            async with (
                Engine(target, listen="127.0.0.1:0") as engine,
                connected(pool, engine.address, timeout_s=10) as peer,
            ):
                async with peer.begin(snapshot_of(pool, [1, 2]), key="own") as transfer:
                    assert counts(pool) == (8, 0, 0)
                    lease = pool.allocator.lease(8)
                    assert np.isin([1, 2], lease.page_ids).all()
                    await transfer.send_rest()
                assert counts(pool) == (0, 8, 0)
                lease.release()

    run(job())
