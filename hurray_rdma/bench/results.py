"""What a benchmark found out, as values: what table, JSON file and page are made from. Computes ratios only.

A ratio is the yardstick's time over the party's, so that 1.00 is as fast as the yardstick and more is faster. Each is
taken of two that ran in one round, and the median of these is told: a machine's pace changes from round to round.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from hurray_rdma.bench.case import Case, Pattern
from hurray_rdma.bench.machine import MachineFacts
from hurray_rdma.bench.measured import Measured, Stat
from hurray_rdma.bench.messages import Party

__all__ = [
    "BenchReport",
    "ContactRow",
    "Direction",
    "FreshRow",
    "IdleRow",
    "LatencyRow",
    "LayerTimes",
    "OverheadRow",
    "OverlapRow",
    "PlanningRow",
    "Skipped",
    "SweepRow",
    "latency_row",
    "sweep_rows",
]

_GIB = 2**30


class Direction(StrEnum):
    """Who moves the bytes."""

    PUSH = "push"
    """The sender writes."""
    PULL = "pull"
    """The receiver reads."""


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One party in one case of the transfer sweep."""

    lane: str
    """UCX transports that were asked for; empty: UCX's own choice."""
    direction: Direction
    pattern: Pattern
    page_nbytes: int
    num_pages: int
    party: Party
    carried_by: str
    """The lane and path that it got, where UCX carries it: ``"sysv, mapped"``."""
    seconds: Stat
    """Of a whole transfer, until the sender knows that the receiver has it."""
    gib_per_s: float
    """At the median."""
    ratio: float
    """Seconds of memcpy over this party's, the median of all rounds; 0 if memcpy did not run."""
    cpu_s_per_gib: float | None
    """Processor time of both sides, all rounds together, per GiB moved."""


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """One party's small transfers, microseconds from the call until the receiver may use the pages."""

    page_nbytes: int
    num_pages: int
    party: Party
    p50_us: float
    p99_us: float
    min_us: float
    max_us: float
    count: int
    sender_p50_us: float
    """Until the sender knows."""
    cpu_us: float | None
    """Processor time of both sides for each."""


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """One layer of the round shown, seconds from the round's start."""

    computed: tuple[float, float]
    """Begin and end."""
    sent: tuple[float, float]
    usable: float
    """At the receiver."""


@dataclass(frozen=True, slots=True)
class OverlapRow:
    """Layer by layer beside computing."""

    num_layers: int
    layer_nbytes: int
    compute_s: Stat
    """The computing alone."""
    transfer_s: Stat
    """The transfer alone, layer by layer."""
    together_s: Stat
    hidden: float
    """Share of the transfer's time that the computing hides: what `lost_seconds` tells is not."""
    copy_hidden: float
    """The same of a plain copy of the pages within the sender, past the cache, in the place of the transfer: what this
    machine's memory and cores let anybody hide."""
    possible: float
    """The same if nothing but the last layer's transfer were left over: 1 - 1 / num_layers."""
    timeline: tuple[LayerTimes, ...]
    """Of the round with the median time."""


@dataclass(frozen=True, slots=True)
class PlanningRow:
    """What a plan costs, apart from any transfer."""

    num_pages: int
    seconds: Stat
    us_per_page: float


@dataclass(frozen=True, slots=True)
class OverheadRow:
    """What a page costs beyond the copy of its bytes, with pages so small that the copy is next to nothing."""

    page_nbytes: int
    num_pages: int
    send_s: Stat
    memcpy_s: Stat
    us_per_page: float
    """Medians' difference per page."""


@dataclass(frozen=True, slots=True)
class ContactRow:
    """From the peer's address (NIXL: its metadata, already fetched) to the first page that it has."""

    party: Party
    pool_pages: int
    """Pages of the peer's pool; NIXL prepares all of them, as its users do."""
    seconds: Stat


@dataclass(frozen=True, slots=True)
class IdleRow:
    """Two connected engines with nothing to do."""

    seconds: float
    cpu_share: float
    """Processor time of both processes over the time, in cores."""


