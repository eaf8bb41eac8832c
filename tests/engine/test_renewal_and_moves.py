"""Pools registered anew while this process itself moves pages into them or out of them; and peers that missed it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from hurray_rdma import CacheSpec, DeadlineExceededError, Engine, PagePool
from hurray_rdma.cache.gate import MemoryGate
from hurray_rdma.control import MessageType
from hurray_rdma.testing.chaos import Action, ChaosProxy, Direction, Rule
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Endpoint, RemoteMemory
from tests.engine.test_renewal import hear, sender
from tests.hazards.scenes import (
    SPEC,
    connected,
    counts,
    digest,
    eventually,
    fill,
    make_pool,
    receiver,
    run,
    settled,
    snapshot_of,
)

LARGE = CacheSpec(num_layers=4, num_heads=8, head_dim=128, page_size=32, dtype="bfloat16")  # pages of 64 KiB
NUM_LARGE = 256  # 128 MiB in all


def words(pool: PagePool, index: int) -> np.ndarray:
    """Elements of every page of the index-th tensor, uint16 ``[num_pages, elements]``."""
    pages: np.ndarray = pool.pages(*pool.spec.tensors[index])
    return pages.view(np.uint16).reshape(pool.num_pages, -1)


def publisher(connection: Connection) -> None:
    """Publishes "all": every element of the i-th tensor is 7 + i."""

    async def job() -> None:
        with make_pool(LARGE, NUM_LARGE) as pool:
            for index in range(len(LARGE.tensors)):
                words(pool, index)[...] = 7 + index
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=20) as engine:
                engine.publish("all", snapshot_of(pool, list(range(NUM_LARGE))))
                connection.send(engine.address)
                await asyncio.to_thread(connection.recv)

    asyncio.run(job())


def test_a_fetch_into_a_pool_that_is_registered_anew_meanwhile_has_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that went on into the old memory were lost, and the fetch was complete."""

    async def job() -> None:
        begun, read_rows = threading.Event(), RemoteMemory.read_rows

        def tell(memory: RemoteMemory, *args: Any, **rows: Any) -> Any:
            begun.set()
            return read_rows(memory, *args, **rows)

        monkeypatch.setattr(RemoteMemory, "read_rows", tell)
        with make_pool(LARGE, NUM_LARGE) as pool, Child(publisher) as child:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=20) as engine:
                async with engine.connect(await hear(child)) as peer:
                    assert peer.path == "mapped"
                    for attempt in range(2):
                        for index in range(len(LARGE.tensors)):
                            words(pool, index)[...] = 0
                        begun.clear()
                        fetching = asyncio.create_task(peer.fetch("all"))
                        await asyncio.to_thread(begun.wait, 10)
                        assert not fetching.done(), "too fast for this test: it says nothing"
                        await engine.reregister()
                        with await fetching as fetched:
                            assert sorted(fetched.block_table.tolist()) == list(range(NUM_LARGE))
                            for index in range(len(LARGE.tensors)):
                                wrong = (words(pool, index) != 7 + index).any(axis=1).sum()
                                assert wrong == 0, f"{wrong} of {NUM_LARGE} pages of tensor {index}"
                        assert engine.stats().generations == {"default": 2 + attempt}
                child.send("end")
            assert counts(pool) == (NUM_LARGE, 0, 0)

    run(job())


class HeldPosts:
    """`Endpoint.post` that begins, its memory in use, and goes on when it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_go = threading.Event(), threading.Event()
        post = Endpoint.post

        def held(endpoint: Endpoint, *args: Any, **plan: Any) -> Any:
            self.begun.set()
            assert self.may_go.wait(10)
            return post(endpoint, *args, **plan)

        monkeypatch.setattr(Endpoint, "post", held)


def test_a_renewal_waits_for_the_sends_of_its_own_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the caller's arrays it broke off half-way: memory that UCX reads cannot be deregistered."""

    async def job() -> None:
        with make_pool(SPEC, 8, "caller's") as pool, Child(receiver, {"lane": "cma"}) as child:
            fill(pool, 1)
            sent = snapshot_of(pool, [1, 3, 6])
            address = await hear(child)
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine, engine.connect(address) as peer:
                before = [region.remote().rkey for region in pool.regions]
                posts = HeldPosts(monkeypatch)
                sending = asyncio.create_task(peer.send(sent, key="sent"))
                await asyncio.to_thread(posts.begun.wait, 10)
                renewing = asyncio.create_task(engine.reregister())
                await eventually(lambda: pool.gate.renewing)
                await asyncio.sleep(0.05)
                assert not renewing.done()
                assert engine.stats().generations == {"default": 1}
                assert [region.remote().rkey for region in pool.regions] == before, "it renewed some regions"
                posts.may_go.set()
                await renewing
                await sending
                assert engine.stats().generations == {"default": 2}
                assert await hear(child) == ("sent", digest(sent))
                await peer.send(sent, key="after")
                assert await hear(child) == ("after", digest(sent))
            child.send("end")
            await settled(pool, 8, 0, 0)

    run(job())


async def renew(engine: Engine) -> None:
    assert isinstance(engine.pool, PagePool)
    await asyncio.to_thread(engine.pool.renew, timeout_s=0.1)


async def reregister(engine: Engine) -> None:
    await engine.reregister(timeout_s=0.1)


