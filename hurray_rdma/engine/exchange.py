"""What a push and a pull have in common on the connecting side: wait for the answer, move pages, an end in order.

Pages are moved in mover threads (the native loops release the GIL), but few that go through a mapping; these, and
everything else, on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import CacheSpec, Lease, PagePool, Snapshot
from hurray_rdma.cache.indices import starts_of
from hurray_rdma.control import ClientSession, ErrorCode
from hurray_rdma.engine.compat import pages_nbytes
from hurray_rdma.engine.deadlines import Deadlines
from hurray_rdma.engine.logs import EngineLog
from hurray_rdma.engine.mover import INLINE_NBYTES, STEP_NBYTES, Mover, Moves
from hurray_rdma.engine.remote_pool import RemotePool
from hurray_rdma.engine.stats import Direction, TransferStats
from hurray_rdma.engine.tally import Tally
from hurray_rdma.errors import DeadlineExceededError, HurrayError, TransferAbortedError, TransportError
from hurray_rdma.format import Dialect
from hurray_rdma.plan import TransferPlan, WholePages
from hurray_rdma.transport import Bell, Moved, Region, StopFlag

__all__ = ["Exchange", "Route", "retain"]

_log = logging.getLogger(__name__)

Uint32: TypeAlias = NDArray[np.uint32]

Answer = TypeVar("Answer")
_T = TypeVar("_T")


class Route(Protocol):
    """The connection that an exchange goes over, as it needs it. `Connection` is one."""

    @property
    def session(self) -> ClientSession: ...

    @property
    def movers(self) -> ThreadPoolExecutor: ...

    @property
    def streams(self) -> bool:
        """Whether pages of some pools may go by page stream."""

    @property
    def log(self) -> EngineLog:
        """With the peer as a fact."""

    @property
    def deadlines(self) -> Deadlines:
        """Of all that waits for this peer."""

    def notify(self) -> None:
        """Sends what the session has to send."""

    async def flush(self) -> None:
        """The same, and waits while the peer does not keep up."""

    def dialect(self) -> Dialect:
        """The dialect of the session's descriptors."""

    def pool_for(self, spec: CacheSpec, name: str | None, *, device: str) -> RemotePool:
        """The peer's pool that is to take pages of ``spec`` from a device."""

    async def open_pools(self, deadline: float) -> None:
        """Opens those on GPUs, which the others would do on the loop."""

    def pool_by_id(self, pool_id: int) -> RemotePool | None:
        """The peer's pool of that number."""

    def first_pool(self) -> RemotePool:
        """Any of the peer's pools."""

    def num_tensors(self) -> int:
        """Roles and layers of the peer's largest pool: a snapshot of it has as many descriptors."""

    def zeros(self, nbytes: int) -> Region:
        """A registered region of at least so many bytes, all zero."""

    def told(self, error: HurrayError) -> HurrayError:
        """The error as who used the session hears of it: of which peer, and what to do; those that are not of losing it
        or waiting for it, as they are."""

    def forsake(self) -> None:
        """The connection is of no use: the next exchange makes a new one."""

    def doubt(self) -> None:
        """Bytes of an exchange may still land at the peer when all is closed here."""

    def when_settled(self, settled: Callable[[], None]) -> None:
        """Calls it when nothing that was posted can write into this process any more."""

    def register(self, transfer_id: int, exchange: Exchange[Any]) -> None:
        """From now on the exchange hears of its events."""

    def forget(self, transfer_id: int) -> None:
        """It has ended."""


