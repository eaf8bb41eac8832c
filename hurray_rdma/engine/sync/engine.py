"""The blocking engine: owns the thread that the asynchronous one runs on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import PagePool, PoolGroups, Snapshot
from hurray_rdma.control import Tls
from hurray_rdma.engine import engine as asynchronous
from hurray_rdma.engine.marks import mark_of
from hurray_rdma.engine.placement import Placement
from hurray_rdma.engine.shortages import Shortage
from hurray_rdma.engine.stats import EngineStats
from hurray_rdma.engine.sync.arrival import Arrival
from hurray_rdma.engine.sync.peer import Peer
from hurray_rdma.engine.sync.thread import EngineThread, on_loop
from hurray_rdma.engine.sync.transfer import OpenTransfers
from hurray_rdma.errors import TransferAbortedError
from hurray_rdma.transport import Context

__all__ = ["Engine"]

T = TypeVar("T")


class Engine:
    """`hurray_rdma.Engine` for callers without asyncio: a context manager, whose methods any thread may call.

    It runs in one thread of its own, which ends with it. Leaving one open at the interpreter's exit closes it, with a
    `ResourceWarning`; in a forked child it refuses calls.

    Args, Raises: as of `hurray_rdma.Engine`.
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
        self._engine = asynchronous.Engine(
            pool,
            listen=listen,
            name=name,
            token=token,
            tls=tls,
            timeout_s=timeout_s,
            lease_s=lease_s,
            max_transfer_s=max_transfer_s,
            peer_timeout_s=peer_timeout_s,
            ahead_pages=ahead_pages,
            allow_unauthenticated=allow_unauthenticated,
            context=context,
        )
        self.pool = pool
        self.name = self._engine.name
        self._transfers: OpenTransfers = set()
        self._thread = EngineThread(self.name, at_end=self._end)

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """As of `hurray_rdma.Engine.start`; starts the thread. Once in its life."""
        self._thread.start()
        try:
            self._thread.run(self._engine.start())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """As of `hurray_rdma.Engine.close`; calls under way on other threads raise `TransferAbortedError` first, each
        when nothing of it is in flight any more. Waits for the thread's end."""
        self._thread.stop()

    async def _end(self) -> None:
        async with contextlib.AsyncExitStack() as steps:
            steps.push_async_callback(self._engine.close)
            for transfer in self._transfers:
                steps.push_async_callback(transfer.abort, "its engine is being closed")

    @property
    def address(self) -> str:
        """As of `hurray_rdma.Engine.address`."""
        return self._engine.address

    def connect(self, address: str, *, timeout_s: float | None = None) -> Peer:
        """As of `hurray_rdma.Engine.connect`, to be entered with ``with``."""
        return Peer(self._engine.connect(address, timeout_s=timeout_s), self._thread, self._transfers)

    def arrivals(self) -> Iterator[Arrival]:
        """As of `hurray_rdma.Engine.arrivals`: ends when the engine closes, on whatever thread. Each arrival is yielded
        once: to share them among threads, iterate on one and hand over."""
        arrivals = self._engine.arrivals()

        async def following() -> Arrival | None:
            arrival = await anext(arrivals, None)
            return Arrival(arrival, self._thread) if arrival is not None else None

        return self._each(following, undo=_release)

    def shortages(self) -> Iterator[Shortage]:
        """As of `hurray_rdma.Engine.shortages`: ends when the engine closes."""
        shortages = self._engine.shortages()

        async def following() -> Shortage | None:
            return await anext(shortages, None)

        return self._each(following)

    def num_missing(self, pool: PagePool | None = None) -> int:
        """As of `hurray_rdma.Engine.num_missing`."""
        return self._engine.num_missing(pool)

    def _each(
        self, following: Callable[[], Coroutine[Any, Any, T | None]], *, undo: Callable[[T | None], None] | None = None
    ) -> Iterator[T]:
        while True:
            try:
                one = self._thread.run(following(), undo=undo)
            except TransferAbortedError:  # the engine closes
                return
            if one is None:
                return
            yield one

    def add_pool(self, pool: PagePool, *, name: str, token: str | None = None) -> None:
        """As of `hurray_rdma.Engine.add_pool`."""
        self._thread.run(on_loop(lambda: self._engine.add_pool(pool, name=name, token=token)))

    def remove_pool(self, name: str) -> None:
        """As of `hurray_rdma.Engine.remove_pool`."""
        self._thread.run(on_loop(self._engine.remove_pool, name))

    def reregister(self, name: str = "", *, timeout_s: float | None = None) -> None:
        """As of `hurray_rdma.Engine.reregister`."""
        self._thread.run(self._engine.reregister(name, timeout_s=timeout_s))

    def let_offers_wait(self, pool: PagePool | None = None) -> None:
        """As of `hurray_rdma.Engine.let_offers_wait`."""
        self._thread.run(on_loop(self._engine.let_offers_wait, pool))

    def expect(self, key: str, placement: Placement) -> None:
        """As of `hurray_rdma.Engine.expect`."""
        self._thread.run(on_loop(self._engine.expect, key, placement))

    def unexpect(self, key: str, pool: PagePool | None = None) -> bool:
        """As of `hurray_rdma.Engine.unexpect`."""
        return self._thread.run(on_loop(self._engine.unexpect, key, pool))

    def receive(
        self, key: str, placement: Placement, *, timeout_s: float | None = None, wait_s: float | None = None
    ) -> Arrival:
        """As of `hurray_rdma.Engine.receive`."""
        return self._thread.run(self._receive(key, placement, timeout_s, wait_s), undo=_release)

    def receive_async(
        self, key: str, placement: Placement, *, timeout_s: float | None = None, wait_s: float | None = None
    ) -> Future[Arrival]:
        """`receive` that returns at once; the future is as of `Peer.send_async`. Release what it brings, also when it
        comes in spite of a ``cancel``."""
        return self._thread.submit(self._receive(key, placement, timeout_s, wait_s))

    async def _receive(self, key: str, placement: Placement, timeout_s: float | None, wait_s: float | None) -> Arrival:
        come = await self._engine.receive(key, placement, timeout_s=timeout_s, wait_s=wait_s)
        return Arrival(come, self._thread)

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
        """As of `hurray_rdma.Engine.publish`; ``on_end`` is called on the engine's thread, which must not wait. With a
        ``stream`` this thread may block on it, and hears itself what CUDA says."""
        publish, mark = self._engine.publish, mark_of(snapshot.pool, stream)
        self._thread.run(
            on_loop(
                lambda: publish(
                    key,
                    snapshot,
                    page_keys=page_keys,
                    stream=mark,
                    lease_s=lease_s,
                    max_readers=max_readers,
                    on_end=on_end,
                )
            )
        )

    def unpublish(self, key: str) -> bool:
        """As of `hurray_rdma.Engine.unpublish`."""
        return self._thread.run(on_loop(self._engine.unpublish, key))

    def stats(self) -> EngineStats:
        """As of `hurray_rdma.Engine.stats`; also when it is closed."""
        return self._engine.stats()


def _release(arrival: Arrival | None) -> None:
    if arrival is not None:
        arrival.release()
