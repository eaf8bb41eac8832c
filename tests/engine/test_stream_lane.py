"""Transfers over page streams, where UCX has nothing but tcp: every byte compared, path and lane asserted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from hurray_rdma import (
    CacheSpec,
    Engine,
    HurrayError,
    PagePool,
    PeerLostError,
    Snapshot,
    TransferAbortedError,
    TransportError,
)
from hurray_rdma.control import AbortRequested, Acknowledged, Fetch, Granted, PublishedHeard, SessionClosed
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Context, PageStream, default_context
from tests.engine import test_unlike as unlike
from tests.engine.hands import Hand, shaken
from tests.hazards.scenes import (
    LANES,
    SPEC,
    connected,
    counts,
    digest,
    eventually,
    fill,
    make_pool,
    raw,
    receiver,
    run,
    settled,
    snapshot_of,
    stopped,
)
from tests.transport.test_page_streams import ENDED, FORBIDDEN, OK, WRITE, exactly, parcel, shake

TCP = LANES["tcp"][1]
LARGE = CacheSpec(num_layers=4, num_heads=8, head_dim=128, page_size=32, dtype="bfloat16")  # pages of 64 KiB
NUM_LARGE = 64  # 32 MiB: more than the sockets of both sides hold


@pytest.fixture(scope="module")
def context() -> Context:
    return Context(TCP)


def unlike_receiver(connection: Connection, spec: CacheSpec) -> None:
    default_context(TCP)
    unlike.receiver(connection, spec, 64, False, 1)


@pytest.mark.parametrize(
    ("source", "dest"),
    [
        (unlike.SPEC, unlike.SPEC),
        (unlike.SPEC, unlike.SPEC.with_order("HND")),
        (unlike.SPEC, replace(unlike.SPEC, page_size=2)),
        (unlike.SPEC.with_order("HND"), replace(unlike.SPEC, page_size=32)),
        (unlike.INT8, replace(unlike.INT8, page_size=4, num_heads=1, head_offset=3)),
    ],
    ids=[
        "alike",
        "NHD to HND",
        "pages of 8 to 2",
        "HND pages of 8 to NHD pages of 32",
        "int8, pages of 8 to 4, one head",
    ],
)
@pytest.mark.parametrize("zero_tails", [False, True])
def test_every_token_is_pushed(source: CacheSpec, dest: CacheSpec, zero_tails: bool, context: Context) -> None:
    with Child(unlike_receiver, dest) as child, PagePool.allocate(source, 32, context=context) as pool:
        unlike.fill(pool, 5)
        sent = Snapshot.from_block_tables(pool, unlike.TABLES, seq_lens=unlike.SEQ_LENS)
        address = child.receive()  # the first child of a session takes its time

        async def job() -> None:
            async with connected(pool, address, timeout_s=20) as peer:
                assert (peer.lane, peer.path) == ("tcp", "stream")
                stats = await peer.send(sent, key="streamed", zero_tails=zero_tails)
                assert (stats.lane, stats.path) == ("tcp", "stream")

        run(job())
        key, seq_lens, received, _ = child.receive()
        assert (key, seq_lens) == ("streamed", unlike.SEQ_LENS)
        first = dest.head_offset - source.head_offset
        for at, (tokens, *of_slots) in unlike.contents(sent).items():
            got_tokens, *got_of_slots = received[at]
            assert np.array_equal(got_tokens, tokens[:, first : first + dest.num_heads]), at
            for got, expected in zip(got_of_slots, of_slots, strict=True):
                assert np.array_equal(got, expected), at
        assert child.receive() == (64, 0, 0)
        child.send("end")


@pytest.mark.both_loops
@pytest.mark.parametrize("ahead_pages", [0, 64])
def test_layers_in_any_order_and_many_at_once_from_several_senders(ahead_pages: int, context: Context) -> None:
    async def job() -> None:
        settings = {"lane": "tcp", "num_pages": 256, "ahead_pages": ahead_pages}
        with Child(receiver, settings) as child, make_pool(SPEC, 64, context=context) as pool:
            fill(pool, 1)
            address = await asyncio.to_thread(child.receive)
            expected = {}

            async def one(sender: int, peer: Any) -> None:
                for n in range(4):
                    key, pages = f"{sender} {n}", [sender, 10 + n, 11 + n, 40 + sender]
                    expected[key] = digest(snapshot_of(pool, pages))
                    if n % 2:
                        stats = await peer.send(snapshot_of(pool, pages), key=key)
                    else:
                        async with peer.begin(snapshot_of(pool, pages), key=key) as transfer:
                            for layer in (1, 0):
                                await transfer.send_layer(layer)
                        stats = transfer.stats
                    assert (stats.lane, stats.path) == ("tcp", "stream")

            async with contextlib.AsyncExitStack() as stack:
                peers = [await stack.enter_async_context(connected(pool, address, timeout_s=20)) for _ in range(4)]
                await asyncio.gather(*(one(n, peer) for n, peer in enumerate(peers)))
                received = dict([await asyncio.to_thread(child.receive) for _ in range(16)])
                assert received == expected
            child.send("counts")
            assert await asyncio.to_thread(child.receive) == (256, 0, 0)
            child.send("end")

    run(job())


def test_a_run_of_pages_may_go_on_from_one_layer_into_the_next(context: Context) -> None:
    """Where all pages of a tensor go, and the next tensor begins right after them on both sides."""

    async def job() -> None:
        settings = {"lane": "tcp", "spec": LARGE, "num_pages": 3}
        with Child(receiver, settings) as child, make_pool(LARGE, 3, context=context) as pool:
            fill(pool, 1)
            assert pool.layout.segments[1].offset_nbytes == 3 * LARGE.page_nbytes
            async with connected(pool, await asyncio.to_thread(child.receive), timeout_s=20) as peer:
                sent = snapshot_of(pool, [0, 1, 2])
                assert (await peer.send(sent, key="all")).path == "stream"
                assert await asyncio.to_thread(child.receive) == ("all", digest(sent))
            child.send("end")

    run(job())


def publisher(connection: Connection, num_pages: int) -> None:
    """Publishes some of its pages; says what they are, and its pool's counts."""

    async def job() -> None:
        with make_pool(LARGE, num_pages, context=default_context(TCP)) as pool:
            fill(pool, 3)
            snapshot = snapshot_of(pool, list(range(0, num_pages, 2)))
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=20) as engine:
                engine.publish("key", snapshot, lease_s=60)
                connection.send((engine.address, digest(snapshot)))
                await asyncio.to_thread(connection.recv)
                engine.unpublish("key")
                connection.send(counts(pool))

    asyncio.run(job())


