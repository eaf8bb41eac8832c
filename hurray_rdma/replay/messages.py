"""What a replay's processes and their supervisor say to each other. Facts and commands, never page data.

Times are of `time.monotonic`, which all processes of a machine share.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.engine import EngineStats

__all__ = [
    "Begin",
    "DecodeNews",
    "Delivery",
    "Ended",
    "Failure",
    "Finish",
    "Killed",
    "PrefillNews",
    "Restarted",
    "Sample",
    "Service",
]


@dataclass(frozen=True, slots=True)
class Begin:
    """To all: the trace begins."""

    start_s: float


@dataclass(frozen=True, slots=True)
class Killed:
    """To prefill: a decode worker is dead, and is being started again."""

    worker: int


@dataclass(frozen=True, slots=True)
class Restarted:
    """To prefill: a decode worker died and was started again at its address."""

    worker: int
    finished: frozenset[int]
    """Requests whose output it had given before; what else it was sent is lost."""


@dataclass(frozen=True, slots=True)
class Finish:
    """To all: close everything and end."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A request that its decode worker has acknowledged."""

    request: int
    started_s: float
    """When its send began."""
    acknowledged_s: float
    num_entries: int
    """Pages that its block table names."""
    num_resident: int
    """Of those, what the decode worker had."""
    logical_nbytes: int
    sent_nbytes: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that cannot be sent."""

    request: int
    kind: str
    """Class of the error."""
    text: str


@dataclass(frozen=True, slots=True)
class PrefillNews:
    """What a prefill worker has done since it last said."""

    deliveries: tuple[Delivery, ...]
    failures: tuple[Failure, ...]
    again: tuple[int, ...]
    """Requests that it took up once more, since their decode worker died or their session broke."""


@dataclass(frozen=True, slots=True, eq=False)
class Service:
    """A request's life in a decode worker, from the grant to the release of its pages; each byte of it was compared."""

    request: int
    granted_s: float
    seen_s: float
    """When the worker took the arrival."""
    completed_s: float
    released_s: float
    free_when_seen: int
    """Free pages after the worker had made room."""
    free_when_released: int
    resident: NDArray[np.bool_]
    """Which of its blocks were here when it was granted, ``[num_blocks]``."""
    compared_nbytes: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Where a decode worker's pages are; the three add up to its pool."""

    at_s: float
    free: int
    kept: int
    """Prefixes of earlier requests that no request uses now."""
    in_use: int
    num_waiting: int
    """Offers that wait for pages."""


@dataclass(frozen=True, slots=True)
class DecodeNews:
    """What a decode worker has done since it last said."""

    services: tuple[Service, ...]
    num_failed: int
    """Arrivals that came to nothing."""
    sample: Sample


@dataclass(frozen=True, slots=True)
class Ended:
    """The last word of a worker: everything is released, nothing is connected."""

    stats: EngineStats
    lane: str
    """UCX transport that carries pages; empty for a receiver."""
    num_evicted: int
    """Kept pages that were given up for room."""
