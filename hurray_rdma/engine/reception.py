"""The listening side of an engine: who has connected, which pools they may write into, and who can write no more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from dataclasses import replace

from hurray_rdma.cache import PageAccounts, PagePool
from hurray_rdma.control import (
    MAX_POOLS,
    Channel,
    Committed,
    DescriptorsEnded,
    Event,
    EventHandler,
    Fetched,
    Listener,
    Offered,
    PeerBusyError,
    Pool,
    Prepared,
    Reserved,
    ServerSession,
    SessionClosed,
    SessionConfig,
    SessionOpened,
    SSLContext,
    StaleGenerationError,
    TensorData,
    serve,
)
from hurray_rdma.engine.link import Link
from hurray_rdma.engine.publishing import Publishing
from hurray_rdma.engine.reach import Reach
from hurray_rdma.engine.receiver import Receiver
from hurray_rdma.engine.shortages import Shortages
from hurray_rdma.engine.tally import Tally
from hurray_rdma.engine.untaken import Untaken
from hurray_rdma.errors import ConfigError, HurrayError, PeerLostError, ProtocolError, TransportError
from hurray_rdma.transport import Context, Guest, PageStreamListener, Worker

__all__ = ["Reception"]

_log = logging.getLogger(__name__)

_MAX_SESSIONS = 1024
"""Of senders with a UCX worker of their own."""
_GOODBYE_S = 1.0
"""What senders have to say that they are quiet when the engine closes."""


class Reception:
    """Accepts senders and hands their events to the receiver of the pool that they are about.

    Senders that share this host's memory write through it, and all of them get the engine's UCX worker; into its queue
    of messages they put no pages of the host (`LaneReport.queued`). Any other gets a worker of its own: closing it when
    the session ends is what makes a late write over the network impossible.

    Args:
        context: of all pools.
        worker: the engine's.
        arrivals: where granted transfers go.
        shortages: told of offers that wait for pages.
        ahead_pages, lease_s, max_transfer_s, timeout_s: as of `Receiver`.
        tally: counts what happens.
    """

    def __init__(
        self,
        context: Context,
        worker: Worker,
        *,
        arrivals: Untaken,
        shortages: Shortages,
        ahead_pages: int,
        lease_s: float,
        max_transfer_s: float,
        timeout_s: float,
        tally: Tally,
    ) -> None:
        self._context = context
        self._worker = worker
        self._arrivals = arrivals
        self._shortages = shortages
        self._ahead_pages = ahead_pages
        self._lease_s = lease_s
        self._max_transfer_s = max_transfer_s
        self._timeout_s = timeout_s
        self._tally = tally
        self._tenants: dict[str, str] = {}
        self._receivers: dict[str, Receiver] = {}
        self._removed: list[Receiver] = []
        self._num_pools = 0
        self._token: str | None = None
        self.publishing = Publishing(
            self._receiver_of, max_lease_s=max(lease_s, timeout_s), max_transfer_s=max_transfer_s, tally=tally
        )
        self._listener: Listener | None = None
        self._links: dict[Link, Channel] = {}
        self._owing: set[Link] = set()
        self._own_workers: dict[bytes, Worker] = {}
        self._streams: PageStreamListener | None = None
        self._guests: dict[bytes, Guest] = {}
        """Of sessions that are about to open, by their tickets."""
        self._num_opening = 0
        self._opening = asyncio.Lock()
        """UCX makes one at a time: those that wait for their turn keep no thread."""
        self._endings: set[asyncio.Task[None]] = set()

    async def listen(
        self,
        host: str,
        port: int,
        config: SessionConfig,
        *,
        ssl_context: SSLContext | None,
        allow_unauthenticated: bool,
    ) -> None:
        """Accepts senders from now on; pools that exist before are announced first.

        Raises:
            ConfigError: as of `control.serve`.
        """
        self._token = config.token
        for receiver in self._receivers.values():
            await receiver.adopt()
        self._listener = await serve(
            host,
            port,
            replace(config, tenants=self._tenants, worker_address=None),
            on_session=self._accept,
            address_for=self._worker_address,
            ssl_context=ssl_context,
            allow_unauthenticated=allow_unauthenticated,
        )
        self._listen_for_streams()

    def _listen_for_streams(self) -> None:
        """Page streams come to a port of their own; without one, what they are for goes UCX's way."""
        assert self._listener is not None
        loop = asyncio.get_running_loop()

        def ended(guest: Guest, error: HurrayError | None) -> None:
            loop.call_soon_threadsafe(self._stream_ended, guest, error)

        hosts = dict.fromkeys(address.host for address in self._listener.addresses)
        try:
            self._streams = PageStreamListener(hosts, on_end=ended)
        except TransportError as error:
            _log.warning("senders over tcp are left to UCX: %s", error)

    async def close(self) -> None:
        """Ends all sessions and what they had under way."""
        async with contextlib.AsyncExitStack() as steps:
            if self._streams is not None:
                steps.push_async_callback(asyncio.to_thread, self._streams.close)
            steps.push_async_callback(self._finish)
            steps.push_async_callback(self.publishing.close)
            for channel in list(self._links.values()):
                steps.push_async_callback(channel.close)
            steps.push_async_callback(self._say_goodbye)
            if self._listener is not None:
                steps.push_async_callback(self._listener.close)

    async def _say_goodbye(self) -> None:
        """Ends what is under way while senders can still answer that they are quiet, so that no page stays behind."""
        for receiver in self._all():
            receiver.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(self._lease_s, _GOODBYE_S)):
                for receiver in self._all():
                    await receiver.wait_idle()

    async def _finish(self) -> None:
        while self._endings:
            await asyncio.wait(self._endings)
        for link in self._owing:
            link.close()

    # What it holds.

    @property
    def address(self) -> str:
        """``host:port`` as it listens."""
        assert self._listener is not None
        return str(self._listener.addresses[0])

    @property
    def num_sessions(self) -> int:
        """Senders that are connected."""
        return len(self._links)

    @property
    def num_waiting(self) -> int:
        """Offers that wait for pages."""
        return sum(receiver.num_waiting for receiver in self._all())

    @property
    def num_arriving(self) -> int:
        """Arrivals under way."""
        return sum(len(receiver.granted) for receiver in self._all())

    def accounts(self) -> dict[str, PageAccounts]:
        """Where the pages of each pool are, by its name."""
        return {name or "default": each.pool.allocator.accounts() for name, each in list(self._receivers.items())}

    def generations(self) -> dict[str, int]:
        """Generation of each pool's registration, by its name."""
        return {name or "default": each.generation for name, each in list(self._receivers.items())}

    # Pools.

    def add_pool(self, pool: PagePool, *, name: str, token: str | None) -> None:
        """Receives into a further pool; see `Engine.add_pool`.

        Raises:
            ConfigError: the name or the token is taken, or peers can hear of no more pools.
        """
        taken = [each or "default" for each in self._receivers]  # as stats call them
        if name in taken or (not name and self._num_pools):
            raise ConfigError(f"must be none of {sorted(taken)}, and not empty", field="name", value=name)
        Pool(pool_id=self._num_pools, generation=1, name=name, removed=True)  # its rule for names
        # Not its name: who connected with the token of a pool that was removed has nothing in a later one of that name.
        tenant = f"pool {self._num_pools}" if token is not None else ""
        if token is not None and (not token or token == self._token or token in self._tenants.values()):
            raise ConfigError(f"pool {name!r} needs a token that no other pool and not the engine has")
        num_alike = sum(each.tenant == tenant for each in self._receivers.values())
        if num_alike >= MAX_POOLS:
            raise ConfigError(
                f"must be at most {MAX_POOLS} that the same peers hear of",
                field="number of pools",
                value=num_alike + 1,
                fix="Remove one that nobody uses (Engine.remove_pool), or receive into it with another engine",
            )
        receiver = Receiver(
            pool,
            pool_id=self._num_pools,
            name=name,
            tenant=tenant,
            arrivals=self._arrivals,
            shortages=self._shortages,
            ahead_pages=self._ahead_pages,
            lease_s=self._lease_s,
            max_transfer_s=self._max_transfer_s,
            timeout_s=self._timeout_s,
            tally=self._tally,
            on_resume=self.publishing.look_again,
        )
        if token is not None:
            self._tenants[tenant] = token
        self._num_pools += 1
        self._receivers[name] = receiver
        for link in list(self._links):  # one that cannot be told is cut off
            receiver.announce(link)

    def remove_pool(self, name: str) -> None:
        """Takes no more transfers into a pool; see `Engine.remove_pool`.

        Raises:
            ConfigError: there is no such pool.
        """
        receiver = self._named(name)
        del self._receivers[name]
        self._tenants.pop(receiver.tenant, None)
        for link in list(self._links):  # one that cannot be told is cut off
            receiver.announce(link, removed=True)
        receiver.close("the pool was removed")
        self.publishing.revoke(receiver.pool, StaleGenerationError(f"pool {name!r} was removed"))
        self._removed.append(receiver)

    async def reregister(self, name: str, *, timeout_s: float) -> None:
        """Registers a pool anew; see `Engine.reregister`.

        Raises:
            ConfigError: there is no such pool.
            DeadlineExceededError: nothing was done.
            RegistrationError, TransportError: as of `Engine.reregister`.
        """
        receiver, deadline = self._named(name), time.monotonic() + timeout_s
        await receiver.settle(timeout_s)
        # Nobody may be granted pages before it is over, also when the caller is cancelled.
        await asyncio.shield(self._start(self._renew(receiver, max(0.0, deadline - time.monotonic()))))

    async def _renew(self, receiver: Receiver, timeout_s: float) -> None:
        try:
            self.publishing.revoke(receiver.pool, StaleGenerationError("the pool is being registered anew"))
            regions = receiver.pool.regions
            before = [region.num_renewals for region in regions]
            try:
                await asyncio.to_thread(receiver.pool.renew, timeout_s=timeout_s)
            finally:
                # Where it fails half-way, peers must hear of the new rkeys, and have old ones of the rest.
                renewed = [region.num_renewals > count for region, count in zip(regions, before, strict=True)]
                if any(renewed):
                    receiver.renewed(list(self._links), whole=all(renewed))
                    self._look_owing()
        finally:
            receiver.resume()

    def check_pool(self, pool: PagePool) -> None:
        """Raises unless peers can hear of the pool.

        Raises:
            ConfigError: it is none of those received into.
        """
        if not any(receiver.pool is pool for receiver in self._receivers.values()):
            raise ConfigError(
                "is none of this engine's pools", field="snapshot.pool", value=pool, fix="Add it: Engine.add_pool"
            )

    def receiver_into(self, pool: PagePool) -> Receiver:
        """The receiver of a pool.

        Raises:
            ConfigError: it is none of those received into.
        """
        self.check_pool(pool)
        return next(receiver for receiver in self._receivers.values() if receiver.pool is pool)

    def _named(self, name: str) -> Receiver:
        try:
            return self._receivers[name]
        except KeyError:
            raise ConfigError(f"must be one of {sorted(self._receivers)}", field="name", value=name) from None

    # Sessions.

    async def _worker_address(self, session: ServerSession, host_id: bytes) -> bytes:
        """What a sender of that host is told to connect to."""
        if host_id == self._context.memory_domain:
            self._lend_stream(session)
            return self._worker.address
        num_sessions = len(self._links) + self._num_opening
        if num_sessions >= _MAX_SESSIONS:
            raise PeerBusyError("sessions are open already", field="sessions", value=num_sessions)
        self._num_opening += 1
        try:
            async with self._opening:
                _require_open(session)
                worker = await asyncio.to_thread(self._context.open_worker)
        finally:
            self._num_opening -= 1
        try:
            _require_open(session)
        except PeerLostError:
            await asyncio.to_thread(worker.close)
            raise
        self._own_workers[worker.address] = worker
        self._lend_stream(session)
        return worker.address

    def _lend_stream(self, session: ServerSession) -> None:
        """A ticket for a page stream, with what is said last before the session is open."""
        if self._streams is not None and not session.is_closed:
            guest = self._streams.expect()
            self._guests[guest.ticket] = guest
            session.lend_pages_port(self._streams.port, guest.ticket)

    def _stream_ended(self, guest: Guest, error: HurrayError | None) -> None:
        link = next((link for link in self._links if link.guest is guest), None)
        if link is not None and error is not None:  # one that was cut is the sender's to tell
            level = logging.WARNING if isinstance(error, ProtocolError) else logging.INFO
            link.log.log(level, "its connection for pages has ended: %s", error)
            if isinstance(error, ProtocolError):  # who does not keep to the rules there is not trusted here
                link.cut()

    def _accept(self, channel: Channel) -> EventHandler:
        """A sender has connected and may stay."""
        session = channel.session
        assert isinstance(session, ServerSession)
        own_worker = self._own_workers.pop(session.worker_address, None)
        guest = self._guests.pop(session.pages_ticket, None)
        link = Link(channel, own_worker=own_worker, guest=guest, ended=self._process_ended)
        self._links[link] = channel
        self._tally.connected()

        def handle(event: Event) -> None:
            match event:
                case SessionOpened():
                    self._hear_of_quiet(link)
                    for receiver in self._receivers.values():
                        receiver.announce(link)
                case Offered(transfer_id=transfer_id, offer=asked) | Reserved(transfer_id=transfer_id, reserve=asked):
                    meant = self._meant_by(asked.pool_id, link)
                    if meant is not None:
                        meant.handle(link, event)
                    else:
                        error = StaleGenerationError("there is no such pool", field="pool_id", value=asked.pool_id)
                        if isinstance(event, Offered):
                            self._tally.failed("receive", error)
                        link.log.bind(transfer=transfer_id).info("refused: %s", error)
                        link.session.refuse(transfer_id, error, now=link.now)
                case Fetched():
                    self.publishing.handle(link, event)
                case Prepared() | Committed() | DescriptorsEnded() | TensorData():  # of pushes only
                    for receiver in self._all():
                        receiver.handle(link, event)
                case SessionClosed(error=error, orderly=orderly):
                    for receiver in self._all():
                        receiver.handle(link, event)
                    self.publishing.handle(link, event)
                    self._tally.disconnected(None if orderly else error)
                    self._ended(link)
                case _:
                    for receiver in self._all():  # the one that knows the transfer
                        receiver.handle(link, event)
                    self.publishing.handle(link, event)

        return handle

    def _receiver_of(self, pool: PagePool, link: Link) -> Receiver | None:
        """The receiver of a pool, if the peer may know of it."""
        for receiver in self._receivers.values():
            if receiver.pool is pool and receiver.tenant == link.peer.tenant:
                return receiver
        return None

    def _meant_by(self, pool_id: int, link: Link) -> Receiver | None:
        """The receiver of a pool that the sender may know of."""
        for receiver in self._receivers.values():
            if receiver.pool_id == pool_id and receiver.tenant == link.peer.tenant:
                return receiver
        return None

    def _all(self) -> list[Receiver]:
        """Receivers of all pools, and of removed ones that are not done yet."""
        if self._removed:
            self._removed = [receiver for receiver in self._removed if receiver.busy]
        return [*self._receivers.values(), *self._removed]

    def _hear_of_quiet(self, link: Link) -> None:
        """The sender says of earlier sessions that nothing of them is in flight any more."""
        earlier = set(link.peer.quiet_sessions)
        for old, channel in list(self._links.items()):
            if old.peer.session_id in earlier and old.peer.tenant == link.peer.tenant:
                channel.abort()  # it has broken, and we have not noticed yet
        for old in [old for old in self._owing if old.peer.session_id in earlier]:
            if old.peer.tenant == link.peer.tenant:
                self._silenced(old, set(Reach))

    def _ended(self, link: Link) -> None:
        """A session has ended; what its sender posted before may still be on its way."""
        self._start(self._wait_closed(self._links.pop(link)))
        self._owing.add(link)
        if link.guest is not None and self._streams is not None:
            self._streams.dismiss(link.guest)
        if link.own_worker is not None:
            self._start(self._close_worker(link, link.own_worker))
        if link.process_ended:  # which may be known before the end of its connection is
            self._process_ended(link)
        self._look_owing()

    @staticmethod
    async def _wait_closed(channel: Channel) -> None:
        """Who has gone may leave its connection open for a moment: the engine outlives that."""
        with contextlib.suppress(Exception):  # whatever its handler raised is the listener's to tell
            await channel.wait_closed()

    async def _close_worker(self, link: Link, worker: Worker) -> None:
        await asyncio.to_thread(worker.close)
        link.own_worker = None
        # Memory and addresses of this host are out of reach for a process that cannot be seen here, whatever it says.
        by_messages = {Reach.SOCKET, Reach.KEY}
        self._silenced(link, by_messages if link.watched and not link.process_ended else set(Reach))

    def _process_ended(self, link: Link) -> None:
        self._start(self._drain(link))

    async def _drain(self, link: Link) -> None:
        """The process of a sender has ended; what it had sent as messages is put where it belongs, and that was all."""
        reaches = {Reach.MAPPING}
        if link.own_worker is None:  # else the closing of that one, which is under way, takes all of its messages along
            reaches |= {Reach.ADDRESS, Reach.SOCKET}
            if self._owes(link):
                await asyncio.to_thread(self._worker.drain)
        self._silenced(link, reaches)

    def _silenced(self, link: Link, reaches: set[Reach]) -> None:
        for receiver in self._all():
            receiver.silenced(link, reaches)
        self._look_owing()

    def _look_owing(self) -> None:
        """Who owes nothing any more need not be watched."""
        for link in [link for link in self._owing if not self._owes(link)]:
            self._owing.remove(link)
            link.close()

    def _owes(self, link: Link) -> bool:
        return any(receiver.owed_by(link) for receiver in self._all())

    def _start(self, ending: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(ending)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        return task


def _require_open(session: ServerSession) -> None:
    if session.is_closed:
        raise PeerLostError("the session was closed before it had a UCX worker")
