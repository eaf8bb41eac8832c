"""Pulls in frames that come to an early end, readers that take nothing, and either side when it breaks the rules.

Both engines are in this process, with UCX contexts that have no transport in common.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hurray_rdma import (
    CacheSpec,
    DeadlineExceededError,
    Engine,
    GeometryError,
    HurrayError,
    LeaseExpiredError,
    PagePool,
    Peer,
    PeerLostError,
    ProtocolError,
    Snapshot,
    TransferAbortedError,
)
from hurray_rdma.control import (
    AbortRequested,
    Acknowledged,
    AllEnded,
    Channel,
    ClientSession,
    ErrorCode,
    Event,
    Fetch,
    Fetched,
    PoolsAnnounced,
    Published,
    PublishedHeard,
    ServerSession,
    SessionConfig,
    SessionOpened,
    Take,
    Taken,
    TensorData,
    encode,
    serve,
)
from hurray_rdma.control.exchange import Abort, Quiet
from hurray_rdma.engine import serving
from hurray_rdma.engine.compat import announcement
from hurray_rdma.engine.fetching import FetchedSnapshot
from hurray_rdma.engine.serving import Delivery
from hurray_rdma.engine.taking import Taking
from hurray_rdma.format import Dialect
from hurray_rdma.transport import Context
from tests.engine import test_unlike as unlike
from tests.engine.hands import Hand, shaken
from tests.engine.test_fallback import RECEIVER, SENDER, SEQ_LENS, SPEC, TABLES
from tests.hazards.scenes import counts, digest, eventually, make_pool, run, settled, snapshot_of

BIG = CacheSpec(num_layers=8, num_heads=8, head_dim=128, page_size=16, dtype="bfloat16")
"""Pages of 32 KiB: 64 of them, of all roles and layers, are 32 MiB."""


@pytest.fixture(scope="module")
def there() -> Context:
    return Context(RECEIVER)


@pytest.fixture(scope="module")
def here() -> Context:
    return Context(SENDER)


class Scene:
    """A publisher with a filled pool, and a reader that reaches none of it."""

    def __init__(self, source: PagePool, publisher: Engine, pool: PagePool, engine: Engine, peer: Peer) -> None:
        self.source, self.publisher, self.pool, self.engine, self.peer = source, publisher, pool, engine, peer
        self.whole = snapshot_of(source, np.random.default_rng(1).permutation(source.num_pages).tolist())
        publisher.publish("all", self.whole, lease_s=60)

    async def begun(self, first_frame: asyncio.Event) -> asyncio.Task[FetchedSnapshot]:
        """A fetch of the whole, some of which has come."""
        fetching = asyncio.create_task(self.peer.fetch("all"))
        await first_frame.wait()
        return fetching

    @property
    def transport(self) -> Any:
        """Of the reader's connection."""
        connection = self.peer._connection
        assert connection is not None
        assert connection._channel is not None
        return connection._channel._transport


@contextlib.asynccontextmanager
async def scene(
    there: Context, here: Context, spec: CacheSpec = BIG, num_pages: int = 64, **settings: Any
) -> AsyncIterator[Scene]:
    with (
        make_pool(spec, num_pages, "caller's", there) as source,  # which can be registered anew
        make_pool(spec, 128, "caller's", here) as pool,
    ):
        unlike.fill(source, 4)
        async with (
            Engine(source, listen="127.0.0.1:0", **{"timeout_s": 20, "peer_timeout_s": 20} | settings) as publisher,
            Engine(pool, listen="127.0.0.1:0", timeout_s=20, peer_timeout_s=20) as engine,
            engine.connect(publisher.address) as peer,
        ):
            yield Scene(source, publisher, pool, engine, peer)
        assert counts(pool) == (128, 0, 0)
        if not source.closed:
            assert counts(source) == (num_pages, 0, 0)


