"""Another engine, for callers that block, and for those that must not: futures beside the calls that wait."""

from __future__ import annotations

from concurrent.futures import Future
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import PagePool, Snapshot, SnapshotGroups
from hurray_rdma.engine import peer as asynchronous
from hurray_rdma.engine.fetching import FetchedSnapshot
from hurray_rdma.engine.placement import Placement
from hurray_rdma.engine.stats import TransferStats
from hurray_rdma.engine.sync.push import Push
from hurray_rdma.engine.sync.thread import EngineThread, on_loop
from hurray_rdma.engine.sync.transfer import OpenTransfers, Transfer
from hurray_rdma.transport import LaneReport

__all__ = ["Peer"]


class Peer:
    """`hurray_rdma.Peer` for callers without asyncio: a context manager, whose methods any thread may call."""

    def __init__(self, peer: asynchronous.Peer, thread: EngineThread, transfers: OpenTransfers) -> None:
        self._peer = peer
        self._thread = thread
        self._transfers = transfers
        self.address = peer.address
        """As given to `Engine.connect`."""

    def __enter__(self) -> Peer:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """As of `hurray_rdma.Peer.open`."""
        self._thread.run(self._peer.open())

    def close(self) -> None:
        """As of `hurray_rdma.Peer.close`."""
        self._thread.end(self._peer.close())

    def close_async(self) -> Future[None]:
        """`close` that returns at once; the future cannot be cancelled by the engine's end."""
        return self._thread.submit(self._peer.close(), ends=True)

    def send(
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
        """As of `hurray_rdma.Peer.send`."""
        return self._thread.run(
            self._peer.send(
                snapshot,
                key=key,
                pool=pool,
                page_keys=page_keys,
                zero_tails=zero_tails,
                stream=stream,
                timeout_s=timeout_s,
            )
        )

    def send_async(
        self,
        snapshot: Snapshot,
        *,
        key: str | None = None,
        pool: str | None = None,
        page_keys: NDArray[np.uint8] | None = None,
        zero_tails: bool = False,
        stream: Any = None,
        timeout_s: float | None = None,
    ) -> Future[TransferStats]:
        """`send` that returns at once, for a scheduler that must not wait.

        The future has what `send` returns or raises. Until it is done, the pages of the snapshot must stay as they are:
        ``cancel`` asks the transfer to end, and the future is done (cancelled) only when nothing of it is in flight any
        more. Callbacks run on the engine's thread: they must be short, and may not call what waits.
        """
        return self._thread.submit(
            self._peer.send(
                snapshot,
                key=key,
                pool=pool,
                page_keys=page_keys,
                zero_tails=zero_tails,
                stream=stream,
                timeout_s=timeout_s,
            )
        )

    def send_groups(
        self,
        snapshots: SnapshotGroups,
        *,
        key: str | None = None,
        stream: Any = None,
        timeout_s: float | None = None,
    ) -> dict[str, TransferStats]:
        """As of `hurray_rdma.Peer.send_groups`."""
        return self._thread.run(self._peer.send_groups(snapshots, key=key, stream=stream, timeout_s=timeout_s))

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
        """As of `hurray_rdma.Peer.begin`; what is wrong with the arguments is raised when it is entered."""
        return Transfer(
            lambda: self._peer.begin(
                snapshot,
                key=key,
                pool=pool,
                page_keys=page_keys,
                zero_tails=zero_tails,
                stream=stream,
                timeout_s=timeout_s,
            ),
            self._thread,
            self._transfers,
        )

    def begin_async(
        self,
        snapshot: Snapshot,
        *,
        key: str | None = None,
        pool: str | None = None,
        page_keys: NDArray[np.uint8] | None = None,
        zero_tails: bool = False,
        stream: Any = None,
        timeout_s: float | None = None,
    ) -> Push:
        """`begin` for a thread that computes layers and must not wait: returns at once, and so does each
        `Push.layer_ready`."""
        return Push(
            lambda: self._peer.begin(
                snapshot,
                key=key,
                pool=pool,
                page_keys=page_keys,
                zero_tails=zero_tails,
                stream=stream,
                timeout_s=timeout_s,
            ),
            snapshot,
            self._thread,
        )

    def fetch(
        self, key: str, *, into: PagePool | Placement | None = None, timeout_s: float | None = None
    ) -> FetchedSnapshot:
        """As of `hurray_rdma.Peer.fetch`."""
        return self._thread.run(
            self._peer.fetch(key, into=into, timeout_s=timeout_s), undo=lambda fetched: fetched.release()
        )

    def fetch_async(
        self, key: str, *, into: PagePool | Placement | None = None, timeout_s: float | None = None
    ) -> Future[FetchedSnapshot]:
        """`fetch` that returns at once; the future is as of `send_async`. Release what it brings, also when it comes in
        spite of a ``cancel``."""
        return self._thread.submit(self._peer.fetch(key, into=into, timeout_s=timeout_s))

    def refresh(self, key: str, *, timeout_s: float | None = None) -> None:
        """As of `hurray_rdma.Peer.refresh`."""
        self._thread.run(self._peer.refresh(key, timeout_s=timeout_s))

    def refresh_async(self, key: str, *, timeout_s: float | None = None) -> Future[None]:
        """`refresh` that returns at once; the future is as of `send_async`."""
        return self._thread.submit(self._peer.refresh(key, timeout_s=timeout_s))

    def decline(self, key: str, *, timeout_s: float | None = None) -> None:
        """As of `hurray_rdma.Peer.decline`."""
        self._thread.run(self._peer.decline(key, timeout_s=timeout_s))

    def decline_async(self, key: str, *, timeout_s: float | None = None) -> Future[None]:
        """`decline` that returns at once; the future is as of `send_async`."""
        return self._thread.submit(self._peer.decline(key, timeout_s=timeout_s))

    @property
    def connected(self) -> bool:
        """As of `hurray_rdma.Peer.connected`."""
        return self._peer.connected

    @property
    def pools(self) -> tuple[str, ...]:
        """As of `hurray_rdma.Peer.pools`."""
        return self._thread.run(on_loop(lambda: self._peer.pools))

    @property
    def lanes(self) -> LaneReport | None:
        """As of `hurray_rdma.Peer.lanes`."""
        return self._thread.run(on_loop(lambda: self._peer.lanes))

    @property
    def lane(self) -> str:
        """As of `hurray_rdma.Peer.lane`."""
        return self._thread.run(on_loop(lambda: self._peer.lane))

    @property
    def path(self) -> str:
        """As of `hurray_rdma.Peer.path`."""
        return self._thread.run(on_loop(lambda: self._peer.path))
