"""The receiving side of one pool: who hears of it, what its senders say, its registration, its end.

Checks offers, and refuses at once what never fits; whose turn it is says `OfferQueue`. Senders that hold slices of the
heads fill one arrival together: their offers have one key. Runs on the event loop and owns no socket: each connection
is a `Link`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial

from hurray_rdma.cache import Lease, PagePool
from hurray_rdma.control import (
    AbortRequested,
    AllEnded,
    Commit,
    Committed,
    DescriptorsEnded,
    Event,
    LeaseRenewed,
    Offer,
    Offered,
    Pool,
    Prepared,
    Quiesced,
    Reserve,
    Reserved,
    SessionClosed,
    StaleGenerationError,
    TensorData,
    TransferFailed,
)
from hurray_rdma.engine.arrival import Arrival
from hurray_rdma.engine.commits import Commits
from hurray_rdma.engine.compat import announcement, pages_nbytes
from hurray_rdma.engine.granted import Granted
from hurray_rdma.engine.granting import Granting
from hurray_rdma.engine.link import Link
from hurray_rdma.engine.offer_queue import OfferQueue
from hurray_rdma.engine.parts import GoodOffer
from hurray_rdma.engine.placement import Placement
from hurray_rdma.engine.reach import Reach
from hurray_rdma.engine.reservations import Reservation, Reservations
from hurray_rdma.engine.shortages import Shortages
from hurray_rdma.engine.tally import Tally
from hurray_rdma.engine.untaken import Untaken
from hurray_rdma.errors import (
    DeadlineExceededError,
    HurrayError,
    PeerLostError,
    PoolExhaustedError,
    RegistrationError,
    TransferAbortedError,
)
from hurray_rdma.format import Dialect
from hurray_rdma.plan import map_keys

__all__ = ["Receiver"]

_log = logging.getLogger(__name__)


class Receiver:
    """Grants pages of one pool to any number of senders.

    Args:
        pool: where pages of arrivals are.
        pool_id: its number in the engine.
        name: what senders call it; "" is the engine's own.
        tenant: whose senders hear of it; "" is those with the engine's own token.
        arrivals: where granted transfers go.
        shortages: told of offers that wait for pages.
        ahead_pages: what may be held ready of pages granted ahead, as of `Engine`.
        lease_s: a grant of which nothing is heard for this long is aborted.
        max_transfer_s: so is one that is this old, whatever is heard.
        timeout_s: what `Arrival.wait_layer` and `Arrival.snapshot` wait by default.
        tally: counts what happens.
        on_resume: told when the pool has been registered anew, or could not be.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        pool_id: int,
        name: str,
        tenant: str,
        arrivals: Untaken,
        shortages: Shortages,
        ahead_pages: int,
        lease_s: float,
        max_transfer_s: float,
        timeout_s: float,
        tally: Tally,
        on_resume: Callable[[PagePool], None],
    ) -> None:
        self.pool = pool
        self._page_nbytes = pages_nbytes(pool.spec)
        self.pool_id = pool_id
        self.name = name
        self.tenant = tenant
        self.granted = Granted(
            pool, name=name, lease_s=lease_s, max_transfer_s=max_transfer_s, tally=tally, on_keys=self._keys_came
        )
        self._granting = Granting(
            pool, self.granted, name=name, arrivals=arrivals, lease_s=lease_s, timeout_s=timeout_s
        )
        self._ahead = Reservations(pool, max_pages=ahead_pages, lease_s=lease_s, tally=tally)
        self._arrivals = arrivals
        self._tally = tally
        self._on_resume = on_resume
        self._announced: Pool | None = None
        pool.claim(self)
        self._queue = OfferQueue(
            pool,
            name=name,
            granted=self.granted,
            granting=self._granting,
            arrivals=arrivals,
            shortages=shortages,
            refuse=self._refuse,
            on_shortage=partial(self._ahead.recall, "the pages are needed"),
        )
        self._commits: dict[Link, Commits] = {}
        self._settling = asyncio.Lock()
        self._closed = False
        self._loop = asyncio.get_running_loop()

    @property
    def generation(self) -> int:
        """Of the pool's registration."""
        return self._granting.generation

    @property
    def holding(self) -> bool:
        """Whether the pool is being registered anew, so that nothing is granted now."""
        return self._queue.holding

    @property
    def num_waiting(self) -> int:
        """Offers that wait for pages."""
        return self._queue.num_waiting

    @property
    def num_missing(self) -> int:
        """Pages that the offer that waits first lacks now; 0 where none waits. On any thread."""
        return self._queue.num_missing

    def let_offers_wait(self) -> None:
        """Offers into an external pool wait from now on until they are expected; see `Engine.let_offers_wait`."""
        self._queue.expects = True

    def expect(self, key: str, placement: Placement, *, take: Callable[[Arrival], None] | None = None) -> None:
        """Says where the snapshot of a key goes; see `Engine.expect`.

        Args:
            key, placement: as there.
            take: is given the arrival, instead of whoever takes all of them.

        Raises:
            ConfigError: the key is expected already.
        """
        self._queue.expect(key, placement, take=take)

    def unexpect(self, key: str) -> bool:
        """Takes `expect` back; False if an offer has taken the pages, or it was not there."""
        return self._queue.unexpect(key)

    def announce(self, link: Link, *, removed: bool = False) -> None:
        """Tells a sender of the pool, or of its end, if the pool is meant for it."""
        if link.peer.tenant != self.tenant or link.session.is_closed or self.pool.closed or self._closed:
            return
        pool = self._removal() if removed else self._announcement()
        try:
            link.session.announce(pool, now=self._loop.time())
        except HurrayError as error:  # it accepts no message of that length
            link.log.bind(pool=self.name).warning("cut off, since it cannot be told of the pool: %s", error)
            link.cut()
        else:
            link.notify()

    def _announcement(self) -> Pool:
        # Made once for all senders: with many layers it is most of what a new one costs.
        if self._announced is None or self._announced.generation != self.generation:
            self._announced = announcement(self.pool, pool_id=self.pool_id, generation=self.generation, name=self.name)
        return self._announced

    def _removal(self) -> Pool:
        return Pool(pool_id=self.pool_id, generation=self.generation, name=self.name, removed=True)

    async def adopt(self) -> None:
        """Takes back what an earlier engine on the pool left in quarantine, where registering anew makes that safe."""
        left = [lease for lease in self.pool.allocator.quarantined() if lease.revocable]
        if not left or not all(region.allocated for region in self.pool.regions):
            return
        try:
            await asyncio.to_thread(self.pool.renew)
        except HurrayError as error:
            _log.warning("pages of pool %r stay in quarantine: %s", self.name, error)
            return
        for lease in left:
            self.pool.allocator.recover(lease)
            self._tally.recovered(len(lease))

    def handle(self, link: Link, event: Event) -> None:
        """Takes one event of a connection's session; offers only for this pool."""
        match event:
            case Offered(transfer_id=transfer_id, offer=offer):
                self._offered(link, transfer_id, offer)
            case Reserved(transfer_id=transfer_id, reserve=reserve):
                # After what came before it: no arrival, nor its acknowledgement, waits for what is granted ahead.
                self._loop.call_soon(self._reserved, link, transfer_id, reserve)
            case Prepared(transfer_id=transfer_id, commit=commit):
                self._prepared(link, transfer_id, commit)
            case Committed(transfer_id=transfer_id, commit=commit):
                self._committed(link, transfer_id, commit)
            case TensorData():
                self.granted.data(event, link)
            case DescriptorsEnded(transfer_id=transfer_id, descriptor_indices=indices):
                self.granted.descriptors_ended(link, transfer_id, indices)
            case LeaseRenewed(transfer_id=transfer_id):
                self.granted.lease_renewed(link, transfer_id)
            case AllEnded(transfer_id=transfer_id):
                self.granted.all_ended(link, transfer_id)
            case (
                AbortRequested(transfer_id=transfer_id, error=error)
                | TransferFailed(transfer_id=transfer_id, error=error)
            ):
                if self._queue.remove(link, transfer_id):
                    self._tally.failed("receive", error)
                else:
                    self.granted.stopped(link, transfer_id, error)
                    self._ahead.stopped(link, transfer_id)
            case Quiesced(transfer_id=transfer_id):
                self.granted.quiet(link, transfer_id)
                self._ahead.quiet(link, transfer_id)
            case SessionClosed(error=error):
                self._queue.remove_link(link)
                self.granted.lost(link, error or PeerLostError("the session was closed"))
                self._ahead.lost(link)
                self._commits.pop(link, None)
                self._queue.grant_in_order()
            case _:
                pass

    async def settle(self, timeout_s: float) -> None:
        """Grants no more, and waits until nothing that was granted is under way. `resume` ends it.

        Raises:
            DeadlineExceededError: something still is, and grants go on.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._settling.acquire()
                self._queue.holding = True
                try:
                    self._ahead.recall("the pool is to be registered anew")
                    await self.wait_idle()
                except BaseException:
                    self.resume()
                    raise
        except TimeoutError:
            raise DeadlineExceededError(
                f"{len(self.granted)} transfers into pool {self.name!r} are under way",
                field="timeout_s",
                value=timeout_s,
            ) from None

    def renewed(self, links: Iterable[Link], *, whole: bool) -> None:
        """The pool, or some of it, has been registered anew: peers are told, and what they had of the whole is void."""
        self._granting.generation += 1
        for link in links:
            self.announce(link)
        # Refused only now, so that a sender that hears it knows what to offer to instead.
        for waiting in self._queue.remove_all():
            self._refuse(*waiting.key, self._stale(waiting.offer))
        if not whole:
            return
        revoked = {Reach.KEY} if all(region.key_revoked for region in self.pool.regions) else set()
        if all(region.allocated for region in self.pool.regions):
            revoked.add(Reach.MAPPING)
        self.granted.renewed(revoked)
        self._ahead.renewed(revoked)

    async def wait_idle(self) -> None:
        """Returns when nothing that was granted is under way."""
        await self._ahead.wait_idle()
        await self.granted.wait_idle()

    @property
    def busy(self) -> bool:
        """Whether anything is under way, or a late write still possible."""
        return self.granted.busy or self._ahead.busy

    def silenced(self, link: Link, reaches: set[Reach]) -> None:
        """Late writes of a peer have become impossible, of those that reach here in one of these ways."""
        self.granted.silenced(link, reaches)
        self._ahead.silenced(link, reaches)

    def owed_by(self, link: Link) -> bool:
        """Whether late writes of a peer are still possible."""
        return self.granted.owed_by(link) or self._ahead.owed_by(link)

    def resume(self) -> None:
        """Grants again, unless closed meanwhile."""
        self._settling.release()
        if not self._closed:
            self._queue.go_on()
        self._on_resume(self.pool)

    def close(self, reason: str = "the engine closed") -> None:
        """Takes no more offers, and ends what is not complete. Idempotent."""
        self._closed = True
        self.pool.disclaim(self)
        for waiting in self._queue.close():
            self._refuse(*waiting.key, TransferAbortedError(reason))
        for arrival in self.granted.arrivals():
            arrival.abort(reason)
        self._ahead.recall(reason)

    # Offers.

    def _offered(self, link: Link, transfer_id: int, offer: Offer) -> None:
        try:
            self._queue.add(self._checked(link, transfer_id, offer))
        except HurrayError as error:
            self._refuse(link, transfer_id, error)

    def _keys_came(self) -> None:
        self._queue.keys_came()

    def _refuse(self, link: Link, transfer_id: int, error: HurrayError) -> None:
        if not isinstance(error, StaleGenerationError):  # which is offered again
            self._tally.failed("receive", error)
        link.log.bind(transfer=transfer_id, pool=self.name).info("refused: %s", error)
        link.session.refuse(transfer_id, error, now=self._loop.time())
        link.notify()

    def _require_open(self, asked: Offer | Reserve) -> None:
        if self.pool.closed:
            raise RegistrationError("the receiving pool is closed")
        if asked.generation != self.generation:
            raise self._stale(asked)

    def _stale(self, asked: Offer | Reserve) -> StaleGenerationError:
        return StaleGenerationError(
            f"the pool is in generation {self.generation}", field="generation", value=asked.generation
        )

    def _checked(self, link: Link, transfer_id: int, offer: Offer) -> GoodOffer:
        self._require_open(offer)
        if not self._queue.expects:
            self.pool.check_grantable()
        commits = self._commits.get(link) or self._commits_of(link)
        source, heads, page_map = commits.check_offer(offer)
        if self.pool.allocator.never_fits(page_map.num_pages):
            raise PoolExhaustedError(
                f"is above all {self.pool.num_pages} pages of the receiving pool: it never fits",
                field="num_pages of the offer",
                value=page_map.num_pages,
                fix="Send fewer sequences at a time, or make the receiving pool larger",
            )
        page_keys = None
        if offer.page_keys.shape[1] and heads == self.pool.spec.heads:
            # A key stands for a whole page; a sender of some of its heads can neither spare it nor enter it.
            page_keys, _ = map_keys(page_map, offer.page_keys, offer.seq_ptr)
        return GoodOffer(link, transfer_id, offer, source, page_map, heads, self._loop.time(), page_keys)

    # Pages granted ahead.

    def _reserved(self, link: Link, transfer_id: int, reserve: Reserve) -> None:
        try:
            if reserve.generation != self.generation or self._queue.holding or self.pool.closed:
                raise StaleGenerationError("the pool grants nothing ahead now")
            self.pool.check_grantable()
            if self._queue.short:
                raise PoolExhaustedError("offers wait for pages")
            self._ahead.grant(link, transfer_id, reserve, generation=self.generation)
        except HurrayError as error:
            link.session.refuse(transfer_id, error, now=self._loop.time())
        link.notify()

    def _prepared(self, link: Link, transfer_id: int, commit: Commit) -> None:
        """A snapshot is being copied into pages that were granted ahead: it is complete if its bell rings."""
        held, came = self._ahead.held(link, transfer_id), self._loop.time()
        if held is None or held.bell is None or self.pool.needs_flush:
            return  # the COMMIT says it again
        arrival = self._checked_commit(link, transfer_id, held, commit)
        if arrival is not None and self._ahead.listen(held, nbytes=arrival.num_pages * self._page_nbytes):
            self._take_committed(link, transfer_id, arrival, came=came)

    def _committed(self, link: Link, transfer_id: int, commit: Commit) -> None:
        """A whole snapshot is in pages that were granted ahead."""
        held, came = self._ahead.held(link, transfer_id), self._loop.time()
        if held is None:
            return  # it was recalled, and the sender is told
        arrival = self._checked_commit(link, transfer_id, held, commit)
        if arrival is None:
            return
        self.granted.visibility.then(
            partial(self._take_visible, link, transfer_id, arrival, came=came),
            partial(self._not_committed, link, transfer_id),
        )

    def _checked_commit(self, link: Link, transfer_id: int, held: Reservation, commit: Commit) -> Arrival | None:
        """What the application is to get, in the first of the pages granted ahead; None where its sender is told why
        not."""
        if self._queue.is_expected(commit.key):  # elsewhere: its sender is to offer it
            error = TransferAbortedError("the application has chosen other pages for it")
            self._ahead.fail(link, transfer_id, error)
            return None
        try:
            self._arrivals.require_room()
            self._require_open(held.reserve)
            commits = self._commits.get(link) or self._commits_of(link)
            tables = commits.check(commit, held.reserve, held.lease.page_ids)
        except HurrayError as error:
            self._not_committed(link, transfer_id, error)
            return None
        return self._granting.arrival(
            link,
            commit.key,
            tables,
            written=held.lease,
            resident=None,
            lane=held.reserve.lane,
            path=held.reserve.path,
        )

    def _commits_of(self, link: Link) -> Commits:
        peer = link.peer
        commits = Commits(self.pool.spec, dialect=Dialect(peer.dialect), devices=peer.devices)
        self._commits[link] = commits
        return commits

    def _not_committed(self, link: Link, transfer_id: int, error: HurrayError) -> None:
        if self._ahead.held(link, transfer_id) is None:
            return  # its session has ended meanwhile, or the sender is told already
        self._tally.failed("receive", error)
        self._ahead.fail(link, transfer_id, error)

    def _take_visible(self, link: Link, transfer_id: int, arrival: Arrival, *, came: float) -> None:
        if self._ahead.held(link, transfer_id) is not None:  # its session has not ended meanwhile
            self._take_committed(link, transfer_id, arrival, came=came)

    def _take_committed(self, link: Link, transfer_id: int, arrival: Arrival, *, came: float) -> None:
        lease = self._ahead.use(link, transfer_id)
        arrival.completed()
        self._arrivals.put_nowait(arrival)
        # Whoever waits for the arrival comes first: what its sender waits for is less urgent.
        self._loop.call_soon(self._close_committed, link, transfer_id, arrival, lease, self._loop.time() - came)

    def _close_committed(self, link: Link, transfer_id: int, arrival: Arrival, lease: Lease, seconds: float) -> None:
        lease.trim(arrival.num_pages)
        now = self._loop.time()
        self.granted.committed(link, transfer_id, arrival, seconds=seconds)
        link.session.hear_bell(transfer_id, now=now)
        link.session.acknowledge(transfer_id, now=now)
        link.notify()
