"""What a source hears of its publications: how long they are wanted, who has read them, when the pages are its own."""

from __future__ import annotations

import asyncio
import time

import pytest

from hurray_rdma import CacheSpec, Engine, GeometryError, NotPublishedError, Placement
from hurray_rdma.control import ErrorCode, Fetch, PoolsAnnounced, PublishedHeard
from tests.engine.hands import shaken
from tests.engine.test_placement import external_pool
from tests.hazards.scenes import SPEC, digest, eventually, fill, make_pool, run, settled, snapshot_of

TABLE = [3, 1, 7]


def test_a_publication_ends_when_it_was_read_as_often_as_it_was_to_be() -> None:
    async def job() -> None:
        with make_pool(SPEC, 8) as pool, external_pool(SPEC, 8) as mine:
            fill(pool, 1)
            snapshot = snapshot_of(pool, TABLE)
            ends: list[tuple[str, int]] = []
            async with (
                Engine(pool, listen="127.0.0.1:0") as engine,
                Engine(mine) as reader,
                reader.connect(engine.address) as peer,
            ):
                engine.publish("two", snapshot, max_readers=2, on_end=lambda *end: ends.append(end))
                for _ in range(2):
                    assert ends == []
                    with await peer.fetch("two", into=Placement(mine, [0, 1, 2])) as fetched:
                        assert digest(fetched) == digest(snapshot)
                assert ends == [("two", 2)]
                with pytest.raises(NotPublishedError):
                    await peer.fetch("two", into=Placement(mine, [0, 1, 2]))
                # One that has everything already says so by reading nothing.
                engine.publish("one", snapshot, max_readers=1, on_end=lambda *end: ends.append(end))
                (await peer.fetch("one", into=Placement(mine, [0, 1, 2], present=[True] * 3))).release()
                assert ends[1:] == [("one", 1)]
                assert engine.unpublish("one") is False

    run(job())


def test_the_end_of_a_publication_waits_for_who_is_reading_it() -> None:
    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            ends: list[tuple[str, int]] = []
            async with Engine(pool, listen="127.0.0.1:0") as engine, shaken(engine.address) as hand:
                await hand.expect(PoolsAnnounced)
                for how in ("to the end", "not at all", "until it is lost"):
                    engine.publish(how, snapshot_of(pool, TABLE), on_end=lambda *end: ends.append(end))
                    asked = hand.do("fetch", Fetch(key=how, deadline_s=10), timeout_s=10)
                    await hand.expect(PublishedHeard)
                    engine.unpublish(how)
                    assert ends == [], "it is being read"
                    if how == "to the end":
                        hand.do("read_end", asked)
                        await eventually(lambda: ends == [("to the end", 1)])
                    elif how == "not at all":
                        hand.do("abort", asked, ErrorCode.ABORTED, "not wanted any more")
                        await eventually(lambda: ends == [("not at all", 0)])
                    else:
                        assert hand.channel is not None
                        hand.channel.abort()
                        await eventually(lambda: ends == [("until it is lost", 0)])
                    ends.clear()
                engine.publish("till the engine ends", snapshot_of(pool, TABLE), on_end=lambda *end: ends.append(end))
            assert ends == [("till the engine ends", 0)]

    run(job())


def test_a_publication_is_kept_as_long_as_somebody_asks_for_it() -> None:
    async def job() -> None:
        with make_pool(SPEC, 8) as pool, make_pool(SPEC, 8) as mine:
            ended = asyncio.Event()
            async with (
                Engine(pool, listen="127.0.0.1:0") as engine,
                Engine(mine) as reader,
                reader.connect(engine.address) as peer,
            ):
                engine.publish("wanted", snapshot_of(pool, TABLE), lease_s=0.6, on_end=lambda *_: ended.set())
                until = time.monotonic() + 1.5
                while time.monotonic() < until:
                    await peer.refresh("wanted")
                    await asyncio.sleep(0.05)
                assert not ended.is_set()
                await asyncio.wait_for(ended.wait(), 5)
                with pytest.raises(NotPublishedError):
                    await peer.refresh("wanted")
                assert engine.stats().serve.failures == {"NotPublishedError": 1}, "to ask is no failure"

    run(job())


