"""Sessions that break and come back: living peers reach who listens at their address, each transfer has one outcome."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from hurray_rdma import Engine, PagePool, PeerLostError
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Context, default_context
from tests.hazards.scenes import (
    LANES,
    SPEC,
    connected,
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


class Wire:
    """A relay to an address, which can be cut."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.num_connections = 0

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._target.rsplit(":", 1)
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        self.num_connections += 1
        self._writers |= {writer, far_writer}

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    sink.write(data)
                    await sink.drain()
            sink.transport.abort()

        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


@contextlib.asynccontextmanager
async def silent_server(port: int = 0) -> AsyncIterator[str]:
    """Accepts, and says nothing."""
    writers = []

    async def hold(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    server = await asyncio.start_server(hold, "127.0.0.1", port)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    for writer in writers:
        writer.transport.abort()


def shared_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/SYSV")


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_living_peer_reaches_the_receiver_that_took_the_place_of_a_dead_one(
    lane: str, number: signal.Signals
) -> None:
    async def job() -> None:
        kind, options = LANES[lane]
        with make_pool(SPEC, 16, kind, Context(options)) as pool:
            fill(pool, 1)
            sent = [snapshot_of(pool, [n, 15 - n]) for n in range(4)]
            async with Engine(pool, timeout_s=10) as engine:
                with Child(receiver, {"lane": lane}) as child:
                    address = await asyncio.to_thread(child.receive)
                    peer = engine.connect(address)
                    await peer.open()
                    assert (await peer.send(sent[0], key="0")).num_pages == 2
                    assert await asyncio.to_thread(child.receive) == ("0", digest(sent[0]))
                    child.signal(number)
                    await asyncio.to_thread(child.join)
                # Another size, so that addresses and keys of the dead one would lead astray.
                with Child(receiver, {"lane": lane, "listen": address, "num_pages": 128}) as child:
                    await asyncio.to_thread(child.receive)
                    await asyncio.gather(*(peer.send(each, key=str(n)) for n, each in enumerate(sent)))
                    received = dict([await asyncio.to_thread(child.receive) for _ in sent])
                    assert received == {str(n): digest(each) for n, each in enumerate(sent)}
                    child.send("counts")
                    assert await asyncio.to_thread(child.receive) == (128, 0, 0)
                    stats = engine.stats()
                    assert (stats.num_connects, stats.num_reconnects, stats.num_peers) == (2, 1, 1)
                    child.send("end")
                    await peer.close()

    run(job())


def test_memory_of_a_dead_receiver_is_unmapped_at_its_senders() -> None:
    async def job() -> None:
        with make_pool(SPEC, 16) as pool:
            async with Engine(pool, timeout_s=10) as engine:
                gc.collect()  # what is left of earlier tests would go meanwhile
                before = shared_mappings()
                with Child(receiver, {}) as child:
                    peer = engine.connect(await asyncio.to_thread(child.receive))
                    await peer.open()
                    assert peer.path == "mapped"
                    await peer.send(snapshot_of(pool, [1]))
                    assert shared_mappings() > before
                    child.signal(signal.SIGKILL)
                    await asyncio.to_thread(child.join)
                await eventually(lambda: shared_mappings() == before)
                assert not peer.connected
                await peer.close()

    run(job())


def reopening_receiver(connection: Connection, lane: str, num_times: int) -> None:
    """One process, one pool, one address; an engine after the other. Reports each arrival, and the accounts."""

    async def job() -> None:
        kind, options = LANES[lane]
        default_context(options)
        address = "127.0.0.1:0"
        with make_pool(SPEC, 16, kind) as pool:
            for _ in range(num_times):
                async with Engine(pool, listen=address, timeout_s=10) as engine:
                    address = engine.address
                    connection.send(address)
                    arrival = await anext(engine.arrivals())
                    connection.send((arrival.key, digest(await arrival.snapshot())))
                    arrival.release()
                    await asyncio.to_thread(connection.recv)
                connection.send(counts(pool))

    asyncio.run(job())


@pytest.mark.parametrize("lane", LANES)
def test_a_receiving_engine_that_is_closed_and_made_anew(lane: str) -> None:
    async def job() -> None:
        kind, options = LANES[lane]
        with make_pool(SPEC, 16, kind, Context(options)) as pool, Child(reopening_receiver, lane, 3) as child:
            fill(pool, 2)
            async with connected(pool, await asyncio.to_thread(child.receive), timeout_s=10) as peer:
                for n in range(3):
                    sent = snapshot_of(pool, [n, n + 7])
                    assert (await peer.send(sent, key=str(n))).num_pages == 2
                    assert await asyncio.to_thread(child.receive) == (str(n), digest(sent))
                    child.send("close")
                    assert await asyncio.to_thread(child.receive) == (16, 0, 0)
                    if n < 2:
                        await asyncio.to_thread(child.receive)

    run(job())


def full_receiver(connection: Connection, lane: str) -> None:
    """All of its pages are taken, until it is told to let go; then it takes what comes and reports it."""

    async def job() -> None:
        kind, options = LANES[lane]
        default_context(options)
        with make_pool(SPEC, 16, kind) as pool:
            held = pool.allocator.lease(16)
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine:
                connection.send(engine.address)

                async def take() -> None:
                    async for arrival in engine.arrivals():
                        with contextlib.suppress(Exception):
                            connection.send((arrival.key, digest(await arrival.snapshot())))
                        arrival.release()

                taking = asyncio.create_task(take())
                while (word := await asyncio.to_thread(connection.recv)) != "end":
                    if word == "let go":
                        held.release()
                    elif word == "waiting":
                        connection.send(engine.stats().num_waiting)
                    else:
                        connection.send(counts(pool))
            await taking

    asyncio.run(job())


async def ask(child: Child, word: str) -> Any:
    child.send(word)
    return await asyncio.to_thread(child.receive)


async def until(child: Child, word: str, wanted: Any) -> None:
    """Asks until the child answers so."""

    async def is_so() -> bool:
        return bool(await ask(child, word) == wanted)

    await eventually(is_so)


@pytest.mark.parametrize("lane", LANES)
def test_a_connection_cut_before_the_grant_costs_no_transfer_and_twice_one(lane: str) -> None:
    async def job() -> None:
        kind, options = LANES[lane]
        with make_pool(SPEC, 16, kind, Context(options)) as pool, Child(full_receiver, lane) as child:
            fill(pool, 3)
            sent = snapshot_of(pool, [1, 2, 3])
            async with (
                Wire(await asyncio.to_thread(child.receive)) as wire,
                Engine(pool, timeout_s=10) as engine,
                engine.connect(wire.address) as peer,
            ):
                for num_before, is_cut_twice in ((1, True), (3, False)):
                    sending = asyncio.create_task(peer.send(sent, key="patient"))
                    await eventually(lambda: wire.num_connections == num_before)  # noqa: B023 - called at once
                    await until(child, "waiting", 1)
                    wire.cut()
                    await eventually(lambda: wire.num_connections == num_before + 1)  # noqa: B023
                    await until(child, "waiting", 1)  # it is offered again
                    if is_cut_twice:
                        wire.cut()
                        with pytest.raises(PeerLostError):
                            await sending
                        await until(child, "waiting", 0)
                child.send("let go")
                assert (await sending).num_pages == 3
                assert await asyncio.to_thread(child.receive) == ("patient", digest(sent))
                await until(child, "counts", (16, 0, 0))
                assert engine.stats().send.failures == {"PeerLostError": 1}
            child.send("end")

    run(job())


@pytest.mark.parametrize("lane", LANES)
def test_a_connection_cut_after_the_grant_fails_that_transfer_only(lane: str) -> None:
    async def job() -> None:
        kind, options = LANES[lane]
        with make_pool(SPEC, 16, kind, Context(options)) as pool, Child(full_receiver, lane) as child:
            fill(pool, 4)
            sent = snapshot_of(pool, [4, 2, 6])
            async with Wire(await asyncio.to_thread(child.receive)) as wire, Engine(pool, timeout_s=10) as engine:
                child.send("let go")
                async with engine.connect(wire.address) as peer:
                    with pytest.raises(PeerLostError):
                        async with peer.begin(sent, key="cut") as transfer:
                            await transfer.send_layer(0)
                            wire.cut()
                            await transfer.send_layer(1)
                            await transfer._acknowledged
                    assert (await peer.send(sent, key="next")).num_pages == 3
                    assert await asyncio.to_thread(child.receive) == ("next", digest(sent))
                    # The new session has said that nothing of the old one is in flight any more.
                    await until(child, "counts", (16, 0, 0))
                    assert wire.num_connections == 2
            child.send("end")

    run(job())


def test_who_loses_a_session_is_told_whose_and_what_to_do_and_both_losses_when_nobody_listens_any_more() -> None:
    async def job() -> None:
        with make_pool(SPEC, 16) as pool, make_pool(SPEC, 16) as source:
            sent = snapshot_of(source, [1])
            async with Engine(source, timeout_s=10) as engine, Engine(pool, listen="127.0.0.1:0") as target:
                async with Wire(target.address) as wire:
                    peer = engine.connect(wire.address)
                    await peer.open()
                    with pytest.raises(PeerLostError) as caught:
                        async with peer.begin(sent) as transfer:
                            wire.cut()
                            await eventually(lambda: not peer.connected)
                            await transfer.send_layer(0)
                    assert str(caught.value).startswith(f"the session with {wire.address} was lost: ")
                    assert str(caught.value).endswith(". The next transfer connects anew")
                for _ in range(2):
                    with pytest.raises(PeerLostError) as caught:
                        await peer.send(sent)
                    told = str(caught.value)
                    assert told.startswith(f"{wire.address} cannot be reached: Connection refused; ")
                    assert "; the session before was lost: " in told
                await peer.close()

    run(job())


def test_a_closed_peer_connects_no_more() -> None:
    async def job() -> None:
        with make_pool(SPEC, 16) as pool, make_pool(SPEC, 16) as source:
            async with Engine(pool, listen="127.0.0.1:0") as target, Wire(target.address) as wire:
                async with Engine(source) as engine:
                    async with engine.connect(wire.address) as peer:
                        await peer.send(snapshot_of(source, [1]))
                    for _ in range(2):
                        with pytest.raises(PeerLostError, match="closed here"):
                            await peer.send(snapshot_of(source, [1]))
                    with pytest.raises(PeerLostError):
                        _ = peer.lane
                    assert not peer.connected
                assert wire.num_connections == 1

    run(job())


@pytest.mark.parametrize("again", [False, True], ids=["first time", "again"])
def test_a_peer_closed_while_it_connects_stops_at_once_and_leaves_nothing(again: bool) -> None:
    async def job() -> None:
        with make_pool(SPEC, 16) as pool, make_pool(SPEC, 16) as source:
            async with Engine(source, timeout_s=600) as engine:
                if again:
                    async with Engine(pool, listen="127.0.0.1:0") as target:
                        address = target.address
                        peer = engine.connect(address)
                        await peer.open()
                    await eventually(lambda: not peer.connected)
                    port = int(address.split(":")[1])
                else:
                    port = 0
                async with silent_server(port) as address:
                    if again:
                        connecting = [asyncio.create_task(peer.send(snapshot_of(source, [n]))) for n in range(2)]
                    else:
                        peer = engine.connect(address)
                        connecting = [asyncio.create_task(peer.open())]
                    _, pending = await asyncio.wait(connecting, timeout=0.2)
                    assert len(pending) == len(connecting)
                    await peer.close()
                    for each in connecting:
                        with pytest.raises(PeerLostError, match="closed here"):
                            await each
                    assert not peer.connected
            assert asyncio.all_tasks() == {asyncio.current_task()}

    run(job())


def test_a_connect_that_is_cancelled_leaves_a_peer_that_can_connect() -> None:
    async def job() -> None:
        with make_pool(SPEC, 16) as pool, make_pool(SPEC, 16) as source:
            async with Engine(source, timeout_s=20) as engine:
                async with Engine(pool, listen="127.0.0.1:0") as target:
                    address = target.address
                    peer = engine.connect(address)
                    await peer.open()
                await eventually(lambda: not peer.connected)
                async with silent_server(int(address.split(":")[1])):
                    sending = asyncio.create_task(peer.send(snapshot_of(source, [1])))
                    await asyncio.wait({sending}, timeout=0.2)
                    sending.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await sending
                async with Engine(pool, listen=address) as target:
                    await peer.send(snapshot_of(source, [1]))
                    (await anext(target.arrivals())).release()
                    await settled(pool, 16, 0, 0)
                    assert engine.stats().send.failures == {"CancelledError": 1}
                    await peer.close()

    run(job())


def test_a_send_waits_no_longer_than_its_budget_for_a_connection() -> None:
    async def job() -> None:
        with PagePool.allocate(SPEC, 16) as pool:
            async with Engine(pool, listen="127.0.0.1:0") as engine:
                address = engine.address
                peer = engine.connect(address)
                await peer.open()
                await engine._reception.close()  # type: ignore[union-attr]
                await eventually(lambda: not peer.connected)
                async with silent_server(int(address.split(":")[1])):
                    sends = [peer.send(snapshot_of(pool, [1]), timeout_s=0.4) for _ in range(3)]
                    errors = await asyncio.gather(*sends, return_exceptions=True)
                    assert all(isinstance(error, TimeoutError | PeerLostError) for error in errors), errors
                await peer.close()

    run(job())