@pytest.mark.both_loops
def test_a_snapshot_is_pulled(context: Context) -> None:
    async def job() -> None:
        with Child(publisher, NUM_LARGE) as child, make_pool(LARGE, NUM_LARGE, "caller's", context=context) as pool:
            address, expected = await asyncio.to_thread(child.receive)
            async with connected(pool, address, timeout_s=20) as peer:
                for _ in range(2):
                    with await peer.fetch("key") as snapshot:
                        assert (snapshot.stats.lane, snapshot.stats.path) == ("tcp", "stream")
                        assert digest(snapshot) == expected
                    assert counts(pool) == (NUM_LARGE, 0, 0)
            child.send("end")
            assert await asyncio.to_thread(child.receive) == (NUM_LARGE, 0, 0)

    run(job())


def test_without_a_stream_ucx_moves_the_pages_and_one_warning_says_so(
    context: Context, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: Any, **__: Any) -> PageStream:
        raise TransportError("port 1 of nowhere cannot be reached: a firewall")

    monkeypatch.setattr(PageStream, "open", unreachable)

    async def job() -> None:
        with Child(receiver, {"lane": "tcp"}) as child, make_pool(SPEC, 16, context=context) as pool:
            fill(pool, 1)
            async with connected(pool, await asyncio.to_thread(child.receive), timeout_s=20) as peer:
                for n in range(3):
                    sent = snapshot_of(pool, [1 + n, 5, 9])
                    stats = await peer.send(sent, key=str(n))
                    assert (stats.lane, stats.path) == ("tcp", "put")
                    assert await asyncio.to_thread(child.receive) == (str(n), digest(sent))
            child.send("end")

    with caplog.at_level(logging.WARNING, "hurray_rdma"):
        run(job())
    assert len([record for record in caplog.records if "a firewall" in record.getMessage()]) == 1


class Cutter:
    """Passes page streams on to where they were to go; when ``after_nbytes`` have gone one way it cuts that one."""

    def __init__(self, after_nbytes: int) -> None:
        self._left = after_nbytes
        self._threads: list[threading.Thread] = []
        self._open = PageStream.open

    def open(self, host: str, port: int, ticket: bytes, *, timeout_s: float) -> PageStream:
        listener = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=self._pass, args=(listener, (host, port)))
        thread.start()
        self._threads.append(thread)
        return self._open("127.0.0.1", listener.getsockname()[1], ticket, timeout_s=timeout_s)

    def _pass(self, listener: socket.socket, target: tuple[str, int]) -> None:
        with listener, listener.accept()[0] as near, socket.create_connection(target) as far:
            back = threading.Thread(target=self._copy, args=(far, near, False))
            back.start()
            self._copy(near, far, True)
            back.join()

    def _copy(self, src: socket.socket, dst: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError):
            while data := src.recv(65536):
                dst.sendall(data)
                if counts and self._left > 0:
                    self._left -= len(data)
                    if self._left <= 0:
                        break
        for each in (src, dst):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.both_loops
