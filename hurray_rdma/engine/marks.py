"""Points on CUDA streams that transfers wait for: what was queued before them has filled the pages.

Knows pools and streams; asks the transport. Nothing here blocks, unless a stream's queue is full.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

from hurray_rdma.cache import PagePool
from hurray_rdma.errors import HurrayError
from hurray_rdma.transport import stream_device

__all__ = ["Mark", "device_of", "mark_of", "marked"]


class Mark:
    """A point on a stream, from when it is made.

    Args:
        pool: whose pages are filled by the work before it.
        stream: as of `Peer.send`.

    Raises:
        ConfigError: it is no stream, or it does not say on which GPU it is, and the pool is on none.
        TransportError: CUDA refuses.
    """

    def __init__(self, pool: PagePool, stream: Any) -> None:
        self._passed: Future[None] = Future()
        self._passed.set_running_or_notify_cancel()  # nobody who waits for it may cancel it
        pool.regions[0].context.streams.mark(stream, index=device_of(pool, stream), told=self._told)

    def has_passed(self) -> bool:
        """Whether the work has run.

        Raises:
            TransportError: it failed, as CUDA says.
        """
        if not self._passed.done():
            return False
        self._passed.result()
        return True

    def passed(self) -> asyncio.Future[None]:
        """Done when the work has run; fails with what CUDA says of it. For tasks of the running loop."""
        future = asyncio.wrap_future(self._passed)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # somebody may wait, or nobody
        return future

    def _told(self, error: HurrayError | None) -> None:
        if error is None:
            self._passed.set_result(None)
        else:
            self._passed.set_exception(error)


def mark_of(pool: PagePool, stream: Any) -> Mark | None:
    """A point on the stream as it is now; one that was made before is returned itself, and None where there is none."""
    return stream if stream is None or isinstance(stream, Mark) else Mark(pool, stream)


async def marked(pool: PagePool, stream: Any) -> Mark | None:
    """`mark_of` for a task: CUDA blocks while the stream's queue is full, maybe behind a gate that the loop opens."""
    if stream is None or isinstance(stream, Mark):
        return stream
    return await asyncio.to_thread(Mark, pool, stream)


def device_of(pool: PagePool, stream: Any) -> int:
    """The GPU of a stream that works on a pool.

    Raises:
        ConfigError: neither tells, or they are on different ones.
    """
    return stream_device(stream, expected=pool.device_index)