def test_a_publication_ends_when_nobody_is_left_who_wants_it() -> None:
    """Also where the reader's pool could take nothing of it."""

    async def job() -> None:
        other = CacheSpec(num_layers=1, num_heads=5, head_dim=32, page_size=4, dtype="float32")
        with make_pool(SPEC, 8) as pool, make_pool(other, 8) as mine, make_pool(SPEC, 8) as alike:
            ends: list[tuple[str, int]] = []
            async with (
                Engine(pool, listen="127.0.0.1:0") as engine,
                Engine(mine) as stranger,
                Engine(alike) as reader,
                stranger.connect(engine.address) as far,
                reader.connect(engine.address) as near,
            ):
                engine.publish("one", snapshot_of(pool, TABLE), max_readers=1, on_end=lambda *end: ends.append(end))
                with pytest.raises(GeometryError):
                    await far.fetch("one")
                assert ends == [], "it may have another pool"
                await far.decline("one")
                await eventually(lambda: ends == [("one", 0)])
                with pytest.raises(NotPublishedError):
                    await far.decline("one")
                engine.publish("two", snapshot_of(pool, TABLE), max_readers=2, on_end=lambda *end: ends.append(end))
                await far.decline("two")
                (await near.fetch("two")).release()
                await eventually(lambda: ends[1:] == [("two", 1)])
                engine.publish("any", snapshot_of(pool, TABLE), on_end=lambda *end: ends.append(end))
                await far.decline("any")
                (await near.fetch("any")).release()
                assert engine.unpublish("any") is True
                await eventually(lambda: ends[2:] == [("any", 1)])
                serve = engine.stats().serve
                assert serve.num_transfers == 2, "who declines has read nothing"
                assert set(serve.failures) == {"TransferAbortedError", "NotPublishedError"}, "the first reader's"

    run(job())


def test_what_is_raised_when_a_publication_ends_harms_neither_readers_nor_sessions() -> None:
    def end(key: str, num_read: int) -> None:
        ends.append((key, num_read))
        raise RuntimeError(f"{key} has ended")

    ends: list[tuple[str, int]] = []
    told: list[str] = []

    async def job() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(str(context["exception"])))
        with make_pool(SPEC, 8) as pool, make_pool(SPEC, 8) as mine:
            async with Engine(pool, listen="127.0.0.1:0") as engine:
                async with Engine(mine) as reader, reader.connect(engine.address) as peer:
                    engine.publish("read", snapshot_of(pool, TABLE), max_readers=1, on_end=end)
                    (await peer.fetch("read")).release()
                assert ends == [("read", 1)]
                async with shaken(engine.address) as hand:
                    await hand.expect(PoolsAnnounced)
                    with pool.allocator.lease(2) as lease:
                        for key, page in zip(("lost 1", "lost 2"), lease.page_ids.tolist(), strict=True):
                            engine.publish(key, snapshot_of(pool, [page]), on_end=end)
                            hand.do("fetch", Fetch(key=key, deadline_s=10), timeout_s=10)
                            await hand.expect(PublishedHeard)
                            engine.unpublish(key)
                    assert hand.channel is not None
                    hand.channel.abort()
                    await eventually(lambda: engine.stats().num_sessions == 0)
                    await settled(pool, 8, 0, 0)
                    assert sorted(ends[1:]) == [("lost 1", 0), ("lost 2", 0)]
                for key in ("left 1", "left 2"):
                    engine.publish(key, snapshot_of(pool, TABLE), on_end=end)
        assert sorted(ends[3:]) == [("left 1", 0), ("left 2", 0)]
        assert sorted(told) == sorted(f"{key} has ended" for key, _ in ends)

    run(job())
