"""Senders that break the rules of pages granted ahead, driven by hand: a typed error, and others go on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hurray_rdma import CacheSpec, Engine, PagePool, Placement, Snapshot, TransportError
from hurray_rdma.control import (
    AbortRequested,
    Acknowledged,
    ErrorCode,
    Grant,
    Granted,
    Offer,
    Prepare,
    Refused,
    Reserve,
    error_code,
)
from hurray_rdma.format import Dialect
from hurray_rdma.testing.pair import commit_like
from tests.engine.ahead_scenes import (
    NUM_PAGES,
    Taking,
    receiving,
    sending,
    until_granted_ahead,
)
from tests.engine.hands import Hand, shaken
from tests.hazards.scenes import (
    SPEC,
    counts,
    digest,
    eventually,
    fill,
    make_pool,
    run,
    settled,
    snapshot_of,
)


def reserve(hand: Hand, num_pages: int = 8, **more: Any) -> int:
    fields: dict[str, Any] = {"pool_id": 0, "generation": 1, "deadline_s": 10, "lane": "tcp", "path": "put"}
    return int(hand.do("reserve", Reserve(num_pages=num_pages, **(fields | more)), timeout_s=10))


def offer_of(snapshot: Snapshot, **more: Any) -> Offer:
    fields: dict[str, Any] = {
        "key": "by hand",
        "pool_id": 0,
        "generation": 1,
        "descriptors": snapshot.encode_descriptors(dialect=Dialect.ADR_024),
        "block_table": snapshot.block_table,
        "seq_ptr": snapshot.seq_ptr,
        "seq_lens": snapshot.seq_lens,
        "total_heads": snapshot.pool.spec.heads_of_model,
        "deadline_s": 10,
        "lane": "tcp",
        "path": "put",
    }
    return Offer(**(fields | more))


def say(hand: Hand, transfer_id: int, offer: Offer) -> None:
    """COMMIT, whatever the hand's own session thinks of it."""
    assert hand.channel is not None
    hand.session._send(commit_like(offer), transfer_id)
    hand.channel.notify()


@contextlib.asynccontextmanager
async def unharmed(engine: Engine, pool: PagePool, taking: Taking) -> AsyncIterator[None]:
    """Around what a hand does: another sender sends before, meanwhile and after, by pages granted ahead."""
    num_pages = pool.num_pages
    with make_pool(SPEC, 8) as source:
        fill(source, 5)
        sent = snapshot_of(source, [1, 2])
        async with sending(engine.address, source) as (sender_engine, peer, traffic):
            await until_granted_ahead(peer, sent, traffic)
            yield
            await until_granted_ahead(peer, sent, traffic)
            assert sender_engine.stats().send.failures == {}
        await settled(pool, num_pages, 0, 0)
        assert {(key, what) for key, what in taking.taken if key != "by hand"} == {("ahead", digest(sent))}
        assert {what for key, what in taking.taken if key == "by hand"} <= {"TransferAbortedError"}


async def expect_code(hand: Hand, kind: type[Any], code: ErrorCode) -> None:
    event = await hand.expect(kind)
    error = event.error
    assert error_code(error) == code, error


def test_the_hand_itself_can_do_it_right() -> None:
    async def job() -> None:
        async with receiving() as (engine, pool, taking), shaken(engine.address) as hand:
            with make_pool(SPEC, 64) as source:
                transfer_id = reserve(hand)
                grant = (await hand.expect(Granted)).grant
                assert len(grant.page_ids) == 8
                assert counts(pool) == (NUM_PAGES - 8, 8, 0)
                hand.do("commit", transfer_id, commit_like(offer_of(snapshot_of(source, [1, 2, 3]))))
                assert (await hand.expect(Acknowledged)).transfer_id == transfer_id
            await eventually(lambda: [key for key, _ in taking.taken] == ["by hand"])
            await settled(pool, NUM_PAGES, 0, 0)

    run(job())


