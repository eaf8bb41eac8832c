"""Pulls from peers that UCX cannot be set up with: pages come on the control channel, every byte, and loudly."""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

import hurray_rdma.sync as blocking
from hurray_rdma import CacheSpec, DeadlineExceededError, Engine, PagePool, PeerLostError, Snapshot
from hurray_rdma.cache import PoolGroups, snapshot_keys
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Context, default_context
from tests.engine import test_unlike as unlike
from tests.engine.test_fallback import INT8, MLA, RECEIVER, SENDER, SEQ_LENS, SPEC, TABLES
from tests.hazards.scenes import counts, run, settled

pytestmark = pytest.mark.both_loops


@pytest.fixture(scope="module")
def context() -> Context:
    return Context(SENDER)


def source(connection: Connection, spec: CacheSpec, strided: bool) -> None:
    """Publishes its pool's content as "all"; tells its address and the content, and at the end its counts and stats."""

    async def job() -> None:
        default_context(RECEIVER)
        with unlike.strided_pool(spec, 32) if strided else PagePool.allocate(spec, 32) as pool:
            unlike.fill(pool, 5)
            with pool.allocator.lease(32):
                snapshot = Snapshot.from_block_tables(pool, TABLES, seq_lens=SEQ_LENS)
                async with Engine(pool, listen="127.0.0.1:0", timeout_s=20) as engine:
                    engine.publish("all", snapshot)
                    connection.send((engine.address, unlike.contents(snapshot)))
                    await asyncio.to_thread(connection.recv)
                    assert engine.unpublish("all")
                    connection.send(engine.stats())
            connection.send(counts(pool))

    asyncio.run(job())


