"""Small snapshots into pages granted ahead: one message each way, and nobody is worse off."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import weakref
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import pytest

from hurray_rdma import CacheSpec, Engine, GeometryError, PagePool, Placement, Snapshot
from hurray_rdma.cache import snapshot_keys
from hurray_rdma.engine import connection as routes
from hurray_rdma.engine.remote_pool import RemotePool
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Context
from tests.engine import test_unlike as unlike
from tests.engine.ahead_scenes import (
    AHEAD_PAGES,
    NUM_PAGES,
    Traffic,
    ask,
    hear,
    receiving,
    send,
    sender,
    sending,
    until_granted_ahead,
)
from tests.hazards.scenes import (
    LANES,
    SPEC,
    counts,
    digest,
    eventually,
    fill,
    make_pool,
    receiver,
    run,
    settled,
    snapshot_of,
)

pytestmark = pytest.mark.both_loops

# One message each way.


def test_pages_granted_ahead_are_used_from_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages are the host's here; where they are said to be counts."""
    devices, pool_for = ["cuda:0"], routes.Connection.pool_for

    def seen_from(route: routes.Connection, spec: CacheSpec, _: str | None, *, device: str) -> RemotePool:
        return pool_for(route, spec, "default", device=devices[0])

    async def job() -> None:
        monkeypatch.setattr(routes.Connection, "pool_for", seen_from)
        async with receiving(ahead_pages=64) as (engine, _, taking):
            with make_pool(SPEC, 8) as own:
                async with sending(engine.address, own) as (_, peer, traffic):
                    for device in ("cuda:0", "cuda:1", "cpu"):
                        devices[0] = device
                        with make_pool(SPEC, 64) as pool:
                            fill(pool, 1)
                            before = traffic["RESERVE"]
                            await until_granted_ahead(peer, snapshot_of(pool, [3, 1]), traffic)
                            assert 0 < traffic["RESERVE"] - before <= 2 * 2
                            expected = {digest(snapshot_of(pool, [3, 1]))}
                    assert {outcome for _, outcome in taking.taken} == expected

    run(job())


@pytest.mark.parametrize("lane", LANES)
def test_small_sends_in_a_row_take_one_message_each_way(lane: str) -> None:
    async def job() -> None:
        kind, options = LANES[lane]
        with (
            make_pool(SPEC, 64, kind, Context(options) if options else None) as pool,
            Child(receiver, {"lane": lane, "num_pages": NUM_PAGES, "ahead_pages": AHEAD_PAGES}) as child,
        ):
            fill(pool, 1)
            random = np.random.default_rng(2)
            async with sending(await hear(child), pool) as (engine, peer, traffic):
                for n in range(40):
                    sent = snapshot_of(pool, random.permutation(64)[: n % 8 + 1].tolist())
                    stats = await peer.send(sent, key=str(n))
                    assert (stats.key, stats.num_pages, stats.num_tokens) == (str(n), n % 8 + 1, 4 * (n % 8 + 1))
                    assert stats.sent_nbytes == stats.logical_nbytes == (n % 8 + 1) * 512
                    assert await hear(child) == (str(n), digest(sent))
                await eventually(lambda: traffic["GRANT"] == traffic["RESERVE"] + traffic["OFFER"])
                # All but the first, and some whose pages were still on the way, as the next grant travels with the
                # acknowledgement: PREPARE or COMMIT and the next RESERVE there, the acknowledgement and its GRANT back.
                now, usual = traffic.counts(), traffic["OFFER"]
                assert 1 <= usual <= 4
                told = now["PREPARE" if lane == "mapped" else "COMMIT"]
                assert told == 40 - usual
                assert lane != "mapped" or now["COMMIT"] < 40 - usual, "no bell was heard"
                assert lane == "mapped" or now["PREPARE"] == 0
                assert (now["ENDED"], now["TENSOR_DATA_END"]) == (usual, 0)
                again = now["COMMIT"] if lane == "mapped" else 0  # acknowledged twice, where that crosses it
                assert 40 <= now["TENSOR_PUT_ACK"] <= 40 + again
                assert told + 1 <= now["RESERVE"] <= told + 2
                assert now["ABORT"] == now["QUIET"] == now["ERROR"] == 0
                sent_stats = engine.stats().send
                assert (sent_stats.num_transfers, sent_stats.failures) == (40, {})
                assert sent_stats.num_pages == sum(n % 8 + 1 for n in range(40))
                assert await ask(child, "counts") in [(NUM_PAGES - held, held, 0) for held in (8, 16)]
            await eventually(lambda: counts_of(child, (NUM_PAGES, 0, 0)))
            child.send("end")

    run(job())


