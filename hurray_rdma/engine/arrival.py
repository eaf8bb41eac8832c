"""One transfer as its receiver sees it, from the grant on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, auto

from hurray_rdma.cache import Lease, PagePool, Snapshot
from hurray_rdma.engine.batch import Batch
from hurray_rdma.errors import DeadlineExceededError, HurrayError, LeaseExpiredError, TransferAbortedError

__all__ = ["Arrival", "ArrivalState"]


class ArrivalState(Enum):
    """What became of the pages."""

    ARRIVING = auto()
    """Reserved; the sender may write into them."""
    COMPLETE = auto()
    """All there; they are the application's until it releases them."""
    ABORTING = auto()
    """Not wanted any more; waiting for the sender's QUIET."""
    RELEASED = auto()
    """Back in the pool."""
    QUARANTINED = auto()
    """Lost to a sender that may still write: see `Engine.accounts`."""


class Arrival:
    """A snapshot that is arriving. `Engine.arrivals` yields it as soon as its pages are granted.

    Release it when its pages are no longer needed, complete or not; leaving it to the engine's end costs pages.
    """

    def __init__(
        self,
        pool: PagePool,
        key: str,
        *,
        lease: Lease,
        batch: Batch,
        timeout_s: float,
        on_abort: Callable[[str], None],
        on_freed: Callable[[], None],
    ) -> None:
        self.key = key
        """The sender's name for it."""
        self.state = ArrivalState.ARRIVING
        self._pool = pool
        self._lease = lease
        self._batch = batch
        self._timeout_s = timeout_s
        self._on_abort = on_abort
        self._on_freed = on_freed
        self._missing = [len(pool.spec.roles)] * pool.spec.num_layers
        self._layers = [asyncio.Event() for _ in self._missing]
        self._complete = asyncio.Event()
        self._error: HurrayError | None = None

    async def wait_layer(self, layer: int, *, timeout_s: float | None = None) -> None:
        """Returns when all pages of one layer, every role, are in place.

        Args:
            layer: 0 to num_layers - 1.
            timeout_s: defaults to the engine's.

        Raises:
            DeadlineExceededError: not in time; the arrival goes on.
            LeaseExpiredError: it was released.
            HurrayError: the transfer failed or was aborted.
        """
        await self._wait(self._layers[layer], f"layer {layer}", timeout_s)

    async def snapshot(self, *, timeout_s: float | None = None) -> Snapshot:
        """The complete snapshot: its block table holds page IDs of this engine's pool, aliases as the sender had them.

        Raises:
            DeadlineExceededError, LeaseExpiredError, HurrayError: as `wait_layer`.
        """
        await self._wait(self._complete, "all layers", timeout_s)
        return Snapshot(
            self._pool,
            block_table=self._lease.page_ids[self._batch.inverse],
            seq_ptr=self._batch.seq_ptr,
            seq_lens=self._batch.seq_lens,
        )

    async def _wait(self, event: asyncio.Event, what: str, timeout_s: float | None) -> None:
        budget_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(budget_s):
                await event.wait()
        except TimeoutError:
            raise DeadlineExceededError(
                f"{what} of {self.key!r} did not arrive in time", field="timeout_s", value=budget_s
            ) from None
        if self._error is not None:
            raise self._error
        if self.state is ArrivalState.RELEASED:
            raise LeaseExpiredError(f"arrival {self.key!r} was released; snapshot() and wait_layer() need its pages")

    def release(self) -> None:
        """Gives the pages back; one that is still arriving is aborted first. Harmless when repeated."""
        if self.state is ArrivalState.ARRIVING:
            self.abort()
        elif self.state is ArrivalState.COMPLETE:
            self._free()

    def abort(self, reason: str = "the receiver does not want it any more") -> None:
        """Ends a transfer that is under way; its pages go back once the sender says that nothing is in flight."""
        if self.stopping(TransferAbortedError(f"arrival {self.key!r} was aborted here: {reason}")):
            self._on_abort(reason)

    # What the receiver tells it.

    def layer_ended(self, layer: int) -> None:
        """One more role of the layer is in place."""
        self._missing[layer] -= 1
        if self._missing[layer] == 0:
            self._layers[layer].set()

    def completed(self) -> None:
        """Every descriptor is in place."""
        self.state = ArrivalState.COMPLETE
        self._complete.set()

    def stopping(self, error: HurrayError) -> bool:
        """The transfer is to end early; its pages wait until that is sure. False if it was stopping already."""
        if self.state is not ArrivalState.ARRIVING:
            return False
        self.state = ArrivalState.ABORTING
        self._fail(error)
        return True

    def ended(self, *, quiet: bool) -> None:
        """A stopping transfer has ended; ``quiet``: no write of it can land any more, so that its pages go back."""
        if self.state is ArrivalState.ARRIVING:
            self.stopping(TransferAbortedError(f"the sender gave up on {self.key!r}"))
        if self.state is ArrivalState.ABORTING:
            if quiet:
                self._free()
            else:
                self.state = ArrivalState.QUARANTINED
                self._pool.allocator.quarantine(self._lease, reason=str(self._error))

    def _fail(self, error: HurrayError) -> None:
        if self._error is None:
            self._error = error
        for event in (*self._layers, self._complete):
            event.set()

    def _free(self) -> None:
        self.state = ArrivalState.RELEASED
        self._lease.release()
        self._on_freed()

    def __repr__(self) -> str:
        return f"<Arrival {self.key!r} {self.state.name.lower()} {len(self._lease.page_ids)} pages>"
