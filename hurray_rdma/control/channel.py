"""One session over one TCP or TLS connection, with asyncio; the module of this room that touches sockets.

This module knows how to move a session's bytes, when to wake it, and how to open and close a connection (accepting them
is listener.py's). It decides nothing about the protocol: that is the session's. Foreign exceptions are turned into ours
here, at the edge.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import replace
from ipaddress import ip_address
from typing import Any, TypeAlias, cast

from hurray_rdma.control.address import Address
from hurray_rdma.control.client import ClientSession
from hurray_rdma.control.config import SessionConfig
from hurray_rdma.control.events import Event, SessionClosed, SessionOpened
from hurray_rdma.control.session import Session
from hurray_rdma.errors import AuthenticationError, DeadlineExceededError, HurrayError, PeerLostError

__all__ = ["Channel", "EventHandler", "open_channel"]

EventHandler: TypeAlias = Callable[[Event], None]

_log = logging.getLogger(__name__)

_READ_NBYTES = 64 * 1024
_SHORT_NBYTES = 8 * 1024
"""What is read at once beyond the message that is under way: hundreds of the shortest, a millisecond's work or two."""
_WRITE_HIGH_NBYTES = 1024 * 1024
_OWN_WRITE_NBYTES = 64 * 1024
_LINGER_S = 0.5
_UNREACHABLE_FIX = "Check the address, and that the receiver is running"


