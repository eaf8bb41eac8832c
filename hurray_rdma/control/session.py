"""What both sides of a session share: framing, handshake order, heartbeats, failure; bytes in, events out.

This module knows the session stream (stream_id 1) and time. It knows no sockets: it is given bytes and the time, and
gives back events and bytes. What is different for the two sides is in client.py and server.py; which transfer step may
follow which is in states.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from hurray_rdma.control.codes import ErrorCode, LocalProtocolError, error_code, error_from_code
from hurray_rdma.control.config import MIN_MESSAGE_NBYTES, PRIVATE_LAYOUT, PeerInfo, SessionConfig, private_names
from hurray_rdma.control.events import Event, SessionClosed, SessionOpened, TransferFailed
from hurray_rdma.control.exchange import Abort, SessionMessage
from hurray_rdma.control.framing import FrameDecoder, encode_parts
from hurray_rdma.control.messages import ErrorMessage, Hello, Malformed, Message, Ping, Pong
from hurray_rdma.control.outbox import MAX_REPLIES_NBYTES, Outbox
from hurray_rdma.control.pools import Pool
from hurray_rdma.control.states import SessionState, Step
from hurray_rdma.control.transfers import Transfer, TransferBook
from hurray_rdma.errors import (
    DeadlineExceededError,
    HurrayError,
    PeerLostError,
    ProtocolError,
    TransferAbortedError,
)

__all__ = ["MAX_ERROR_TEXT_CHARS", "SESSION_STREAM_ID", "STUCK_FIX", "Session"]

SESSION_STREAM_ID = 1
MAX_ERROR_TEXT_CHARS = 1000
STUCK_FIX = "It is stuck or stopped, or the network between is down"
_RETRY_HEARTBEATS = 2
_SILENT_HEARTBEATS = 4
_MIN_NBYTES_PER_S = 64 * 1024
"""The slowest that a long message may come in."""
_SAME_RELEASE_FIX = "Install the same release of hurray_rdma on both sides"


class Session(ABC):
    """One side of a session. Use :class:`ClientSession` or :class:`ServerSession`.

    ``now`` is a time in seconds of any monotonic clock, the same one in every call.
    """

    def __init__(self, config: SessionConfig, *, now: float) -> None:
        self.config = config
        self.peer: PeerInfo | None = None
        """Set from :class:`SessionOpened` on."""
        self.pools: dict[int, Pool] = {}
        """Announced pools by pool_id: the server's own; on the client kept up to date by announcements."""
        self._state = SessionState.HELLO
        self.is_open = False
        """Whether transfers can be offered and answered."""
        self.is_closed = False
        """Whether the connection is to be closed once ``data_to_send`` is sent."""
        self._decoder = FrameDecoder(MIN_MESSAGE_NBYTES)
        self._book = TransferBook()
        # A peer may be owed as much as it may make this side hold in one message of its own.
        self._outbox = Outbox(max_answers_nbytes=max(config.max_message_nbytes, MAX_REPLIES_NBYTES))
        self._hello_deadline = now + config.hello_timeout_s
        self._last_heard = now
        self._last_ping = now
        self._pinged_in = -1
        self._not_lost_before = now
        self._peer_max_nbytes = MIN_MESSAGE_NBYTES
        self._dialect = ""
        self._error: HurrayError | None = None

    @property
    def state(self) -> SessionState:
        return self._state

    # Bytes out.

    def parts_to_send(self) -> list[bytes | memoryview]:
        """Take what is to be sent, in parts; large page data stays the view that ``tensor_data`` was given."""
        return self._outbox.take()

    def data_to_send(self) -> bytes:
        """Take what is to be sent, as bytes; b"" if there is nothing."""
        return b"".join(self.parts_to_send())

    def _frame(self, message: Message, stream_id: int) -> tuple[int, list[bytes | memoryview]]:
        return encode_parts(message, stream_id, max_message_nbytes=self._peer_max_nbytes)

    def _send(self, message: Message, stream_id: int) -> None:
        self._outbox.put(self._frame(message, stream_id)[1])

    def _reply(self, message: Message, stream_id: int) -> None:
        """Send something that the peer can cause at will: bounded, so that one that never reads costs no memory."""
        self._outbox.put_reply(*self._frame(message, stream_id))

    # Bytes in.

    @property
    def missing_nbytes(self) -> int:
        """What has not come yet of the message that the bytes so far end in."""
        return self._decoder.missing_nbytes

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Take bytes from the peer, in any split. Never raises on account of the bytes."""
        events: list[Event] = []
        if self.is_closed or not data:
            return events
        # Whole messages are signs of life; part of one is as much as its bytes: else a peer that has lost its place in
        # the stream would seem to be in the midst of a long message for ever.
        heard = self._last_heard + len(data) / _MIN_NBYTES_PER_S
        self._last_heard = heard if heard < now else now
        outbox = self._outbox
        try:
            if outbox.overflowed:
                outbox.require_read()
            for stream_id, message in self._decoder.feed(data):
                self._last_heard = now
                self._hear(stream_id, message, now, events)
                if outbox.overflowed:
                    outbox.require_read()
                if self._state is SessionState.CLOSED:
                    break
        except HurrayError as error:
            self._fail(error, events)
        return events

    def connection_lost(self, now: float, *, error: HurrayError | None = None) -> list[Event]:
        """The connection ended, with ``error`` if that is known."""
        events: list[Event] = []
        if not self.is_closed:
            orderly = error is None and self.is_open and not self._decoder.in_message and not self._book.num_open
            self._close(error or self._hung_up(), events, orderly=orderly)
        return events

    def _hung_up(self) -> HurrayError:
        if not self.is_open and (foreign := self._decoder.foreign()) is not None:
            return foreign
        if self._decoder.in_message:
            rule = "the connection ended in the middle of a message: the peer, or something on the way, cut it"
        else:
            rule = "the peer closed the connection"
        return PeerLostError(rule, fix="If that was not meant, its log says why")

    def close(self, now: float) -> list[Event]:
        """End the session from this side. Idempotent."""
        events: list[Event] = []
        if not self.is_closed:
            self._close(None, events)
        return events

    def _hear(self, stream_id: int, message: Message, now: float, events: list[Event]) -> None:
        if stream_id == SESSION_STREAM_ID:
            if isinstance(message, Malformed):
                raise message.error
            if isinstance(message, ErrorMessage):
                self._close(error_from_code(message.code, message.text), events)
            elif not self.is_open:
                self._hear_handshake(message, now, events)
            elif isinstance(message, Ping):
                self._reply(Pong(), SESSION_STREAM_ID)
            elif isinstance(message, Pong):
                self._hear_pong(events)
            else:
                self._hear_session(message, events)
        elif not self.is_open:
            raise ProtocolError("no transfer can begin before the session is open", field="stream_id", value=stream_id)
        else:
            self._hear_stream(stream_id, message, now, events)

    def _hear_stream(self, stream_id: int, message: Message, now: float, events: list[Event]) -> None:
        found = self._book.find(stream_id)
        if found is None:
            self._hear_unknown_stream(stream_id, message, events)
            return
        transfer, descriptor_index = found
        try:
            if isinstance(message, Malformed):
                raise message.error
            self._hear_transfer(transfer, descriptor_index, message, now, events)
        except HurrayError as error:
            if transfer.is_open:
                self._fail_transfer(transfer, error, now, events)

    @abstractmethod
    def _hear_handshake(self, message: Message, now: float, events: list[Event]) -> None: ...

    @abstractmethod
    def _hear_pong(self, events: list[Event]) -> None: ...

    @abstractmethod
    def _hear_session(self, message: Message, events: list[Event]) -> None: ...

    @abstractmethod
    def _hear_unknown_stream(self, stream_id: int, message: Message, events: list[Event]) -> None: ...

    @abstractmethod
    def _hear_transfer(
        self, transfer: Transfer, descriptor_index: int | None, message: Message, now: float, events: list[Event]
    ) -> None: ...

    @abstractmethod
    def _fail_transfer(self, transfer: Transfer, error: HurrayError, now: float, events: list[Event]) -> None:
        """The peer broke a rule on a stream of this open transfer: end it, tell the peer, go on with the others."""

    @abstractmethod
    def _transfer_due(self, transfer: Transfer, now: float, events: list[Event]) -> None: ...

    # Handshake.

    def _own_session_message(self, token: str, worker_address: bytes) -> SessionMessage:
        return SessionMessage(
            engine_name=self.config.engine_name,
            token=token,
            host_id=self.config.host_id,
            process_id=self.config.process_id,
            worker_address=worker_address,
            heartbeat_s=self.config.heartbeat_s,
            session_id=self.config.session_id,
            quiet_sessions=self.config.quiet_sessions,
        )

    def _accept_hello(self, hello: Hello) -> None:
        if hello.protocol_version != 1:
            raise ProtocolError(
                f"the peer speaks version {hello.protocol_version} of the Hurray protocol, this side version 1",
                code=ErrorCode.PROTOCOL_VERSION_MISMATCH,
                fix=_SAME_RELEASE_FIX,
            )
        if hello.max_message_nbytes < MIN_MESSAGE_NBYTES:
            raise ProtocolError(
                f"the peer takes messages of at most {hello.max_message_nbytes} bytes; "
                f"{MIN_MESSAGE_NBYTES} are the least that a session needs",
                fix="Raise max_message_nbytes on the peer",
            )
        if PRIVATE_LAYOUT not in hello.layouts:
            raise ProtocolError(
                f"this side speaks {PRIVATE_LAYOUT[1].decode()!r}, the peer {private_names(hello.layouts)}",
                code=ErrorCode.LAYOUT_UNAVAILABLE,
                fix=_SAME_RELEASE_FIX,
            )
        self._peer_max_nbytes = hello.max_message_nbytes

    def _open(
        self,
        hello: Hello,
        session: SessionMessage,
        now: float,
        events: list[Event],
        *,
        tenant: str = "",
    ) -> None:
        self._state, self.is_open = SessionState.OPEN, True
        self._book.rescheduled = True
        self._decoder.max_message_nbytes = self.config.max_message_nbytes
        self._last_ping = now
        self.peer = PeerInfo(
            engine_name=session.engine_name,
            host_id=session.host_id,
            process_id=session.process_id,
            worker_address=session.worker_address,
            session_id=session.session_id,
            quiet_sessions=session.quiet_sessions,
            tenant=tenant,
            dialect=self._dialect,
            devices=hello.devices,
            capabilities=self.config.capabilities & hello.capabilities,
            max_message_nbytes=hello.max_message_nbytes,
            heartbeat_s=session.heartbeat_s,
            pages_port=session.pages_port,
            pages_ticket=session.pages_ticket,
        )
        events.append(SessionOpened(self.peer))

    # Time.

    def silent_s(self, now: float) -> float:
        """How long nothing was heard from the peer: above a heartbeat or two it is busy, stopped or gone."""
        return now - self._last_heard

    def is_silent(self, now: float) -> bool:
        """Whether nothing was heard for so long that the peer may be dead: each is to speak once in a heartbeat."""
        return self.silent_s(now) > _SILENT_HEARTBEATS * self.config.heartbeat_s

    def next_timeout(self) -> float | None:
        """When ``handle_timeout`` is to be called next; None once closed."""
        if self.is_closed:
            return None
        if self._outbox.overflowed:
            return self._last_heard  # At once.
        if not self.is_open:
            return self._hello_deadline
        when = min(self._ping_due(), self._lost_due())
        due = self._book.next_due()
        return when if due is None else min(when, due)

    def take_timeout(self) -> float | None:
        """``next_timeout`` for whoever sets the timer; ``may_be_due_sooner`` tells when to set it anew before that."""
        when = self.next_timeout()
        self._book.look_from_now_on(when)
        return when

    @property
    def may_be_due_sooner(self) -> bool:
        """Whether ``next_timeout`` may be earlier than what was taken last; all else puts it off."""
        return self._book.rescheduled or self._outbox.overflowed

    def _ping_due(self) -> float:
        return max(self._last_heard, self._last_ping) + self.config.heartbeat_s

    def _lost_due(self) -> float:
        return max(self._last_heard + self.config.peer_timeout_s, self._not_lost_before)

    @property
    def _retry_s(self) -> float:
        return _RETRY_HEARTBEATS * self.config.heartbeat_s

    def handle_timeout(self, now: float) -> list[Event]:
        """Do what is due at ``now``; harmless when nothing is."""
        events: list[Event] = []
        if self.is_closed:
            return events
        try:
            self._outbox.require_read()
        except ProtocolError as error:
            self._fail(error, events)
            return events
        if not self.is_open:
            if now >= self._hello_deadline:
                rule = f"the other side did not introduce itself within {self.config.hello_timeout_s:.3g} s"
                fix = "Check that both ends are hurray_rdma engines, and that both or neither use TLS"
                self._fail(DeadlineExceededError(rule, fix=fix), events)
            return events
        if now - self._ping_due() > self.config.heartbeat_s:
            # It is this side that was busy: what the peer said meanwhile may be at hand, and only unread.
            self._not_lost_before = now + self.config.heartbeat_s
        if now >= self._lost_due():
            silent_s = now - self._last_heard
            rule = f"nothing was heard from the peer for {silent_s:.2f} s, over {self.config.peer_timeout_s} s"
            self._close(PeerLostError(rule, fix=STUCK_FIX), events)
            return events
        if now >= self._ping_due():
            self._last_ping = now
            if self._pinged_in != self._outbox.batch:  # Else one is still unsent.
                self._pinged_in = self._outbox.batch
                self._send(Ping(), SESSION_STREAM_ID)
        for transfer in self._book.pop_due(now):
            self._transfer_due(transfer, now, events)
        return events

    # Failure.

    def _fail(self, error: HurrayError, events: list[Event]) -> None:
        self._send(self._error_message(error), SESSION_STREAM_ID)
        self._close(error, events)

    @staticmethod
    def _error_message(error: HurrayError) -> ErrorMessage:
        return ErrorMessage(error_code(error), str(error)[:MAX_ERROR_TEXT_CHARS])

    def _close(self, error: HurrayError | None, events: list[Event], *, orderly: bool = False) -> None:
        self._state, self.is_open, self.is_closed = SessionState.CLOSED, False, True
        self._error = error
        failure = error or TransferAbortedError("the session was closed")
        open_transfers = self._book.open_transfers()
        events += [TransferFailed(transfer.transfer_id, failure, transfer.granted) for transfer in open_transfers]
        self._book.let_go_all()
        events.append(SessionClosed(error, orderly))

    # Common to both sides' calls.

    def _require_open(self) -> None:
        if self.is_closed:
            raise PeerLostError("the session is closed") from self._error
        if not self.is_open:
            raise LocalProtocolError("the session is not open yet; wait for SessionOpened")

    def abort(self, transfer_id: int, code: int, reason: str, *, now: float) -> bool:
        """End a transfer from this side, at any point before its acknowledgement.

        Args:
            transfer_id: the transfer.
            code: an :class:`~hurray_rdma.control.codes.ErrorCode`, usually ABORTED.
            reason: told to the peer.
            now: the time.

        Returns:
            False if it had ended, or was ending, before. On a client ``quiet`` is owed if True.
        """
        if self.is_closed:
            return False
        transfer = self._book.get(transfer_id)
        if transfer is None or not self._book.say(transfer, Step.ABORT):
            return False
        self._stop(transfer, Abort(code, reason[:MAX_ERROR_TEXT_CHARS]), now)
        return True

    def _stop(self, transfer: Transfer, stop: Abort, now: float) -> None:
        transfer.stop = stop
        self._reply(stop, transfer.transfer_id)
        self._said(transfer, now)

    def _said(self, transfer: Transfer, now: float) -> None:
        """Have ``_transfer_due`` called when it is time to say again what was just said."""
        transfer.said_in = self._outbox.batch
        self._book.schedule(transfer, now + self._retry_s)

    def _may_repeat(self, transfer: Transfer) -> bool:
        """Whether what was said last of the transfer is sent, and there is room to say it again."""
        return transfer.said_in != self._outbox.batch and self._outbox.may_repeat