@pytest.mark.parametrize("says_quiet", [True, False])
@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("more pages than granted", ErrorCode.GEOMETRY),
        ("other geometry", ErrorCode.GEOMETRY),
        ("a table that goes back", ErrorCode.GEOMETRY),
        ("a page beyond the pool", ErrorCode.GEOMETRY),
        ("descriptors of another number of pages", ErrorCode.GEOMETRY),
    ],
)
def test_a_commit_of_what_was_not_granted_is_refused(what: str, code: ErrorCode, says_quiet: bool) -> None:
    async def job() -> None:
        async with receiving(lease_s=0.5) as (engine, pool, taking), unharmed(engine, pool, taking):
            async with shaken(engine.address, says_quiet=says_quiet) as hand:
                with make_pool(SPEC, 64) as source, make_pool(replace(SPEC, head_dim=16), 64) as other:
                    await eventually(lambda: counts(pool)[1] <= 8)
                    transfer_id = reserve(hand)
                    await hand.expect(Granted)
                    match what:
                        case "more pages than granted":
                            offer = offer_of(snapshot_of(source, list(range(9))))
                        case "other geometry":
                            offer = offer_of(snapshot_of(other, [1]))
                        case "a table that goes back":
                            whole = Snapshot.from_block_tables(source, [[1], [2], [3]], seq_lens=[4, 4, 4])
                            offer = offer_of(whole)
                            object.__setattr__(offer, "seq_ptr", np.array([0, 2, 1, 3], np.uint32))
                        case "a page beyond the pool":
                            offer = offer_of(snapshot_of(source, [1]), block_table=np.array([64], np.uint32))
                        case _:
                            of_all = snapshot_of(source, [1, 2])
                            offer = offer_of(
                                of_all,
                                block_table=of_all.block_table[:1],
                                seq_ptr=np.array([0, 1]),
                                seq_lens=np.array([4]),
                            )
                    say(hand, transfer_id, offer)
                    await expect_code(hand, AbortRequested, code)
                    if not says_quiet:
                        await eventually(lambda: counts(pool)[2] == 8)
            await settled_but_ahead(pool)
            stats = engine.stats()
            assert (stats.num_quarantined, stats.num_recovered) == ((0, 0) if says_quiet else (8, 8))

    run(job())


def ring(pool: PagePool, grant: Grant, token: int) -> None:
    """As its sender would, through its mapping."""
    at = grant.bell_offset_nbytes
    pool.regions[0].array()[at : at + 8].view(np.uint64)[0] = token


MAPPED = {"path": "mapped", "lane": "sysv"}


def test_a_snapshot_arrives_when_its_bell_rings_and_once_whatever_is_said_of_it_later() -> None:
    async def job() -> None:
        async with receiving() as (engine, pool, taking), shaken(engine.address) as hand:
            with make_pool(SPEC, 64) as source:
                commit = offer_of(snapshot_of(source, [1, 2, 3]))
                prepare = commit_like(commit, Prepare)
                for rings_before in (True, False):
                    transfer_id = reserve(hand, **MAPPED)
                    grant = (await hand.expect(Granted)).grant
                    assert grant.bell_token > 0
                    if rings_before:
                        ring(pool, grant, grant.bell_token)
                    hand.do("prepare", transfer_id, prepare)
                    if rings_before:
                        hand.do("commit", transfer_id, commit_like(commit), rung=True)
                    else:  # nothing follows from it, until COMMIT is said: it is listened to once
                        for _ in range(2):
                            reserve(hand, 17)
                            await expect_code(hand, Refused, ErrorCode.POOL_EXHAUSTED)
                            assert len(taking.taken) == 1
                            ring(pool, grant, grant.bell_token)
                            hand.do("prepare", transfer_id, prepare)
                        hand.do("commit", transfer_id, commit_like(commit))
                    assert (await hand.expect(Acknowledged)).transfer_id == transfer_id
                    say(hand, transfer_id, commit)
                    await eventually(lambda before=rings_before: len(taking.taken) == 2 - before)
                    await settled(pool, NUM_PAGES, 0, 0)
            assert [key for key, _ in taking.taken] == ["by hand"] * 2
            assert engine.stats().receive.num_transfers == 2
            assert engine.stats().receive.failures == {}

    run(job())


