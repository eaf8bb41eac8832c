"""Words of shared memory by which a process of this host tells that what it copied there is complete.

What tells it over a socket begins its way only then. A bell is looked at by whoever heard before what is being copied,
and has made ready for it meanwhile. It is a hint that spares time: what holds is said on the control channel, too.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import NamedTuple

import numpy as np

from hurray_rdma.transport.binding import native
from hurray_rdma.transport.memory import Region

__all__ = ["Bell", "Bells"]

_APART_NBYTES = 64
"""Two in one cache line would slow each other down."""
_TOKENS = count(1)
"""Of all regions of the process: one that is used anew still holds what rang there before."""


class Bell(NamedTuple):
    """One word, for one copy. It rings when it holds the token."""

    offset_nbytes: int
    """From the start of the region, a multiple of 8."""
    token: int
    """1 to 2**64 - 1; no other bell of the region ever has the same."""


class Bells:
    """Gives out those of a region. Not thread-safe.

    Args:
        region: host memory that other processes can map.
        offset_nbytes: where they begin, a multiple of 64.
        nbytes: what they take.
    """

    def __init__(self, region: Region, *, offset_nbytes: int, nbytes: int) -> None:
        self._words = region.array()[: offset_nbytes + nbytes].view(np.uint64)
        # First in, first out: whoever had one last may ring it yet, and keep its next owner from being heard.
        self._free = deque(range(offset_nbytes, offset_nbytes + nbytes, _APART_NBYTES))

    def take(self) -> Bell | None:
        """A silent one; None if all are out."""
        if not self._free:
            return None
        return Bell(self._free.popleft(), next(_TOKENS))

    def give_back(self, bell: Bell) -> None:
        """It is not listened to any more. Who still rings it may, at most, make its next owner's ring unheard."""
        self._free.append(bell.offset_nbytes)

    def listen(self, bell: Bell, *, timeout_s: float) -> bool:
        """Whether it rings by then. Everything that its process copied before is visible here if it does.

        Lets other threads and processes of this core run meanwhile, but does not sleep: for times that are shorter than
        what it takes to wake up.
        """
        return native.rings(self._words, bell.offset_nbytes // 8, bell.token, round(timeout_s * 1e9))