@pytest.fixture
def first_frame(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when page bytes have come."""
    came, hear = asyncio.Event(), Taking.hear

    def tell(taking: Taking, event: Any) -> None:
        hear(taking, event)
        if isinstance(event, TensorData):
            came.set()

    monkeypatch.setattr(Taking, "hear", tell)
    return came


# Early ends.


def test_a_fetch_that_is_cancelled_in_mid_frame_leaves_nothing(
    there: Context, here: Context, first_frame: asyncio.Event
) -> None:
    async def job() -> None:
        async with scene(there, here) as s:
            with s.source.allocator.lease(64):
                fetching = await s.begun(first_frame)
                assert counts(s.pool) == (64, 64, 0)
                fetching.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await fetching
                assert counts(s.pool) == (128, 0, 0)
                await eventually(lambda: s.publisher.stats().serve.failures == {"TransferAbortedError": 1})
                with await s.peer.fetch("all") as fetched:
                    assert digest(fetched) == digest(s.whole)

    run(job())


def test_a_deadline_of_the_reader_is_its_error_and_no_page_is_written_after_it(
    there: Context, here: Context, first_frame: asyncio.Event
) -> None:
    async def job() -> None:
        async with scene(there, here) as s:
            fetching = asyncio.create_task(s.peer.fetch("all", timeout_s=0.5))
            await first_frame.wait()
            s.transport.pause_reading()
            with pytest.raises(DeadlineExceededError, match="the pages for 'all' did not come in time"):
                await fetching
            for tensor in BIG.tensors:
                s.pool.pages(*tensor).view(np.uint8)[...] = 0xEE
            s.transport.resume_reading()  # what was on its way comes now
            (await s.peer.fetch("all", timeout_s=10)).release()
            with s.pool.allocator.lease(64) as lease:
                untouched = np.setdiff1d(np.arange(128), lease.page_ids)  # a fetch takes the same free pages each time
                for tensor in BIG.tensors:
                    assert (s.pool.pages(*tensor).view(np.uint8)[untouched] == 0xEE).all()

    run(job())


def test_a_lease_that_ends_in_mid_frame_is_told_as_such(
    there: Context, here: Context, first_frame: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClientSession, "_renew", lambda *_: None)

    async def job() -> None:
        async with scene(there, here, lease_s=0.3, timeout_s=0.3) as s:
            fetching = await s.begun(first_frame)
            s.transport.pause_reading()
            await eventually(lambda: s.publisher.stats().serve.failures == {"LeaseExpiredError": 1})
            s.transport.resume_reading()
            with pytest.raises(LeaseExpiredError, match=r"did not renew its lease of 0\.3 s"):
                await fetching
            assert s.publisher.stats().num_leases_expired == 1

    run(job())


def test_what_is_unpublished_in_mid_frame_is_sent_to_the_end(
    there: Context, here: Context, first_frame: asyncio.Event
) -> None:
    async def job() -> None:
        async with scene(there, here) as s:
            with s.source.allocator.lease(64):
                s.publisher.publish("leased", s.whole)
            fetching = asyncio.create_task(s.peer.fetch("leased"))
            await first_frame.wait()
            assert s.publisher.unpublish("leased")
            assert counts(s.source) == (0, 64, 0)
            with await fetching as fetched:
                assert digest(fetched) == digest(s.whole)
            await settled(s.source, 64, 0, 0)

    run(job())


def test_a_source_that_registers_its_pool_anew_in_mid_frame_is_asked_again(
    there: Context, here: Context, first_frame: asyncio.Event
) -> None:
    async def job() -> None:
        async with scene(there, here) as s:
            fetching = await s.begun(first_frame)
            await s.publisher.reregister()
            with await fetching as fetched:
                assert digest(fetched) == digest(s.whole)
            assert s.publisher.stats().serve.failures == {"StaleGenerationError": 1}
            assert s.engine.stats().fetch.failures == {}

    run(job())


def test_a_readers_pool_is_registered_anew_after_its_frames(
    there: Context, here: Context, first_frame: asyncio.Event
) -> None:
    async def job() -> None:
        async with scene(there, here) as s:
            for _ in range(2):
                first_frame.clear()
                fetching = await s.begun(first_frame)
                await s.engine.reregister()
                with await fetching as fetched:
                    assert digest(fetched) == digest(s.whole)
            assert s.engine.stats().generations == {"default": 3}

    run(job())


def test_a_pool_that_is_removed_and_closed_in_mid_frame_ends_its_fetches(
    there: Context, here: Context, first_frame: asyncio.Event
) -> None:
    async def job() -> None:
        async with scene(there, here) as s:
            fetches = [asyncio.create_task(s.peer.fetch("all")) for _ in range(2)]
            await first_frame.wait()
            s.publisher.remove_pool("")
            s.source.close()
            for error in await asyncio.gather(*fetches, return_exceptions=True):
                assert isinstance(error, HurrayError)
            assert s.publisher.stats().serve.failures == {"StaleGenerationError": 2}

    run(job())


@pytest.mark.parametrize("who", ["publisher", "reader"])
def test_an_engine_that_closes_in_mid_frame_leaves_nothing(
    who: str, there: Context, here: Context, first_frame: asyncio.Event
) -> None:
    async def job() -> None:
        async with scene(there, here) as s:
            fetching = await s.begun(first_frame)
            await (s.publisher if who == "publisher" else s.engine).close()
            with pytest.raises(PeerLostError if who == "publisher" else TransferAbortedError):
                await fetching
            await settled(s.pool, 128, 0, 0)
            await eventually(lambda: sum(s.publisher.stats().serve.failures.values()) == 1)

    run(job())


def test_a_connection_that_breaks_in_mid_frame_is_made_anew(
    there: Context, here: Context, first_frame: asyncio.Event
) -> None:
    async def job() -> None:
        async with scene(there, here) as s:
            fetching = await s.begun(first_frame)
            s.transport.abort()
            with await fetching as fetched:
                assert digest(fetched) == digest(s.whole)
            assert s.engine.stats().num_reconnects == 1
            assert sum(s.publisher.stats().serve.failures.values()) == 1

    run(job())


# Back-pressure, and turns.


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def asked_by(hand: Hand, key: str, *, deadline_s: float = 20.0) -> int:
    """A fetch of the hand's that was answered."""
    fetch = Fetch(key=key, deadline_s=deadline_s, path="frames", num_streams=16)
    transfer_id = int(hand.do("fetch", fetch, timeout_s=deadline_s))
    assert (await hand.expect(PublishedHeard)).transfer_id == transfer_id
    return transfer_id


def take(hand: Hand, transfer_id: int, **what: Any) -> None:
    hand.do("take", transfer_id, Take(**{"page_size": 16, "head_offset": 0, "num_heads": 8} | what))


def test_readers_that_take_nothing_cost_no_memory_and_harm_nobody(there: Context, here: Context) -> None:
    """Forty pulls of 32 MiB, of two readers that stop reading: what is held is what two connections hold."""

    async def job() -> None:
        async with (
            scene(there, here, lease_s=1.5, timeout_s=1.5) as s,
            shaken(s.publisher.address) as one,
            shaken(s.publisher.address) as other,
        ):
            before = resident_nbytes()
            for hand in (one, other):
                await hand.expect(PoolsAnnounced)
                asked = [await asked_by(hand, "all", deadline_s=1.5) for _ in range(20)]
                for transfer_id in asked:
                    take(hand, transfer_id)
                assert hand.channel is not None
                assert hand.channel._transport is not None
                hand.channel._transport.pause_reading()
            with await s.peer.fetch("all") as fetched:
                assert digest(fetched) == digest(s.whole)
            assert resident_nbytes() - before - 64 * BIG.page_nbytes * 16 < 32 << 20
            await eventually(lambda: s.publisher.stats().serve.failures == {"LeaseExpiredError": 40})
            for hand in (one, other):
                assert hand.channel is not None
                assert hand.channel._transport is not None
                hand.channel._transport.resume_reading()
                for _ in range(20):
                    told = await hand.expect(AbortRequested)
                    assert isinstance(told.error, LeaseExpiredError)

    run(job())


def test_pulls_that_a_reader_ends_itself_are_not_kept_until_it_reads(there: Context, here: Context) -> None:
    """It could ask for more and more of them, each with a table of its own."""

    async def job() -> None:
        async with scene(there, here) as s, shaken(s.publisher.address) as hand:
            await hand.expect(PoolsAnnounced)
            first = await asked_by(hand, "all")
            assert hand.channel is not None
            transport: Any = hand.channel._transport
            transport.pause_reading()
            take(hand, first)
            readings = s.publisher._receiving().publishing._readings
            (link,) = (link for link in s.publisher._reception._links if link.peer.engine_name == "hand")  # type: ignore[union-attr]

            async def said(message: Any, transfer_id: int, *, is_read: bool) -> None:
                transport.write(encode(message, transfer_id))
                await eventually(lambda: ((link, transfer_id) in readings._readings) is is_read)

            for transfer_id in range(100, 2100, 100):
                fetch = Fetch(key="all", deadline_s=20, path="frames", num_streams=16)
                await said(fetch, transfer_id, is_read=True)
                what = Take(page_size=16, head_offset=0, num_heads=8, resident=np.zeros(64, np.bool_))
                await said(what, transfer_id, is_read=True)
                transport.write(encode(Abort(ErrorCode.ABORTED, "not wanted"), transfer_id))
                await said(Quiet(), transfer_id, is_read=False)
            held = [each.transfer_id for each in gc.get_objects() if type(each) is Delivery]
            assert held == [first]
            transport.write(encode(Abort(ErrorCode.ABORTED, "not wanted"), first))
            await said(Quiet(), first, is_read=False)
            assert not any(type(each) is Delivery for each in gc.get_objects())

    run(job())


@pytest.mark.parametrize(
    "error", [MemoryError("no room for the plan"), RuntimeError("a defect")], ids=["memory", "defect"]
)
def test_a_pull_that_breaks_at_its_source_is_told_and_the_others_go_on(
    error: Exception, there: Context, here: Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    packer_of, broken = serving._packer_of, [error]

    def packer(delivery: Delivery) -> Any:
        if broken:
            raise broken.pop()
        return packer_of(delivery)

    monkeypatch.setattr(serving, "_packer_of", packer)

    async def job() -> None:
        async with scene(there, here, SPEC, 32) as s:
            fetches = [asyncio.create_task(s.peer.fetch("all")) for _ in range(3)]
            for fetching in fetches:
                await asyncio.wait((fetching,))
            (failure,) = (fetching.exception() for fetching in fetches if fetching.exception() is not None)
            assert isinstance(failure, HurrayError)
            assert type(error).__name__ in str(failure)
            for fetching in fetches:
                if fetching.exception() is None:
                    with fetching.result() as fetched:
                        assert digest(fetched) == digest(s.whole)
            assert s.publisher.stats().serve.failures == {"HurrayError": 1}
            assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error]

    run(job())


def test_small_pulls_pass_a_large_one_on_the_same_connection(there: Context, here: Context) -> None:
    async def job() -> None:
        async with scene(there, here) as s, shaken(s.publisher.address) as hand:
            await hand.expect(PoolsAnnounced)
            s.publisher.publish("small", snapshot_of(s.source, [3]))
            large, *small = [await asked_by(hand, key) for key in ("all", "small", "small", "small")]
            for transfer_id in (large, *small):
                take(hand, transfer_id)
            came: Counter[int] = Counter()
            ended: list[int] = []
            while len(ended) < 4:
                event: Any = await asyncio.wait_for(hand.events.get(), 10)
                if isinstance(event, TensorData):
                    came[event.transfer_id] += len(event.data)
                elif isinstance(event, AllEnded):
                    ended.append(event.transfer_id)
                    hand.do("read_end", event.transfer_id)
                    if event.transfer_id in small:
                        assert came[large] < 24 << 20, "the small ones waited for the large one"
            assert ended[-1] == large
            assert [came[each] for each in (large, *small)] == [64 * 16 * BIG.page_nbytes] + [16 * BIG.page_nbytes] * 3

    run(job())


def test_more_pulls_than_share_a_connection_all_finish(there: Context, here: Context) -> None:
    async def job() -> None:
        async with scene(there, here, SPEC, 32) as s:
            tables = [[n % 30, (n + 1) % 30] for n in range(30)]
            for n, table in enumerate(tables):
                s.publisher.publish(str(n), snapshot_of(s.source, table))
            fetches = [asyncio.create_task(s.peer.fetch(str(n))) for n in range(30)]
            for table, fetching in zip(tables, fetches, strict=True):
                with await fetching as fetched:
                    assert digest(fetched) == digest(snapshot_of(s.source, table))
            assert s.publisher.stats().serve.num_transfers == 30

    run(job())


def test_heartbeats_go_between_the_frames(there: Context, here: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow pull of over a second, in which the reader has nothing to say, and a silent peer is given 0.4."""

    async def job() -> None:
        async with scene(there, here, peer_timeout_s=0.4) as s:
            loop, hear, num_read = asyncio.get_running_loop(), Taking.hear, 0

            def slowly(taking: Taking, event: Any) -> None:
                nonlocal num_read
                hear(taking, event)
                num_read += isinstance(event, TensorData)
                if isinstance(event, TensorData) and num_read % 8 == 0:
                    s.transport.pause_reading()
                    loop.call_later(0.08, s.transport.resume_reading)

            monkeypatch.setattr(Taking, "hear", slowly)
            started = time.monotonic()
            with await s.peer.fetch("all") as fetched:
                assert time.monotonic() - started > 1
                assert digest(fetched) == digest(s.whole)
            stats = s.publisher.stats()
            assert (stats.num_disconnects, stats.serve.failures) == (0, {})

    run(job())


# Readers that break the rules.


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({"page_size": 24}, "must divide the destination's"),
        ({"page_size": 2**31}, "above 256 times the source's 16"),
        ({"head_offset": 4}, "must lie below total_heads 8"),
        ({"head_offset": 8, "num_heads": 1}, "head"),
        ({"num_heads": 2**32 - 1}, "must lie below total_heads 8"),
        ({"resident": np.zeros(63, np.bool_)}, "must be 0 or the 64 pages"),
        ({"resident": np.zeros(1_000_000, np.bool_)}, "must be 0 or the 64 pages"),
        ({"page_size": 8, "resident": np.zeros(64, np.bool_)}, "must be 0 or the 128 pages"),
    ],
)
def test_a_reader_that_asks_for_what_cannot_be_is_told_why(
    what: dict[str, Any], why: str, there: Context, here: Context
) -> None:
    async def job() -> None:
        async with scene(there, here) as s, shaken(s.publisher.address) as hand:
            await hand.expect(PoolsAnnounced)
            transfer_id = await asked_by(hand, "all")
            take(hand, transfer_id, **what)
            told = await hand.expect(AbortRequested)
            assert told.transfer_id == transfer_id
            assert isinstance(told.error, GeometryError)
            assert why in str(told.error)
            assert s.publisher.stats().serve.failures == {"GeometryError": 1}
            with await s.peer.fetch("all") as fetched:
                assert digest(fetched) == digest(s.whole)

    run(job())


def test_a_reader_that_has_everything_is_sent_nothing(there: Context, here: Context) -> None:
    async def job() -> None:
        async with scene(there, here) as s, shaken(s.publisher.address) as hand:
            await hand.expect(PoolsAnnounced)
            transfer_id = await asked_by(hand, "all")
            take(hand, transfer_id, resident=np.ones(64, np.bool_))
            await hand.expect(AllEnded)
            hand.do("read_end", transfer_id)
            await hand.expect(Acknowledged)
            serve = s.publisher.stats().serve
            assert (serve.num_transfers, serve.nbytes) == (1, 0)

    run(job())


# Sources that break the rules.


class FalseSource:
    """A listening side that is driven by hand: announces a pool, publishes it, and sends what its test wants."""

    def __init__(self, pool: PagePool, send: Callable[[ServerSession, int, float], None]) -> None:
        self._pool, self._send = pool, send
        self.heard: list[Event] = []

    def __call__(self, channel: Channel) -> Callable[[Event], None]:
        session = channel.session
        assert isinstance(session, ServerSession)

        def hear(event: Event) -> None:
            self.heard.append(event)
            match event:
                case SessionOpened():
                    pool = announcement(self._pool, pool_id=0, generation=1, name="")
                    session.announce(pool, now=channel.now)
                case Fetched(transfer_id=transfer_id):
                    session.publish(transfer_id, self._published(), now=channel.now)
                case Taken(transfer_id=transfer_id):
                    self._send(session, transfer_id, channel.now)
            channel.notify()

        return hear

    def _published(self) -> Published:
        snapshot = Snapshot.from_block_tables(self._pool, TABLES, seq_lens=SEQ_LENS)
        return Published(
            pool_id=0,
            generation=1,
            descriptors=snapshot.encode_descriptors(dialect=Dialect.ADR_024),
            block_table=snapshot.block_table,
            seq_ptr=snapshot.seq_ptr,
            seq_lens=snapshot.seq_lens,
            total_heads=4,
            lease_s=10,
        )


NBYTES = 9 * SPEC.page_nbytes  # of one descriptor of TABLES


@pytest.mark.parametrize("dest", [SPEC, SPEC.with_order("HND"), replace(SPEC, page_size=2)], ids=["same", "HND", "2"])
@pytest.mark.parametrize(
    "fault", ["one byte too many", "far too many", "one byte too few", "no bytes at all", "no end", "an end too early"]
)
def test_wrong_amounts_of_page_data_fail_the_fetch_and_harm_nobody(
    fault: str, dest: CacheSpec, there: Context, here: Context
) -> None:
    nbytes = NBYTES if dest.page_size == SPEC.page_size else 29 * dest.page_nbytes

    def send(session: ServerSession, transfer_id: int, now: float) -> None:
        for index in range(4):
            if fault == "far too many" and index == 2:
                session.tensor_data(transfer_id, index, 0, bytes(8 << 20), now=now)
            if fault in ("one byte too few", "no bytes at all") and index == 2:
                if fault == "one byte too few":
                    session.tensor_data(transfer_id, index, 0, bytes(nbytes - 1), now=now)
                session.data_end(transfer_id, index, now=now)
                continue
            if fault == "an end too early" and index == 2:
                session.data_end(transfer_id, index, now=now)
                return
            if fault != "far too many" or index != 2:
                session.tensor_data(transfer_id, index, 0, bytes(nbytes), now=now)
            if fault == "one byte too many" and index == 2:
                session.tensor_data(transfer_id, index, nbytes, bytes(1), now=now)
            if fault != "no end" or index != 2:
                session.data_end(transfer_id, index, now=now)

    async def job() -> None:
        with (
            PagePool.allocate(SPEC, 32, context=there) as source,
            PagePool.allocate(dest, 64, context=here) as pool,
            contextlib.closing(there.open_worker()) as worker,
        ):
            for tensor in dest.tensors:
                pool.pages(*tensor).view(np.uint8)[...] = 0xEE
            false = FalseSource(source, send)
            config = SessionConfig(engine_name="false", host_id=b"elsewhere", worker_address=worker.address)
            listener = await serve("127.0.0.1", 0, config, on_session=false)
            lease = pool.allocator.lease(10)
            async with Engine(pool, timeout_s=20) as engine, engine.connect(f"127.0.0.1:{listener.port}") as peer:
                kind = DeadlineExceededError if fault == "no end" else ProtocolError
                with pytest.raises(kind):
                    await peer.fetch("all", timeout_s=0.5 if fault == "no end" else 10)
                assert counts(pool) == (54, 10, 0)
                assert peer.connected
                assert sum(engine.stats().fetch.failures.values()) == 1
                await eventually(lambda: any(isinstance(event, AbortRequested) for event in false.heard))
            await listener.close()
            for tensor in dest.tensors:
                held = pool.pages(*tensor).view(np.uint8)[lease.page_ids]
                assert (held == 0xEE).all(), "a page of somebody else was written"
            lease.release()

    run(job())


def test_what_a_source_by_hand_sends_is_what_is_read(there: Context, here: Context) -> None:
    content = np.random.default_rng(8).integers(0, 256, (4, NBYTES), np.uint8)

    def send(session: ServerSession, transfer_id: int, now: float) -> None:
        for index in (3, 0, 2, 1):
            for start in range(0, NBYTES, 777):
                piece = content[index][start : start + 777]
                session.tensor_data(transfer_id, index, start, piece.data, now=now)
            session.data_end(transfer_id, index, now=now)

    class Honest(FalseSource):
        def __call__(self, channel: Channel) -> Callable[[Event], None]:
            hear = super().__call__(channel)

            def answer(event: Event) -> None:
                hear(event)
                if isinstance(event, AllEnded):
                    assert isinstance(channel.session, ServerSession)
                    channel.session.acknowledge(event.transfer_id, now=channel.now)
                    channel.notify()

            return answer

    async def job() -> None:
        with (
            PagePool.allocate(SPEC, 32, context=there) as source,
            PagePool.allocate(SPEC, 64, context=here) as pool,
            contextlib.closing(there.open_worker()) as worker,
        ):
            config = SessionConfig(engine_name="hand", host_id=b"elsewhere", worker_address=worker.address)
            listener = await serve("127.0.0.1", 0, config, on_session=Honest(source, send))
            async with Engine(pool, timeout_s=20) as engine, engine.connect(f"127.0.0.1:{listener.port}") as peer:
                with await peer.fetch("all") as fetched:
                    # Each physical page once, ascending by the source's page ID.
                    places = {page: place for place, page in enumerate(sorted({p for row in TABLES for p in row}))}
                    for index, (role, layer) in enumerate(SPEC.tensors):
                        by_page = content[index].reshape(9, 8, 4, 16)
                        for seq, (row, length) in enumerate(zip(TABLES, SEQ_LENS, strict=True)):
                            got = fetched.tokens(role, layer=layer, seq=seq).view(np.uint8).reshape(length, 4, 16)
                            expected = by_page[[places[page] for page in row]].reshape(-1, 4, 16)[:length]
                            assert np.array_equal(got, expected), (role, layer, seq)
            await listener.close()

    run(job())
