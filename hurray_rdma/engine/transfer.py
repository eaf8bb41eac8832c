"""One push as its sender sees it: offer, plan, moves layer by layer, acknowledgement, or a clean end before.

Pages are moved in a worker thread (the native loops release the GIL); everything else runs on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import CacheSpec, PoolLayout, Snapshot
from hurray_rdma.control import ClientSession, ErrorCode, Grant, Offer, Pool
from hurray_rdma.engine.compat import page_map_of
from hurray_rdma.engine.stats import TransferStats
from hurray_rdma.errors import DeadlineExceededError, GeometryError, HurrayError, TransferAbortedError
from hurray_rdma.format import Dialect, ElementType, encode_many
from hurray_rdma.plan import Move, Plan, check_pair, plan_transfer
from hurray_rdma.transport import Region, RemoteMemory, StopFlag

__all__ = ["RemotePool", "Transfer", "TransferRoute"]

Offsets = NDArray[np.uint64]
_T = TypeVar("_T")

_MIN_WRITE_NBYTES = 4 << 20
"""Bytes per native call below which layers are put together."""


class TransferRoute(Protocol):
    """The connection a transfer goes over, as it needs it. `Peer` is one."""

    @property
    def session(self) -> ClientSession: ...

    @property
    def movers(self) -> ThreadPoolExecutor: ...

    def notify(self) -> None:
        """Sends what the session has to send."""

    def dialect(self) -> Dialect:
        """The dialect of the session's descriptors."""

    def pool_for(self, spec: CacheSpec) -> RemotePool:
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


