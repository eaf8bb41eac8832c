"""The free pages of a pool as runs: maximal stretches of consecutive page IDs, found by length.

Knows page IDs and nothing about who holds them. Runs are kept in buckets by the power of two of their length, and by
their two ends, so that taking and giving back cost time per run touched, which is never more than per page, and
neighbours always grow together again.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

__all__ = ["FreeRuns"]

_LOOKS_PER_BUCKET = 8
"""Runs of the request's own power of two that are looked at for one that is long enough."""


class FreeRuns:
    """The free pages of ``range(num_pages)``; all are free at first. Not thread-safe."""

    def __init__(self, num_pages: int) -> None:
        self._num_free = 0
        self._length_at: dict[int, int] = {}
        """First page of each run -> its length."""
        self._start_before: dict[int, int] = {}
        """Page after each run -> its first page."""
        self._buckets: tuple[dict[int, None], ...] = tuple({} for _ in range(num_pages.bit_length() + 1))
        """Bucket k: first pages of the runs of 2**(k-1) to 2**k - 1 pages."""
        if num_pages:
            self._add(0, num_pages)

    def __len__(self) -> int:
        """Free pages."""
        return self._num_free

    @property
    def num_runs(self) -> int:
        """Maximal stretches of free pages."""
        return len(self._length_at)

    def take(self, count: int, /) -> NDArray[np.uint32]:
        """Takes ``count <= len(self)`` pages: one run if one is long enough, else the longest ones. uint32 ``[count]``.

        Page IDs ascend within each run.
        """
        starts: list[int] = []
        lengths: list[int] = []
        while count:
            start, length = self._pop_run(count)
            taken = min(count, length)
            if taken < length:
                self._add(start + taken, length - taken)
            starts.append(start)
            lengths.append(taken)
            count -= taken
        sizes = np.array(lengths, np.int64)
        before = np.cumsum(sizes) - sizes
        shift = np.repeat(np.array(starts, np.int64) - before, sizes)
        page_ids: NDArray[np.uint32] = (np.arange(len(shift)) + shift).astype(np.uint32)
        return page_ids

    def give(self, page_ids: NDArray[np.uint32], /) -> None:
        """Gives pages back, each once; none may be free already."""
        for start, length in _runs_of(page_ids):
            before = self._start_before.get(start)
            if before is not None:
                length += start - before  # noqa: PLW2901 - the run grows to the left
                self._remove(before, start - before)
                start = before  # noqa: PLW2901
            after = self._length_at.get(start + length)
            if after is not None:
                self._remove(start + length, after)
                length += after  # noqa: PLW2901 - and to the right
            self._add(start, length)

    def _pop_run(self, count: int) -> tuple[int, int]:
        """Removes a run of at least ``count`` pages, a short one if found, else one of the longest: (start, length)."""
        own = count.bit_length()
        if own < len(self._buckets) and (fitting := self._pop_fitting(self._buckets[own], count)):
            return fitting
        for bucket in self._buckets[own + 1 :]:
            if bucket:
                return self._pop(bucket)
        return self._pop(next(bucket for bucket in reversed(self._buckets) if bucket))

    def _pop_fitting(self, bucket: dict[int, None], count: int) -> tuple[int, int] | None:
        too_short: list[tuple[int, int]] = []
        fitting = None
        while bucket and fitting is None and len(too_short) < _LOOKS_PER_BUCKET:
            start, length = self._pop(bucket)
            if length >= count:
                fitting = start, length
            else:
                too_short.append((start, length))
        for start, length in too_short:
            self._add(start, length)
        return fitting

    def _pop(self, bucket: dict[int, None]) -> tuple[int, int]:
        # The last entry: a dictionary that lost its first entries is slow to find the first one left.
        start, _ = bucket.popitem()
        length = self._length_at.pop(start)
        del self._start_before[start + length]
        self._num_free -= length
        return start, length

    def _add(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_before[start + length] = start
        self._buckets[length.bit_length()][start] = None
        self._num_free += length

    def _remove(self, start: int, length: int) -> None:
        del self._length_at[start]
        del self._start_before[start + length]
        del self._buckets[length.bit_length()][start]
        self._num_free -= length


def _runs_of(page_ids: NDArray[np.uint32]) -> Iterable[tuple[int, int]]:
    in_order = np.sort(page_ids).astype(np.int64)
    heads = np.flatnonzero(np.diff(in_order, prepend=-2) != 1)
    lengths = np.diff(heads, append=len(in_order))
    return zip(in_order[heads].tolist(), lengths.tolist(), strict=True)
