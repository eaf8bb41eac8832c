"""Small pushes into pages that the peer granted ahead: one control message each way.

After a small transfer a connection asks for as many pages again, so that the next one need not wait for its grant. The
peer may recall them at any time; what was to be sent then goes the usual way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import PagePool, Snapshot, descriptor_form
from hurray_rdma.control import Commit, Grant, Prepare, Reserve
from hurray_rdma.engine.compat import page_map_of, pages_nbytes, pages_of
from hurray_rdma.engine.exchange import Exchange, Route, retain
from hurray_rdma.engine.mover import INLINE_NBYTES, STEP_NBYTES
from hurray_rdma.engine.remote_pool import RemotePool
from hurray_rdma.engine.sayings import commit_of
from hurray_rdma.engine.stats import TransferStats
from hurray_rdma.engine.tally import Tally
from hurray_rdma.errors import GeometryError, HurrayError, LeaseExpiredError, ProtocolError, TransferAbortedError
from hurray_rdma.format import DescriptorForm
from hurray_rdma.plan import PageMap, WholePages, check_pair, plan_transfer
from hurray_rdma.transport import Bell

__all__ = ["AheadGrants", "PoolPair"]

Uint32: TypeAlias = NDArray[np.uint32]

_MAX_NBYTES = 8 << 20
"""Larger snapshots gain nothing: what they wait for their grant is little beside what they take."""
_MIN_PAGES = 8
_MAX_READY = 2
"""Grants held ready for each of the peer's pools."""
_ASK_AGAIN_S = 10.0
"""After a refusal, for as many: most receivers grant nothing ahead."""
_ASK_AFTER_RECALL_S = 1.0
"""After pages were recalled because others need them."""
_ANSWER_S = 10.0


@dataclass(slots=True, eq=False)
class PoolPair:
    """A pool here and the peer's that takes its snapshots: what is the same for each of them is found once.

    It does not hold the one here: whoever lets go of it wants its memory back.
    """

    remote: RemotePool
    form: DescriptorForm
    whole: WholePages | None
    """Where pages can be copied through a mapping as they are."""
    max_entries: int
    """A snapshot of more is not sent into pages granted ahead."""
    max_at_once: int | None
    """One of more goes layer by layer, so that its receiver may begin with the first; None: it has one."""
    max_rung: int
    """As many pages are copied at once, so that their receiver may listen meanwhile."""


class _Bar(NamedTuple):
    """The peer is not asked for so many pages, or more: fewer may be there."""

    until: float
    """On the monotonic clock, seconds."""
    num_pages: int


