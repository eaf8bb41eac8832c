"""Whose turn it is: the offers of one pool that wait for pages, and those that wait for the application to choose some.

Grants go out in the order of arrival, all pages of an offer at once; an offer that does not fit now waits, and nobody
overtakes it. Offers into pages that the application chooses hold nobody up. Knows offers that were checked, and no
session beyond telling a sender that it is refused. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable

from hurray_rdma.cache import PagePool
from hurray_rdma.control import PeerBusyError
from hurray_rdma.engine.arrival import Arrival
from hurray_rdma.engine.granted import Granted
from hurray_rdma.engine.granting import Granting
from hurray_rdma.engine.link import Link
from hurray_rdma.engine.nudge import Nudge
from hurray_rdma.engine.parts import GoodOffer, WaitingOffers
from hurray_rdma.engine.placement import Placement
from hurray_rdma.engine.shortages import Shortage, Shortages
from hurray_rdma.engine.untaken import Untaken
from hurray_rdma.errors import ConfigError, DeadlineExceededError, HurrayError

__all__ = ["OfferQueue"]

_MAX_WAITING = 1024
"""Offers that may wait for pages; more are refused as busy."""
_MAX_WAITING_OF_ONE = 256
"""Of one sender."""
_MAX_WAITING_NBYTES = 256 << 20
"""What the tables of waiting offers may take."""


class OfferQueue:
    """Close it before the pool.

    Args:
        pool: whose pages.
        name: what senders call it.
        granted: what was granted of it.
        granting: grants.
        arrivals: bounds what may be granted.
        shortages: told of offers that wait for pages.
        refuse: tells a sender, by its connection and transfer, that its offer is refused, and why.
        on_shortage: told whenever an offer has to wait for pages.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        name: str,
        granted: Granted,
        granting: Granting,
        arrivals: Untaken,
        shortages: Shortages,
        refuse: Callable[[Link, int, HurrayError], None],
        on_shortage: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._name = name
        self._granted = granted
        self._granting = granting
        self._arrivals = arrivals
        self._shortages = shortages
        self._refuse = refuse
        self._on_shortage = on_shortage
        self.holding = False
        """Whether nothing is granted now."""
        self._waiting = WaitingOffers(self._too_late)
        self._expected: dict[str, tuple[Placement, Callable[[Arrival], None] | None]] = {}
        self._unexpected = WaitingOffers(self._too_late)
        self._free_when_full: int | None = None
        self._told_short: tuple[GoodOffer, int] | None = None
        self._num_wanted = 0
        self.expects = False
        """Whether the application chooses pages, or has done so."""
        self._needs_pages = False
        """Whether an offer waits for pages, or may be about to; set before the pool is asked, and looked at on whatever
        thread gives some back."""
        self._nudge = Nudge(self._look_again)
        pool.allocator.watch(self._pages_freed)

    @property
    def num_waiting(self) -> int:
        """Offers that wait, for pages or for pages that the application chooses."""
        return len(self._waiting) + len(self._unexpected)

    @property
    def num_missing(self) -> int:
        """Pages that the offer that waits first lacks now; 0 where none waits. On any thread."""
        return max(0, self._num_wanted - self._pool.allocator.accounts().free)

    @property
    def short(self) -> bool:
        """Whether an offer waits for pages."""
        return len(self._waiting) > 0

    def add(self, offer: GoodOffer) -> None:
        """Grants an offer if it is its turn; else it waits, no longer than its sender will.

        Raises:
            HurrayError: it can be granted neither now nor later.
        """
        whole = self._granted.unfilled.get(offer.offer.key)
        if whole is not None:
            self._granting.join(whole, offer)
            return
        if self.num_waiting:
            self._require_room(offer)
        self._arrivals.require_room()
        if self._pool.external or self.is_expected(offer.offer.key):
            self._unexpected.append(offer)
            self._place_expected()
            return
        self._needs_pages = True
        if len(self._waiting) or not self._grant(offer):
            self._waiting.append(offer)
        else:
            self._needs_pages = False

    def _require_room(self, offer: GoodOffer) -> None:
        of_this_one = self._waiting.of(offer.link) + self._unexpected.of(offer.link)
        if self.num_waiting >= _MAX_WAITING or of_this_one >= _MAX_WAITING_OF_ONE:
            raise PeerBusyError("offers wait for pages already", field="waiting", value=self.num_waiting)
        if self._waiting.nbytes + self._unexpected.nbytes + offer.nbytes > _MAX_WAITING_NBYTES:
            rule = f"with the tables of offers that wait already it is above {_MAX_WAITING_NBYTES} bytes"
            raise PeerBusyError(rule, field="nbytes of the offer", value=offer.nbytes)

    def remove(self, link: Link, transfer_id: int) -> bool:
        """Whether an offer was waiting; it is not any more."""
        if self._waiting.remove(link, transfer_id) or self._unexpected.remove(link, transfer_id):
            self.grant_in_order()
            return True
        return False

    def remove_link(self, link: Link) -> None:
        """Its connection has ended; whose turn it is then says `grant_in_order`."""
        self._waiting.remove_all(link)
        self._unexpected.remove_all(link)

    def remove_all(self) -> list[GoodOffer]:
        """All that waited; none does any more."""
        return [*self._waiting.remove_all(), *self._unexpected.remove_all()]

    def go_on(self) -> None:
        """Grants what can be granted."""
        self.holding = False
        self._place_expected()
        self.grant_in_order()

    def grant_in_order(self) -> None:
        """Grants from the head of the queue while pages last; never past an offer that must wait."""
        self._free_when_full = None
        while (head := self._waiting.first()) is not None and self._grant(head):
            self._waiting.remove(*head.key)
        if not len(self._waiting):
            self._needs_pages = False
            self._told_short, self._num_wanted = None, 0
            self._shortages.over(self._name)

    def keys_came(self) -> None:
        """Pages can be found by their keys: who waits may need fewer than before."""
        if len(self._waiting):
            self.grant_in_order()

    def close(self) -> list[GoodOffer]:
        """No offer waits any more, and none is to come; those that waited."""
        self.holding = True
        self._pool.allocator.unwatch(self._pages_freed)
        self._num_wanted = 0
        self._shortages.over(self._name)
        return self.remove_all()

    # In order.

    def _pages_freed(self) -> None:
        """On any thread, under the allocator's lock."""
        if self._needs_pages:
            self._nudge()

    def _too_late(self, offer: GoodOffer) -> None:
        error = DeadlineExceededError("no pages became free in time", field="deadline_s", value=offer.offer.deadline_s)
        self._refuse(*offer.key, error)
        self.grant_in_order()

    def _look_again(self) -> None:
        """Pages that were only looked at, and given back, make no room."""
        if self._free_when_full is None or self._pool.allocator.accounts().free > self._free_when_full:
            self.grant_in_order()

    def _short_of(self, num_missing: int, head: GoodOffer) -> None:
        """The application is told once of each offer that comes to be first, and again when pages come or go."""
        self._num_wanted = num_missing + (self._free_when_full or 0)
        if self._told_short == (head, num_missing):
            return
        self._told_short = head, num_missing
        num_waiting = max(1, len(self._waiting))  # with the one that is about to
        self._shortages.tell(self._name, Shortage(self._name or None, num_missing, num_waiting))

    def _grant(self, offer: GoodOffer) -> bool:
        """Grants an offer its pages, or refuses it; False if it has to wait."""
        if self.holding or self._pool.closed:
            return False
        whole = self._granted.unfilled.get(offer.offer.key)
        try:
            if whole is not None:
                self._granting.join(whole, offer)
                return True
            self._arrivals.require_room()
            if num_missing := self._granting.grant(offer):
                self._free_when_full = self._pool.allocator.accounts().free
                self._short_of(num_missing, offer)
                self._on_shortage()
                return False
            self._join_those_that_wait(offer)
        except HurrayError as error:
            self._refuse(*offer.key, error)
        return True

    def _join_those_that_wait(self, first: GoodOffer) -> None:
        """Senders of further heads need no pages of their own: they overtake nobody, and nobody must hold them up."""
        key = first.offer.key
        if key in self._granted.unfilled:
            self._waiting.remove(*first.key)  # it has been granted, and must not join itself
            for offer in [waiting for waiting in self._waiting.all() if waiting.offer.key == key]:
                if key in self._granted.unfilled:
                    self._waiting.remove(*offer.key)
                    self._grant(offer)

    # Into pages that the application has chosen.

    def expect(self, key: str, placement: Placement, *, take: Callable[[Arrival], None] | None) -> None:
        """As of `Receiver.expect`."""
        if key in self._expected:
            raise ConfigError("is expected already", field="key", value=key, fix="Take it back first: unexpect")
        self.expects = True
        self._expected[key] = placement, take
        self._place_expected()

    def unexpect(self, key: str) -> bool:
        """As of `Receiver.unexpect`."""
        return self._expected.pop(key, None) is not None

    def is_expected(self, key: str) -> bool:
        """Whether the application has chosen pages for it, and nobody was granted them."""
        return key in self._expected

    def _place_expected(self) -> None:
        """Grants what is offered and expected; those of other keys wait for `expect`, and hold nobody up."""
        for offer in self._unexpected.all():
            expected = self._expected.get(offer.offer.key)
            whole = self._granted.unfilled.get(offer.offer.key)
            if (expected is None and whole is None) or self.holding or self._pool.closed:
                continue
            self._unexpected.remove(*offer.key)
            try:
                if whole is not None:
                    self._granting.join(whole, offer)
                elif expected is not None:
                    self._granting.place(offer, *expected)
                    del self._expected[offer.offer.key]
            except HurrayError as error:
                self._refuse(*offer.key, error)
