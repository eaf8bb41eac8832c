"""Snapshots fetched into pages that the caller has chosen: those and no others are written, and none is lost."""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from hurray_rdma import (
    ConfigError,
    DeadlineExceededError,
    Engine,
    GeometryError,
    HurrayError,
    LeaseExpiredError,
    NotPublishedError,
    PagePool,
    Placement,
    Snapshot,
    sync,
)
from hurray_rdma.cache import CacheSpec
from hurray_rdma.engine.fetching import Fetching
from hurray_rdma.engine.sync import thread
from hurray_rdma.plan import PageMap, map_pages
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Endpoint, RemoteMemory
from tests.hazards.scenes import SPEC, counts, digest, eventually, fill, raw, run

TABLES, SEQ_LENS = [[7, 3, 9], [7, 3, 2]], [12, 10]  # 4 tokens a page; two sequences share a prefix
GUARD = 0xEE


def external_pool(spec: CacheSpec, num_pages: int, *, mappable: bool = False) -> PagePool:
    """As an inference engine has it: its own memory, and its own accounts of who holds which page."""
    shape = (spec.num_layers, len(spec.roles), num_pages, *spec.page_shape)
    nbytes = int(np.prod(shape)) * spec.storage_dtype.itemsize
    whole = np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), spec.storage_dtype)
    layers = whole.reshape(shape)
    arrays = {role: list(layers[:, at]) for at, role in enumerate(spec.roles)}
    pool = PagePool.from_arrays(spec, arrays, external=True, mappable=mappable)
    for tensor in spec.tensors:
        raw(pool, *tensor)[...] = GUARD
    return pool


def written(pool: PagePool) -> set[int]:
    """Pages in which any byte of any tensor is not as `external_pool` left it."""
    pages: set[int] = set()
    for tensor in pool.spec.tensors:
        pages.update(np.flatnonzero((raw(pool, *tensor) != GUARD).any(axis=1)).tolist())
    return pages


def publisher(connection: Connection, spec: CacheSpec, lane: str = "mapped") -> None:
    """Publishes TABLES as "all"; tells its address and the digest; ends when told."""

    async def job() -> None:
        own = lane in ("cma", "replaced")
        with external_pool(spec, 16, mappable=lane == "replaced") if own else PagePool.allocate(spec, 16) as pool:
            fill(pool, 3)
            snapshot = Snapshot.from_block_tables(pool, TABLES, seq_lens=SEQ_LENS)
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=20) as engine:
                engine.publish("all", snapshot, lease_s=60)
                connection.send((engine.address, digest(snapshot)))
                await asyncio.to_thread(connection.recv)
                connection.send(counts(pool))

    asyncio.run(job())


def page_map_of(rows: list[list[int]], seq_lens: list[int]) -> PageMap:
    entries, starts = np.concatenate(rows), np.cumsum([0, *map(len, rows)])
    table, seq_ptr, lens = (np.asarray(each).astype(np.uint32) for each in (entries, starts, seq_lens))
    return map_pages(table, seq_ptr, lens, num_pages=16, src_page_size=4, dst_page_size=4)