async def counts_of(child: Child, expected: tuple[int, int, int]) -> bool:
    return await ask(child, "counts") == expected


def test_nothing_is_committed_over_a_session_that_looks_dead() -> None:
    """One that has broken while the loop was busy shows so in the usual way, which costs the transfer nothing."""

    async def job() -> None:
        async with receiving(peer_timeout_s=30) as (engine, _, taking):
            with make_pool(SPEC, 8) as pool:
                async with sending(engine.address, pool, peer_timeout_s=1) as (_, peer, traffic):
                    sent = snapshot_of(pool, [1])
                    await until_granted_ahead(peer, sent, traffic)
                    before, ahead = traffic.counts(), traffic.ahead
                    time.sleep(0.4)  # noqa: ASYNC251 - nothing is heard meanwhile: 8 heartbeats of 50 ms
                    await peer.send(sent, key="after silence")
                    assert traffic.ahead == ahead
                    assert traffic["OFFER"] == before["OFFER"] + 1
                    await until_granted_ahead(peer, sent, traffic)
                    assert "after silence" in dict(taking.taken)

    run(job())


def test_a_connection_that_is_lost_while_pools_are_opened_costs_the_send_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def job() -> None:
        async with receiving(lease_s=0.4) as (engine, receiving_pool, taking):
            with make_pool(SPEC, 8) as pool:
                async with sending(engine.address, pool) as (_, peer, traffic):
                    sent = snapshot_of(pool, [1])
                    await until_granted_ahead(peer, sent, traffic)
                    await settled(receiving_pool, NUM_PAGES, 0, 0)  # none is held ready: it would be asked for
                    opened, lost = routes.Connection.open_pools, []

                    async def slow(route: routes.Connection, deadline: float) -> None:
                        if not lost:
                            lost.append(route)
                            route._channel.abort()  # type: ignore[union-attr]
                        await opened(route, deadline)

                    monkeypatch.setattr(routes.Connection, "opens_pools", property(lambda _: not lost))
                    monkeypatch.setattr(routes.Connection, "open_pools", slow)
                    await peer.send(sent, key="later")
                    assert lost
                    await eventually(lambda: "later" in dict(taking.taken))

    run(job())


@pytest.mark.parametrize("ahead_pages", [0, 16])
@pytest.mark.parametrize("num_left", [0, 1, 6, 1 << 20])
def test_a_session_whose_stream_ids_run_out_is_followed_by_another(num_left: int, ahead_pages: int) -> None:
    async def job() -> None:
        async with receiving(ahead_pages=ahead_pages) as (engine, _, taking):
            with make_pool(SPEC, 8) as pool:
                async with sending(engine.address, pool) as (sender_engine, peer, _):
                    sent = snapshot_of(pool, [1])
                    await peer.send(sent, key="before")
                    assert peer._connection is not None
                    peer._connection.session._book.next_id = 2**32 - num_left
                    for n in range(6):
                        await peer.send(sent, key=str(n))
                    assert sender_engine.stats().num_connects == 2
                await eventually(lambda: [key for key, _ in taking.taken] == ["before", *"012345"])

    run(job())


def test_a_peer_keeps_no_pool_whose_snapshots_it_has_sent() -> None:
    async def job() -> None:
        async with receiving() as (engine, _, taking):
            with make_pool(SPEC, 8) as own:
                async with sending(engine.address, own) as (_, peer, traffic):
                    pool = make_pool(SPEC, 8)
                    await until_granted_ahead(peer, snapshot_of(pool, [1]), traffic)
                    pool.close()
                    gone = weakref.ref(pool)
                    del pool
                    gc.collect()
                    assert gone() is None
                    await until_granted_ahead(peer, snapshot_of(own, [1]), traffic)
                    taking.check()

    run(job())


def test_both_sides_count_each_transfer_once() -> None:
    async def job() -> None:
        async with receiving() as (engine, _, taking), Traffic(engine.address) as traffic:
            with Child(sender, traffic.address, {}) as child:
                await hear(child)
                for n in range(10):
                    await send(child, str(n), [n, n + 20], taking)
                assert traffic.ahead >= 7
                theirs, ours = (await ask(child, "stats")).send, engine.stats().receive
                assert (theirs.num_transfers, theirs.num_pages, theirs.failures) == (10, 20, {})
                assert (ours.num_transfers, ours.num_pages, ours.failures) == (10, 20, {})
                assert theirs.nbytes == ours.nbytes == 20 * 512
                assert theirs.lanes == ours.lanes
                assert (engine.stats().num_arriving, engine.stats().num_waiting) == (0, 0)
                child.send("end")

    run(job())