@pytest.mark.parametrize("what", ["no ring", "another token", "bad tables", "too many pages", "expected elsewhere"])
def test_what_is_prepared_and_not_rung_for_or_wrong_is_not_taken(what: str) -> None:
    async def job() -> None:
        async with receiving() as (engine, pool, taking), unharmed(engine, pool, taking):
            async with shaken(engine.address) as hand:
                with make_pool(SPEC, 64) as source:
                    await eventually(lambda: counts(pool)[1] <= 8)
                    transfer_id = reserve(hand, **MAPPED)
                    grant = (await hand.expect(Granted)).grant
                    sent = snapshot_of(source, list(range(9 if what == "too many pages" else 3)))
                    prepare = commit_like(offer_of(sent), Prepare)
                    match what:
                        case "another token":
                            ring(pool, grant, grant.bell_token + 1)
                        case "bad tables":
                            prepare.block_table = np.array([64, 65, 66], np.uint32)
                        case "expected elsewhere":
                            chosen = pool.allocator.lease(3)
                            engine.expect("by hand", Placement(pool, chosen.page_ids))
                    if what not in ("no ring", "another token"):
                        ring(pool, grant, grant.bell_token)
                    hand.do("prepare", transfer_id, prepare)
                    hand.do("abort", transfer_id, ErrorCode.ABORTED, "enough")
                    hand.do("quiet", transfer_id)
                    if what == "expected elsewhere":
                        await eventually(lambda: counts(pool)[1] <= 11)
                        assert engine.unexpect("by hand")
                        chosen.release()
                await eventually(lambda: counts(pool)[1] <= 16)
            assert [key for key, _ in taking.taken if key == "by hand"] == []
            assert engine.stats().num_quarantined == 0

    run(job())


def test_what_rang_for_an_earlier_engine_completes_nothing_of_the_next_one_on_the_pool() -> None:
    async def job() -> None:
        with make_pool(SPEC, 16) as pool, make_pool(SPEC, 16) as source:
            offer = offer_of(snapshot_of(source, [1, 2, 3]))
            for rings in (True, False):
                async with Engine(pool, listen="127.0.0.1:0", timeout_s=10, ahead_pages=8) as engine:
                    taking = Taking(engine)
                    async with shaken(engine.address) as hand:
                        transfer_id = reserve(hand, **MAPPED)
                        grant = (await hand.expect(Granted)).grant
                        if rings:
                            ring(pool, grant, grant.bell_token)
                        hand.do("prepare", transfer_id, commit_like(offer, Prepare))
                        if rings:
                            hand.do("commit", transfer_id, commit_like(offer), rung=True)
                            await hand.expect(Acknowledged)
                        else:
                            hand.do("abort", transfer_id, ErrorCode.ABORTED, "enough")
                            hand.do("quiet", transfer_id)
                        await settled(pool, 16, 0, 0)
                    taking.check()
                await taking.end()
                assert len(taking.taken) == rings

    run(job())


def test_grants_to_senders_that_map_nothing_have_no_bell() -> None:
    async def job() -> None:
        async with receiving() as (engine, _, taking), shaken(engine.address) as hand:
            reserve(hand)
            assert (await hand.expect(Granted)).grant.bell_token == 0
            taking.check()

    run(job())


def test_what_is_being_filled_is_no_part_of_the_share_that_may_be_held_ready() -> None:
    """A sender asks for its next pages before its COMMIT, where its bell was not heard."""

    async def job() -> None:
        async with receiving(64) as (engine, pool, taking), shaken(engine.address) as hand:
            with make_pool(SPEC, 64) as source:
                commit = offer_of(snapshot_of(source, [1, 2]))
                transfer_id = reserve(hand, **MAPPED)
                await hand.expect(Granted)
                reserve(hand, **MAPPED)
                await expect_code(hand, Refused, ErrorCode.POOL_EXHAUSTED)
                hand.do("prepare", transfer_id, commit_like(commit, Prepare))
                reserve(hand, **MAPPED)
                await hand.expect(Granted)
                assert counts(pool) == (48, 16, 0)
                hand.do("commit", transfer_id, commit_like(commit))
                await hand.expect(Acknowledged)
                await settled(pool, 56, 8, 0)
                reserve(hand, 1, **MAPPED)
                await expect_code(hand, Refused, ErrorCode.POOL_EXHAUSTED)
            await settled(pool, 56, 8, 0)
            taking.check()

    run(job())


