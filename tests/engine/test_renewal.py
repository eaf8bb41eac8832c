"""Pools registered anew under living senders: nothing is lost, nobody connects anew, and what is void stays void."""

from __future__ import annotations

import asyncio
import threading
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from hurray_rdma import (
    DeadlineExceededError,
    Engine,
    PagePool,
    PeerLostError,
    RegistrationError,
    TransferAbortedError,
)
from hurray_rdma.control import Granted, PoolAnnounced, PoolRemoved, PoolsAnnounced, Refused, StaleGenerationError
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Context, Region, RemoteRegion, StopFlag, default_context
from tests.engine.hands import shaken
from tests.hazards.scenes import (
    SPEC,
    connected,
    counts,
    digest,
    eventually,
    fill,
    make_pool,
    raw,
    run,
    settled,
    snapshot_of,
)

KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "mapped": ("engine-owned", {}),
    "cma": ("caller's", {}),
    "tcp": ("caller's", {"TLS": "tcp"}),  # what UCX allocates there is no shared memory, and cannot be replaced
}


def sender(connection: Connection, address: str, options: dict[str, str]) -> None:
    """Does as it is told: ("send", key, page IDs), ("begin", key, page IDs), ("layer", index), ("finish",), ("end",).

    Answers each with a digest of what it sent, or the name of the error; then, at the end, with its stats.
    """

    async def job() -> None:
        default_context(options)
        with make_pool(SPEC, 32) as pool:
            fill(pool, 1)
            async with Engine(pool, timeout_s=15) as engine, engine.connect(address) as peer:
                transfer = peer.begin(snapshot_of(pool, [0]))
                sending: set[asyncio.Task[None]] = set()

                async def send(key: str, page_ids: list[int]) -> None:
                    sent = snapshot_of(pool, page_ids)
                    try:
                        await peer.send(sent, key=key)
                        connection.send((key, digest(sent)))
                    except Exception as error:
                        connection.send((key, type(error).__name__))

                while (order := await asyncio.to_thread(connection.recv))[0] != "end":
                    match order:
                        case ("send", key, page_ids):
                            sending.add(asyncio.create_task(send(key, page_ids)))
                        case ("begin", key, page_ids):
                            sent = snapshot_of(pool, page_ids)
                            transfer = peer.begin(sent, key=key)
                            await transfer.__aenter__()
                            connection.send((key, digest(sent)))
                        case ("layer", index):
                            await transfer.send_layer(index)
                        case ("finish",):
                            await transfer.__aexit__(None, None, None)
                            connection.send("finished")
                await asyncio.gather(*sending)
                connection.send(engine.stats())

    asyncio.run(job())


async def hear(child: Child) -> Any:
    return await asyncio.to_thread(child.receive)


@pytest.mark.parametrize("kind", KINDS)
def test_a_renewal_waits_for_what_is_under_way_and_offers_wait_for_it(kind: str) -> None:
    how, options = KINDS[kind]

    async def job() -> None:
        with make_pool(SPEC, 8, how, Context(options)) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine:
                with Child(sender, engine.address, options) as child:
                    arrivals = engine.arrivals()
                    child.send(("begin", "first", [1, 3, 5]))
                    first = await hear(child)
                    child.send(("layer", 1))
                    arrival = await anext(arrivals)
                    await arrival.wait_layer(1)
                    renewing = asyncio.create_task(engine.reregister())
                    child.send(("send", "second", [2, 4]))
                    await eventually(lambda: engine.stats().num_waiting == 1)
                    await asyncio.sleep(0.05)
                    assert not renewing.done()
                    assert engine.stats().generations == {"default": 1}
                    child.send(("layer", 0))
                    child.send(("finish",))
                    assert await hear(child) == "finished"
                    await renewing
                    assert engine.stats().generations == {"default": 2}
                    assert ("first", digest(await arrival.snapshot())) == first
                    other = await anext(arrivals)
                    assert ("second", digest(await other.snapshot())) == await hear(child)
                    assert ("first", digest(await arrival.snapshot())) == first
                    arrival.release()
                    other.release()
                    child.send(("end",))
                    stats = await hear(child)
                    assert (stats.num_connects, stats.send.failures) == (1, {})
                assert counts(pool) == (8, 0, 0)

    run(job())


