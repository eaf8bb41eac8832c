"""The connecting side of a session: it says HELLO, proves itself, asks for transfers, says what is done.

This module knows what a client may say and hear. It knows no sockets, and it does not know how pages are written or
read: ``data_end`` tells it when those of a descriptor are complete at the server, ``read_end`` when all are read.
"""

from __future__ import annotations

from hurray_rdma.control.announced import AnnouncedPools
from hurray_rdma.control.answers import check_grant, check_published
from hurray_rdma.control.codes import ErrorCode, LocalProtocolError, error_code, error_from_code
from hurray_rdma.control.config import DIALECT_TAGS, PRIVATE_LAYOUT, SessionConfig, dialects_of
from hurray_rdma.control.data import DataSession
from hurray_rdma.control.events import (
    AbortRequested,
    Acknowledged,
    Event,
    Granted,
    PoolAnnounced,
    PoolRemoved,
    PoolsAnnounced,
    PublishedHeard,
    Refused,
    TransferFailed,
)
from hurray_rdma.control.exchange import Abort, Quiet, Renew, SessionMessage
from hurray_rdma.control.messages import (
    ClientHello,
    ErrorMessage,
    Message,
    Ping,
    ServerHello,
    TensorDataEndMessage,
    TensorDataMessage,
    TensorPutAck,
)
from hurray_rdma.control.offers import Commit, Fetch, Grant, Offer, Prepare, Published, Request, Reserve, Take
from hurray_rdma.control.pools import Pool
from hurray_rdma.control.session import SESSION_STREAM_ID
from hurray_rdma.control.states import SessionState, Step, TransferKind, TransferState
from hurray_rdma.control.transfers import LAST_STREAM_ID, Transfer
from hurray_rdma.errors import DeadlineExceededError, HurrayError, ProtocolError

__all__ = ["ClientSession"]

_ASKED = {TransferKind.PUSH: "offer", TransferKind.PULL: "fetch", TransferKind.RESERVATION: "reservation"}
_RENEWALS_OF_LEASE = 4
_HEARD_S = 0.005
"""Whoever listens to a bell has acknowledged it by then; or did not hear it, since it or this side had to wait."""
_MIN_RENEW_S = 0.01
_SPARE_IDS = 1 << 20
"""Stream ids that are left to transfers which begin at the same time."""