class _AheadGrant(Exchange[Grant]):
    """Pages of one of the peer's pools; used once."""

    def __init__(self, route: Route, remote: RemotePool, *, num_pages: int, tally: Tally) -> None:
        super().__init__("", timeout_s=_ANSWER_S, tally=tally, direction="send")
        self._route, self._remote = route, remote
        self._committed = False
        self._undone = False
        self._aborted = False
        self.remote = remote
        self.num_pages = num_pages
        self.ready = False
        """Whether the pages are there."""
        self.over = False
        """Whether it was refused or recalled, or given up."""
        self.bar: _Bar | None = None
        """On asking for others, once these are over."""

    def answered(self, answer: Grant) -> None:
        super().answered(answer)
        self.ready = not self.over

    def fail(self, error: HurrayError) -> None:
        self.ready, self.over = False, True
        super().fail(error)

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
        self._log = self._route.log.bind(transfer=self._transfer_id)
        self._route.register(self._transfer_id, self)
        self._route.notify()

    async def send(
        self,
        snapshot: Snapshot,
        pages: Uint32 | PageMap | None,
        key: str,
        *,
        pair: PoolPair,
        zero_tails: bool,
        started: float,
        timeout_s: float,
        on_committed: Callable[[int], None],
    ) -> TransferStats | None:
        """The whole snapshot; None if the peer ended it before anything has arrived, and there is time left.

        ``pages`` are None where nobody has counted them yet: they are whole, and few, and fit whichever they are.
        ``on_committed`` is told how many they were.

        Raises:
            HurrayError: as `Peer.send`.
        """
        self._key, self._timeout_s = key, timeout_s
        self._started, self._deadline = started, started + timeout_s
        source, lease = snapshot.pool, None
        try:
            grant = self._answer.result()
            counts = snapshot.counts()
            descriptors = pair.form.encode(counts)
            few = pages is None or (not isinstance(pages, PageMap) and len(pages) <= pair.max_rung)
            moving = None
            if few and grant.bell_token and counts.total_tokens:
                moving = source.gate.try_moving()  # by now: the loop must not wait for a renewal while a peer listens
            if moving is not None:
                with moving:
                    self._prepare(commit_of(snapshot, key, descriptors=descriptors, kind=Prepare))
                    lease = retain(snapshot)  # while the receiver wakes up: nobody else has had a turn of the loop
                    pages = pages_of(snapshot) if pages is None else pages
                    num_pages = self._ring(source, pair, grant, pages)
            else:
                lease = retain(snapshot)
                pages = pages_of(snapshot) if pages is None else pages
                num_pages = await self._write(source, pair, grant, pages, zero_tails=zero_tails)
            if self._transfer_id is None:
                raise self._error or TransferAbortedError(f"the transfer of {key!r} has ended")
            commit = commit_of(snapshot, key, descriptors=descriptors, kind=Commit)
            now, rung = self._loop.time(), moving is not None
            self._committed |= self._route.session.commit(self._transfer_id, commit, now=now, rung=rung)
            self._route.notify()
            # After it: what the receiver has to do for that keeps no application from the snapshot.
            on_committed(num_pages)
            await self._wait(self._acknowledged, "the acknowledgement")
        except BaseException as error:
            await self._give_up_incomplete()
            if self._is_undone(error) and time.monotonic() < self._deadline:
                self._log.bind(key=key).debug("goes the usual way: %s", error)
                return None
            self._failed(error)
            raise
        finally:
            if lease is not None:
                lease.release()
        self._forget()
        stats = self._stats_of(snapshot, num_pages=num_pages, num_resident=0)
        self._tally.sent(stats)
        self._log.bind(key=key).debug("sent: %d pages by %s, granted ahead", stats.num_pages, stats.lane)
        return stats

    def _prepare(self, prepare: Prepare) -> None:
        """The receiver wakes up, and makes ready for it, while the pages are copied."""
        if self._transfer_id is not None:
            self._route.session.prepare(self._transfer_id, prepare, now=self._loop.time())
            self._route.notify()
        self._committed = True  # from when it may ring

    def _ring(self, source: PagePool, pair: PoolPair, grant: Grant, pages: Uint32 | PageMap) -> int:
        """Copies whole pages here and now, and tells the receiver, which listens; how many they are."""
        assert pair.whole is not None
        assert not isinstance(pages, PageMap)
        page_ids = grant.page_ids[: len(pages)]
        bell = Bell(grant.bell_offset_nbytes, grant.bell_token)
        self._at_once(partial(self._copy, source, pair.whole, pages, page_ids, bell))
        return len(pages)

    async def _write(
        self, source: PagePool, pair: PoolPair, grant: Grant, pages: Uint32 | PageMap, *, zero_tails: bool
    ) -> int:
        """Moves them, whatever they are; how many they are."""
        if isinstance(pages, PageMap):
            page_ids = grant.page_ids[: pages.num_pages]
            plan = plan_transfer(source.layout, self._remote.layout, pages, page_ids, zero_tails=zero_tails)
            mover = self._mover_of(source, plan)
            await self._move(source, partial(mover.move, source.spec.layer_indices, lambda _: None), plan.nbytes)
            return pages.num_pages
        assert pair.whole is not None
        work = partial(self._copy, source, pair.whole, pages, grant.page_ids[: len(pages)])
        await self._move(source, work, len(pages) * pair.whole.page_nbytes)
        return len(pages)

    def _is_undone(self, error: BaseException) -> bool:
        """Whether the peer has ended it and nothing has arrived."""
        # A page stream may tell sooner than the session that the pages were recalled.
        recalled = isinstance(error, TransferAbortedError) and not self._committed and not self._aborted
        return isinstance(error, HurrayError) and (self._undone or recalled)

    def ended_by_peer(self, error: HurrayError) -> None:
        if self._error is None:
            # Without a COMMIT nothing arrives. After it only the peer's own word says so: a session that broke, or an
            # answer that could not be read, leaves open whether it was heard.
            unheard = self._route.session.is_closed or isinstance(error, ProtocolError)
            self._undone = not (self._committed and unheard)
            if not isinstance(error, LeaseExpiredError):
                recalled, now = self.ready, time.monotonic()
                self.bar = _Bar(now + _ASK_AFTER_RECALL_S, 0) if recalled else _Bar(now + _ASK_AGAIN_S, self.num_pages)
        super().ended_by_peer(error)

    async def abort(self, reason: str) -> None:
        self._aborted = True
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
        self._loop = asyncio.get_running_loop()
        self._grants: dict[tuple[int, str], list[_AheadGrant]] = {}
        """By the peer's pool, and the device of the pages that go there."""
        self._pairs: WeakKeyDictionary[PagePool, dict[str | None, PoolPair]] = WeakKeyDictionary()
        """By the pool here, and the name of the peer's that is asked for."""
        self._bars: dict[int, _Bar] = {}

    async def send(
        self, snapshot: Snapshot, key: str, *, pool: str | None, zero_tails: bool, started: float, timeout_s: float
    ) -> TransferStats | None:
        """Sends a small snapshot, if pages for it are ready; None if not, or if it cannot be: nothing has arrived.

        Args:
            snapshot, key, pool, zero_tails, timeout_s: as of `Peer.send`.
            started: when ``timeout_s`` began, on the monotonic clock, seconds.

        Raises:
            HurrayError: as `Peer.send`.
        """
        pair = self.pair_of(snapshot.pool, pool)
        if pair is None or len(snapshot.block_table) > pair.max_entries or self._looks_dead():
            return None
        remote = pair.remote
        grants = self._held(remote)
        if not grants and not self._may_ask(remote, _MIN_PAGES):
            return None  # as most receivers grant nothing ahead, nothing more is spent on it
        whole = pair.whole is not None and not zero_tails
        pages: Uint32 | PageMap | None = None
        # It has no more pages than entries: where these are few, it is on its way before its pages are counted.
        num_entries = len(snapshot.block_table)
        grant = _taken(grants, remote, num_entries) if whole and num_entries <= pair.max_rung else None
        if grant is None:
            try:
                pages = pages_of(snapshot) if whole else page_map_of(snapshot, remote.layout.spec)
            except GeometryError:
                return None  # the usual way says why
            num_pages = pages.num_pages if isinstance(pages, PageMap) else len(pages)
            grant = _taken(grants, remote, num_pages)
            if grant is None:
                self._ask(remote, num_pages)
                return None
        stats = await grant.send(
            snapshot,
            pages,
            key,
            pair=pair,
            zero_tails=zero_tails,
            started=started,
            timeout_s=timeout_s,
            on_committed=partial(self._ask, remote),
        )
        if stats is None:
            self._note_end(grant)
        return stats

    def _looks_dead(self) -> bool:
        """Whether the session may have broken unnoticed: nobody could know whether a COMMIT over it was heard.

        The usual way finds out before anything is written, and connects anew.
        """
        return self._route.session.is_silent(self._loop.time())

    def forget_pools(self, known: Collection[int]) -> None:
        """The peer's pools are not what they were; what it granted of those that are gone, it takes back itself.

        Args:
            known: the numbers of those that it has. No number is used twice.
        """
        self._pairs.clear()
        self._grants = {(number, device): held for (number, device), held in self._grants.items() if number in known}
        self._bars = {number: bar for number, bar in self._bars.items() if number in known}

    def pair_of(self, source: PagePool, name: str | None) -> PoolPair | None:
        """What is the same for all snapshots of a pool into the peer's of that name; None where these do not fit, or
        pages cannot be written directly: the usual way says why, if no way can."""
        pairs = self._pairs.get(source)
        if pairs is not None and name in pairs and not source.closed:
            return pairs[name]
        spec = source.spec
        try:
            layout, remote = source.layout, self._route.pool_for(spec, name, device=source.device)
            dest = remote.layout.spec
            if not remote.memories or spec.heads != dest.heads:
                return None
            check_pair(spec, dest)
        except HurrayError:
            return None
        pair = self._pairs.setdefault(source, {})[name] = PoolPair(
            remote,
            descriptor_form(source, dialect=self._route.dialect()),
            WholePages.between(layout, remote.layout) if remote.mapped else None,
            _MAX_NBYTES // pages_nbytes(spec),
            None if spec.num_layers == 1 else STEP_NBYTES // pages_nbytes(spec),
            INLINE_NBYTES // pages_nbytes(spec),
        )
        return pair

    def _ask(self, remote: RemotePool, num_pages: int) -> None:
        """For as many pages again, rounded up."""
        grants = self._held(remote)
        wanted = max(_MIN_PAGES, 1 << (num_pages - 1).bit_length())
        enough = [grant for grant in grants if grant.num_pages >= wanted]
        if len(enough) < _MAX_READY and len(grants) < 2 * _MAX_READY and self._may_ask(remote, wanted):
            grant = _AheadGrant(self._route, remote, num_pages=wanted, tally=self._tally)
            grant.ask()
            grants.append(grant)

    def _may_ask(self, remote: RemotePool, num_pages: int) -> bool:
        bar = self._bars.get(remote.pool.pool_id)
        return bar is None or num_pages < bar.num_pages or time.monotonic() >= bar.until

    def _held(self, remote: RemotePool) -> list[_AheadGrant]:
        """Those of a pool that are there, or asked for."""
        grants = self._grants.setdefault((remote.pool.pool_id, remote.device), [])
        for grant in [grant for grant in grants if grant.over]:
            self._note_end(grant)
            grants.remove(grant)
        return grants

    def _note_end(self, grant: _AheadGrant) -> None:
        if grant.bar is not None:
            self._bars[grant.remote.pool.pool_id] = grant.bar


def _taken(grants: list[_AheadGrant], remote: RemotePool, num_pages: int) -> _AheadGrant | None:
    """Takes the smallest that is large enough."""
    taken = None
    for grant in grants:
        smaller = num_pages <= grant.num_pages and (taken is None or grant.num_pages < taken.num_pages)
        if smaller and grant.ready and grant.remote.same(remote):
            taken = grant
    if taken is not None:
        grants.remove(taken)
    return taken
