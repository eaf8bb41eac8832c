"""Two sessions joined without a socket, for tests: bytes are carried by hand, and time moves only when told to.

This module knows how to carry what one side sends to the other, and how to spoil it on the way. It knows no network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from hurray_rdma.control import (
    ClientSession,
    Commit,
    Event,
    FrameDecoder,
    Message,
    Offer,
    ServerSession,
    Session,
    SessionConfig,
    encode,
)

__all__ = ["ConnectionPair", "Side", "commit_like"]

Side = Literal["client", "server"]


def commit_like(offer: Offer, kind: type[Commit] = Commit) -> Commit:
    """What a client says of the same snapshot in pages granted ahead."""
    return kind(
        key=offer.key,
        descriptors=offer.descriptors,
        block_table=offer.block_table,
        seq_ptr=offer.seq_ptr,
        seq_lens=offer.seq_lens,
        order=offer.order,
        head_offset=offer.head_offset,
        total_heads=offer.total_heads,
    )


class ConnectionPair:
    """A client and a server session with a clock of their own.

    Args:
        client: settings of the client.
        server: settings of the server.

    ``client_events`` and ``server_events`` grow by what each side reports; ``take`` empties one of them.
    """

    def __init__(self, client: SessionConfig, server: SessionConfig) -> None:
        self.now = 0.0
        self.client = ClientSession(client, now=self.now)
        self.server = ServerSession(server, now=self.now)
        self.client_events: list[Event] = []
        self.server_events: list[Event] = []
        self.spoil: Callable[[Side, list[tuple[int, Message]]], list[tuple[int, Message]]] | None = None
        """Called with (sender, messages on their way); what it returns arrives."""

    def take(self, side: Side) -> list[Event]:
        """The events of one side since the last call."""
        if side == "client":
            events, self.client_events = self.client_events, []
        else:
            events, self.server_events = self.server_events, []
        return events

    def num_open(self, side: Side) -> int:
        """Transfers that are open as one side sees it."""
        session: Session = self.client if side == "client" else self.server
        return session._book.num_open

    def carry(self, sender: Side) -> int:
        """Bring what ``sender`` has to send to the other side; the bytes carried."""
        source: Session = self.client if sender == "client" else self.server
        data = source.data_to_send()
        if self.spoil is not None and data:
            messages = self.spoil(sender, list(FrameDecoder(2**32 - 1).feed(data)))
            data = b"".join(encode(message, stream_id) for stream_id, message in messages)
        if sender == "client":
            self.server_events += self.server.receive(data, self.now)
        else:
            self.client_events += self.client.receive(data, self.now)
        return len(data)

    def settle(self) -> None:
        """Carry bytes both ways until neither side has more to send."""
        while self.carry("client") + self.carry("server"):
            pass

    def advance(self, seconds: float) -> None:
        """Let time pass: each side's timeouts are handled when due, and what they send is carried at once."""
        end = self.now + seconds
        while True:
            times = [t for t in (self.client.next_timeout(), self.server.next_timeout()) if t is not None and t <= end]
            self.now = max(self.now, min(times, default=end))
            self.client_events += self.client.handle_timeout(self.now)
            self.server_events += self.server.handle_timeout(self.now)
            self.settle()
            if not times:
                return

    def lose(self) -> None:
        """Cut the connection; what was under way is lost."""
        self.client.data_to_send()
        self.server.data_to_send()
        self.client_events += self.client.connection_lost(self.now)
        self.server_events += self.server.connection_lost(self.now)
