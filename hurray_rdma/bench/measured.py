"""What was measured, as numbers: times of each transfer, processor time, and the statistics that reports show."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Measured", "Stat", "cpu_seconds"]


@dataclass(frozen=True, slots=True)
class Measured:
    """Some transfers of one party, one after the other."""

    seconds: NDArray[np.float64]
    """Of each, until the sender knows that the receiver has it, ``[count]``."""
    usable_s: NDArray[np.float64]
    """Of each, until the receiver may use it, ``[count]``; as ``seconds`` where the receiver is not told."""
    cpu_s: float | None
    """Processor time of all processes of the party, all transfers together; None where it is not known."""


@dataclass(frozen=True, slots=True)
class Stat:
    """Some measurements of one thing."""

    median: float
    min: float
    max: float
    count: int

    @classmethod
    def of(cls, values: ArrayLike) -> Stat:
        """Of at least one value."""
        array = np.asarray(values, np.float64)
        return cls(float(np.median(array)), float(array.min()), float(array.max()), array.size)


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time of all threads of some processes since they began, seconds (clock_getcpuclockid(3))."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)
