"""What may come by page stream: whole pages that are granted or published now, and no byte of anybody else's."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hurray_rdma import Engine, PagePool, Snapshot
from hurray_rdma.cache import CacheSpec
from hurray_rdma.control import AbortRequested, Fetch, Granted, PublishedHeard
from hurray_rdma.engine import permits as permits_module
from hurray_rdma.engine.permits import SessionPermits, can_stream
from hurray_rdma.transport import Context, Memory, Permits
from hurray_rdma.transport.memory import hold
from tests.engine.hands import shaken
from tests.engine.test_stream_lane import TCP, page_stream_of, told
from tests.hazards.scenes import SPEC, connected, counts, digest, eventually, fill, make_pool, raw, run, snapshot_of
from tests.transport.test_page_streams import ENDED, FORBIDDEN, OK, READ, WRITE, exactly, parcel

OTHERS = 0xEE


@pytest.fixture(scope="module")
def context() -> Context:
    return Context(TCP)


def arrays_of(heads: int, spec: CacheSpec = SPEC, num_pages: int = 16) -> dict[str, list[np.ndarray]]:
    """Room for so many heads in each slot, all of it somebody else's."""
    shape = (num_pages, spec.page_size, heads, spec.head_dim)
    return {
        role: [
            np.full((*shape[:-1], shape[-1] * spec.storage_dtype.itemsize), OTHERS, np.uint8).view(spec.storage_dtype)
            for _ in range(spec.num_layers)
        ]
        for role in spec.roles
    }


def slice_of(arrays: dict[str, list[np.ndarray]], context: Context | None = None) -> PagePool:
    """The first heads of the arrays."""
    first = {role: [each[:, :, : SPEC.num_heads] for each in of_role] for role, of_role in arrays.items()}
    return PagePool.from_arrays(SPEC, first, context=context)


def test_pages_with_something_of_others_between_their_tokens_stay_with_ucx(context: Context) -> None:
    async def job() -> None:
        arrays = arrays_of(2 * SPEC.num_heads)
        with slice_of(arrays, context) as pool, make_pool(SPEC, 16, context=context) as source:
            assert not can_stream(pool.layout)
            fill(source, 1)
            async with Engine(pool, listen="127.0.0.1:0") as engine, connected(source, engine.address) as peer:
                sent = snapshot_of(source, [3, 1, 7])
                stats = await peer.send(sent, key="key")
                assert (stats.lane, stats.path) == ("tcp", "put")
                arrival = await anext(engine.arrivals())
                assert digest(await arrival.snapshot()) == digest(sent)
                arrival.release()
            for of_role in arrays.values():
                for each in of_role:
                    assert (each[:, :, SPEC.num_heads :].view(np.uint8) == OTHERS).all()

    run(job())


def test_two_pools_of_which_one_page_would_cover_half_of_anothers_cannot_stream() -> None:
    """Tokens of keys and values in turn: each page's keys lie between its values."""
    shape = (8, SPEC.page_size, 2, SPEC.num_heads, SPEC.head_dim)
    both = [np.zeros(shape, SPEC.storage_dtype) for _ in range(SPEC.num_layers)]
    arrays = {role: [each[:, :, at] for each in both] for at, role in enumerate(SPEC.roles)}
    with PagePool.from_arrays(SPEC, arrays) as pool:
        assert not can_stream(pool.layout)
    apart = [np.zeros((8, 2, SPEC.page_size, *shape[3:]), SPEC.storage_dtype) for _ in range(SPEC.num_layers)]
    with PagePool.from_arrays(SPEC, {role: [e[:, at] for e in apart] for at, role in enumerate(SPEC.roles)}) as pool:
        assert can_stream(pool.layout)


def test_a_pull_may_come_by_stream_though_the_first_pool_cannot(context: Context) -> None:
    async def job() -> None:
        with (
            slice_of(arrays_of(2 * SPEC.num_heads), context) as first,
            make_pool(SPEC, 16, context=context) as second,
            make_pool(SPEC, 16, context=context) as mine,
        ):
            fill(second, 2)
            async with Engine(first, listen="127.0.0.1:0") as engine:
                engine.add_pool(second, name="second")
                snapshot = snapshot_of(second, [2, 9, 4])
                engine.publish("key", snapshot)
                async with connected(mine, engine.address) as peer:
                    with await peer.fetch("key") as fetched:
                        assert (fetched.stats.lane, fetched.stats.path) == ("tcp", "stream")
                        assert digest(fetched) == digest(snapshot)
                assert counts(mine) == (16, 0, 0)

    run(job())


@pytest.mark.parametrize("page_id", [3, 7], ids=["not in the table", "without a token"])
def test_what_is_not_published_is_not_read(page_id: int) -> None:
    async def job() -> None:
        with make_pool(SPEC, 16) as pool:
            fill(pool, 1)
            page = SPEC.page_nbytes
            snapshot = Snapshot.from_block_tables(pool, [[2, 5, 7]], seq_lens=[2 * SPEC.page_size])
            async with Engine(pool, listen="127.0.0.1:0") as engine, shaken(engine.address) as hand:
                engine.publish("key", snapshot)
                fetch = Fetch(key="key", deadline_s=10, lane="tcp", path="stream", num_streams=len(SPEC.tensors))
                transfer_id = int(hand.do("fetch", fetch, timeout_s=10))
                await hand.expect(PublishedHeard)
                with page_stream_of(hand, engine.address) as connection:
                    connection.sendall(parcel(READ, [(5 * page, page)], transfer_id=transfer_id))
                    assert await asyncio.to_thread(told, connection) == (0, OK)
                    came = await asyncio.to_thread(exactly, connection, page)
                    assert came == raw(pool, *SPEC.tensors[0])[5].tobytes()
                    assert await asyncio.to_thread(told, connection) == (0, OK)
                    connection.sendall(parcel(READ, [(page_id * page, 1)], transfer_id=transfer_id))
                    assert await asyncio.to_thread(told, connection) == (0, FORBIDDEN)

    run(job())


