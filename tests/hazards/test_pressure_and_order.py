"""Full pools, many senders, many small pages, data that its notification must not overtake, memory used twice."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import pytest

from hurray_rdma import CacheSpec, DeadlineExceededError, Engine, GeometryError, PagePool, RegistrationError, Snapshot
from hurray_rdma.cache import snapshot_keys
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Context, default_context
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
)


def many_senders(connection: Connection, address: str, sizes: list[int]) -> None:
    """Engines of their own, all at once; reports what each sent, then that all were acknowledged."""

    async def job() -> None:
        pools = [make_pool(SPEC, 4) for _ in sizes]
        sent = []
        for seed, (pool, size) in enumerate(zip(pools, sizes, strict=True)):
            fill(pool, seed)
            sent.append(snapshot_of(pool, list(range(size))))
        connection.send({str(n): digest(snapshot) for n, snapshot in enumerate(sent)})

        async def one(index: int) -> None:
            async with connected(pools[index], address, timeout_s=20) as peer:
                await peer.send(sent[index], key=str(index))

        await asyncio.gather(*(one(index) for index in range(len(sizes))))
        connection.send("all acknowledged")
        for pool in pools:
            pool.close()

    asyncio.run(job())


def test_twenty_senders_at_once_share_four_pages() -> None:
    sizes = [n % 4 + 1 for n in range(20)]
    with (
        Child(receiver, {"num_pages": 4, "lease_s": 10}) as target,
        Child(many_senders, target.receive(), sizes) as child,
    ):
        expected = child.receive()
        assert dict(target.receive() for _ in sizes) == expected
        assert child.receive() == "all acknowledged"
        target.send("counts")
        assert target.receive() == (4, 0, 0)
        target.send("end")


def test_offers_are_granted_in_order_and_what_never_gets_pages_says_so() -> None:
    async def job() -> None:
        with make_pool(SPEC, 4) as pool, make_pool(SPEC, 8) as source:
            async with (
                Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine,
                connected(source, engine.address, timeout_s=10) as peer,
            ):
                arrivals = engine.arrivals()
                await peer.send(snapshot_of(source, [0, 1, 2]), key="holder")
                holder = await anext(arrivals)
                # The second fits at once, but must not overtake the first.
                waiting = [
                    asyncio.create_task(peer.send(snapshot_of(source, list(range(size))), key=f"{n}"))
                    for n, size in enumerate((4, 1, 2, 1))
                ]
                await asyncio.sleep(0)  # they make their offers
                with pytest.raises(DeadlineExceededError):
                    await peer.send(snapshot_of(source, [1]), timeout_s=0.2)
                assert not any(task.done() for task in waiting)
                holder.release()
                for expected in "0123":
                    arrival = await anext(arrivals)
                    assert arrival.key == expected
                    await arrival.snapshot()
                    arrival.release()
                await asyncio.gather(*waiting)
                await settled(pool, 4, 0, 0)

    run(job())


def test_sender_that_goes_away_with_offers_waiting_stops_nobody() -> None:
    """Of several waiting offers of one connection the first is the largest: none of the rest may be granted to it."""

    async def job() -> None:
        with make_pool(SPEC, 4) as pool, make_pool(SPEC, 8) as source:
            async with (
                Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine,
                connected(source, engine.address, timeout_s=10) as living,
            ):
                await living.send(snapshot_of(source, [0, 1]))
                held = await anext(engine.arrivals())
                async with connected(source, engine.address, timeout_s=10) as peer:
                    waiting = [
                        asyncio.create_task(peer.send(snapshot_of(source, list(range(size))))) for size in (4, 1, 1, 3)
                    ]
                    await asyncio.sleep(0)  # they make their offers
                    with pytest.raises(DeadlineExceededError):
                        await peer.send(snapshot_of(source, [1]), timeout_s=0.1)  # so the others have been offered
                    connection = peer._connection
                    assert connection is not None
                    assert connection._channel is not None
                    connection._channel.abort()
                results = await asyncio.gather(*waiting, return_exceptions=True)
                assert all(isinstance(result, Exception) for result in results)
                await settled(pool, 2, 2, 0)
                await living.send(snapshot_of(source, [0, 1]), timeout_s=2)
                held.release()
                await settled(pool, 2, 2, 0)

    run(job())


TINY = CacheSpec(num_layers=1, num_heads=2, head_dim=64, page_size=16, dtype="bfloat16")  # pages of 4 KiB


@pytest.mark.parametrize("lane", LANES)
def test_four_thousand_scattered_pages_of_four_kib(lane: str) -> None:
    kind, options = LANES[lane]
    context = Context(options)
    with (
        Child(receiver, {"lane": lane, "spec": TINY, "num_pages": 4096}) as target,
        make_pool(TINY, 4096, kind, context) as pool,
    ):
        address = target.receive()
        fill(pool, 1)
        sent = snapshot_of(pool, np.random.default_rng(2).permutation(4096).tolist())

        async def job() -> None:
            async with connected(pool, address, timeout_s=20) as peer:
                stats = await peer.send(sent, key="many")
                assert stats.num_pages == 4096
                assert stats.lane in {"mapped": ("sysv", "posix"), "cma": ("cma",), "tcp": ("tcp",)}[lane]
                assert not peer.lanes.emulated

        run(job())
        assert target.receive() == ("many", digest(sent))
        target.send("end")


NUM_ROUNDS = 300
MANY_LAYERS = replace(SPEC, num_layers=4, layers=None)


def watcher(connection: Connection, lane: str) -> None:
    """Looks at the first and last byte of every page when its layer is announced; reports how many layers it saw."""

    async def job() -> None:
        kind, options = LANES[lane]
        default_context(options)
        with make_pool(MANY_LAYERS, 16, kind) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine:
                connection.send(engine.address)
                seen = 0
                async for arrival in engine.arrivals():
                    stamp = int(arrival.key) % 251
                    for layer in range(4):
                        await arrival.wait_layer(layer)
                        for role in MANY_LAYERS.roles:
                            pages = raw(pool, role, layer)[arrival.block_table]
                            assert (pages[:, [0, -1]] == stamp + layer).all(), (arrival.key, role, layer)
                        seen += 1
                    await arrival.snapshot()
                    arrival.release()
                    if arrival.key == str(NUM_ROUNDS - 1):
                        connection.send(seen)
                        break
                await asyncio.to_thread(connection.recv)

    asyncio.run(job())


@pytest.mark.parametrize("lane", LANES)
def test_no_notification_overtakes_its_data(lane: str) -> None:
    context = Context(LANES[lane][1])
    with Child(watcher, lane) as child, make_pool(MANY_LAYERS, 32, context=context) as pool:
        address = child.receive()
        sent = snapshot_of(pool, [1, 3, 5, 7, 9], [1, 11])

        async def job() -> None:
            async with connected(pool, address, timeout_s=10) as peer:
                for n in range(NUM_ROUNDS):
                    for role, layer in MANY_LAYERS.tensors:
                        raw(pool, role, layer)[...] = n % 251 + layer
                    async with peer.begin(sent, key=str(n)) as transfer:
                        if n % 2:
                            await transfer.send_rest()
                            continue
                        for layer in range(4):
                            await transfer.send_layer(layer)

        run(job())
        assert child.receive() == NUM_ROUNDS * 4
        child.send("end")


def test_same_memory_for_two_layers_is_refused_by_name() -> None:
    one, other = np.zeros((2, 8, *SPEC.page_shape), SPEC.storage_dtype)
    with pytest.raises(GeometryError, match="same memory") as caught:
        PagePool.from_arrays(SPEC, {"key": [one, one], "value": [other, other]})
    assert "key" in str(caught.value)


def test_overlapping_memory_is_registered_once_and_arrives_right() -> None:
    async def job() -> None:
        whole = np.zeros((2, 24, *SPEC.page_shape), SPEC.storage_dtype)
        arrays = {"key": [whole[0, :16], whole[0, 8:]], "value": [whole[1, :16], whole[1, 8:]]}
        with make_pool(SPEC, 32) as pool, PagePool.from_arrays(SPEC, arrays) as source:
            with PagePool.from_arrays(SPEC, arrays):
                pass  # the same range registered a second time, and let go once
            assert sum(region.nbytes for region in source.regions) == whole.nbytes
            fill(source, 3)
            async with (
                Engine(pool, listen="127.0.0.1:0") as engine,
                connected(source, engine.address, timeout_s=5) as peer,
            ):
                sent = snapshot_of(source, [1, 9, 15])
                await peer.send(sent)
                arrival = await anext(engine.arrivals())
                assert digest(await arrival.snapshot()) == digest(sent)
                arrival.release()
            assert counts(pool) == (32, 0, 0)

    run(job())


def test_registration_that_fails_raises_and_leaves_nothing_registered() -> None:
    with pytest.raises(RegistrationError) as caught:
        PagePool.allocate(SPEC, 2**32 - 1)
    assert caught.value.field == "nbytes"
    arrays = np.zeros((4, 4, *SPEC.page_shape), SPEC.storage_dtype)
    read_only = arrays[3].copy()
    read_only.flags.writeable = False
    for bad in (read_only, arrays[3, :3], arrays[3].astype(np.float64)):
        with pytest.raises((GeometryError, RegistrationError)):
            PagePool.from_arrays(SPEC, {"key": [arrays[0], arrays[1]], "value": [arrays[2], bad]})
    with PagePool.from_arrays(SPEC, {"key": [arrays[0], arrays[1]], "value": [arrays[2], arrays[3]]}) as pool:
        assert pool.num_pages == 4


@pytest.mark.parametrize("num_resident", range(5))
def test_partial_prefix_hit_puts_the_tail_where_it_belongs(num_resident: int) -> None:
    async def job() -> None:
        with make_pool(SPEC, 32) as pool, make_pool(SPEC, 32) as source:
            fill(source, 4)
            tokens = np.arange(16)
            other = np.concatenate([tokens[: num_resident * 4], 100 + np.arange(16 - num_resident * 4)])
            for role, layer in SPEC.tensors:  # the same content in other pages, as of another sequence
                raw(source, role, layer)[10 : 10 + num_resident] = raw(source, role, layer)[[7, 3, 8, 1][:num_resident]]
            first, second = snapshot_of(source, [7, 3, 8, 1]), snapshot_of(source, [10, 11, 12, 13])
            async with (
                Engine(pool, listen="127.0.0.1:0") as engine,
                connected(source, engine.address, timeout_s=5) as peer,
            ):
                await peer.send(first, page_keys=snapshot_keys(first, [tokens]))
                kept = await anext(engine.arrivals())
                stats = await peer.send(second, page_keys=snapshot_keys(second, [other]))
                assert (stats.num_pages, stats.num_resident) == (4 - num_resident, num_resident)
                arrival = await anext(engine.arrivals())
                assert digest(await arrival.snapshot()) == digest(second)
                assert digest(await kept.snapshot()) == digest(first)
                kept.release()
                assert digest(await arrival.snapshot()) == digest(second)
                arrival.release()
                await settled(pool, 32, 0, 0)

    run(job())


@pytest.mark.parametrize("ratio", [2, 4])
@pytest.mark.parametrize("grows", [True, False], ids=["larger pages there", "smaller pages there"])
def test_page_sizes_in_every_ratio_with_ragged_tails(ratio: int, grows: bool) -> None:
    small, large = replace(SPEC, page_size=16), replace(SPEC, page_size=16 * ratio)
    src, dst = (small, large) if grows else (large, small)

    async def job() -> None:
        with make_pool(dst, 256) as pool, make_pool(src, 64) as source:
            fill(source, 5)
            async with (
                Engine(pool, listen="127.0.0.1:0") as engine,
                connected(source, engine.address, timeout_s=5) as peer,
            ):
                for tail in (1, 15, 16, 17, 33, 63, 64, 65):
                    num_pages = -(-tail // src.page_size)
                    table = list(range(40, 40 - num_pages, -1))
                    sent = Snapshot.from_block_tables(source, [table, table[:1]], seq_lens=[tail, 1])
                    await peer.send(sent)
                    arrival = await anext(engine.arrivals())
                    assert digest(await arrival.snapshot()) == digest(sent), tail
                    arrival.release()
                await settled(pool, 256, 0, 0)

    run(job())