@pytest.mark.parametrize("kind", KINDS)
def test_offers_that_wait_for_pages_are_made_again_to_the_new_generation(kind: str) -> None:
    how, options = KINDS[kind]

    async def job() -> None:
        with make_pool(SPEC, 8, how, Context(options)) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine:
                with Child(sender, engine.address, options) as child:
                    held = pool.allocator.lease(8)
                    keys = {str(n) for n in range(4)}
                    for key in keys:
                        child.send(("send", key, [int(key), 9, 11]))
                    for generation in (2, 3):
                        await eventually(lambda: engine.stats().num_waiting == 4)
                        await engine.reregister()
                        assert engine.stats().generations == {"default": generation}
                    await eventually(lambda: engine.stats().num_waiting == 4)
                    held.release()
                    received = {}
                    for _ in keys:
                        arrival = await anext(engine.arrivals())
                        received[arrival.key] = digest(await arrival.snapshot())
                        arrival.release()
                    assert dict([await hear(child) for _ in keys]) == received
                    child.send(("end",))
                    stats = await hear(child)
                    assert (stats.num_connects, stats.send.num_transfers, stats.send.failures) == (1, 4, {})
                assert counts(pool) == (8, 0, 0)
                assert engine.stats().receive.num_transfers == 4

    run(job())


@pytest.mark.parametrize("kind", KINDS)
def test_views_and_contents_survive_any_number_of_renewals(kind: str) -> None:
    how, options = KINDS[kind]

    async def job() -> None:
        with make_pool(SPEC, 16, how, Context(options)) as pool:
            fill(pool, 3)
            views = {tensor: pool.pages(*tensor) for tensor in SPEC.tensors}
            copies = {tensor: view.copy() for tensor, view in views.items()}
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine:
                with Child(sender, engine.address, options) as child:
                    held = []
                    for n in range(5):
                        child.send(("send", str(n), [n, n + 5]))
                        key, sent = await hear(child)
                        arrival = await anext(engine.arrivals())
                        assert (arrival.key, digest(await arrival.snapshot())) == (key, sent)
                        held.append((arrival, sent))
                        await engine.reregister()
                        assert engine.stats().generations == {"default": n + 2}
                        for each, expected in held:
                            assert digest(await each.snapshot()) == expected
                        taken = np.unique(np.concatenate([each.block_table for each, _ in held]))
                        free = np.setdiff1d(np.arange(16), taken)
                        for tensor, view in views.items():
                            assert np.array_equal(view[free].view(np.uint8), copies[tensor][free].view(np.uint8))
                            assert np.shares_memory(view, pool.pages(*tensor))
                    for arrival, _ in held:
                        arrival.release()
                    child.send(("end",))
                    await hear(child)
                assert counts(pool) == (16, 0, 0)

    run(job())


@pytest.mark.parametrize("kind", KINDS)
def test_senders_go_on_while_their_pool_is_renewed_again_and_again(kind: str) -> None:
    how, options = KINDS[kind]

    async def job() -> None:
        with make_pool(SPEC, 4, how, Context(options)) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine:
                with Child(sender, engine.address, options) as child:
                    received: dict[str, str] = {}
                    arrived = asyncio.Event()

                    async def take() -> None:
                        while len(received) < 40:
                            arrival = await anext(engine.arrivals())
                            received[arrival.key] = digest(await arrival.snapshot())
                            arrival.release()
                            arrived.set()

                    taking = asyncio.create_task(take())
                    for n in range(40):
                        child.send(("send", str(n), [n % 32, (n * 7 + 1) % 32]))
                    count = 0
                    while not taking.done():
                        await engine.reregister()
                        count += 1
                        arrived.clear()
                        await asyncio.wait({taking, asyncio.create_task(arrived.wait())}, return_when="FIRST_COMPLETED")
                    await taking
                    assert engine.stats().generations == {"default": count + 1}
                    assert dict([await hear(child) for _ in range(40)]) == received
                    child.send(("end",))
                    stats = await hear(child)
                    assert (stats.num_connects, stats.send.num_transfers, stats.send.failures) == (1, 40, {})
                assert counts(pool) == (4, 0, 0)

    run(job())


