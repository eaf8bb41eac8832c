"""What an application is told of offers that wait for pages, so that it can give some back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

__all__ = ["Shortage", "Shortages"]


@dataclass(frozen=True, slots=True)
class Shortage:
    """Offers wait for pages of one pool."""

    group: str | None
    """Name of the pool, as of `Arrival.group`."""
    num_missing: int
    """Pages that the first of them lacks, beside those that are free: when so many come back, it is granted."""
    num_waiting: int
    """Offers that wait, that one included."""


class Shortages:
    """The newest of each pool, until somebody has heard of it or it is over. On the event loop."""

    def __init__(self) -> None:
        self._news: dict[str, Shortage] = {}
        self._changed = asyncio.Event()
        self._ended = False

    def tell(self, pool: str, shortage: Shortage) -> None:
        """Something has changed for the offer that waits first."""
        self._news[pool] = shortage
        self._changed.set()

    def over(self, pool: str) -> None:
        """No offer waits for its pages."""
        self._news.pop(pool, None)

    def end(self) -> None:
        """There will be no more."""
        self._ended = True
        self._changed.set()

    async def follow(self) -> AsyncIterator[Shortage]:
        """Each as it comes; of what has changed meanwhile only the newest. Ends with `end`."""
        while True:
            await self._changed.wait()
            if self._ended:
                return
            if self._news:
                yield self._news.pop(next(iter(self._news)))
            else:
                self._changed.clear()
