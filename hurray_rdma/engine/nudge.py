"""Calls to the event loop from any thread, of which it needs no more than one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

__all__ = ["Nudge"]


class Nudge:
    """Call it, on any thread, as often as something happens: ``look`` runs on the loop after that, once for all calls
    until it does. Made on the loop; calls never wait, and come to nothing once the loop is closed.

    Args:
        look: takes notice of all that has happened by then.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._pending = False

    def __call__(self) -> None:
        if not self._pending:
            self._pending = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, and who wanted to look with it
                if threading.get_ident() == self._thread:
                    self._loop.call_soon(self._run)
                else:
                    self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._pending = False  # before it looks: what happens from here on is told anew
        self._look()
