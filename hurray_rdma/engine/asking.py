"""An exchange that connects and asks: again where that can be of use."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from hurray_rdma.control import StaleGenerationError
from hurray_rdma.engine.exchange import Answer, Exchange, Route
from hurray_rdma.engine.stats import Direction
from hurray_rdma.engine.tally import Tally
from hurray_rdma.errors import PeerLostError

__all__ = ["Asking"]

_T = TypeVar("_T")


class Asking(Exchange[Answer]):
    """Pushes layer by layer, pulls, and what is told of published snapshots.

    Args:
        connect: makes or gives a route, until a deadline.
        key, timeout_s, tally, direction: as of `Exchange`.
    """

    def __init__(
        self,
        connect: Callable[[float], Awaitable[Route]],
        key: str,
        *,
        timeout_s: float,
        tally: Tally,
        direction: Direction,
    ) -> None:
        super().__init__(key, timeout_s=timeout_s, tally=tally, direction=direction)
        self._connect = connect
        self.may_be_lost = True
        """Whether a session that breaks before anything was moved costs no transfer; the next one does."""

    async def _begin(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Connects and asks; again where that can be of use."""
        self._started = time.monotonic()
        self._deadline = self._started + self._timeout_s
        stale = -1
        while True:
            self._route = await self._connect(self._deadline)
            self._log = self._route.log
            try:
                return await ask()
            except StaleGenerationError:
                # The pool was registered anew after we heard of it: its new announcement has come by now, or is lost.
                generation = self._remote.pool.generation
                if generation == stale:
                    self._route.forsake()
                stale = generation
                self._start_over()
            except PeerLostError:
                # Nothing was moved yet: a session that had broken unnoticed costs no transfer.
                if not self.may_be_lost:
                    raise
                self.may_be_lost = False
                self._start_over()

    async def _asked(self, transfer_id: int, what: str) -> Answer:
        """Sends what was asked, and waits for the answer."""
        self._transfer_id = transfer_id
        self._log = self._route.log.bind(transfer=transfer_id)
        self._route.register(transfer_id, self)
        self._route.notify()
        return await self._wait(self._answer, what)
