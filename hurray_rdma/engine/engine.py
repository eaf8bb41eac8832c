"""The engine: one per process, symmetric; it listens, connects, pushes and receives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import CacheSpec, PagePool, PoolGroups, Snapshot
from hurray_rdma.control import DeviceUnavailableError, SessionConfig, Tls, parse_address
from hurray_rdma.engine.arrival import Arrival
from hurray_rdma.engine.compat import check_context, same_kind, same_tensors
from hurray_rdma.engine.connection import Surroundings
from hurray_rdma.engine.marks import mark_soon
from hurray_rdma.engine.peer import Peer
from hurray_rdma.engine.placement import Placement
from hurray_rdma.engine.processes import process_id
from hurray_rdma.engine.receiving import receive
from hurray_rdma.engine.reception import Reception
from hurray_rdma.engine.settling import Settling
from hurray_rdma.engine.shortages import Shortage, Shortages
from hurray_rdma.engine.stats import EngineStats
from hurray_rdma.engine.tally import Tally
from hurray_rdma.engine.untaken import Untaken
from hurray_rdma.errors import ConfigError, GeometryError
from hurray_rdma.format import DeviceTag
from hurray_rdma.transport import Context, Worker

__all__ = ["Engine"]

_MAX_S = 7 * 86400.0
_HEARTBEATS_LOST = 20
"""A peer that is silent for so many heartbeats is lost."""


class Engine:
    """Sends snapshots of its pools, and receives into them. An async context manager; make it inside a running loop.

    Args:
        pool: source and destination of transfers, or the pools of a hybrid model's cache groups; stays the caller's,
            who closes it after the engine. `add_pool` takes further ones.
        listen: ``"host:port"`` to receive on, port 0 for any free one (see `address`); None only sends.
        name: shown to peers and in logs; None is ``host:pid``.
        token: shared secret of the engines; a connecting engine must have the listening one's.
        tls: certificates of the control channel; None is plain TCP.
        timeout_s: default budget of connects, sends and waits, seconds.
        lease_s: a sender that is silent for this long after its grant loses it, seconds; a reader what it reads, not
            before this engine's ``timeout_s``. Either keeps it alive for as long as its own ``timeout_s`` lasts,
            however long a layer is computed or pages are read, but not beyond ``max_transfer_s``.
        max_transfer_s: no transfer of a peer keeps pages of this engine for longer, whatever time the peer gave it and
            however busy it is, seconds: then it is ended.
        peer_timeout_s: a peer of which nothing is heard for this long is lost, seconds; it is pinged 20 times as often.
        ahead_pages: pages of each pool that senders may hold ready for small snapshots, all senders together: then a
            small send needs one control message each way. Up to as many again may be out that senders say they are
            copying into, which are held ready no more. All count as leased; they come back when an offer has to wait
            for pages, and when they were not used for ``lease_s``.
        allow_unauthenticated: listen beyond this host although neither a token nor client certificates are asked for:
            whoever reaches the port may write into the pool.
        context: UCX context; None is the pool's own, and no other will do.

    Raises:
        ConfigError: a setting is out of range, or a file of ``tls`` cannot be used.
    """

    def __init__(
        self,
        pool: PagePool | PoolGroups,
        *,
        listen: str | None = None,
        name: str | None = None,
        token: str | None = None,
        tls: Tls | None = None,
        timeout_s: float = 30.0,
        lease_s: float = 30.0,
        max_transfer_s: float = 3600.0,
        peer_timeout_s: float = 5.0,
        ahead_pages: int = 0,
        allow_unauthenticated: bool = False,
        context: Context | None = None,
    ) -> None:
        for field, value in (
            ("timeout_s", timeout_s),
            ("lease_s", lease_s),
            ("max_transfer_s", max_transfer_s),
            ("peer_timeout_s", peer_timeout_s),
        ):
            if not 0 < value <= _MAX_S:
                raise ConfigError(f"must be above 0 and at most {_MAX_S:.0f}", field=field, value=value)
        self.pool = pool
        self.name = name or f"{platform.node()}:{os.getpid()}"
        self._listen = parse_address(listen) if listen is not None else None
        self._token = token
        self._tls = tls
        self._client_tls = tls.client_context() if tls is not None else None
        self._timeout_s = timeout_s
        self._lease_s = lease_s
        self._max_transfer_s = max_transfer_s
        self._peer_timeout_s = peer_timeout_s
        if not 0 <= ahead_pages < 2**32:
            raise ConfigError("must be 0 or more", field="ahead_pages", value=ahead_pages)
        self._ahead_pages = ahead_pages
        self._allow_unauthenticated = allow_unauthenticated
        pools: dict[str, PagePool] = {"": pool} if isinstance(pool, PagePool) else dict(pool.items())
        regions = [region for each in pools.values() for region in each.regions]
        self._context = regions[0].context if context is None else context
        for each in pools.values():
            check_context(each, self._context)
        self._own_pools = pools
        self._tally = Tally()
        self._worker: Worker | None = None
        self._settling = Settling()
        self._reception: Reception | None = None
        self._arrivals = Untaken()
        self._shortages = Shortages()
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
        if self._worker is not None:
            raise ConfigError("the engine was started before", field="engine", value=self.name)
        self._worker = self._context.open_worker()
        if self._listen is None:
            return
        try:
            self._reception = Reception(
                self._context,
                self._worker,
                arrivals=self._arrivals,
                shortages=self._shortages,
                ahead_pages=self._ahead_pages,
                lease_s=self._lease_s,
                max_transfer_s=self._max_transfer_s,
                timeout_s=self._timeout_s,
                tally=self._tally,
            )
            for name, pool in self._own_pools.items():
                self._reception.add_pool(pool, name=name, token=None)
            await self._reception.listen(
                *self._listen,
                self._config(),
                ssl_context=self._tls.server_context() if self._tls is not None else None,
                allow_unauthenticated=self._allow_unauthenticated,
            )
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends arrivals and connections, then the UCX worker. Idempotent; goes on when the caller is cancelled.

        The pools stay open.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        # Last in, first out; each step runs, whatever the others raise.
        async with contextlib.AsyncExitStack() as steps:
            if self._worker is not None:
                steps.push_async_callback(self._close_worker, self._worker)
            steps.callback(self._end_arrivals)
            if self._reception is not None:
                steps.push_async_callback(self._reception.close)
            steps.push_async_callback(self._close_peers)

    async def _close_worker(self, worker: Worker) -> None:
        await self._settling.stop()
        await asyncio.to_thread(worker.close)
        self._settling.end()

    async def _close_peers(self) -> None:
        """Together: one that is stuck takes its time."""
        await asyncio.gather(*(peer.close() for peer in list(self._peers)))

    def _end_arrivals(self) -> None:
        """What nobody took goes back to the pool, and `arrivals` ends."""
        while not self._arrivals.empty():
            arrival = self._arrivals.get_nowait()
            if arrival is not None:
                arrival.release()
        self._arrivals.put_nowait(None)
        self._shortages.end()

    @property
    def address(self) -> str:
        """``"host:port"`` as it listens, the port filled in.

        Raises:
            ConfigError: it does not listen.
        """
        return self._receiving().address

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
        surroundings = Surroundings(
            config=self._config(),
            context=self._context,
            worker=self._worker,
            tally=self._tally,
            settling=self._settling,
            ssl_context=self._client_tls,
            server_name=self._tls.server_name if self._tls is not None else None,
        )
        peer = Peer(
            address,
            surroundings=surroundings,
            pool_for=self._pool_for,
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
        self._receiving()
        while (arrival := await self._arrivals.get()) is not None:
            yield arrival
        self._arrivals.put_nowait(None)  # for the next one who asks

    async def shortages(self) -> AsyncIterator[Shortage]:
        """Tells when offers wait for pages, for an application that keeps pages it could give back; ends when the
        engine closes.

        ::

            async for shortage in engine.shortages():
                cache.evict(shortage.num_missing)  # releases that many pages, or what it can

        Each time another offer has become the first that waits, and when pages came or went and it still does not fit;
        of what has changed since the last one only the newest is told, and nothing that is over. When pages come to be
        such as could be given back, ask `num_missing`: nobody but the application knows of that moment.

        Raises:
            ConfigError: the engine does not listen.
        """
        self._receiving()
        async for shortage in self._shortages.follow():
            yield shortage

    def num_missing(self, pool: PagePool | None = None) -> int:
        """Pages that the offer that waits first lacks now, beside the free ones; 0 where none waits. On any thread.

        Args:
            pool: one of this engine's; None is its own, or the first of them.

        Raises:
            ConfigError: the engine does not listen, or the pool is none of its pools.
        """
        return self._receiving().receiver_into(self._own_pool(pool)).num_missing

    # Receive pools.

    def add_pool(self, pool: PagePool, *, name: str, token: str | None = None) -> None:
        """Receives into a further pool from now on; connected peers hear of it at once.

        Args:
            pool: stays the caller's, who closes it after `remove_pool`.
            name: what senders ask for (`Peer.send`), not used before.
            token: a secret of its own: then only peers that connect with it hear of the pool and may write into it,
                and of no other pool. None is the engine's token.

        Raises:
            ConfigError: the engine does not listen, the name or the token is taken, the pool is of another context, or
                there are 1024 already that the same peers hear of.
        """
        check_context(pool, self._context)
        self._receiving().add_pool(pool, name=name, token=token)

    def remove_pool(self, name: str) -> None:
        """Takes no more transfers into a pool; those under way are aborted, and connected peers hear of it.

        Arrivals that are complete keep their pages until they are released.

        Raises:
            ConfigError: there is no such pool.
        """
        self._receiving().remove_pool(name)

    async def reregister(self, name: str = "", *, timeout_s: float | None = None) -> None:
        """Registers a pool anew, under a new generation, in place: what any peer knew of it gives no access any more.

        Pages that are in quarantine because a sender fell silent come back, unless the kernel still lets that sender
        write by address (``cma`` into memory that the engine did not allocate): those come back when its process ends.
        Waits for transfers under way; offers wait meanwhile. Views of the pool stay as they are; nobody may write into
        it during the call.

        Args:
            name: of the pool; "" is the engine's own.
            timeout_s: for the wait; None is the engine's.

        Raises:
            ConfigError: there is no such pool.
            DeadlineExceededError: transfers are still under way; nothing was done.
            RegistrationError: UCX refuses. The pool is as it was; or some of its arrays are renewed, peers know of it,
                and another call renews the rest.
            TransportError: CUDA does not let go of page-locked memory; the same.
        """
        await self._receiving().reregister(name, timeout_s=self._timeout_s if timeout_s is None else timeout_s)

    def let_offers_wait(self, pool: PagePool | None = None) -> None:
        """From now on offers into a pool whose pages the application hands out wait, each within its sender's time,
        until their keys are expected (`expect`, `receive`). Before they are refused, since nobody might ever expect
        them.

        Args:
            pool: one of this engine's; None is its own, or the first of them.

        Raises:
            ConfigError: the engine does not listen, or the pool is none of its pools.
        """
        self._receiving().receiver_into(self._own_pool(pool)).let_offers_wait()

    def expect(self, key: str, placement: Placement) -> None:
        """Says which pages the snapshot goes into that somebody will push as ``key``, before or after it is offered.

        For pools whose pages the application hands out. Offers into an external pool (`PagePool.from_arrays`) are
        refused before the first call of this, or of `let_offers_wait`; after it they wait, each within its sender's
        time, until their keys are expected. The arrival comes by `arrivals`; see `Arrival.settled` for when the pages
        are free of it.

        Args:
            key: of one transfer; further senders of slices of the heads join it.
            placement: in one of this engine's pools; pages that are present are not sent.

        Raises:
            ConfigError: the engine does not listen, the pool is none of its pools, or the key is expected already.
        """
        self._receiving().receiver_into(placement.pool).expect(key, placement)

    def unexpect(self, key: str, pool: PagePool | None = None) -> bool:
        """Takes `expect` back; False if a sender has been granted the pages, or the key was not expected.

        Args:
            key: as of `expect`.
            pool: of the placement; None is the engine's own.

        Raises:
            ConfigError: the engine does not listen, or the pool is none of its pools.
        """
        return self._receiving().receiver_into(self._own_pool(pool)).unexpect(key)

    def _own_pool(self, pool: PagePool | None) -> PagePool:
        return next(iter(self._own_pools.values())) if pool is None else pool

    async def receive(
        self, key: str, placement: Placement, *, timeout_s: float | None = None, wait_s: float | None = None
    ) -> Arrival:
        """`expect` that waits for the arrival and until every page is in place; it does not come by `arrivals`.

        Release it. If this raises, or is cancelled, no sender can write into the pages any more.

        Args:
            key, placement: as of `expect`.
            timeout_s: for the offer and the pages; None is the engine's. The end of a transfer that is under way then
                takes its time.
            wait_s: for the offer alone, where its sender may be busy for long; ``timeout_s`` begins with it then.

        Raises:
            ConfigError: as of `expect`.
            DeadlineExceededError: nobody offered it, or its pages did not come, in time.
            HurrayError: the transfer failed or was aborted.
        """
        receiver = self._receiving().receiver_into(placement.pool)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return await receive(receiver, key, placement, timeout_s=timeout_s, wait_s=wait_s)

    # Pull.

    def publish(
        self,
        key: str,
        snapshot: Snapshot,
        *,
        page_keys: NDArray[np.uint8] | None = None,
        stream: Any = None,
        lease_s: float | None = None,
        max_readers: int | None = None,
        on_end: Callable[[str, int], None] | None = None,
    ) -> None:
        """Lets connected engines fetch a snapshot: its pages are leased until `unpublish`, or for ``lease_s`` after
        anybody last asked for it (`Peer.fetch`, `Peer.refresh`).

        A reader that has begun by then is let finish, within the time that it asked for, as long as it renews a lease
        of its own. With a ``stream`` the lease begins when what was queued has run.

        Args:
            key: what readers ask for.
            snapshot: over one of this engine's pools; its pages must keep their content while it is published.
            page_keys: as of `Peer.send`: pages that the reader holds under the same key are not read.
            stream: as of `Peer.send`: readers wait until what is queued on it by now has run. If CUDA refuses it, they
                hear so. Begin no capture of a graph on it right after.
            lease_s: None is the engine's.
            max_readers: it is taken back as soon as so many have read it to the end, or declined it (`Peer.decline`);
                None is any number.
            on_end: called on the engine's loop with the key and the number of those who have read it to the end, once
                it is taken back and nobody reads it any more: its pages may change from then on.

        Raises:
            ConfigError: the engine does not listen, the pool is none of its pools, the key is taken, a number is out of
                range, or ``stream`` is no stream.
            GeometryError: ``page_keys`` are not one for each entry of the block table.
        """
        self._receiving().check_pool(snapshot.pool)
        self._receiving().publishing.publish(
            key,
            snapshot,
            lease_s=self._lease_s if lease_s is None else lease_s,
            page_keys=page_keys,
            max_readers=max_readers,
            on_end=on_end,
            mark=mark_soon(snapshot.pool, stream),
        )

    def unpublish(self, key: str) -> bool:
        """Takes a published snapshot back; False if it was not there, or its lease had run out.

        Raises:
            ConfigError: the engine does not listen.
        """
        return self._receiving().publishing.unpublish(key)

    def _pool_for(self, spec: CacheSpec, device: str) -> PagePool:
        """The own pool that takes pages of a cache on a device."""
        pools = list(self._own_pools.values())
        fitting = pools if len(pools) == 1 else [pool for pool in pools if same_tensors(pool.spec, spec)]
        if not fitting:
            raise GeometryError(
                f"this engine has pools with layers {[pool.spec.layer_indices for pool in pools]}",
                field="layers",
                value=spec.layer_indices,
            )
        for pool in fitting:
            if same_kind(pool.device, device):
                return pool
        raise DeviceUnavailableError(
            f"this engine's pools for those layers are on {[pool.device for pool in fitting]}",
            field="device of the peer's pool",
            value=device,
            fix="Pages go to another kind of device only where that is asked for: fetch(..., into=pool)",
        )

    def stats(self) -> EngineStats:
        """What the engine has done so far, and what it holds now. May be called on any thread."""
        reception = self._reception
        return self._tally.stats(
            pools=reception.accounts()
            if reception is not None
            else {name or "default": pool.allocator.accounts() for name, pool in self._own_pools.items()},
            generations=reception.generations() if reception is not None else {},
            num_sessions=reception.num_sessions if reception is not None else 0,
            num_peers=sum(peer.connected for peer in list(self._peers)),
            num_waiting=reception.num_waiting if reception is not None else 0,
            num_arriving=reception.num_arriving if reception is not None else 0,
        )

    def _receiving(self) -> Reception:
        if self._reception is None:
            raise ConfigError("the engine does not listen", field="listen", value=None, fix="Pass listen='host:port'")
        return self._reception

    def _config(self) -> SessionConfig:
        return SessionConfig(
            engine_name=self.name,
            token=self._token,
            host_id=self._context.memory_domain,
            process_id=process_id(),
            worker_address=b"",
            devices=tuple(DeviceTag[kind.upper()] for kind in self._context.device_kinds),
            hello_timeout_s=self._timeout_s,
            heartbeat_s=self._peer_timeout_s / _HEARTBEATS_LOST,
            peer_timeout_s=self._peer_timeout_s,
        )
