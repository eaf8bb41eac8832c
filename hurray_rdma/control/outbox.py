"""What a session has to send and its connection has not taken yet, within bounds where the peer is who causes it.

This module knows on whose account bytes wait. It knows no messages and no time. A connection takes nothing while its
peer does not read, so whatever a peer can make this side say is counted here until it is taken.
"""

from __future__ import annotations

from hurray_rdma.control.codes import PeerBusyError
from hurray_rdma.errors import ProtocolError

__all__ = ["MAX_REPLIES_NBYTES", "Outbox"]

MAX_REPLIES_NBYTES = 1024 * 1024
"""Short replies (PONG, ERROR, ABORT, QUIET, acknowledgements) that may be unsent."""


class Outbox:
    """Parts of frames, in the order they are to be sent.

    Args:
        max_answers_nbytes: how much of long answers (grants, published snapshots, pools) may be unsent before one more
            is refused; so at most this and one answer are held.
    """

    def __init__(self, *, max_answers_nbytes: int) -> None:
        self._max_answers_nbytes = max_answers_nbytes
        self._parts: list[bytes | memoryview] = []
        self._replies_nbytes = 0
        self._answers_nbytes = 0
        self.batch = 0
        """Number of the batch that ``take`` gives next: what was put into it is unsent while this stays the same."""
        self.overflowed = False
        """Whether something had to be dropped."""
        self._overflow: ProtocolError | None = None

    def take(self) -> list[bytes | memoryview]:
        """Everything that is to be sent; it counts as sent from now on."""
        parts, self._parts = self._parts, []
        self._replies_nbytes = self._answers_nbytes = 0
        self.batch += 1
        return parts

    def put(self, parts: list[bytes | memoryview]) -> None:
        """On this side's own account: not counted."""
        self._parts += parts

    def put_reply(self, nbytes: int, parts: list[bytes | memoryview]) -> None:
        """Something short that the peer can cause at will; dropped, for good, once too much of it is unsent."""
        if self._overflow is None and self._replies_nbytes + nbytes > MAX_REPLIES_NBYTES:
            self._overflow = ProtocolError(
                f"{self._replies_nbytes} bytes of replies are unsent, {nbytes} more would be over "
                f"{MAX_REPLIES_NBYTES}: the peer does not read"
            )
            self.overflowed = True
        if self._overflow is None:
            self._replies_nbytes += nbytes
            self._parts += parts

    def put_answer(self, nbytes: int, parts: list[bytes | memoryview]) -> None:
        """Something that may be long; see ``require_room``. Without room it is dropped, and the session is to end."""
        try:
            self.require_room()
        except PeerBusyError as error:
            self._overflow = self._overflow or ProtocolError(str(error))
            self.overflowed = True
        if self._overflow is None:
            self._answers_nbytes += nbytes
            self._parts += parts

    def require_room(self) -> None:
        """Raise PeerBusyError if a long answer would be one too many."""
        if self._answers_nbytes > self._max_answers_nbytes:
            raise PeerBusyError(
                f"{self._answers_nbytes} bytes of answers are unsent, over {self._max_answers_nbytes}: "
                "the peer does not read them as fast as it asks"
            )

    @property
    def may_repeat(self) -> bool:
        """Whether there is room for what was said before: repeating must not be what ends a session."""
        return self._replies_nbytes <= MAX_REPLIES_NBYTES // 2

    def require_read(self) -> None:
        """Raise ProtocolError once something had to be dropped: the peer does not read."""
        if self._overflow is not None:
            raise self._overflow
