"""The engine: one per process and pool, symmetric; it listens, connects, pushes and receives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType

from hurray_rdma.cache import PagePool, PoolGroups
from hurray_rdma.control import (
    Channel,
    Event,
    EventHandler,
    Listener,
    Offered,
    ServerSession,
    SessionClosed,
    SessionConfig,
    StaleGenerationError,
    parse_address,
    serve,
)
from hurray_rdma.engine.arrival import Arrival
from hurray_rdma.engine.peer import Peer
from hurray_rdma.engine.receiver import Receiver
from hurray_rdma.errors import ConfigError
from hurray_rdma.transport import Context, Worker

__all__ = ["Engine"]

_MAX_S = 7 * 86400.0


class Engine:
    """Sends snapshots of one pool, and receives into it. An async context manager; make it inside a running loop.

    Args:
        pool: source and destination of transfers, or the pools of a hybrid model's cache groups; stays the caller's,
            who closes it after the engine.
        listen: ``"host:port"`` to receive on, port 0 for any free one (see `address`); None only sends.
        name: shown to peers and in logs; None is ``host:pid``.
        token: shared secret of the engines; a connecting engine must have the listening one's.
        timeout_s: default budget of connects, sends and waits, seconds.
        lease_s: a sender that is silent for this long after its grant loses it, seconds.
        allow_unauthenticated: listen beyond this host although no token is set: whoever reaches the port may write into
            the pool.
        context: UCX context; None is the pool's own, and no other will do.

    Raises:
        ConfigError: a setting is out of range.
    """

    def __init__(
        self,
        pool: PagePool | PoolGroups,
        *,
        listen: str | None = None,
        name: str | None = None,
        token: str | None = None,
        timeout_s: float = 30.0,
        lease_s: float = 30.0,
        allow_unauthenticated: bool = False,
        context: Context | None = None,
    ) -> None:
        for field, value in (("timeout_s", timeout_s), ("lease_s", lease_s)):
            if not 0 < value <= _MAX_S:
                raise ConfigError(f"must be above 0 and at most {_MAX_S:.0f}", field=field, value=value)
        self.pool = pool
        self.name = name or f"{platform.node()}:{os.getpid()}"
        self._listen = parse_address(listen) if listen is not None else None
        self._token = token
        self._timeout_s = timeout_s
        self._lease_s = lease_s
        self._allow_unauthenticated = allow_unauthenticated
        self._groups: dict[str | None, PagePool] = {None: pool} if isinstance(pool, PagePool) else dict(pool.items())
        regions = [region for each in self._groups.values() for region in each.regions]
        self._context = regions[0].context if context is None else context
        if any(region.context is not self._context for region in regions):
            raise ConfigError(
                "the pool was made with another UCX context", field="context", value=context, fix="Pass the pool's own"
            )
        self._worker: Worker | None = None
        self._receivers: list[Receiver] = []
        self._arrivals: asyncio.Queue[Arrival | None] = asyncio.Queue()
        self._listener: Listener | None = None
        self._channels: set[Channel] = set()
        self._peers: set[Peer] = set()
        self._closing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Makes the UCX worker and listens; `async with` calls it.

        Raises:
            ConfigError: the address is in use or not this machine's.
            TransportError: UCX cannot make a worker.
        """
        self._worker = self._context.open_worker()
        if self._listen is not None:
            self._receivers = [
                Receiver(
                    pool,
                    pool_id=pool_id,
                    group=group,
                    arrivals=self._arrivals,
                    lease_s=self._lease_s,
                    timeout_s=self._timeout_s,
                    clock=asyncio.get_running_loop().time,
                )
                for pool_id, (group, pool) in enumerate(self._groups.items())
            ]
            host, port = self._listen
            try:
                self._listener = await serve(
                    host,
                    port,
                    self._config(),
                    on_session=self._accept,
                    allow_unauthenticated=self._allow_unauthenticated,
                )
            except BaseException:
                await self.close()
                raise

    async def close(self) -> None:
        """Ends arrivals and connections, then the UCX worker. Idempotent; goes on when the caller is cancelled.

        The pool stays open.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        # Last in, first out; each step runs, whatever the others raise.
        async with contextlib.AsyncExitStack() as steps:
            if self._worker is not None:
                steps.push_async_callback(asyncio.to_thread, self._worker.close)
            steps.callback(self._end_arrivals)
            for receiver in self._receivers:
                steps.callback(receiver.close)
            for channel in list(self._channels):
                steps.push_async_callback(channel.close)
            if self._listener is not None:
                steps.push_async_callback(self._listener.close)
            for peer in list(self._peers):
                steps.push_async_callback(peer.close)

    def _end_arrivals(self) -> None:
        """What nobody took goes back to the pool, and `arrivals` ends."""
        while not self._arrivals.empty():
            arrival = self._arrivals.get_nowait()
            if arrival is not None:
                arrival.release()
        self._arrivals.put_nowait(None)

    @property
    def address(self) -> str:
        """``"host:port"`` as it listens, the port filled in.

        Raises:
            ConfigError: it does not listen.
        """
        if self._listener is None:
            raise ConfigError("the engine does not listen", field="listen", value=None, fix="Pass listen='host:port'")
        return str(self._listener.addresses[0])

    def connect(self, address: str, *, timeout_s: float | None = None) -> Peer:
        """A connection to the engine at ``"host:port"``, to be entered with ``async with``.

        Args:
            address: ``host:port``, ``[ipv6]:port``.
            timeout_s: budget for connecting, and default of its sends; None is the engine's.

        Raises:
            ConfigError: the address cannot be read, or the engine was not started.
        """
        if self._worker is None or self._closing is not None:
            raise ConfigError("the engine is not running", field="engine", value=self.name, fix="Use `async with`")
        peer = Peer(
            address,
            config=self._config(),
            context=self._context,
            worker=self._worker,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            on_closed=self._peers.discard,
        )
        self._peers.add(peer)
        return peer

    async def arrivals(self) -> AsyncIterator[Arrival]:
        """Each transfer to this engine, as soon as its pages are granted; ends when the engine closes.

        Raises:
            ConfigError: the engine does not listen.
        """
        if not self._receivers:
            raise ConfigError("the engine does not listen", field="listen", value=None, fix="Pass listen='host:port'")
        while (arrival := await self._arrivals.get()) is not None:
            yield arrival
        self._arrivals.put_nowait(None)  # for the next one who asks

    def _config(self) -> SessionConfig:
        if self._worker is None:
            raise ConfigError("the engine is not running", field="engine", value=self.name)
        return SessionConfig(
            engine_name=self.name,
            token=self._token,
            host_id=_host_id(),
            worker_address=self._worker.address,
            hello_timeout_s=self._timeout_s,
        )

    def _accept(self, channel: Channel) -> EventHandler:
        """A sender has connected and may stay."""
        link = _ServerLink(channel)
        self._channels.add(channel)

        def handle(event: Event) -> None:
            # Pool 0 is announced last: with it a peer knows them all.
            for receiver in reversed(self._receivers):
                receiver.handle(link, event)
            if isinstance(event, Offered) and event.offer.pool_id >= len(self._receivers):
                error = StaleGenerationError("there is no such pool", field="pool_id", value=event.offer.pool_id)
                link.session.refuse(event.transfer_id, error, now=asyncio.get_running_loop().time())
            if isinstance(event, SessionClosed):
                self._channels.discard(channel)

        return handle


class _ServerLink:
    """A channel whose session is the listening side's."""

    def __init__(self, channel: Channel) -> None:
        assert isinstance(channel.session, ServerSession)
        self.session = channel.session
        self.notify = channel.notify


def _host_id() -> bytes:
    """The same for all processes of one running kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
