"""What may follow once the pages that peers wrote are visible to kernels of their GPU; in order.

Knows that a pool may have to be flushed, which is not for the event loop to wait for; nothing of what follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from hurray_rdma.cache import PagePool
from hurray_rdma.engine.apart import apart
from hurray_rdma.errors import HurrayError

__all__ = ["Visibility"]


class _Step(NamedTuple):
    work: Callable[[], None]
    failed: Callable[[HurrayError], None] | None
    """Instead, where the pages could not be made visible; None takes its turn only."""


class Visibility:
    """Runs steps on the event loop, one after the other: at once where nothing has to be flushed, as on most machines,
    and else after a flush that began when all before had come. One flush serves all steps that wait for it.

    Args:
        pool: where the pages are.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._steps: list[_Step] = []
        self._flushing: asyncio.Task[None] | None = None

    def then(self, work: Callable[[], None], failed: Callable[[HurrayError], None]) -> None:
        """``work`` once everything that has come is visible."""
        if self._flushing is None and not self._pool.needs_flush:
            work()
            return
        self._steps.append(_Step(work, failed))
        if self._flushing is None:
            self._flushing = self._loop.create_task(self._flush())

    def after(self, work: Callable[[], None]) -> None:
        """``work`` in its turn."""
        if self._flushing is None:
            work()
        else:
            self._steps.append(_Step(work, None))

    async def _flush(self) -> None:
        try:
            while self._steps:
                steps, self._steps = self._steps, []
                error = await self._failure()
                for step in steps:
                    # From the loop: what one raises is the loop's to tell, and harms none of the others.
                    if error is None or step.failed is None:
                        self._loop.call_soon(step.work)
                    else:
                        self._loop.call_soon(step.failed, error)
                await asyncio.sleep(0)  # until they have run
        finally:
            self._flushing = None

    async def _failure(self) -> HurrayError | None:
        try:
            await apart(self._pool.make_visible)
        except HurrayError as error:
            return error
        return None
