"""Calls that may block for long, each in a thread of its own: nobody else's work waits behind them.

CUDA's calls are such while a stream's queue is full, maybe behind a gate that the event loop has to open. Knows
functions and threads; a call that never returns keeps neither the loop nor the end of the process waiting.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["apart", "start_apart"]

T = TypeVar("T")


def start_apart(function: Callable[[], T]) -> Future[T]:
    """Begins a call in another thread; the future is done when it has returned, and cannot be cancelled."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="hurray-apart", daemon=True).start()
    return future


async def apart(function: Callable[[], T]) -> T:
    """The same, waited for; a caller that is cancelled, or out of time, leaves the call to itself."""
    return await asyncio.wrap_future(start_apart(function))
