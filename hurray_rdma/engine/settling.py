"""Endpoints that did not close, since a stopped peer over tcp takes no bytes: asked again until they do.

Until then UCX may still read and write for them, so pages that they know stay out of use; who waits for these is told
here. With the UCX worker, which is what puts bytes in place, all of them end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hurray_rdma.transport import Endpoint

__all__ = ["Settling"]


class Settling:
    """Of one engine. Runs on the event loop."""

    def __init__(self) -> None:
        self._settled: dict[Endpoint, Callable[[], None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    def add(self, endpoint: Endpoint, settled: Callable[[], None]) -> None:
        """Calls ``settled`` once nothing can be read or written for the endpoint any more."""
        self._settled[endpoint] = settled
        if self._task is None and not self._stopped:
            self._task = asyncio.create_task(self._ask())

    async def stop(self) -> None:
        """Asks no more: the worker is about to be closed."""
        self._stopped = True
        if self._task is not None:
            await self._task

    def end(self) -> None:
        """The worker is closed."""
        while self._settled:
            self._settled.popitem()[1]()

    async def _ask(self) -> None:
        while self._settled and not self._stopped:
            for endpoint, settled in list(self._settled.items()):
                # Waits inside UCX for as long as closing may take.
                if not self._stopped and await asyncio.to_thread(endpoint.close):
                    del self._settled[endpoint]
                    settled()
        self._task = None
