"""One push as its sender sees it: offer, plan, moves layer by layer, acknowledgement, or a clean end before.

Pages are moved in a worker thread (the native loops release the GIL); everything else runs on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import CacheSpec, Lease, PoolLayout, Snapshot
from hurray_rdma.control import ClientSession, ErrorCode, Grant, Offer, Pool, StaleGenerationError
from hurray_rdma.engine.compat import page_map_of, pages_nbytes
from hurray_rdma.engine.frames import FRAMES_LANE, FRAMES_PATH, Packer
from hurray_rdma.engine.stats import TransferStats
from hurray_rdma.engine.tally import Tally
from hurray_rdma.engine.writer import Moves, Writer
from hurray_rdma.errors import DeadlineExceededError, GeometryError, HurrayError, PeerLostError, TransferAbortedError
from hurray_rdma.format import Dialect
from hurray_rdma.plan import PageMap, check_pair, plan_transfer
from hurray_rdma.transport import Region, RemoteMemory, StopFlag

__all__ = ["RemotePool", "Transfer", "TransferRoute"]

_T = TypeVar("_T")

_FRAME_NBYTES = 1 << 20
"""Page bytes of one TENSOR_DATA message."""


class TransferRoute(Protocol):
    """The connection a transfer goes over, as it needs it. `Connection` is one."""

    @property
    def session(self) -> ClientSession: ...

    @property
    def movers(self) -> ThreadPoolExecutor: ...

    def notify(self) -> None:
        """Sends what the session has to send."""

    async def flush(self) -> None:
        """The same, and waits while the peer does not keep up."""

    def dialect(self) -> Dialect:
        """The dialect of the session's descriptors."""

    def pool_for(self, spec: CacheSpec, name: str | None) -> RemotePool:
        """The peer's pool that is to take pages of ``spec``."""

    def zeros(self, nbytes: int) -> Region:
        """A registered region of at least so many bytes, all zero."""

    def register(self, transfer_id: int, transfer: Transfer) -> None:
        """From now on the transfer hears of its events."""

    def forget(self, transfer_id: int) -> None:
        """It has ended."""


@dataclass(frozen=True, slots=True, eq=False)
class RemotePool:
    """A pool that the peer announced, its layout checked and its regions opened."""

    pool: Pool
    layout: PoolLayout
    memories: tuple[RemoteMemory, ...]
    """None where pages travel on the control channel."""

    @property
    def lane(self) -> str:
        """UCX transport that carries pages into it."""
        return self.memories[0].lane if self.memories else FRAMES_LANE

    @property
    def path(self) -> str:
        """How they are written: ``mapped``, ``put`` or ``frames``."""
        return self.memories[0].path.value if self.memories else FRAMES_PATH


