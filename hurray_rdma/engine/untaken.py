"""Arrivals on their way to the application, in order, within bounds."""

from __future__ import annotations

import asyncio

from hurray_rdma.control import PeerBusyError
from hurray_rdma.engine.arrival import Arrival

__all__ = ["Untaken"]

_MAX_ARRIVALS = 4096
"""Transfers without pages are bounded by nothing else."""
_MAX_NBYTES = 256 << 20
"""What their tables may take."""


class Untaken(asyncio.Queue[Arrival | None]):
    """Those that the application has not taken; None is the end."""

    nbytes = 0
    """What the tables of those take that are there now."""

    def require_room(self) -> None:
        """Raises if a further transfer must not be granted.

        Raises:
            PeerBusyError: there are too many, or their tables take too much.
        """
        if self.qsize() >= _MAX_ARRIVALS:
            raise PeerBusyError("arrivals are untaken", field="untaken", value=self.qsize())
        if self.nbytes >= _MAX_NBYTES:
            rule = f"the tables of {self.qsize()} arrivals that are untaken may take {_MAX_NBYTES} bytes"
            raise PeerBusyError(rule, field="nbytes", value=self.nbytes)

    # What `asyncio.Queue` leaves to its subclasses.

    def _put(self, item: Arrival | None) -> None:
        super()._put(item)
        if item is not None:
            self.nbytes += item.tables_nbytes

    def _get(self) -> Arrival | None:
        item = super()._get()
        if item is not None:
            self.nbytes -= item.tables_nbytes
        return item
