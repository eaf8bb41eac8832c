"""Accepting connections, and holding those that are not authenticated yet within bounds.

This module knows where to listen and who is still in its handshake. What a connection does is channel.py's business,
what an open session does is the engine's.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from typing import TypeAlias, cast

from hurray_rdma.control.address import Address
from hurray_rdma.control.channel import Channel, EventHandler
from hurray_rdma.control.config import SessionConfig
from hurray_rdma.control.events import Event, Introduced, SessionClosed, SessionOpened
from hurray_rdma.control.server import ServerSession
from hurray_rdma.errors import ConfigError, HurrayError

__all__ = ["ExposedError", "Listener", "check_listen", "serve"]

_log = logging.getLogger(__name__)


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
        self._unauthenticated: dict[asyncio.Transport, asyncio.Task[None]] = {}
        self._entering: dict[asyncio.Transport, asyncio.Task[None]] = {}
        """Connections that have shown their token, and wait for what the session needs to be open."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._admissions: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
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

    async def _listen(self, address: Address, hosts: list[str]) -> None:
        self._server = await _open(address, hosts, self._accept)
        self.addresses = tuple(Address(*s.getsockname()[:2]) for s in self._server.sockets)

    async def close(self) -> None:
        """Stop accepting, and cut connections that are not open yet; open channels stay. Idempotent."""
        if self._server is not None:
            self._server.close()
        waiting = self._unauthenticated | self._entering
        for transport in waiting:
            transport.abort()
        if ending := {*waiting.values(), *self._admissions}:
            await asyncio.wait(ending)

    def _accept(self, transport: asyncio.Transport) -> None:
        task = asyncio.get_running_loop().create_task(self._run(transport))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._unauthenticated[transport] = task
        if len(self._unauthenticated) > self._max_unauthenticated:
            # The oldest goes: who means it takes milliseconds, so those that say nothing cannot keep others out.
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            oldest.abort()

    async def _run(self, transport: asyncio.Transport) -> None:
        channel = self._make_channel(transport)
        try:
            if transport.is_closing() or not await self._hand_over(transport, channel):
                transport.abort()
            else:
                await channel.wait_closed()
        finally:
            self._unauthenticated.pop(transport, None)
            self._entering.pop(transport, None)

    async def _hand_over(self, transport: asyncio.Transport, channel: Channel) -> bool:
        """Let the channel speak, through TLS if that is asked for. False: that failed."""
        if self._ssl_context is None:
            transport.set_protocol(channel)
            channel.connection_made(transport)
            transport.resume_reading()
            return True
        # TLS starts only now, not in the server itself, so that connections in the midst of it are counted, too.
        loop = asyncio.get_running_loop()
        timeout_s = self._config.hello_timeout_s
        try:
            secured = await loop.start_tls(
                transport, channel, self._ssl_context, server_side=True, ssl_handshake_timeout=timeout_s
            )
        except OSError as error:
            why = str(error) or type(error).__name__
            _log.info("connection from %s failed in TLS: %s", transport.get_extra_info("peername"), why)
            return False
        if secured is None:  # It was cut meanwhile.
            return False
        channel.connection_made(secured)
        return True

    def _make_channel(self, transport: asyncio.Transport) -> Channel:
        handler: EventHandler | None = None

        def hear(event: Event) -> None:
            nonlocal handler
            if handler is not None:
                handler(event)
            elif isinstance(event, Introduced):
                # It has shown its token: strangers must not push it out while a worker is made for it.
                if (task := self._unauthenticated.pop(transport, None)) is not None:  # None: it has been cut already
                    self._entering[transport] = task
                admission = asyncio.get_running_loop().create_task(self._admit(session, channel, event.host_id))
                self._admissions.add(admission)
                admission.add_done_callback(self._admissions.discard)
            elif isinstance(event, SessionOpened):
                self._unauthenticated.pop(transport, None)
                self._entering.pop(transport, None)
                handler = self._on_session(channel)
                handler(event)
            elif isinstance(event, SessionClosed):
                _log.info("connection from %s refused: %s", channel.peer_address, event.error)

        session = ServerSession(self._config, now=asyncio.get_running_loop().time())
        channel = Channel(session, hear)
        return channel

    async def _admit(self, session: ServerSession, channel: Channel, host_id: bytes) -> None:
        assert self._address_for is not None
        try:
            events = session.admit(await self._address_for(session, host_id), now=channel.now)
        except HurrayError as error:
            events = session.turn_away(error)
        channel.hear(events)


class _Door(asyncio.Protocol):
    """Tells of a new connection, from which nothing is read until somebody takes it over."""

    def __init__(self, accept: Callable[[asyncio.Transport], None]) -> None:
        self._accept = accept

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        plain = cast("asyncio.Transport", transport)
        plain.pause_reading()
        self._accept(plain)


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
    hosts = await _allowed_hosts(address, config.token, ssl_context, allow_unauthenticated=allow_unauthenticated)
    if config.token and ssl_context is None and not all(ip_address(h).is_loopback for h in hosts):
        _log.warning("tokens cross the network in clear to %s: nobody but TLS keeps them secret", address)
    listener = Listener(config, on_session, address_for, ssl_context, max_unauthenticated)
    await listener._listen(address, hosts)
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
    hosts = await _allowed_hosts(address, token, ssl_context, allow_unauthenticated=False)
    server = await _open(address, hosts, asyncio.Transport.abort)
    server.close()


async def _allowed_hosts(
    address: Address, token: str | None, ssl_context: ssl.SSLContext | None, *, allow_unauthenticated: bool
) -> list[str]:
    hosts = await _resolve(address)
    asks_certificate = ssl_context is not None and ssl_context.verify_mode is ssl.CERT_REQUIRED
    # Tenants' tokens alone keep nobody out: without one of the engine's own, who sends none is let in.
    is_open = not (token or asks_certificate or allow_unauthenticated)
    if is_open and not all(ip_address(h).is_loopback for h in hosts):
        raise ExposedError(
            "anyone who reaches this address could write into the pools: no token and no client certificates are set",
            field="listen",
            value=str(address),
            fix="Set a token, ask for client certificates, listen on 127.0.0.1, or pass allow_unauthenticated=True",
        )
    return hosts[:1] if address.port == 0 else hosts


async def _open(address: Address, hosts: list[str], accept: Callable[[asyncio.Transport], None]) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    try:
        return await loop.create_server(lambda: _Door(accept), hosts, address.port)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        raise ConfigError(
            "the port is in use" if in_use else f"cannot listen there: {error.strerror or error}",
            field="listen",
            value=str(address),
            fix="Take another port, or 0 for any free one" if in_use else None,
        ) from error


async def _resolve(address: Address) -> list[str]:
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(address.host, address.port)
    except OSError as error:
        rule = f"the name cannot be resolved: {error.strerror or error}"
        raise ConfigError(rule, field="listen", value=str(address)) from error
    return list(dict.fromkeys(str(info[4][0]) for info in infos))
