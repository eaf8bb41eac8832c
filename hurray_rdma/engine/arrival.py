"""One snapshot as its receiver sees it, from the grant on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import partial
from typing import Any

import numpy as np

from hurray_rdma.cache import Lease, PagePool, Snapshot, known_snapshot
from hurray_rdma.engine.apart import apart
from hurray_rdma.engine.marks import Mark, device_of, give_back, mark_soon
from hurray_rdma.engine.moment import Moment
from hurray_rdma.errors import (
    ConfigError,
    DeadlineExceededError,
    GeometryError,
    HurrayError,
    LeaseExpiredError,
    TransferAbortedError,
)
from hurray_rdma.plan import PlacedTables
from hurray_rdma.transport import Gate

__all__ = ["Arrival", "ArrivalState"]


class ArrivalState(Enum):
    """What became of the pages."""

    ARRIVING = auto()
    """Reserved; senders may write into them."""
    COMPLETE = auto()
    """All there; they are the application's until it releases them."""
    ABORTING = auto()
    """Not wanted any more; waiting for the senders' QUIET."""
    RELEASED = auto()
    """Back in the pool."""
    QUARANTINED = auto()
    """Lost to a sender that may still write: see `PageAllocator.accounts`."""


class Arrival:
    """A snapshot that is arriving. `Engine.arrivals` yields it as soon as its pages are granted.

    Release it when its pages are no longer needed, complete or not; leaving it to the engine's end costs pages.
    """

    def __init__(
        self,
        pool: PagePool,
        key: str,
        *,
        group: str | None,
        tables: PlacedTables,
        written: Lease,
        resident: Lease | None,
        timeout_s: float,
        sender: str,
        lane: str,
        path: str,
        on_abort: Callable[[Arrival, str], None],
    ) -> None:
        self.key = key
        """The sender's name for it."""
        self.group = group
        """Name of the pool that it is in: a cache group of `PoolGroups`, or as of `Engine.add_pool`; else None."""
        self.sender = sender
        """Name of the sending engine; of the first, where several send slices of the heads."""
        self.lane = lane
        """UCX transport that the sender writes over, as it said when it asked for pages: as `TransferStats.lane`, and
        with "(expected)" where its first pages to or from a GPU had not moved by then."""
        self.path = path
        """How it writes, as of `TransferStats.path`."""
        self.state = ArrivalState.ARRIVING
        self.granted_s = time.monotonic()
        """When its pages were granted, and those looked up that were here already, on the clock of `time.monotonic`."""
        self.completed_s: float | None = None
        """When it was complete, and its pages could be found by their keys; None before."""
        self.block_table = tables.block_table
        self.block_table.setflags(write=False)
        """Of this pool, uint32 ``[seq_ptr[-1]]``: where the pages will be."""
        self.seq_ptr = tables.seq_ptr
        self.seq_ptr.setflags(write=False)
        """Where each sequence starts in ``block_table``, uint32 ``[num_seqs + 1]``."""
        self.seq_lens = tables.seq_lens
        self.seq_lens.setflags(write=False)
        """Tokens of each sequence, uint32 ``[num_seqs]``."""
        self.num_pages = tables.num_pages
        """Its pages, each once: those that came and those that were here already."""
        self._pool = pool
        self._written = written
        self._resident = resident
        self.resident = (
            np.isin(self.block_table, resident.page_ids)
            if resident is not None
            else np.zeros(len(self.block_table), np.bool_)
        )
        """Which entries of ``block_table`` name pages that were here already, and do not travel: bool, one for each."""
        tables_nbytes = self.block_table.nbytes + self.seq_ptr.nbytes + self.seq_lens.nbytes
        self.tables_nbytes = tables_nbytes + self.resident.nbytes
        """What these take."""
        self._timeout_s = timeout_s
        self._on_abort = on_abort
        spec = pool.spec
        # A layer is in place when every head of every role is: one sender may have all of them, or a slice.
        self._missing = dict.fromkeys(spec.layer_indices, spec.num_heads * len(spec.roles))
        self._settled: set[int] = set()
        """Layers that are in place, or never will be."""
        self._moments: dict[int, Moment] = {}
        """Of the layers that somebody has waited for."""
        self._gates: dict[int, dict[Gate, asyncio.TimerHandle]] = {}
        """What CUDA streams wait for, and until when."""
        self._complete = Moment()
        self._quiet = Moment()
        self._error: HurrayError | None = None
        self._last_use: Mark | None = None
        """What must have run before the pages are anybody else's."""

    async def wait_layer(self, layer: int, *, stream: Any = None, timeout_s: float | None = None) -> None:
        """Returns when all pages of one layer, every role, are in place.

        With a stream it returns once the wait is queued, at once unless the stream's queue is full, and what is queued
        on the stream from then on waits for the layer, without the host. It waits for an arrival that fails, too, and
        no longer than ``timeout_s``: only `snapshot` tells whether all pages are there.

        Do not block the thread of the event loop on the stream before. Have every kernel run once before its first
        wait, or set ``CUDA_MODULE_LOADING=EAGER``: the first launch of a kernel loads it, which waits for all that is
        on the GPU, and holds up other calls of CUDA's meanwhile. CUDA knows nothing of these waits when it orders work
        of several streams: let no stream that is to fill or send the pages come after one that waits for them.

        Args:
            layer: as of `CacheSpec.layer_indices`: 0 to num_layers - 1 unless the pool has a group of the layers.
            stream: a CUDA stream, as of `Peer.send`; None is this task.
            timeout_s: defaults to the engine's.

        Raises:
            ConfigError: it is no stream, or one of a GPU that neither orders remote writes nor can be told to.
            GeometryError: there is no such layer.
            DeadlineExceededError: not in time; the arrival goes on.
            LeaseExpiredError: it was released.
            HurrayError: the transfer failed or was aborted.
        """
        if layer not in self._missing:
            raise GeometryError(f"must be one of {tuple(self._missing)}", field="layer", value=layer)
        if stream is not None and layer not in self._settled:
            await self._let_wait(stream, layer, self._timeout_s if timeout_s is None else timeout_s)
            return
        moment = self._moments.setdefault(layer, Moment())
        if layer in self._settled:
            moment.set()
        await self._wait(moment, f"layer {layer}", timeout_s)

    async def snapshot(self, *, timeout_s: float | None = None) -> Snapshot:
        """The complete snapshot: its block table holds page IDs of this engine's pool, aliases as the sender had them.

        Raises:
            DeadlineExceededError, LeaseExpiredError, HurrayError: as `wait_layer`.
        """
        if self.state is not ArrivalState.COMPLETE:
            await self._wait(self._complete, "all layers", timeout_s)
        return known_snapshot(
            self._pool,
            block_table=self.block_table,
            seq_ptr=self.seq_ptr,
            seq_lens=self.seq_lens,
        )

    async def settled(self) -> None:
        """Returns when every page is in place. Raises when that will not be, and no sender can write into the pages any
        more: for those who have chosen the pages themselves (`Engine.expect`), and would use them for something else.

        Raises:
            HurrayError: the transfer failed or was aborted; from now on nothing of it lands.
        """
        await self._quiet.wait()
        if self._error is not None:
            raise self._error

    async def _wait(self, moment: Moment, what: str, timeout_s: float | None) -> None:
        budget_s = self._timeout_s if timeout_s is None else timeout_s
        if not await moment.wait(budget_s):
            raise DeadlineExceededError(
                f"{what} of {self.key!r} did not arrive in time", field="timeout_s", value=budget_s
            )
        if self._error is not None:
            raise self._error
        if self.state is ArrivalState.RELEASED:
            raise LeaseExpiredError(f"arrival {self.key!r} was released; snapshot() and wait_layer() need its pages")

    async def _let_wait(self, stream: Any, layer: int, timeout_s: float) -> None:
        # CUDA's calls block while the stream's queue is full, maybe behind another gate, which this loop has to open.
        index, context = device_of(self._pool, stream), self._pool.regions[0].context
        if self._pool.device_index is not None and not context.orders_writes(index):
            rule = f"must be None: kernels that are queued on cuda:{index} already may miss what peers write later"
            raise ConfigError(rule, field="stream", value=stream, fix="Wait without a stream, and launch after that")
        gates = context.gates
        while (gate := gates.make()) is None:
            await apart(partial(gates.reserve, index=index))
            if layer in self._settled:
                return
        self._gates.setdefault(layer, {})[gate] = asyncio.get_running_loop().call_later(
            timeout_s, self._open, layer, gate
        )
        try:
            async with asyncio.timeout(timeout_s):
                await apart(partial(gate.wait, stream, index=index))
        except TimeoutError:
            self._open(layer, gate)
            rule = f"the stream's queue was full all the time: nothing of it waits for layer {layer} of {self.key!r}"
            raise DeadlineExceededError(rule, field="timeout_s", value=timeout_s) from None
        except BaseException:
            self._open(layer, gate)
            raise

    def _open(self, layer: int, gate: Gate) -> None:
        if (timer := self._gates[layer].pop(gate, None)) is not None:
            timer.cancel()
            gate.open()

    def _set(self, layers: Iterable[int]) -> None:
        """Whoever waits for these layers goes on: they are in place, or never will be."""
        self._settled.update(layers)
        if self._moments:
            for layer in self._settled & self._moments.keys():
                self._moments[layer].set()
        if self._gates:
            for layer in self._settled & self._gates.keys():
                for gate in list(self._gates[layer]):
                    self._open(layer, gate)

    def release(self, *, stream: Any = None) -> None:
        """Gives the pages back; one that is still arriving is aborted first. Harmless when repeated.

        Kernels that only are queued yet, behind `wait_layer` with a stream for instance, would find another snapshot in
        pages that went back before they run: name their stream.

        Args:
            stream: the CUDA stream, as of `Peer.send`, of the last work that uses the pages: they go back when what is
                queued on it by now has run, and perhaps some of what follows, without the host. Where CUDA does not
                tell that it has (a kernel failed, or the stream captures a graph), they go into quarantine. None: no
                work uses them any more.

        Raises:
            ConfigError: it is no stream, or on another GPU; nothing was released.
        """
        if self._last_use is None and self.state is not ArrivalState.RELEASED:
            self._last_use = mark_soon(self._pool, stream)
        if self.state is ArrivalState.ARRIVING:
            self.abort()
        elif self.state is ArrivalState.COMPLETE:
            self._free()

    def abort(self, reason: str = "the receiver does not want it any more") -> None:
        """Ends a transfer that is under way; its pages go back once the senders say that nothing is in flight."""
        if self.stopping(TransferAbortedError(f"arrival {self.key!r} was aborted here: {reason}")):
            self._on_abort(self, reason)

    # What the receiver tells it.

    def layers_ended(self, layers: Iterable[int], *, num_heads: int) -> None:
        """Some heads of one more role of each of the layers are in place."""
        whole = []
        for layer in layers:
            self._missing[layer] -= num_heads
            if self._missing[layer] == 0:
                whole.append(layer)
        self._set(whole)

    def all_layers_ended(self) -> None:
        """Every head of every role of every layer is in place."""
        self._set(self._missing)

    def completed(self) -> None:
        """Everything is in place."""
        self.state = ArrivalState.COMPLETE
        self.completed_s = time.monotonic()
        self._set(self._missing)
        self._complete.set()
        self._quiet.set()

    def stopping(self, error: HurrayError) -> bool:
        """The transfer is to end early; its pages wait until that is sure. False if it had ended, or was ending."""
        if self.state is not ArrivalState.ARRIVING:
            return False
        self.state = ArrivalState.ABORTING
        self._error = error
        self._set(self._missing)
        self._complete.set()
        return True

    def ended(self, *, quiet: bool, revocable: bool = False) -> None:
        """Every sender has ended; ``quiet``: no write of theirs can land any more, so that the pages go back."""
        if self.state is ArrivalState.ARRIVING:
            self.stopping(TransferAbortedError(f"the sender gave up on {self.key!r}"))
        if self.state is not ArrivalState.ABORTING:
            return
        if quiet:
            self._free()
            return
        self.state = ArrivalState.QUARANTINED
        self._pool.allocator.quarantine(self._written, reason=str(self._error), revocable=revocable)
        if self._resident is not None:
            give_back([self._resident], self._last_use)  # nobody was to write into these

    def recovered(self) -> None:
        """Writes into the quarantined pages have become impossible after all."""
        self.state = ArrivalState.RELEASED
        self._quiet.set()
        give_back([self._written], self._last_use, recover=True)

    def _free(self) -> None:
        self.state = ArrivalState.RELEASED
        self._quiet.set()
        give_back([self._written] if self._resident is None else [self._written, self._resident], self._last_use)

    def __repr__(self) -> str:
        return f"<Arrival {self.key!r} {self.state.name.lower()} {self.num_pages} pages>"