@pytest.mark.parametrize("ends", ["committed", "given back", "lost"])
def test_who_prepares_and_never_rings_gets_no_more_than_the_share_twice(ends: str) -> None:
    """As much may be filled as may be held ready; whatever else is said to be filled counts as held ready still."""

    async def job() -> None:
        async with receiving() as (engine, pool, taking):
            with make_pool(SPEC, 64) as source:
                commit = offer_of(snapshot_of(source, [1, 2]))
                for _ in range(2):  # all of it comes back
                    async with shaken(engine.address) as hand:
                        held = []
                        for _ in range(4):
                            held.append(reserve(hand, **MAPPED))
                            await hand.expect(Granted)
                            hand.do("prepare", held[-1], commit_like(commit, Prepare))
                        assert counts(pool) == (NUM_PAGES - 32, 32, 0)
                        for num_pages in (8, 1):
                            reserve(hand, num_pages, **MAPPED)
                            await expect_code(hand, Refused, ErrorCode.POOL_EXHAUSTED)
                        for transfer_id in held if ends != "lost" else ():
                            if ends == "committed":
                                hand.do("commit", transfer_id, commit_like(commit))
                                await hand.expect(Acknowledged)
                            else:
                                hand.do("abort", transfer_id, ErrorCode.ABORTED, "enough")
                                hand.do("quiet", transfer_id)
                    await settled(pool, NUM_PAGES, 0, 0)
            assert len(taking.taken) == (8 if ends == "committed" else 0)

    run(job())


def test_when_all_bells_are_out_pages_are_granted_without() -> None:
    async def job() -> None:
        async with receiving(8 * 80) as (engine, _, taking), shaken(engine.address) as hand:
            bells = []
            for _ in range(70):
                reserve(hand, 1, **MAPPED)
                bells.append((await hand.expect(Granted)).grant)
            assert len({grant.bell_token for grant in bells}) == 65
            assert [grant.bell_token for grant in bells[64:]] == [0] * 6
            taking.check()

    run(job())


async def settled_but_ahead(pool: PagePool) -> None:
    """Nothing in quarantine; leased are at most those that the other sender holds ahead."""
    await eventually(lambda: counts(pool)[2] == 0 and counts(pool)[1] <= 16)


def test_commits_of_what_was_never_reserved_or_was_recalled_are_nothing() -> None:
    async def job() -> None:
        async with (
            receiving(64) as (engine, pool, taking),
            unharmed(engine, pool, taking),
            shaken(engine.address, says_quiet=False) as hand,
        ):
            with make_pool(SPEC, 64) as source:
                offer = offer_of(snapshot_of(source, [1]))
                for transfer_id in (1000, 1001, 2**32 - 1):
                    say(hand, transfer_id, offer)
                # Taken from the other sender, which holds all that may be granted ahead.
                held = pool.allocator.lease(56)
                transfer_id = hand.offer(snapshot_of(source, [1, 2]), path="put")
                granted = await hand.expect(Granted)
                assert granted.transfer_id == transfer_id
                hand.do("abort", transfer_id, ErrorCode.ABORTED, "enough")
                hand.do("quiet", transfer_id)
                held.release()
                await settled(pool, 64, 0, 0)

                transfer_id = reserve(hand)
                await hand.expect(Granted)
                held = pool.allocator.lease(56)
                waiting = hand.offer(snapshot_of(source, [3]), path="put")
                await expect_code(hand, AbortRequested, ErrorCode.ABORTED)
                say(hand, transfer_id, offer)  # crossed the recall
                await asyncio.sleep(0.1)
                assert counts(pool) == (0, 64, 0)
                hand.do("quiet", transfer_id)
                assert (await hand.expect(Granted)).transfer_id == waiting
                hand.do("abort", waiting, ErrorCode.ABORTED, "enough")
                hand.do("quiet", waiting)
                held.release()
                say(hand, transfer_id, offer)  # late
                await settled(pool, 64, 0, 0)
                assert engine.stats().num_quarantined == 0

    run(job())


