"""Readers of published snapshots: they have the time that they ask for while they go on, and the source's pages come
back when they do not."""

from __future__ import annotations

import asyncio

import pytest

from hurray_rdma import ConfigError, DeadlineExceededError, Engine, NotPublishedError, Snapshot
from hurray_rdma.control import (
    AbortRequested,
    Acknowledged,
    ClientSession,
    ErrorCode,
    Fetch,
    Granted,
    PoolsAnnounced,
    PublishedHeard,
    Refused,
)
from tests.engine.hands import Hand, shaken
from tests.hazards.scenes import SPEC, counts, eventually, make_pool, run, settled, snapshot_of

DAYS_S = 7 * 86400.0


@pytest.mark.parametrize(("lease_s", "timeout_s"), [(0.4, 0.2), (0.2, 0.4)])
def test_a_reader_that_asks_for_days_and_falls_silent_has_what_the_engine_allows(
    lease_s: float, timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClientSession, "_renew", lambda *_: None)

    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            async with (
                Engine(pool, listen="127.0.0.1:0", lease_s=lease_s, timeout_s=timeout_s) as engine,
                shaken(engine.address) as hand,
            ):
                await hand.expect(PoolsAnnounced)
                with pool.allocator.lease(3) as lease:
                    engine.publish("short", snapshot_of(pool, lease.page_ids.tolist()), lease_s=60)
                asked = hand.do("fetch", Fetch(key="short", deadline_s=DAYS_S), timeout_s=DAYS_S)
                heard = await hand.expect(PublishedHeard)
                assert (heard.transfer_id, heard.published.lease_s) == (asked, 0.4)
                engine.unpublish("short")
                assert counts(pool) == (5, 3, 0), "it is being read"
                ended = await hand.expect(AbortRequested)
                assert ended.transfer_id == asked
                assert "the reader did not renew its lease of 0.4 s" in str(ended.error)
                await settled(pool, 8, 0, 0)
                assert engine.stats().serve.failures == {"LeaseExpiredError": 1}

    run(job())


def test_a_reader_that_asks_for_less_has_less() -> None:
    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            async with Engine(pool, listen="127.0.0.1:0", lease_s=30) as engine, shaken(engine.address) as hand:
                await hand.expect(PoolsAnnounced)
                with pool.allocator.lease(3) as lease:
                    engine.publish("short", snapshot_of(pool, lease.page_ids.tolist()))
                hand.do("fetch", Fetch(key="short", deadline_s=0.2), timeout_s=10)
                assert (await hand.expect(PublishedHeard)).published.lease_s == 0.2
                engine.unpublish("short")
                ended = await hand.expect(AbortRequested)  # although it would renew its lease for 10 s
                assert "the reader took longer than it had asked for" in str(ended.error)
                await settled(pool, 8, 0, 0)

    run(job())


def test_a_reader_has_the_time_that_it_asked_for_not_the_sources() -> None:
    """More than two of the source's leases."""

    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            async with (
                Engine(pool, listen="127.0.0.1:0", lease_s=1.0, timeout_s=1.0) as engine,
                shaken(engine.address) as hand,
            ):
                await hand.expect(PoolsAnnounced)
                engine.publish("long", snapshot_of(pool, [1, 2]), lease_s=60)
                asked = hand.do("fetch", Fetch(key="long", deadline_s=20), timeout_s=20)
                assert (await hand.expect(PublishedHeard)).published.lease_s == 1.0
                await asyncio.sleep(2.3)
                hand.do("read_end", asked)
                await hand.expect(Acknowledged)
                assert engine.stats().serve.failures == {}

    run(job())


# The lease of what is published.


class Kernels:
    """Work on a stream, as a publication waits for it."""

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def passed(self) -> asyncio.Future[None]:
        return self.future


def publish_behind(engine: Engine, kernels: Kernels, key: str, pages: list[int], *, lease_s: float) -> None:
    snapshot = snapshot_of(engine.pool, pages)  # type: ignore[arg-type]
    engine._receiving().publishing.publish(
        key,
        snapshot,
        lease_s=lease_s,
        page_keys=None,
        max_readers=None,
        on_end=None,
        mark=kernels,  # type: ignore[arg-type]
    )