class Exchange(ABC, Generic[Answer]):
    """One transfer as the side that asked for it sees it.

    Args:
        key: of the snapshot.
        timeout_s: for all of it.
        tally: counts what happens.
        direction: of the pages, from here.
    """

    _route: Route
    _remote: RemotePool

    def __init__(self, key: str, *, timeout_s: float, tally: Tally, direction: Direction) -> None:
        self._key = key
        self._timeout_s = timeout_s
        self._tally = tally
        self._direction = direction
        self._started = 0.0
        self._deadline = 0.0
        self._loop = asyncio.get_running_loop()
        self._transfer_id: int | None = None
        self._jobs: dict[asyncio.Future[Moves], Future[Moves]] = {}
        self._log = EngineLog(_log)
        self._start_over()

    def _start_over(self) -> None:
        self._stop = StopFlag()
        self._moves = Moves()
        self._mover: Mover | None = None
        self._answer: asyncio.Future[Answer] = self._loop.create_future()
        self._acknowledged: asyncio.Future[None] = self._loop.create_future()
        self._error: HurrayError | None = None

    # What the route tells it.

    def answered(self, answer: Answer) -> None:
        """The peer agrees."""
        if not self._answer.done():
            self._answer.set_result(answer)

    def acknowledged(self) -> None:
        """The peer says that it is complete."""
        if not self._acknowledged.done():
            self._acknowledged.set_result(None)

    def ended_by_peer(self, error: HurrayError) -> None:
        """The peer refused it or ends it. QUIET goes out as soon as that is true, whatever the application does."""
        self.fail(error)
        if all(job.done() for job in self._jobs.values()):
            self._say_the_end("the peer ended it")

    def fail(self, error: HurrayError) -> None:
        """It cannot be completed; posting stops, waits end."""
        if self._error is None:
            self._error = error
        self._stop.set()
        for future in (self._answer, self._acknowledged):
            if not future.done():
                future.set_exception(error)
                future.exception()  # somebody may wait for it, or nobody

    @property
    def _left_s(self) -> float:
        """What is left of its time, seconds."""
        return max(0.001, self._deadline - time.monotonic())

    @abstractmethod
    async def abort(self, reason: str) -> None:
        """Ends it; returns when nothing of it is in flight any more."""

    # Steps.

    def _mover_of(self, pool: PagePool, plan: TransferPlan) -> Mover:
        """What moves the pages of the plan: out of ``pool`` in a push, into it in a pull."""
        self._mover = Mover(
            pool,
            plan,
            self._remote.memories,
            reads=self._direction == "fetch",
            zeros=self._route.zeros(plan.zeros_nbytes) if plan.zeros_nbytes and pool.device == "cpu" else None,
            stop=self._stop,
            deadline=self._deadline,
            transfer_id=self._transfer_id or 0,  # none: it has ended by now, and moves nothing
        )
        return self._mover

    def _soon(self, call: Callable[..., None]) -> Callable[..., None]:
        """Calls it on the event loop: at once from there, and from a mover thread as soon as the loop gets to it."""
        here = threading.get_ident()

        def called(*args: Any) -> None:
            if threading.get_ident() == here:
                call(*args)
            else:
                self._loop.call_soon_threadsafe(call, *args)

        return called

    def _at_once(self, work: Callable[[], Moves]) -> None:
        """Works here, which nothing interrupts; inside the gate of the pool here, so that it waits for nothing."""
        try:
            self._moves.add(work())
        except HurrayError as error:
            self.fail(error)
            raise self._error or error from error

    async def _move(self, pool: PagePool, work: Callable[[], Moves], nbytes: int) -> None:
        """Works until the deadline: in a mover thread, or here where that is sooner done than handed over.

        Args:
            pool: of this process.
            work: moves pages out of it, or into it.
            nbytes: how many, about.
        """
        if nbytes <= INLINE_NBYTES and self._remote.mapped and (held := pool.gate.try_moving()) is not None:
            with held:
                self._at_once(work)
            return
        job = self._route.movers.submit(work)
        moving = asyncio.wrap_future(job)
        self._jobs[moving] = job
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                self._moves.add(await asyncio.shield(moving))
        except (TimeoutError, DeadlineExceededError) as error:
            raise self._late() from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not moving.cancelled() or (task is not None and task.cancelling()):
                raise
            # Not the application: the exchange ended before a thread was free for the work.
            raise self._error or TransferAbortedError(f"the transfer of {self._key!r} has ended") from None
        except HurrayError as error:
            if isinstance(error, TransportError):
                await self._look_whether_alive()
            self.fail(error)
            # Posting stops for a reason: an abort or a lost peer tells more than "stopped", or than UCX.
            raise self._error or error from error
        finally:
            if moving.done():
                self._jobs.pop(moving, None)  # whoever gave up meanwhile has done so

    def _copy(
        self, source: PagePool, whole: WholePages, pages: Uint32, page_ids: Uint32, bell: Bell | None = None
    ) -> Moves:
        """Every page, through the mapping.

        Args:
            source: of this process.
            whole: of it and the peer's pool.
            pages: in ``source``, uint32 ``[num_pages]``.
            page_ids: where each goes, uint32 ``[num_pages]``.
            bell: as of `RemoteMemory.write_rows`; what rings is one step, of who is inside the gate.
        """
        write = self._remote.memories[0].write_rows
        if bell is not None:
            return self._rows(source, whole, pages, page_ids, partial(write, bell=bell))
        return self._in_steps(source, whole, pages, page_ids, write)

    def _in_steps(
        self, pool: PagePool, whole: WholePages, src_pages: Uint32, dst_pages: Uint32, copy: Callable[..., Moved]
    ) -> Moves:
        """Copies whole pages; between two steps the pool of this process can be registered anew."""
        moves, step = Moves(), max(1, STEP_NBYTES // whole.page_nbytes)
        for start in range(0, len(src_pages), step):
            end = start + step
            with pool.gate.moving(timeout_s=self._left_s):
                moves.add(self._rows(pool, whole, src_pages[start:end], dst_pages[start:end], copy))
        return moves

    def _rows(
        self, pool: PagePool, whole: WholePages, src_pages: Uint32, dst_pages: Uint32, copy: Callable[..., Moved]
    ) -> Moves:
        moved = copy(
            pool.regions[0],
            places=whole.places,
            src_rows=src_pages,
            dst_rows=dst_pages,
            stop=self._stop,
            timeout_s=self._left_s,
        )
        return Moves(moved.num_operations, moved.nbytes, moved.seconds)

    async def _look_whether_alive(self) -> None:
        """UCX failed: because the peer is gone, maybe, which the session is about to tell. It is not if the peer still
        speaks a heartbeat later."""
        session = self._route.session
        heartbeat_s = session.config.heartbeat_s
        long_enough = self._loop.time() + heartbeat_s
        while (left_s := self._deadline - time.monotonic()) > 0 and not self._acknowledged.done():
            now = self._loop.time()
            if session.is_closed or now - session.silent_s(now) > long_enough:
                return
            await asyncio.wait((self._acknowledged,), timeout=min(left_s, heartbeat_s))

    def _late(self) -> HurrayError:
        """Why time is up: a lease that ran out at the peer is a `TimeoutError`, too."""
        if self._error is not None:
            return self._error
        rule = "pages were not moved in time"
        late = self._route.told(DeadlineExceededError(rule, field="timeout_s", value=self._timeout_s))
        self.fail(late)
        return late

    async def _wait(self, future: asyncio.Future[_T], what: str) -> _T:
        # The future itself: `asyncio.wait` and `timeout` cost a small transfer several times as much.
        deadlines = self._route.deadlines
        deadlines.begin(future, self._deadline, partial(self._not_in_time, future, what))
        try:
            return await future
        except asyncio.CancelledError:
            if future.cancelled():  # with this wait; others that wait for it must not take that for something else
                self.fail(TransferAbortedError(f"a wait for {what} of {self._key!r} was cancelled"))
            raise
        finally:
            deadlines.end(future)

    def _not_in_time(self, future: asyncio.Future[Any], what: str) -> None:
        if future.done():
            return
        rule = f"{what} for {self._key!r} did not come in time"
        error = self._route.told(DeadlineExceededError(rule, field="timeout_s", value=self._timeout_s))
        self.fail(error)
        if not future.done():
            future.set_exception(error)

    async def _give_up(self, reason: str) -> None:
        """Stops posting, waits for what is in flight, tells the peer: ABORT, then QUIET if it is quiet. Idempotent."""
        self._stop.set()
        cancelled = await self._settle()
        self._say_the_end(reason)
        if cancelled is not None:
            raise cancelled

    async def _give_up_incomplete(self) -> None:
        """The same of a send as a whole; where it is cancelled meanwhile, that is what it has come to."""
        try:
            await self._give_up("the transfer was not completed")
        except asyncio.CancelledError as cancelled:
            self._failed(cancelled)
            raise

    def _say_the_end(self, reason: str) -> None:
        """With no mover busy: ABORT if the peer does not know yet, and QUIET unless bytes may still land there."""
        if self._transfer_id is not None:
            session, now = self._route.session, self._loop.time()
            session.abort(self._transfer_id, ErrorCode.ABORTED, reason, now=now)
            if self._in_doubt and self._direction == "send":
                self._route.doubt()
            else:
                session.quiet(self._transfer_id, now=now)
            self._route.notify()
            self._forget()

    @property
    def _in_doubt(self) -> bool:
        """Whether bytes of it may still land where they were to go."""
        return self._mover is not None and self._mover.in_doubt

    async def _settle(self) -> asyncio.CancelledError | None:
        """Waits for the mover threads, which have been told to stop; pages are in use, so a cancellation waits, too."""
        cancelled = None
        for job in self._jobs.values():
            job.cancel()  # one that has not begun never will
        while self._jobs:
            try:
                await asyncio.wait(self._jobs)
            except asyncio.CancelledError as error:
                cancelled = error
            for moving in [moving for moving in self._jobs if moving.done()]:
                del self._jobs[moving]
                if not moving.cancelled():
                    moving.exception()  # whoever started it has been told, or is gone
        return cancelled

    def _failed(self, error: BaseException) -> None:
        """It has come to nothing: counted, and logged."""
        self._tally.failed(self._direction, error)
        self._log.bind(key=self._key).info("%s failed: %s", self._direction, error)

    def _stats_of(self, snapshot: Snapshot, *, num_pages: int, num_resident: int) -> TransferStats:
        """Facts of a push that is complete."""
        spec = snapshot.pool.spec
        num_entries = int(starts_of(snapshot.seq_lens, spec.page_size)[-1])
        return TransferStats(
            key=self._key,
            num_sequences=snapshot.num_seqs,
            num_tokens=snapshot.total_tokens,
            num_table_entries=num_entries,
            num_pages=num_pages,
            num_resident=num_resident,
            logical_nbytes=num_entries * pages_nbytes(spec),
            sent_nbytes=self._moves.nbytes,
            num_operations=self._moves.num_operations,
            seconds=time.monotonic() - self._started,
            write_seconds=self._moves.seconds,
            lane=self._remote.lane,
            path=self._remote.path,
        )

    def _forget(self) -> None:
        if self._transfer_id is not None:
            self._route.forget(self._transfer_id)
            self._transfer_id = None


def retain(snapshot: Snapshot) -> Lease:
    """Keeps pages of the snapshot that somebody leased from going back to their pool; those of a pool whose pages the
    application hands out itself are its own care."""
    return snapshot.pool.allocator.retain_held(snapshot.block_table)
