"""What a receiver keeps of offers and of the arrivals that they become."""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import CacheSpec, Lease
from hurray_rdma.control import Offer
from hurray_rdma.engine.arrival import Arrival
from hurray_rdma.engine.frames import Unpacker
from hurray_rdma.engine.link import Link
from hurray_rdma.engine.logs import EngineLog
from hurray_rdma.engine.reach import NEVER_LATE, Reach, reach_of
from hurray_rdma.plan import PageMap

__all__ = ["GoodOffer", "Loud", "Part", "Remains", "WaitingOffers", "Whole"]


@dataclass(slots=True, eq=False)
class GoodOffer:
    """An offer that was checked against the pool."""

    link: Link
    transfer_id: int
    offer: Offer
    source: CacheSpec
    page_map: PageMap
    heads: tuple[int, int]
    """The model's heads that it brings: first, and the one after the last."""
    came: float
    """When, on the loop's clock."""
    page_keys: NDArray[np.uint8] | None
    """Of the pages of the grant, uint8 ``[num_pages, key_nbytes]``; None where they count for nothing."""

    @property
    def nbytes(self) -> int:
        """What is kept of it while it waits."""
        return self.offer.nbytes + self.page_map.nbytes

    @property
    def key(self) -> tuple[Link, int]:
        """What tells it from every other."""
        return self.link, self.transfer_id


@dataclass(slots=True, eq=False)
class Part:
    """A granted offer: what one sender brings to an arrival."""

    offer: GoodOffer
    whole: Whole
    page_ids: NDArray[np.uint32]
    """Granted pages that travel, uint32 ``[num_pages]``."""
    heard: float
    until: float
    """When its time is over, whatever is heard, on the loop's clock."""
    unpacker: Unpacker | None = None

    @property
    def may_be_loud(self) -> bool:
        """Whether bytes of it may land after its sender is gone."""
        return self.reach not in NEVER_LATE and len(self.page_ids) > 0

    @property
    def reach(self) -> Reach:
        """How its sender writes."""
        return reach_of(self.offer.offer.path, self.offer.offer.lane)


@dataclass(slots=True, eq=False)
class Whole:
    """An arrival, and what has been granted for it."""

    arrival: Arrival
    offer: GoodOffer
    """The first."""
    written: Lease
    page_keys: NDArray[np.uint8] | None
    """Keys of the written pages, uint8 ``[len(written), key_nbytes]``."""
    num_resident: int
    granted: float
    """When, on the loop's clock."""
    parts: list[Part] = field(default_factory=list)
    """Those whose end is not known yet."""
    heads: list[tuple[int, int]] = field(default_factory=list)
    """Granted so far."""
    remains: Remains | None = None
    """Once a part has ended in such a way that its writes may still land."""

    @property
    def loud(self) -> set[Loud]:
        """Of those parts what is kept."""
        return self.remains.loud if self.remains is not None else set()


@dataclass(slots=True, eq=False)
class Remains:
    """Of an arrival, one of whose senders has fallen silent: none of its tables, since that may stay so for ever."""

    arrival: weakref.ref[Arrival]
    """It lives as long as the application has it, or another sender fills it."""
    written: Lease
    loud: set[Loud] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Loud:
    """Of a part that ended in such a way that its writes may still land."""

    reach: Reach
    remains: Remains
    log: EngineLog


class WaitingOffers:
    """Offers that wait for pages, in the order in which they came, each no longer than its sender will.

    Args:
        too_late: told of each offer whose time is over; it does not wait any more then.
    """

    def __init__(self, too_late: Callable[[GoodOffer], None]) -> None:
        self._offers: dict[tuple[Link, int], GoodOffer] = {}
        self._timers: dict[tuple[Link, int], asyncio.TimerHandle] = {}
        self._counts: Counter[Link] = Counter()
        self.nbytes = 0
        """Of their tables."""
        self._too_late = too_late
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._offers)

    def of(self, link: Link) -> int:
        """How many of a link wait."""
        return self._counts[link]

    def append(self, offer: GoodOffer) -> None:
        """The last one."""
        self._counts[offer.link] += 1
        self.nbytes += offer.nbytes
        self._offers[offer.key] = offer
        self._timers[offer.key] = self._loop.call_later(offer.offer.deadline_s, self._due, offer)

    def first(self) -> GoodOffer | None:
        """The one that has waited longest; it goes on waiting."""
        return next(iter(self._offers.values()), None)

    def all(self) -> list[GoodOffer]:
        """Those that wait, longest first."""
        return list(self._offers.values())

    def remove(self, link: Link, transfer_id: int) -> bool:
        """Whether it was waiting; it is not any more."""
        offer = self._offers.pop((link, transfer_id), None)
        if offer is None:
            return False
        self.nbytes -= offer.nbytes
        self._counts[link] -= 1
        if not self._counts[link]:
            del self._counts[link]
        self._timers.pop((link, transfer_id)).cancel()
        return True

    def remove_all(self, link: Link | None = None) -> list[GoodOffer]:
        """Those of a link, or all."""
        gone = [offer for offer in self._offers.values() if link is None or offer.link is link]
        for offer in gone:
            self.remove(*offer.key)
        return gone

    def _due(self, offer: GoodOffer) -> None:
        if self.remove(*offer.key):
            self._too_late(offer)
