"""One push as its sender sees it: offer, plan, moves layer by layer, acknowledgement, or a clean end before.

Pages are moved in a worker thread (the native loops release the GIL); everything else runs on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import Snapshot
from hurray_rdma.control import ClientSession, ErrorCode, Grant, Offer, Pool
from hurray_rdma.engine.batch import Batch
from hurray_rdma.engine.compat import check_pool
from hurray_rdma.engine.stats import TransferStats
from hurray_rdma.errors import DeadlineExceededError, GeometryError, HurrayError, TransferAbortedError
from hurray_rdma.format import Dialect, encode_many
from hurray_rdma.plan import Plan, build_plan
from hurray_rdma.transport import RemoteMemory, StopFlag

__all__ = ["Transfer", "TransferRoute"]

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

    def pool(self) -> Pool:
        """The peer's receive pool."""

    def remote_memories(self) -> Sequence[RemoteMemory]:
        """Its regions, opened."""

    def quiet(self) -> bool:
        """True if no operation of a failed plan is in flight on the endpoint."""

    def register(self, transfer_id: int, transfer: Transfer) -> None:
        """From now on the transfer hears of its events."""

    def forget(self, transfer_id: int) -> None:
        """It has ended."""


class Transfer:
    """A snapshot on its way to a peer. Made by `Peer.begin`; an async context manager.

    Entering waits for the peer's grant. Leaving waits until the peer has acknowledged the whole snapshot; leaving by an
    exception aborts the transfer, and returns only when nothing of it is in flight any more.
    """

    def __init__(self, route: TransferRoute, snapshot: Snapshot, key: str, *, timeout_s: float) -> None:
        self._route = route
        self._snapshot = snapshot
        self._key = key
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self._started = 0.0
        self._loop = asyncio.get_running_loop()
        self._transfer_id: int | None = None
        self._granted: asyncio.Future[Grant] = self._loop.create_future()
        self._acknowledged: asyncio.Future[None] = self._loop.create_future()
        self._stop = StopFlag()
        self._error: HurrayError | None = None
        self._plans: dict[tuple[int, int], Plan] = {}
        self._sent_layers: set[int] = set()
        self._moving: set[asyncio.Future[None]] = set()
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
        spec = self._snapshot.pool.spec
        if not 0 <= layer < spec.num_layers:
            raise GeometryError(f"must be from 0 to {spec.num_layers - 1}", field="layer", value=layer)
        if layer in self._sent_layers:
            raise GeometryError("was sent before", field="layer", value=layer)
        await self._send([layer])

    async def send_rest(self) -> None:
        """Moves every layer that was not sent yet, in order, as `send_layer` does."""
        await self._send([n for n in range(self._snapshot.pool.spec.num_layers) if n not in self._sent_layers])

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
        snapshot, pool = self._snapshot, self._route.pool()
        spec = snapshot.pool.spec
        check_pool(spec, pool)
        batch = Batch.of(
            snapshot.block_table,
            snapshot.seq_ptr,
            snapshot.seq_lens,
            page_size=spec.page_size,
            num_pages=snapshot.pool.num_pages,
        )
        session = self._route.session
        offer = Offer(
            key=self._key,
            pool_id=pool.pool_id,
            generation=pool.generation,
            descriptors=encode_many(snapshot.descriptors(), dialect=self._route.dialect()),
            block_table=snapshot.block_table,
            seq_ptr=snapshot.seq_ptr,
            seq_lens=snapshot.seq_lens,
            order=str(spec.order),
            deadline_s=self._timeout_s,
        )
        transfer_id = session.offer(offer, now=self._loop.time(), timeout_s=self._timeout_s)
        self._transfer_id = transfer_id
        self._route.register(transfer_id, self)
        self._route.notify()
        try:
            grant = await self._wait(self._granted, "a grant")
            self._plan(batch, grant, pool)
        except BaseException:
            await self._give_up("the offer came to nothing")
            raise
        self._batch = batch

    def _plan(self, batch: Batch, grant: Grant, pool: Pool) -> None:
        if len(grant.page_ids) != batch.num_pages:
            raise GeometryError(
                f"must be the {batch.num_pages} pages that travel", field="granted pages", value=len(grant.page_ids)
            )
        if len(grant.page_ids) and int(grant.page_ids.max()) >= pool.num_pages:
            raise GeometryError(
                f"is not below the peer's num_pages {pool.num_pages}",
                field="granted page ID",
                value=int(grant.page_ids.max()),
            )
        src_pool = self._snapshot.pool
        self._segments = [src_pool.segment(role, layer) for role, layer in src_pool.spec.tensors]
        for src, dst in zip(self._segments, pool.segments, strict=True):
            strides = (src.page_stride_nbytes, dst.page_stride_nbytes)
            if strides not in self._plans:
                self._plans[strides] = build_plan(
                    batch.page_ids,
                    grant.page_ids,
                    page_nbytes=src_pool.spec.page_nbytes,
                    src_stride_nbytes=strides[0],
                    dst_stride_nbytes=strides[1],
                )

    async def _send(self, layers: list[int]) -> None:
        if self._error is not None:
            raise self._error
        self._sent_layers.update(layers)
        moving = self._loop.run_in_executor(self._route.movers, self._move, layers)
        self._moving.add(moving)
        try:
            await asyncio.shield(moving)
        except HurrayError as error:
            self.fail(error)
            # Posting stops for a reason: an abort or a lost peer tells more than "stopped".
            raise self._error or error from error
        finally:
            if moving.done():
                self._moving.discard(moving)

    def _move(self, layers: list[int]) -> None:
        """In a mover thread: writes layer by layer, and has the loop tell the peer of each.

        Small layers go several at a time: a call costs as much as copying a few pages.
        """
        spec = self._snapshot.pool.spec
        layer_nbytes = max(1, self._batch.num_pages * spec.page_nbytes * len(spec.roles))
        step = max(1, _MIN_WRITE_NBYTES // layer_nbytes)
        for start in range(0, len(layers), step):
            indices = [
                layer * len(spec.roles) + role
                for layer in layers[start : start + step]
                for role in range(len(spec.roles))
            ]
            self._write(indices)
            self._loop.call_soon_threadsafe(self._ended, indices)

    def _write(self, indices: list[int]) -> None:
        """Writes the pages of some tensors: one call for all that lie in the same two regions with the same plan."""
        src_pool, pool = self._snapshot.pool, self._route.pool()
        memories = self._route.remote_memories()
        together: dict[tuple[int, int, int, int], list[tuple[int, int]]] = {}
        for index in indices:
            src, dst = self._segments[index], pool.segments[index]
            place = (src.region_index, dst.region_index, src.page_stride_nbytes, dst.page_stride_nbytes)
            together.setdefault(place, []).append((src.offset_nbytes, dst.offset_nbytes))
        for (src_region, dst_region, *strides), bases in together.items():
            src_offsets, dst_offsets, lengths = _placed(self._plans[strides[0], strides[1]], bases)
            moved = memories[dst_region].write(
                src_pool.regions[src_region],
                src_offsets=src_offsets,
                dst_offsets=dst_offsets,
                lengths=lengths,
                stop=self._stop,
                timeout_s=self._deadline - time.monotonic(),
            )
            self._num_operations += moved.num_operations
            self._nbytes += moved.nbytes
            self._write_seconds += moved.seconds

    def _ended(self, indices: list[int]) -> None:
        if self._error is None and self._transfer_id is not None:
            for index in indices:
                self._route.session.data_end(self._transfer_id, index, now=self._loop.time())
            self._route.notify()

    async def _finish(self) -> None:
        num_layers = self._snapshot.pool.spec.num_layers
        try:
            if self._error is None and len(self._sent_layers) < num_layers:
                missing = [layer for layer in range(num_layers) if layer not in self._sent_layers]
                raise GeometryError(
                    f"layers {missing[:8]} of {num_layers} were not sent",
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
        snapshot, spec, batch = self._snapshot, self._snapshot.pool.spec, self._batch
        memory = self._route.remote_memories()[0]
        return TransferStats(
            key=self._key,
            num_sequences=snapshot.num_seqs,
            num_tokens=snapshot.total_tokens,
            num_table_entries=len(batch.inverse),
            num_pages=batch.num_pages,
            logical_nbytes=len(batch.inverse) * spec.page_nbytes * len(spec.tensors),
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
        """Stops posting, waits for what is in flight, and tells the peer: ABORT, then QUIET if it is quiet."""
        self._stop.set()
        while self._moving:
            with suppress(asyncio.CancelledError):  # pages are in use: the caller's cancellation must wait
                await asyncio.wait(self._moving)
            self._moving = {moving for moving in self._moving if not moving.done()}
        if self._transfer_id is None:
            return
        session, now = self._route.session, self._loop.time()
        session.abort(self._transfer_id, ErrorCode.ABORTED, reason, now=now)
        if self._route.quiet():
            session.quiet(self._transfer_id, now=now)
        self._route.notify()
        self._forget()

    def _forget(self) -> None:
        if self._transfer_id is not None:
            self._route.forget(self._transfer_id)


def _placed(plan: Plan, bases: list[tuple[int, int]]) -> tuple[Offsets, Offsets, Offsets]:
    """One plan at each (source, destination) base: offsets in the two regions, uint64 ``[len(bases) * operations]``."""
    places = np.array(bases, np.uint64)
    return (
        (places[:, :1] + plan.src_offsets).ravel(),
        (places[:, 1:] + plan.dst_offsets).ravel(),
        np.tile(plan.lengths, len(bases)),
    )
