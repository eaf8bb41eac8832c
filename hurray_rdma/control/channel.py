"""One session over one TCP or TLS connection, with asyncio; the module of this room that touches sockets.

This module knows how to move a session's bytes, when to wake it, and how to open and close a connection (accepting them
is listener.py's). It decides nothing about the protocol: that is the session's. Foreign exceptions are turned into ours
here, at the edge.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from hurray_rdma.control.address import Address
from hurray_rdma.control.client import ClientSession
from hurray_rdma.control.config import SessionConfig
from hurray_rdma.control.events import Event, SessionClosed, SessionOpened
from hurray_rdma.control.session import Session
from hurray_rdma.errors import AuthenticationError, HurrayError, PeerLostError

__all__ = ["READ_LIMIT_NBYTES", "Channel", "EventHandler", "open_channel"]

EventHandler: TypeAlias = Callable[[Event], None]

_log = logging.getLogger(__name__)

_READ_NBYTES = 256 * 1024
READ_LIMIT_NBYTES = 1024 * 1024
_WRITE_HIGH_NBYTES = 1024 * 1024
_OWN_WRITE_NBYTES = 64 * 1024
_LINGER_S = 0.5
_UNREACHABLE_FIX = "Check the address, and that the receiver is running"


class Channel:
    """Runs one session over one connection.

    Args:
        session: a fresh session; its clock is the event loop's (``channel.now``).
        reader: of the connection.
        writer: of the connection.
        on_event: called with every event, in order, on the event loop; what it raises ends the channel.
    """

    def __init__(
        self, session: Session, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, on_event: EventHandler
    ) -> None:
        self.session = session
        self._reader = reader
        self._writer = writer
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._stop: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._draining: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._shutting = False
        host, port = (writer.get_extra_info("peername") or ("unknown", 0))[:2]
        self.peer_address = Address(host, port)
        writer.transport.set_write_buffer_limits(high=_WRITE_HIGH_NBYTES)
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def now(self) -> float:
        """The time on the session's clock, seconds."""
        return self._loop.time()

    def start(self) -> None:
        """Run in a task of its own; see ``wait_closed``."""
        self._task = self._loop.create_task(self.run(), name=f"channel to {self.peer_address}")

    async def run(self) -> None:
        """Move bytes, time and events until the session is closed and the connection with it.

        Raises:
            Exception: whatever ``on_event`` raised.
        """
        reading = self._loop.create_task(self._read())
        try:
            self.notify()
            await asyncio.wait({reading, self._stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            reading.cancel()
            await asyncio.wait({reading})
            try:
                if not self.session.is_closed:  # Cancelled, or on_event raised.
                    self.abort()
            finally:
                await self._shut()
        if not reading.cancelled():
            reading.result()
        if self._stop.done():
            self._stop.result()

    async def _read(self) -> None:
        while not self.session.is_closed:
            try:
                data = await self._reader.read(_READ_NBYTES)
            except OSError as error:  # ssl.SSLError is one, too.
                self._deliver(self.session.connection_lost(self.now, error=_lost(error, self.peer_address)))
                return
            now = self.now
            self._deliver(self.session.receive(data, now) if data else self.session.connection_lost(now))

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            self._on_event(event)
        self.notify()
        if self.session.is_closed and not self._stop.done():
            self._stop.set_result(None)

    # Bytes out.

    def notify(self) -> None:
        """Send what the session has to send, as far as the peer keeps up; call after each call of the session."""
        if self._shutting:
            return
        if self._draining is None:
            self._write(self.session.parts_to_send())
            if self._writer.transport.get_write_buffer_size() > _WRITE_HIGH_NBYTES:
                self._draining = self._loop.create_task(self._drain())
        self._set_timer()

    def _write(self, parts: list[bytes | memoryview]) -> None:
        small: list[bytes | memoryview] = []
        for part in parts:
            if len(part) < _OWN_WRITE_NBYTES:
                small.append(part)
                continue
            self._writer.write(b"".join(small))
            self._writer.write(memoryview(part))  # As a view, a partial send does not copy the rest twice.
            small.clear()
        self._writer.write(b"".join(small))

    async def _drain(self) -> None:
        try:
            await self._writer.drain()
        except OSError as error:
            self._deliver(self.session.connection_lost(self.now, error=_lost(error, self.peer_address)))
        finally:
            self._draining = None
        self.notify()

    async def flush(self) -> None:
        """Like ``notify``, and wait while more than 1 MiB is unsent; returns at once when the session is closed."""
        self.notify()
        while self._draining is not None and not self.session.is_closed:
            await asyncio.wait({self._draining, self._stop}, return_when=asyncio.FIRST_COMPLETED)

    # Time.

    def _set_timer(self) -> None:
        when = self.session.next_timeout()
        if when is None or (self._timer is not None and self._timer.when() <= when):
            return  # A timer that fires early only looks again; most timeouts are put off by every word of the peer.
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            self._deliver(self.session.handle_timeout(self.now))
        except Exception as error:
            if not self._stop.done():
                self._stop.set_exception(error)

    # The end.

    async def close(self) -> None:
        """End the session, send what is still to be sent, and close the connection. Idempotent.

        Open transfers end with TransferFailed, then comes SessionClosed(None).
        """
        self._deliver(self.session.close(self.now))
        await self.wait_closed()

    def abort(self) -> None:
        """Cut the connection at once; what was not sent is lost."""
        self._writer.transport.abort()
        self._deliver(self.session.close(self.now))

    async def wait_closed(self) -> None:
        """Wait for the end of a channel that was started.

        Raises:
            Exception: whatever ``on_event`` raised.
        """
        if self._task is not None:
            await asyncio.shield(self._task)

    async def _shut(self) -> None:
        """Close in such a way that the peer can read our last words: TCP drops them if we close with input unread."""
        transport = self._writer.transport
        try:
            async with asyncio.timeout(_LINGER_S):
                if self._draining is not None:
                    await asyncio.wait({self._draining})
                self._shutting = True
                await self._writer.drain()
                if self._writer.can_write_eof() and not transport.is_closing():
                    self._writer.write_eof()
                    while await self._reader.read(_READ_NBYTES):
                        pass
                self._writer.close()
                await self._writer.wait_closed()
        except (TimeoutError, OSError) as error:
            _log.debug("connection to %s cut: %r", self.peer_address, error)
            transport.abort()
        finally:
            self._shutting = True
            if self._draining is not None:
                self._draining.cancel()


def _not_opened(error: HurrayError | None, peer: Address, *, tls: bool) -> HurrayError:
    if error is None or isinstance(error, PeerLostError):
        # A server that lacks our certificate just closes: TLS 1.3 checks it after our side of the handshake is over.
        fix = (
            "Check that the receiver speaks TLS, and whether it asks for a client certificate"
            if tls
            else "Check that a hurray_rdma engine listens there, and whether it wants TLS"
        )
        return PeerLostError(f"{peer} closed the connection before the session was open", fix=fix)
    return error


def _lost(error: OSError, peer: Address) -> HurrayError:
    if isinstance(error, ssl.SSLError):
        return _tls_failed(error, peer)
    return PeerLostError(f"the connection to {peer} broke: {error.strerror or error}")


def _tls_failed(error: ssl.SSLError, peer: Address) -> AuthenticationError:
    reason = getattr(error, "verify_message", "") or error.reason or str(error)
    return AuthenticationError(
        f"TLS with {peer} failed: {reason}", fix="Check certificates and host name on both sides"
    )


async def open_channel(
    host: str,
    port: int,
    config: SessionConfig,
    *,
    timeout_s: float,
    on_event: EventHandler,
    ssl_context: ssl.SSLContext | None = None,
    server_hostname: str | None = None,
) -> Channel:
    """Connect, and return the running channel once its session is open.

    Args:
        host: name or literal; all its addresses are tried.
        port: TCP port.
        config: settings of this side.
        timeout_s: budget for all of it: name, connection, TLS and handshake.
        on_event: as for :class:`Channel`; it also gets SessionOpened.
        ssl_context: client-side TLS context; None for plain TCP.
        server_hostname: name the server's certificate must hold, if not ``host``.

    Raises:
        PeerLostError: nobody answers there, in time or at all.
        AuthenticationError: TLS or the token failed.
        ProtocolError: what answers does not speak this protocol.
        DeadlineExceededError: the handshake did not complete in time.
    """
    address = Address(host, port)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    try:
        async with asyncio.timeout_at(deadline):
            reader, writer = await asyncio.open_connection(
                host,
                port,
                limit=READ_LIMIT_NBYTES,
                ssl=ssl_context,
                server_hostname=(server_hostname or host) if ssl_context else None,
                happy_eyeballs_delay=0.25,
            )
    except TimeoutError as error:
        raise PeerLostError(f"{address} did not answer within {timeout_s} s", fix=_UNREACHABLE_FIX) from error
    except ssl.SSLError as error:
        raise _tls_failed(error, address) from error
    except OSError as error:
        raise PeerLostError(f"{address} cannot be reached: {error.strerror or error}", fix=_UNREACHABLE_FIX) from error

    opened: asyncio.Future[None] = loop.create_future()

    def hear(event: Event) -> None:
        if opened.done():
            on_event(event)
        elif isinstance(event, SessionOpened):
            opened.set_result(None)
            on_event(event)
        elif isinstance(event, SessionClosed):
            opened.set_exception(_not_opened(event.error, address, tls=ssl_context is not None))

    left_s = max(0.001, deadline - loop.time())
    own = replace(config, hello_timeout_s=min(config.hello_timeout_s, left_s), tenants={})  # Tenants are a server's.
    session = ClientSession(own, now=loop.time())
    channel = Channel(session, reader, writer, hear)
    channel.start()
    try:
        await asyncio.shield(opened)
    except BaseException:
        if not channel.session.is_closed:
            channel.abort()
        await channel.wait_closed()
        if opened.done():
            opened.exception()
        raise
    return channel