def test_a_renewal_that_cannot_begin_in_time_does_nothing() -> None:
    async def job() -> None:
        with make_pool(SPEC, 8) as pool, make_pool(SPEC, 8) as source:
            async with (
                Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine,
                connected(source, engine.address, timeout_s=10) as peer,
            ):
                async with peer.begin(snapshot_of(source, [1]), key="slow") as transfer:
                    arrival = await anext(engine.arrivals())
                    for _ in range(2):
                        with pytest.raises(DeadlineExceededError, match="1 transfers into pool '' are under way"):
                            await engine.reregister(timeout_s=0.1)
                        assert engine.stats().generations == {"default": 1}
                        await peer.send(snapshot_of(source, [2]), key="fast")  # grants go on
                        (await anext(engine.arrivals())).release()
                    cancelled = asyncio.create_task(engine.reregister())
                    await asyncio.sleep(0.05)
                    cancelled.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await cancelled
                    await peer.send(snapshot_of(source, [3]), key="fast")
                    (await anext(engine.arrivals())).release()
                    await transfer.send_rest()
                assert digest(await arrival.snapshot()) == digest(snapshot_of(source, [1]))
                arrival.release()
                await engine.reregister()
                assert engine.stats().generations == {"default": 2}
                await settled(pool, 8, 0, 0)

    run(job())


