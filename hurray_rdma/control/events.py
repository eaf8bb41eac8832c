"""What a session tells its engine: one frozen dataclass per event.

This module knows what can happen to a session and its transfers, and what the engine owes in return. It holds no logic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from hurray_rdma.control.codes import error_from_code
from hurray_rdma.control.config import PeerInfo
from hurray_rdma.control.offers import Commit, Fetch, Grant, Offer, Published, Reserve, Take
from hurray_rdma.control.pools import Pool
from hurray_rdma.errors import HurrayError

__all__ = [
    "AbortRequested",
    "Acknowledged",
    "AllEnded",
    "Committed",
    "DescriptorsEnded",
    "Event",
    "Fetched",
    "Granted",
    "Introduced",
    "LeaseRenewed",
    "Offered",
    "PoolAnnounced",
    "PoolRemoved",
    "PoolsAnnounced",
    "Prepared",
    "PublishedHeard",
    "Quiesced",
    "Refused",
    "Reserved",
    "SessionClosed",
    "SessionOpened",
    "Taken",
    "TensorData",
    "TransferFailed",
]


@dataclass(frozen=True, slots=True)
class Introduced:
    """Server, where its config has no worker address: the client is who it should be, and waits for one.

    `ServerSession.admit` or `ServerSession.turn_away` is owed.
    """

    host_id: bytes
    """The client's."""


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """Both sides know and accept each other."""

    peer: PeerInfo


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """Last event of a session. ``error`` is None after ``close()`` on this side."""

    error: HurrayError | None
    orderly: bool = False
    """Whether the peer hung up between two messages, with no transfer open: it has left, or its process has ended."""


@dataclass(frozen=True, slots=True)
class PoolAnnounced:
    """Client: a pool was announced, or announced anew under a later generation."""

    pool: Pool


@dataclass(frozen=True, slots=True)
class PoolRemoved:
    """Client: the pool takes no more offers."""

    pool_id: int


@dataclass(frozen=True, slots=True)
class PoolsAnnounced:
    """Client, once: every pool that the server announced as its session opened has been heard."""


@dataclass(frozen=True, slots=True)
class Offered:
    """Server: answer with ``grant`` or ``refuse``."""

    transfer_id: int
    offer: Offer


@dataclass(frozen=True, slots=True)
class Reserved:
    """Server: answer with ``grant``, of just so many pages, or ``refuse``. What was granted may be recalled by
    ``abort`` at any time."""

    transfer_id: int
    reserve: Reserve


@dataclass(frozen=True, slots=True)
class Granted:
    """Client: write the pages, then ``data_end`` for each descriptor; or, if they are granted ahead, keep them until
    there is something to write, then ``commit``."""

    transfer_id: int
    grant: Grant


@dataclass(frozen=True, slots=True)
class Fetched:
    """Server: answer with ``publish`` or ``refuse``."""

    transfer_id: int
    fetch: Fetch


@dataclass(frozen=True, slots=True)
class PublishedHeard:
    """Client: read the pages, or ``take`` them where they cannot be reached; then ``read_end``."""

    transfer_id: int
    published: Published


@dataclass(frozen=True, slots=True)
class Taken:
    """Server: send the pages of what was published by ``tensor_data``, and ``data_end`` for each descriptor."""

    transfer_id: int
    take: Take


@dataclass(frozen=True, slots=True)
class Refused:
    """Client: the offer, fetch or reservation came to nothing (refused, or unanswered in its time).
    Nothing is owed; free the pages."""

    transfer_id: int
    error: HurrayError


@dataclass(frozen=True, slots=True)
class TensorData:
    """Bytes of one descriptor, in ascending order without gaps: of a push at the server, of a pull at the client.
    ``data`` is a read-only view, not a copy."""

    transfer_id: int
    descriptor_index: int
    offset_nbytes: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class DescriptorsEnded:
    """Every page of these descriptors is complete here: of a push at the server, of a pull in frames at the client."""

    transfer_id: int
    descriptor_indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllEnded:
    """Server: every descriptor ended, or the reader is done; answer with ``acknowledge``. Client: every descriptor of
    what it takes ended; put what came in place, then ``read_end``."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Server: the pages granted ahead hold this snapshot; answer with ``acknowledge``, or ``abort`` if it cannot be."""

    transfer_id: int
    commit: Commit


@dataclass(frozen=True, slots=True)
class Prepared:
    """Server: the pages granted ahead are being filled with this snapshot. Nothing is owed; :class:`Committed` follows,
    if the client is not stopped before."""

    transfer_id: int
    commit: Commit


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Client: the receiver has the whole snapshot, or what was read is right: its pages were under lease all the while.
    Nothing is owed; free the pages of a push, use those of a pull."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class AbortRequested:
    """The peer ends the transfer. Client: stop posting, wait for what is in flight, then ``quiet``; what was read so
    far may be wrong. Server: pages may be written, or read, until :class:`Quiesced`."""

    transfer_id: int
    reason: str
    code: int

    @property
    def error(self) -> HurrayError:
        """The typed error that the peer's code stands for."""
        return error_from_code(self.code, self.reason)


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """Server: the client goes on with its push or pull; what it was granted, or reads, stays its own for another lease.
    How often is for the engine to bound: a client may say so for ever."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class Quiesced:
    """Server: nothing will be written or read for this transfer any more; its pages may go back."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The transfer ended by a fault of the peer, or with the session. While the session lives, a client still owes
    ``quiet`` and a server still waits for :class:`Quiesced`, unless nothing had been granted; once the session is
    closed nothing more will be heard, and what was granted belongs into quarantine."""

    transfer_id: int
    error: HurrayError
    granted: bool
    """Whether pages were granted or published, so that writes or reads may be in flight."""


Event: TypeAlias = (
    Introduced
    | SessionOpened
    | SessionClosed
    | PoolAnnounced
    | PoolRemoved
    | PoolsAnnounced
    | Offered
    | Reserved
    | Granted
    | Fetched
    | PublishedHeard
    | Taken
    | Refused
    | TensorData
    | DescriptorsEnded
    | AllEnded
    | Prepared
    | Committed
    | Acknowledged
    | AbortRequested
    | LeaseRenewed
    | Quiesced
    | TransferFailed
)
