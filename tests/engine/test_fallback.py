"""Peers that UCX cannot be set up with: pages travel on the control channel, whole, within bounds, and loudly."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hurray_rdma import CacheSpec, DeadlineExceededError, Engine, LeaseExpiredError, PagePool, ProtocolError, Snapshot
from hurray_rdma.cache import snapshot_keys
from hurray_rdma.control import AbortRequested, Acknowledged, Granted
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Context, Region, default_context
from tests.engine import test_unlike as unlike
from tests.engine.hands import Hand, shaken
from tests.hazards.scenes import counts, digest, run, settled, stopped

SPEC, INT8, MLA = unlike.SPEC, unlike.INT8, unlike.MLA
TABLES, SEQ_LENS = unlike.TABLES, unlike.SEQ_LENS
RECEIVER = {"TLS": "tcp", "NET_DEVICES": "lo"}
SENDER = {"TLS": "posix,sysv,self"}  # no transport in common


@pytest.fixture(scope="module")
def context() -> Context:
    return Context(SENDER)


def receiver(connection: Connection, spec: CacheSpec, count: int) -> None:
    default_context(RECEIVER)
    unlike.receiver(connection, spec, 64, False, count)


def send(address: str, snapshot: Snapshot, **settings: Any) -> tuple[Any, ...]:
    """What the send did, and what the peer and the engine said of it."""

    async def job() -> tuple[Any, ...]:
        async with Engine(snapshot.pool, timeout_s=20) as engine, engine.connect(address) as peer:
            lanes = peer.lanes
            stats = await peer.send(snapshot, **settings)
            return stats, (peer.lane, peer.path, lanes), engine.stats()

    return asyncio.run(job())


@pytest.mark.parametrize(
    ("source", "dest"),
    [
        (SPEC, SPEC),
        (SPEC, SPEC.with_order("HND")),
        (SPEC.with_order("HND"), SPEC),
        (SPEC, replace(SPEC, page_size=2)),
        (SPEC.with_order("HND"), replace(SPEC, page_size=32)),
        (SPEC, replace(SPEC, num_heads=2, head_offset=1)),
        (INT8, INT8),
        (INT8, replace(INT8, page_size=16)),
        (INT8, replace(INT8, page_size=4, num_heads=1, head_offset=3)),
        (MLA, replace(MLA, page_size=16)),
        (SPEC, replace(SPEC, roles=("value", "key"))),
    ],
    ids=[
        "alike",
        "NHD to HND",
        "HND to NHD",
        "pages of 8 to 2",
        "HND pages of 8 to NHD pages of 32",
        "two of four heads",
        "int8 with scales and zero points",
        "int8, pages of 8 to 16",
        "int8, pages of 8 to 4, one head",
        "latent",
        "roles in another order",
    ],
)
def test_every_token_arrives_without_ucx(
    source: CacheSpec, dest: CacheSpec, context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    with Child(receiver, dest, 1) as child, PagePool.allocate(source, 32, context=context) as pool:
        unlike.fill(pool, 5)
        sent = Snapshot.from_block_tables(pool, TABLES, seq_lens=SEQ_LENS)
        with caplog.at_level(logging.WARNING, "hurray_rdma"):
            stats, peer, engine = send(child.receive(), sent, key="frames")
        key, seq_lens, received, _ = child.receive()
        assert (key, seq_lens) == ("frames", SEQ_LENS)
        first = dest.head_offset - source.head_offset
        for at, (tokens, *of_slots) in unlike.contents(sent).items():
            got_tokens, *got_of_slots = received[at]
            assert np.array_equal(got_tokens, tokens[:, first : first + dest.num_heads]), at
            for got, expected in zip(got_of_slots, of_slots, strict=True):
                assert np.array_equal(got, expected), at
        assert child.receive() == (64, 0, 0)
        child.send("end")
    assert peer == ("control channel", "frames", None)
    assert (stats.lane, stats.path) == ("control channel", "frames")
    assert engine.num_fallbacks == 1
    assert [(lane.lane, lane.path, lane.nbytes) for lane in engine.send.lanes] == [
        ("control channel", "frames", stats.sent_nbytes)
    ]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len([text for text in warnings if "control channel, which is slow" in text and "UCX_TLS" in text]) == 1
    if source == dest:  # an aliased page is sent once
        assert (stats.num_table_entries, stats.num_pages) == (11, 9)
        assert stats.sent_nbytes == 9 * len(source.tensors) * (source.page_nbytes + 8 * (2 + 4) * (source == INT8))


def lying_receiver(connection: Connection) -> None:
    """Says of each region that it is elsewhere than what its key is of."""
    remote = Region.remote
    Region.remote = lambda region: replace(said := remote(region), remote_addr=said.remote_addr + (1 << 30))  # type: ignore[method-assign]
    unlike.receiver(connection, SPEC, 64, False, 1)


def test_pages_go_in_frames_to_a_peer_whose_regions_are_not_where_its_keys_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Child(lying_receiver) as child, PagePool.allocate(SPEC, 32) as pool:
        unlike.fill(pool, 5)
        sent = Snapshot.from_block_tables(pool, TABLES, seq_lens=SEQ_LENS)
        with caplog.at_level(logging.WARNING, "hurray_rdma"):
            stats, _, engine = send(child.receive(), sent)
        assert (stats.lane, stats.path, engine.num_fallbacks) == ("control channel", "frames", 1)
        assert "not in the memory that its rkey is of" in caplog.text
        _, _, received, _ = child.receive()
        for at, (tokens,) in unlike.contents(sent).items():
            assert np.array_equal(received[at][0], tokens), at
        assert child.receive() == (64, 0, 0)
        child.send("end")


def test_two_senders_of_half_the_heads_fill_one_arrival(context: Context) -> None:
    with Child(receiver, SPEC, 1) as child:
        address = child.receive()
        pools = [
            PagePool.allocate(replace(SPEC, num_heads=2, head_offset=2 * n), 32, context=context) for n in range(2)
        ]
        shifted = [[[(page * 5 + n) % 31 for page in row] for row in TABLES] for n in range(2)]
        snapshots = [Snapshot.from_block_tables(p, t, seq_lens=SEQ_LENS) for p, t in zip(pools, shifted, strict=True)]
        for seed, pool in enumerate(pools):
            unlike.fill(pool, seed)

        async def one(snapshot: Snapshot) -> str:
            async with Engine(snapshot.pool, timeout_s=20) as engine, engine.connect(address) as peer:
                return (await peer.send(snapshot, key="joint")).path

        async def job() -> list[str]:
            return await asyncio.gather(*map(one, snapshots))

        assert asyncio.run(job()) == ["frames", "frames"]
        _, _, received, _ = child.receive()
        expected = [unlike.contents(snapshot) for snapshot in snapshots]
        for at, (tokens,) in received.items():
            assert np.array_equal(tokens, np.concatenate([each[at][0] for each in expected], axis=1)), at
        assert child.receive() == (64, 0, 0)
        child.send("end")
        for pool in pools:
            pool.close()


@pytest.mark.parametrize("page_size", [8, 4])
def test_resident_pages_take_no_room_in_frames(page_size: int, context: Context) -> None:
    spec = replace(SPEC, page_size=page_size)
    with Child(receiver, spec, 3) as child, PagePool.allocate(SPEC, 32, context=context) as pool:
        address = child.receive()
        unlike.fill(pool, 6)
        for role, layer in SPEC.tensors:
            pool.pages(role, layer)[[4, 5]] = pool.pages(role, layer)[[1, 2]]
        prompt = np.arange(24)
        tokens = [prompt, np.concatenate([prompt[:16], np.full(8, 99)]), prompt]
        per_page = SPEC.page_size // page_size
        for n, (table, num_sent) in enumerate([([1, 2, 3], 3), ([4, 5, 6], 1), ([1, 2, 3], 0)]):
            snapshot = Snapshot.from_block_tables(pool, [table], seq_lens=[24])
            stats, *_ = send(address, snapshot, key=str(n), page_keys=snapshot_keys(snapshot, [tokens[n]]))
            assert (stats.num_pages, stats.num_resident) == (num_sent * per_page, (3 - num_sent) * per_page)
            assert stats.sent_nbytes == num_sent * SPEC.page_nbytes * len(SPEC.tensors)
            key, _, received, _ = child.receive()
            assert key == str(n)
            for at, (got,) in received.items():
                assert np.array_equal(got, unlike.contents(snapshot)[at][0]), at
        assert child.receive() == (64, 0, 0)
        child.send("end")


@pytest.mark.parametrize("dest", [SPEC, SPEC.with_order("HND"), replace(SPEC, page_size=32)], ids=["same", "HND", "32"])
def test_slots_past_the_valid_tokens_arrive_as_zeros_in_frames(dest: CacheSpec, context: Context) -> None:
    with Child(receiver, dest, 1) as child, PagePool.allocate(SPEC, 32, context=context) as pool:
        unlike.fill(pool, 7)
        sent = Snapshot.from_block_tables(pool, TABLES, seq_lens=SEQ_LENS)
        send(child.receive(), sent, zero_tails=True)
        _, _, received, tails = child.receive()
        assert tails == {0}
        for at, (tokens,) in unlike.contents(sent).items():
            assert np.array_equal(received[at][0], tokens), at
        assert child.receive() == (64, 0, 0)
        child.send("end")


def watching_receiver(connection: Connection, spec: CacheSpec, num_pages: int) -> None:
    """Reports each layer as it comes, then lane, path and digest of the whole; ends when told, with its accounts."""

    async def job() -> None:
        default_context(RECEIVER)
        with PagePool.allocate(spec, num_pages) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=20, peer_timeout_s=30) as engine:
                connection.send(engine.address)

                async def layer(arrival: Any, index: int) -> None:
                    await arrival.wait_layer(index)
                    connection.send(("layer", index))

                async def take() -> None:
                    async for arrival in engine.arrivals():
                        waiting = [asyncio.create_task(layer(arrival, index)) for index in spec.layer_indices]
                        try:
                            sent = digest(await arrival.snapshot())
                            await asyncio.gather(*waiting)
                            connection.send((arrival.lane, arrival.path, sent, arrival.key))
                        except Exception as error:
                            await asyncio.gather(*waiting, return_exceptions=True)
                            connection.send(("failed", type(error).__name__))
                        arrival.release()

                taking = asyncio.create_task(take())
                await asyncio.to_thread(connection.recv)
                await settled(pool, num_pages, 0, 0)
                connection.send(engine.stats())
            await taking

    asyncio.run(job())


def test_layers_arrive_one_by_one_and_the_receiver_knows_how(context: Context) -> None:
    with Child(watching_receiver, SPEC, 64) as child, PagePool.allocate(SPEC, 32, context=context) as pool:
        unlike.fill(pool, 8)
        sent = Snapshot.from_block_tables(pool, TABLES, seq_lens=SEQ_LENS)

        async def job() -> None:
            async with Engine(pool, timeout_s=20) as engine, engine.connect(child.receive()) as peer:
                async with peer.begin(sent, key="layers") as transfer:
                    for layer in (1, 0):
                        await transfer.send_layer(layer)
                        assert await asyncio.to_thread(child.receive) == ("layer", layer)
                assert transfer.stats.path == "frames"

        run(job())
        assert child.receive() == ("control channel", "frames", digest(sent), "layers")
        child.send("end")
        stats = child.receive()
        assert [(lane.lane, lane.path) for lane in stats.receive.lanes] == [("control channel", "frames")]
        assert (stats.receive.num_transfers, stats.num_quarantined) == (1, 0)


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_stopped_receiver_costs_the_sender_no_memory(context: Context) -> None:
    """128 MiB to a receiver that takes nothing: a few frames are made, then the sender waits, and says so in time."""
    big = CacheSpec(num_layers=16, num_heads=8, head_dim=128, page_size=16, dtype="bfloat16")  # pages of 32 KiB
    with Child(watching_receiver, big, 128) as child, PagePool.allocate(big, 128, context=context) as pool:
        unlike.fill(pool, 9)
        sent = Snapshot.from_block_tables(pool, [np.random.default_rng(1).permutation(128)], seq_lens=[128 * 16])

        async def job() -> None:
            async with (
                Engine(pool, timeout_s=20, peer_timeout_s=30) as engine,
                engine.connect(child.receive()) as peer,
            ):
                with pytest.raises(DeadlineExceededError, match="not moved in time"):
                    async with peer.begin(sent, key="stuck", timeout_s=1.5) as transfer:
                        child.signal(signal.SIGSTOP)
                        await stopped(child.pid)
                        before, most = resident_nbytes(), 0
                        sending = asyncio.create_task(transfer.send_rest())
                        while not sending.done():
                            await asyncio.sleep(0.01)
                            most = max(most, resident_nbytes() - before)
                        await sending
                assert most < 32 << 20  # none, where this process had so much to spare
                child.signal(signal.SIGCONT)
                assert await asyncio.to_thread(child.receive) == ("failed", "TransferAbortedError")
                assert (await peer.send(sent, key="again")).path == "frames"

        run(job())
        layers = {child.receive() for _ in range(16)}
        assert layers == {("layer", index) for index in range(16)}
        assert child.receive() == ("control channel", "frames", digest(sent), "again")
        child.send("end")
        assert child.receive().num_quarantined == 0


def halfway_sender(connection: Connection, address: str) -> None:
    async def job() -> None:
        with PagePool.allocate(SPEC, 32, context=default_context(SENDER)) as pool:
            async with Engine(pool, timeout_s=20) as engine, engine.connect(address) as peer:
                transfer = peer.begin(Snapshot.from_block_tables(pool, TABLES, seq_lens=SEQ_LENS))
                await transfer.__aenter__()
                await transfer.send_layer(0)
                connection.send(peer.path)
                await asyncio.to_thread(connection.recv)

    asyncio.run(job())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_sender_lost_between_frames_leaves_free_pages(number: signal.Signals) -> None:
    """Nothing that it has sent can land in a page later, so that none goes to quarantine."""

    async def job() -> None:
        with PagePool.allocate(SPEC, 16, context=Context(RECEIVER)) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10, lease_s=0.3) as engine:
                with Child(halfway_sender, engine.address) as child:
                    assert await asyncio.to_thread(child.receive) == "frames"
                    arrival = await anext(engine.arrivals())
                    await arrival.wait_layer(0)
                    child.signal(number)
                    with pytest.raises((ConnectionError, DeadlineExceededError)):
                        await arrival.snapshot()
                    await settled(pool, 16, 0, 0)
                    stats = engine.stats()
                    assert (stats.num_quarantined, stats.num_recovered) == (0, 0)
                    assert sum(stats.receive.failures.values()) == 1
                    if number is signal.SIGSTOP:
                        assert stats.num_leases_expired == 1
                        child.signal(signal.SIGKILL)
                    await asyncio.to_thread(child.join)
                await settled(pool, 16, 0, 0)

    run(job())


@asynccontextmanager
async def hand_and_engine(
    pool: PagePool, *, says_quiet: bool = True, lease_s: float = 5
) -> AsyncIterator[tuple[Hand, Engine]]:
    async with (
        Engine(pool, listen="127.0.0.1:0", timeout_s=10, lease_s=lease_s) as engine,
        shaken(engine.address, says_quiet=says_quiet) as hand,
    ):
        yield hand, engine
        async with Engine(pool) as other, other.connect(engine.address, timeout_s=5) as peer:
            await peer.send(Snapshot.from_block_tables(pool, [[1]], seq_lens=[4]), key="neighbour")
            neighbour = await anext(engine.arrivals())
            await neighbour.snapshot()
            neighbour.release()


NBYTES = 9 * SPEC.page_nbytes  # of one descriptor of TABLES


@pytest.mark.parametrize("path", ["frames", "put"])
@pytest.mark.parametrize("says_quiet", [True, False], ids=["quiet", "mute"])
@pytest.mark.parametrize(
    "fault", ["one byte too many", "far too many", "one byte too few", "none of one of two", "no bytes at all"]
)
def test_wrong_amounts_of_page_data_fail_the_transfer_and_harm_nobody(fault: str, says_quiet: bool, path: str) -> None:
    async def job() -> None:
        with PagePool.allocate(SPEC, 64) as pool:
            for tensor in SPEC.tensors:
                pool.pages(*tensor).view(np.uint8)[...] = 0xEE
            snapshot = Snapshot.from_block_tables(pool, TABLES, seq_lens=SEQ_LENS)
            lease_s = 5 if says_quiet else 0.5  # which is waited for
            async with hand_and_engine(pool, says_quiet=says_quiet, lease_s=lease_s) as (hand, engine):
                transfer_id = hand.offer(snapshot, path=path)
                granted = (await hand.expect(Granted)).grant.page_ids
                arrival = await anext(engine.arrivals())
                if fault == "one byte too many":
                    hand.do("tensor_data", transfer_id, 0, 0, memoryview(bytes(NBYTES)))
                    hand.do("tensor_data", transfer_id, 0, NBYTES, memoryview(bytes(1)))
                elif fault == "far too many":
                    hand.do("tensor_data", transfer_id, 0, 0, memoryview(bytes(8 << 20)))
                elif fault == "one byte too few":
                    hand.do("tensor_data", transfer_id, 0, 0, memoryview(bytes(NBYTES - 1)))
                elif fault == "none of one of two":
                    hand.do("tensor_data", transfer_id, 0, 0, memoryview(bytes(NBYTES)))
                if path == "frames" or fault == "no bytes at all":
                    hand.do("data_end", transfer_id, *((0, 1) if fault == "none of one of two" else (0,)))
                if fault == "no bytes at all" and path == "put":
                    hand.do("abort", transfer_id, 0xF0, "by hand")  # nothing is wrong with that
                    hand.do("quiet", transfer_id)
                else:
                    told = await hand.expect(AbortRequested)
                    assert isinstance(told.error, ProtocolError), told
                    with pytest.raises(ProtocolError):
                        await arrival.snapshot()
                loud = path == "put" and not says_quiet and fault != "no bytes at all"
                await settled(pool, 55 if loud else 64, 0, 9 if loud else 0)
                others = np.setdiff1d(np.arange(64), granted if path == "frames" else [])
                for tensor in SPEC.tensors:
                    pages = pool.pages(*tensor).view(np.uint8)[others]
                    assert (pages == 0xEE).all(), "nothing was written but the pages of the grant"
                assert hand.session.is_open

    run(job())


@pytest.mark.parametrize("ends", ["each by itself", "together"])
def test_page_data_by_hand_arrives_whole_in_any_cut(ends: str) -> None:
    async def job() -> None:
        random = np.random.default_rng(3)
        with PagePool.allocate(SPEC, 64) as pool:
            snapshot = Snapshot.from_block_tables(pool, TABLES, seq_lens=SEQ_LENS)
            async with hand_and_engine(pool) as (hand, engine):
                transfer_id = hand.offer(snapshot, path="frames")
                await hand.expect(Granted)
                arrival = await anext(engine.arrivals())
                content = {}
                for index, tensor in reversed(list(enumerate(SPEC.tensors))):
                    content[tensor] = random.integers(0, 256, NBYTES, np.uint8)
                    cuts = [0, *sorted(random.integers(0, NBYTES, 5).tolist()), NBYTES]
                    for start, end in pairwise(cuts):
                        if end > start:
                            data = content[tensor][start:end].data
                            hand.do("tensor_data", transfer_id, index, start, data)
                    if ends == "each by itself":
                        hand.do("data_end", transfer_id, index)
                if ends == "together":
                    hand.do("data_end", transfer_id, *range(len(SPEC.tensors)))
                await hand.expect(Acknowledged)
                received = await arrival.snapshot()
                # Each physical page once, ascending by the sender's page ID, in the order of the grant.
                pages = {page: place for place, page in enumerate(sorted({p for row in TABLES for p in row}))}
                for (role, layer), data in content.items():
                    by_page = data.reshape(9, *SPEC.page_shape, 2)
                    for seq, (row, length) in enumerate(zip(TABLES, SEQ_LENS, strict=True)):
                        got = received.tokens(role, layer=layer, seq=seq).view(np.uint8).reshape(length, 4, 8, 2)
                        expected = by_page[[pages[page] for page in row]].reshape(-1, 4, 8, 2)[:length]
                        assert np.array_equal(got, expected)
                arrival.release()
            assert counts(pool) == (64, 0, 0)

    run(job())


def slow_receiver(connection: Connection, spec: CacheSpec) -> None:
    """Its lease is short; it tells its address and the grant, and ends when told, with its accounts."""

    async def job() -> None:
        default_context(RECEIVER)
        with PagePool.allocate(spec, 256) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=20, lease_s=0.9, peer_timeout_s=20) as engine:
                connection.send(engine.address)
                await anext(engine.arrivals())
                connection.send("granted")
                await asyncio.to_thread(connection.recv)
                connection.send(counts(pool))

    asyncio.run(job())


def test_a_lease_that_ends_while_frames_wait_is_told_as_such(context: Context) -> None:
    big = CacheSpec(num_layers=2, num_heads=8, head_dim=128, page_size=16, dtype="bfloat16")
    with Child(slow_receiver, big) as child, PagePool.allocate(big, 256, context=context) as pool:
        sent = Snapshot.from_block_tables(pool, [list(range(256))], seq_lens=[256 * 16])

        async def job() -> None:
            async with (
                Engine(pool, timeout_s=20, peer_timeout_s=20) as engine,
                engine.connect(child.receive()) as peer,
            ):
                with pytest.raises(LeaseExpiredError):
                    async with peer.begin(sent) as transfer:
                        assert await asyncio.to_thread(child.receive) == "granted"
                        child.signal(signal.SIGSTOP)
                        await stopped(child.pid)
                        sending = asyncio.create_task(transfer.send_rest())
                        await asyncio.wait({sending}, timeout=1.2)
                        assert not sending.done()
                        child.signal(signal.SIGCONT)
                        await sending

        run(job())
        child.send("end")
        assert child.receive() == (256, 0, 0)
