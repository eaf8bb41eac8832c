"""Channels over real loopback TCP and TLS: opening, failing to open, back-pressure, dying, closing."""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import socket
import ssl
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from hurray_rdma.control import (
    AbortRequested,
    Acknowledged,
    AllEnded,
    Channel,
    ClientSession,
    Event,
    FrameDecoder,
    Grant,
    Granted,
    Listener,
    Message,
    Offer,
    Offered,
    Pool,
    PoolAnnounced,
    PoolRegion,
    PoolsAnnounced,
    Refused,
    ServerSession,
    SessionClosed,
    SessionConfig,
    SessionOpened,
    TensorData,
    TransferFailed,
    encode,
    open_channel,
    serve,
)
from hurray_rdma.control import channel as channel_module
from hurray_rdma.control import listener as listener_module
from hurray_rdma.control.exchange import Abort, SessionMessage
from hurray_rdma.control.messages import ClientHello, Ping, ServerHello
from hurray_rdma.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineExceededError,
    HurrayError,
    PeerLostError,
    ProtocolError,
)

MakeConfig = Callable[..., SessionConfig]
TLS = Path(__file__).parent / "tls"
pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.both_loops]


class Peer:
    """One side's channel and a queue of its events."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.channel: Channel

    async def next(self, kind: type) -> Event:
        event = await asyncio.wait_for(self.events.get(), 5)
        assert isinstance(event, kind), event
        return event


async def alone() -> None:
    """Returns once no other task is left, or the test's time is up."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)


class Receivers:
    """Every session a listener opened."""

    def __init__(self) -> None:
        self.peers: asyncio.Queue[Peer] = asyncio.Queue()

    def __call__(self, channel: Channel) -> Callable[[Event], None]:
        peer = Peer()
        peer.channel = channel
        self.peers.put_nowait(peer)
        return peer.events.put_nowait

    async def next(self) -> Peer:
        return await asyncio.wait_for(self.peers.get(), 5)


@asynccontextmanager
async def joined(
    server: SessionConfig, client: SessionConfig, host: str = "127.0.0.1", **tls: ssl.SSLContext | None
) -> AsyncIterator[tuple[Peer, Peer]]:
    """An open (client, server) pair over TCP; SessionOpened and PoolsAnnounced are taken."""
    receivers, sender = Receivers(), Peer()
    listener = await serve(host, 0, server, on_session=receivers, ssl_context=tls.get("server_tls"))
    try:
        sender.channel = await open_channel(
            host,
            listener.port,
            client,
            timeout_s=5,
            on_event=sender.events.put_nowait,
            ssl_context=tls.get("client_tls"),
        )
        receiver = await receivers.next()
        await sender.next(SessionOpened)
        await sender.next(PoolsAnnounced)
        await receiver.next(SessionOpened)
        yield sender, receiver
        await sender.channel.close()
        await receiver.channel.close()
    finally:
        await listener.close()
    await alone()


