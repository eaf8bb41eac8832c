"""A push whose layers are computed by a thread that must not wait: it says which layer is ready, and goes on.

Knows one transfer of one peer. The transfer ends by itself when every layer has gone out and the peer has acknowledged
all of them; what became of it is the future's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from hurray_rdma.cache import Snapshot
from hurray_rdma.engine import transfer as asynchronous
from hurray_rdma.engine.marks import Mark, mark_of
from hurray_rdma.engine.stats import TransferStats
from hurray_rdma.engine.sync.thread import EngineThread

__all__ = ["Push"]


class Push:
    """Made by `Peer.begin_async`; any thread may call its methods.

    Args:
        begin: makes the transfer, on the loop.
        snapshot: what it sends.
        thread: the engine's.
    """

    def __init__(self, begin: Callable[[], asynchronous.Transfer], snapshot: Snapshot, thread: EngineThread) -> None:
        self._begin = begin
        self._snapshot = snapshot
        self._unsaid = set(snapshot.pool.spec.layer_indices)
        self.num_sent = 0
        """Layers that are in place at the peer."""
        self._ready: asyncio.Queue[tuple[int, Mark | None]] = asyncio.Queue()
        self._call = thread.submit(self._run())
        self.future: Future[TransferStats] = self._call
        """As of `Peer.send_async`: until it is done, the pages of the snapshot must stay as they are."""

    def layer_ready(self, layer: int, *, stream: Any = None) -> None:
        """The layer's pages hold their content, or will when the work that is on the stream by now has run: they go
        out as soon as the peer has granted the transfer. Waits for nothing. A layer that was said before, or that the
        pool does not have, is left alone.

        Args:
            layer: as of `CacheSpec.layer_indices`.
            stream: as of `Peer.send`.

        Raises:
            ConfigError: it is no stream.
        """
        if layer in self._unsaid:
            mark = mark_of(self._snapshot.pool, stream)
            self._unsaid.discard(layer)
            with contextlib.suppress(RuntimeError):  # the loop is closed: the future tells
                self._call.loop.call_soon_threadsafe(self._ready.put_nowait, (layer, mark))

    def is_last(self, layer: int) -> bool:
        """Whether every other layer was said to be ready."""
        return self._unsaid == {layer}

    def rest_ready(self, *, stream: Any = None) -> None:
        """`layer_ready` of every layer that was not said yet."""
        for layer in sorted(self._unsaid):
            self.layer_ready(layer, stream=stream)

    async def _run(self) -> TransferStats:
        async with self._begin() as transfer:
            for _ in self._snapshot.pool.spec.layer_indices:
                layer, mark = await self._ready.get()
                await transfer.send_layer(layer, stream=mark)
                self.num_sent += 1
        return transfer.stats
