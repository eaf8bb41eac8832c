"""Snapshots whose pages lie alike on both sides: read through the mapping as they are, without a plan."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hurray_rdma import CacheSpec, Engine, PagePool, Peer, PoolExhaustedError
from hurray_rdma.engine import exchange, fetching
from hurray_rdma.engine.exchange import INLINE_NBYTES
from hurray_rdma.transport import Moved, RemoteMemory
from tests.engine.test_whole_push import LARGE
from tests.hazards.scenes import SPEC, counts, digest, eventually, fill, make_pool, run, snapshot_of

pytestmark = pytest.mark.both_loops


@contextlib.asynccontextmanager
async def pair(
    spec: CacheSpec = SPEC, dest: CacheSpec | None = None, num_pages: int = 16
) -> AsyncIterator[tuple[PagePool, Engine, PagePool, Peer]]:
    """A source and a reader."""
    with make_pool(spec, num_pages) as theirs, make_pool(dest or spec, num_pages) as mine:
        fill(theirs, 4)
        async with (
            Engine(theirs, listen="127.0.0.1:0", timeout_s=20) as source,
            Engine(mine, timeout_s=20) as reader,
            reader.connect(source.address) as peer,
        ):
            yield theirs, source, mine, peer


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pages of each plan that a fetch makes."""
    plans: list[int] = []
    plan_transfer = fetching.plan_transfer

    def counted(*args: object, **options: object) -> object:
        plan = plan_transfer(*args, **options)  # type: ignore[arg-type]
        plans.append(plan.num_pages)
        return plan

    monkeypatch.setattr(fetching, "plan_transfer", counted)
    return plans


@pytest.mark.parametrize(("num_pages", "at_once"), [(1, True), (4, True), (5, False)])
def test_nothing_is_planned_and_what_takes_long_to_copy_is_left_to_a_thread(
    planned: list[int], monkeypatch: pytest.MonkeyPatch, num_pages: int, *, at_once: bool
) -> None:
    threads: list[int] = []
    read_rows = RemoteMemory.read_rows

    def noted(self: RemoteMemory, *args: Any, **options: Any) -> Moved:
        threads.append(threading.get_ident())
        return read_rows(self, *args, **options)

    async def job() -> None:
        monkeypatch.setattr(RemoteMemory, "read_rows", noted)
        async with pair(LARGE) as (theirs, source, _, peer):
            sent = snapshot_of(theirs, [7, 3, 11, 1, 9][:num_pages])
            source.publish("a", sent)
            with await peer.fetch("a") as fetched:
                stats, nbytes = fetched.stats, num_pages << 19
                assert digest(fetched) == digest(sent)
                assert (stats.path, stats.num_pages, stats.num_resident) == ("mapped", num_pages, 0)
                assert (stats.sent_nbytes, stats.logical_nbytes) == (nbytes, nbytes)
                assert stats.num_operations == num_pages * len(LARGE.tensors), "none of them are neighbours"
            assert planned == []
            assert (threads == [threading.get_ident()]) is at_once
            assert (nbytes <= INLINE_NBYTES) is at_once

    run(job())


def test_between_two_steps_the_pool_can_be_registered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    begun, may_go_on, renewed = threading.Event(), threading.Event(), threading.Event()
    read_rows = RemoteMemory.read_rows

    def slowly(self: RemoteMemory, *args: Any, **rows: Any) -> Moved:
        steps.append(len(rows["src_rows"]))
        begun.set()
        assert may_go_on.wait(10)
        assert renewed.is_set() is (len(steps) > 1)
        return read_rows(self, *args, **rows)

    def renew(pool: PagePool) -> None:
        with pool.gate.renewal(timeout_s=10):
            renewed.set()

    async def job() -> None:
        monkeypatch.setattr(exchange, "STEP_NBYTES", 2 << 19)
        monkeypatch.setattr(exchange, "INLINE_NBYTES", -1)  # in a thread
        monkeypatch.setattr(RemoteMemory, "read_rows", slowly)
        async with pair(LARGE) as (theirs, source, mine, peer):
            sent = snapshot_of(theirs, [7, 3, 11, 1, 9])
            source.publish("a", sent)
            fetching = asyncio.create_task(peer.fetch("a"))
            assert await asyncio.to_thread(begun.wait, 10)
            renewing = asyncio.create_task(asyncio.to_thread(renew, mine))
            await eventually(lambda: mine.gate.renewing)
            may_go_on.set()
            with await fetching as fetched:
                assert digest(fetched) == digest(sent)
            await renewing
            assert steps == [2, 2, 1]

    run(job())


def test_pages_of_another_size_are_planned(planned: list[int]) -> None:
    async def job() -> None:
        async with pair(SPEC, replace(SPEC, page_size=2 * SPEC.page_size)) as (theirs, source, _, peer):
            sent = snapshot_of(theirs, [7, 3])
            source.publish("a", sent)
            with await peer.fetch("a") as fetched:
                assert fetched.stats.num_pages == 1
                assert digest(fetched) == digest(sent)
            assert planned == [1]

    run(job())


def test_pages_that_are_here_are_not_read_again(planned: list[int]) -> None:
    async def job() -> None:
        async with pair() as (theirs, source, _, peer):
            sent, more = snapshot_of(theirs, [7, 3]), snapshot_of(theirs, [7, 3, 9])
            page_keys = np.arange(3 * 16, dtype=np.uint8).reshape(3, 16)
            source.publish("a", sent, page_keys=page_keys[:2])
            source.publish("b", more, page_keys=page_keys)
            with await peer.fetch("a") as first, await peer.fetch("b") as second:
                assert digest(second) == digest(more)
                assert (second.stats.num_pages, second.stats.num_resident) == (1, 2)
                assert second.stats.num_operations == len(SPEC.tensors)
                assert second.block_table[:2].tolist() == first.block_table.tolist()
            assert planned == []

    run(job())


def test_pages_of_a_fetch_whose_snapshot_cannot_be_made_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    async def job() -> None:
        async with pair() as (theirs, source, mine, peer):
            sent = snapshot_of(theirs, [7, 3])
            source.publish("a", sent)
            with monkeypatch.context() as patches:
                patches.setattr(fetching.FetchedSnapshot, "__init__", fails)
                with pytest.raises(MemoryError):
                    await peer.fetch("a")
            assert counts(mine) == (16, 0, 0)
            with await peer.fetch("a") as fetched:
                assert digest(fetched) == digest(sent)

    run(job())


def test_a_fetch_waits_for_pages_and_is_refused_those_that_never_are() -> None:
    async def job() -> None:
        async with pair(num_pages=4) as (theirs, source, mine, peer):
            sent = snapshot_of(theirs, [3, 0, 2])
            source.publish("a", sent)
            held = mine.allocator.lease(2)
            waiting = asyncio.create_task(peer.fetch("a"))
            await eventually(lambda: bool(mine.allocator._watchers))
            assert not waiting.done()
            held.release()
            with await waiting as fetched:
                assert digest(fetched) == digest(sent)
            assert counts(mine) == (4, 0, 0)
            assert not mine.allocator._watchers
        with make_pool(SPEC, 2) as few:
            async with pair(num_pages=4) as (theirs, source, _, peer), Engine(few) as reader:
                source.publish("a", snapshot_of(theirs, [3, 0, 2]))
                async with reader.connect(source.address) as other:
                    with pytest.raises(PoolExhaustedError):
                        await other.fetch("a")
                assert counts(few) == (2, 0, 0)

    run(job())