@pytest.mark.parametrize("how", ["its time is over", "the pool is closed"])
def test_what_a_reader_takes_too_late_is_not_acknowledged(how: str) -> None:
    """Pages that the kernel was lent in time, and that the reader takes only when they hold something else."""
    spec = replace(SPEC, num_layers=1, num_heads=8, head_dim=128, page_size=256, dtype="float32")

    async def job() -> None:
        with make_pool(spec, 4) as pool:
            fill(pool, 1)
            page, pages = spec.page_nbytes, raw(pool, *spec.tensors[0])
            async with Engine(pool, listen="127.0.0.1:0") as engine, shaken(engine.address) as hand:
                engine.publish("key", snapshot_of(pool, [2]))
                time_s = 0.5 if how == "its time is over" else 20
                fetch = Fetch(key="key", deadline_s=time_s, lane="tcp", path="stream", num_streams=len(spec.tensors))
                transfer_id = int(hand.do("fetch", fetch, timeout_s=10))
                await hand.expect(PublishedHeard)
                with page_stream_of(hand, engine.address) as connection:
                    connection.sendall(parcel(READ, [(2 * page, page)], transfer_id=transfer_id))
                    assert await asyncio.to_thread(told, connection) == (0, OK)
                    if how == "its time is over":
                        await hand.expect(AbortRequested)
                    else:
                        pool.close()
                    pages[...] = OTHERS  # they are the application's again
                    came = await asyncio.to_thread(exactly, connection, page)
                    assert OTHERS in came, "or it would show nothing"
                    await asyncio.to_thread(told, connection)
                    # What came is not said to be the snapshot.
                    if hand.do("read_end", transfer_id):
                        await hand.expect(AbortRequested)
                    hand.do("quiet", transfer_id)
                await eventually(lambda: engine.stats().serve.failures != {})
                assert engine.stats().serve.num_transfers == 0
            assert counts(pool) == (4, 0, 0)

    run(job())


@pytest.mark.parametrize("how", ["the pool is closed", "the transfer is to stop"])
def test_a_permit_ends_before_the_sender_has_said_that_it_is_quiet(how: str) -> None:
    async def job() -> None:
        arrays = arrays_of(SPEC.num_heads)
        with slice_of(arrays) as pool, make_pool(SPEC, 16) as source:
            page = SPEC.page_nbytes
            async with (
                Engine(pool, listen="127.0.0.1:0", lease_s=5) as engine,
                shaken(engine.address, says_quiet=False) as hand,
            ):
                transfer_id = hand.offer(snapshot_of(source, [1, 2]), path="stream")
                granted = (await hand.expect(Granted)).grant.page_ids.tolist()
                arrival = await anext(engine.arrivals())
                data = parcel(WRITE, [(granted[0] * page, page)], transfer_id=transfer_id) + b"\1" * page
                with page_stream_of(hand, engine.address) as connection:
                    connection.sendall(data)
                    assert await asyncio.to_thread(told, connection) == (0, OK)
                    if how == "the pool is closed":
                        pool.close()
                    else:
                        arrival.abort()
                    for of_role in arrays.values():
                        for each in of_role:
                            each.view(np.uint8)[...] = OTHERS
                    connection.sendall(data)
                    assert await asyncio.to_thread(told, connection) == (0, ENDED)
                if how == "the pool is closed":
                    hand.do("abort", transfer_id, 1, "enough")
                hand.do("quiet", transfer_id)
            assert all((each.view(np.uint8) == OTHERS).all() for of_role in arrays.values() for each in of_role)

    run(job())


@pytest.mark.parametrize("num_held", [0, 1, None], ids=["before any region", "after one", "after all"])
def test_a_pool_that_another_thread_closes_as_a_permit_begins_permits_nothing(
    num_held: int | None, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    permits = Permits()
    with slice_of(arrays_of(SPEC.num_heads), context) as pool:
        memories = [region.memory for region in pool.regions]
        held: list[Memory] = []

        def hold_but_close(memory: Memory) -> None:
            if len(held) == num_held:
                pool.close()
            hold(memory)
            held.append(memory)

        class Closing:
            """As the permits of a session, with somebody who closes the pool before they are added."""

            remove = permits.remove

            def add(self, *facts: Any) -> None:
                pool.close()
                permits.add(*facts)

        monkeypatch.setattr(permits_module, "hold", hold_but_close)
        session = SessionPermits(Closing() if num_held is None else permits)  # type: ignore[arg-type]
        session.begin(4, pool, np.arange(3, dtype=np.uint32), writes=True)
        assert held == (memories if num_held is None else memories[:num_held])
        assert not permits.remove(4)
        assert not any(memory.in_use for memory in memories)
        session.end(4)
        assert not any(memory.in_use for memory in memories)