def run(main: Coroutine[None, None, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await main

    asyncio.run(bounded())


async def transfer(sender: Peer, receiver: Peer, offer: Offer, pool: Pool, grant: Grant) -> None:
    """One whole transfer over an open pair."""
    client, server = sender.channel, receiver.channel
    assert isinstance(client.session, ClientSession)
    assert isinstance(server.session, ServerSession)
    server.session.announce(pool, now=server.now)
    server.notify()
    assert await sender.next(PoolAnnounced) == PoolAnnounced(pool)
    transfer_id = client.session.offer(offer, now=client.now, timeout_s=5)
    await client.flush()
    offered = await receiver.next(Offered)
    assert isinstance(offered, Offered)
    np.testing.assert_array_equal(offered.offer.block_table, offer.block_table)
    server.session.grant(transfer_id, grant, now=server.now)
    await server.flush()
    await sender.next(Granted)
    for index in range(offer.num_descriptors):
        client.session.data_end(transfer_id, index, now=client.now)
    await client.flush()
    while not isinstance(await asyncio.wait_for(receiver.events.get(), 5), AllEnded):
        pass
    server.session.acknowledge(transfer_id, now=server.now)
    await server.flush()
    await sender.next(Acknowledged)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_whole_transfer(
    host: str, make_config: MakeConfig, make_offer: Callable[..., Offer], make_pool: Callable[..., Pool], grant: Grant
) -> None:
    async def main() -> None:
        async with joined(make_config("decode", token="s"), make_config("prefill", token="s"), host) as (
            sender,
            receiver,
        ):
            await transfer(sender, receiver, make_offer(), make_pool(), grant)

    run(main())


def test_what_is_for_afterwards_follows_the_answer_and_precedes_the_next_event(
    make_config: MakeConfig, make_offer: Callable[..., Offer]
) -> None:
    """Two offers come at once: their answers go out together, what is for after the first is done before the second."""
    done: list[str] = []

    async def main() -> None:
        async with joined(make_config("decode"), make_config("prefill")) as (sender, receiver):
            client, server = sender.channel, receiver.channel
            assert isinstance(client.session, ClientSession)
            assert isinstance(server.session, ServerSession)
            write, hear = server._write, server._on_event

            def written(transport: asyncio.Transport, parts: list[bytes | memoryview]) -> None:
                done.append("answers")
                write(transport, parts)

            def heard(event: Event) -> None:
                hear(event)
                if isinstance(event, Offered):
                    done.append("offer")
                    server.session.refuse(event.transfer_id, PeerLostError("not today"), now=server.now)
                    server.afterwards(lambda: done.append("afterwards"))

            server._write, server._on_event = written, heard  # type: ignore[method-assign]
            for _ in range(2):
                client.session.offer(make_offer(), now=client.now, timeout_s=5)
            client.notify()
            for _ in range(2):
                await sender.next(Refused)
            server.afterwards(lambda: done.append("at once"))
            assert done == ["offer", "afterwards", "offer", "answers", "afterwards", "at once"]

    run(main())


def test_short_messages_have_little_of_a_turn(
    make_config: MakeConfig,
    make_offer: Callable[..., Offer],
    make_pool: Callable[..., Pool],
    grant: Grant,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands of PINGs, one long message, PINGs again: only what is missing of the long one is read at once."""
    sizes: list[int] = []
    receive = ServerSession.receive

    def measured(session: ServerSession, data: bytes, now: float) -> list[Event]:
        sizes.append(len(data))
        return receive(session, data, now)

    async def main() -> None:
        async with joined(make_config("decode"), make_config("prefill")) as (sender, receiver):
            pings = encode(Ping(), 1) * 20_000
            monkeypatch.setattr(ServerSession, "receive", measured)
            long = encode(make_offer(block_table=np.zeros(100_000, np.uint32), seq_ptr=[0, 50_000, 100_000]), 2)
            assert sender.channel._transport is not None
            sender.channel._transport.write(pings + long + pings + encode(Abort(1, "the last word"), 2))
            await receiver.next(Offered)
            await receiver.next(AbortRequested)
            assert max(sizes) > 16 * 1024, "the long one comes in long pieces"
            # Whatever is over 8 KiB is of the long one; and each piece has at most 8 KiB of others.
            assert sum(size - 8192 for size in sizes if size > 8192) <= len(long)
            assert len(sizes) >= 2 * len(pings) // 8192

    run(main())


def test_offer_of_many_megabytes(
    make_config: MakeConfig, make_offer: Callable[..., Offer], make_pool: Callable[..., Pool], grant: Grant
) -> None:
    num_pages = 4_000_000  # 16 MB of block table
    offer = make_offer(
        block_table=np.arange(num_pages, dtype=np.uint32), seq_ptr=[0, num_pages], seq_lens=[num_pages * 4]
    )

    async def main() -> None:
        async with joined(make_config("decode"), make_config("prefill")) as (sender, receiver):
            await transfer(sender, receiver, offer, make_pool(), grant)

    run(main())


def test_fallback_data_arrives_in_order_and_is_held_back_by_a_slow_reader(
    make_config: MakeConfig, make_offer: Callable[..., Offer], make_pool: Callable[..., Pool], grant: Grant
) -> None:
    piece = np.random.default_rng(1).bytes(1 << 20)

    async def main() -> None:
        async with joined(make_config("decode"), make_config("prefill")) as (sender, receiver):
            client, server = sender.channel, receiver.channel
            server.session.announce(make_pool(), now=server.now)
            server.notify()
            await sender.next(PoolAnnounced)
            transfer_id = client.session.offer(make_offer(1), now=client.now, timeout_s=5)
            await client.flush()
            await receiver.next(Offered)
            server.session.grant(transfer_id, grant, now=server.now)
            await server.flush()
            await sender.next(Granted)
            most_unsent = 0
            for k in range(32):
                client.session.tensor_data(transfer_id, 0, k << 20, piece, now=client.now)
                await client.flush()
                most_unsent = max(most_unsent, client._transport.get_write_buffer_size())
            client.session.data_end(transfer_id, 0, now=client.now)
            await client.flush()
            assert most_unsent < 3 << 20
            for k in range(32):
                event = await receiver.next(TensorData)
                assert isinstance(event, TensorData)
                assert event.offset_nbytes == k << 20
                assert event.data == piece

    run(main())


def _server_tls(*, ask_client: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(TLS / "ca.pem"))
    context.load_cert_chain(TLS / "server.pem")
    context.verify_mode = ssl.CERT_REQUIRED if ask_client else ssl.CERT_NONE
    return context


def _client_tls(*, certificate: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(TLS / "ca.pem"))
    if certificate:
        context.load_cert_chain(TLS / "client.pem")
    return context


@pytest.mark.parametrize("mutual", [False, True])
def test_tls(
    mutual: bool,
    make_config: MakeConfig,
    make_offer: Callable[..., Offer],
    make_pool: Callable[..., Pool],
    grant: Grant,
) -> None:
    async def main() -> None:
        tls = {"server_tls": _server_tls(ask_client=mutual), "client_tls": _client_tls(certificate=mutual)}
        async with joined(make_config("decode"), make_config("prefill"), **tls) as (sender, receiver):
            await transfer(sender, receiver, make_offer(), make_pool(), grant)

    run(main())


async def _say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def _open_fails(
    config: SessionConfig, port: int, expected: type[HurrayError] | tuple[type[HurrayError], ...], **settings: object
) -> HurrayError:
    facts = {
        "timeout_s": 5.0,
        "on_event": lambda event: pytest.fail(f"{event} on a channel that never opened"),
    } | settings
    with pytest.raises(expected) as caught:
        await open_channel("127.0.0.1", port, config, **facts)  # type: ignore[arg-type]
    return caught.value


@pytest.mark.parametrize("case", ["no client certificate", "unknown server", "plain client", "plain server"])
def test_tls_refusals_are_typed(case: str, make_config: MakeConfig) -> None:
    async def main() -> None:
        receivers = Receivers()
        server_tls = None if case == "plain server" else _server_tls(ask_client=case == "no client certificate")
        listener = await serve("127.0.0.1", 0, make_config("decode"), on_session=receivers, ssl_context=server_tls)
        client_tls = {
            "no client certificate": _client_tls(certificate=False),
            "unknown server": ssl.create_default_context(),
            "plain client": None,
            "plain server": _client_tls(certificate=False),
        }[case]
        # asyncio's server drops the alert that says which certificate is missing, so the client only sees the end.
        expected = {"plain client": (PeerLostError, ProtocolError), "no client certificate": PeerLostError}.get(
            case, AuthenticationError
        )
        error = await _open_fails(make_config(), listener.port, expected, ssl_context=client_tls)
        assert case != "no client certificate" or "certificate" in str(error)
        assert case not in ("plain client", "plain server") or "TLS" in str(error)
        await listener.close()
        assert receivers.peers.empty()

    run(main())


def test_wrong_token(make_config: MakeConfig) -> None:
    async def main() -> None:
        receivers = Receivers()
        listener = await serve("127.0.0.1", 0, make_config("decode", token="right"), on_session=receivers)
        error = await _open_fails(make_config(token="wrong"), listener.port, AuthenticationError)
        assert "token" in str(error)
        await _open_fails(make_config(), listener.port, AuthenticationError)
        await listener.close()
        assert receivers.peers.empty()

    run(main())


def test_of_wrong_tokens_a_warning_is_logged_once_a_minute_and_host(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="hurray_rdma.control.listener")
    monkeypatch.setattr(listener_module, "_MAX_HOSTS_WARNED", 1)

    async def main() -> None:
        listener = await serve("127.0.0.1", 0, make_config("decode", token="right"), on_session=Receivers())

        async def comes(token: str | None) -> list[int]:
            caplog.clear()
            with pytest.raises(AuthenticationError):
                await open_channel(
                    "127.0.0.1", listener.port, make_config(token=token), timeout_s=5, on_event=lambda _: None
                )
            assert not any("secret" in record.getMessage() for record in caplog.records)
            return [record.levelno for record in caplog.records if "127.0.0.1:" in record.getMessage()]

        assert await comes("secret") == [logging.WARNING]
        assert await comes("secret") == await comes(None) == [logging.INFO]
        (host,) = listener._warned
        listener._warned[host] -= 60
        assert await comes("secret") == [logging.WARNING]
        assert listener._may_warn_of("another")  # and the first is forgotten
        assert await comes("secret") == [logging.WARNING]
        assert len(listener._warned) == 1
        await listener.close()

    run(main())


def test_nobody_listens(make_config: MakeConfig) -> None:
    async def main() -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            error = await _open_fails(make_config(), free.getsockname()[1], PeerLostError)
        assert "receiver is running" in str(error)

    run(main())


def test_name_that_does_not_resolve(make_config: MakeConfig) -> None:
    async def main() -> None:
        with pytest.raises(PeerLostError, match=r"nowhere\.invalid"):
            await open_channel("nowhere.invalid", 1, make_config(), timeout_s=20, on_event=lambda _: None)

    run(main())


def test_a_server_that_says_nothing_is_given_up_in_time(make_config: MakeConfig) -> None:
    async def main() -> None:
        silent = await asyncio.start_server(_say_nothing, "127.0.0.1", 0)
        await _open_fails(
            make_config(hello_timeout_s=600), silent.sockets[0].getsockname()[1], DeadlineExceededError, timeout_s=0.2
        )
        silent.close()

    run(main())


def test_who_connects_to_a_stopped_process_does_not_wait_for_it_to_read_the_last_words(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "_LINGER_S", 600)

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as stopped:  # its kernel takes connections; it does not
            port = stopped.getsockname()[1]
            error = await _open_fails(make_config(), port, DeadlineExceededError, timeout_s=0.2)
            assert f"did not introduce itself within 0.2 s (127.0.0.1:{port})" in str(error)

    run(main())


def test_a_server_of_another_kind(make_config: MakeConfig) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        error = await _open_fails(make_config(), server.sockets[0].getsockname()[1], ProtocolError)
        assert "not a Hurray connection: the other side is an HTTP server" in str(error)
        server.close()

    run(main())


def test_port_in_use(make_config: MakeConfig) -> None:
    async def main() -> None:
        listener = await serve("127.0.0.1", 0, make_config(), on_session=Receivers())
        with pytest.raises(ConfigError, match="in use") as caught:
            await serve("127.0.0.1", listener.port, make_config(), on_session=Receivers())
        assert str(listener.port) in str(caught.value)
        assert caught.value.fix is not None
        await listener.close()

    run(main())


def test_eight_listeners_on_port_0(make_config: MakeConfig) -> None:
    async def main() -> None:
        listeners: list[Listener] = [
            await serve("127.0.0.1", 0, make_config(), on_session=Receivers()) for _ in range(8)
        ]
        assert len({listener.port for listener in listeners}) == 8
        for listener in listeners:
            await listener.close()

    run(main())


def test_open_to_everyone_only_by_name(make_config: MakeConfig) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="token"):
            await serve("0.0.0.0", 0, make_config(), on_session=Receivers())
        with pytest.raises(ConfigError, match="token"):  # Who sends no token would come in beside the tenants.
            await serve("0.0.0.0", 0, make_config(tenants={"blue": "b"}), on_session=Receivers())
        for settings in ({"allow_unauthenticated": True}, {"ssl_context": _server_tls(ask_client=True)}):
            await (await serve("0.0.0.0", 0, make_config(), on_session=Receivers(), **settings)).close()  # type: ignore[arg-type]
        await (await serve("0.0.0.0", 0, make_config(token="s"), on_session=Receivers())).close()

    run(main())


@pytest.mark.parametrize("tls", [False, True])
def test_idle_connections_do_not_keep_others_out(tls: bool, make_config: MakeConfig) -> None:
    async def main() -> None:
        receivers = Receivers()
        server_tls = _server_tls(ask_client=False) if tls else None
        client_tls = _client_tls(certificate=False) if tls else None
        listener = await serve(
            "127.0.0.1", 0, make_config(token="s"), on_session=receivers, ssl_context=server_tls, max_unauthenticated=8
        )
        idle = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(200)]
        channel = await open_channel(
            "127.0.0.1",
            listener.port,
            make_config(token="s"),
            timeout_s=5,
            on_event=lambda _: None,
            ssl_context=client_tls,
        )
        assert listener.num_unauthenticated <= 8
        receiver = await receivers.next()
        await channel.close()
        await receiver.channel.wait_closed()
        await listener.close()
        assert listener.num_unauthenticated == 0
        for _, writer in idle:
            writer.transport.abort()

    run(main())


def test_a_process_out_of_files_accepts_again_once_it_has_some(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        monkeypatch.setattr("hurray_rdma.control.listener._SHORTAGE_S", 0.05)
        receivers = Receivers()
        listener = await serve("127.0.0.1", 0, make_config("decode"), on_session=receivers)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as client:
            first_free = os.dup(0)
            os.close(first_free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, limits[1]))
            try:
                client.connect(("127.0.0.1", listener.port))
                client.sendall(_hello_at_once())
                await asyncio.sleep(0.2)
                told = [record.getMessage() for record in caplog.records]
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert told
            assert set(told) == {"no connection can be accepted for 0.05 s: Too many open files"}
            assert len(told) < 6
            receiver = await receivers.next()
        await receiver.channel.wait_closed()
        await listener.close()
        await alone()

    run(main())


def test_strangers_push_out_nobody_who_waits_for_its_worker(make_config: MakeConfig) -> None:
    """Those that have shown their token wait for as long as their UCX workers take; strangers are bounded still."""

    async def main() -> None:
        receivers, go = Receivers(), asyncio.Event()
        asked: asyncio.Queue[bytes] = asyncio.Queue()

        async def address_for(_: ServerSession, host_id: bytes) -> bytes:
            asked.put_nowait(host_id)
            await go.wait()
            return b"of " + host_id

        config = make_config(token="s", worker_address=None)
        listener = await serve(
            "127.0.0.1", 0, config, on_session=receivers, address_for=address_for, max_unauthenticated=4
        )

        async def sender(n: int) -> Channel:
            own = make_config(token="s", host_id=b"host %d" % n)
            return await open_channel("127.0.0.1", listener.port, own, timeout_s=20, on_event=lambda _: None)

        coming = []
        for n in range(12):
            coming.append(asyncio.create_task(sender(n)))
            assert await asyncio.wait_for(asked.get(), 10) == b"host %d" % n
        assert listener.num_unauthenticated == 0
        strangers = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(20)]
        for reader, _ in strangers[:16]:  # each newer one cuts the oldest
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 5) == b""
        assert listener.num_unauthenticated == 4
        assert not any(task.done() for task in coming)
        go.set()
        channels = await asyncio.gather(*coming)
        told = [channel.session.peer.worker_address for channel in channels if channel.session.peer is not None]
        assert told == [b"of host %d" % n for n in range(12)]
        for channel in channels:
            await channel.close()
        await listener.close()
        assert listener.num_unauthenticated == 0
        for _, writer in strangers:
            writer.transport.abort()

    run(main())


def test_a_listener_that_closes_cuts_who_waits_for_its_worker_and_strangers(make_config: MakeConfig) -> None:
    async def main() -> None:
        asked, go = asyncio.Event(), asyncio.Event()

        async def address_for(_: ServerSession, host_id: bytes) -> bytes:
            asked.set()
            await go.wait()
            return host_id

        config = make_config(token="s", worker_address=None)
        listener = await serve("127.0.0.1", 0, config, on_session=Receivers(), address_for=address_for)
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        opening = open_channel(
            "127.0.0.1", listener.port, make_config(token="s"), timeout_s=20, on_event=lambda _: None
        )
        coming = asyncio.create_task(opening)
        await asyncio.wait_for(asked.wait(), 5)
        assert listener.num_unauthenticated == 1
        closing = asyncio.create_task(listener.close())
        with pytest.raises(PeerLostError):
            await asyncio.wait_for(coming, 5)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.transport.abort()
        assert not closing.done()  # what makes the worker is waited for, too
        go.set()
        await closing
        await alone()

    run(main())


def test_a_peer_that_dies_is_noticed_at_once(
    make_config: MakeConfig, make_offer: Callable[..., Offer], make_pool: Callable[..., Pool]
) -> None:
    async def main() -> None:
        patient = {"heartbeat_s": 300, "peer_timeout_s": 600}
        async with joined(make_config("decode", **patient), make_config("prefill", **patient)) as (sender, receiver):
            receiver.channel.session.announce(make_pool(), now=receiver.channel.now)
            receiver.channel.notify()
            await sender.next(PoolAnnounced)
            transfer_id = sender.channel.session.offer(make_offer(), now=sender.channel.now, timeout_s=60)
            await sender.channel.flush()
            await receiver.next(Offered)
            sender.channel._transport.abort()  # What the kernel does for a process that is killed.
            failed = await receiver.next(TransferFailed)
            assert isinstance(failed, TransferFailed)
            assert failed.transfer_id == transfer_id
            assert isinstance(failed.error, PeerLostError)
            closed = await receiver.next(SessionClosed)
            assert isinstance(closed, SessionClosed)
            assert isinstance(closed.error, PeerLostError)

    run(main())


def test_a_peer_that_is_stuck_is_noticed_within_its_timeout(make_config: MakeConfig) -> None:
    async def main() -> None:
        patient = make_config("decode", heartbeat_s=0.05, peer_timeout_s=0.3)
        async with joined(make_config("decode"), patient) as (sender, receiver):
            # What SIGSTOP does, without a second process: nothing is read, and no timer runs.
            receiver.channel._transport.pause_reading()
            assert receiver.channel._timer is not None
            receiver.channel._timer.cancel()
            closed = await sender.next(SessionClosed)
            assert isinstance(closed, SessionClosed)
            assert isinstance(closed.error, PeerLostError)
            receiver.channel.abort()

    run(main())


def test_short_words_are_not_held_back_on_either_side(make_config: MakeConfig) -> None:
    async def main() -> None:
        async with joined(make_config("decode"), make_config("prefill")) as sides:
            for side in sides:
                connection = side.channel._transport.get_extra_info("socket")
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1

    run(main())


def test_what_is_due_at_once_is_done_at_once(make_config: MakeConfig, make_offer: Callable[..., Offer]) -> None:
    async def main() -> None:
        async with joined(make_config("decode"), make_config("prefill")) as (sender, _):
            session, now = sender.channel.session, sender.channel.now
            assert isinstance(session, ClientSession)
            for timeout_s in (0.0, -1.0):  # the timer of the first has not gone off when that of the second is set
                session.offer(make_offer(), now=now, timeout_s=timeout_s)
                sender.channel.notify()
            for _ in range(2):
                refused = await sender.next(Refused)
                assert isinstance(refused, Refused)
                assert isinstance(refused.error, DeadlineExceededError)

    run(main())


def test_a_clock_of_milliseconds_has_nobody_look_again_and_again(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As uvloop's is, whose timers may also go off a little early."""

    async def main() -> None:
        num_looks = 0
        tick = Channel._tick

        def counted(channel: Channel) -> None:
            nonlocal num_looks
            num_looks += 1
            tick(channel)

        monkeypatch.setattr(Channel, "_tick", counted)
        lively = {"heartbeat_s": 0.0203, "peer_timeout_s": 20}
        async with joined(make_config("decode", **lively), make_config("prefill", **lively)) as (sender, _):
            begin = sender.channel.now
            await asyncio.sleep(0.5)
            num_heartbeats = 2 * (sender.channel.now - begin) / 0.0203
        assert num_looks < 3 * num_heartbeats

    run(main())


def test_close_tells_this_side_none_and_the_other_side_peer_lost(make_config: MakeConfig) -> None:
    async def main() -> None:
        async with joined(make_config("decode"), make_config("prefill")) as (sender, receiver):
            await sender.channel.close()
            await sender.channel.close()
            assert await sender.next(SessionClosed) == SessionClosed(None)
            closed = await receiver.next(SessionClosed)
            assert isinstance(closed, SessionClosed)
            assert isinstance(closed.error, PeerLostError)

    run(main())


def test_last_words_arrive_although_input_is_unread(make_config: MakeConfig) -> None:
    """The server refuses a message while megabytes of it are on their way; the client still learns why."""

    async def main() -> None:
        listener = await serve("127.0.0.1", 0, make_config("decode"), on_session=Receivers())
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write((1).to_bytes(4, "little") + (1).to_bytes(4, "little") + (1 << 28).to_bytes(4, "little"))
        writer.write(bytes(8 << 20))
        answer = await reader.read()
        assert int.from_bytes(answer[:4], "little") == 9
        assert int.from_bytes(answer[12:16], "little") == 7  # MESSAGE_TOO_LARGE
        writer.close()
        await listener.close()

    run(main())


def test_what_a_handler_raises_ends_the_channel_and_is_raised(
    make_config: MakeConfig, make_pool: Callable[..., Pool]
) -> None:
    async def main() -> None:
        receivers = Receivers()
        listener = await serve("127.0.0.1", 0, make_config("decode"), on_session=receivers)

        def hear(event: Event) -> None:
            if isinstance(event, PoolAnnounced):
                raise RuntimeError("engine fault")

        channel = await open_channel("127.0.0.1", listener.port, make_config(), timeout_s=5, on_event=hear)
        receiver = await receivers.next()
        receiver.channel.session.announce(make_pool(), now=receiver.channel.now)
        receiver.channel.notify()
        with pytest.raises(RuntimeError, match="engine fault"):
            await channel.wait_closed()
        assert channel.session.is_closed
        await receiver.next(SessionOpened)
        await receiver.next(SessionClosed)
        await receiver.channel.wait_closed()
        await listener.close()

    run(main())


def test_what_is_for_afterwards_and_raises_keeps_no_event_back_and_ends_the_channel(
    make_config: MakeConfig, make_offer: Callable[..., Offer]
) -> None:
    async def main() -> None:
        async with joined(make_config("decode"), make_config("prefill")) as (sender, receiver):
            client, server = sender.channel, receiver.channel
            assert isinstance(client.session, ClientSession)
            hear, done = server._on_event, []

            def fail() -> None:
                done.append("fails")
                raise RuntimeError(f"engine fault {len(done)}")

            def heard(event: Event) -> None:
                hear(event)
                done.append(type(event).__name__)
                if isinstance(event, Offered):
                    server.afterwards(fail)
                    server.afterwards(lambda: done.append("after that"))

            server._on_event = heard  # type: ignore[method-assign]
            for _ in range(2):
                client.session.offer(make_offer(), now=client.now, timeout_s=5)
            client.notify()
            with pytest.raises(RuntimeError, match="engine fault 2"):
                await server.wait_closed()
            each = ["Offered", "fails", "after that"]
            assert done == [*each, *each, "TransferFailed", "TransferFailed", "SessionClosed"]

    with pytest.raises(RuntimeError, match="engine fault 2"):  # as `close` raises it, too
        run(main())


@pytest.mark.parametrize("how", ["the peer cuts it", "close", "abort"])
def test_a_handler_that_raises_hears_of_the_end_all_the_same(
    how: str, make_config: MakeConfig, make_offer: Callable[..., Offer]
) -> None:
    """Of each transfer, and of the session: it would keep all that it has for them."""

    async def main() -> None:
        heard: list[type[Event]] = []

        def hear(event: Event) -> None:
            heard.append(type(event))
            if isinstance(event, TransferFailed):
                raise RuntimeError(f"engine fault {len(heard)}")

        receivers = Receivers()
        listener = await serve("127.0.0.1", 0, make_config("decode"), on_session=receivers)
        channel = await open_channel("127.0.0.1", listener.port, make_config(), timeout_s=5, on_event=hear)
        receiver = await receivers.next()
        for _ in range(2):
            channel.session.offer(make_offer(), now=channel.now, timeout_s=10)  # type: ignore[attr-defined]
        heard.clear()
        with pytest.raises(RuntimeError, match="engine fault 1"):
            if how == "close":
                await channel.close()
            elif how == "abort":
                channel.abort()
            else:
                receiver.channel.abort()
                await channel.wait_closed()
        assert heard == [TransferFailed, TransferFailed, SessionClosed]
        receiver.channel.abort()
        await listener.close()

    run(main())


def test_a_handler_that_cuts_the_connection_hears_of_nothing_after_the_end(
    make_config: MakeConfig, make_pool: Callable[..., Pool]
) -> None:
    """What came with the same bytes would be kept for a peer that is gone."""

    async def main() -> None:
        heard: list[type[Event]] = []
        receivers = Receivers()
        listener = await serve("127.0.0.1", 0, make_config("decode"), on_session=receivers)

        def hear(event: Event) -> None:
            heard.append(type(event))
            if isinstance(event, PoolAnnounced):
                channel.abort()

        channel = await open_channel("127.0.0.1", listener.port, make_config(), timeout_s=5, on_event=hear)
        receiver = await receivers.next()
        heard.clear()
        for generation in (3, 4):  # two messages in one write
            receiver.channel.session.announce(make_pool(generation=generation), now=receiver.channel.now)  # type: ignore[attr-defined]
        receiver.channel.notify()
        await channel.wait_closed()
        assert heard == [PoolAnnounced, SessionClosed]
        await receiver.next(SessionOpened)
        await receiver.next(SessionClosed)
        await listener.close()

    run(main())


def test_cancelling_an_open_leaves_nothing(make_config: MakeConfig) -> None:
    async def main() -> None:
        silent = await asyncio.start_server(_say_nothing, "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        task = asyncio.create_task(open_channel("127.0.0.1", port, make_config(), timeout_s=5, on_event=lambda _: None))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        silent.close()
        await alone()

    run(main())


# The ends of a connection, as a peer of any kind may make them.


def _frames(*messages: tuple[Message, int]) -> bytes:
    return b"".join(encode(message, stream_id) for message, stream_id in messages)


def _hello_at_once() -> bytes:
    """All that a client says until its session is open, without waiting for an answer."""
    hello = ClientHello(max_message_nbytes=1 << 20, layouts=((0x0B, b""), (0xF0, b"hurray_rdma/9")))
    session = SessionMessage(engine_name="hasty", host_id=b"h", worker_address=b"w", heartbeat_s=1.0)
    return _frames((hello, 1), (session, 1))


async def _tls_and_then_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, words: bytes) -> None:
    """A TLS handshake by hand, whose last flight has the first words behind it in the same segment."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = _client_tls(certificate=False).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    while True:
        try:
            client.do_handshake()
            break
        except ssl.SSLWantReadError:
            writer.write(outgoing.read())
            incoming.write(await reader.read(1 << 16))
    client.write(words)
    writer.write(outgoing.read())


@pytest.mark.parametrize("tls", [False, True])
def test_a_client_that_says_all_at_once_is_heard(tls: bool, make_config: MakeConfig) -> None:
    """With TLS its words come along with the end of the set-up."""

    async def main() -> None:
        receivers = Receivers()
        server_tls = _server_tls(ask_client=False) if tls else None
        listener = await serve("127.0.0.1", 0, make_config("decode"), on_session=receivers, ssl_context=server_tls)
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        if tls:
            await _tls_and_then_at_once(reader, writer, _hello_at_once())
        else:
            writer.write(_hello_at_once())
        receiver = await receivers.next()
        opened = await receiver.next(SessionOpened)
        assert isinstance(opened, SessionOpened)
        assert opened.peer.engine_name == "hasty"
        assert receiver.channel.peer_address == writer.get_extra_info("sockname")[:2]
        if not tls:
            decoder, heard = FrameDecoder(1 << 20), []
            while len(heard) < 2:
                heard += [type(message) for _, message in decoder.feed(await reader.read(1000))]
            assert heard == [ServerHello, SessionMessage]
        writer.transport.abort()
        await receiver.next(SessionClosed)
        await receiver.channel.wait_closed()
        await listener.close()
        await alone()

    run(main())


@pytest.mark.parametrize("how", ["closed", "cut"])
def test_a_client_that_is_gone_as_tls_is_set_up_leaves_nothing(how: str, make_config: MakeConfig) -> None:
    async def main() -> None:
        receivers = Receivers()
        tls = _server_tls(ask_client=False)
        listener = await serve("127.0.0.1", 0, make_config("decode"), on_session=receivers, ssl_context=tls)
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        await _tls_and_then_at_once(reader, writer, _hello_at_once())
        if how == "closed":
            writer.close()
        else:
            writer.transport.abort()
        await alone()
        assert listener.num_unauthenticated == 0
        await listener.close()

    run(main())


@pytest.mark.parametrize("tls", [False, True])
def test_a_client_that_ends_within_its_first_words_leaves_nothing(tls: bool, make_config: MakeConfig) -> None:
    async def main() -> None:
        listener = await serve(
            "127.0.0.1",
            0,
            make_config("decode"),
            on_session=Receivers(),
            ssl_context=_server_tls(ask_client=False) if tls else None,
        )
        client_tls = _client_tls(certificate=False) if tls else None
        for how in ("closed", "cut"):
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port, ssl=client_tls)
            writer.write(_hello_at_once()[:20])
            if how == "closed":
                writer.close()
            else:
                writer.transport.abort()
            await reader.read()
        await alone()
        assert listener.num_unauthenticated == 0
        await listener.close()

    run(main())


def test_a_peer_that_never_closes_its_side_is_cut(make_config: MakeConfig) -> None:
    """After our last words the peer has half a second to end its side, too."""

    async def main() -> None:
        receivers = Receivers()
        listener = await serve("127.0.0.1", 0, make_config("decode"), on_session=receivers)
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(_hello_at_once())
        receiver = await receivers.next()
        begin = receiver.channel.now
        await receiver.channel.close()
        assert receiver.channel.now - begin > 0.4
        while await reader.read(1000):
            pass
        writer.close()
        await listener.close()

    run(main())


def test_a_peer_that_reads_nothing_does_not_hold_up_the_end(
    make_config: MakeConfig, make_pool: Callable[..., Pool]
) -> None:
    async def main() -> None:
        receivers = Receivers()
        listener = await serve("127.0.0.1", 0, make_config("decode"), on_session=receivers)
        with socket.create_connection(("127.0.0.1", listener.port)) as deaf:
            deaf.sendall(_hello_at_once())
            receiver = await receivers.next()
            channel = receiver.channel
            assert isinstance(channel.session, ServerSession)
            large = make_pool(regions=(PoolRegion(remote_addr=0x1000, nbytes=4 * 1280, rkey=bytes(60_000)),))
            for _ in range(200):  # More than the system's own buffers hold.
                channel.session.announce(large, now=channel.now)
                channel.notify()
            flushing = asyncio.create_task(channel.flush())
            await asyncio.sleep(0)
            assert not flushing.done()
            begin = channel.now
            await channel.close()
            assert channel.now - begin > 0.4
            await flushing
        await listener.close()

    run(main())


@pytest.mark.parametrize("how", ["close", "abort"])
def test_what_a_handler_raises_at_the_very_end_is_raised_too(how: str, make_config: MakeConfig) -> None:
    async def main() -> None:
        receivers = Receivers()
        listener = await serve("127.0.0.1", 0, make_config("decode"), on_session=receivers)

        def hear(event: Event) -> None:
            if isinstance(event, SessionClosed):
                raise RuntimeError("engine fault")

        channel = await open_channel("127.0.0.1", listener.port, make_config(), timeout_s=5, on_event=hear)
        receiver = await receivers.next()
        if how == "close":
            await receiver.channel.close()
        else:
            receiver.channel.abort()
        with pytest.raises(RuntimeError, match="engine fault"):
            await channel.wait_closed()
        await receiver.channel.wait_closed()
        await listener.close()
        await alone()

    run(main())


def test_whenever_a_connect_is_cancelled_its_socket_is_closed(make_config: Callable[..., SessionConfig]) -> None:
    async def job() -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            for num_turns in range(30):  # of the loop: from before the socket is made until it waits for words
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    opening = asyncio.create_task(
                        open_channel(*mute.getsockname(), make_config(), timeout_s=10, on_event=lambda _: None)
                    )
                    for _ in range(num_turns):
                        await asyncio.sleep(0)
                    opening.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await opening
                    del opening
                    gc.collect()
                assert [str(each.message) for each in told] == [], num_turns

    asyncio.run(job())
