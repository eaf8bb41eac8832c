"""Another engine, from the connecting side: connects, connects again when the session was lost, and sends."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import CacheSpec, PagePool, Snapshot, SnapshotGroups
from hurray_rdma.control import MAX_QUIET_SESSIONS, ErrorCode, parse_address
from hurray_rdma.engine.compat import check_context
from hurray_rdma.engine.connection import Connection, Surroundings
from hurray_rdma.engine.fetching import FetchedSnapshot, Fetching
from hurray_rdma.engine.marks import marked
from hurray_rdma.engine.placement import Placement
from hurray_rdma.engine.stats import TransferStats
from hurray_rdma.engine.telling import Telling
from hurray_rdma.engine.transfer import Transfer
from hurray_rdma.engine.whole_push import WholePush
from hurray_rdma.errors import DeadlineExceededError, PeerLostError, TransportError
from hurray_rdma.transport import LaneReport

__all__ = ["Peer"]


class Peer:
    """Another engine that takes snapshots. Made by `Engine.connect`; an async context manager.

    Entering connects both channels and hears of the peer's pools, within ``timeout_s``. When the session breaks, what
    was under way fails with `PeerLostError`, and the next transfer connects anew: to the same process, or to another
    that listens at the address by then.
    """

    def __init__(
        self,
        address: str,
        *,
        surroundings: Surroundings,
        pool_for: Callable[[CacheSpec, str], PagePool],
        timeout_s: float,
        on_closed: Callable[[Peer], None],
    ) -> None:
        parse_address(address)
        self.address = address
        """As given to `Engine.connect`."""
        self._surroundings = surroundings
        self._pool_for = pool_for
        self._timeout_s = timeout_s
        self._on_closed = on_closed
        self._connection: Connection | None = None
        self._reconnecting = asyncio.Lock()
        self._quiet_sessions: dict[bytes, None] = {}
        self._opening: asyncio.Task[None] | None = None
        self._endings: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None

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
            AuthenticationError: the token or the certificate is not what the peer asks for.
            DeadlineExceededError: no answer in time.
        """
        try:
            await self._connected(time.monotonic() + self._timeout_s)
        except BaseException:
            await self.close()
            raise

    async def _connected(self, deadline: float) -> Connection:
        """The connection; a new one if the last was lost."""
        connection = self._connection
        if connection is not None and not connection.lost:
            await connection.open_pools(deadline)
            if not connection.lost:
                return connection
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._reconnecting.acquire()
        except TimeoutError:
            raise DeadlineExceededError(
                f"{self.address} did not answer in time", field="timeout_s", value=self._timeout_s
            ) from None
        try:
            if self._closing is not None:
                raise PeerLostError(f"the connection to {self.address} was closed here")
            old = self._connection
            if old is None or old.lost:
                if old is not None:
                    self._end(old)
                await self._ended(deadline)
                try:
                    await self._reconnect(deadline)
                except (PeerLostError, DeadlineExceededError) as error:
                    if old is None or old.error is None:
                        raise
                    rule = f"{error.rule}; the session before was lost: {old.error.rule}"
                    fix = error.fix if isinstance(error, PeerLostError) else old.error.fix  # it listens, and is stuck
                    raise type(error)(rule, field=error.field, value=error.value, fix=fix) from error
                if old is not None:
                    self._surroundings.tally.reconnected()
            assert self._connection is not None
            await self._connection.open_pools(deadline)
            return self._connection
        finally:
            self._reconnecting.release()

    async def _reconnect(self, deadline: float) -> None:
        async def opening() -> None:
            connection = Connection(
                self.address,
                self._surroundings,
                quiet_sessions=tuple(self._quiet_sessions),
                on_lost=self._end,
            )
            await connection.open(deadline)
            self._connection = connection  # in the same step, so that whoever ends this task finds it

        self._opening = asyncio.create_task(opening())
        try:
            await self._opening
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if own is not None and own.cancelling():
                raise
            raise PeerLostError(f"the connection to {self.address} was closed here") from None

    def _end(self, connection: Connection) -> None:
        task = asyncio.create_task(self._close_connection(connection))
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _close_connection(self, connection: Connection) -> None:
        await connection.close()
        if connection.quiet:
            self._quiet_sessions[connection.session_id] = None
            while len(self._quiet_sessions) > MAX_QUIET_SESSIONS:
                del self._quiet_sessions[next(iter(self._quiet_sessions))]

    async def _ended(self, deadline: float) -> None:
        """Earlier connections are closed, so that the peer can be told which of them are quiet."""
        if self._endings:
            await asyncio.wait(self._endings, timeout=deadline - time.monotonic())

    async def close(self) -> None:
        """Ends the transfers under way and both channels. Idempotent; goes on when the caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        if self._connection is not None:
            self._end(self._connection)
        while self._endings:
            await asyncio.wait(self._endings)
        self._on_closed(self)

    async def send(
        self,
        snapshot: Snapshot,
        *,
        key: str | None = None,
        pool: str | None = None,
        page_keys: NDArray[np.uint8] | None = None,
        zero_tails: bool = False,
        stream: Any = None,
        timeout_s: float | None = None,
    ) -> TransferStats:
        """Pushes a whole snapshot: each physical page once, straight into the peer's pool.

        Args:
            snapshot: its pages must stay as they are until this returns; leases of them last at least as long.
            key: a name for the peer's application; None makes one. Senders that hold slices of the heads of one
                snapshot use the same key: their offers become one arrival.
            pool: the peer's pool of that name (`Engine.add_pool`), on whatever device; None is the first that has the
                same layers, on the same kind of device.
            page_keys: a key of its content for each table entry, uint8 ``[len(block_table), key_nbytes]``, as
                `hurray_rdma.cache.snapshot_keys` makes them; pages that the peer holds under the same key are not sent.
            zero_tails: slots past the valid tokens of a page arrive as zeros; else they are undefined. For transfers
                across a trust boundary.
            stream: the CUDA stream (of CuPy, torch or cuda.core, or its handle) on which the pages are computed: they
                are moved once what is queued on it by now has run. None is: they hold their content already.
            timeout_s: budget for everything, the wait for free pages included; None is the engine's.

        Raises:
            GeometryError: the peer's pool cannot take it; nothing was sent.
            PoolExhaustedError: it never fits into the peer's pool; nothing was sent.
            DeadlineExceededError, TransferAbortedError, PeerLostError, TransportError: the pages of the snapshot may be
                used again; bytes on their way may still arrive, and the peer keeps its pages until they cannot.
        """
        started = time.monotonic()
        budget_s = self._timeout_s if timeout_s is None else timeout_s
        name = key if key is not None else uuid.uuid4().hex
        check_context(snapshot.pool, self._surroundings.context)
        mark = None if stream is None else await marked(snapshot.pool, stream, timeout_s=budget_s)
        may_be_lost = True
        try:
            ready = mark is None or mark.has_passed()
        except TransportError as error:
            self._surroundings.tally.failed("send", error)
            raise
        connection = self._usable() if ready and page_keys is None else None
        if connection is not None and connection.opens_pools:
            await connection.open_pools(started + budget_s)
            connection = self._usable()
        if connection is not None:
            stats = await connection.ahead.send(
                snapshot, name, pool=pool, zero_tails=zero_tails, started=started, timeout_s=budget_s
            )
            if stats is not None:
                return stats
            push = None
            if not zero_tails:
                push = self._whole_push(connection, snapshot, name, pool=pool, started=started, timeout_s=budget_s)
            if push is not None:
                if (stats := await push.send()) is not None:
                    return stats
                may_be_lost = not push.was_lost
        transfer = self.begin(
            snapshot,
            key=name,
            pool=pool,
            page_keys=page_keys,
            zero_tails=zero_tails,
            stream=mark,
            timeout_s=budget_s - (time.monotonic() - started),
        )
        transfer.may_be_lost = may_be_lost
        async with transfer:
            await transfer.send_rest()
        return transfer.stats

    def _usable(self) -> Connection | None:
        """The connection, unless there is none yet or it was lost."""
        connection = self._connection
        return None if connection is None or connection.lost else connection

    def _whole_push(
        self, route: Connection, snapshot: Snapshot, key: str, *, pool: str | None, started: float, timeout_s: float
    ) -> WholePush | None:
        """None where that is not possible. Arguments as of `send`, of which ``started`` is when ``timeout_s`` began."""
        pair = route.ahead.pair_of(snapshot.pool, pool)
        if pair is None or pair.whole is None:
            return None
        if pair.max_at_once is not None and len(snapshot.block_table) > pair.max_at_once:
            return None
        return WholePush(
            route,
            pair.remote,
            snapshot,
            key,
            form=pair.form,
            whole=pair.whole,
            started=started,
            timeout_s=timeout_s,
            tally=self._surroundings.tally,
        )

    async def send_groups(
        self,
        snapshots: SnapshotGroups,
        *,
        key: str | None = None,
        stream: Any = None,
        timeout_s: float | None = None,
    ) -> dict[str, TransferStats]:
        """Pushes the snapshots of all cache groups of a hybrid model, each into the peer's group with the same layers.

        Nothing moves before every group has its grant. The peer gets one arrival for each group, all with ``key``.

        Args:
            snapshots, key, stream, timeout_s: as of `send`.

        Raises:
            HurrayError: as `send`; the groups that were not complete are aborted.
        """
        name = key if key is not None else uuid.uuid4().hex
        budget_s = self._timeout_s if timeout_s is None else timeout_s
        marks = {
            group: await marked(snapshot.pool, stream, timeout_s=budget_s) for group, snapshot in snapshots.items()
        }
        async with contextlib.AsyncExitStack() as ending:
            transfers = {
                group: await ending.enter_async_context(
                    self.begin(snapshot, key=name, stream=marks[group], timeout_s=timeout_s)
                )
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
        pool: str | None = None,
        page_keys: NDArray[np.uint8] | None = None,
        zero_tails: bool = False,
        stream: Any = None,
        timeout_s: float | None = None,
    ) -> Transfer:
        """A transfer to be sent layer by layer, while later layers are still being computed; arguments as of `send`.

        ``stream`` is looked at whenever layers are sent: it is the one that they are computed on.
        """
        check_context(snapshot.pool, self._surroundings.context)
        return Transfer(
            self._connected,
            snapshot,
            key if key is not None else uuid.uuid4().hex,
            pool=pool,
            page_keys=page_keys,
            zero_tails=zero_tails,
            stream=stream,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            tally=self._surroundings.tally,
        )

    async def fetch(
        self, key: str, *, into: PagePool | Placement | None = None, timeout_s: float | None = None
    ) -> FetchedSnapshot:
        """Pulls a snapshot that the peer has published: one-sided reads into free pages of this engine, or frames on
        the control channel where UCX has no lane.

        It is complete, and was valid all the time: the peer confirms that its pages were under lease until the end.

        Args:
            key: as of `Engine.publish`.
            into: the pool that takes the pages, of the engine's context, on whatever device; None is the engine's own,
                on the same kind of device as the pages are. Or the very pages, chosen by the caller: a `Placement`.
            timeout_s: budget for everything, the wait for free pages included; None is the engine's.

        Raises:
            NotPublishedError: nothing is published under the key (any more).
            LeaseExpiredError: the time that was asked for ran out at the peer.
            GeometryError: the two pools cannot exchange pages, and why.
            PoolExhaustedError: it never fits into the pool.
            DeadlineExceededError, TransferAbortedError, PeerLostError, TransportError: no page stays leased. With a
                `Placement` it raises, and ends when cancelled, only when nothing can be written into its pages any
                more: that is later only where a stopped peer keeps a read over UCX's tcp from ending.
            ConfigError: the pool is external, and there is no `Placement`; or it is of another context.
            LeaseExpiredError: also where nobody holds a page of the `Placement`.
        """
        if into is not None:
            check_context(into.pool if isinstance(into, Placement) else into, self._surroundings.context)
        fetching = Fetching(
            self._connected,
            key,
            into=_pool_or_pages(into) if into is not None else self._pool_for,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            tally=self._surroundings.tally,
        )
        return await fetching.run()

    async def refresh(self, key: str, *, timeout_s: float | None = None) -> None:
        """Tells the peer that its published snapshot is still wanted: the publication's lease begins anew.

        For readers that have no pages for it yet. `fetch` does so, too.

        Args:
            key: as of `Engine.publish`.
            timeout_s: None is the engine's.

        Raises:
            NotPublishedError: nothing is published under the key (any more).
            HurrayError: the peer was not reached.
        """
        await self._tell(key, ErrorCode.UNREAD, timeout_s)

    async def decline(self, key: str, *, timeout_s: float | None = None) -> None:
        """Tells the peer that this engine needs nothing of its published snapshot, as one of the ``max_readers`` of
        `Engine.publish`: where it was the last of them, the peer has its pages back at once.

        For readers whose pools do not fit, that have the pages already, or that gave up.

        Args, Raises: as of `refresh`.
        """
        await self._tell(key, ErrorCode.DECLINED, timeout_s)

    async def _tell(self, key: str, code: ErrorCode, timeout_s: float | None) -> None:
        await Telling(
            self._connected,
            key,
            code,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            tally=self._surroundings.tally,
        ).run()

    @property
    def connected(self) -> bool:
        """Whether a session is open now; if not, the next transfer opens one."""
        return self._connection is not None and not self._connection.lost

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of the peer's pools that this engine may send into; its own is ""."""
        return self._open_connection().pool_names

    @property
    def lanes(self) -> LaneReport | None:
        """The UCX lanes of the connection; None where UCX has none, and pages travel on the control channel."""
        return self._open_connection().lanes

    @property
    def lane(self) -> str:
        """What carries pages: a UCX transport, ``sysv``, ``cma``, ``tcp (emulated)``; or the ``control channel``."""
        return self._open_connection().first_reach()[0]

    @property
    def path(self) -> str:
        """``mapped`` (stores into the peer's memory), ``put`` (``ucp_put_nbx``), ``stream`` (a page stream), or
        ``frames`` (TENSOR_DATA)."""
        return self._open_connection().first_reach()[1]

    def _open_connection(self) -> Connection:
        if self._connection is None or self._closing is not None:
            raise PeerLostError(f"the connection to {self.address} is not open", fix="Use it within `async with`")
        return self._connection


def _pool_or_pages(into: PagePool | Placement) -> Callable[[CacheSpec, str], PagePool] | Placement:
    return into if isinstance(into, Placement) else lambda *_: into
