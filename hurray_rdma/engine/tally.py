"""Counts what happens to an engine: one `Tally` each, told by its loop and by its mover threads.

It knows events and numbers, nothing of who moves, waits or exports. Every event costs the same, however many came
before: a few additions under a lock that nobody holds for longer than that.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

from hurray_rdma.cache import PageAccounts
from hurray_rdma.engine.stats import (
    DIRECTIONS,
    Direction,
    DirectionStats,
    EngineStats,
    Histogram,
    LaneStats,
    TransferStats,
)
from hurray_rdma.errors import HurrayError

__all__ = ["BOUNDS_S", "Tally"]

BOUNDS_S: tuple[float, ...] = (*(float(f"{digit}e{power}") for power in range(-5, 2) for digit in (1, 2, 5)), 100.0)
"""Bounds of every histogram, seconds: 10 us to 100 s, three to a decade."""


_MAX_LANES = 64
"""Counted apart, of each direction."""


class _Times:
    """A histogram that grows."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def value(self) -> Histogram:
        return Histogram(BOUNDS_S, tuple(self._counts), self._sum_s)


class _Flow:
    """One direction's counts."""

    def __init__(self, direction: Direction) -> None:
        self._plans = direction in ("send", "fetch")
        self._serves = direction == "serve"
        self._num_transfers = 0
        self._num_pages = 0
        self._num_resident = 0
        self._logical_nbytes = 0
        self._num_operations = 0
        self._lanes: Counter[tuple[str, str]] = Counter()
        self._times = _Times()
        self.failures: Counter[str] = Counter()

    def add(
        self,
        nbytes: int,
        *,
        lane: str,
        path: str,
        seconds: float,
        num_pages: int = 0,
        num_resident: int = 0,
        logical_nbytes: int = 0,
        num_operations: int = 0,
    ) -> None:
        self._num_transfers += 1
        self._num_pages += num_pages
        self._num_resident += num_resident
        self._logical_nbytes += logical_nbytes
        self._num_operations += num_operations
        # Senders say what they call their lanes.
        known = (lane, path) in self._lanes or len(self._lanes) < _MAX_LANES
        self._lanes[(lane, path) if known else ("other", "other")] += nbytes
        self._times.add(seconds)

    def add_stats(self, stats: TransferStats) -> None:
        self.add(
            stats.sent_nbytes,
            lane=stats.lane,
            path=stats.path,
            seconds=stats.seconds,
            num_pages=stats.num_pages,
            num_resident=stats.num_resident,
            logical_nbytes=stats.logical_nbytes,
            num_operations=stats.num_operations,
        )

    def value(self) -> DirectionStats:
        return DirectionStats(
            num_transfers=self._num_transfers,
            nbytes=self._lanes.total(),
            num_pages=None if self._serves else self._num_pages,
            num_resident=None if self._serves else self._num_resident,
            logical_nbytes=self._logical_nbytes if self._plans else None,
            num_operations=self._num_operations if self._plans else None,
            seconds=None if self._serves else self._times.value(),
            failures=dict(self.failures),
            lanes=tuple(LaneStats(lane, path, nbytes) for (lane, path), nbytes in sorted(self._lanes.items())),
        )


class Tally:
    """What an engine has done so far.

    Every method may be called on any thread, and under other locks: its own is the last to be taken.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flows = {direction: _Flow(direction) for direction in DIRECTIONS}
        self._grant_wait = _Times()
        self._numbers: Counter[str] = Counter()
        self._losses: Counter[str] = Counter()

    def sent(self, stats: TransferStats) -> None:
        """A push from here is complete: the peer has acknowledged it."""
        with self._lock:
            self._flows["send"].add_stats(stats)

    def received(
        self, *, nbytes: int, num_pages: int, num_resident: int, lane: str, path: str, seconds: float, waited_s: float
    ) -> None:
        """A push to here is complete.

        Args:
            nbytes: page bytes that were written.
            num_pages: pages written, of one layer and role.
            num_resident: pages that were here already, of one layer and role.
            lane, path: as in `TransferStats`; empty if unknown.
            seconds: from the grant to the end.
            waited_s: from the offer to the grant, seconds.
        """
        with self._lock:
            self._flows["receive"].add(
                nbytes, lane=lane, path=path, seconds=seconds, num_pages=num_pages, num_resident=num_resident
            )
            self._grant_wait.add(waited_s)

    def fetched(self, stats: TransferStats) -> None:
        """A pull to here is complete."""
        with self._lock:
            self._flows["fetch"].add_stats(stats)

    def served(self, *, nbytes: int, lane: str = "", path: str = "") -> None:
        """A peer has pulled ``nbytes`` page bytes from here and said so; lane and path are empty if it read them by
        itself, and did not say which of them it had already."""
        with self._lock:
            self._flows["serve"].add(nbytes, lane=lane, path=path, seconds=0.0)

    def failed(self, direction: Direction, error: BaseException) -> None:
        """A transfer came to nothing; once for each transfer, whatever else fails because of it."""
        with self._lock:
            self._flows[direction].failures[type(error).__name__] += 1

    def connected(self) -> None:
        """A session has opened, from either side."""
        self._count("num_connects")

    def reconnected(self) -> None:
        """A session has opened in place of one that had broken; `connected` is told, too."""
        self._count("num_reconnects")

    def disconnected(self, error: HurrayError | None) -> None:
        """A session that had opened has ended; None if it was closed in order."""
        with self._lock:
            self._numbers["num_disconnects"] += 1
            if error is not None:
                self._losses[type(error).__name__] += 1

    def fallback(self) -> None:
        """UCX could not be set up with a peer: pages travel on the control channel."""
        self._count("num_fallbacks")

    def quarantined(self, num_pages: int) -> None:
        """Late writes to so many pages cannot be ruled out: they are kept from use."""
        self._count("num_quarantined", num_pages)

    def recovered(self, num_pages: int) -> None:
        """So many pages came back out of quarantine."""
        self._count("num_recovered", num_pages)

    def lease_expired(self) -> None:
        """A lease ran out before its work was done."""
        self._count("num_leases_expired")

    def stats(
        self,
        *,
        pools: Mapping[str, PageAccounts],
        generations: Mapping[str, int],
        num_sessions: int,
        num_peers: int,
        num_waiting: int,
        num_arriving: int,
    ) -> EngineStats:
        """All counts at one moment, beside what the engine says of the present; see `EngineStats`."""
        with self._lock:
            numbers = self._numbers
            return EngineStats(
                **{direction: flow.value() for direction, flow in self._flows.items()},
                grant_wait=self._grant_wait.value(),
                num_connects=numbers["num_connects"],
                num_reconnects=numbers["num_reconnects"],
                num_disconnects=numbers["num_disconnects"],
                losses=dict(self._losses),
                num_fallbacks=numbers["num_fallbacks"],
                num_quarantined=numbers["num_quarantined"],
                num_recovered=numbers["num_recovered"],
                num_leases_expired=numbers["num_leases_expired"],
                num_sessions=num_sessions,
                num_peers=num_peers,
                num_waiting=num_waiting,
                num_arriving=num_arriving,
                pools=dict(pools),
                generations=dict(generations),
            )

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._numbers[name] += by