def test_a_stream_that_is_cut_half_way_fails_its_transfer_and_the_next_one_connects_anew(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    cutter = Cutter(8 << 20)
    monkeypatch.setattr(PageStream, "open", cutter.open)

    async def job() -> None:
        settings = {"lane": "tcp", "spec": LARGE, "num_pages": NUM_LARGE, "lease_s": 20.0}
        with Child(receiver, settings) as child, make_pool(LARGE, NUM_LARGE, context=context) as pool:
            fill(pool, 1)
            sent = snapshot_of(pool, list(range(NUM_LARGE)))
            async with connected(pool, await asyncio.to_thread(child.receive), timeout_s=20) as peer:
                assert peer.path == "stream"
                with pytest.raises(PeerLostError, match="connection for pages was cut"):
                    await peer.send(sent, key="cut")
                assert await asyncio.to_thread(child.receive) in {
                    ("cut", "TransferAbortedError"),
                    ("cut", "PeerLostError"),
                }
                stats = await peer.send(sent, key="again")  # all pages of the pool have come back
                assert (stats.lane, stats.path) == ("tcp", "stream")
                assert await asyncio.to_thread(child.receive) == ("again", digest(sent))
                assert counts(pool) == (NUM_LARGE, 0, 0)
            child.send("end")

    run(job())
    cutter.join()


@pytest.mark.both_loops
def test_a_stream_that_was_cut_while_it_lay_idle_costs_no_transfer(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[PageStream] = []
    plain = PageStream.open

    def noted(*args: Any, **more: Any) -> PageStream:
        opened.append(plain(*args, **more))
        return opened[-1]

    monkeypatch.setattr(PageStream, "open", noted)

    async def job() -> None:
        with Child(receiver, {"lane": "tcp"}) as child, make_pool(SPEC, 16, context=context) as pool:
            fill(pool, 1)
            async with connected(pool, await asyncio.to_thread(child.receive), timeout_s=20) as peer:
                for n in range(2):
                    await peer.send(snapshot_of(pool, [n]), key=str(n))
                    assert await asyncio.to_thread(child.receive) == (str(n), digest(snapshot_of(pool, [n])))
                    opened[-1]._socket.shutdown(socket.SHUT_RDWR)
            assert len(opened) == 2
            child.send("end")

    run(job())


@pytest.mark.parametrize("how", ["killed", "stopped", "aborted", "cancelled"])
@pytest.mark.parametrize("what", ["send", "fetch"])
def test_whatever_ends_it_half_way_leaves_no_page_behind(how: str, what: str, context: Context) -> None:
    async def job() -> None:
        settings = {"lane": "tcp", "spec": LARGE, "num_pages": NUM_LARGE}
        child_of = Child(receiver, settings) if what == "send" else Child(publisher, 2 * NUM_LARGE)
        with child_of as child, make_pool(LARGE, NUM_LARGE, context=context) as pool:
            fill(pool, 1)
            told = await asyncio.to_thread(child.receive)
            async with (
                Engine(pool, timeout_s=4 if how in ("stopped", "killed") else 20, peer_timeout_s=1.0) as engine,
                engine.connect(told if what == "send" else told[0]) as peer,
            ):
                assert peer.path == "stream"
                if what == "send":
                    moving = asyncio.create_task(peer.send(snapshot_of(pool, list(range(NUM_LARGE))), key="x"))
                else:
                    moving = asyncio.create_task(peer.fetch("key"))
                await asyncio.sleep(0.01)  # wherever that finds it
                match how:
                    case "killed":
                        child.signal(signal.SIGKILL)
                    case "stopped":
                        child.signal(signal.SIGSTOP)
                        await stopped(child.pid)
                    case "cancelled":
                        moving.cancel()
                    case "aborted":
                        await peer.close()
                async with asyncio.timeout(15):
                    await asyncio.wait((moving,))
                if not moving.cancelled() and moving.exception() is None and what == "fetch":
                    moving.result().release()
                assert moving.cancelled() or isinstance(moving.exception(), HurrayError | None)
                await settled(pool, NUM_LARGE, 0, 0)
            assert engine.stats().num_quarantined == 0
            if how == "killed":
                await asyncio.to_thread(child.join)
                return
            child.signal(signal.SIGCONT)
            if what == "send":
                with contextlib.suppress(AssertionError):
                    await asyncio.to_thread(child.receive, timeout_s=2)

                async def whole() -> bool:
                    child.send("counts")
                    while not (isinstance(said := await asyncio.to_thread(child.receive), tuple) and len(said) == 3):
                        pass
                    return bool(said == (NUM_LARGE, 0, 0))

                await eventually(whole)
                child.send("end")
            else:
                child.send("end")
                assert await asyncio.to_thread(child.receive) == (2 * NUM_LARGE, 0, 0)

    run(job())


# By hand: who does not keep to the rules.


@contextlib.contextmanager
def page_stream_of(hand: Hand, address: str) -> Iterator[socket.socket]:
    """As `PageStream.open` makes it."""
    assert hand.session.peer is not None
    port, ticket = hand.session.peer.pages_port, hand.session.peer.pages_ticket
    with socket.create_connection((address.rsplit(":", 1)[0], port), timeout=10) as connection:
        shake(connection, ticket)
        yield connection


def told(connection: socket.socket) -> tuple[int, ...]:
    return tuple(np.frombuffer(exactly(connection, 8), "<u4").tolist())


def untouched_but(pool: PagePool, pages: list[int]) -> bool:
    others = np.setdiff1d(np.arange(pool.num_pages), pages)
    return all(bool((raw(pool, *tensor)[others] == 0xEE).all()) for tensor in pool.spec.tensors)


def test_a_sender_is_held_to_the_pages_it_was_granted(caplog: pytest.LogCaptureFixture) -> None:
    async def job() -> None:
        with make_pool(SPEC, 16) as pool, make_pool(SPEC, 16) as source:
            for tensor in SPEC.tensors:
                raw(pool, *tensor)[...] = 0xEE
            page = SPEC.page_nbytes
            async with (
                Engine(pool, listen="127.0.0.1:0", lease_s=20) as engine,
                shaken(engine.address) as hand,
                shaken(engine.address) as other,
            ):
                other_id = other.offer(snapshot_of(source, [3, 4]), path="stream", key="other")
                others = (await other.expect(Granted)).grant.page_ids.tolist()
                transfer_id = hand.offer(snapshot_of(source, [1, 2]), path="stream")
                granted = (await hand.expect(Granted)).grant.page_ids.tolist()
                assert not set(granted) & set(others)

                def write(connection: socket.socket, page_id: int, fill: bytes = b"\1") -> tuple[int, ...]:
                    pieces = [(page_id * page, page)]
                    connection.sendall(parcel(WRITE, pieces, transfer_id=transfer_id) + fill * page)
                    return told(connection)

                with page_stream_of(hand, engine.address) as connection:
                    assert await asyncio.to_thread(write, connection, granted[0]) == (0, OK)
                    assert untouched_but(pool, [granted[0]])
                    # Another's transfer is nothing that this session knows of.
                    connection.sendall(parcel(WRITE, [(others[0] * page, 1)], transfer_id=other_id + 1000) + b"\2")
                    assert await asyncio.to_thread(told, connection) == (0, ENDED)
                    assert await asyncio.to_thread(write, connection, others[0]) == (0, FORBIDDEN)
                    assert await asyncio.to_thread(exactly, connection, 1) == b""
                assert untouched_but(pool, [granted[0]])
                with pytest.raises((AssertionError, OSError)), page_stream_of(hand, engine.address):
                    pass  # the ticket was good for one connection
                # That ends its session, and harms nobody else.
                assert isinstance((await hand.expect(SessionClosed)).error, PeerLostError)
                with page_stream_of(other, engine.address) as connection:
                    connection.sendall(parcel(WRITE, [(others[0] * page, page)], transfer_id=other_id) + b"\3" * page)
                    assert await asyncio.to_thread(told, connection) == (0, OK)
                await eventually(lambda: counts(pool) == (14, 2, 0))
                assert engine.stats().num_sessions == 1
                assert engine.stats().num_quarantined == 0

    with caplog.at_level(logging.WARNING, "hurray_rdma"):
        run(job())
    assert [text for text in caplog.messages if "not inside pages that it may use" in text]


@pytest.mark.both_loops
@pytest.mark.parametrize("how", ["aborted by the sender", "aborted here", "complete", "session lost"])
def test_nothing_lands_once_the_transfer_is_over(how: str) -> None:
    async def job() -> None:
        with make_pool(SPEC, 16) as pool, make_pool(SPEC, 16) as source:
            page = SPEC.page_nbytes
            async with (
                Engine(pool, listen="127.0.0.1:0", lease_s=0.5) as engine,
                shaken(engine.address, says_quiet=False) as hand,
            ):
                transfer_id = hand.offer(snapshot_of(source, [1, 2]), path="stream")
                granted = (await hand.expect(Granted)).grant.page_ids.tolist()
                arrival = await anext(engine.arrivals())
                with page_stream_of(hand, engine.address) as connection:
                    connection.sendall(parcel(WRITE, [(granted[0] * page, page)], transfer_id=transfer_id) + b"\1" * 10)
                    await eventually(lambda: bool(raw(pool, *SPEC.tensors[0])[granted[0], 9] == 1))
                    match how:
                        case "aborted by the sender":
                            hand.do("abort", transfer_id, 1, "enough")
                            hand.do("quiet", transfer_id)
                        case "aborted here":  # and the sender never says that it is quiet: one lease, no quarantine
                            arrival.abort()
                            await hand.expect(AbortRequested)
                        case "complete":
                            hand.do("data_end", transfer_id, *range(len(SPEC.tensors)))
                            await hand.expect(Acknowledged)
                            arrival.release()
                        case "session lost":
                            assert hand.channel is not None
                            hand.channel.abort()
                    await settled(pool, 16, 0, 0)
                    for tensor in SPEC.tensors:
                        raw(pool, *tensor)[...] = 0xEE
                    with contextlib.suppress(OSError):
                        connection.sendall(b"\1" * (page - 10))
                        said = await asyncio.to_thread(exactly, connection, 8)
                        assert said in (b"", np.array([0, ENDED], "<u4").tobytes())
                    assert untouched_but(pool, [])
                    assert engine.stats().num_quarantined == 0

    run(job())


def test_published_pages_are_not_to_be_written() -> None:
    async def job() -> None:
        with make_pool(SPEC, 16) as pool:
            fill(pool, 1)
            async with Engine(pool, listen="127.0.0.1:0") as engine, shaken(engine.address) as hand:
                engine.publish("key", snapshot_of(pool, [2, 5]), lease_s=20)
                before = digest(snapshot_of(pool, list(range(16))))
                fetch = Fetch(key="key", deadline_s=10, lane="tcp", path="stream", num_streams=len(SPEC.tensors))
                transfer_id = int(hand.do("fetch", fetch, timeout_s=10))
                await hand.expect(PublishedHeard)
                with page_stream_of(hand, engine.address) as connection:
                    connection.sendall(
                        parcel(WRITE, [(5 * SPEC.page_nbytes, 4)], transfer_id=transfer_id) + os.urandom(4)
                    )
                    assert await asyncio.to_thread(told, connection) == (0, FORBIDDEN)
                assert digest(snapshot_of(pool, list(range(16)))) == before

    run(job())


@pytest.mark.both_loops
def test_an_engine_leaves_no_thread_and_no_socket_behind() -> None:
    async def job() -> None:
        with make_pool(SPEC, 16) as pool:
            for _ in range(2):
                async with Engine(pool, listen="127.0.0.1:0") as engine, shaken(engine.address) as hand:
                    assert [thread for thread in threading.enumerate() if thread.name.startswith("hurray-pages")]
                    with page_stream_of(hand, engine.address):
                        await engine.close()
                assert not [thread for thread in threading.enumerate() if thread.name.startswith("hurray-pages")]

    run(job())


@pytest.mark.both_loops
def test_a_transfer_that_is_aborted_leaves_the_stream_to_others(context: Context) -> None:
    async def job() -> None:
        settings = {"lane": "tcp", "spec": LARGE, "num_pages": 2 * NUM_LARGE}
        with Child(receiver, settings) as child, make_pool(LARGE, NUM_LARGE, context=context) as pool:
            fill(pool, 1)
            sent = snapshot_of(pool, list(range(NUM_LARGE)))
            async with connected(pool, await asyncio.to_thread(child.receive), timeout_s=20) as peer:
                connection = peer._connection
                for n in range(3):
                    transfer = peer.begin(sent, key=f"aborted {n}")
                    await transfer.__aenter__()
                    sending = asyncio.create_task(transfer.send_rest())
                    await asyncio.sleep(0.002 * n)
                    await transfer.abort()
                    with contextlib.suppress(TransferAbortedError):
                        await sending
                    await peer.send(sent, key=f"whole {n}")
                assert peer._connection is connection
            received = dict([await asyncio.to_thread(child.receive) for _ in range(6)])
            assert {received[f"whole {n}"] for n in range(3)} == {digest(sent)}
            child.send("end")

    run(job())
