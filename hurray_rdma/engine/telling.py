"""What a reader tells the source of a published snapshot without reading it: that it is still wanted, or not at all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from hurray_rdma.control import ErrorCode, Fetch, Published
from hurray_rdma.engine.asking import Asking
from hurray_rdma.engine.exchange import Route
from hurray_rdma.engine.tally import Tally
from hurray_rdma.errors import TransferAbortedError

__all__ = ["Telling"]

_WORDS = {ErrorCode.UNREAD: "nothing is read yet", ErrorCode.DECLINED: "nothing of it is needed"}


class Telling(Asking[Published]):
    """Asks once, and ends it with a code that says why: UNREAD, so that its lease begins anew, or DECLINED.

    Args:
        connect, key, timeout_s, tally: as of `Asking`.
        code: one of the two.
    """

    def __init__(
        self,
        connect: Callable[[float], Awaitable[Route]],
        key: str,
        code: ErrorCode,
        *,
        timeout_s: float,
        tally: Tally,
    ) -> None:
        super().__init__(connect, key, timeout_s=timeout_s, tally=tally, direction="fetch")
        self._code = code

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
            session.abort(transfer_id, self._code, _WORDS[self._code], now=self._loop.time())
        finally:
            await self._give_up("nothing was to be read")
