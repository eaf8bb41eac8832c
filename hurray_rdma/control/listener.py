"""Accepting connections, and holding those that are not authenticated yet within bounds.

This module knows where to listen and who is still in its handshake. What a connection does is channel.py's business,
what an open session does is the engine's.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import socket
import ssl
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from typing import Any, NamedTuple, TypeAlias

from hurray_rdma.control.address import Address
from hurray_rdma.control.channel import Channel, EventHandler
from hurray_rdma.control.config import SessionConfig
from hurray_rdma.control.events import Event, Introduced, SessionClosed, SessionOpened
from hurray_rdma.control.server import ServerSession
from hurray_rdma.errors import AuthenticationError, ConfigError, HurrayError

__all__ = ["ExposedError", "Listener", "check_listen", "serve"]

_log = logging.getLogger(__name__)

_BACKLOG = 100
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_SHORTAGE_S = 1.0
"""How long nobody is accepted after one of them."""
_WARN_AGAIN_S = 60.0
"""Of the next wrong token from the same host."""
_MAX_HOSTS_WARNED = 1024

AddressFor: TypeAlias = Callable[[ServerSession, bytes], Awaitable[bytes]]


class ExposedError(ConfigError):
    """Whoever reaches the address could write into the pools."""


class Listener:
    """Accepts connections; made by :func:`serve`."""

    def __init__(
        self,
        config: SessionConfig,
        on_session: Callable[[Channel], EventHandler],
        address_for: AddressFor | None,
        ssl_context: ssl.SSLContext | None,
        max_unauthenticated: int,
    ) -> None:
        self._config = config
        self._on_session = on_session
        self._address_for = address_for
        self._ssl_context = ssl_context
        self._max_unauthenticated = max_unauthenticated
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._unauthenticated: dict[Channel, asyncio.Task[None]] = {}
        self._entering: dict[Channel, asyncio.Task[None]] = {}
        """Connections that have shown their token, and wait for what the session needs to be open."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._admissions: set[asyncio.Task[None]] = set()
        self._warned: dict[str, float] = {}
        """When a warning was logged last of wrong tokens from a host."""
        self.addresses: tuple[Address, ...] = ()
        """Where it listens, with the ports the system gave."""

    @property
    def port(self) -> int:
        """Port of the first address."""
        return self.addresses[0].port

    @property
    def num_unauthenticated(self) -> int:
        """Connections that have not shown yet that they may stay."""
        return len(self._unauthenticated)

    def _listen(self, sockets: list[socket.socket]) -> None:
        self._sockets = sockets
        self.addresses = tuple(Address(*each.getsockname()[:2]) for each in sockets)
        for each in sockets:
            self._loop.add_reader(each, self._accept, each)

    async def close(self) -> None:
        """Stop accepting, and cut connections that are not open yet; open channels stay. Idempotent."""
        for each in self._sockets:
            self._loop.remove_reader(each)
            each.close()
        self._sockets.clear()
        waiting = self._unauthenticated | self._entering
        for channel, task in waiting.items():
            self._cut(channel, task)
        if ending := {*waiting.values(), *self._admissions}:
            await asyncio.wait(ending)

    def _accept(self, listening: socket.socket) -> None:
        """Somebody has connected, or many have."""
        for _ in range(_BACKLOG):
            try:
                connection, address = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    raise  # for the loop to tell
                _log.error("no connection can be accepted for %s s: %s", _SHORTAGE_S, error.strerror)
                self._loop.remove_reader(listening)  # else it is called again at once
                self._loop.call_later(_SHORTAGE_S, self._accept_again, listening)
                return
            self._take(connection, Address(*address[:2]))

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _take(self, connection: socket.socket, address: Address) -> None:
        connection.setblocking(False)
        # Short words go out at once; asyncio sees to that only where a socket was made for TCP by its number.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = self._make_channel()
        task = self._loop.create_task(self._run(connection, address, channel))
        self._tasks.add(task)
        self._unauthenticated[channel] = task

        def ended(_: asyncio.Task[None]) -> None:
            connection.close()  # the transport has, but a task that was cut at once has made none
            self._tasks.discard(task)
            self._unauthenticated.pop(channel, None)
            self._entering.pop(channel, None)

        task.add_done_callback(ended)
        if len(self._unauthenticated) > self._max_unauthenticated:
            # The oldest goes: who means it takes milliseconds, so those that say nothing cannot keep others out.
            oldest = next(iter(self._unauthenticated))
            self._cut(oldest, self._unauthenticated.pop(oldest))

    @staticmethod
    def _cut(channel: Channel, task: asyncio.Task[None]) -> None:
        if channel.is_connected:
            channel.abort()  # which ends its task
        else:
            task.cancel()  # in the midst of TLS, at the latest

    async def _run(self, connection: socket.socket, address: Address, channel: Channel) -> None:
        # Accepted here and not by a server of the loop, so that connections in the midst of TLS are counted, too.
        tls, timeout_s = self._ssl_context, self._config.hello_timeout_s
        try:
            await self._loop.connect_accepted_socket(
                lambda: channel, connection, ssl=tls, ssl_handshake_timeout=None if tls is None else timeout_s
            )
        except OSError as error:
            _log.info("connection from %s failed in TLS: %s", address, str(error) or type(error).__name__)
        else:
            await channel.wait_closed()

    def _make_channel(self) -> Channel:
        handler: EventHandler | None = None

        def hear(event: Event) -> None:
            nonlocal handler
            if handler is not None:
                handler(event)
            elif isinstance(event, Introduced):
                # It has shown its token: strangers must not push it out while a worker is made for it.
                if (task := self._unauthenticated.pop(channel, None)) is not None:  # None: it has been cut already
                    self._entering[channel] = task
                admission = self._loop.create_task(self._admit(session, channel, event.host_id))
                self._admissions.add(admission)
                admission.add_done_callback(self._admissions.discard)
            elif isinstance(event, SessionOpened):
                self._unauthenticated.pop(channel, None)
                self._entering.pop(channel, None)
                handler = self._on_session(channel)
                handler(event)
            elif isinstance(event, SessionClosed):
                error, peer = event.error, channel.peer_address
                warns = isinstance(error, AuthenticationError) and self._may_warn_of(peer.host)
                level = logging.WARNING if warns else logging.INFO
                _log.log(level, "connection from %s refused: %s", peer, error or "it was cut")

        session = ServerSession(self._config, now=self._loop.time())
        channel = Channel(session, hear)
        return channel

    def _may_warn_of(self, host: str) -> bool:
        """An operator is to know who comes with a wrong token; nobody fills the log with it."""
        now = self._loop.time()
        if now < self._warned.get(host, -math.inf) + _WARN_AGAIN_S:
            return False
        self._warned.pop(host, None)
        self._warned[host] = now
        if len(self._warned) > _MAX_HOSTS_WARNED:
            del self._warned[next(iter(self._warned))]  # the oldest
        return True

    async def _admit(self, session: ServerSession, channel: Channel, host_id: bytes) -> None:
        assert self._address_for is not None
        try:
            events = session.admit(await self._address_for(session, host_id), now=channel.now)
        except HurrayError as error:
            events = session.turn_away(error)
        channel.hear(events)


