"""One session with another engine, from the connecting side: control channel, UCX endpoint, the peer's pools.

It lives as long as its session; `Peer` makes a new one when it is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from hurray_rdma.cache import CacheSpec
from hurray_rdma.control import (
    STUCK_FIX,
    AbortRequested,
    Acknowledged,
    AllEnded,
    Channel,
    ClientSession,
    DescriptorsEnded,
    Event,
    Granted,
    PeerInfo,
    PoolAnnounced,
    PoolRemoved,
    PoolsAnnounced,
    PublishedHeard,
    Refused,
    SessionClosed,
    SessionConfig,
    SSLContext,
    TensorData,
    TransferFailed,
    open_channel,
    parse_address,
)
from hurray_rdma.engine.ahead import AheadGrants
from hurray_rdma.engine.deadlines import Deadlines
from hurray_rdma.engine.exchange import Exchange
from hurray_rdma.engine.fetching import Fetching
from hurray_rdma.engine.logs import EngineLog
from hurray_rdma.engine.remote_pool import RemotePool
from hurray_rdma.engine.remote_pools import RemotePools
from hurray_rdma.engine.settling import Settling
from hurray_rdma.engine.tally import Tally
from hurray_rdma.errors import DeadlineExceededError, HurrayError, PeerLostError, TransportError
from hurray_rdma.format import Dialect
from hurray_rdma.transport import (
    Context,
    Endpoint,
    LaneReport,
    PageStream,
    Region,
    StopFlag,
    Worker,
)

__all__ = ["Connection", "Surroundings"]

_log = logging.getLogger(__name__)

_ANEW = "The next transfer connects anew"

_STREAM_S = 2.0
"""What a page stream has to be made: a firewall may let nothing come back."""

_Reached: TypeAlias = tuple[Endpoint, PageStream | None]

_NUM_MOVERS = 2
"""Threads of each connection that move pages: a peer that is stuck costs nobody else, a small transfer passes a large
one."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an engine gives all its connections."""

    config: SessionConfig
    context: Context
    worker: Worker
    tally: Tally
    settling: Settling
    ssl_context: SSLContext | None
    server_name: str | None


