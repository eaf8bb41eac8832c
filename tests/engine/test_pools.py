"""Pools that come and go while senders are connected, and pools that only some of them may know of."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection
from typing import Any

import pytest

from hurray_rdma import (
    Arrival,
    AuthenticationError,
    ConfigError,
    Engine,
    GeometryError,
    PagePool,
    PeerLostError,
    TransferAbortedError,
)
from hurray_rdma.control import Granted, PoolAnnounced, PoolRemoved, PoolsAnnounced, Refused, StaleGenerationError
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Context, default_context
from tests.engine.hands import Hand, shaken
from tests.hazards.scenes import (
    LANES,
    PATHS,
    SPEC,
    connected,
    counts,
    digest,
    eventually,
    fill,
    make_pool,
    run,
    settled,
    snapshot_of,
)


def pools_receiver(connection: Connection, lane: str, settings: dict[str, Any]) -> None:
    """Does as it is told: ("add", name, num_pages, token), ("remove", name), ("release",), ("counts",), ("end",).

    Holds what arrives until told to release it; reports each arrival as (group, key, digest or error's name).
    """

    async def job() -> None:
        kind, options = LANES[lane]
        default_context(options)
        pools = {"": make_pool(SPEC, 16, kind)}
        held: list[Arrival] = []

        async def one(arrival: Arrival) -> None:
            held.append(arrival)
            try:
                connection.send((arrival.group, arrival.key, digest(await arrival.snapshot())))
            except Exception as error:
                connection.send((arrival.group, arrival.key, type(error).__name__))

        async with Engine(pools[""], listen="127.0.0.1:0", timeout_s=10, **settings) as engine:
            connection.send(engine.address)

            async def take() -> None:
                async with asyncio.TaskGroup() as group:
                    async for arrival in engine.arrivals():
                        group.create_task(one(arrival))

            taking = asyncio.create_task(take())
            while (order := await asyncio.to_thread(connection.recv))[0] != "end":
                match order:
                    case ("add", name, num_pages, token):
                        pools[name] = make_pool(SPEC, num_pages, kind)
                        engine.add_pool(pools[name], name=name, token=token)
                    case ("remove", name):
                        engine.remove_pool(name)
                    case ("release",):
                        for arrival in held:
                            arrival.release()
                        held.clear()
                    case ("counts",):
                        connection.send({name: counts(pool) for name, pool in pools.items()})
                    case ("waiting",):
                        connection.send(engine.stats().num_waiting)
        await taking
        for pool in pools.values():
            pool.close()

    asyncio.run(job())


async def hear(child: Child) -> Any:
    return await asyncio.to_thread(child.receive)


async def until(child: Child, order: str, wanted: Any) -> None:
    async def is_so() -> bool:
        child.send((order,))
        return bool(await hear(child) == wanted)

    await eventually(is_so)


@pytest.mark.parametrize("lane", LANES)
def test_a_pool_added_after_the_handshake_is_used_without_connecting_anew(lane: str) -> None:
    async def job() -> None:
        kind, options = LANES[lane]
        with make_pool(SPEC, 16, kind, Context(options)) as pool, Child(pools_receiver, lane, {}) as child:
            fill(pool, 1)
            sent = [snapshot_of(pool, [n, 9]) for n in range(3)]
            async with Engine(pool, timeout_s=10) as engine, engine.connect(await hear(child)) as peer:
                with pytest.raises(GeometryError, match=r"pools \['default'\]"):
                    await peer.send(sent[0], pool="late")
                child.send(("add", "late", 8, None))
                child.send(("add", "later", 4, None))
                for name in ("late", "later"):
                    await eventually(lambda: name in pool_names(peer))  # noqa: B023 - called at once
                for n, name in enumerate((None, "late", "later")):
                    stats = await peer.send(sent[n], key="same", pool=name)
                    assert (stats.path, stats.num_pages) == (PATHS[lane], 2)
                    assert await hear(child) == (name, "same", digest(sent[n]))
                assert engine.stats().num_connects == 1
                child.send(("counts",))
                assert await hear(child) == {"": (14, 2, 0), "late": (6, 2, 0), "later": (2, 2, 0)}
                child.send(("release",))
                child.send(("counts",))
                assert await hear(child) == {"": (16, 0, 0), "late": (8, 0, 0), "later": (4, 0, 0)}
            child.send(("end",))

    run(job())


def pool_names(peer: Any) -> set[str]:
    return set(peer.pools)


def test_the_same_key_into_two_pools_at_once_is_two_arrivals() -> None:
    async def job() -> None:
        with make_pool(SPEC, 16) as pool, Child(pools_receiver, "mapped", {}) as child:
            fill(pool, 2)
            sent = {None: snapshot_of(pool, [1, 2]), "other": snapshot_of(pool, [3, 4, 5])}
            address = await hear(child)
            child.send(("add", "other", 8, None))
            async with connected(pool, address, timeout_s=10) as peer:
                await eventually(lambda: "other" in pool_names(peer))
                async with (
                    peer.begin(sent[None], key="twin") as first,
                    peer.begin(sent["other"], key="twin", pool="other") as second,
                ):
                    for layer in range(2):
                        await second.send_layer(layer)
                        await first.send_layer(1 - layer)
                arrived = {group: rest for group, *rest in [await hear(child) for _ in range(2)]}
                assert arrived == {group: ["twin", digest(snapshot)] for group, snapshot in sent.items()}
                child.send(("release",))
                await until(child, "counts", {"": (16, 0, 0), "other": (8, 0, 0)})
            child.send(("end",))

    run(job())


@pytest.mark.parametrize("lane", LANES)
def test_a_pool_that_is_removed_ends_what_is_under_way_and_what_waits(lane: str) -> None:
    async def job() -> None:
        kind, options = LANES[lane]
        with make_pool(SPEC, 16, kind, Context(options)) as pool, Child(pools_receiver, lane, {}) as child:
            fill(pool, 3)
            address = await hear(child)
            child.send(("add", "brief", 6, None))
            async with connected(pool, address, timeout_s=10) as peer:
                await eventually(lambda: "brief" in pool_names(peer))
                complete = snapshot_of(pool, [1, 2])
                await peer.send(complete, key="complete", pool="brief")
                assert await hear(child) == ("brief", "complete", digest(complete))
                with pytest.raises(TransferAbortedError, match="the pool was removed"):
                    async with peer.begin(snapshot_of(pool, [3, 4]), key="under way", pool="brief") as transfer:
                        await transfer.send_layer(0)
                        waiting = asyncio.create_task(
                            peer.send(snapshot_of(pool, [5, 6, 7]), key="waiting", pool="brief")
                        )
                        await until(child, "waiting", 1)
                        child.send(("remove", "brief"))
                        await transfer._acknowledged
                with pytest.raises(TransferAbortedError, match="the pool was removed"):
                    await waiting
                assert await hear(child) == ("brief", "under way", "TransferAbortedError")
                with pytest.raises(GeometryError, match="has pools") as caught:
                    await peer.send(complete, pool="brief")
                assert (caught.value.field, caught.value.value) == ("pool", "brief")
                # What was complete stays until it is released.
                await until(child, "counts", {"": (16, 0, 0), "brief": (4, 2, 0)})
                child.send(("release",))
                await until(child, "counts", {"": (16, 0, 0), "brief": (6, 0, 0)})
                child.send(("add", "brief", 8, None))
                await eventually(lambda: "brief" in pool_names(peer))
                await peer.send(complete, key="anew", pool="brief")
                assert await hear(child) == ("brief", "anew", digest(complete))
                child.send(("remove", ""))
                child.send(("remove", "brief"))
                await eventually(lambda: not pool_names(peer))
                with pytest.raises(PeerLostError, match="no pool"):
                    await peer.send(complete)
            child.send(("end",))

    run(job())


async def pools_heard(hand: Hand) -> dict[int, str]:
    """The pools that the peer has told of, by number."""
    await hand.expect(PoolsAnnounced)
    return {pool_id: pool.name for pool_id, pool in hand.session.pools.items()}


async def refused(hand: Hand, snapshot: Any, pool_id: int) -> None:
    transfer_id = hand.offer(snapshot, pool_id=pool_id)
    event = await hand.expect(Refused)
    assert (event.transfer_id, type(event.error)) == (transfer_id, StaleGenerationError)
    assert "there is no such pool" in str(event.error)


async def taken(hand: Hand, engine: Engine, snapshot: Any, pool_id: int) -> None:
    transfer_id = hand.offer(snapshot, pool_id=pool_id)
    assert (await hand.expect(Granted)).transfer_id == transfer_id
    (await anext(engine.arrivals())).abort()


@pytest.mark.parametrize("token", ["the engine's", None], ids=["engine with a token", "engine without one"])
def test_a_pool_with_a_token_of_its_own_is_a_secret_of_those_who_have_it(token: str | None) -> None:
    async def job() -> None:
        with (
            PagePool.allocate(SPEC, 16) as own,
            PagePool.allocate(SPEC, 16) as mine,
            PagePool.allocate(SPEC, 16) as his,
        ):
            snapshot = snapshot_of(own, [1, 2])
            async with Engine(own, listen="127.0.0.1:0", token=token) as engine:
                engine.add_pool(mine, name="mine", token="my secret")
                async with (
                    shaken(engine.address, token=token) as other,
                    shaken(engine.address, token="my secret") as me,
                ):
                    assert await pools_heard(other) == {0: ""}
                    assert await pools_heard(me) == {1: "mine"}
                    for pool_id in (1, 2, 7):
                        await refused(other, snapshot, pool_id)
                    for pool_id in (0, 2, 7):
                        await refused(me, snapshot, pool_id)
                    await taken(other, engine, snapshot, 0)
                    await taken(me, engine, snapshot, 1)

                    engine.add_pool(his, name="his", token="his secret")
                    async with shaken(engine.address, token="his secret") as him:
                        assert await pools_heard(him) == {2: "his"}
                        await refused(him, snapshot, 1)
                        await refused(me, snapshot, 2)
                        engine.remove_pool("mine")
                        assert (await me.expect(PoolRemoved)).pool_id == 1
                        await refused(me, snapshot, 1)
                        await taken(him, engine, snapshot, 2)
                        for hand in (other, him):
                            seen = [hand.events.get_nowait() for _ in range(hand.events.qsize())]
                            assert not [event for event in seen if isinstance(event, PoolRemoved | PoolAnnounced)]

                        # A later pool of that name, with another token, is nothing to who had the old one.
                        engine.add_pool(mine, name="mine", token="a new secret")
                        await refused(me, snapshot, 3)
                        assert 3 not in me.session.pools
                        async with shaken(engine.address, token="a new secret") as newcomer:
                            assert await pools_heard(newcomer) == {3: "mine"}
                            await taken(newcomer, engine, snapshot, 3)
                for wrong in ("my secret", "wrong"):
                    with pytest.raises(AuthenticationError):
                        async with shaken(engine.address, token=wrong):
                            pass
                for pool in (own, mine, his):
                    await settled(pool, 16, 0, 0)

    run(job())


def test_a_tenant_sends_into_its_own_pool_and_no_other() -> None:
    async def job() -> None:
        with make_pool(SPEC, 16) as pool, Child(pools_receiver, "mapped", {"token": "engine"}) as child:
            fill(pool, 4)
            sent = snapshot_of(pool, [7, 1])
            address = await hear(child)
            child.send(("add", "tenant", 8, "tenant's"))
            await until(child, "counts", {"": (16, 0, 0), "tenant": (8, 0, 0)})
            async with connected(pool, address, token="tenant's", timeout_s=10) as peer:
                assert pool_names(peer) == {"tenant"}
                assert (await peer.send(sent, key="any")).path == "mapped"
                assert await hear(child) == ("tenant", "any", digest(sent))
                with pytest.raises(GeometryError, match="tenant"):
                    await peer.send(sent, pool="")
            async with connected(pool, address, token="engine", timeout_s=10) as peer:
                assert pool_names(peer) == {""}
                with pytest.raises(GeometryError):
                    await peer.send(sent, pool="tenant")
            child.send(("release",))
            await until(child, "counts", {"": (16, 0, 0), "tenant": (8, 0, 0)})
            child.send(("end",))

    run(job())


def test_names_and_tokens_are_checked_before_anything_is_added() -> None:
    async def job() -> None:
        with (
            PagePool.allocate(SPEC, 4) as own,
            PagePool.allocate(SPEC, 4) as other,
            PagePool.allocate(SPEC, 4) as third,
        ):
            async with Engine(own, listen="127.0.0.1:0", token="engine's") as engine:
                engine.add_pool(other, name="other", token="other's")
                with pytest.raises(ConfigError, match="receives into it already"):
                    engine.add_pool(other, name="again", token="again's")
                for name in ("", "other", "default", "x" * 257):
                    with pytest.raises(ConfigError, match="name"):
                        engine.add_pool(other, name=name)
                for token in ("", "engine's", "other's"):
                    with pytest.raises(ConfigError, match="token") as caught:
                        engine.add_pool(other, name="new", token=token)
                    assert not token or token not in str(caught.value)
                with (
                    PagePool.allocate(SPEC, 4, context=Context()) as foreign,
                    pytest.raises(ConfigError, match="context"),
                ):
                    engine.add_pool(foreign, name="new")
                for call in (engine.remove_pool, engine.reregister):
                    with pytest.raises(ConfigError, match="other"):
                        result = call("new")
                        if result is not None:
                            await result
                assert set(engine.stats().pools) == {"default", "other"}
                async with shaken(engine.address, token="engine's") as hand:
                    assert await pools_heard(hand) == {0: ""}
                    engine.add_pool(third, name="x" * 256)
                    assert (await hand.expect(PoolAnnounced)).pool.name == "x" * 256
            async with Engine(own) as engine:
                for attempt in (
                    lambda: engine.add_pool(other, name="new"),
                    lambda: engine.remove_pool(""),
                ):
                    with pytest.raises(ConfigError, match="does not listen"):
                        attempt()
                with pytest.raises(ConfigError, match="does not listen"):
                    await engine.reregister()

    run(job())