def test_what_is_published_behind_kernels_is_kept_from_when_they_have_run() -> None:
    """They take longer than its lease; so does who has asked meanwhile wait longer."""

    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            async with Engine(pool, listen="127.0.0.1:0") as engine, shaken(engine.address) as hand:
                await hand.expect(PoolsAnnounced)
                kernels = Kernels()
                for key in ("asked for", "not yet"):
                    publish_behind(engine, kernels, key, [1, 2], lease_s=0.2)
                hand.do("fetch", Fetch(key="asked for", deadline_s=20), timeout_s=20)
                await asyncio.sleep(0.5)
                assert engine.stats().num_leases_expired == 0
                kernels.future.set_result(None)
                await hand.expect(PublishedHeard)
                await eventually(lambda: engine.stats().num_leases_expired == 2)
                assert not engine.unpublish("not yet")

    run(job())


def test_what_is_asked_for_while_its_pool_is_registered_anew_is_kept() -> None:
    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            async with (
                Engine(pool, listen="127.0.0.1:0", timeout_s=20) as engine,
                shaken(engine.address) as writer,
                shaken(engine.address) as hand,
            ):
                await hand.expect(PoolsAnnounced)
                await writer.expect(PoolsAnnounced)
                writing = writer.offer(snapshot_of(pool, [1]))  # which the renewal waits for
                await writer.expect(Granted)
                engine.publish("kept", snapshot_of(pool, [1, 2]), lease_s=1.0)
                renewing = asyncio.create_task(engine.reregister())
                await eventually(lambda: engine._receiving()._named("").holding)
                hand.do("fetch", Fetch(key="kept", deadline_s=20), timeout_s=20)
                await asyncio.sleep(1.3)
                writer.do("abort", writing, ErrorCode.ABORTED, "not wanted")
                writer.do("quiet", writing)
                await renewing
                assert (await hand.expect(PublishedHeard)).published.generation == 2

    run(job())


# Who waits for an answer.


def test_fetches_that_end_while_they_wait_leave_nothing_behind() -> None:
    """Else one peer could have the source keep any number of them."""

    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=20) as engine, shaken(engine.address) as hand:
                await hand.expect(PoolsAnnounced)
                publishing, kernels = engine._receiving().publishing, Kernels()
                publish_behind(engine, kernels, "later", [1, 2], lease_s=20)
                engine._receiving()._named("")._queue.holding = True
                engine.publish("held", snapshot_of(pool, [3]))
                timers = num_timers()
                for _ in range(20):
                    for key in ("later", "held"):
                        asked = hand.do("fetch", Fetch(key=key, deadline_s=20), timeout_s=20)
                        await eventually(lambda: len(publishing._waiting) == 1)
                        hand.do("abort", asked, ErrorCode.ABORTED, "not wanted")
                        hand.do("quiet", asked)
                        await eventually(lambda: not publishing._waiting)
                assert len(kernels.future._callbacks) == 1  # type: ignore[attr-defined]
                assert num_timers() <= timers + 1, "that of the publication asked for"
                for key in ("later", "held"):
                    hand.do("fetch", Fetch(key=key, deadline_s=20), timeout_s=20)
                await eventually(lambda: len(publishing._waiting) == 2)
                assert hand.channel is not None
                hand.channel.abort()
                await eventually(lambda: not publishing._waiting)
                kernels.future.set_result(None)

    run(job())


def num_timers() -> int:
    """Of publishing that will go off; none are known where the loop is not asyncio's own."""
    scheduled: list[asyncio.TimerHandle] = getattr(asyncio.get_running_loop(), "_scheduled", [])
    return sum(not each.cancelled() and "publishing" in repr(each) for each in scheduled)


def test_who_waits_hears_that_it_will_not_come() -> None:
    async def job() -> None:
        with make_pool(SPEC, 8) as pool, make_pool(SPEC, 8) as other:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=20) as engine, shaken(engine.address) as hand:
                await hand.expect(PoolsAnnounced)
                engine.add_pool(other, name="other")
                publish_behind(engine, Kernels(), "taken back", [1], lease_s=20)
                engine.publish("gone", snapshot_of(other, [1]))
                engine._receiving()._named("other")._queue.holding = True
                for key in ("taken back", "gone"):
                    asked = hand.do("fetch", Fetch(key=key, deadline_s=20), timeout_s=20)
                    await eventually(lambda: len(engine._receiving().publishing._waiting) == 1)
                    if key == "gone":
                        engine.remove_pool("other")
                    else:
                        engine.unpublish(key)
                    refused = await hand.expect(Refused)
                    assert refused.transfer_id == asked
                    assert isinstance(refused.error, NotPublishedError)

    run(job())