async def serve(
    host: str,
    port: int,
    config: SessionConfig,
    *,
    on_session: Callable[[Channel], EventHandler],
    address_for: AddressFor | None = None,
    ssl_context: ssl.SSLContext | None = None,
    allow_unauthenticated: bool = False,
    max_unauthenticated: int = 64,
) -> Listener:
    """Listen, and run a session for each connection.

    Args:
        host: name or literal; all its addresses, but only the first if ``port`` is 0.
        port: TCP port; 0 for any free one (``listener.port`` tells).
        config: settings of this side.
        on_session: called with each channel when its session opens, never before the peer is authenticated; returns
            the handler of its events, of which SessionOpened is the first.
        address_for: where ``config`` has no worker address: asked for that of each client, by its session and host_id,
            once it is authenticated. What it raises, if a `HurrayError`, is told to the client. If the session is
            closed when it is done, nobody will be told of the address.
        ssl_context: server-side TLS context; None for plain TCP.
        allow_unauthenticated: listen beyond this host although neither a token nor client certificates are asked for
            (tokens of tenants do not count, since a peer without a token is let in beside them).
        max_unauthenticated: connections that may be in their handshake; the oldest is cut for a new one.

    Raises:
        ConfigError: the address cannot be listened on, or would be open to everyone.
    """
    address = Address(host, port)
    places = await _allowed(address, config.token, ssl_context, allow_unauthenticated=allow_unauthenticated)
    if config.token and ssl_context is None and not all(map(_is_loopback, places)):
        _log.warning("tokens cross the network in clear to %s: nobody but TLS keeps them secret", address)
    listener = Listener(config, on_session, address_for, ssl_context, max_unauthenticated)
    listener._listen(_open(address, places))
    return listener