class Connection:
    """A session with the engine at ``address``: a `Route`. Made by `open`.

    Args:
        address: ``host:port``.
        surroundings: of the engine.
        quiet_sessions: earlier ones of this peer that broke, and of which nothing is in flight any more.
        on_lost: told when the session that was open has ended; `close` is owed then.
    """

    def __init__(
        self,
        address: str,
        surroundings: Surroundings,
        *,
        quiet_sessions: tuple[bytes, ...],
        on_lost: Callable[[Connection], None],
    ) -> None:
        self.address = address
        self._host, self._port = parse_address(address)
        self._surroundings = surroundings
        self._on_lost = on_lost
        self.session_id = os.urandom(16)
        self._config = replace(surroundings.config, session_id=self.session_id, quiet_sessions=quiet_sessions)
        self.quiet = False
        """After `close`: whether nothing of the session is in flight any more."""
        self._in_doubt = False
        self.log = EngineLog(_log, peer=address)
        self.deadlines = Deadlines()
        self._movers = ThreadPoolExecutor(_NUM_MOVERS, thread_name_prefix=f"hurray-mover-{address}")
        self._channel: Channel | None = None
        self.session: ClientSession
        """Of the channel, once that is open."""
        self._endpoint: Endpoint | None = None
        self._stream: PageStream | None = None
        self._pools = RemotePools(self.log, tally=surroundings.tally)
        self._opened = False
        self._forsaken = False
        self._zeros: list[Region] = []
        self._give_up = StopFlag()
        self._connecting: asyncio.Task[_Reached] | None = None
        self._opening_pools: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._when_settled: list[Callable[[], None]] = []
        self._settled = False
        self.ahead = AheadGrants(self, tally=surroundings.tally)
        """Pages that the peer holds ready for small transfers."""
        self._ready = asyncio.Event()
        self._error: HurrayError | None = None
        self._exchanges: dict[int, Exchange[Any]] = {}

    async def open(self, deadline: float) -> None:
        """Connects both channels and hears of the peer's pools.

        Args:
            deadline: until when, on the monotonic clock, seconds.

        Raises:
            PeerLostError: nobody listens at the address, or it hung up.
            AuthenticationError: the token or the certificate is not what the other side asks for.
            DeadlineExceededError: no answer in time.
            HurrayError: as of `control.open_channel`.
        """
        given = self._surroundings
        started = time.monotonic()
        self._channel = await open_channel(
            self._host,
            self._port,
            self._config,
            timeout_s=deadline - started,
            on_event=self._handle,
            ssl_context=given.ssl_context,
            server_hostname=given.server_name,
        )
        assert isinstance(self._channel.session, ClientSession)
        self.session = self._channel.session
        given.tally.connected()
        try:
            await self._connect(deadline)
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._ready.wait()
            except TimeoutError:
                raise DeadlineExceededError(
                    f"{self.address} told of no pools in time", field="timeout_s", value=deadline - started
                ) from None
            self._raise_if_lost()
            self._opened = True
            self._pools.use(self._endpoint, self._stream)
            await self.open_pools(deadline)
            same_host = self._peer_info().host_id == given.context.memory_domain
            self._pools.warn_if_slow(same_host=same_host)
            if self._pools.useless is not None and not self._pools:
                raise self._pools.useless
        except BaseException:
            await self.close()
            raise

    async def _connect(self, deadline: float) -> None:
        """UCX, if it can; else pages travel on the control channel, which is slow, and said so."""

        def keep(task: asyncio.Task[_Reached]) -> None:
            if not task.cancelled() and task.exception() is None:
                self._endpoint, self._stream = task.result()

        # Half of the time: what does not connect by then is left to the control channel. The thread cannot be
        # interrupted: what it makes must have an owner, also when nobody waits for it any more.
        info, budget_s = self._peer_info(), (deadline - time.monotonic()) / 2
        task = asyncio.create_task(asyncio.to_thread(self._reach, info, timeout_s=budget_s))
        task.add_done_callback(keep)
        self._connecting = task
        try:
            await asyncio.shield(task)
        except (TransportError, DeadlineExceededError) as error:
            self._raise_if_lost()
            self._pools.fall_back(error)

    def _reach(self, info: PeerInfo, *, timeout_s: float) -> _Reached:
        """On a thread: UCX's endpoint; and a stream, where that has but tcp, which is slower, or a shared queue."""
        until = time.monotonic() + timeout_s
        endpoint = self._surroundings.worker.connect(info.worker_address, timeout_s=timeout_s, stop=self._give_up)
        wanted = endpoint.lanes.only_tcp or endpoint.lanes.queued
        if not (info.pages_port and wanted) or self._give_up.is_set():
            return endpoint, None
        left_s = min(_STREAM_S, until - time.monotonic())
        try:
            return endpoint, PageStream.open(self._remote_host, info.pages_port, info.pages_ticket, timeout_s=left_s)
        except TransportError as error:
            if self._error is None and not self._give_up.is_set():  # else it is no wonder
                self.log.warning("there is no page stream, and UCX has only %s: %s", endpoint.lanes.name, error)
            return endpoint, None
        except BaseException:
            endpoint.close()
            raise

    @property
    def _remote_host(self) -> str:
        """The address that the channel has found the peer at."""
        assert self._channel is not None
        return self._channel.peer_address.host

    @property
    def opens_pools(self) -> bool:
        """Whether `open_pools` has anything to do."""
        return self._pools.on_devices

    async def open_pools(self, deadline: float) -> None:
        """Opens what the peer has told of since, as far as the loop must not (`RemotePools.open_on_devices`).

        Raises:
            DeadlineExceededError: CUDA takes too long.
        """
        while self._pools.on_devices and self._endpoint is not None and self._closing is None:
            if self._opening_pools is None or self._opening_pools.done():
                self._opening_pools = asyncio.create_task(self._pools.open_on_devices())
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await asyncio.shield(self._opening_pools)
            except TimeoutError:
                raise DeadlineExceededError(
                    f"CUDA did not map the pools of {self.address} in time", field="deadline", value=deadline
                ) from None

    async def close(self) -> None:
        """Ends the transfers under way and both channels. Idempotent; goes on when the caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        # Last in, first out; each step runs, whatever the others raise.
        async with contextlib.AsyncExitStack() as steps:
            steps.push_async_callback(asyncio.to_thread, self._movers.shutdown)  # the exchanges have waited for them
            if self._channel is not None:
                steps.push_async_callback(self._channel.close)
            for zeros in self._zeros:
                steps.callback(zeros.close)
            steps.callback(self._pools.clear)
            steps.push_async_callback(self._close_endpoint)
            for exchange in list(self._exchanges.values()):
                steps.push_async_callback(exchange.abort, "its connection is being closed")

    async def _close_endpoint(self) -> None:
        if self._connecting is not None:
            self._give_up.set()
            await asyncio.wait({self._connecting})
        if self._opening_pools is not None:
            await asyncio.wait({self._opening_pools})
        # Where it fails, the worker keeps the endpoint, and UCX may still read and write for it.
        closed = self._endpoint is None or await asyncio.to_thread(self._endpoint.close)
        if closed:
            self._settle()
        elif self._endpoint is not None:
            self._surroundings.settling.add(self._endpoint, self._settle)
        if self._stream is not None:
            await asyncio.to_thread(self._stream.close)
        self._endpoint = self._stream = None
        self.quiet = closed and not self._in_doubt

    def _settle(self) -> None:
        self._settled = True
        while self._when_settled:
            self._when_settled.pop()()

    @property
    def lost(self) -> bool:
        """Whether nothing can be sent over it any more."""
        if self._error is not None or self._closing is not None or self._forsaken:
            return True
        if self._channel is not None and self.session.used_up:
            return True
        endpoint, stream = self._endpoint, self._stream
        return (endpoint is not None and endpoint.closed) or (stream is not None and stream.closed)

    @property
    def error(self) -> HurrayError | None:
        """What ended the session; None if it has not ended, or was given up here."""
        return self._error

    @property
    def lanes(self) -> LaneReport | None:
        """The UCX lanes; None where there are none."""
        return self._endpoint.lanes if self._endpoint is not None else None

    @property
    def pool_names(self) -> tuple[str, ...]:
        """Of the peer's pools, in the order of their numbers."""
        return self._pools.names

    def first_pool(self) -> RemotePool:
        """The first pool that the peer has told of.

        Raises:
            PeerLostError: the session has ended, or there is none.
        """
        self._require_pools()
        first = self._pools.first()
        if first is None:
            assert self._pools.useless is not None
            raise self._pools.useless
        return first

    def first_reach(self) -> tuple[str, str]:
        """Lane and path of `first_pool`, which is not opened for it where the loop must not.

        Raises:
            PeerLostError: as of it.
        """
        self._require_pools()
        reach = self._pools.first_reach()
        if reach is None:
            assert self._pools.useless is not None
            raise self._pools.useless
        return reach

    # As a route of transfers.

    @property
    def movers(self) -> ThreadPoolExecutor:
        return self._movers

    @property
    def streams(self) -> bool:
        return self._stream is not None

    def notify(self) -> None:
        if self._channel is not None:
            self._channel.notify()

    async def flush(self) -> None:
        if self._channel is not None:
            await self._channel.flush()

    def dialect(self) -> Dialect:
        return Dialect(self._peer_info().dialect)

    def pool_for(self, spec: CacheSpec, name: str | None, *, device: str) -> RemotePool:
        self._require_pools()
        return self._pools.pool_for(spec, name, device=device)

    def pool_by_id(self, pool_id: int) -> RemotePool | None:
        return self._pools.by_id(pool_id)

    def num_tensors(self) -> int:
        return self._pools.num_tensors

    def told(self, error: HurrayError) -> HurrayError:
        match error:
            case PeerLostError():
                rule = f"the session with {self.address} was lost: {error.rule}"
                fix = ". ".join(filter(None, (error.fix, _ANEW if self._opened else None)))
            case DeadlineExceededError():
                rule, fix = f"{error.rule} ({self.address})", error.fix or ""
                now = asyncio.get_running_loop().time()
                if self.session.is_silent(now):
                    fix = f"Nothing was heard from it for {self.session.silent_s(now):.2f} s. {STUCK_FIX}"
            case _:
                return error
        told = type(error)(rule, field=error.field, value=error.value, fix=fix or None)
        told.__cause__ = error
        return told

    def forsake(self) -> None:
        self._forsaken = True

    def doubt(self) -> None:
        self._in_doubt = True

    def when_settled(self, settled: Callable[[], None]) -> None:
        if self._settled:
            settled()
        else:
            self._when_settled.append(settled)
            if self._opened and self._closing is None:
                self._on_lost(self)  # nothing can be posted over it any more, and its end is what settles

    def zeros(self, nbytes: int) -> Region:
        if not self._zeros or self._zeros[-1].nbytes < nbytes:
            self._zeros.append(self._surroundings.context.allocate(nbytes))
        return self._zeros[-1]

    def register(self, transfer_id: int, exchange: Exchange[Any]) -> None:
        self._exchanges[transfer_id] = exchange

    def forget(self, transfer_id: int) -> None:
        self._exchanges.pop(transfer_id, None)

    # Events.

    def _handle(self, event: Event) -> None:
        match event:
            case (
                Granted(transfer_id=transfer_id, grant=answer)
                | PublishedHeard(transfer_id=transfer_id, published=answer)
            ):
                if transfer_id in self._exchanges:
                    self._exchanges[transfer_id].answered(answer)
            case Acknowledged(transfer_id=transfer_id):
                if transfer_id in self._exchanges:
                    self._exchanges[transfer_id].acknowledged()
            case TensorData() | DescriptorsEnded() | AllEnded():
                reader = self._exchanges.get(event.transfer_id)
                if isinstance(reader, Fetching):
                    reader.hear_data(event)
            case (
                Refused(transfer_id=transfer_id, error=error)
                | AbortRequested(transfer_id=transfer_id, error=error)
                | TransferFailed(transfer_id=transfer_id, error=error)
            ):
                if transfer_id in self._exchanges:
                    self._exchanges[transfer_id].ended_by_peer(self.told(error))
            case PoolAnnounced(pool=pool):
                self._pools.hear(pool)
                self.ahead.forget_pools(self._pools.numbers)
            case PoolRemoved(pool_id=pool_id):
                self._pools.remove(pool_id)
                self.ahead.forget_pools(self._pools.numbers)
            case PoolsAnnounced():
                self._ready.set()
            case SessionClosed(error=error):
                self._hear_the_end(error)
            case _:
                pass

    def _hear_the_end(self, error: HurrayError | None) -> None:
        self._error = error or PeerLostError("the peer closed it")
        self._ready.set()
        self._surroundings.tally.disconnected(error)
        if error is not None:
            self.log.info("the session has ended: %s", error)
        if self._opened:
            self._on_lost(self)

    def _require_pools(self) -> None:
        self._raise_if_lost()
        if not self._pools:
            self.forsake()  # the next transfer connects anew: an announcement may have been lost
            raise PeerLostError(
                f"{self.address} has no pool to receive into (for this token)", fix="It may add one: Engine.add_pool"
            )

    def _peer_info(self) -> PeerInfo:
        info = self.session.peer
        if info is None:
            raise PeerLostError(f"the session with {self.address} is not open")
        return info

    def _raise_if_lost(self) -> None:
        if self._error is not None:
            raise self.told(self._error)
        if self._closing is not None:
            raise PeerLostError(f"the connection to {self.address} was closed here")