@dataclass(frozen=True, slots=True)
class FreshRow:
    """A contiguous snapshot into a fresh pool, beside one contiguous copy that bypasses the cache."""

    nbytes: int
    send_s: Stat
    copy_s: Stat
    ratio: float
    """Median seconds of the copy over the send's."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A party that did not run."""

    party: Party
    lane: str
    reason: str
    fix: str


@dataclass(frozen=True, slots=True)
class BenchReport:
    """One run of the benchmark."""

    facts: MachineFacts
    config: str
    """Name or path of the settings."""
    rounds: int
    peer: str
    """``host:port`` of the other machine; empty: two processes here."""
    compared_nbytes: int
    """Bytes of first transfers that were compared with what was sent."""
    sweep: tuple[SweepRow, ...] = ()
    latency: tuple[LatencyRow, ...] = ()
    overlap: OverlapRow | None = None
    planning: tuple[PlanningRow, ...] = ()
    overhead: OverheadRow | None = None
    contact: tuple[ContactRow, ...] = ()
    idle: IdleRow | None = None
    fresh: FreshRow | None = None
    skipped: tuple[Skipped, ...] = ()


def sweep_rows(
    case: Case, *, lane: str, carried_by: dict[Party, str], measured: Mapping[Party, Sequence[Measured]]
) -> tuple[SweepRow, ...]:
    """The rows of one case.

    Args:
        case: what was moved.
        lane: as of `SweepRow`.
        carried_by: of the parties that UCX carries.
        measured: one entry a round for each party; who takes long may have been in the first rounds only.
    """
    seconds = {party: Stat.of(np.concatenate([m.seconds for m in each])) for party, each in measured.items()}
    return tuple(
        SweepRow(
            lane=lane,
            direction=Direction.PULL if party is Party.HURRAY_PULL else Direction.PUSH,
            pattern=case.pattern,
            page_nbytes=case.page_nbytes,
            num_pages=case.num_pages,
            party=party,
            carried_by=carried_by.get(party, ""),
            seconds=stat,
            gib_per_s=case.nbytes / _GIB / stat.median,
            ratio=_ratio(measured.get(Party.MEMCPY, ()), measured[party]),
            cpu_s_per_gib=_cpu_s_per_gib(measured[party], case),
        )
        for party, stat in seconds.items()
    )


def _ratio(yardstick: Sequence[Measured], party: Sequence[Measured]) -> float:
    """Of the rounds that both were in; 0 if there is none."""
    ratios = [float(np.median(y.seconds) / np.median(p.seconds)) for y, p in zip(yardstick, party, strict=False)]
    return statistics.median(ratios) if ratios else 0.0


def _cpu_s_per_gib(measured: Iterable[Measured], case: Case) -> float | None:
    total, count = 0.0, 0
    for each in measured:
        if each.cpu_s is None:
            return None
        total, count = total + each.cpu_s, count + len(each.seconds)
    return total / (count * case.nbytes / _GIB)


def latency_row(case: Case, party: Party, measured: Sequence[Measured]) -> LatencyRow:
    """One row out of all rounds of a party."""
    usable_us = np.concatenate([m.usable_s for m in measured]) * 1e6
    p50, p99 = np.percentile(usable_us, [50, 99])
    return LatencyRow(
        page_nbytes=case.page_nbytes,
        num_pages=case.num_pages,
        party=party,
        p50_us=float(p50),
        p99_us=float(p99),
        min_us=float(usable_us.min()),
        max_us=float(usable_us.max()),
        count=usable_us.size,
        sender_p50_us=float(np.median(np.concatenate([m.seconds for m in measured]))) * 1e6,
        cpu_us=_cpu_us(measured),
    )


def _cpu_us(measured: Sequence[Measured]) -> float | None:
    seconds = [each.cpu_s for each in measured]
    known = [each for each in seconds if each is not None]
    return sum(known) / sum(len(m.seconds) for m in measured) * 1e6 if len(known) == len(seconds) else None
