"""A snapshot that arrives, for receivers that wait in threads."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any

from hurray_rdma.cache import Snapshot
from hurray_rdma.engine import arrival as asynchronous
from hurray_rdma.engine.arrival import ArrivalState
from hurray_rdma.engine.sync.thread import EngineThread, on_loop

__all__ = ["Arrival"]


class Arrival:
    """`hurray_rdma.Arrival` for callers without asyncio; any thread may call its methods."""

    def __init__(self, arrival: asynchronous.Arrival, thread: EngineThread) -> None:
        self._arrival = arrival
        self._thread = thread
        self.key = arrival.key
        """As of `hurray_rdma.Arrival.key`."""
        self.group = arrival.group
        """As of `hurray_rdma.Arrival.group`."""
        self.sender = arrival.sender
        """As of `hurray_rdma.Arrival.sender`."""
        self.lane = arrival.lane
        """As of `hurray_rdma.Arrival.lane`."""
        self.path = arrival.path
        """As of `hurray_rdma.Arrival.path`."""
        self.block_table = arrival.block_table
        """As of `hurray_rdma.Arrival.block_table`."""
        self.resident = arrival.resident
        """As of `hurray_rdma.Arrival.resident`."""
        self.num_pages = arrival.num_pages
        """As of `hurray_rdma.Arrival.num_pages`."""
        self.granted_s = arrival.granted_s
        """As of `hurray_rdma.Arrival.granted_s`."""

    @property
    def state(self) -> ArrivalState:
        """What became of the pages, at this moment."""
        return self._arrival.state

    @property
    def completed_s(self) -> float | None:
        """As of `hurray_rdma.Arrival.completed_s`."""
        return self._arrival.completed_s

    def wait_layer(self, layer: int, *, stream: Any = None, timeout_s: float | None = None) -> None:
        """As of `hurray_rdma.Arrival.wait_layer`; this thread may block on the stream."""
        self._thread.run(self._arrival.wait_layer(layer, stream=stream, timeout_s=timeout_s))

    def snapshot(self, *, timeout_s: float | None = None) -> Snapshot:
        """As of `hurray_rdma.Arrival.snapshot`."""
        return self._thread.run(self._arrival.snapshot(timeout_s=timeout_s))

    def settled(self) -> None:
        """As of `hurray_rdma.Arrival.settled`."""
        self._thread.run(self._arrival.settled())

    def settled_async(self) -> Future[None]:
        """`settled` that returns at once; the future is as of `Peer.send_async`."""
        return self._thread.submit(self._arrival.settled())

    def release(self, *, stream: Any = None) -> None:
        """As of `hurray_rdma.Arrival.release`; also when the engine is closed, and in callbacks of its futures."""
        release = partial(self._arrival.release, stream=stream)
        if self._thread.is_current or not self._thread.end(on_loop(release)):
            release()

    def abort(self, reason: str = "the receiver does not want it any more") -> None:
        """As of `hurray_rdma.Arrival.abort`."""
        self._thread.end(on_loop(self._arrival.abort, reason))

    def __repr__(self) -> str:
        return repr(self._arrival)
