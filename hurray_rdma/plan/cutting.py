"""Stretches of a buffer: which pieces of a program, and which parts of them, lie between two of its bytes.

Buffers of pages travel in frames of any length. Knows offsets only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.plan.transfer import Program

__all__ = ["Cutter", "Pieces"]

Offsets = NDArray[np.uint64]


class Pieces(NamedTuple):
    """What is to be copied: as the arrays of a `Plan`."""

    src_offsets: Offsets
    dst_offsets: Offsets
    lengths: Offsets


class Cutter:
    """The pieces of one program in the order in which they lie in the buffer; 24 bytes each are kept.

    Args:
        program: whose pieces touch no byte of the buffer twice.
        from_buffer: whether the buffer is where the bytes come from; else they go there.
    """

    def __init__(self, program: Program, *, from_buffer: bool) -> None:
        plans = list(program.plans())
        src, dst, lengths = (
            np.concatenate([np.empty(0, np.uint64), *[getattr(plan, name) for plan in plans]])
            for name in ("src_offsets", "dst_offsets", "lengths")
        )
        begins = src if from_buffer else dst
        if np.count_nonzero(begins[1:] < begins[:-1]):
            order = np.argsort(begins)
            src, dst, lengths = src[order], dst[order], lengths[order]
        self._pieces = Pieces(src, dst, lengths)
        self._begins = src if from_buffer else dst

    def cut(self, begin: int, end: int) -> Pieces:
        """What lies in the buffer's bytes from ``begin`` to before ``end``, counted as the program counts them."""
        begin, end = max(0, begin), max(0, end)
        first = max(0, int(np.searchsorted(self._begins, begin, side="right")) - 1)
        last = max(first, int(np.searchsorted(self._begins, end, side="left")))
        src, dst, lengths = (array[first:last].copy() for array in self._pieces)
        if last > first:  # the last may end behind the end, and the first begin, and even end, before the beginning
            lengths[-1] = min(int(lengths[-1]), end - int(self._begins[last - 1]))
            skipped = min(max(0, begin - int(self._begins[first])), int(lengths[0]))
            src[0] += np.uint64(skipped)
            dst[0] += np.uint64(skipped)
            lengths[0] -= np.uint64(skipped)
        gone = int(last > first and not lengths[0])
        return Pieces(src[gone:], dst[gone:], lengths[gone:])
