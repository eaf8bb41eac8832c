"""A reader's sign of life: asks for a published snapshot without reading it, so that its lease begins anew."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from hurray_rdma.control import ErrorCode, Fetch, Published
from hurray_rdma.engine.exchange import Exchange, Route
from hurray_rdma.engine.tally import Tally
from hurray_rdma.errors import TransferAbortedError

__all__ = ["Refreshing"]


class Refreshing(Exchange[Published]):
    """Asks once; arguments as of `Exchange`."""

    def __init__(
        self, connect: Callable[[float], Awaitable[Route]], key: str, *, timeout_s: float, tally: Tally
    ) -> None:
        super().__init__(connect, key, timeout_s=timeout_s, tally=tally, direction="fetch")

    async def run(self) -> None:
        """All of it.

        Raises:
            HurrayError: as `Peer.refresh`.
        """
        try:
            await self._begin(self._ask)
        except BaseException as error:
            self._failed(error)
            raise

    async def abort(self, reason: str) -> None:
        """Ends it; `run` raises."""
        self.fail(TransferAbortedError(f"asking for {self._key!r} was aborted here: {reason}"))
        await self._give_up(reason)

    async def _ask(self) -> None:
        session, self._remote = self._route.session, self._route.first_pool()
        fetch = Fetch(key=self._key, deadline_s=self._left_s, lane=self._remote.lane, path=self._remote.path)
        transfer_id = session.fetch(fetch, now=self._loop.time(), timeout_s=self._left_s)
        try:
            await self._asked(transfer_id, "an answer")
            session.abort(transfer_id, ErrorCode.UNREAD, "nothing is read yet", now=self._loop.time())
        finally:
            await self._give_up("nothing was to be read")
