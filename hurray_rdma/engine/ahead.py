"""Small pushes into pages that the peer granted ahead: one control message each way.

After a small transfer a connection asks for as many pages again, so that the next one need not wait for its grant. The
peer may recall them at any time; what was to be sent then goes the usual way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from hurray_rdma.cache import Snapshot
from hurray_rdma.control import Grant, Reserve
from hurray_rdma.engine.compat import page_map_of, pages_nbytes
from hurray_rdma.engine.exchange import Exchange, RemotePool, Route, offer_of, retain
from hurray_rdma.engine.mover import Mover
from hurray_rdma.engine.stats import TransferStats
from hurray_rdma.engine.tally import Tally
from hurray_rdma.errors import HurrayError, PeerLostError, TransferAbortedError
from hurray_rdma.plan import PageMap, check_pair, plan_transfer

__all__ = ["AheadGrants"]

_MAX_NBYTES = 8 << 20
"""Larger snapshots gain nothing: what they wait for their grant is little beside what they take."""
_MIN_PAGES = 8
_MAX_READY = 2
"""Grants held ready for each of the peer's pools."""
_ASK_AGAIN_S = 10.0
"""After a refusal: most receivers grant nothing ahead."""
_ANSWER_S = 10.0


class _AheadGrant(Exchange[Grant]):
    """Pages of one of the peer's pools; used once."""

    def __init__(self, route: Route, remote: RemotePool, *, num_pages: int, tally: Tally) -> None:
        async def connect(_deadline: float) -> Route:
            return route

        super().__init__(connect, "", timeout_s=_ANSWER_S, tally=tally, direction="send")
        self._route, self._remote = route, remote
        self._by_peer = False
        self._mover: Mover | None = None
        self.remote = remote
        self.num_pages = num_pages

    @property
    def ready(self) -> bool:
        """Whether the pages are there."""
        return self._answer.done() and self._error is None

    @property
    def over(self) -> bool:
        """Whether it was refused or recalled."""
        return self._error is not None

    def ask(self) -> None:
        """Asks for them; the answer comes when it comes."""
        reserve = Reserve(
            pool_id=self._remote.pool.pool_id,
            generation=self._remote.pool.generation,
            num_pages=self.num_pages,
            deadline_s=_ANSWER_S,
            lane=self._remote.lane,
            path=self._remote.path,
        )
        self._transfer_id = self._route.session.reserve(reserve, now=self._loop.time(), timeout_s=_ANSWER_S)
        self._route.register(self._transfer_id, self)
        self._route.notify()

    async def send(
        self,
        snapshot: Snapshot,
        page_map: PageMap,
        key: str,
        *,
        zero_tails: bool,
        started: float,
        timeout_s: float,
        on_committed: Callable[[], None],
    ) -> TransferStats | None:
        """The whole snapshot; None if the pages were recalled meanwhile, and nothing has arrived.

        Raises:
            HurrayError: as `Peer.send`.
        """
        self._key, self._timeout_s = key, timeout_s
        self._started, self._deadline = started, started + timeout_s
        lease = retain(snapshot)
        try:
            plan = plan_transfer(
                snapshot.pool.layout,
                self._remote.layout,
                page_map,
                self._answer.result().page_ids[: page_map.num_pages],
                zero_tails=zero_tails,
            )
            mover = self._mover = Mover(
                snapshot.pool,
                plan,
                self._remote.memories,
                zeros=self._route.zeros(plan.zeros_nbytes) if plan.zeros_nbytes else None,
                stop=self._stop,
                deadline=self._deadline,
            )
            layers = snapshot.pool.spec.layer_indices
            await self._move(snapshot.pool, lambda: mover.move(layers, lambda _: None), plan.nbytes)
            if self._transfer_id is None:
                return None  # recalled
            offer = offer_of(snapshot, self._remote, key, dialect=self._route.dialect(), deadline_s=timeout_s)
            self._route.session.commit(self._transfer_id, offer, now=self._loop.time())
            on_committed()  # what it asks for travels with the commit, and its answer with the acknowledgement
            self._route.notify()
            await self._wait(self._acknowledged, "the acknowledgement")
        except BaseException as error:
            await self._give_up("the transfer was not completed")
            if self._was_recalled(error):
                return None
            self._failed(error)
            raise
        finally:
            lease.release()
        self._forget()
        stats = self._stats_of(snapshot, plan)
        self._tally.sent(stats)
        return stats

    def _was_recalled(self, error: BaseException) -> bool:
        """Whether the peer took the pages back, so that nothing has arrived."""
        return self._by_peer and isinstance(error, HurrayError) and not isinstance(self._error, PeerLostError)

    def ended_by_peer(self, error: HurrayError) -> None:
        self._by_peer = True
        super().ended_by_peer(error)

    @property
    def _in_doubt(self) -> bool:
        return self._mover is not None and self._mover.in_doubt

    async def abort(self, reason: str) -> None:
        self.fail(TransferAbortedError(f"the transfer of {self._key!r} was aborted here: {reason}"))
        await self._give_up(reason)


class AheadGrants:
    """What a connection holds ready of its peer's pools.

    Args:
        route: the connection.
        tally: counts what happens.
    """

    def __init__(self, route: Route, *, tally: Tally) -> None:
        self._route = route
        self._tally = tally
        self._grants: dict[int, list[_AheadGrant]] = {}
        self._ask_from = 0.0

    async def send(
        self, snapshot: Snapshot, key: str, *, pool: str | None, zero_tails: bool, timeout_s: float
    ) -> TransferStats | None:
        """Sends a small snapshot, if pages for it are ready; None if not, or if it cannot be: nothing has arrived.

        Raises:
            HurrayError: as `Peer.send`.
        """
        started = time.monotonic()
        spec = snapshot.pool.spec
        if len(snapshot.block_table) * pages_nbytes(spec) > _MAX_NBYTES:
            return None
        try:
            remote = self._route.pool_for(spec, pool)
            dest = remote.layout.spec
            check_pair(spec, dest)
        except HurrayError:
            return None  # the usual way says why
        if not remote.memories or spec.heads != dest.heads:
            return None
        page_map = page_map_of(snapshot, dest)
        grant = self._take(remote, page_map.num_pages)
        if grant is not None:
            return await grant.send(
                snapshot,
                page_map,
                key,
                zero_tails=zero_tails,
                started=started,
                timeout_s=timeout_s,
                on_committed=partial(self._ask, remote, page_map.num_pages),
            )
        self._ask(remote, page_map.num_pages)
        return None

    def _take(self, remote: RemotePool, num_pages: int) -> _AheadGrant | None:
        grants = self._grants.get(remote.pool.pool_id, [])
        grants[:] = [grant for grant in grants if not grant.over]
        for grant in grants:
            if grant.ready and grant.remote is remote and grant.num_pages >= num_pages:
                grants.remove(grant)
                return grant
        return None

    def _ask(self, remote: RemotePool, num_pages: int) -> None:
        """For as many pages again, rounded up."""
        now = time.monotonic()
        grants = self._grants.setdefault(remote.pool.pool_id, [])
        if any(grant.over for grant in grants):
            self._ask_from = now + _ASK_AGAIN_S
            grants[:] = [grant for grant in grants if not grant.over]
        wanted = max(_MIN_PAGES, 1 << (num_pages - 1).bit_length())
        small = [grant for grant in grants if grant.num_pages < wanted]
        if len(grants) - len(small) < _MAX_READY and len(grants) < 2 * _MAX_READY and now >= self._ask_from:
            grant = _AheadGrant(self._route, remote, num_pages=wanted, tally=self._tally)
            grant.ask()
            grants.append(grant)