@pytest.mark.parametrize("wait", [renew, reregister])
def test_a_renewal_that_waits_for_a_move_waits_no_longer_than_it_was_told(
    wait: Callable[[Engine], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def job() -> None:
        with make_pool(SPEC, 8, "caller's") as pool, Child(receiver, {"lane": "cma"}) as child:
            fill(pool, 1)
            lease = pool.allocator.lease(3)
            sent = snapshot_of(pool, lease.page_ids.tolist())
            address = await hear(child)
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=20) as engine, engine.connect(address) as peer:
                posts = HeldPosts(monkeypatch)
                sending = asyncio.create_task(peer.send(sent, key="sent"))
                await asyncio.to_thread(posts.begun.wait, 10)
                try:
                    with pytest.raises(DeadlineExceededError, match="moves"):
                        async with asyncio.timeout(15):  # the engine's own is longer
                            await wait(engine)
                    assert engine.stats().generations == {"default": 1}
                finally:
                    posts.may_go.set()
                await sending
                assert await hear(child) == ("sent", digest(sent))
                await engine.reregister(timeout_s=5)
                async with connected(pool, engine.address, timeout_s=10) as itself:  # grants go on
                    await itself.send(sent, key="itself")
                    arrival = await anext(engine.arrivals())
                    assert digest(await arrival.snapshot()) == digest(sent)
                    arrival.release()
            child.send("end")
            lease.release()
            await settled(pool, 8, 0, 0)

    run(job())


def test_a_sender_that_missed_an_announcement_connects_anew_instead_of_asking_again_and_again() -> None:
    """It offered to the old generation for ever: each refusal was stale, and no announcement was to come."""

    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine:
                host, port = engine.address.rsplit(":", 1)
                async with ChaosProxy(host, int(port)) as proxy:
                    with Child(sender, proxy.address, {}) as child:
                        child.send(("send", "first", [1, 2]))
                        expected = await hear(child)
                        arrival = await anext(engine.arrivals())
                        assert (arrival.key, digest(await arrival.snapshot())) == expected
                        arrival.release()

                        lost = proxy.arm(Rule(action=Action.DROP, kind=MessageType.POOL, direction=Direction.TO_CLIENT))
                        refused = Rule(
                            action=Action.STALL, kind=MessageType.ERROR, direction=Direction.TO_CLIENT, nth=1000
                        )
                        proxy.arm(refused)  # which only counts them
                        await engine.reregister()
                        await eventually(lambda: lost.fired)
                        child.send(("send", "second", [3, 4, 5]))
                        expected = await hear(child)
                        arrival = await anext(engine.arrivals())
                        assert (arrival.key, digest(await arrival.snapshot())) == expected
                        arrival.release()
                        assert expected[0] == "second"
                        assert refused.num_seen < 6, "two of the offer, and some of pages to be granted ahead"
                        assert proxy.num_accepted == 2

                        child.send(("end",))
                        stats = await hear(child)
                        assert (stats.num_reconnects, stats.send.num_transfers, stats.send.failures) == (1, 2, {})
                await settled(pool, 8, 0, 0)

    run(job())


class RenewedMeanwhile:
    """As soon as a copy on the event loop has begun, a renewal of the pool does, in a thread: before the first byte."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pool: PagePool) -> None:
        self.num_copies = 0
        try_moving, renewal = MemoryGate.try_moving, pool.gate.renewal
        self._threads: list[threading.Thread] = []

        def renew() -> None:
            with renewal(timeout_s=10):
                pass

        def try_then_renew(gate: MemoryGate) -> AbstractContextManager[None] | None:
            moving = try_moving(gate)
            if gate is pool.gate and moving is not None:
                self.num_copies += 1
                self._threads.append(threading.Thread(target=renew))
                self._threads[-1].start()
                until = time.monotonic() + 10
                while not gate.renewing:
                    assert time.monotonic() < until
                    time.sleep(0)
            return moving

        monkeypatch.setattr(MemoryGate, "try_moving", try_then_renew)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.parametrize("ahead_pages", [0, 16])
def test_no_push_lets_the_loop_wait_for_a_renewal_that_begins_meanwhile(
    ahead_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def job() -> None:
        with make_pool(SPEC, 64) as mine, make_pool(SPEC, 8) as theirs:
            fill(theirs, 1)
            sent = snapshot_of(theirs, [1, 3, 6])
            async with (
                Engine(mine, listen="127.0.0.1:0", timeout_s=10, ahead_pages=ahead_pages) as engine,
                Engine(theirs, timeout_s=2) as sender,
                sender.connect(engine.address) as peer,
            ):
                await peer.send(sent, key="first")
                if ahead_pages:
                    await eventually(lambda: mine.allocator.accounts().leased > 3)  # granted ahead
                renewed = RenewedMeanwhile(monkeypatch, theirs)
                for n in range(4):
                    await peer.send(sent, key=str(n))  # which would end with DeadlineExceededError
                    renewed.join()
                assert renewed.num_copies == 4
                async for arrival in engine.arrivals():
                    assert digest(await arrival.snapshot()) == digest(sent)
                    arrival.release()
                    if arrival.key == "3":
                        break
            await settled(mine, 64, 0, 0)

    run(job())


def test_no_pull_lets_the_loop_wait_for_a_renewal_that_begins_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async def job() -> None:
        with make_pool(SPEC, 8) as mine, make_pool(SPEC, 8) as theirs:
            fill(theirs, 1)
            sent = snapshot_of(theirs, [1, 3, 6])
            async with (
                Engine(theirs, listen="127.0.0.1:0", timeout_s=10) as source,
                Engine(mine, timeout_s=2) as reader,
                reader.connect(source.address) as peer,
            ):
                source.publish("a", sent)
                renewed = RenewedMeanwhile(monkeypatch, mine)
                with await peer.fetch("a") as fetched:
                    assert digest(fetched) == digest(sent)
                assert renewed.num_copies == 1
                renewed.join()
            assert counts(mine) == (8, 0, 0)

    run(job())
