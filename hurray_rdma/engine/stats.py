"""What one transfer did, and what an engine has done, as values.

Plain numbers, strings, tuples and dicts: ``json.dumps(dataclasses.asdict(stats))`` works, and ``print(engine.stats())``
is a table for a person. Knows nothing of who counts (`hurray_rdma.engine.tally`) nor of who exports
(`hurray_rdma.engine.metrics`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hurray_rdma.cache import PageAccounts

__all__ = ["DIRECTIONS", "Direction", "DirectionStats", "EngineStats", "Histogram", "LaneStats", "TransferStats"]

Direction = Literal["send", "receive", "fetch", "serve"]
"""``send`` and ``receive`` are the two sides of a push, ``serve`` and ``fetch`` those of a pull."""

DIRECTIONS: tuple[Direction, ...] = ("send", "receive", "fetch", "serve")


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Facts of a completed transfer; counts are over all layers and roles unless they say otherwise."""

    key: str
    num_sequences: int
    num_tokens: int
    """Sum of seq_lens."""
    num_table_entries: int
    """Page references of all sequences, of one layer and role: an aliased page counts each time."""
    num_pages: int
    """Pages of the receiver that were written, of one layer and role: each physical page once."""
    num_resident: int
    """Pages that the receiver had already, of one layer and role: they were not sent."""
    logical_nbytes: int
    """Bytes if every sequence had been sent by itself."""
    sent_nbytes: int
    """Page bytes that were moved."""
    num_operations: int
    """Puts posted, or pieces copied through a mapping or sent over a page stream: neighbours on both sides are one."""
    seconds: float
    """From the offer to the acknowledgement."""
    write_seconds: float
    """Of those, spent moving pages."""
    lane: str
    """UCX transport that carried the pages: ``sysv``, ``cma``, ``tcp``, ``rc_mlx5`` ..., or ``control channel``."""
    path: str
    """``mapped`` (the peer's memory is mapped), ``put`` (``ucp_put_nbx``, or get), ``stream`` (a page stream) or
    ``frames`` (TENSOR_DATA)."""

    @property
    def gib_per_s(self) -> float:
        """Page bytes moved per second of the whole transfer, GiB/s."""
        return self.sent_nbytes / self.seconds / 2**30 if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class LaneStats:
    """What one way of moving pages has carried."""

    lane: str
    """As in `TransferStats.lane`; empty where this side cannot know it: what a peer has read from here."""
    path: str
    """As in `TransferStats.path`; empty where ``lane`` is."""
    nbytes: int
    """Page bytes moved."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """How long things took, in buckets of fixed bounds."""

    bounds_s: tuple[float, ...]
    """Upper bounds of the buckets, inclusive, rising, seconds."""
    counts: tuple[int, ...]
    """Observations of each bucket alone, not cumulated; one more than bounds: the last is above all of them."""
    sum_s: float
    """Sum of all observations, seconds."""

    @property
    def count(self) -> int:
        """Observations in all."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class DirectionStats:
    """What an engine has done in one direction since it was made.

    Only the side that plans a transfer knows its operations and logical bytes (``send`` and ``fetch``), and who is read
    from knows bytes alone (``serve``): numbers that a side does not know are None.
    """

    num_transfers: int
    """Completed; failed ones are in ``failures``."""
    nbytes: int
    """Page bytes moved, the sum of ``lanes``. Where a peer reads by itself (``serve``), those that it had already are
    among them: it does not say which."""
    num_pages: int | None
    """Pages of the receiver that were written, of one layer and role, as in `TransferStats`."""
    num_resident: int | None
    """Pages that the receiver had already, of one layer and role."""
    logical_nbytes: int | None
    """Bytes if every sequence had been sent by itself."""
    num_operations: int | None
    """Puts or gets posted, or pieces copied through a mapping."""
    seconds: Histogram | None
    """Whole transfers: from the offer (``receive``: from the grant) to the end."""
    failures: Mapping[str, int]
    """Transfers that failed, by the name of the error's class."""
    lanes: tuple[LaneStats, ...]
    """By lane and path, in order of their names."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine has done since it was made, and what it holds at this moment. Made by `Engine.stats`."""

    send: DirectionStats
    receive: DirectionStats
    fetch: DirectionStats
    serve: DirectionStats
    grant_wait: Histogram
    """From an offer to its grant, of what was received."""
    num_connects: int
    """Sessions opened, from either side."""
    num_reconnects: int
    """Of those, in place of a session that had broken."""
    num_disconnects: int
    """Sessions that ended, orderly or not."""
    losses: Mapping[str, int]
    """Of those, the ones that an error ended, by the name of its class."""
    num_fallbacks: int
    """Peers that UCX could not be set up with: their pages travel on the control channel."""
    num_quarantined: int
    """Pages put into quarantine, ever; ``pools`` has how many are there now."""
    num_recovered: int
    """Pages that came back out of it."""
    num_leases_expired: int
    """Leases that ran out before their work was done."""
    num_sessions: int
    """Open sessions of engines that have connected to this one."""
    num_peers: int
    """Open sessions of this engine with others."""
    num_waiting: int
    """Offers in the queue for pages."""
    num_arriving: int
    """Transfers that are granted and not complete."""
    pools: Mapping[str, PageAccounts]
    """Where the pages are, by the pool's name."""
    generations: Mapping[str, int]
    """Generation of each pool's registration, by its name."""

    def direction(self, direction: Direction) -> DirectionStats:
        """The stats of one direction by its name."""
        return {"send": self.send, "receive": self.receive, "fetch": self.fetch, "serve": self.serve}[direction]

    def __str__(self) -> str:
        """What a person asks first: transfers by direction, pages, sessions; of what goes wrong only what did."""
        flows = {name: self.direction(name) for name in DIRECTIONS}
        header = ("", "transfers", "failed", "pages", "bytes", "mean time", "over")
        rows = [header, *(_row(name, flow) for name, flow in flows.items())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join((name.ljust(widths[0]), *map(str.rjust, numbers, widths[1:-1]), over)).rstrip()
            for name, *numbers, over in rows
        ]
        lines += [f"failed to {name}: {_counted(flow.failures)}" for name, flow in flows.items() if flow.failures]
        lines += [
            f"pool {name!r}: {pool.num_pages:,} pages, {pool.free:,} free, {pool.leased:,} leased, "
            f"{pool.quarantined:,} in quarantine"
            for name, pool in self.pools.items()
        ]
        lines.append(
            f"sessions: {self.num_peers} open to others, {self.num_sessions} from others; "
            f"{self.num_connects} opened so far, {self.num_reconnects} of them anew"
            + (f"; lost: {_counted(self.losses)}" if self.losses else "")
        )
        lines.append(f"now: {self.num_arriving} transfers arriving, {self.num_waiting} offers waiting for pages")
        troubles = {
            "peers without UCX": self.num_fallbacks,
            "pages ever in quarantine": self.num_quarantined,
            "leases run out": self.num_leases_expired,
        }
        lines += [f"{what}: {number:,}" for what, number in troubles.items() if number]
        return "\n".join(lines)


def _row(name: str, flow: DirectionStats) -> tuple[str, str, str, str, str, str, str]:
    times = flow.seconds
    return (
        name,
        f"{flow.num_transfers:,}",
        f"{sum(flow.failures.values()):,}",
        "-" if flow.num_pages is None else f"{flow.num_pages:,}",
        f"{flow.nbytes / 2**20:,.1f} MiB",
        f"{times.sum_s / times.count * 1e3:,.1f} ms" if times is not None and times.count else "-",
        "; ".join(f"{each.lane}, {each.path}" for each in flow.lanes if each.lane),
    )


def _counted(names: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in sorted(names.items()))