async def check_listen(host: str, port: int, *, token: str | None, ssl_context: ssl.SSLContext | None = None) -> None:
    """Whether `serve` would listen with these: for who has much to set up before it.

    Args:
        host, port, ssl_context: as of `serve`.
        token: of its ``config``.

    Raises:
        ExposedError: the address would be open to everyone.
        ConfigError: it cannot be listened on.
    """
    address = Address(host, port)
    for each in _open(address, await _allowed(address, token, ssl_context, allow_unauthenticated=False)):
        each.close()


class _Place(NamedTuple):
    family: socket.AddressFamily
    sockaddr: tuple[Any, ...]


def _is_loopback(place: _Place) -> bool:
    return ip_address(place.sockaddr[0]).is_loopback


async def _allowed(
    address: Address, token: str | None, ssl_context: ssl.SSLContext | None, *, allow_unauthenticated: bool
) -> list[_Place]:
    """Where to listen for it."""
    places = await _resolve(address)
    asks_certificate = ssl_context is not None and ssl_context.verify_mode is ssl.CERT_REQUIRED
    # Tenants' tokens alone keep nobody out: without one of the engine's own, who sends none is let in.
    is_open = not (token or asks_certificate or allow_unauthenticated)
    if is_open and not all(map(_is_loopback, places)):
        raise ExposedError(
            "anyone who reaches this address could write into the pools: no token and no client certificates are set",
            field="listen",
            value=str(address),
            fix="Set a token, ask for client certificates, listen on 127.0.0.1, or pass allow_unauthenticated=True",
        )
    return places[:1] if address.port == 0 else places


async def _resolve(address: Address) -> list[_Place]:
    loop = asyncio.get_running_loop()
    try:
        infos = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        rule = f"the name cannot be resolved: {error.strerror or error}"
        raise ConfigError(rule, field="listen", value=str(address)) from error
    return list(dict.fromkeys(_Place(info[0], info[4]) for info in infos))


def _open(address: Address, places: list[_Place]) -> list[socket.socket]:
    try:
        return _bound(places)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        raise ConfigError(
            "the port is in use" if in_use else f"cannot listen there: {error.strerror or error}",
            field="listen",
            value=str(address),
            fix="Take another port, or 0 for any free one" if in_use else None,
        ) from error


def _bound(places: list[_Place]) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    try:
        for place in places:
            try:
                each = socket.create_server(place.sockaddr, family=place.family, backlog=_BACKLOG)
            except OSError as error:
                # A name may have addresses of a family that this system lacks.
                if error.errno != errno.EAFNOSUPPORT or (place is places[-1] and not sockets):
                    raise
            else:
                each.setblocking(False)
                sockets.append(each)
    except BaseException:
        for each in sockets:
            each.close()
        raise
    return sockets