def test_reservations_beyond_bounds_are_refused() -> None:
    async def job() -> None:
        async with (
            receiving() as (engine, pool, taking),
            unharmed(engine, pool, taking),
            shaken(engine.address) as hand,
        ):
            reserve(hand, 17)
            await expect_code(hand, Refused, ErrorCode.POOL_EXHAUSTED)
            reserve(hand, 2**22)
            await expect_code(hand, Refused, ErrorCode.POOL_EXHAUSTED)
            reserve(hand, 1, generation=2)
            await expect_code(hand, Refused, ErrorCode.STALE_GENERATION)
            assert counts(pool)[1] <= 16
            assert engine.stats().receive.failures == {}
            reserve(hand, 1, pool_id=7)
            await expect_code(hand, Refused, ErrorCode.STALE_GENERATION)

    run(job())


def test_one_sender_holds_no_more_than_the_share_of_all() -> None:
    async def job() -> None:
        async with receiving(lease_s=0.5) as (engine, pool, taking), shaken(engine.address) as hand:
            for _ in range(100):
                reserve(hand, 1)
            for _ in range(16):
                await hand.expect(Granted)
            for _ in range(84):
                await expect_code(hand, Refused, ErrorCode.POOL_EXHAUSTED)
            assert counts(pool) == (NUM_PAGES - 16, 16, 0)
            await settled(pool, NUM_PAGES, 0, 0)  # recalled, and the hand said QUIET
            taking.check()

    run(job())


def test_a_grant_that_the_sender_cannot_take_costs_no_page() -> None:
    spec = CacheSpec(num_layers=1, num_heads=1, head_dim=2, page_size=1, dtype="int8")

    async def job() -> None:
        num_pages = 8 * 20000  # page IDs of 80,000 bytes
        async with receiving(num_pages, spec=spec) as (engine, pool, taking):
            async with shaken(engine.address, max_message_nbytes=64 * 1024) as hand:
                reserve(hand, 20000)
                await expect_code(hand, Refused, ErrorCode.CONFIG)
                assert counts(pool) == (num_pages, 0, 0)
                reserve(hand, 10000)
                await hand.expect(Granted)
                assert counts(pool) == (num_pages - 10000, 10000, 0)
            await settled(pool, num_pages, 0, 0)
            taking.check()

    run(job())


def test_a_sender_that_gives_pages_back_late_has_a_lease_to_say_quiet() -> None:
    async def job() -> None:
        async with receiving(64, lease_s=0.6) as (engine, pool, taking), shaken(engine.address) as hand:
            transfer_id = reserve(hand)
            await hand.expect(Granted)
            await asyncio.sleep(0.45)
            hand.do("abort", transfer_id, ErrorCode.ABORTED, "not needed")
            await asyncio.sleep(0.4)  # the lease of the grant is over, that of the end is not
            assert counts(pool) == (56, 8, 0)
            hand.do("quiet", transfer_id)
            await settled(pool, 64, 0, 0)
            assert engine.stats().num_quarantined == 0
            taking.check()

    run(job())


def test_a_commit_that_cannot_be_flushed_harms_nothing_when_its_session_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def job() -> None:
        begun, ended, raised = threading.Event(), threading.Event(), []

        def flush(_: PagePool) -> None:
            begun.set()
            assert ended.wait(10)
            raise TransportError("cuFlushGPUDirectRDMAWrites: an illegal memory access was encountered", status=700)

        asyncio.get_running_loop().set_exception_handler(lambda _, what: raised.append(what))
        async with receiving() as (engine, pool, taking):
            with monkeypatch.context() as patches, make_pool(SPEC, 64) as source:
                patches.setattr(PagePool, "needs_flush", property(lambda each: each is pool))
                patches.setattr(PagePool, "make_visible", flush)
                async with shaken(engine.address) as hand:
                    transfer_id = reserve(hand)
                    await hand.expect(Granted)
                    say(hand, transfer_id, offer_of(snapshot_of(source, [1, 2, 3])))
                    await eventually(begun.is_set)
                await settled(pool, NUM_PAGES, 0, 0)
                ended.set()
                await eventually(lambda: engine._reception._receivers[""].granted.visibility._flushing is None)  # type: ignore[union-attr]
            assert (raised, taking.taken, engine.stats().receive.failures) == ([], [], {})

    run(job())