class ClientSession(DataSession):
    """Client side: see :class:`~hurray_rdma.control.session.Session` for bytes, time and ``abort``.

    Args:
        config: settings.
        now: the time, seconds.
    """

    _SENDS = TransferKind.PUSH

    def __init__(self, config: SessionConfig, *, now: float) -> None:
        super().__init__(config, now=now)
        self._session_message = self._own_session_message(config.token or "", config.worker_address or b"")
        self._server_hello: ServerHello | None = None
        self._announced = AnnouncedPools(self.pools)
        self._knows_pools = False
        tags = tuple((DIALECT_TAGS[dialect], b"") for dialect in config.dialects)
        hello = ClientHello(
            max_message_nbytes=config.max_message_nbytes,
            capabilities=config.capabilities,
            layouts=(*tags, PRIVATE_LAYOUT),
            devices=config.devices,
            memory_classes=config.memory_classes,
        )
        self._send(hello, SESSION_STREAM_ID)

    # Calls of the engine.

    def offer(self, offer: Offer, *, now: float, timeout_s: float) -> int:
        """Offer a snapshot; answered by Granted or Refused within ``timeout_s``.

        Returns:
            The transfer's id.

        Raises:
            ConfigError: the offer is larger than what the peer accepts.
            PeerLostError: the session is closed.
            LocalProtocolError: the session is not open yet, or all its stream ids are used up.
        """
        return self._ask(offer, now, timeout_s)

    def fetch(self, fetch: Fetch, *, now: float, timeout_s: float) -> int:
        """Ask for a published snapshot; answered by PublishedHeard or Refused within ``timeout_s``.

        Returns:
            The transfer's id.

        Raises:
            PeerLostError: the session is closed.
            LocalProtocolError: the session is not open yet, or all its stream ids are used up.
        """
        return self._ask(fetch, now, timeout_s)

    def reserve(self, reserve: Reserve, *, now: float, timeout_s: float) -> int:
        """Have pages granted ahead; answered by Granted or Refused within ``timeout_s``.

        Once granted they are for one ``commit``, whenever it comes; ``abort`` and ``quiet`` give them back. The server
        may recall them at any time: AbortRequested.

        Returns:
            The transfer's id.

        Raises:
            PeerLostError: the session is closed.
            LocalProtocolError: the session is not open yet, or all its stream ids are used up.
        """
        return self._ask(reserve, now, timeout_s)

    @property
    def used_up(self) -> bool:
        """Whether stream ids run out: whatever comes next is for another session."""
        return self._book.next_id > LAST_STREAM_ID - _SPARE_IDS

    def _ask(self, request: Request, now: float, timeout_s: float) -> int:
        self._require_open()
        transfer_id = self._book.next_id
        transfer = Transfer.of(transfer_id, request)
        if transfer.last_stream_id > LAST_STREAM_ID:
            raise LocalProtocolError("all stream ids of this session are used up", fix="Connect anew")
        self._send(request, transfer_id)
        self._book.add(transfer)
        transfer.timeout_s, transfer.until = timeout_s, now + timeout_s
        self._book.schedule(transfer, transfer.until)
        return transfer_id

    def read_end(self, transfer_id: int, *, now: float) -> bool:
        """Every page of a fetched snapshot has been read: no read is in flight any more. Answered by Acknowledged.

        Until then what was read may be wrong: only the acknowledgement says that it was under lease all the while.

        Returns:
            False if the transfer is ending or has ended.

        Raises:
            LocalProtocolError: not published yet, not a pull, it was said before, or not all that is taken came.
        """
        transfer = self._granted(transfer_id, TransferKind.PULL)
        if transfer is None:
            return False
        if transfer.state is TransferState.ENDED or not transfer.all_ended:
            rule = "ended before" if transfer.state is TransferState.ENDED else "has not come to its end"
            raise LocalProtocolError(f"transfer {transfer_id} {rule}")
        self._book.say(transfer, Step.LAST_END)
        self._say_all(transfer, now)
        return True

    def take(self, transfer_id: int, take: Take, *, now: float) -> bool:
        """Have the pages of a published snapshot sent in frames, since its memory cannot be reached.

        They come as TensorData and DescriptorsEnded, and AllEnded follows; then ``read_end``.

        Args:
            transfer_id: a fetch that was answered.
            take: what is wanted of it.
            now: the time.

        Returns:
            False if the transfer is ending or has ended.

        Raises:
            ConfigError: larger than what the peer accepts.
            LocalProtocolError: not published yet, not a pull, it is taken or read already, or the fetch kept too few
                streams for its descriptors.
        """
        transfer = self._granted(transfer_id, TransferKind.PULL)
        if transfer is None:
            return False
        if transfer.state is TransferState.ENDED or transfer.taken:
            raise LocalProtocolError(f"transfer {transfer_id} is taken or read already")
        if transfer.num_published > transfer.num_descriptors:
            raise LocalProtocolError(
                f"{transfer.num_published} descriptors were published; {transfer.num_descriptors} streams were kept"
            )
        _, parts = self._frame(take, transfer_id)
        self._book.say(transfer, Step.TAKE)
        transfer.taken = True
        self._outbox.put(parts)
        return True

    def commit(self, transfer_id: int, commit: Commit, *, now: float, rung: bool = False) -> bool:
        """The pages granted ahead hold this whole snapshot (flushed, not only posted). Answered by Acknowledged.

        Args:
            transfer_id: a granted reservation.
            commit: what was written, in the order derived from its table into the first pages of the grant; the rest of
                them are the server's again.
            now: the time.
            rung: the bell of the grant tells it, after ``prepare``: it is said only if that is not acknowledged soon.

        Returns:
            False if the transfer is ending or has ended.

        Raises:
            LocalProtocolError: not granted yet, not a reservation, or it was committed before.
            ConfigError: it is larger than what the peer accepts. The reservation stays.
        """
        transfer = self._granted(transfer_id, TransferKind.RESERVATION)
        if transfer is None:
            return False
        if transfer.state is TransferState.ENDED:
            raise LocalProtocolError(f"transfer {transfer_id} was committed before")
        _, parts = self._frame(commit, transfer_id)
        self._book.say(transfer, Step.LAST_END)
        transfer.commit = tuple(parts)
        if rung:
            self._book.schedule(transfer, now + _HEARD_S)
        else:
            self._say_all(transfer, now)
        return True

    def prepare(self, transfer_id: int, prepare: Prepare, *, now: float) -> bool:
        """What ``commit`` is going to say, while the pages granted ahead are being filled.

        Args:
            transfer_id: a granted reservation.
            prepare: as ``commit`` takes it.
            now: the time.

        Returns:
            False if the transfer is ending or has ended.

        Raises:
            LocalProtocolError: not granted yet, not a reservation, or it was committed before.
            ConfigError: it is larger than what the peer accepts. The reservation stays.
        """
        transfer = self._granted(transfer_id, TransferKind.RESERVATION)
        if transfer is None:
            return False
        _, parts = self._frame(prepare, transfer_id)
        self._book.say(transfer, Step.PREPARE)
        self._outbox.put(parts)
        return True

    def quiet(self, transfer_id: int, *, now: float) -> bool:
        """Nothing of the transfer is in flight any more: every posted operation completed and was flushed.

        Owed after ``abort``, AbortRequested and TransferFailed. Harmless after the end of a transfer.

        Returns:
            False if the transfer has ended.

        Raises:
            LocalProtocolError: the transfer is not ending; abort it first.
        """
        transfer = self._book.get(transfer_id)
        if self.is_closed or transfer is None or not transfer.is_open:
            return False
        if transfer.state is not TransferState.STOPPING:
            raise LocalProtocolError(f"transfer {transfer_id} is {transfer.state.name}, not ending: abort it first")
        self._book.say(transfer, Step.QUIET)
        self._send(Quiet(), transfer_id)
        return True

    # What the peer says.

    def _hear_handshake(self, message: Message, now: float, events: list[Event]) -> None:
        if self._state is SessionState.HELLO and isinstance(message, ServerHello):
            self._accept_hello(message)
            self._dialect = self._picked_dialect(message)
            self._server_hello = message
            self._state = SessionState.SESSION
            self._send(self._session_message, SESSION_STREAM_ID)
        elif self._server_hello is not None and isinstance(message, SessionMessage):
            self._open(self._server_hello, message, now, events)
            self._send(Ping(), SESSION_STREAM_ID)  # Its PONG comes after the pools that there are: see _hear_pong.
        else:
            raise ProtocolError(f"{type(message).__name__} cannot follow in state {self._state.name} of the handshake")

    def _picked_dialect(self, hello: ServerHello) -> str:
        tags = {tag for tag, _ in hello.layouts}
        picked = [dialect for dialect in self.config.dialects if DIALECT_TAGS[dialect] in tags]
        if len(picked) != 1:
            raise ProtocolError(
                f"the peer must pick one of the dialects offered ({', '.join(self.config.dialects)}), "
                f"but picked {dialects_of(hello.layouts)}",
                code=ErrorCode.LAYOUT_UNAVAILABLE,
            )
        return picked[0]

    def _hear_pong(self, events: list[Event]) -> None:
        # The server announced its pools as its session opened, before it could hear our first PING.
        if not self._knows_pools:
            self._knows_pools = True
            events.append(PoolsAnnounced())

    def _hear_session(self, message: Message, events: list[Event]) -> None:
        if not isinstance(message, Pool):
            raise ProtocolError(f"a server does not say {type(message).__name__} on the session stream")
        if self._announced.hear(message):
            events.append(PoolRemoved(message.pool_id) if message.removed else PoolAnnounced(message))

    def _hear_unknown_stream(self, stream_id: int, message: Message, events: list[Event]) -> None:
        # No such transfer, or one ended so long ago that it is forgotten; either way nothing is in flight for it.
        if isinstance(message, Grant | Published):
            self._reply(Abort(ErrorCode.ABORTED, "nobody waits for this answer"), stream_id)
        if isinstance(message, Grant | Published | Abort):
            self._reply(Quiet(), stream_id)

    def _hear_transfer(
        self, transfer: Transfer, descriptor_index: int | None, message: Message, now: float, events: list[Event]
    ) -> None:
        match message:
            case Grant() if transfer.kind is not TransferKind.PULL:
                if self._awaits_answer(transfer) and isinstance(transfer.request, Offer | Reserve):
                    check_grant(self.pools, transfer.request, message)
                    self._book.hear(transfer, Step.GRANT)
                    if transfer.kind is TransferKind.PUSH:
                        self._keep(transfer, message.lease_s, now)
                    events.append(Granted(transfer.transfer_id, message))
            case Published() if transfer.kind is TransferKind.PULL:
                if self._awaits_answer(transfer):
                    check_published(self.pools, message)
                    transfer.num_published = message.num_descriptors
                    self._book.hear(transfer, Step.GRANT)
                    self._keep(transfer, message.lease_s, now)
                    events.append(PublishedHeard(transfer.transfer_id, message))
            case TensorDataMessage() if transfer.kind is TransferKind.PULL and descriptor_index is not None:
                self._hear_data(transfer, descriptor_index, message, events)
            case TensorDataEndMessage() if transfer.kind is TransferKind.PULL and descriptor_index is not None:
                self._hear_data_end(transfer, (descriptor_index,), events)
            case ErrorMessage(code=code, text=text):
                before = transfer.state
                if self._book.hear(transfer, Step.REFUSE):
                    if before is TransferState.OFFERED:
                        events.append(Refused(transfer.transfer_id, error_from_code(code, text)))
                    else:
                        events.append(AbortRequested(transfer.transfer_id, text, code))
            case Abort(code=code, reason=reason):
                if self._book.hear(transfer, Step.ABORT):
                    events.append(AbortRequested(transfer.transfer_id, reason, code))
                elif not transfer.is_open:
                    self._reply(Quiet(), transfer.transfer_id)
            case TensorPutAck():
                if self._book.hear(transfer, Step.ACKNOWLEDGE):
                    events.append(Acknowledged(transfer.transfer_id))
            case _:
                raise ProtocolError(
                    f"a server does not say {type(message).__name__} on the stream of a {transfer.kind.name}"
                )

    def _awaits_answer(self, transfer: Transfer) -> bool:
        if transfer.state in (TransferState.STOPPED, TransferState.REFUSED):
            self._reply(Abort(ErrorCode.ABORTED, "nobody waits for this answer any more"), transfer.transfer_id)
            self._reply(Quiet(), transfer.transfer_id)
        return transfer.state is TransferState.OFFERED

    def _fail_transfer(self, transfer: Transfer, error: HurrayError, now: float, events: list[Event]) -> None:
        if transfer.state is TransferState.STOPPING:
            return
        granted = transfer.granted
        self._stop_for(transfer, error, now)
        events.append(TransferFailed(transfer.transfer_id, error, granted))

    def _stop_for(self, transfer: Transfer, error: HurrayError, now: float) -> None:
        granted = transfer.granted
        self._book.say(transfer, Step.ABORT)
        self._stop(transfer, Abort(error_code(error), self._error_message(error).text), now)
        if not granted:  # The engine was never told of pages, so nothing can be in flight.
            self._book.say(transfer, Step.QUIET)
            self._send(Quiet(), transfer.transfer_id)

    def _transfer_due(self, transfer: Transfer, now: float, events: list[Event]) -> None:
        if transfer.state is TransferState.OFFERED:
            fix = "Its pool may be full: offers and reservations wait there until pages are released"
            error = DeadlineExceededError(
                f"the {_ASKED[transfer.kind]} was not answered within {transfer.timeout_s:.3g} s",
                fix=None if transfer.kind is TransferKind.PULL else fix,
            )
            self._stop_for(transfer, error, now)
            events.append(Refused(transfer.transfer_id, error))
        elif transfer.state is TransferState.GRANTED:
            self._renew(transfer, now)
        elif transfer.state is TransferState.ENDED:
            # No acknowledgement yet: an end, or the acknowledgement, may be lost. Repeating is harmless.
            if self._may_repeat(transfer):
                self._say_all(transfer, now)
            else:
                self._book.schedule(transfer, now + self._retry_s)

    def _keep(self, transfer: Transfer, lease_s: float, now: float) -> None:
        transfer.renew_s = max(lease_s / _RENEWALS_OF_LEASE, _MIN_RENEW_S)
        self._book.schedule(transfer, now + transfer.renew_s)

    def _renew(self, transfer: Transfer, now: float) -> None:
        """Keep what was granted or published, for as long as the transfer was given time: a push's next layer may still
        be computed, a reader may be slow."""
        if now >= transfer.until:
            return
        if self._may_repeat(transfer):
            self._send(Renew(), transfer.transfer_id)
            transfer.said_in = self._outbox.batch
        self._book.schedule(transfer, now + transfer.renew_s)

    def _say_all(self, transfer: Transfer, now: float) -> None:
        """Say what ends the transfer, whole, and again unless it is acknowledged."""
        self._outbox.put([*transfer.commit])
        self._say_ends(transfer, 1 if transfer.kind is TransferKind.PULL else transfer.num_descriptors, now)
