"""A connection to another engine, from the connecting side: control channel, UCX endpoint, the peer's pool."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import CacheSpec, PoolLayout, Snapshot, SnapshotGroups
from hurray_rdma.control import (
    AbortRequested,
    Acknowledged,
    Channel,
    ClientSession,
    Event,
    Granted,
    PeerInfo,
    Pool,
    PoolAnnounced,
    PoolRemoved,
    Refused,
    SessionClosed,
    SessionConfig,
    SessionOpened,
    TransferFailed,
    open_channel,
    parse_address,
)
from hurray_rdma.engine.compat import announced_layout
from hurray_rdma.engine.stats import TransferStats
from hurray_rdma.engine.transfer import RemotePool, Transfer
from hurray_rdma.errors import DeadlineExceededError, GeometryError, HurrayError, PeerLostError, TransportError
from hurray_rdma.format import Dialect
from hurray_rdma.transport import Context, Endpoint, LaneReport, Region, RemoteMemory, RemoteRegion, StopFlag, Worker

__all__ = ["Peer"]

_NUM_MOVERS = 2
"""Threads of each peer that move pages: a peer that is stuck costs nobody else, a small transfer passes a large one."""


class Peer:
    """Another engine that takes snapshots. Made by `Engine.connect`; an async context manager.

    Entering connects both channels and waits for the peer's pool, within ``timeout_s``.
    """

    def __init__(
        self,
        address: str,
        *,
        config: SessionConfig,
        context: Context,
        worker: Worker,
        timeout_s: float,
        on_closed: Callable[[Peer], None],
    ) -> None:
        self.address = address
        """As given to `Engine.connect`."""
        self._movers = ThreadPoolExecutor(_NUM_MOVERS, thread_name_prefix=f"hurray-mover-{address}")
        self._on_closed = on_closed
        self._host, self._port = parse_address(address)
        self._config = config
        self._context = context
        self._worker = worker
        self._timeout_s = timeout_s
        self._channel: Channel | None = None
        self._endpoint: Endpoint | None = None
        self._announced: dict[int, tuple[Pool, PoolLayout]] = {}
        self._pools: dict[int, RemotePool] = {}
        self._zeros: Region | None = None
        self._give_up = StopFlag()
        self._connecting: asyncio.Task[Endpoint] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._error: HurrayError | None = None
        self._transfers: dict[int, Transfer] = {}

    async def __aenter__(self) -> Peer:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Connects; `async with` calls it.

        Raises:
            PeerLostError: nobody listens at the address, or it hung up.
            AuthenticationError: the token is not the peer's.
            DeadlineExceededError: no answer in time.
            TransportError: no UCX transport reaches the peer.
        """
        deadline = time.monotonic() + self._timeout_s
        self._channel = await open_channel(
            self._host, self._port, self._config, timeout_s=self._timeout_s, on_event=self._handle
        )
        try:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._ready.wait()
            except TimeoutError:
                raise DeadlineExceededError(
                    f"{self.address} announced no pool in time", field="timeout_s", value=self._timeout_s
                ) from None
            self._raise_if_lost()
            await self._connect(deadline - time.monotonic())
            for pool_id in sorted(self._announced):
                self._open_pool(pool_id)
        except BaseException:
            await self.close()
            raise

    async def _connect(self, timeout_s: float) -> None:
        def keep(task: asyncio.Task[Endpoint]) -> None:
            if not task.cancelled() and task.exception() is None:
                self._endpoint = task.result()

        # The thread cannot be interrupted: what it makes must have an owner, also when nobody waits for it any more.
        task = asyncio.create_task(
            asyncio.to_thread(
                self._worker.connect, self._peer_info().worker_address, timeout_s=timeout_s, stop=self._give_up
            )
        )
        task.add_done_callback(keep)
        self._connecting = task
        await asyncio.shield(task)

    async def close(self) -> None:
        """Ends the transfers under way and both channels. Idempotent; goes on when the caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for transfer in list(self._transfers.values()):
            await transfer.abort("its connection is being closed")
        if self._connecting is not None:
            self._give_up.set()
            await asyncio.wait({self._connecting})
        if self._endpoint is not None:
            await asyncio.to_thread(self._endpoint.close)  # where it fails, the worker keeps the endpoint
            self._endpoint = None
        if self._zeros is not None:
            self._zeros.close()
        if self._channel is not None:
            await self._channel.close()
            self._channel = None
        self._movers.shutdown(wait=False)
        self._on_closed(self)

    async def send(
        self,
        snapshot: Snapshot,
        *,
        key: str | None = None,
        page_keys: NDArray[np.uint8] | None = None,
        zero_tails: bool = False,
        timeout_s: float | None = None,
    ) -> TransferStats:
        """Pushes a whole snapshot: each physical page once, straight into the peer's pool.

        Args:
            snapshot: its pages must stay as they are until this returns.
            key: a name for the peer's application; None makes one. Senders that hold slices of the heads of one
                snapshot use the same key: their offers become one arrival.
            page_keys: a key of its content for each table entry, uint8 ``[len(block_table), key_nbytes]``, as
                `hurray_rdma.cache.snapshot_keys` makes them; pages that the peer holds under the same key are not sent.
            zero_tails: slots past the valid tokens of a page arrive as zeros; else they are undefined. For transfers
                across a trust boundary.
            timeout_s: budget for everything, the wait for free pages included; None is the engine's.

        Raises:
            GeometryError: the peer's pool cannot take it; nothing was sent.
            PoolExhaustedError: it never fits into the peer's pool; nothing was sent.
            DeadlineExceededError, TransferAbortedError, PeerLostError, TransportError: the pages of the snapshot may be
                used again; bytes on their way may still arrive, and the peer keeps its pages until they cannot.
        """
        async with self.begin(
            snapshot, key=key, page_keys=page_keys, zero_tails=zero_tails, timeout_s=timeout_s
        ) as transfer:
            await transfer.send_rest()
        return transfer.stats

    async def send_groups(
        self, snapshots: SnapshotGroups, *, key: str | None = None, timeout_s: float | None = None
    ) -> dict[str, TransferStats]:
        """Pushes the snapshots of all cache groups of a hybrid model, each into the peer's group with the same layers.

        Nothing moves before every group has its grant. The peer gets one arrival for each group, all with ``key``.

        Args:
            snapshots, key, timeout_s: as of `send`.

        Raises:
            HurrayError: as `send`; the groups that were not complete are aborted.
        """
        name = key if key is not None else uuid.uuid4().hex
        async with contextlib.AsyncExitStack() as ending:
            transfers = {
                group: await ending.enter_async_context(self.begin(snapshot, key=name, timeout_s=timeout_s))
                for group, snapshot in snapshots.items()
            }
            for transfer in transfers.values():
                await transfer.send_rest()
        return {group: transfer.stats for group, transfer in transfers.items()}

    def begin(
        self,
        snapshot: Snapshot,
        *,
        key: str | None = None,
        page_keys: NDArray[np.uint8] | None = None,
        zero_tails: bool = False,
        timeout_s: float | None = None,
    ) -> Transfer:
        """A transfer to be sent layer by layer, while later layers are still being computed; arguments as of `send`."""
        return Transfer(
            self,
            snapshot,
            key if key is not None else uuid.uuid4().hex,
            page_keys=page_keys,
            zero_tails=zero_tails,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
        )

    @property
    def lanes(self) -> LaneReport:
        """The UCX lanes of the connection."""
        return self._open_endpoint().lanes

    @property
    def lane(self) -> str:
        """The UCX transport that carries pages: ``sysv``, ``cma``, ``tcp``, ``tcp (emulated)`` ..."""
        return self._first_memory().lane

    @property
    def path(self) -> str:
        """``mapped`` (stores into the peer's memory) or ``put`` (``ucp_put_nbx``)."""
        return self._first_memory().path.value

    # What a transfer needs of it.

    @property
    def movers(self) -> ThreadPoolExecutor:
        return self._movers

    @property
    def session(self) -> ClientSession:
        session = self._open_channel().session
        assert isinstance(session, ClientSession)
        return session

    def notify(self) -> None:
        if self._channel is not None:
            self._channel.notify()

    def dialect(self) -> Dialect:
        return Dialect(self._peer_info().dialect)

    def pool_for(self, spec: CacheSpec) -> RemotePool:
        self._raise_if_lost()
        if self._closing is not None:
            raise PeerLostError(f"the connection to {self.address} was closed here")
        if not self._pools:
            raise PeerLostError(f"{self.address} has no pool to receive into (any more)")
        if len(self._pools) == 1:
            return next(iter(self._pools.values()))
        for remote in self._pools.values():
            theirs = remote.layout.spec
            if theirs.layer_indices == spec.layer_indices and set(theirs.roles) == set(spec.roles):
                return remote
        raise GeometryError(
            f"the receiving side has groups with layers {[r.layout.spec.layer_indices for r in self._pools.values()]}",
            field="layers",
            value=spec.layer_indices,
        )

    def zeros(self, nbytes: int) -> Region:
        if self._zeros is None or self._zeros.nbytes < nbytes:
            self._zeros = self._context.allocate(nbytes)
        return self._zeros

    def register(self, transfer_id: int, transfer: Transfer) -> None:
        self._transfers[transfer_id] = transfer

    def forget(self, transfer_id: int) -> None:
        self._transfers.pop(transfer_id, None)

    def _handle(self, event: Event) -> None:
        match event:
            case SessionOpened():
                pass
            case PoolAnnounced(pool=pool):
                self._hear_pool(pool)
            case PoolRemoved(pool_id=pool_id):
                self._announced.pop(pool_id, None)
                self._drop_pool(pool_id)
            case Granted(transfer_id=transfer_id, grant=grant):
                if transfer_id in self._transfers:
                    self._transfers[transfer_id].granted(grant)
            case Acknowledged(transfer_id=transfer_id):
                if transfer_id in self._transfers:
                    self._transfers[transfer_id].acknowledged()
            case (
                Refused(transfer_id=transfer_id, error=error)
                | TransferFailed(transfer_id=transfer_id, error=error)
                | AbortRequested(transfer_id=transfer_id, error=error)
            ):
                if transfer_id in self._transfers:
                    self._transfers[transfer_id].ended_by_peer(error)
            case SessionClosed(error=error):
                self._error = error or PeerLostError(f"the session with {self.address} was closed")
                self._ready.set()
            case _:
                pass

    def _hear_pool(self, pool: Pool) -> None:
        try:
            self._announced[pool.pool_id] = pool, announced_layout(pool)
            if self._endpoint is not None:
                self._open_pool(pool.pool_id)
        except HurrayError as error:
            self._error = error
        if pool.pool_id == 0 or self._error is not None:  # pool 0 is announced last
            self._ready.set()

    def _open_pool(self, pool_id: int) -> None:
        self._drop_pool(pool_id)
        endpoint, (pool, layout) = self._open_endpoint(), self._announced[pool_id]
        memories = tuple(
            endpoint.open_region(RemoteRegion(remote_addr=r.remote_addr, nbytes=r.nbytes, rkey=r.rkey))
            for r in pool.regions
        )
        self._pools[pool_id] = RemotePool(pool, layout, memories)

    def _drop_pool(self, pool_id: int) -> None:
        old = self._pools.pop(pool_id, None)
        for memory in old.memories if old is not None else ():
            memory.close()

    def _first_memory(self) -> RemoteMemory:
        self._raise_if_lost()
        if not self._pools:
            raise PeerLostError(f"{self.address} has no pool to receive into (any more)")
        return next(iter(self._pools.values())).memories[0]

    def _peer_info(self) -> PeerInfo:
        info = self.session.peer
        if info is None:
            raise PeerLostError(f"the session with {self.address} is not open")
        return info

    def _open_channel(self) -> Channel:
        if self._channel is None:
            raise PeerLostError(f"the connection to {self.address} is not open", fix="Use it within `async with`")
        return self._channel

    def _open_endpoint(self) -> Endpoint:
        if self._endpoint is None:
            raise TransportError(f"the connection to {self.address} is not open", fix="Use it within `async with`")
        return self._endpoint

    def _raise_if_lost(self) -> None:
        if isinstance(self._error, PeerLostError):
            raise PeerLostError(f"the session with {self.address} has ended: {self._error}") from self._error
        if self._error is not None:
            raise self._error