@pytest.mark.parametrize(
    ("published", "dest", "strided"),
    [
        (SPEC, SPEC, False),
        (SPEC, SPEC.with_order("HND"), True),
        (SPEC.with_order("HND"), SPEC, True),
        (SPEC, replace(SPEC, page_size=2), False),
        (SPEC.with_order("HND"), replace(SPEC, page_size=32), False),
        (SPEC, replace(SPEC, num_heads=2, head_offset=1), False),
        (INT8, replace(INT8, page_size=16), False),
        (INT8, replace(INT8, page_size=4, num_heads=1, head_offset=3), False),
        (MLA, MLA, False),
        (replace(SPEC, layers=(3, 9)), replace(SPEC, layers=(3, 9)), False),
        (SPEC, replace(SPEC, roles=("value", "key")), False),
    ],
    ids=[
        "alike",
        "NHD to HND, from a strided pool",
        "HND to NHD, from a strided pool",
        "pages of 8 to 2",
        "HND pages of 8 to NHD pages of 32",
        "two of four heads",
        "int8 with scales and zero points, pages of 8 to 16",
        "int8, pages of 8 to 4, one head",
        "latent",
        "some layers",
        "roles in another order",
    ],
)
def test_every_token_is_pulled_without_ucx(
    published: CacheSpec, dest: CacheSpec, strided: bool, context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    async def job() -> None:
        async with Engine(pool, timeout_s=20) as engine, engine.connect(address) as peer:
            assert (peer.lane, peer.path) == ("control channel", "frames")
            with await peer.fetch("all") as fetched:
                first = dest.head_offset - published.head_offset
                for at, (tokens, *of_slots) in expected.items():
                    got_tokens, *got_of_slots = unlike.contents(fetched)[at]
                    assert np.array_equal(got_tokens, tokens[:, first : first + dest.num_heads]), at
                    for got, of_slot in zip(got_of_slots, of_slots, strict=True):
                        assert np.array_equal(got, of_slot), at
                stats, mine = fetched.stats, engine.stats()
                assert counts(pool) == (64 - stats.num_pages, stats.num_pages, 0)
            assert counts(pool) == (64, 0, 0)
        assert (stats.lane, stats.path) == ("control channel", "frames")
        assert (mine.num_fallbacks, mine.fetch.num_transfers, mine.fetch.failures) == (1, 1, {})
        assert [(lane.lane, lane.path, lane.nbytes) for lane in mine.fetch.lanes] == [
            ("control channel", "frames", stats.sent_nbytes)
        ]
        if published == dest:  # an aliased page comes once
            assert (stats.num_table_entries, stats.num_pages) == (11, 9)
            assert stats.sent_nbytes == 9 * len(dest.tensors) * dest.page_nbytes
        child.send("end")
        serve = child.receive().serve
        assert (serve.num_transfers, serve.nbytes, serve.failures) == (1, stats.sent_nbytes, {})
        assert [(lane.lane, lane.path) for lane in serve.lanes] == [("control channel", "frames")]
        assert child.receive() == (32, 0, 0)

    with Child(source, published, strided) as child, PagePool.allocate(dest, 64, context=context) as pool:
        for tensor in dest.tensors:
            for array in unlike.parts(pool, *tensor):
                array.view(np.uint8)[...] = 0xEE
        address, expected = child.receive()
        with caplog.at_level(logging.WARNING, "hurray_rdma"):
            run(job())
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len([text for text in warnings if "control channel, which is slow" in text and "UCX_TLS" in text]) == 1


def test_without_asyncio_too(context: Context) -> None:
    with Child(source, SPEC, False) as child, PagePool.allocate(SPEC, 64, context=context) as pool:
        address, expected = child.receive()
        with blocking.Engine(pool, timeout_s=20) as engine, engine.connect(address) as peer:
            futures = [peer.fetch_async("all") for _ in range(3)]
            for fetched in (peer.fetch("all"), *(future.result(20) for future in futures)):
                for at, (tokens,) in unlike.contents(fetched).items():
                    assert np.array_equal(tokens, expected[at][0]), at
                assert fetched.stats.path == "frames"
                fetched.release()
            assert counts(pool) == (64, 0, 0)
        child.send("end")
        assert child.receive().serve.num_transfers == 4
        assert child.receive() == (32, 0, 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_source_that_is_lost_costs_its_reader_no_page(number: signal.Signals, context: Context) -> None:
    async def job() -> None:
        async with Engine(pool, timeout_s=20, peer_timeout_s=20) as engine, engine.connect(address) as peer:
            (await peer.fetch("all")).release()
            child.signal(number)
            with pytest.raises(PeerLostError if number is signal.SIGKILL else DeadlineExceededError):
                await peer.fetch("all", timeout_s=0.5)
            await settled(pool, 64, 0, 0)
            assert engine.stats().num_quarantined == 0
            if number is signal.SIGSTOP:
                child.signal(signal.SIGCONT)
                with await peer.fetch("all") as fetched:  # the session has lived
                    assert np.array_equal(unlike.contents(fetched)["key", 0, 0][0], expected["key", 0, 0][0])
                child.send("end")
                assert set(child.receive().serve.failures) <= {"TransferAbortedError"}
                assert child.receive() == (32, 0, 0)
            else:
                await asyncio.to_thread(child.join)

    with Child(source, SPEC, False) as child, PagePool.allocate(SPEC, 64, context=context) as pool:
        address, expected = child.receive()
        run(job())


# In one process: its two engines have UCX contexts without a transport in common.


@pytest.mark.parametrize("page_size", [8, 4, 16])
def test_pages_that_the_reader_holds_do_not_come(page_size: int, context: Context) -> None:
    spec = replace(SPEC, page_size=page_size)

    async def job() -> None:
        async with (
            Engine(there, listen="127.0.0.1:0") as publisher,
            Engine(pool, timeout_s=20) as engine,
            engine.connect(publisher.address) as peer,
        ):
            prompt = np.arange(24)
            tokens = [prompt, np.concatenate([prompt[:16], np.full(8, 99)]), prompt]
            held = []
            for n, (table, num_taken) in enumerate([([1, 2, 3], 3), ([4, 5, 6], 1), ([1, 2, 3], 0)]):
                snapshot = Snapshot.from_block_tables(there, [table], seq_lens=[24])
                publisher.publish(str(n), snapshot, page_keys=snapshot_keys(snapshot, [tokens[n]]))
                fetched = await peer.fetch(str(n))
                held.append(fetched)
                if page_size <= SPEC.page_size:
                    assert fetched.stats.sent_nbytes == num_taken * SPEC.page_nbytes * len(SPEC.tensors)
                else:
                    # Its pages take two each; the second is half empty, so that no key stands for it.
                    assert fetched.stats.num_pages == [2, 1, 1][n]
                for at, (got,) in unlike.contents(fetched).items():
                    assert np.array_equal(got, unlike.contents(snapshot)[at][0]), at
            for fetched in held:
                fetched.release()
            assert counts(pool) == (64, 0, 0)

    with (
        PagePool.allocate(SPEC, 32, context=Context(RECEIVER)) as there,
        PagePool.allocate(spec, 64, context=context) as pool,
    ):
        unlike.fill(there, 6)
        for role, layer in SPEC.tensors:
            there.pages(role, layer)[[4, 5]] = there.pages(role, layer)[[1, 2]]
        run(job())


def test_each_group_of_a_hybrid_model_goes_into_its_own_pool(context: Context) -> None:
    many = replace(SPEC, num_layers=3, layers=(0, 2, 4))
    few = replace(SPEC, num_layers=1, layers=(1,), roles=("fused",))

    def pools(of: Context) -> dict[str, PagePool]:
        return {"many": PagePool.allocate(many, 16, context=of), "few": PagePool.allocate(few, 16, context=of)}

    async def job(there: dict[str, PagePool], here: dict[str, PagePool]) -> None:
        async with (
            Engine(PoolGroups(there), listen="127.0.0.1:0") as publisher,
            Engine(PoolGroups(here)) as engine,
            engine.connect(publisher.address) as peer,
        ):
            for name, pool in there.items():
                unlike.fill(pool, len(name))
                snapshot = Snapshot.from_block_tables(pool, [[3, 1]], seq_lens=[11])
                publisher.publish(name, snapshot)
                with await peer.fetch(name) as fetched:
                    assert fetched.pool is here[name]
                    assert fetched.stats.path == "frames"
                    for at, (got,) in unlike.contents(fetched).items():
                        assert np.array_equal(got, unlike.contents(snapshot)[at][0]), at

    there, here = pools(Context(RECEIVER)), pools(context)
    run(job(there, here))
    for pool in (*there.values(), *here.values()):
        assert counts(pool) == (16, 0, 0)
        pool.close()


def test_a_reader_without_room_waits_before_anything_comes(context: Context) -> None:
    async def job() -> None:
        async with (
            Engine(there, listen="127.0.0.1:0") as publisher,
            Engine(pool, timeout_s=20) as engine,
            engine.connect(publisher.address) as peer,
        ):
            snapshot = Snapshot.from_block_tables(there, TABLES, seq_lens=SEQ_LENS)
            publisher.publish("all", snapshot)
            lease = pool.allocator.lease(60)
            with pytest.raises(DeadlineExceededError, match="no 9 pages"):
                await peer.fetch("all", timeout_s=0.3)
            fetching = asyncio.create_task(peer.fetch("all"))
            await asyncio.wait({fetching}, timeout=0.2)
            assert not fetching.done()
            assert publisher.stats().serve.nbytes == 0
            lease.release()
            with await fetching as fetched:
                for at, (got,) in unlike.contents(fetched).items():
                    assert np.array_equal(got, unlike.contents(snapshot)[at][0]), at
            serve = publisher.stats().serve
            assert (serve.num_transfers, sum(serve.failures.values())) == (1, 1)
            await settled(pool, 64, 0, 0)

    with (
        PagePool.allocate(SPEC, 32, context=Context(RECEIVER)) as there,
        PagePool.allocate(SPEC, 64, context=context) as pool,
    ):
        unlike.fill(there, 6)
        run(job())


def test_pages_of_the_callers_own_memory_are_pulled_too(context: Context) -> None:
    async def job() -> None:
        async with (
            Engine(there, listen="127.0.0.1:0") as publisher,
            Engine(pool, timeout_s=20) as engine,
            engine.connect(publisher.address) as peer,
        ):
            snapshot = Snapshot.from_block_tables(there, TABLES, seq_lens=SEQ_LENS)
            publisher.publish("all", snapshot)
            with await peer.fetch("all", into=other) as fetched:
                assert fetched.pool is other
                for at, (got,) in unlike.contents(fetched).items():
                    assert np.array_equal(got, unlike.contents(snapshot)[at][0]), at

    def own(of: Context) -> Any:
        arrays = {role: [np.zeros((32, *SPEC.page_shape), SPEC.storage_dtype) for _ in range(2)] for role in SPEC.roles}
        return PagePool.from_arrays(SPEC, arrays, context=of)

    with own(Context(RECEIVER)) as there, own(context) as pool, own(context) as other:
        unlike.fill(there, 6)
        run(job())
        assert counts(other) == (32, 0, 0)