class Transfer:
    """A snapshot on its way to a peer. Made by `Peer.begin`; an async context manager.

    Entering waits for the peer's grant. Leaving waits until the peer has acknowledged the whole snapshot; leaving by an
    exception aborts the transfer, and returns only when nothing of it is in flight any more.
    """

    def __init__(
        self,
        connect: Callable[[float], Awaitable[TransferRoute]],
        snapshot: Snapshot,
        key: str,
        *,
        pool: str | None,
        page_keys: NDArray[np.uint8] | None,
        zero_tails: bool,
        timeout_s: float,
        tally: Tally,
    ) -> None:
        self._connect = connect
        self._snapshot = snapshot
        self._key = key
        self._pool_name = pool
        self._page_keys = page_keys
        self._zero_tails = zero_tails
        self._timeout_s = timeout_s
        self._tally = tally
        self._deadline = 0.0
        self._started = 0.0
        self._loop = asyncio.get_running_loop()
        self._transfer_id: int | None = None
        self._stop = StopFlag()
        self._granted: asyncio.Future[Grant] = self._loop.create_future()
        self._acknowledged: asyncio.Future[None] = self._loop.create_future()
        self._error: HurrayError | None = None
        self._lease: Lease | None = None
        self._packer: Packer | None = None
        self._writer: Writer | None = None
        self._sent_layers: set[int] = set()
        self._jobs: dict[asyncio.Future[Moves], Future[Moves]] = {}
        self._moves = Moves()
        self._stats: TransferStats | None = None

    @property
    def stats(self) -> TransferStats:
        """Facts of the transfer, once it is complete.

        Raises:
            TransferAbortedError: it is not complete (yet).
        """
        if self._stats is None:
            raise TransferAbortedError(
                f"transfer {self._key!r} is not complete; stats exist after `async with` has ended"
            )
        return self._stats

    async def __aenter__(self) -> Transfer:
        await self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            await self._finish()
            return
        try:
            await self._give_up(f"the sender failed: {kind.__name__ if kind else error}")
        finally:
            self._end(error)

    async def send_layer(self, layer: int) -> None:
        """Moves the pages of one layer, every role; returns when they are in place at the peer and it was told so.

        The pages must hold their content when it is called, and stay as they are until it returns. Layers may come in
        any order, each once.

        Raises:
            GeometryError: there is no such layer, or it was sent before.
            HurrayError: the transfer failed; leave the `async with` block.
        """
        if layer not in self._snapshot.pool.spec.layer_indices:
            known = self._snapshot.pool.spec.layer_indices
            raise GeometryError(f"must be one of {known}", field="layer", value=layer)
        if layer in self._sent_layers:
            raise GeometryError("was sent before", field="layer", value=layer)
        await self._send([layer])

    async def send_rest(self) -> None:
        """Moves every layer that was not sent yet, in order, as `send_layer` does."""
        await self._send([n for n in self._snapshot.pool.spec.layer_indices if n not in self._sent_layers])

    async def abort(self, reason: str = "the sender does not want it any more") -> None:
        """Ends the transfer; returns when nothing of it is in flight any more."""
        error = TransferAbortedError(f"transfer {self._key!r} was aborted here: {reason}")
        self.fail(error)
        try:
            await self._give_up(reason)
        finally:
            self._end(error)

    # What the route tells it.

    def granted(self, grant: Grant) -> None:
        """The peer has reserved pages."""
        if not self._granted.done():
            self._granted.set_result(grant)

    def acknowledged(self) -> None:
        """The peer has the whole snapshot."""
        if not self._acknowledged.done():
            self._acknowledged.set_result(None)

    def ended_by_peer(self, error: HurrayError) -> None:
        """The peer refused it or ends it. QUIET goes out as soon as that is true, whatever the application does."""
        self.fail(error)
        if not self._jobs:
            self._say_the_end("the peer ended it")

    def fail(self, error: HurrayError) -> None:
        """The transfer cannot be completed; posting stops, waits end."""
        if self._error is None:
            self._error = error
        self._stop.set()
        for future in (self._granted, self._acknowledged):
            if not future.done():
                future.set_exception(error)
                future.exception()  # somebody may wait for it, or nobody

    # Steps.

    async def _begin(self) -> None:
        self._started = time.monotonic()
        self._deadline = self._started + self._timeout_s
        self._lease = _retain(self._snapshot)
        try:
            may_be_lost = True
            while True:
                self._route = await self._connect(self._deadline)
                try:
                    await self._offer()
                    return
                except StaleGenerationError:
                    # The pool was registered anew after we heard of it: its new announcement has come by now.
                    self._start_over()
                except PeerLostError:
                    # Nothing was written yet: a session that had broken unnoticed costs no transfer.
                    if not may_be_lost:
                        raise
                    may_be_lost = False
                    self._start_over()
        except BaseException as error:
            self._end(error)
            raise

    def _start_over(self) -> None:
        self._stop = StopFlag()
        self._granted = self._loop.create_future()
        self._acknowledged = self._loop.create_future()
        self._error = None

    async def _offer(self) -> None:
        snapshot, spec = self._snapshot, self._snapshot.pool.spec
        remote = self._remote = self._route.pool_for(spec, self._pool_name)
        dest = remote.layout
        check_pair(spec, dest.spec)
        page_map = page_map_of(snapshot, dest.spec)
        session = self._route.session
        offer = Offer(
            key=self._key,
            pool_id=remote.pool.pool_id,
            generation=remote.pool.generation,
            descriptors=snapshot.encode_descriptors(dialect=self._route.dialect()),
            block_table=snapshot.block_table,
            seq_ptr=snapshot.seq_ptr,
            seq_lens=snapshot.seq_lens,
            order=str(spec.order),
            head_offset=spec.head_offset,
            total_heads=spec.heads_of_model,
            page_keys=self._page_keys if self._page_keys is not None else np.empty((0, 0), np.uint8),
            deadline_s=self._timeout_s,
            lane=remote.lane,
            path=remote.path,
        )
        transfer_id = session.offer(offer, now=self._loop.time(), timeout_s=self._timeout_s)
        self._transfer_id = transfer_id
        self._route.register(transfer_id, self)
        self._route.notify()
        try:
            grant = await self._wait(self._granted, "a grant")
            self._prepare(page_map, grant)
        except BaseException:
            await self._give_up("the offer came to nothing")
            raise

    def _prepare(self, page_map: PageMap, grant: Grant) -> None:
        pool, dest = self._snapshot.pool, self._remote.layout
        resident = grant.resident if len(grant.resident) else None
        if not self._remote.memories:
            self._packer = Packer(self._snapshot, dest.spec, page_map, resident=resident, zero_tails=self._zero_tails)
            self._plan = self._packer.plan
            return
        self._plan = plan_transfer(
            pool.layout, dest, page_map, grant.page_ids, resident=resident, zero_tails=self._zero_tails
        )
        self._writer = Writer(
            pool,
            self._plan,
            self._remote.memories,
            zeros=self._route.zeros(self._plan.zeros_nbytes) if self._plan.zeros_nbytes else None,
            stop=self._stop,
            deadline=self._deadline,
        )

    async def _send(self, layers: list[int]) -> None:
        if self._error is not None:
            raise self._error
        self._sent_layers.update(layers)
        if self._writer is not None:
            await self._write(self._writer, layers)
        elif self._packer is not None:
            await self._send_frames(self._packer, layers)

    async def _write(self, writer: Writer, layers: list[int]) -> None:
        """In a mover thread, until the deadline."""

        def ended(indices: list[int]) -> None:
            self._loop.call_soon_threadsafe(self._ended, indices)

        job = self._route.movers.submit(writer.write, layers, ended)
        moving = asyncio.wrap_future(job)
        self._jobs[moving] = job
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                self._moves.add(await asyncio.shield(moving))
        except (TimeoutError, DeadlineExceededError) as error:
            raise self._late() from error
        except HurrayError as error:
            self.fail(error)
            # Posting stops for a reason: an abort or a lost peer tells more than "stopped".
            raise self._error or error from error
        finally:
            if moving.done():
                del self._jobs[moving]

    def _late(self) -> DeadlineExceededError:
        late = DeadlineExceededError("pages were not moved in time", field="timeout_s", value=self._timeout_s)
        self.fail(late)
        return late

    async def _send_frames(self, packer: Packer, layers: list[int]) -> None:
        """Where the peer's memory cannot be reached: page bytes as TENSOR_DATA, no faster than the peer takes them."""
        spec, session = self._snapshot.pool.spec, self._route.session
        for layer in layers:
            for role in spec.roles:
                index = spec.index(role, layer)
                started = time.monotonic()
                packed, num_operations = await asyncio.to_thread(packer.buffer, role, layer)
                data = packed.data
                try:
                    async with asyncio.timeout(self._deadline - time.monotonic()):
                        for start in range(0, len(data), _FRAME_NBYTES):
                            if self._error is not None:
                                raise self._error
                            frame = data[start : start + _FRAME_NBYTES]
                            session.tensor_data(self._require_id(), index, start, frame, now=self._loop.time())
                            await self._route.flush()
                except TimeoutError as error:
                    raise self._late() from error
                self._moves.add(Moves(num_operations, len(data), time.monotonic() - started))
                self._ended([index])
        if self._error is not None:
            raise self._error

    def _require_id(self) -> int:
        if self._transfer_id is None:
            raise self._error or TransferAbortedError(f"transfer {self._key!r} has ended")
        return self._transfer_id

    def _ended(self, indices: list[int]) -> None:
        if self._error is None and self._transfer_id is not None:
            for index in indices:
                self._route.session.data_end(self._transfer_id, index, now=self._loop.time())
            self._route.notify()

    async def _finish(self) -> None:
        layers = self._snapshot.pool.spec.layer_indices
        try:
            missing = [layer for layer in layers if layer not in self._sent_layers]
            if self._error is None and missing:
                raise GeometryError(
                    f"layers {missing[:8]} of {len(layers)} were not sent",
                    field="len(sent layers)",
                    value=len(self._sent_layers),
                    fix="Call send_layer for each, or send_rest, before leaving the block",
                )
            await self._wait(self._acknowledged, "the acknowledgement")
        except BaseException as error:
            await self._give_up("the transfer was not completed")
            self._end(error)
            raise
        self._forget()
        self._stats = self._collect()
        self._end(None)
        self._tally.sent(self._stats)

    def _end(self, error: BaseException | None) -> None:
        """The source's pages are the application's again."""
        if self._lease is None:
            return  # it has ended before
        self._lease.release()
        self._lease = None
        if error is not None:
            self._tally.failed("send", error)

    def _collect(self) -> TransferStats:
        snapshot, spec, plan = self._snapshot, self._snapshot.pool.spec, self._plan
        num_entries = int((-(-snapshot.seq_lens.astype(np.int64) // spec.page_size)).sum())
        return TransferStats(
            key=self._key,
            num_sequences=snapshot.num_seqs,
            num_tokens=snapshot.total_tokens,
            num_table_entries=num_entries,
            num_pages=plan.num_pages,
            num_resident=plan.num_resident,
            logical_nbytes=num_entries * pages_nbytes(spec),
            sent_nbytes=self._moves.nbytes,
            num_operations=self._moves.num_operations,
            seconds=time.monotonic() - self._started,
            write_seconds=self._moves.seconds,
            lane=self._remote.lane,
            path=self._remote.path,
        )

    async def _wait(self, future: asyncio.Future[_T], what: str) -> _T:
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                return await asyncio.shield(future)
        except TimeoutError:
            if future.done():
                return future.result()
            raise DeadlineExceededError(
                f"{what} for {self._key!r} did not come in time", field="timeout_s", value=self._timeout_s
            ) from None

    async def _give_up(self, reason: str) -> None:
        """Stops posting, waits for what is in flight, tells the peer: ABORT, then QUIET if it is quiet. Idempotent."""
        self._stop.set()
        cancelled = await self._settle()
        self._say_the_end(reason)
        if cancelled is not None:
            raise cancelled

    def _say_the_end(self, reason: str) -> None:
        """With no mover busy: ABORT if the peer does not know yet, and QUIET unless bytes may still land."""
        if self._transfer_id is not None:
            session, now = self._route.session, self._loop.time()
            session.abort(self._transfer_id, ErrorCode.ABORTED, reason, now=now)
            if self._writer is None or not self._writer.in_doubt:
                session.quiet(self._transfer_id, now=now)
            self._route.notify()
            self._forget()

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

    def _forget(self) -> None:
        if self._transfer_id is not None:
            self._route.forget(self._transfer_id)
            self._transfer_id = None


def _retain(snapshot: Snapshot) -> Lease:
    """Keeps pages of the snapshot that somebody leased from going back to their pool; those of a pool whose pages the
    application hands out itself are its own care."""
    allocator = snapshot.pool.allocator
    page_ids = np.unique(snapshot.block_table)
    _, lease = allocator.retain_current(page_ids, allocator.births(page_ids))
    return lease
