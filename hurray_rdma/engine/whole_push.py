"""One push of whole pages as its sender sees it: offered, and all copied at once without a plan, small ones in the very
event that brings their grant.

For pages that lie alike in both pools and go through a mapping; all others, and those that are to leave layer by layer,
are pushed by `hurray_rdma.engine.transfer`.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from hurray_rdma.cache import Snapshot
from hurray_rdma.control import Grant, StaleGenerationError
from hurray_rdma.engine.compat import page_map_of, pages_of
from hurray_rdma.engine.exchange import Exchange, Route, retain
from hurray_rdma.engine.mover import INLINE_NBYTES, Moves
from hurray_rdma.engine.remote_pool import RemotePool
from hurray_rdma.engine.sayings import offer_of
from hurray_rdma.engine.stats import TransferStats
from hurray_rdma.engine.tally import Tally
from hurray_rdma.errors import HurrayError, PeerLostError, TransferAbortedError
from hurray_rdma.format import DescriptorForm
from hurray_rdma.plan import WholePages, plan_transfer

__all__ = ["WholePush"]


class WholePush(Exchange[Grant | None]):
    """A snapshot on its way to a peer; the answer is its grant, or None where it was copied by then and acknowledged.

    Args:
        route: the connection.
        remote: the peer's pool, mapped.
        snapshot, key: as of `Peer.send`.
        form: of the descriptors of the snapshot's pool.
        whole: of the two pools.
        started: when ``timeout_s`` began, on the monotonic clock, seconds.
        timeout_s: for all of it.
        tally: counts what happens.
    """

    def __init__(
        self,
        route: Route,
        remote: RemotePool,
        snapshot: Snapshot,
        key: str,
        *,
        form: DescriptorForm,
        whole: WholePages,
        started: float,
        timeout_s: float,
        tally: Tally,
    ) -> None:
        super().__init__(key, timeout_s=timeout_s, tally=tally, direction="send")
        self._started, self._deadline = started, started + timeout_s
        self._route, self._remote = route, remote
        self._form, self._whole = form, whole
        self._snapshot = snapshot
        self._num_pages = self._num_resident = 0
        self._moved = False
        """Or about to be."""
        self.was_lost = False
        """Whether `send` gave None because the session had broken: another one is to be made once, not more."""

    async def send(self) -> TransferStats | None:
        """All of it; None if nothing was moved and it may be offered again: the pool is not what it was, or the session
        had broken unnoticed.

        Raises:
            HurrayError: as `Peer.send`.
        """
        snapshot, transfer_id = self._snapshot, None
        lease = retain(snapshot)
        try:
            offer = offer_of(snapshot, self._remote, self._key, form=self._form, deadline_s=self._left_s)
            transfer_id = self._route.session.offer(offer, now=self._loop.time(), timeout_s=self._left_s)
            self._transfer_id = transfer_id
            self._route.register(transfer_id, self)
            self._route.notify()
            self._pages = pages_of(snapshot)  # while the peer looks at the offer
            self._num_pages = len(self._pages)
            grant = await self._wait(self._answer, "a grant")
            if grant is not None:
                await self._write(grant)
                await self._wait(self._acknowledged, "the acknowledgement")
        except BaseException as error:
            self._log = self._route.log.bind(transfer=transfer_id)
            await self._give_up_incomplete()
            if not self._moved and isinstance(error, StaleGenerationError | PeerLostError):
                self.was_lost = isinstance(error, PeerLostError)
                return None
            self._failed(error)
            raise
        finally:
            lease.release()
        self._forget()
        stats = self._stats_of(snapshot, num_pages=self._num_pages, num_resident=self._num_resident)
        self._tally.sent(stats)
        if self._route.log.isEnabledFor(logging.DEBUG):
            log = self._route.log.bind(transfer=transfer_id, key=self._key)
            log.debug("sent: %d pages by %s", stats.num_pages, stats.lane)
        return stats

    # What the route tells it.

    def answered(self, answer: Grant | None) -> None:
        """Copies at once, where that takes no longer than to wake up whoever waits; else that does."""
        source = self._snapshot.pool
        if answer is None or not self._is_small(answer) or (moving := source.gate.try_moving()) is None:
            super().answered(answer)
            return
        self._moved = True
        with moving:
            try:
                self._moves = self._copy(source, self._whole, self._pages, answer.page_ids)
            except HurrayError as error:
                self.fail(error)
            else:
                self._say_ended()

    def _is_small(self, grant: Grant) -> bool:
        return (
            self._error is None
            and self._takes_all(grant)
            and self._num_pages * self._whole.page_nbytes <= INLINE_NBYTES
        )

    def acknowledged(self) -> None:
        super().acknowledged()
        self.answered(None)

    async def abort(self, reason: str) -> None:
        self.fail(TransferAbortedError(f"the transfer of {self._key!r} was aborted here: {reason}"))
        await self._give_up(reason)

    # Steps.

    def _takes_all(self, grant: Grant) -> bool:
        """Whether every page travels, to the one of its place in the grant."""
        return len(grant.page_ids) == self._num_pages and not (len(grant.resident) and grant.resident.any())

    async def _write(self, grant: Grant) -> None:
        """In its turn: the pool here is being registered anew, or some pages are there already, or they are too many to
        copy on the event loop."""
        source = self._snapshot.pool
        self._moved = True
        if self._takes_all(grant):
            ended = self._soon(self._say_ended)

            def work() -> Moves:
                moves = self._copy(source, self._whole, self._pages, grant.page_ids)
                ended()  # sooner than whoever waits for this wakes up
                return moves

            await self._move(source, work, self._num_pages * self._whole.page_nbytes)
        else:
            plan = plan_transfer(
                source.layout,
                self._remote.layout,
                page_map_of(self._snapshot, self._remote.layout.spec),
                grant.page_ids,
                resident=grant.resident if len(grant.resident) else None,
            )
            self._num_pages, self._num_resident = plan.num_pages, plan.num_resident
            mover = self._mover_of(source, plan)
            await self._move(source, partial(mover.move, source.spec.layer_indices, lambda _: None), plan.nbytes)
            self._say_ended()

    def _say_ended(self) -> None:
        if self._error is None and self._transfer_id is not None:
            self._route.session.data_end_of_all(self._transfer_id, now=self._loop.time())
            self._route.notify()

    def _not_in_time(self, future: Any, what: str) -> None:
        super()._not_in_time(future, "the acknowledgement" if self._moved else what)