@dataclass(slots=True)
class _Moves:
    """What one mover has done."""

    num_operations: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class Transfer:
    """A snapshot on its way to a peer. Made by `Peer.begin`; an async context manager.

    Entering waits for the peer's grant. Leaving waits until the peer has acknowledged the whole snapshot; leaving by an
    exception aborts the transfer, and returns only when nothing of it is in flight any more.
    """

    def __init__(
        self,
        route: TransferRoute,
        snapshot: Snapshot,
        key: str,
        *,
        page_keys: NDArray[np.uint8] | None,
        zero_tails: bool,
        timeout_s: float,
    ) -> None:
        self._route = route
        self._snapshot = snapshot
        self._key = key
        self._page_keys = page_keys
        self._zero_tails = zero_tails
        self._zeros: Region | None = None
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self._started = 0.0
        self._loop = asyncio.get_running_loop()
        self._transfer_id: int | None = None
        self._granted: asyncio.Future[Grant] = self._loop.create_future()
        self._acknowledged: asyncio.Future[None] = self._loop.create_future()
        self._stop = StopFlag()
        self._error: HurrayError | None = None
        self._sent_layers: set[int] = set()
        self._jobs: dict[asyncio.Future[_Moves], Future[_Moves]] = {}
        self._in_doubt = False
        self._num_operations = 0
        self._nbytes = 0
        self._write_seconds = 0.0
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
        else:
            await self._give_up(f"the sender failed: {kind.__name__ if kind else error}")

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
        self.fail(TransferAbortedError(f"transfer {self._key!r} was aborted here: {reason}"))
        await self._give_up(reason)

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
        snapshot, spec = self._snapshot, self._snapshot.pool.spec
        remote = self._route.pool_for(spec)
        dest = remote.layout
        check_pair(spec, dest.spec)
        page_map = page_map_of(snapshot, dest.spec)
        session = self._route.session
        offer = Offer(
            key=self._key,
            pool_id=remote.pool.pool_id,
            generation=remote.pool.generation,
            descriptors=encode_many(snapshot.descriptors(), dialect=self._route.dialect()),
            block_table=snapshot.block_table,
            seq_ptr=snapshot.seq_ptr,
            seq_lens=snapshot.seq_lens,
            order=str(spec.order),
            head_offset=spec.head_offset,
            total_heads=spec.heads_of_model,
            page_keys=self._page_keys if self._page_keys is not None else np.empty((0, 0), np.uint8),
            deadline_s=self._timeout_s,
        )
        transfer_id = session.offer(offer, now=self._loop.time(), timeout_s=self._timeout_s)
        self._transfer_id = transfer_id
        self._route.register(transfer_id, self)
        self._route.notify()
        try:
            grant = await self._wait(self._granted, "a grant")
            self._memories = remote.memories
            self._plan = plan_transfer(
                snapshot.pool.layout,
                dest,
                page_map,
                grant.page_ids,
                resident=grant.resident if len(grant.resident) else None,
                zero_tails=self._zero_tails,
            )
            if self._plan.zeros_nbytes:
                self._zeros = self._route.zeros(self._plan.zeros_nbytes)
        except BaseException:
            await self._give_up("the offer came to nothing")
            raise

    async def _send(self, layers: list[int]) -> None:
        if self._error is not None:
            raise self._error
        self._sent_layers.update(layers)
        job = self._route.movers.submit(self._move, layers)
        moving = asyncio.wrap_future(job)
        self._jobs[moving] = job
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                moves = await asyncio.shield(moving)
        except (TimeoutError, DeadlineExceededError) as error:
            late = DeadlineExceededError("pages were not moved in time", field="timeout_s", value=self._timeout_s)
            self.fail(late)
            raise late from error
        except HurrayError as error:
            self.fail(error)
            # Posting stops for a reason: an abort or a lost peer tells more than "stopped".
            raise self._error or error from error
        finally:
            if moving.done():
                del self._jobs[moving]
        self._num_operations += moves.num_operations
        self._nbytes += moves.nbytes
        self._write_seconds += moves.seconds

    def _move(self, layers: list[int]) -> _Moves:
        """In a mover thread: writes layer by layer, and has the loop tell the peer of each.

        Small layers go several at a time: a call costs as much as copying a few pages.
        """
        spec, moves = self._snapshot.pool.spec, _Moves()
        layer_nbytes = max(1, self._plan.nbytes // spec.num_layers)
        step = max(1, _MIN_WRITE_NBYTES // layer_nbytes)
        try:
            for start in range(0, len(layers), step):
                some = layers[start : start + step]
                self._write([m for layer in some for role in spec.roles for m in self._plan.moves(role, layer)], moves)
                ended = [spec.index(role, layer) for layer in some for role in spec.roles]
                self._loop.call_soon_threadsafe(self._ended, ended)
        except HurrayError as error:
            self._in_doubt = self._in_doubt or error.in_doubt
            raise
        except BaseException:
            self._in_doubt = True
            raise
        return moves

    def _write(self, moves: list[Move], done: _Moves) -> None:
        """Writes some moves: one call for all with the same program between the same two regions."""
        together: dict[tuple[int, int, int], list[Move]] = {}
        for move in moves:
            key = (id(move.program), move.src_region_index, move.dst_region_index)
            together.setdefault(key, []).append(move)
        for (_, src_region, dst_region), same in together.items():
            src = self._snapshot.pool.regions[src_region]
            bases = [(move.src_base_nbytes, move.dst_base_nbytes) for move in same]
            for plan in same[0].program.plans():
                self._write_plan(src, dst_region, plan, bases, done)
            zeros = same[0].program.zeros
            if zeros is not None and self._zeros is not None:
                self._write_plan(self._zeros, dst_region, zeros, [(0, dst_base) for _, dst_base in bases], done)

    def _write_plan(self, src: Region, dst_region: int, plan: Plan, bases: list[tuple[int, int]], done: _Moves) -> None:
        src_offsets, dst_offsets, lengths = _placed(plan, bases)
        moved = self._memories[dst_region].write(
            src,
            src_offsets=src_offsets,
            dst_offsets=dst_offsets,
            lengths=lengths,
            stop=self._stop,
            timeout_s=max(0.0, self._deadline - time.monotonic()),
        )
        done.num_operations += moved.num_operations
        done.nbytes += moved.nbytes
        done.seconds += moved.seconds

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
        except BaseException:
            await self._give_up("the transfer was not completed")
            raise
        self._forget()
        self._stats = self._collect()

    def _collect(self) -> TransferStats:
        snapshot, spec, plan = self._snapshot, self._snapshot.pool.spec, self._plan
        num_entries = int((-(-snapshot.seq_lens.astype(np.int64) // spec.page_size)).sum())
        nbytes_per_page = sum(_page_nbytes(spec))
        memory = self._memories[0]
        return TransferStats(
            key=self._key,
            num_sequences=snapshot.num_seqs,
            num_tokens=snapshot.total_tokens,
            num_table_entries=num_entries,
            num_pages=plan.num_pages,
            num_resident=plan.num_resident,
            logical_nbytes=num_entries * nbytes_per_page * len(spec.tensors),
            sent_nbytes=self._nbytes,
            num_operations=self._num_operations,
            seconds=time.monotonic() - self._started,
            write_seconds=self._write_seconds,
            lane=memory.lane,
            path=memory.path.value,
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
            if not self._in_doubt:
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


def _page_nbytes(spec: CacheSpec) -> tuple[int, int, int]:
    """Bytes of one page of one role of one layer, of its scales and of its zero points."""
    scales = spec.page_size * ElementType.from_name(spec.scale_dtype).nbytes(1) if spec.scale_dtype else 0
    return spec.page_nbytes, scales, spec.page_size * ElementType.INT32.nbytes(1) if spec.zero_points else 0


def _placed(plan: Plan, bases: list[tuple[int, int]]) -> tuple[Offsets, Offsets, Offsets]:
    """One plan at each (source, destination) base: offsets in the two regions, uint64 ``[len(bases) * operations]``."""
    places = np.array(bases, np.uint64)
    return (
        (places[:, :1] + plan.src_offsets).ravel(),
        (places[:, 1:] + plan.dst_offsets).ravel(),
        np.tile(plan.lengths, len(bases)),
    )