class Channel(asyncio.BufferedProtocol):
    """Runs one session over one connection, as the protocol of its transport.

    Args:
        session: a fresh session; its clock is the event loop's (``channel.now``).
        on_event: called with every event, in order, on the event loop, to the last one (SessionClosed) whatever it
            raises; that ends the channel.
    """

    def __init__(self, session: Session, on_event: EventHandler) -> None:
        self.session = session
        self.peer_address = Address("unknown", 0)
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        # A transport that is given no buffer allocates 256 KiB for each read, which takes longer than a small message.
        self._buffer = memoryview(bytearray(_READ_NBYTES))
        self._short_buffer = self._buffer[:_SHORT_NBYTES]
        self._room: asyncio.Future[None] | None = None
        """While the peer does not keep up: done as soon as it does, or the session is closed."""
        self._timer: asyncio.TimerHandle | None = None
        self._ticks_at = 0.0
        """When the timer does; uvloop's do not tell, where that is at once."""
        self._linger: asyncio.TimerHandle | None = None
        self._heard_end = False
        self._shutting = False
        self._delivering = False
        self._later: list[Callable[[], None]] = []
        self._told_end = False
        self._failure: Exception | None = None
        self._lost: asyncio.Future[None] = self._loop.create_future()

    @property
    def now(self) -> float:
        """The time on the session's clock, seconds."""
        return self._loop.time()

    @property
    def is_connected(self) -> bool:
        """Whether the connection stands, TLS included; also when it has ended since."""
        return self._transport is not None

    # What the transport says.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH_NBYTES)
        host, port = (transport.get_extra_info("peername") or self.peer_address)[:2]
        self.peer_address = Address(host, port)
        self.notify()

    def get_buffer(self, sizehint: int) -> memoryview:
        # A peer that says nothing but short messages has no more of a turn of the loop than this.
        missing_nbytes = self.session.missing_nbytes
        return self._buffer[: missing_nbytes + _SHORT_NBYTES] if missing_nbytes else self._short_buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._buffer[:nbytes])  # A copy: messages keep views.
        if not self.session.is_closed:  # Else the peer said it before it heard our last words.
            self.hear(self.session.receive(data, self._loop.time()))

    def eof_received(self) -> None:
        self._heard_end = True
        self.hear(self.session.connection_lost(self.now))

    def pause_writing(self) -> None:
        self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        self._wake()
        self._room = None
        self.notify()

    def connection_lost(self, exc: Exception | None) -> None:
        self._shutting = True
        error = None if exc is None else _lost(exc, self.peer_address)
        self.hear(self.session.connection_lost(self.now, error=error))
        self._wake()
        for timer in (self._timer, self._linger):
            if timer is not None:
                timer.cancel()
        if self._failure is None:
            self._lost.set_result(None)
        else:
            self._lost.set_exception(self._failure)

    def hear(self, events: list[Event]) -> None:
        """Take what a call of the session has returned, as if it came from the peer."""
        try:
            self._deliver(events)
        except Exception as error:
            self._failure = error
            if not self.session.is_closed:
                try:
                    self.abort()
                except Exception as later:
                    self._failure = later  # The first is its context.

    def _deliver(self, events: list[Event]) -> None:
        failure: Exception | None = None
        self._delivering = True
        try:
            for event in events:
                if self._later:
                    failure = self._catch_up(failure)
                if self._told_end:
                    break  # the handler of an earlier one has cut the connection
                self._told_end = isinstance(event, SessionClosed)
                try:
                    self._on_event(event)
                except Exception as error:
                    # The others are owed to it still: what it holds of the session, it lets go by the last of them.
                    failure = failure or error
        finally:
            self._delivering = False
            self.notify()
        if self._later:
            failure = self._catch_up(failure)
        if failure is not None:
            raise failure

    def afterwards(self, work: Callable[[], None]) -> None:
        """Calls it once what is said in answer to the event under way is sent, or before the next event; else at once.

        What it raises is as if the handler of events had.
        """
        if self._delivering:
            self._later.append(work)
        else:
            work()

    def _catch_up(self, failure: Exception | None) -> Exception | None:
        """Does all of it, whatever some of it raises; the first failure, which may be the earlier one."""
        while self._later:
            try:
                self._later.pop(0)()
            except Exception as error:
                failure = failure or error
        return failure

    # Bytes out.

    def notify(self) -> None:
        """Send what the session has to send, as far as the peer keeps up; call after each call of the session."""
        if self._shutting or self._transport is None or self._delivering:
            return  # What is said in answer to events goes out at their end, together.
        session = self.session
        if self._room is None and (parts := session.parts_to_send()):
            self._write(self._transport, parts)
        if session.is_closed:
            self._shut(self._transport)
        elif self._timer is None or session.may_be_due_sooner:
            self._set_timer()

    @staticmethod
    def _write(transport: asyncio.Transport, parts: list[bytes | memoryview]) -> None:
        if max(map(len, parts)) < _OWN_WRITE_NBYTES:
            transport.write(b"".join(parts))
            return
        small: list[bytes | memoryview] = []
        for part in parts:
            if len(part) < _OWN_WRITE_NBYTES:
                small.append(part)
                continue
            transport.write(b"".join(small))
            transport.write(memoryview(part))  # As a view, a partial send does not copy the rest twice.
            small.clear()
        if small:
            transport.write(b"".join(small))

    async def flush(self) -> None:
        """Like ``notify``, and wait while more than 1 MiB is unsent; returns at once when the session is closed."""
        self.notify()
        while self._room is not None and not self.session.is_closed:
            await asyncio.shield(self._room)

    def _wake(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    # Time.

    def _set_timer(self) -> None:
        when = self.session.take_timeout()
        if when is None or (self._timer is not None and self._ticks_at <= when):
            return  # A timer that fires early only looks again; most timeouts are put off by every word of the peer.
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._ticks_at = self._loop.call_at(when, self._tick), when

    def _tick(self) -> None:
        self._timer = None
        # uvloop's timers and clock count milliseconds: its time has come, though the clock may not quite say so.
        self.hear(self.session.handle_timeout(max(self.now, self._ticks_at)))

    # The end.

    async def close(self) -> None:
        """End the session, send what is still to be sent, and close the connection. Idempotent.

        Open transfers end with TransferFailed, then comes SessionClosed(None).
        """
        self._deliver(self.session.close(self.now))
        await self.wait_closed()

    def abort(self) -> None:
        """Cut the connection at once; what the network has not taken is lost."""
        self._delivering = False
        self.notify()
        if self._transport is not None:
            self._shutting = True
            self._transport.abort()
        self._deliver(self.session.close(self.now))

    async def wait_closed(self) -> None:
        """Wait for the end of the connection.

        Raises:
            Exception: whatever ``on_event`` raised.
        """
        await asyncio.shield(self._lost)

    def _shut(self, transport: asyncio.Transport) -> None:
        """Close in such a way that the peer can read our last words: TCP drops them if we close with input unread."""
        self._wake()
        if self.session.silent_s(self.now) > self.session.config.peer_timeout_s:  # It reads no last words.
            self._shutting = True
            transport.abort()
            return
        if self._linger is None:
            self._linger = self._loop.call_later(_LINGER_S, self._cut, transport)
        if self._room is not None:
            return  # The last words wait for it.
        self._shutting = True
        if self._heard_end or not transport.can_write_eof():
            transport.close()
        else:
            try:
                transport.write_eof()  # The peer ends its side in turn; then the transport closes.
            except OSError:  # It was reset, and we have not heard of that yet.
                transport.abort()

    def _cut(self, transport: asyncio.Transport) -> None:
        _log.debug("connection to %s cut: it did not end within %s s", self.peer_address, _LINGER_S)
        transport.abort()


def _not_opened(error: HurrayError | None, peer: Address, *, tls: bool) -> HurrayError:
    if error is None or isinstance(error, PeerLostError):
        # A server that lacks our certificate just closes: TLS 1.3 checks it after our side of the handshake is over.
        fix = (
            "Check that the receiver speaks TLS, and whether it asks for a client certificate"
            if tls
            else "Check that a hurray_rdma engine listens there, and whether it wants TLS"
        )
        return PeerLostError(f"{peer} closed the connection before the session was open", fix=fix)
    if isinstance(error, DeadlineExceededError):
        return DeadlineExceededError(f"{error.rule} ({peer})", fix=error.fix)
    return error


def _lost(error: Exception, peer: Address) -> HurrayError:
    if isinstance(error, ssl.SSLError):
        return _tls_failed(error, peer)
    return PeerLostError(f"the connection to {peer} broke: {getattr(error, 'strerror', None) or error}")


def _tls_failed(error: ssl.SSLError, peer: Address) -> AuthenticationError:
    reason = getattr(error, "verify_message", "") or error.reason or str(error)
    return AuthenticationError(
        f"TLS with {peer} failed: {reason.rstrip('.')}", fix="Check certificates and host name on both sides"
    )


def _is_literal(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


async def _connect(
    make_channel: Callable[[], Channel], address: Address, ssl_context: ssl.SSLContext | None, hostname: str | None
) -> Channel:
    loop = asyncio.get_running_loop()
    # Only names have several addresses to race; cancelled in a race, asyncio leaves a connected socket open. Loops that
    # are not asyncio's own, as uvloop, know no races, and try the addresses in turn.
    races = isinstance(loop, asyncio.BaseEventLoop) and not _is_literal(address.host)
    options: dict[str, Any] = {"happy_eyeballs_delay": 0.25} if races else {}
    try:
        _, channel = await loop.create_connection(
            make_channel, address.host, address.port, ssl=ssl_context, server_hostname=hostname, **options
        )
    except TimeoutError:
        raise
    except ssl.SSLError as error:
        raise _tls_failed(error, address) from error
    except socket.gaierror as error:
        rule, fix = f"{address} has a host name that cannot be found: {error.strerror}", "Check the name, and DNS here"
        raise PeerLostError(rule, fix=fix) from error
    except OSError as error:
        why = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)
        raise PeerLostError(f"{address} cannot be reached: {why}", fix=_UNREACHABLE_FIX) from error
    return channel


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
    opened: asyncio.Future[None] = loop.create_future()

    is_open = False

    def hear(event: Event) -> None:
        nonlocal is_open
        if is_open:
            on_event(event)
        elif opened.done():
            return  # Whoever asked for it has given up.
        elif isinstance(event, SessionOpened):
            opened.set_result(None)
            is_open = True
            on_event(event)
        elif isinstance(event, SessionClosed):
            opened.set_exception(_not_opened(event.error, address, tls=ssl_context is not None))

    def make_channel() -> Channel:
        now = loop.time()
        hello_timeout_s = min(config.hello_timeout_s, max(0.001, deadline - now))
        own = replace(config, hello_timeout_s=hello_timeout_s, tenants={})  # Tenants are a server's.
        return Channel(ClientSession(own, now=now), hear)

    hostname = (server_hostname or host) if ssl_context else None
    try:
        async with asyncio.timeout_at(deadline):
            channel = await _connect(make_channel, address, ssl_context, hostname)
    except TimeoutError as error:
        opened.cancel()
        raise PeerLostError(f"{address} did not answer within {timeout_s} s", fix=_UNREACHABLE_FIX) from error
    except BaseException:
        opened.cancel()
        raise
    try:
        await asyncio.shield(opened)
    except BaseException:
        if not channel.session.is_closed or loop.time() >= deadline:  # our last words cannot wait to be read
            channel.abort()
        await channel.wait_closed()
        if opened.done():
            opened.exception()
        raise
    return channel