# Numbers.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lease_s", 0),
        ("lease_s", -1),
        ("lease_s", float("nan")),
        ("lease_s", float("inf")),
        ("max_readers", 0),
        ("max_readers", -1),
    ],
)
def test_numbers_out_of_range_are_refused(field: str, value: float) -> None:
    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            async with Engine(pool, listen="127.0.0.1:0") as engine:
                with pool.allocator.lease(3) as lease:
                    snapshot = snapshot_of(pool, lease.page_ids.tolist())
                    with pytest.raises(ConfigError, match=f"{field} = {value}: must be"):
                        engine.publish("some", snapshot, **{field: value})  # type: ignore[arg-type]
                assert counts(pool) == (8, 0, 0)
                assert not engine.unpublish("some")

    run(job())


@pytest.mark.parametrize("leased", [True, False])
def test_what_was_served_is_the_pages_with_tokens_each_once_whoever_leased_them(leased: bool) -> None:
    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            async with Engine(pool, listen="127.0.0.1:0") as engine, shaken(engine.address) as hand:
                await hand.expect(PoolsAnnounced)
                page_ids = pool.allocator.lease(5).page_ids.tolist() if leased else [0, 1, 2, 3, 4]
                tables = [page_ids[:4], [page_ids[0], page_ids[4]]]
                # 4 tokens a page: the first sequence has two pages allocated ahead, and shares its first page.
                engine.publish("some", Snapshot.from_block_tables(pool, tables, seq_lens=[8, 5]))
                asked = hand.do("fetch", Fetch(key="some", deadline_s=20), timeout_s=20)
                await hand.expect(PublishedHeard)
                hand.do("read_end", asked)
                await hand.expect(Acknowledged)
                page_nbytes = 4 * 2 * 8 * 2  # tokens, heads, elements, bytes
                assert engine.stats().serve.nbytes == 3 * 4 * page_nbytes  # of key and value of two layers

    run(job())


def test_a_reader_that_goes_on_for_ever_has_what_the_engine_allows() -> None:
    """It asked for days, and renews its lease."""

    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            async with (
                Engine(pool, listen="127.0.0.1:0", lease_s=0.3, timeout_s=0.3, max_transfer_s=1) as engine,
                shaken(engine.address) as hand,
            ):
                await hand.expect(PoolsAnnounced)
                with pool.allocator.lease(3) as lease:
                    engine.publish("long", snapshot_of(pool, lease.page_ids.tolist()), lease_s=60)
                hand.do("fetch", Fetch(key="long", deadline_s=DAYS_S), timeout_s=DAYS_S)
                await hand.expect(PublishedHeard)
                engine.unpublish("long")
                ended = await hand.expect(AbortRequested)
                assert "than this engine's max_transfer_s" in str(ended.error)
                await settled(pool, 8, 0, 0)

    run(job())


@pytest.mark.parametrize("busy", ["silent but for renewals", "with frames"])
def test_a_sender_that_goes_on_for_ever_has_what_the_engine_allows(busy: str) -> None:
    async def trickle(hand: Hand, transfer_id: int) -> None:
        for at in range(2048):
            hand.do("tensor_data", transfer_id, 0, at, b"x")
            await asyncio.sleep(0.05)

    async def job() -> None:
        with make_pool(SPEC, 16) as pool:
            async with (
                Engine(pool, listen="127.0.0.1:0", lease_s=0.3, max_transfer_s=1) as engine,
                shaken(engine.address) as hand,
            ):
                await hand.expect(PoolsAnnounced)
                transfer_id = hand.offer(snapshot_of(pool, list(range(16))), deadline_s=DAYS_S)
                await hand.expect(Granted)
                arrival = await anext(engine.arrivals())
                talking = asyncio.create_task(trickle(hand, transfer_id)) if busy == "with frames" else None
                with pytest.raises(DeadlineExceededError, match="max_transfer_s = 1: no transfer keeps pages"):
                    await arrival.snapshot(timeout_s=20)
                if talking is not None:
                    talking.cancel()
                await settled(pool, 16, 0, 0)
                assert engine.stats().receive.failures == {"DeadlineExceededError": 1}

    run(job())


def test_the_longest_time_is_a_time() -> None:
    with make_pool(SPEC, 8) as pool, pytest.raises(ConfigError, match="max_transfer_s = 0: must be above 0"):
        Engine(pool, max_transfer_s=0)
