"""Points on CUDA streams that transfers wait for: what was queued before them has filled the pages, or used them.

Knows pools and streams; asks the transport. CUDA blocks whoever records one while the stream's queue is full, maybe
behind a gate that the event loop opens: what runs on the loop has it recorded by another thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

from hurray_rdma.cache import Lease, PagePool
from hurray_rdma.engine.apart import apart, start_apart
from hurray_rdma.errors import DeadlineExceededError, HurrayError, TransportError
from hurray_rdma.transport import stream_device, stream_handle

__all__ = ["Mark", "device_of", "give_back", "mark_of", "mark_soon", "marked"]


class Mark:
    """A point on a stream, from when it is recorded. Made by `mark_of`, `mark_soon` and `marked`.

    Args:
        pool: whose pages are filled by the work before it.
        stream: as of `Peer.send`.

    Raises:
        ConfigError: it is no stream, or it does not say on which GPU it is, and the pool is on none.
    """

    def __init__(self, pool: PagePool, stream: Any) -> None:
        self._passed: Future[None] = Future()
        self._passed.set_running_or_notify_cancel()  # nobody who waits for it may cancel it
        stream_handle(stream)
        self._stream = stream  # alive until it is recorded
        self._index = device_of(pool, stream)
        self._streams = pool.regions[0].context.streams

    def record(self) -> None:
        """Once; from now on it waits for what is on the stream.

        Raises:
            ConfigError: the stream captures a graph.
            TransportError: CUDA refuses.
        """
        self._streams.mark(self._stream, index=self._index, told=self._told)

    def record_or_fail(self) -> None:
        """The same; whoever waits for it hears of errors."""
        try:
            self.record()
        except HurrayError as error:
            self._told(error)
        except BaseException as error:
            self._told(TransportError(f"the stream cannot be watched: {error}"))
            raise

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

    def then(self, work: Callable[[BaseException | None], object]) -> None:
        """Calls it once the work has run, or with what CUDA says of it; on any thread, also when the loop is over."""
        self._passed.add_done_callback(lambda passed: work(passed.exception()))

    def _told(self, error: HurrayError | None) -> None:
        if error is None:
            self._passed.set_result(None)
        else:
            self._passed.set_exception(error)


def mark_of(pool: PagePool, stream: Any) -> Mark | None:
    """A point on the stream as it is now; one that was made before is returned itself, and None where there is none.

    Raises:
        ConfigError, TransportError: as of `Mark`, and `Mark.record`.
    """
    if stream is None or isinstance(stream, Mark):
        return stream
    mark = Mark(pool, stream)
    mark.record()
    return mark


def mark_soon(pool: PagePool, stream: Any) -> Mark | None:
    """`mark_of` for the loop where it cannot wait: after what is on the stream now, and maybe some of what follows.

    Raises:
        ConfigError: as of `Mark`; what else is wrong those hear who wait for it.
    """
    if stream is None or isinstance(stream, Mark):
        return stream
    mark = Mark(pool, stream)
    start_apart(mark.record_or_fail)
    return mark


async def marked(pool: PagePool, stream: Any, *, timeout_s: float) -> Mark | None:
    """`mark_of` for tasks.

    Raises:
        ConfigError, TransportError: as of `Mark`, and `Mark.record`.
        DeadlineExceededError: the stream's queue was full all the time.
    """
    if stream is None or isinstance(stream, Mark):
        return stream
    mark = Mark(pool, stream)
    try:
        async with asyncio.timeout(timeout_s):
            await apart(mark.record)
    except TimeoutError:
        rule = "the stream's queue was full all the time"
        raise DeadlineExceededError(rule, field="timeout_s", value=timeout_s) from None
    return mark


def give_back(leases: Iterable[Lease], mark: Mark | None, *, recover: bool = False) -> None:
    """Releases leases once the work before a mark has run; None is now. Where nobody can tell, pages that kernels may
    still use go into quarantine.

    Args:
        leases: of pages that nobody needs any more.
        mark: behind the last use of them.
        recover: they are in quarantine, and what put them there is over.
    """

    def ended(lease: Lease, error: BaseException | None) -> None:
        if error is not None:
            lease.allocator.quarantine(lease, reason=f"kernels may still use them: {error}")
        else:
            give_back([lease], None, recover=recover)

    if mark is not None:
        for lease in leases:
            mark.then(partial(ended, lease))
        return
    for lease in leases:
        if recover:
            lease.allocator.recover(lease)
        else:
            lease.release()


def device_of(pool: PagePool, stream: Any) -> int:
    """The GPU of a stream that works on a pool.

    Raises:
        ConfigError: neither tells, or they are on different ones.
    """
    return stream_device(stream, expected=pool.device_index)
