"""One coroutine that another thread waits for. Knows the loop that it runs on, not what it does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from hurray_rdma.errors import HurrayError

__all__ = ["Call"]

T = TypeVar("T")


class Call(Future[T]):
    """A coroutine on an event loop, as other threads see it: done when it has *ended*, also when it was cancelled.

    (A future of `asyncio.run_coroutine_threadsafe` is done as soon as it is cancelled, while pages are still in use.)

    Args:
        coroutine: what runs.
        loop: where.
        ends: it ends something: the engine's end waits for it instead of cancelling it.
        closed: makes the error of a call that the engine's end interrupts.
    """

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, T],
        loop: asyncio.AbstractEventLoop,
        *,
        ends: bool,
        closed: Callable[[], HurrayError],
    ) -> None:
        super().__init__()
        self.ends = ends
        self.refused = False
        """It did not begin: the engine had ended, or was ending."""
        self.task: asyncio.Task[T] | None = None
        self._coroutine = coroutine
        self.loop = loop
        self._closed = closed
        self._unwanted = False

    def cancel(self) -> bool:
        """Asks it to end; the future is done, and `cancelled`, when nothing of it is in flight any more.

        False if it has ended already.
        """
        if not self.done():
            with contextlib.suppress(RuntimeError):  # the loop is closed: it is about to be refused
                self.loop.call_soon_threadsafe(self._cancel)
        return not self.done() or self.cancelled()

    def running(self) -> bool:
        """Whether it has not ended."""
        return not self.done()

    # On the loop.

    def begin(self) -> asyncio.Task[T]:
        """Runs it."""
        self.task = self.loop.create_task(self._coroutine)
        self.task.add_done_callback(self._settle)
        return self.task

    def refuse(self) -> None:
        """It will not begin any more."""
        self.refused = True
        self._coroutine.close()
        self.set_exception(self._closed())

    def _cancel(self) -> None:
        if self.task is not None:
            self._unwanted = not self.task.done()
            self.task.cancel()
        elif not self.done():  # whoever was to post it was interrupted before
            self._coroutine.close()
            self._set_cancelled()

    def _settle(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            error = task.exception()
            if error is not None:
                self.set_exception(error)
            else:
                self.set_result(task.result())
        elif self._unwanted:
            self._set_cancelled()
        else:
            self.set_exception(self._closed())

    def _set_cancelled(self) -> None:
        super().cancel()
        self.set_running_or_notify_cancel()