class SlowRenewal:
    """`PagePool.renew` that begins, and ends when it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.num_at_once = self.most_at_once = 0
        renew = PagePool.renew

        def slowly(pool: PagePool, *, timeout_s: float) -> None:
            self.num_at_once += 1
            self.most_at_once = max(self.most_at_once, self.num_at_once)
            self.begun.set()
            assert self.may_end.wait(10)
            renew(pool, timeout_s=timeout_s)
            self.num_at_once -= 1

        monkeypatch.setattr(PagePool, "renew", slowly)


def test_renewals_of_one_pool_come_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def job() -> None:
        slow = SlowRenewal(monkeypatch)
        with make_pool(SPEC, 8) as pool, make_pool(SPEC, 8) as source:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine:
                renewing = [asyncio.create_task(engine.reregister()) for _ in range(3)]
                await asyncio.to_thread(slow.begun.wait)
                with pytest.raises(DeadlineExceededError):
                    await engine.reregister(timeout_s=0.05)
                slow.may_end.set()
                await asyncio.gather(*renewing)
                assert slow.most_at_once == 1
                assert engine.stats().generations == {"default": 4}
                async with connected(source, engine.address, timeout_s=10) as peer:
                    await peer.send(snapshot_of(source, [5]))
                    arrival = await anext(engine.arrivals())
                    assert digest(await arrival.snapshot()) == digest(snapshot_of(source, [5]))

    run(job())


def test_nobody_is_granted_pages_before_a_renewal_that_was_cancelled_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def job() -> None:
        slow = SlowRenewal(monkeypatch)
        with make_pool(SPEC, 8) as pool, make_pool(SPEC, 8) as source:
            fill(source, 4)
            async with (
                Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine,
                connected(source, engine.address, timeout_s=10) as peer,
            ):
                renewing = asyncio.create_task(engine.reregister())
                await asyncio.to_thread(slow.begun.wait)
                renewing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await renewing
                sent = snapshot_of(source, [1, 2])
                sending = asyncio.create_task(peer.send(sent))
                await eventually(lambda: engine.stats().num_waiting == 1)
                assert engine.stats().num_arriving == 0
                slow.may_end.set()
                await sending
                arrival = await anext(engine.arrivals())
                assert digest(await arrival.snapshot()) == digest(sent)
                assert engine.stats().generations == {"default": 2}

    run(job())


def test_a_pool_removed_while_it_is_renewed_stays_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def job() -> None:
        slow = SlowRenewal(monkeypatch)
        with make_pool(SPEC, 8) as own, make_pool(SPEC, 8) as pool:
            async with Engine(own, listen="127.0.0.1:0", timeout_s=10) as engine:
                engine.add_pool(pool, name="brief")
                async with shaken(engine.address) as hand:
                    await hand.expect(PoolsAnnounced)
                    renewing = asyncio.create_task(engine.reregister("brief"))
                    await asyncio.to_thread(slow.begun.wait)
                    waiting = hand.offer(snapshot_of(own, [1]), pool_id=1)
                    await eventually(lambda: engine.stats().num_waiting == 1)
                    engine.remove_pool("brief")
                    event = await hand.expect(Refused)
                    assert (event.transfer_id, type(event.error)) == (waiting, TransferAbortedError)
                    slow.may_end.set()
                    await renewing
                    hand.offer(snapshot_of(own, [1]), pool_id=1, generation=2)
                    assert isinstance((await hand.expect(Refused)).error, StaleGenerationError)
                    assert set(hand.session.pools) == {0}
                assert set(engine.stats().generations) == {"default"}
                assert counts(pool) == (8, 0, 0)

    run(job())


def test_an_offer_to_an_old_generation_is_refused_by_its_number() -> None:
    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            async with Engine(pool, listen="127.0.0.1:0") as engine, shaken(engine.address) as hand:
                await hand.expect(PoolsAnnounced)
                await engine.reregister()
                announced = await hand.expect(PoolAnnounced)
                assert (announced.pool.pool_id, announced.pool.generation) == (0, 2)
                for generation in (1, 3, 0):
                    hand.offer(snapshot_of(pool, [1]), generation=generation)
                    error = (await hand.expect(Refused)).error
                    assert isinstance(error, StaleGenerationError)
                    assert "generation 2" in str(error)
                hand.offer(snapshot_of(pool, [1]), generation=2)
                assert (await hand.expect(Granted)).grant.generation == 2
                assert not [e for e in hand.events._queue if isinstance(e, PoolRemoved)]  # type: ignore[attr-defined]

    run(job())


def disloyal_sender(connection: Connection, address: str, options: dict[str, str]) -> None:
    """Keeps what it heard of the pool at first, and writes 0xAA over its first page whenever told; says how it went."""

    async def job() -> None:
        context = default_context(options)
        source = context.allocate(SPEC.page_nbytes)
        source.array()[...] = 0xAA
        zero, length = np.zeros(1, np.uint64), np.full(1, SPEC.page_nbytes, np.uint64)
        with make_pool(SPEC, 4) as pool:
            async with Engine(pool, timeout_s=5) as engine, engine.connect(address) as peer:
                inner = peer._connection
                assert inner is not None
                assert inner._endpoint is not None
                ((announced, _),) = inner._pools._announced.values()
                segment = announced.segments[0]
                region = announced.regions[segment.region_index]
                at = np.array([segment.offset_nbytes], np.uint64)
                remote = RemoteRegion(remote_addr=region.remote_addr, nbytes=region.nbytes, rkey=region.rkey)
                kept = inner._endpoint.open_region(remote)
                connection.send(kept.path.value)
                while await asyncio.to_thread(connection.recv) != "end":
                    try:
                        kept.write(
                            source,
                            src_offsets=zero,
                            dst_offsets=at,
                            lengths=length,
                            stop=StopFlag(),
                            timeout_s=1.0,
                        )
                        connection.send("written")
                    except Exception as error:
                        connection.send(type(error).__name__)

    asyncio.run(job())


@pytest.mark.parametrize(
    ("kind", "lands"), [("mapped", False), ("cma", True), ("tcp", True)], ids=["mapped", "cma", "tcp"]
)
def test_what_a_key_of_an_old_generation_is_still_good_for(kind: str, lands: bool) -> None:
    """Nothing, where the memory was replaced. Where bytes go by address, as much as before, while its session lives:
    so pages that such a sender may write stay in quarantine until its process or its own worker is gone."""
    how, options = KINDS[kind]

    async def job() -> None:
        with make_pool(SPEC, 4, how, Context(options)) as pool:
            first = raw(pool, "key", 0)[0]
            async with Engine(pool, listen="127.0.0.1:0") as engine:
                with Child(disloyal_sender, engine.address, options) as child:
                    assert await hear(child) == ("mapped" if kind == "mapped" else "put")
                    for generation in (1, 2, 3):
                        first[...] = 0xEE
                        child.send("write")
                        assert await hear(child) == "written"
                        if generation == 1 or lands:
                            await eventually(lambda: bool((first == 0xAA).all()))
                        else:
                            await asyncio.sleep(0.05)
                            assert (first == 0xEE).all()
                        await engine.reregister()
                    first[...] = 0xEE
                    (link,) = engine._reception._links.values()  # type: ignore[union-attr]
                    link.abort()
                    await eventually(lambda: engine.stats().num_sessions == 0)
                    if kind == "tcp":
                        await eventually(lambda: not engine._reception._endings)  # type: ignore[union-attr]
                        child.send("write")
                        assert await hear(child) != "written"
                    assert (first == 0xEE).all()
                    child.send("end")
                    await asyncio.to_thread(child.join)

    run(job())


def test_a_peer_that_is_lost_in_a_renewal_is_lost_only() -> None:
    """The announcement of the new generation finds no session any more: the others hear of it."""

    async def job() -> None:
        with make_pool(SPEC, 8) as pool, make_pool(SPEC, 8) as source:
            async with (
                Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine,
                connected(source, engine.address, timeout_s=10) as staying,
                Engine(source) as other,
                other.connect(engine.address) as leaving,
            ):
                links = list(engine._reception._links.values())  # type: ignore[union-attr]
                renewing = asyncio.create_task(engine.reregister())
                await asyncio.sleep(0)
                links[1].abort()
                await renewing
                await staying.send(snapshot_of(source, [1]))
                (await anext(engine.arrivals())).release()
                try:
                    await leaving.send(snapshot_of(source, [2]))
                except PeerLostError:
                    await leaving.send(snapshot_of(source, [2]))
                (await anext(engine.arrivals())).release()
                await settled(pool, 8, 0, 0)

    run(job())


def test_a_renewal_that_fails_half_way_has_a_generation_and_brings_no_page_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remake, remade = Context.remake, []

    def at_first_only(context: Context, region: Region) -> Any:
        remade.append(region)
        if len(remade) == 2:
            raise RegistrationError("no memory")
        return remake(context, region)

    renew = Region.renew

    def with_a_new_key(region: Region) -> None:  # as network cards have them
        renew(region)
        region.key_revoked = True

    monkeypatch.setattr(Region, "renew", with_a_new_key)

    async def job() -> None:
        with make_pool(SPEC, 8, "caller's") as pool, make_pool(SPEC, 8) as source:
            fill(source, 8)
            async with (
                Engine(pool, listen="127.0.0.1:0", timeout_s=10, lease_s=0.2) as engine,
                shaken(engine.address, says_quiet=False) as hand,
            ):
                hand.offer(snapshot_of(source, [1, 2, 3]), path="put", lane="rc_mlx5")
                (await anext(engine.arrivals())).abort()
                await settled(pool, 5, 0, 3)  # it is silent, and a network card may still write
                monkeypatch.setattr(Context, "remake", at_first_only)
                await hand.expect(PoolsAnnounced)
                with pytest.raises(RegistrationError, match="no memory"):
                    await engine.reregister()
                assert engine.stats().generations == {"default": 2}
                assert (await hand.expect(PoolAnnounced)).pool.generation == 2
                assert [region.num_renewals for region in pool.regions] == [1, 0, 0, 0]
                assert counts(pool) == (5, 0, 3)
                async with connected(source, engine.address, timeout_s=10) as peer:
                    sent = snapshot_of(source, [4, 5])
                    await peer.send(sent)
                    arrival = await anext(engine.arrivals())
                    assert digest(await arrival.snapshot()) == digest(sent)
                    arrival.release()
                await engine.reregister()
                assert engine.stats().generations == {"default": 3}
                await settled(pool, 8, 0, 0)

    run(job())
