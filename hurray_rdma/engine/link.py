"""One sender's connection, as the receivers of this engine know it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from hurray_rdma.control import Channel, PeerInfo, ServerSession
from hurray_rdma.engine.logs import EngineLog
from hurray_rdma.engine.permits import SessionPermits
from hurray_rdma.engine.processes import ProcessWatch
from hurray_rdma.transport import Guest, Worker

__all__ = ["Link"]

_log = logging.getLogger(__name__)


class Link:
    """A channel whose session is the listening side's, and what is known of the process at its other end.

    Args:
        channel: its session is open.
        own_worker: the UCX worker that this peer alone was told of; None where it has the engine's.
        guest: as of the page stream that it was told of; None where it was not.
        ended: called when its process has ended.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        own_worker: Worker | None,
        guest: Guest | None,
        ended: Callable[[Link], None],
    ) -> None:
        assert isinstance(channel.session, ServerSession)
        assert channel.session.peer is not None
        self.session = channel.session
        self.notify = channel.notify
        self.flush = channel.flush
        self.afterwards = channel.afterwards
        self.cut = channel.abort
        """Ends the connection at once."""
        self.peer: PeerInfo = channel.session.peer
        self.own_worker = own_worker
        self.guest = guest
        self.permits = SessionPermits(guest.permits if guest is not None else None)
        self.log = EngineLog(_log, peer=self.peer.engine_name)
        self.process_ended = False
        """Whether its process is known to have ended."""
        self._ended = ended
        self._watch: ProcessWatch | None = None
        try:
            self._watch = ProcessWatch(self.peer.process_id, self._process_ended)
        except ValueError as error:
            if own_worker is None:
                self.log.warning("pages that this peer leaves behind will stay in quarantine: %s", error)

    @property
    def watched(self) -> bool:
        """Whether the end of its process will be known: it runs where this process can see it."""
        return self._watch is not None

    @property
    def now(self) -> float:
        """The time on the session's clock, seconds."""
        return asyncio.get_running_loop().time()

    def _process_ended(self) -> None:
        self.process_ended = True
        self._ended(self)

    def close(self) -> None:
        """Stops watching the peer's process. Idempotent."""
        if self._watch is not None:
            self._watch.close()

    def __repr__(self) -> str:
        return f"<Link from {self.peer.engine_name}>"