def test_layers_of_what_came_at_once_are_there_at_once() -> None:
    async def job() -> None:
        with make_pool(SPEC, NUM_PAGES) as pool, make_pool(SPEC, 8) as source:
            fill(source, 1)
            async with (
                Engine(pool, listen="127.0.0.1:0", timeout_s=10, ahead_pages=AHEAD_PAGES) as engine,
                sending(engine.address, source) as (_, peer, traffic),
            ):
                for n in range(4):
                    sent = snapshot_of(source, [n])
                    await peer.send(sent)
                    arrival = await anext(engine.arrivals())
                    for layer in SPEC.layer_indices:
                        await arrival.wait_layer(layer, timeout_s=1)
                    assert digest(await arrival.snapshot()) == digest(sent)
                    arrival.release()
                assert traffic.ahead >= 1

    run(job())


def unlike_receiver(connection: Connection, spec: CacheSpec, num_pages: int, strided: bool, count: int) -> None:
    """That of transfers between unlike caches, with one page in eight granted ahead."""
    vars(unlike)["Engine"] = partial(Engine, ahead_pages=num_pages // 8)  # in this process alone
    unlike.receiver(connection, spec, num_pages, strided, count)


S4, INT8, MLA = unlike.SPEC, unlike.INT8, unlike.MLA


@pytest.mark.parametrize("zero_tails", [False, True])
@pytest.mark.parametrize(
    ("source", "dest", "strided"),
    [
        (S4, S4, True),
        (S4, S4.with_order("HND"), False),
        (S4.with_order("HND"), S4, True),
        (S4.with_order("HND"), S4.with_order("HND"), False),
        (S4, replace(S4, page_size=2), False),
        (S4, replace(S4, page_size=32), False),
        (S4.with_order("HND"), replace(S4, page_size=32), False),
        (INT8, INT8, False),
        (INT8, replace(INT8, page_size=16), False),
        (MLA, replace(MLA, page_size=16), False),
        (replace(S4, layers=(3, 9)), replace(S4, layers=(3, 9)), False),
        (S4, replace(S4, roles=("value", "key")), False),
    ],
)
def test_every_token_of_unlike_caches_arrives(
    source: CacheSpec, dest: CacheSpec, strided: bool, zero_tails: bool
) -> None:
    num_pages, num_sends = 1024, 4

    async def job() -> None:
        with Child(unlike_receiver, dest, num_pages, strided, num_sends) as child:
            with PagePool.allocate(source, 32) as pool:
                async with sending(await hear(child), pool) as (_, peer, traffic):
                    for n in range(num_sends):
                        unlike.fill(pool, n)
                        sent = Snapshot.from_block_tables(pool, unlike.TABLES, seq_lens=unlike.SEQ_LENS)
                        await peer.send(sent, key=str(n), zero_tails=zero_tails)
                        key, seq_lens, received, tails = await hear(child)
                        assert (key, seq_lens) == (str(n), unlike.SEQ_LENS)
                        for at, expected in unlike.contents(sent).items():
                            for got, part in zip(received[at], expected, strict=True):
                                assert np.array_equal(got, part), (n, at)
                        assert not zero_tails or tails <= {0}
                    assert traffic.ahead >= 2
                free, leased, quarantined = await hear(child)
                assert (free + leased, quarantined) == (num_pages, 0)
                assert leased <= num_pages // 8
            child.send("end")

    run(job())


@pytest.mark.parametrize("tables", [[[3, 1]] * 3, [[3, 1]] * 20, [[7, 3, 1], [7, 3, 2]]], ids=["few", "many", "prefix"])
def test_pages_count_once_however_many_entries_name_them(tables: list[list[int]]) -> None:
    """Whether the entries of the table are fewer or more than the pages that are there for it."""

    async def job() -> None:
        async with receiving(ahead_pages=AHEAD_PAGES) as (engine, pool, taking):
            with make_pool(SPEC, 8) as source:
                fill(source, 1)
                async with sending(engine.address, source) as (_, peer, traffic):
                    snapshot = snapshot_of(source, *tables)
                    num_pages = len({page for table in tables for page in table})
                    for n in range(4):
                        stats = await peer.send(snapshot, key=str(n))
                        assert (stats.num_pages, stats.sent_nbytes) == (num_pages, num_pages * 512)
                        await eventually(lambda: traffic["GRANT"] == traffic["RESERVE"] + traffic["OFFER"])
                    assert traffic["PREPARE"] == 3
                    await eventually(lambda: len(taking.taken) == 4)
                    assert {outcome for _, outcome in taking.taken} == {digest(snapshot)}
            await eventually(lambda: counts(pool) == (pool.num_pages, 0, 0))

    run(job())


@pytest.mark.parametrize("num_seqs", [0, 1, 3])
def test_snapshots_without_pages_arrive(num_seqs: int) -> None:
    async def job() -> None:
        async with receiving() as (engine, _, taking):
            with make_pool(SPEC, 8) as source:
                async with sending(engine.address, source) as (_, peer, traffic):
                    empty = Snapshot.from_block_tables(source, [[]] * num_seqs, seq_lens=[0] * num_seqs)
                    for n in range(4):
                        assert (await peer.send(empty, key=str(n))).num_pages == 0
                    assert traffic["COMMIT"] >= 2
                    assert traffic["PREPARE"] == 0, "there is nothing to copy meanwhile"
            await eventually(lambda: [key for key, _ in taking.taken] == list("0123"))

    run(job())


# What goes the usual way.


def test_what_has_keys_of_its_pages_goes_the_usual_way() -> None:
    async def job() -> None:
        async with receiving() as (engine, _, taking):
            with make_pool(SPEC, 8) as source:
                fill(source, 1)
                async with sending(engine.address, source) as (_, peer, traffic):
                    sent = snapshot_of(source, [1, 2])
                    await until_granted_ahead(peer, sent, traffic)
                    before = traffic.ahead, traffic["OFFER"] + 3
                    for _ in range(3):
                        await peer.send(sent, page_keys=snapshot_keys(sent, [range(8)]))
                    assert (traffic.ahead, traffic["OFFER"]) == before
                await eventually(lambda: {what for _, what in taking.taken} == {digest(sent)})

    run(job())


def test_what_the_receiver_expects_goes_where_it_is_expected() -> None:
    async def job() -> None:
        async with receiving() as (engine, pool, taking):
            with make_pool(SPEC, 8) as source:
                fill(source, 1)
                sent = snapshot_of(source, [3, 4])
                async with sending(engine.address, source) as (sender_engine, peer, traffic):
                    await until_granted_ahead(peer, sent, traffic)
                    with pool.allocator.lease(2) as chosen:
                        arriving = asyncio.create_task(engine.receive("mine", Placement(pool, chosen.page_ids)))
                        await asyncio.sleep(0)
                        await peer.send(sent, key="mine")
                        arrival = await arriving
                        assert arrival.block_table.tolist() == chosen.page_ids.tolist()
                        assert digest(await arrival.snapshot()) == digest(sent)
                        arrival.release()
                    assert "mine" not in dict(taking.taken)
                    assert sender_engine.stats().send.failures == engine.stats().receive.failures == {}

    run(job())


def test_senders_of_slices_of_the_heads_go_the_usual_way() -> None:
    async def job() -> None:
        async with receiving() as (engine, _, taking), contextlib.AsyncExitStack() as stack:
            joint = None
            both = []
            for n in range(2):
                source = stack.enter_context(make_pool(replace(SPEC, num_heads=1, head_offset=n, total_heads=2), 8))
                fill(source, n)
                both.append((await stack.enter_async_context(sending(engine.address, source)), source))
            for key in ("first", "second", "third"):
                await asyncio.gather(*(peer.send(snapshot_of(pool, [3, 1]), key=key) for (_, peer, _), pool in both))
            for (_, _, traffic), _ in both:
                assert (traffic["OFFER"], traffic.ahead, traffic["RESERVE"]) == (3, 0, 0)
            with make_pool(SPEC, 8) as whole:
                for role, layer in SPEC.tensors:
                    whole.pages(role, layer)[...] = np.concatenate(
                        [pool.pages(role, layer) for _, pool in both], axis=2
                    )
                joint = digest(snapshot_of(whole, [3, 1]))
            await eventually(lambda: taking.taken == [(key, joint) for key in ("first", "second", "third")])

    run(job())


def test_large_snapshots_go_the_usual_way() -> None:
    spec = CacheSpec(num_layers=1, num_heads=8, head_dim=128, page_size=256, dtype="bfloat16")  # 1 MiB a page

    async def job() -> None:
        async with receiving(spec=spec) as (engine, _, taking):
            with make_pool(spec, 9) as source:
                fill(source, 1)
                large, small = snapshot_of(source, list(range(9))), snapshot_of(source, list(range(8)))
                async with sending(engine.address, source) as (_, peer, traffic):
                    for _ in range(3):
                        await peer.send(large)
                    assert (traffic["OFFER"], traffic.ahead, traffic["RESERVE"]) == (3, 0, 0)
                    await until_granted_ahead(peer, small, traffic)
                await eventually(lambda: len(taking.taken) >= 5)
                assert [what for _, what in taking.taken][:3] == [digest(large)] * 3
                assert {what for _, what in taking.taken[3:]} == {digest(small)}

    run(job())


def test_what_cannot_be_sent_at_all_says_so_and_is_counted_once() -> None:
    async def job() -> None:
        async with receiving() as (engine, _, taking):
            with make_pool(replace(SPEC, head_dim=16), 8) as source:
                async with sending(engine.address, source) as (sender, peer, traffic):
                    for n in range(3):
                        with pytest.raises(GeometryError, match="head_dim"):
                            await peer.send(snapshot_of(source, [n]))
                        with pytest.raises(GeometryError, match="pools"):
                            await peer.send(snapshot_of(source, [n]), pool="none")
                    assert sender.stats().send.failures == {"GeometryError": 6}
                    assert (traffic["RESERVE"], traffic["OFFER"]) == (0, 0)
            assert not taking.taken

    run(job())


# Pages that others need.


def many_senders(connection: Connection, address: str, num_senders: int, num_sends: int) -> None:
    """So many peers of one engine, each of which sends one after the other; the digests by key."""

    async def job() -> None:
        with make_pool(SPEC, 64) as pool:
            fill(pool, 3)
            async with Engine(pool, timeout_s=20) as engine:

                async def one(n: int) -> dict[str, str]:
                    done = {}
                    async with engine.connect(address) as peer:
                        for k in range(num_sends):
                            sent = snapshot_of(pool, [n, (n + k + 1) % 64])
                            await peer.send(sent, key=f"{n}.{k}")
                            done[f"{n}.{k}"] = digest(sent)
                    return done

                done = {}
                for each in await asyncio.gather(*map(one, range(num_senders))):
                    done |= each
                connection.send((done, engine.stats().send))

    asyncio.run(job())


@pytest.mark.parametrize("num_pages", [4, 64])
def test_more_senders_than_pages_all_finish_in_order(num_pages: int) -> None:
    """Of 4 pages none is granted ahead; of 64 one sender's at a time."""

    async def job() -> None:
        async with receiving(num_pages, timeout_s=20) as (engine, pool, taking):
            with Child(many_senders, engine.address, 20, 5) as child:
                done, stats = await hear(child)
            await eventually(lambda: len(taking.taken) == 100)
            assert dict(taking.taken) == done
            assert (stats.num_transfers, stats.failures) == (100, {})
            assert engine.stats().receive.num_transfers == 100
            assert engine.stats().receive.failures == {}
            for n in range(20):
                own = [key for key, _ in taking.taken if key.startswith(f"{n}.")]
                assert own == [f"{n}.{k}" for k in range(5)]
            await settled(pool, num_pages, 0, 0)

    run(job())


def test_a_pool_too_small_is_not_asked_again_and_again() -> None:
    async def job() -> None:
        async with receiving(63) as (engine, _, taking):
            with make_pool(SPEC, 8) as source:
                async with sending(engine.address, source) as (_, peer, traffic):
                    started = time.monotonic()
                    for _ in range(50):
                        await peer.send(snapshot_of(source, [1]))
                    assert traffic.ahead == 0
                    assert 1 <= traffic["RESERVE"] <= 1 + (time.monotonic() - started) / 5
                    assert traffic["ERROR"] == traffic["RESERVE"]
            await eventually(lambda: len(taking.taken) == 50)
            assert engine.stats().receive.failures == {}

    run(job())


@pytest.mark.parametrize("larger", [9, 20])
def test_snapshots_for_which_there_are_too_few_pages_keep_smaller_ones_from_none(larger: int) -> None:
    """With 16 pages for all, those of 2 find theirs each time, and those for which 16 or 32 are asked do not."""

    async def job() -> None:
        async with receiving() as (engine, _, taking):
            with make_pool(SPEC, 32) as source:
                fill(source, 1)
                both = snapshot_of(source, [2, 1]), snapshot_of(source, list(range(larger)))
                async with sending(engine.address, source) as (sender_engine, peer, traffic):
                    await until_granted_ahead(peer, both[0], traffic)
                    for _ in range(20):
                        for sent in both:
                            await peer.send(sent)
                    assert traffic.ahead >= 20
                    assert traffic["OFFER"] >= 20
                    assert traffic["ERROR"] <= 2
                    assert sender_engine.stats().send.failures == {}
                expected = [digest(sent) for sent in both] * 20
            await eventually(lambda: [what for _, what in taking.taken[-40:]] == expected)

    run(job())


@pytest.mark.parametrize("lane", LANES)
def test_pages_granted_ahead_go_at_once_to_an_offer_that_needs_them(lane: str) -> None:
    async def job() -> None:
        async with receiving(64, lane=lane) as (engine, pool, taking):
            settings = {"lane": lane}
            with (
                Child(sender, engine.address, settings | {"seed": 1}) as holder,
                Child(sender, engine.address, settings | {"seed": 2}) as other,
            ):
                assert [await hear(holder), await hear(other)] == ["connected"] * 2
                for n in range(3):
                    await send(holder, f"holder {n}", [n], taking)
                await settled(pool, 56, 8, 0)
                for n in range(3):
                    seconds = await send(other, f"other {n}", range(60), taking)
                    assert seconds < 5, "the lease is 30 s: these pages were recalled"
                    await send(holder, f"holder again {n}", range(n, n + 8), taking)
                for child in (holder, other):
                    assert (await ask(child, "stats")).send.failures == {}
                    child.send("end")
                stats = engine.stats()
                assert (stats.receive.num_transfers, stats.receive.failures) == (9, {})
                assert (stats.num_quarantined, stats.num_leases_expired) == (0, 0)

    run(job())


def test_unused_pages_come_back_and_are_asked_for_again() -> None:
    async def job() -> None:
        async with receiving(lease_s=0.4) as (engine, pool, taking), Traffic(engine.address) as traffic:
            with Child(sender, traffic.address, {}) as child:
                await hear(child)
                for turn in range(2):
                    for n in range(3):
                        await send(child, f"{turn}.{n}", [n, n + 7], taking)
                    assert traffic.ahead > turn
                    await settled(pool, NUM_PAGES, 0, 0)  # the sender idles
                stats = engine.stats()
                assert (stats.num_quarantined, stats.receive.failures) == (0, {})
                assert (await ask(child, "stats")).send.failures == {}
                child.send("end")

    run(job())


def test_a_renewal_does_not_wait_for_unused_pages() -> None:
    async def job() -> None:
        async with receiving() as (engine, pool, taking), Traffic(engine.address) as traffic:
            with Child(sender, traffic.address, {}) as child:
                await hear(child)
                for turn in range(3):
                    before, n = traffic.ahead, 0
                    while traffic.ahead < before + 2:
                        await send(child, f"{turn}.{n}", [n % 64, (n + 9) % 64], taking)
                        n += 1
                    await eventually(lambda: counts(pool)[1] in (8, 16))  # asked for anew: a bell may be heard before
                    await engine.reregister(timeout_s=5)
                    await settled(pool, NUM_PAGES, 0, 0)
                    assert engine.stats().generations == {"default": turn + 2}
                await send(child, "last", [1], taking)
                stats = await ask(child, "stats")
                assert (stats.num_connects, stats.send.failures) == (1, {})
                assert engine.stats().receive.failures == {}
                child.send("end")

    run(job())


def test_a_pool_that_is_removed_takes_back_what_was_granted_ahead() -> None:
    async def job() -> None:
        with make_pool(SPEC, NUM_PAGES) as further, make_pool(SPEC, 8) as source:
            async with receiving() as (engine, _, taking), sending(engine.address, source) as (_, peer, traffic):
                for turn in range(2):
                    engine.add_pool(further, name=f"further {turn}")
                    before = traffic.ahead

                    async def used(name: str = f"further {turn}", before: int = before) -> bool:
                        with contextlib.suppress(GeometryError):  # until it has heard of the pool
                            await peer.send(snapshot_of(source, [1, 2]), pool=name)
                        return traffic.ahead > before

                    await eventually(used)
                    await eventually(lambda: counts(further)[1] >= 8)
                    engine.remove_pool(f"further {turn}")
                    await settled(further, NUM_PAGES, 0, 0)
                assert peer._connection is not None
                assert {number for number, _ in peer._connection.ahead._grants} <= {0, 2}
                await until_granted_ahead(peer, snapshot_of(source, [3]), traffic)
                taking.check()

    run(job())
