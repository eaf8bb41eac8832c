"""What a receiver has granted, from the grant to its end: layers as they come, leases, aborts, quarantine.

Pages of a sender that fell silent stay out of use until no late write of it can land: it says QUIET after all, or
somebody who knows tells `silenced` or `renewed`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import PagePool
from hurray_rdma.control import ErrorCode, TensorData, error_code
from hurray_rdma.engine.arrival import Arrival, ArrivalState
from hurray_rdma.engine.compat import pages_nbytes
from hurray_rdma.engine.deadlines import Deadlines
from hurray_rdma.engine.frames import Unpacker
from hurray_rdma.engine.link import Link
from hurray_rdma.engine.logs import EngineLog
from hurray_rdma.engine.parts import GoodOffer, Loud, Part, Remains, Whole
from hurray_rdma.engine.reach import Reach
from hurray_rdma.engine.tally import Tally
from hurray_rdma.engine.visibility import Visibility
from hurray_rdma.errors import DeadlineExceededError, HurrayError, PeerLostError, ProtocolError, TransferAbortedError

__all__ = ["Granted"]


class Granted:
    """Arrivals under way of one pool, and those whose pages are in quarantine. Runs on the event loop.

    Args:
        pool: where their pages are.
        name: of the pool, for logs.
        lease_s: a grant of which nothing is heard for this long is aborted; then its sender has as long to say QUIET.
        max_transfer_s: a grant that is this old is aborted, too.
        tally: counts what happens.
        on_keys: told when pages can be found by their keys.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        name: str,
        lease_s: float,
        max_transfer_s: float,
        tally: Tally,
        on_keys: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._name = name
        self._lease_s = lease_s
        self._max_transfer_s = max_transfer_s
        self._tally = tally
        self._on_keys = on_keys
        self.visibility = Visibility(pool)
        """What has come is complete only once the pool's GPU sees it."""
        self._loop = asyncio.get_running_loop()
        self._parts: dict[tuple[Link, int], Part] = {}
        self._leases = Deadlines()
        self._page_nbytes = pages_nbytes(pool.spec)
        self._loud: dict[tuple[Link, int], Loud] = {}
        self.unfilled: dict[str, Whole] = {}
        """By key: arrivals that senders of further heads may join."""
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        """Arrivals under way."""
        return len(self.arrivals())

    @property
    def busy(self) -> bool:
        """Whether an arrival is under way, or a late write of one still possible."""
        return bool(self._parts or self.unfilled or self._loud)

    def arrivals(self) -> list[Arrival]:
        """Those under way."""
        wholes = [*(part.whole for part in self._parts.values()), *self.unfilled.values()]
        return list({id(whole): whole.arrival for whole in wholes}.values())

    async def wait_idle(self) -> None:
        """Returns when no arrival is under way."""
        while self._parts or self.unfilled:
            self._idle.clear()
            await self._idle.wait()

    def add(self, whole: Whole, offer: GoodOffer, page_ids: NDArray[np.uint32]) -> None:
        """The sender is being told of its pages.

        Args:
            whole: what it belongs to.
            offer: what was granted.
            page_ids: the pages that travel, uint32 ``[num_pages]``.
        """
        now = self._loop.time()
        part = Part(offer, whole, page_ids, now, now + self._max_transfer_s)
        self._watch_lease(offer.key, min(self._lease_s, self._max_transfer_s))
        if part.reach is Reach.STREAM:
            offer.link.permits.begin(offer.transfer_id, self._pool, page_ids, writes=True)
        self._parts[offer.key] = part
        whole.parts.append(part)
        whole.heads.append(offer.heads)
        if sum(last - first for first, last in whole.heads) == self._pool.spec.num_heads:
            self.unfilled.pop(offer.offer.key, None)
        elif len(whole.heads) == 1:
            self.unfilled[offer.offer.key] = whole
            self._watch_unfilled(whole)

    # Layers.

    def data(self, event: TensorData, link: Link) -> None:
        """Page bytes came on the control channel."""
        part = self._parts.get((link, event.transfer_id))
        if part is None or part.whole.arrival.state is not ArrivalState.ARRIVING:
            return
        part.heard = self._loop.time()
        try:
            if part.reach is not Reach.FRAMES:
                raise ProtocolError("the offer said that pages come otherwise", field="path", value="frames")
            self._unpacker(part).feed(event.descriptor_index, event.offset_nbytes, event.data)
        except HurrayError as error:
            self._fail_part(part, error)

    def descriptors_ended(self, link: Link, transfer_id: int, indices: tuple[int, ...]) -> None:
        """All pages of these, each one role of one layer, are in place, says the sender."""
        part = self._parts.get((link, transfer_id))
        if part is None:
            return
        part.heard = self._loop.time()
        if part.whole.arrival.state is not ArrivalState.ARRIVING:
            return
        if part.reach is Reach.FRAMES:
            try:
                for index in indices:
                    self._unpacker(part).finish(index)
            except HurrayError as error:
                self._fail_part(part, error)
                return
        self.visibility.then(partial(self._layers_ended, part, indices), partial(self._fail_part, part))

    def _layers_ended(self, part: Part, indices: tuple[int, ...]) -> None:
        """They are there to be read, too."""
        if part.whole.arrival.state is ArrivalState.ARRIVING:
            tensors, (first, last) = part.offer.source.tensors, part.offer.heads
            if len(indices) == len(tensors) and part.offer.heads == self._pool.spec.heads:
                part.whole.arrival.all_layers_ended()
                return
            part.whole.arrival.layers_ended([tensors[index][1] for index in indices], num_heads=last - first)

    def lease_renewed(self, link: Link, transfer_id: int) -> None:
        """The sender goes on: its next layer may still be computed. Not beyond the time that it gave the transfer."""
        part, now = self._parts.get((link, transfer_id)), self._loop.time()
        if part is not None and now < part.offer.came + part.offer.offer.deadline_s:
            part.heard = now

    def all_ended(self, link: Link, transfer_id: int) -> None:
        """A sender has done its part."""
        self.visibility.after(partial(self._all_ended, link, transfer_id))

    def _all_ended(self, link: Link, transfer_id: int) -> None:
        key = link, transfer_id
        part = self._parts.get(key)
        if part is None or part.whole.arrival.state is ArrivalState.ABORTING:
            return  # what was not wanted any more waits for QUIET
        self._forget(key)
        link.session.acknowledge(transfer_id, now=self._loop.time())
        link.notify()
        whole = part.whole
        whole.parts.remove(part)
        if not whole.parts and self.unfilled.get(part.offer.offer.key) is not whole:
            link.afterwards(partial(self.complete, whole))
        self._look_idle()

    def complete(self, whole: Whole) -> None:
        """Everything of it is in place."""
        if whole.page_keys is not None:
            self._pool.resident.insert(whole.page_keys, whole.written)
        now, offer = self._loop.time(), whole.offer
        num_pages = len(whole.written)
        self._tally.received(
            nbytes=num_pages * self._page_nbytes,
            num_pages=num_pages,
            num_resident=whole.num_resident,
            lane=offer.offer.lane.removesuffix(" (expected)"),  # as the sender's later offers say it
            path=offer.offer.path,
            seconds=now - whole.granted,
            waited_s=whole.granted - offer.came,
        )
        whole.arrival.completed()
        if whole.page_keys is not None:
            self._on_keys()
        if offer.link.log.isEnabledFor(logging.DEBUG):
            self._log(offer).debug("complete: %d pages by %s", len(whole.written), offer.offer.lane)

    def committed(self, link: Link, transfer_id: int, arrival: Arrival, *, seconds: float) -> None:
        """Counts an arrival whose pages were granted ahead.

        Args:
            link, transfer_id: its sender, and what it said it in.
            arrival: it.
            seconds: from when it was heard until it was complete.
        """
        self._tally.received(
            nbytes=arrival.num_pages * self._page_nbytes,
            num_pages=arrival.num_pages,
            num_resident=0,
            lane=arrival.lane.removesuffix(" (expected)"),
            path=arrival.path,
            seconds=seconds,
            waited_s=0.0,
        )
        if link.log.isEnabledFor(logging.DEBUG):
            log = link.log.bind(transfer=transfer_id, key=arrival.key, pool=self._name)
            log.debug("complete: %d pages by %s, granted ahead", arrival.num_pages, arrival.lane)

    def _unpacker(self, part: Part) -> Unpacker:
        if part.unpacker is None:
            part.unpacker = Unpacker(part.offer.source, self._pool, part.page_ids)
        return part.unpacker

    # Early ends.

    def abort(self, arrival: Arrival, code: ErrorCode, reason: str) -> None:
        """The arrival is not wanted any more: its senders are asked to stop."""
        self._tally.failed("receive", TransferAbortedError(reason))
        for part in [part for part in self._parts.values() if part.whole.arrival is arrival]:
            self._ask_to_stop(part, code, reason)
        for whole in [whole for whole in self.unfilled.values() if whole.arrival is arrival]:
            self._unfill(whole)
            self._end_if_over(whole)
        self._look_idle()

    def stopped(self, link: Link, transfer_id: int, error: HurrayError) -> None:
        """A sender wants out, or broke the protocol: its pages wait for QUIET, or for the end of the session."""
        part = self._parts.get((link, transfer_id))
        if part is not None:
            self._stop_whole(part.whole, error, but=part)

    def quiet(self, link: Link, transfer_id: int) -> None:
        """Nothing of a transfer is in flight any more."""
        key = link, transfer_id
        if key in self._parts:
            self._end_part(key, PeerLostError(f"the sender gave up on {self._parts[key].whole.arrival.key!r}"))
        elif key in self._loud:
            self._hush(key)

    def lost(self, link: Link, error: HurrayError) -> None:
        """A connection has ended; what its sender still writes nobody knows."""
        for key in [key for key in self._parts if key[0] is link]:
            self._end_part(key, error, loud=self._parts[key].may_be_loud)

    def silenced(self, link: Link, reaches: Iterable[Reach]) -> None:
        """Late writes of a peer have become impossible, of those that reach here in one of these ways."""
        for key in [key for key, left in self._loud.items() if key[0] is link and left.reach in reaches]:
            self._hush(key)

    def renewed(self, revoked: Iterable[Reach]) -> None:
        """The pool was registered anew, which ends late writes that reach here in these ways."""
        for key in [key for key, left in self._loud.items() if left.reach in revoked]:
            self._hush(key)

    def owed_by(self, link: Link) -> bool:
        """Whether late writes of a peer are still possible."""
        return any(of_link is link for of_link, _ in self._loud)

    def _fail_part(self, part: Part, error: HurrayError) -> None:
        self._stop_whole(part.whole, error, but=part)
        self._ask_to_stop(part, ErrorCode(error_code(error)), str(error))

    def _ask_to_stop(self, part: Part, code: ErrorCode, reason: str) -> None:
        part.heard = self._loop.time()  # from now on it has one lease to say QUIET
        part.offer.link.permits.end(part.offer.transfer_id)
        part.offer.link.session.abort(part.offer.transfer_id, code, reason, now=part.heard)
        part.offer.link.notify()

    def _stop_whole(self, whole: Whole, error: HurrayError, *, but: Part) -> None:
        """One part will not come: the arrival fails, and the other senders are told to stop."""
        if whole.arrival.stopping(error):
            self._tally.failed("receive", error)
            self._log(but.offer).info("failed: %s", error)
            self._unfill(whole)
            for part in whole.parts:
                if part is not but:
                    self._ask_to_stop(part, ErrorCode.ABORTED, f"another sender failed: {error}")

    def _end_part(self, key: tuple[Link, int], error: HurrayError, *, loud: bool = False) -> None:
        """A part that will not be complete is over; ``loud``: writes of it may still land."""
        part = self._parts[key]
        self._forget(key)
        whole = part.whole
        whole.parts.remove(part)
        if loud:
            if whole.remains is None:
                whole.remains = Remains(weakref.ref(whole.arrival), whole.written)
            self._loud[key] = left = Loud(part.reach, whole.remains, self._log(part.offer))
            whole.remains.loud.add(left)
        self._stop_whole(whole, error, but=part)
        self._end_if_over(whole)
        self._look_idle()

    def _end_if_over(self, whole: Whole) -> None:
        if whole.parts or whole.arrival.state is not ArrivalState.ABORTING:
            return
        whole.arrival.ended(quiet=not whole.loud, revocable=all(left.reach is not Reach.ADDRESS for left in whole.loud))
        if whole.loud:
            self._tally.quarantined(len(whole.written))
            self._log(whole.offer).warning(
                "%d pages are in quarantine: the sender fell silent, and a late write of it cannot be ruled out",
                len(whole.written),
            )

    def _hush(self, key: tuple[Link, int]) -> None:
        left = self._loud.pop(key)
        remains, arrival = left.remains, left.remains.arrival()
        remains.loud.discard(left)
        if remains.loud or (arrival is not None and arrival.state is not ArrivalState.QUARANTINED):
            return
        if arrival is not None:
            arrival.recovered()
        else:  # nobody can ask what became of it
            self._pool.allocator.recover(remains.written)
        self._tally.recovered(len(remains.written))
        left.log.info("%d pages are back from quarantine: no late write can land any more", len(remains.written))

    # Senders of further heads.

    def _watch_unfilled(self, whole: Whole) -> None:
        """They have one lease to come, counted from the last that did."""
        self._loop.call_later(self._lease_s, partial(self._unfilled_due, whole, len(whole.heads)))

    def _unfilled_due(self, whole: Whole, num_parts: int) -> None:
        if self.unfilled.get(whole.offer.offer.key) is not whole:
            return
        if len(whole.heads) > num_parts or whole.parts:
            self._watch_unfilled(whole)
            return
        error = DeadlineExceededError(
            f"senders of the other heads of {whole.arrival.key!r} did not come", field="lease_s", value=self._lease_s
        )
        if whole.arrival.stopping(error):
            self._tally.failed("receive", error)
            self._unfill(whole)
            self._end_if_over(whole)
        self._look_idle()

    def _unfill(self, whole: Whole) -> None:
        if self.unfilled.get(whole.offer.offer.key) is whole:
            del self.unfilled[whole.offer.offer.key]

    # Leases.

    def _watch_lease(self, key: tuple[Link, int], after_s: float) -> None:
        self._leases.begin(key, time.monotonic() + after_s, partial(self._lease_due, key))

    def _lease_due(self, key: tuple[Link, int]) -> None:
        """Nothing heard for too long: once to ask for the end, once more to stop waiting for it."""
        part = self._parts[key]
        arriving, now = part.whole.arrival.state is ArrivalState.ARRIVING, self._loop.time()
        too_old = arriving and now >= part.until
        left_s = part.heard + self._lease_s - now
        if left_s > 0 and not too_old:
            self._watch_lease(key, min(left_s, part.until - now) if arriving else left_s)
            return
        if too_old:
            rule, field, value = "no transfer keeps pages for longer", "max_transfer_s", self._max_transfer_s
        else:
            rule, field, value = "the sender let the lease run out", "lease_s", self._lease_s
        error = DeadlineExceededError(rule, field=field, value=value)
        if arriving:
            self._tally.lease_expired()
            self._stop_whole(part.whole, error, but=part)
            self._ask_to_stop(part, ErrorCode.LEASE_EXPIRED, str(error))
            self._watch_lease(key, self._lease_s)
        else:
            self._end_part(key, error, loud=part.may_be_loud)

    def _log(self, offer: GoodOffer) -> EngineLog:
        return offer.link.log.bind(transfer=offer.transfer_id, key=offer.offer.key, pool=self._name)

    def _forget(self, key: tuple[Link, int]) -> None:
        del self._parts[key]
        self._leases.end(key)
        link, transfer_id = key
        link.permits.end(transfer_id)

    def _look_idle(self) -> None:
        if not self._parts and not self.unfilled:
            self._idle.set()
