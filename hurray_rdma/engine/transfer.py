"""One push as its sender sees it: offer, plan, moves layer by layer, acknowledgement, or a clean end before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import Lease, Snapshot, descriptor_form
from hurray_rdma.control import Grant
from hurray_rdma.engine.asking import Asking
from hurray_rdma.engine.compat import page_map_of
from hurray_rdma.engine.exchange import Route, retain
from hurray_rdma.engine.frames import Packer, frame_nbytes
from hurray_rdma.engine.marks import Mark, marked
from hurray_rdma.engine.mover import Mover, Moves
from hurray_rdma.engine.sayings import offer_of
from hurray_rdma.engine.stats import TransferStats
from hurray_rdma.engine.tally import Tally
from hurray_rdma.errors import GeometryError, HurrayError, TransferAbortedError
from hurray_rdma.plan import PageMap, check_pair, plan_transfer

__all__ = ["Transfer"]

_FRAME_NBYTES = 1 << 20
"""Page bytes of one TENSOR_DATA message."""


class Transfer(Asking[Grant]):
    """A snapshot on its way to a peer. Made by `Peer.begin`; an async context manager.

    Entering waits for the peer's grant. Leaving waits until the peer has acknowledged the whole snapshot; leaving by an
    exception aborts the transfer, and returns only when nothing of it is in flight any more.
    """

    def __init__(
        self,
        connect: Callable[[float], Awaitable[Route]],
        snapshot: Snapshot,
        key: str,
        *,
        pool: str | None,
        page_keys: NDArray[np.uint8] | None,
        zero_tails: bool,
        stream: Any,
        timeout_s: float,
        tally: Tally,
    ) -> None:
        super().__init__(connect, key, timeout_s=timeout_s, tally=tally, direction="send")
        self._snapshot = snapshot
        self._pool_name = pool
        self._page_keys = page_keys
        self._zero_tails = zero_tails
        self._stream = stream
        self._lease: Lease | None = None
        self._packer: Packer | None = None
        self._sent_layers: set[int] = set()
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
        await self._start()
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

    async def send_layer(self, layer: int, *, stream: Any = None) -> None:
        """Moves the pages of one layer, every role; returns when they are in place at the peer and it was told so.

        The pages must hold their content when it is called, or when the work that is on a CUDA stream by then has run,
        and stay as they are until it returns. Layers may come in any order, each once.

        Args:
            layer: as of `CacheSpec.layer_indices`.
            stream: the CUDA stream that the layer is computed on, as of `Peer.send`; None is that of `Peer.begin`.

        Raises:
            ConfigError: it is no stream.
            GeometryError: there is no such layer, or it was sent before.
            HurrayError: the transfer failed; leave the `async with` block.
        """
        if layer not in self._snapshot.pool.spec.layer_indices:
            known = self._snapshot.pool.spec.layer_indices
            raise GeometryError(f"must be one of {known}", field="layer", value=layer)
        if layer in self._sent_layers:
            raise GeometryError("was sent before", field="layer", value=layer)
        await self._send([layer], stream)

    async def send_rest(self, *, stream: Any = None) -> None:
        """Moves every layer that was not sent yet, in order, as `send_layer` does."""
        await self._send([n for n in self._snapshot.pool.spec.layer_indices if n not in self._sent_layers], stream)

    async def abort(self, reason: str = "the sender does not want it any more") -> None:
        """Ends the transfer; returns when nothing of it is in flight any more."""
        error = TransferAbortedError(f"transfer {self._key!r} was aborted here: {reason}")
        self.fail(error)
        try:
            await self._give_up(reason)
        finally:
            self._end(error)

    async def _start(self) -> None:
        self._lease = retain(self._snapshot)
        try:
            await self._begin(self._offer)
        except BaseException as error:
            self._end(error)
            raise

    async def _offer(self) -> None:
        snapshot, spec = self._snapshot, self._snapshot.pool.spec
        remote = self._remote = self._route.pool_for(spec, self._pool_name, device=snapshot.pool.device)
        dest = remote.layout
        check_pair(spec, dest.spec)
        session = self._route.session
        offer = offer_of(
            snapshot,
            remote,
            self._key,
            form=descriptor_form(snapshot.pool, dialect=self._route.dialect()),
            deadline_s=self._left_s,
            page_keys=self._page_keys,
        )
        transfer_id = session.offer(offer, now=self._loop.time(), timeout_s=self._left_s)
        try:
            self._route.notify()
            page_map = page_map_of(snapshot, dest.spec)  # while the peer looks at the offer
            self._prepare(page_map, await self._asked(transfer_id, "a grant"))
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
        self._mover_of(pool, self._plan)

    async def _send(self, layers: list[int], stream: Any) -> None:
        if self._error is not None:
            raise self._error
        self._sent_layers.update(layers)
        try:
            stream = self._stream if stream is None else stream
            mark = None if stream is None else await marked(self._snapshot.pool, stream, timeout_s=self._left_s)
        except BaseException:
            self._sent_layers.difference_update(layers)
            raise
        if mark is not None:
            await self._computed(mark)
        if self._mover is not None:
            await self._write(self._mover, layers)
        elif self._packer is not None:
            await self._send_frames(self._packer, layers)

    async def _computed(self, mark: Mark) -> None:
        """The pages hold their content, or the transfer has ended."""
        passed = mark.passed()
        await asyncio.wait(
            (passed, self._acknowledged),  # which fails when the transfer does
            timeout=self._deadline - time.monotonic(),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if self._error is not None:
            raise self._error
        if not passed.done():
            raise self._late()
        if isinstance(error := passed.exception(), HurrayError):
            self.fail(error)
        passed.result()

    async def _write(self, mover: Mover, layers: list[int]) -> None:
        nbytes = self._plan.nbytes * len(layers) // self._snapshot.pool.spec.num_layers
        await self._move(self._snapshot.pool, partial(mover.move, layers, self._soon(self._ended)), nbytes)

    async def _send_frames(self, packer: Packer, layers: list[int]) -> None:
        """Where the peer's memory cannot be reached: page bytes as TENSOR_DATA, no faster than the peer takes them."""
        spec, session = self._snapshot.pool.spec, self._route.session
        size = _FRAME_NBYTES if session.peer is None else frame_nbytes(_FRAME_NBYTES, session.peer)
        for layer in layers:
            for role in spec.roles:
                index = spec.index(role, layer)
                started, num_operations = time.monotonic(), 0
                try:
                    async with asyncio.timeout(self._deadline - time.monotonic()):
                        for start in range(0, packer.nbytes, size):
                            if self._error is not None:
                                raise self._error
                            frame, count = await asyncio.to_thread(
                                packer.frame, role, layer, start, size, timeout_s=self._left_s
                            )
                            session.tensor_data(self._require_id(), index, start, frame.data, now=self._loop.time())
                            num_operations += count
                            await self._route.flush()
                except TimeoutError:  # of this wait, or what the peer ended it with
                    raise self._error or self._late() from None
                self._moves.add(Moves(num_operations, packer.nbytes, time.monotonic() - started))
                self._ended([index])
        if self._error is not None:
            raise self._error

    def _require_id(self) -> int:
        if self._transfer_id is None:
            raise self._error or TransferAbortedError(f"transfer {self._key!r} has ended")
        return self._transfer_id

    def _ended(self, indices: list[int]) -> None:
        if self._error is None and self._transfer_id is not None:
            self._route.session.data_end(self._transfer_id, *indices, now=self._loop.time())
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
        self._stats = self._stats_of(
            self._snapshot, num_pages=self._plan.num_pages, num_resident=self._plan.num_resident
        )
        self._end(None)
        self._tally.sent(self._stats)
        self._log.bind(key=self._key).debug("sent: %d pages by %s", self._stats.num_pages, self._stats.lane)

    def _end(self, error: BaseException | None) -> None:
        """The source's pages are the application's again."""
        if self._lease is None:
            return  # it has ended before
        self._lease.release()
        self._lease = None
        if error is not None:
            self._failed(error)
