"""What a replay came to, as values: what table, JSON file and page are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hurray_rdma.bench.machine import MachineFacts
from hurray_rdma.replay.config import ReplayConfig
from hurray_rdma.replay.messages import Sample
from hurray_rdma.replay.trace import Malformed

__all__ = ["Life", "Percentiles", "ReplayReport"]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of some durations, seconds."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: ArrayLike) -> Percentiles:
        """Zeros where there is no value."""
        array = np.asarray(values, np.float64)
        return cls(*(np.percentile(array, [50, 90, 99, 100]).tolist() if array.size else [0.0] * 4))


@dataclass(frozen=True, slots=True)
class Life:
    """A decode worker from its start to its end; one that was killed and started again has two."""

    worker: int
    began_s: float
    """Seconds after the trace began; before it for those that were there then."""
    killed_s: float | None
    """When it was killed, seconds after the trace began. What it did after its last report is not known."""
    num_requests: int
    """Whose pages it has released again."""
    num_entries: int
    """Blocks of these."""
    num_resident: int
    """Of those, what it had when they were granted."""
    expected_resident: int | None
    """What the model of its cache says; None if its records are not whole."""
    num_evicted: int | None
    """Kept pages that it gave up for room; None if it was killed."""
    samples: tuple[Sample, ...]
    """Where its pages were; ``at_s`` in seconds after the trace began."""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Facts of one replay."""

    facts: MachineFacts
    trace: str
    config: ReplayConfig
    malformed: tuple[Malformed, ...]
    """Lines that were skipped."""
    num_requests: int
    num_delivered: int
    """Requests whose every byte was compared and whose output was given."""
    num_refused: int
    """Requests larger than the pool of their decode worker: refused at once, as they must be."""
    num_failed: int
    """Others that were not delivered."""
    num_again: int
    """Requests that were sent once more after a decode worker's death or a broken session."""
    seconds: float
    """From the first request to the last output."""
    transfers_per_s: float
    block_nbytes: int
    """A block in the scaled cache, all layers and roles."""
    num_entries: int
    """Blocks of all transfers, repeats included."""
    num_unique: int
    """Distinct blocks that were sent to each decode worker, summed up."""
    expected_unique: int
    """The same from the trace."""
    num_resident: int
    """Blocks that were not sent, since the decode worker held them, as the senders count."""
    resident_most: int
    """What endless caches would have held, were requests served one after the other."""
    logical_nbytes: int
    """Bytes if every block of every transfer had been sent."""
    unique_nbytes: int
    """Bytes if every distinct block had been sent once to each worker that needs it."""
    sent_nbytes: int
    compared_nbytes: int
    """Received bytes that were compared, resident ones each time."""
    lane: str
    send_s: Percentiles
    """Of a send: the wait for a grant, the transfer, the acknowledgement."""
    late_s: Percentiles
    """From when a request is due to its acknowledgement: the queue of its prefill worker too."""
    num_leases: int
    """Grants, those of killed workers left out, as in the fields that follow."""
    num_leases_expired: int
    num_waits: int
    """Grants that came more than a millisecond after their offer, most of them since pages were not free."""
    wait_s: float
    """Waiting for grants, all together."""
    refusals: Mapping[str, int]
    """Offers and transfers that decode workers ended, by the name of the error's class."""
    lives: tuple[Life, ...]
    problems: tuple[str, ...]
    """What is not as it must be; empty if all is well."""

    @property
    def hit_rate(self) -> float:
        """Resident blocks of all."""
        return self.num_resident / self.num_entries if self.num_entries else 0.0
