"""The other instances that a worker has to do with, by address.

Knows the engine's peers and which of them are still of use; nothing of requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from hurray_rdma.engine.sync import Engine, Peer
from hurray_rdma.errors import ConfigError

__all__ = ["Peers", "of_rank"]

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Known:
    peer: Peer
    calls: list[Future[Any]] = field(default_factory=list)
    """Under way when it was last looked at."""


class Peers:
    """Connects at the first call of each, and anew where instances come again. Waits for nothing; of one thread.

    Addresses come and go with instances, and some lead nowhere: those that are neither connected nor being asked are
    closed when another one comes.

    Args:
        engine: which connects.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[str, _Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def call(self, address: str, method: Callable[[Peer], Future[T]]) -> Future[T]:
        """Asks the one at the address for something.

        Args:
            address: ``host:port``.
            method: begins it.

        Raises:
            ConfigError: the address cannot be read.
            HurrayError: what ``method`` raises.
        """
        known = self._known.get(address)
        if known is None:
            self._close_unused()
            known = self._known[address] = _Known(self._engine.connect(address))
        known.calls = [call for call in known.calls if not call.done()]
        future = method(known.peer)
        known.calls.append(future)
        return future

    def _close_unused(self) -> None:
        for address, known in list(self._known.items()):
            if not known.peer.connected and all(call.done() for call in known.calls):
                del self._known[address]
                known.peer.close_async().add_done_callback(partial(_log_failure, address))


def of_rank(addresses: Sequence[str], tp_rank: int) -> str:
    """The worker that has the same heads.

    Raises:
        ConfigError: there are not as many workers there as here.
    """
    if tp_rank >= len(addresses):
        raise ConfigError(f"has none for rank {tp_rank}", field="remote_addresses", value=addresses)
    return addresses[tp_rank]


def _log_failure(address: str, closed: Future[None]) -> None:
    if not closed.cancelled() and (error := closed.exception()) is not None:
        _log.info("the connection to %s was not closed in order: %s", address, error)