def snapshot_in(pool: PagePool, block_table: Iterable[int], seq_lens: Iterable[int] = SEQ_LENS) -> Snapshot:
    lens = [*seq_lens]
    num_pages = [-(-length // pool.spec.page_size) for length in lens]
    return Snapshot(pool, [*block_table], np.cumsum([0, *num_pages]), lens)


@pytest.mark.parametrize("lane", ["mapped", "cma", "replaced"])
def test_a_fetch_writes_the_chosen_pages_and_no_others(lane: str) -> None:
    async def job() -> None:
        mappable = lane == "replaced"
        with external_pool(SPEC, 12, mappable=mappable) as pool, Child(publisher, SPEC, lane) as child:
            address, expected = await asyncio.to_thread(child.receive)
            async with Engine(pool, timeout_s=20) as engine, engine.connect(address) as peer:
                assert peer.lane in {"cma"} if lane == "cma" else peer.path == "mapped"
                table = [10, 4, 1, 10, 4, 6]
                with await peer.fetch("all", into=Placement(pool, table)) as fetched:
                    assert fetched.block_table.tolist() == table
                    assert (fetched.stats.num_pages, fetched.stats.num_resident) == (4, 0)
                    assert digest(fetched) == expected
                assert written(pool) == {1, 4, 6, 10}
                assert counts(pool) == (0, 12, 0)
                assert pool.allocator.accounts().num_leases == 1, "the pool's own, of all its pages"
                child.send("end")
                assert child.receive() == ((16, 0, 0) if lane == "mapped" else (0, 16, 0))

    run(job())


@pytest.mark.parametrize("page_size", [2, 8])
def test_page_sizes_may_differ(page_size: int) -> None:
    """Of 4 tokens there, of 2 or 8 here; in larger pages a shared prefix of whole pages stays shared."""

    async def job() -> None:
        with external_pool(replace(SPEC, page_size=page_size), 16) as pool, Child(publisher, SPEC) as child:
            address, expected = await asyncio.to_thread(child.receive)
            async with Engine(pool, timeout_s=20) as engine, engine.connect(address) as peer:
                table = [9, 8, 7, 6, 5, 4, 9, 8, 7, 6, 3] if page_size == 2 else [5, 3, 5, 7]
                with await peer.fetch("all", into=Placement(pool, table)) as fetched:
                    assert digest(fetched) == expected
                    assert digest(snapshot_in(pool, table)) == expected
                assert written(pool) == set(table)
                child.send("end")
                child.receive()

    run(job())


def test_pages_that_are_present_are_not_written() -> None:
    async def job() -> None:
        with external_pool(SPEC, 12) as pool, Child(publisher, SPEC) as child:
            address, _ = await asyncio.to_thread(child.receive)
            async with Engine(pool, timeout_s=20) as engine, engine.connect(address) as peer:
                present = [True, True, False, True, True, False]
                placement = Placement(pool, [10, 4, 1, 10, 4, 6], present=present)
                with await peer.fetch("all", into=placement) as fetched:
                    assert (fetched.stats.num_pages, fetched.stats.num_resident) == (2, 2)
                assert written(pool) == {1, 6}
                placement = Placement(pool, [10, 4, 1, 10, 4, 6], present=[True] * 6)
                with await peer.fetch("all", into=placement) as fetched:
                    assert (fetched.stats.num_pages, fetched.stats.sent_nbytes) == (0, 0)
                assert written(pool) == {1, 6}
                child.send("end")
                child.receive()

    run(job())


@pytest.mark.parametrize(
    ("table", "rule"),
    [
        ([10, 4, 1, 10, 4], r"len\(block_table\) = 5: must be the 6 entries"),
        ([10, 4, 1, 9, 4, 6], r"block_table\[0\] = 10: the snapshot shares pages here that the table does not"),
        ([10, 4, 4, 10, 4, 6], r"block_table\[2\] = 4: block_table\[1\] names that page for another one"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_before_anything_moves(table: list[int], rule: str) -> None:
    async def job() -> None:
        with external_pool(SPEC, 12) as pool, Child(publisher, SPEC) as child:
            address, expected = await asyncio.to_thread(child.receive)
            async with Engine(pool, timeout_s=20) as engine, engine.connect(address) as peer:
                with pytest.raises(GeometryError, match=rule):
                    await peer.fetch("all", into=Placement(pool, table))
                assert written(pool) == set()
                with await peer.fetch("all", into=Placement(pool, [0, 1, 2, 0, 1, 3])) as fetched:
                    assert digest(fetched) == expected
                child.send("end")
                child.receive()

    run(job())


@pytest.mark.parametrize("resident", [False, True])
def test_two_pages_of_a_snapshot_go_into_two_pages_also_where_frames_could_write_one_twice(resident: bool) -> None:
    """The second would go over the tokens that are said to be in the first."""
    with external_pool(SPEC, 12) as pool:
        page_map = page_map_of([[7, 3]], [8])
        for table in ([5, 5], [0, 0]):
            placement = Placement(pool, table, present=[True, resident])
            with pytest.raises(GeometryError, match=rf"block_table\[1\] = {table[0]}: block_table\[0\] names"):
                placement.pages_for(page_map)


def test_a_page_is_present_at_all_its_entries_or_at_none() -> None:
    with external_pool(SPEC, 12) as pool:
        page_map = page_map_of(TABLES, SEQ_LENS)
        table = [10, 4, 1, 10, 4, 6]
        for present, rule in (
            ([1, 1, 1, 1, 0, 1], r"present\[4\] = False: present\[1\] is True, of the same page 4"),
            ([0, 0, 0, 1, 0, 0], r"present\[3\] = True: present\[0\] is False, of the same page 10"),
        ):
            with pytest.raises(GeometryError, match=rule):
                Placement(pool, table, present=present).pages_for(page_map)
        page_ids, found = Placement(pool, table, present=[0, 1, 0, 0, 1, 1]).pages_for(page_map)
        # In the order of a grant: ascending by the source's pages 2, 3, 7, 9.
        assert page_ids.tolist() == [6, 4, 10, 1]
        assert found.tolist() == [True, True, False, False]


def test_a_placement_is_checked_when_it_is_made() -> None:
    with external_pool(SPEC, 12) as pool:
        with pytest.raises(GeometryError, match=r"block_table\[1\]"):
            Placement(pool, [3, 12])
        with pytest.raises(GeometryError, match="present"):
            Placement(pool, [3, 4], present=[True])


def test_an_external_pool_hands_out_nothing_itself() -> None:
    async def job() -> None:
        with external_pool(SPEC, 12) as pool, Child(publisher, SPEC) as child:
            address, _ = await asyncio.to_thread(child.receive)
            async with Engine(pool, timeout_s=20) as engine, engine.connect(address) as peer:
                with pytest.raises(ConfigError, match="Placement"):
                    await peer.fetch("all")
                assert written(pool) == set()
                child.send("end")
                child.receive()

    run(job())


def test_a_push_into_an_external_pool_is_refused_at_once() -> None:
    """It waited in front of all others until its time was over."""

    async def job() -> None:
        with external_pool(SPEC, 12) as pool, PagePool.allocate(SPEC, 12) as source:
            async with (
                Engine(pool, listen="127.0.0.1:0") as engine,
                Engine(source) as sender,
                sender.connect(engine.address) as peer,
            ):
                with pytest.raises(ConfigError, match="handed out by its caller"):
                    await peer.send(Snapshot.from_block_tables(source, [[1]], seq_lens=[4]), timeout_s=60)
                assert engine.stats().num_waiting == 0

    run(job())


def test_chosen_pages_must_be_somebodys() -> None:
    """In a pool whose allocator hands out pages, those of a placement are leased from it first."""

    async def job() -> None:
        with PagePool.allocate(SPEC, 12) as pool, Child(publisher, SPEC) as child:
            address, expected = await asyncio.to_thread(child.receive)
            async with Engine(pool, timeout_s=20) as engine, engine.connect(address) as peer:
                with pytest.raises(LeaseExpiredError, match="nobody holds the page"):
                    await peer.fetch("all", into=Placement(pool, [0, 1, 2, 0, 1, 3]))
                with pool.allocator.lease(4) as lease:
                    table = lease.page_ids[[0, 1, 2, 0, 1, 3]]
                    fetched = await peer.fetch("all", into=Placement(pool, table))
                    assert digest(fetched) == expected
                assert counts(pool) == (8, 4, 0), "the fetch keeps them until it is released"
                fetched.release()
                assert counts(pool) == (12, 0, 0)
                child.send("end")
                child.receive()

    run(job())


def test_what_fails_leaves_no_lease_behind_and_can_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def job() -> None:
        with external_pool(SPEC, 12) as pool, Child(publisher, SPEC) as child:
            address, expected = await asyncio.to_thread(child.receive)
            async with Engine(pool, timeout_s=20) as engine, engine.connect(address) as peer:
                placement = Placement(pool, [0, 1, 2, 0, 1, 3])
                with pytest.raises(NotPublishedError):
                    await peer.fetch("none", into=placement)
                with monkeypatch.context() as unheard, pytest.raises(HurrayError):  # of here, or the peer's
                    unheard.setattr(Fetching, "answered", lambda *_: None)
                    await peer.fetch("all", into=placement, timeout_s=0.02)
                assert pool.allocator.accounts().num_leases == 1
                with await peer.fetch("all", into=placement) as fetched:
                    assert digest(fetched) == expected
                child.send("end")
                child.receive()

    run(job())


@pytest.mark.parametrize("how", ["the peer goes on", "the engine is closed"])
def test_a_fetch_whose_reads_may_still_land_raises_only_when_they_cannot(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The caller would hand the pages to somebody else at once."""
    stuck = threading.Event()
    close = Endpoint.close

    def in_doubt(*_: Any, **__: Any) -> None:
        error = DeadlineExceededError("reads are in flight")
        error.in_doubt = True
        raise error

    async def job() -> None:
        with external_pool(SPEC, 12) as pool, Child(publisher, SPEC, "cma") as child:
            address, _ = await asyncio.to_thread(child.receive)
            async with Engine(pool, timeout_s=20) as engine, engine.connect(address) as peer:
                monkeypatch.setattr(RemoteMemory, "read", in_doubt)
                monkeypatch.setattr(Endpoint, "close", lambda endpoint: stuck.wait(0.02) and close(endpoint))
                fetching = asyncio.create_task(peer.fetch("all", into=Placement(pool, [0, 1, 2, 0, 1, 3])))
                await eventually(lambda: bool(pool.allocator.quarantined()))
                await eventually(lambda: bool(engine._settling._settled))
                fetching.cancel()
                await asyncio.sleep(0.1)
                assert not fetching.done(), "not even when it is cancelled"
                if how == "the peer goes on":
                    stuck.set()
                else:
                    await engine.close()
                async with asyncio.timeout(10):
                    with pytest.raises((DeadlineExceededError, asyncio.CancelledError)):
                        await fetching
                assert pool.allocator.accounts().num_leases == 1
                stuck.set()
                child.send("end")
                child.receive()

    run(job())


def test_an_engine_without_asyncio_closes_with_such_a_fetch_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_doubt(*_: Any, **__: Any) -> None:
        error = DeadlineExceededError("reads are in flight")
        error.in_doubt = True
        raise error

    monkeypatch.setattr(thread, "_CANCELLED_S", 0.1)
    with external_pool(SPEC, 12) as pool, Child(publisher, SPEC, "cma") as child:
        address, _ = child.receive()
        close = Endpoint.close
        with sync.Engine(pool, timeout_s=20) as engine, engine.connect(address) as peer:
            monkeypatch.setattr(RemoteMemory, "read", in_doubt)
            monkeypatch.setattr(Endpoint, "close", lambda _: False)
            fetching = peer.fetch_async("all", into=Placement(pool, [0, 1, 2, 0, 1, 3]))
            while not pool.allocator.quarantined():
                assert not fetching.done()
        monkeypatch.setattr(Endpoint, "close", close)
        assert fetching.done()
        assert pool.allocator.accounts().num_leases == 1
        child.send("end")
        child.receive()


def test_without_asyncio() -> None:
    with external_pool(SPEC, 12) as pool, Child(publisher, SPEC) as child:
        address, expected = child.receive()
        with sync.Engine(pool, timeout_s=20) as engine, engine.connect(address) as peer:
            future = peer.fetch_async("all", into=sync.Placement(pool, [10, 4, 1, 10, 4, 6]))
            with future.result() as fetched:
                assert digest(fetched) == expected
            with peer.fetch("all", into=sync.Placement(pool, [0, 1, 2, 0, 1, 3])) as fetched:
                assert digest(fetched) == expected
        child.send("end")
        child.receive()
