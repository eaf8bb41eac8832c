"""One push, layer by layer, for senders that compute in threads."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeAlias

from hurray_rdma.engine import transfer as asynchronous
from hurray_rdma.engine.stats import TransferStats
from hurray_rdma.engine.sync.thread import EngineThread
from hurray_rdma.errors import ConfigError

__all__ = ["OpenTransfers", "Transfer"]

OpenTransfers: TypeAlias = set[asynchronous.Transfer]
"""Those of an engine that were entered and not left: its end aborts them. Touched on the loop only."""


class Transfer:
    """`hurray_rdma.Transfer` for callers without asyncio. Made by `Peer.begin`; a context manager.

    One thread may enter it, another call `send_layer`.
    """

    def __init__(
        self, begin: Callable[[], asynchronous.Transfer], thread: EngineThread, transfers: OpenTransfers
    ) -> None:
        self._begin = begin
        self._thread = thread
        self._transfers = transfers
        self._transfer: asynchronous.Transfer | None = None

    @property
    def stats(self) -> TransferStats:
        """As of `hurray_rdma.Transfer.stats`."""
        return self._begun().stats

    def __enter__(self) -> Transfer:
        self._transfer = self._thread.run(self._enter(), undo=self._forsake)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        transfer = self._begun()
        if error is None:
            self._thread.run(self._leave(transfer, None, None, None))
        else:
            self._thread.end(self._leave(transfer, kind, error, traceback))

    def send_layer(self, layer: int, *, stream: Any = None) -> None:
        """As of `hurray_rdma.Transfer.send_layer`."""
        self._thread.run(self._begun().send_layer(layer, stream=stream))

    def send_rest(self, *, stream: Any = None) -> None:
        """As of `hurray_rdma.Transfer.send_rest`."""
        self._thread.run(self._begun().send_rest(stream=stream))

    def abort(self, reason: str = "the sender does not want it any more") -> None:
        """As of `hurray_rdma.Transfer.abort`."""
        self._thread.end(self._begun().abort(reason))

    def _begun(self) -> asynchronous.Transfer:
        if self._transfer is None:
            raise ConfigError("the transfer has not begun", field="transfer", value=self, fix="Use it within `with`")
        return self._transfer

    async def _enter(self) -> asynchronous.Transfer:
        transfer = self._begin()
        await transfer.__aenter__()
        self._transfers.add(transfer)
        return transfer

    async def _leave(
        self,
        transfer: asynchronous.Transfer,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await transfer.__aexit__(kind, error, traceback)
        finally:
            self._transfers.discard(transfer)

    def _forsake(self, transfer: asynchronous.Transfer) -> None:
        """It was entered just when its caller was interrupted."""

        async def forsake() -> None:
            try:
                await transfer.abort("its caller was interrupted")
            finally:
                self._transfers.discard(transfer)

        self._thread.end(forsake())
