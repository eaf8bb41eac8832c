"""Something that happens once, and may be waited for within a time: a timer is what it costs, and only if it is.

Knows tasks and time; `asyncio.Event` and `asyncio.timeout` cost a small transfer several times as much.
"""

from __future__ import annotations

import asyncio

__all__ = ["Moment"]


class Moment:
    """On the event loop."""

    __slots__ = ("_waiting", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        """Whether it has come."""
        self._waiting: list[asyncio.Future[bool]] = []

    def set(self) -> None:
        """It comes now; whoever waits goes on. Harmless when repeated."""
        self.is_set = True
        for waiting in self._waiting:
            _end(waiting, came=True)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Returns when it has come; False if that took too long.

        Args:
            timeout_s: seconds; None is for ever.
        """
        if self.is_set:
            return True
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[bool] = loop.create_future()
        self._waiting.append(waiting)
        timer = None if timeout_s is None else loop.call_later(timeout_s, _too_late, waiting)
        try:
            return await waiting
        finally:
            if timer is not None:
                timer.cancel()
            self._waiting.remove(waiting)


def _too_late(waiting: asyncio.Future[bool]) -> None:
    _end(waiting, came=False)


def _end(waiting: asyncio.Future[bool], *, came: bool) -> None:
    if not waiting.done():
        waiting.set_result(came)
