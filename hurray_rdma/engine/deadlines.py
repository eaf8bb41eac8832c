"""Ends waits whose time is over, with one timer for all: most end long before, and need none of their own.

Knows times and whom to tell; knows nothing of what is waited for. On the event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Hashable

__all__ = ["Deadlines"]


class Deadlines:
    """What waits, by whatever tells one wait from another."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waits: dict[Hashable, tuple[float, Callable[[], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at = math.inf

    def begin(self, wait: Hashable, deadline: float, late: Callable[[], None]) -> None:
        """``late`` is called, once, unless the wait has ended before; one that was begun before begins anew.

        Args:
            wait: whatever `end` is told.
            deadline: on the clock of `time.monotonic`, seconds.
            late: from the loop: what it raises harms no other wait.
        """
        self._waits[wait] = deadline, late
        if deadline < self._looks_at:
            self._look_at(deadline)

    def end(self, wait: Hashable) -> None:
        """It is over. Harmless when repeated."""
        self._waits.pop(wait, None)

    def _look_at(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._looks_at = deadline
        self._timer = self._loop.call_later(max(0.0, deadline - time.monotonic()), self._look)

    def _look(self) -> None:
        self._timer, self._looks_at = None, math.inf
        now = time.monotonic()
        for wait, (deadline, _) in self._waits.items():
            if deadline <= now:
                self._loop.call_soon(self._tell, wait, deadline)
        later = [deadline for deadline, _ in self._waits.values() if deadline > now]
        if later:
            self._look_at(min(later))

    def _tell(self, wait: Hashable, deadline: float) -> None:
        if wait in self._waits and self._waits[wait][0] == deadline:  # else it has ended meanwhile, or begun anew
            self._waits.pop(wait)[1]()
