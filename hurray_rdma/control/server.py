"""The listening side of a session: it checks who connects, announces pools, answers and acknowledges.

This module knows what a server may say and hear. It knows no sockets and no allocator: which pages to grant or lease,
and what becomes of pages that may still be written or read, is the engine's business. Until the client is authenticated
it says nothing but SERVER_HELLO (only what both sides have) and ERROR.
"""

from __future__ import annotations

import hmac
from dataclasses import replace

from hurray_rdma.control.answers import check_reserved
from hurray_rdma.control.codes import (
    DeviceUnavailableError,
    ErrorCode,
    LocalProtocolError,
    PeerBusyError,
    error_code,
)
from hurray_rdma.control.config import DIALECT_TAGS, PRIVATE_LAYOUT, SessionConfig, dialects_of
from hurray_rdma.control.data import DataSession
from hurray_rdma.control.events import (
    AbortRequested,
    AllEnded,
    Committed,
    Event,
    Fetched,
    Introduced,
    LeaseRenewed,
    Offered,
    Prepared,
    Quiesced,
    Reserved,
    Taken,
    TransferFailed,
)
from hurray_rdma.control.exchange import Abort, Ended, Quiet, Renew, SessionMessage
from hurray_rdma.control.messages import (
    ClientHello,
    ErrorMessage,
    Malformed,
    Message,
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
from hurray_rdma.errors import AuthenticationError, HurrayError, ProtocolError

__all__ = ["ServerSession"]

_REQUESTS = {TransferKind.PUSH: Offer, TransferKind.PULL: Fetch, TransferKind.RESERVATION: Reserve}
_OPEN_MESSAGES = 4
"""The tables of all open transfers together may take as much as so many messages of the greatest length."""


class ServerSession(DataSession):
    """Server side: see :class:`~hurray_rdma.control.session.Session` for bytes, time and ``abort``.

    Args:
        config: settings.
        now: the time, seconds.
    """

    _SENDS = TransferKind.PULL

    def __init__(self, config: SessionConfig, *, now: float) -> None:
        super().__init__(config, now=now)
        self.worker_address = b""
        """The UCX worker address that the client was told, from SessionOpened on."""
        self.pages_ticket = b""
        """The key that it was told for a connection for page bytes."""
        self._pages_port = 0
        self._client_hello: ClientHello | None = None
        self._introduced: tuple[SessionMessage, str] | None = None
        """What an authenticated client said, and whose token it has."""
        self._max_open_nbytes = _OPEN_MESSAGES * config.max_message_nbytes

    # Calls of the engine.

    def lend_pages_port(self, port: int, ticket: bytes) -> None:
        """What the client is to be told of connections for page bytes; before `admit`. As of SESSION."""
        self._pages_port, self.pages_ticket = port, ticket

    def admit(self, worker_address: bytes, *, now: float) -> list[Event]:
        """Open the session of a client that was introduced, and tell it which UCX worker is its.

        Returns:
            What happens by that; nothing if the session is closed.
        """
        events: list[Event] = []
        if not self.is_closed and not self.is_open and self._introduced is not None and self._client_hello is not None:
            message, tenant = self._introduced
            self.worker_address = worker_address
            own = self._own_session_message("", worker_address)
            own = replace(own, pages_port=self._pages_port, pages_ticket=self.pages_ticket)
            self._send(own, SESSION_STREAM_ID)
            self._open(self._client_hello, message, now, events, tenant=tenant)
        return events

    def turn_away(self, error: HurrayError) -> list[Event]:
        """The same for one that cannot be served: the session ends, and the client hears why."""
        events: list[Event] = []
        if not self.is_closed:
            self._fail(error, events)
        return events

    def announce(self, pool: Pool, *, now: float) -> bool:
        """Announce a pool, a new generation of it, or (``removed``) its end.

        Announce the pools that there are as SessionOpened is heard, at once: the client's PoolsAnnounced rests on it.

        Returns:
            False if the session is closed: it may be so with the very bytes that opened it.

        Raises:
            LocalProtocolError: the session is not open yet.
            ConfigError: the announcement is larger than what the peer accepts.
        """
        if self.is_closed:
            return False
        self._require_open()
        self._outbox.put_answer(*self._frame(pool, SESSION_STREAM_ID))
        if pool.removed:
            self.pools.pop(pool.pool_id, None)
        else:
            self.pools[pool.pool_id] = pool
        return True

    def grant(self, transfer_id: int, grant: Grant, *, now: float) -> bool:
        """Answer an offer, or a reservation, with pages.

        Returns:
            False if the transfer ended meanwhile: nothing was sent, the pages are the caller's again.

        Raises:
            LocalProtocolError: it was answered before, or the transfer is a fetch.
            ConfigError: the grant is larger than what the peer accepts; the offer still waits.
            PeerBusyError: the peer does not read the answers it has; the offer still waits.
            GeometryError: not just the pages that were reserved; the reservation still waits.
        """
        return self._answer(transfer_id, grant, TransferKind.PUSH, TransferKind.RESERVATION)

    def publish(self, transfer_id: int, published: Published, *, now: float) -> bool:
        """Answer a fetch with the snapshot; its pages must stay as they are until AllEnded or Quiesced.

        Returns:
            False if the transfer ended meanwhile: nothing was sent, nobody will read.

        Raises:
            LocalProtocolError: the fetch was answered before, or the transfer is no fetch.
            ConfigError: the answer is larger than what the peer accepts; the fetch still waits.
            PeerBusyError: the peer does not read the answers it has; the fetch still waits.
        """
        return self._answer(transfer_id, published, TransferKind.PULL)

    def _answer(self, transfer_id: int, answer: Grant | Published, *kinds: TransferKind) -> bool:
        transfer = self._book.get(transfer_id)
        if self.is_closed or transfer is None:
            return False
        transfer.require(*kinds)
        if isinstance(answer, Grant) and isinstance(transfer.request, Reserve):
            check_reserved(transfer.request, answer)
        # Framed first: an answer that is too large must leave the request unanswered.
        nbytes, parts = self._frame(answer, transfer_id)
        if transfer.state is TransferState.OFFERED:
            self._outbox.require_room()
        if not self._book.say(transfer, Step.GRANT):
            return False
        if isinstance(answer, Published):
            transfer.num_published = answer.num_descriptors
        self._outbox.put_answer(nbytes, parts)
        return True

    def refuse(self, transfer_id: int, error: HurrayError, *, now: float) -> bool:
        """Answer an offer, a fetch or a reservation with an error; the client raises it in its own type.

        Returns:
            False if the transfer ended meanwhile.

        Raises:
            LocalProtocolError: it was answered before; a granted transfer is ended by ``abort``.
        """
        transfer = self._book.get(transfer_id)
        if self.is_closed or transfer is None:
            return False
        if transfer.state in (TransferState.GRANTED, TransferState.ENDED):
            raise LocalProtocolError(f"transfer {transfer_id} is {transfer.state.name}; end it by abort")
        if not self._book.say(transfer, Step.REFUSE):
            return False
        self._reply(self._error_message(error), transfer_id)
        return True

    def acknowledge(self, transfer_id: int, *, now: float) -> bool:
        """Tell the client that the whole snapshot is here, or that the pages it read were under lease until now.

        After AllEnded or Committed. A lease that ran out meanwhile is told by ``abort`` instead.

        Returns:
            False if the transfer is ending or has ended.

        Raises:
            LocalProtocolError: not every descriptor has ended, or nothing was committed.
        """
        if self.is_closed or not self._book.say(self._book.get(transfer_id), Step.ACKNOWLEDGE):
            return False
        self._reply(TensorPutAck(), transfer_id)
        return True

    def hear_bell(self, transfer_id: int, *, now: float) -> bool:
        """The bell of a reservation's grant rang after its Prepared, which is as if it was Committed: answer alike.

        Returns:
            False if the transfer is ending or has ended, or was committed before.
        """
        transfer = self._book.get(transfer_id)
        if self.is_closed or transfer is None or transfer.state is not TransferState.GRANTED:
            return False
        return self._book.hear(transfer, Step.LAST_END)

    # What the peer says.

    def _hear_handshake(self, message: Message, now: float, events: list[Event]) -> None:
        if self._state is SessionState.HELLO and isinstance(message, ClientHello):
            self._accept_hello(message)
            self._answer_hello(message)
            self._client_hello = message
            self._state = SessionState.SESSION
        elif self._client_hello is not None and self._introduced is None and isinstance(message, SessionMessage):
            tenant = self._tenant_of(message.token)
            self._introduced = message, tenant
            if self.config.worker_address is None:
                events.append(Introduced(message.host_id))
            else:
                events += self.admit(self.config.worker_address, now=now)
        else:
            raise ProtocolError(f"{type(message).__name__} cannot follow in state {self._state.name} of the handshake")

    def _tenant_of(self, token: str) -> str:
        """Whose token this is: a tenant's name, or "" for the engine's own.

        Without a token of its own the engine lets in who sends none, as "" (``serve`` sees to it that only this host
        can, or that it was asked for); a token that is nobody's is refused as soon as there is any.
        """
        candidates = [(name, secret) for name, secret in list(self.config.tenants.items()) if name and secret]
        if self.config.token:
            candidates.append(("", self.config.token))
        if not candidates or not (token or self.config.token):
            return ""
        given = token.encode()
        # Each is compared, and to its end: how long it takes tells neither which one nor how much of it was right.
        owners = [name for name, secret in candidates if hmac.compare_digest(secret.encode(), given)]
        if len(owners) == 1:
            return owners[0]
        if not token:
            rule = "no token was given, and this engine wants one"
        else:
            rule = "several tenants have this token" if owners else "the token is not one that this engine expects"
        raise AuthenticationError(rule, fix="Set the same token on both sides, and another one for each tenant")

    def _answer_hello(self, hello: ClientHello) -> None:
        names = {tag: dialect for dialect, tag in DIALECT_TAGS.items() if dialect in self.config.dialects}
        common = [(tag, names[tag]) for tag, _ in hello.layouts if tag in names]
        if not common:
            raise ProtocolError(
                f"this side accepts descriptors in {' or '.join(self.config.dialects)}, "
                f"the peer offers {dialects_of(hello.layouts)}",
                code=ErrorCode.LAYOUT_UNAVAILABLE,
                fix="Set a dialect that both sides have",
            )
        if not set(self.config.devices) & set(hello.devices):
            raise DeviceUnavailableError(
                f"this side moves memory of device tags {[*map(int, self.config.devices)]}, the peer of "
                f"{[*hello.devices[:8]]}: "
                "none is common",
                fix="Compare the devices that UCX has on the two sides: `hurray-rdma doctor`",
            )
        tag, self._dialect = common[0]
        answer = ServerHello(
            max_message_nbytes=self.config.max_message_nbytes,
            capabilities=self.config.capabilities & hello.capabilities,
            layouts=((tag, b""), PRIVATE_LAYOUT),
            devices=self.config.devices,
            memory_classes=tuple(c for c in self.config.memory_classes if c in hello.memory_classes),
        )
        self._send(answer, SESSION_STREAM_ID)

    def _hear_pong(self, events: list[Event]) -> None:
        return  # That something was heard is all it says.

    def _hear_session(self, message: Message, events: list[Event]) -> None:
        raise ProtocolError(f"a client does not say {type(message).__name__} on the session stream")

    def _hear_unknown_stream(self, stream_id: int, message: Message, events: list[Event]) -> None:
        if isinstance(message, Offer | Fetch | Reserve):
            self._hear_request(stream_id, message, events)
        elif isinstance(message, Malformed):
            self._reply(self._error_message(message.error), stream_id)
        elif stream_id >= self._book.next_id and not isinstance(message, Abort | Quiet | Renew | ErrorMessage):
            error = ProtocolError("no transfer owns this stream", field="stream_id", value=stream_id)
            self._reply(self._error_message(error), stream_id)

    def _hear_request(self, transfer_id: int, request: Request, events: list[Event]) -> None:
        transfer = Transfer.of(transfer_id, request)
        error: HurrayError | None = None
        if transfer_id < self._book.next_id or transfer.last_stream_id > LAST_STREAM_ID:
            error = ProtocolError(
                f"must be at least {self._book.next_id} (ids ascend), with {transfer.num_descriptors} streams after it",
                field="transfer_id",
                value=transfer_id,
            )
        elif (num_open := self._book.num_open) >= self.config.max_open_transfers:
            error = PeerBusyError(f"{num_open} transfers are open, as many as this session may have")
        elif num_open:
            error = self._above_memory(transfer.nbytes, "nbytes of the offer")
        if error is not None:
            self._reply(self._error_message(error), transfer_id)
            return
        self._book.add(transfer)
        match request:
            case Offer():
                events.append(Offered(transfer_id, request))
            case Fetch():
                events.append(Fetched(transfer_id, request))
            case Reserve():
                events.append(Reserved(transfer_id, request))

    def _above_memory(self, nbytes: int, what: str) -> PeerBusyError | None:
        """Why so many bytes cannot be kept beside what is kept of open transfers."""
        if self._book.open_nbytes + nbytes <= self._max_open_nbytes:
            return None
        return PeerBusyError(
            f"with the tables of open transfers it is above {self._max_open_nbytes} bytes",
            field=what,
            value=nbytes,
            fix="Wait until some of those transfers have ended",
        )

    def _hear_transfer(
        self, transfer: Transfer, descriptor_index: int | None, message: Message, now: float, events: list[Event]
    ) -> None:
        if descriptor_index is None and isinstance(message, _REQUESTS[transfer.kind]):
            return  # Repeated.
        match message, descriptor_index:
            case TensorDataEndMessage(), int(index):
                self._hear_end(transfer, index, events)
            case Ended(descriptor_indices=indices), None if transfer.kind is TransferKind.PUSH:
                self._hear_ends(transfer, indices, events)
            case Take(), None if transfer.kind is TransferKind.PULL:
                self._hear_take(transfer, message, events)
            case Prepare(), None if transfer.kind is TransferKind.RESERVATION:
                if self._book.hear(transfer, Step.PREPARE):
                    events.append(Prepared(transfer.transfer_id, message))
            case Commit(), None if transfer.kind is TransferKind.RESERVATION:
                self._hear_commit(transfer, message, events)
            case Abort(code=code, reason=reason), None:
                self._hear_abort(transfer, code, reason, now, events)
            case ErrorMessage(code=code, text=text), _:
                self._hear_abort(transfer, code, text, now, events)
            case Quiet(), None:
                self._hear_quiet(transfer, events)
            case Renew(), None if transfer.kind is not TransferKind.RESERVATION:
                if self._book.hear(transfer, Step.RENEW):
                    events.append(LeaseRenewed(transfer.transfer_id))
            case TensorDataMessage(), int(index) if transfer.kind is TransferKind.PUSH:
                self._hear_data(transfer, index, message, events)
            case _:
                where = "the first stream" if descriptor_index is None else "a later stream"
                raise ProtocolError(
                    f"a client does not say {type(message).__name__} on {where} of a {transfer.kind.name}"
                )

    def _hear_abort(self, transfer: Transfer, code: int, reason: str, now: float, events: list[Event]) -> None:
        if self._book.hear(transfer, Step.ABORT):
            # To be said if QUIET is late; not in the peer's words, which it can make long.
            transfer.stop = Abort(code, "this is what the client asked for")
            self._book.schedule(transfer, now + self._retry_s)
            events.append(AbortRequested(transfer.transfer_id, reason, code))

    def _hear_quiet(self, transfer: Transfer, events: list[Event]) -> None:
        before = transfer.state
        if not self._book.hear(transfer, Step.QUIET):
            return
        if before is not TransferState.STOPPING:
            events.append(AbortRequested(transfer.transfer_id, "the client stopped", ErrorCode.ABORTED))
        events.append(Quiesced(transfer.transfer_id))

    def _hear_end(self, transfer: Transfer, index: int, events: list[Event]) -> None:
        if transfer.kind is TransferKind.PUSH:
            self._hear_ends(transfer, (index,), events)
        elif transfer.state is TransferState.DONE:
            if index == 0:
                self._reply(TensorPutAck(), transfer.transfer_id)  # The acknowledgement seems to be lost.
        elif self._book.hear(transfer, Step.LAST_END):
            if index or not transfer.all_ended:
                raise ProtocolError("a reader ends on the stream after its own, and not before all was sent to it")
            events.append(AllEnded(transfer.transfer_id))

    def _hear_ends(self, transfer: Transfer, indices: tuple[int, ...], events: list[Event]) -> None:
        if max(indices) >= transfer.num_descriptors:
            raise ProtocolError(
                f"the offer has {transfer.num_descriptors} descriptors", field="descriptor_index", value=max(indices)
            )
        if transfer.state is not TransferState.DONE:
            self._hear_data_end(transfer, indices, events)
        elif transfer.num_descriptors - 1 in indices:
            self._reply(TensorPutAck(), transfer.transfer_id)  # The acknowledgement seems to be lost.

    def _hear_take(self, transfer: Transfer, take: Take, events: list[Event]) -> None:
        if transfer.taken or not self._book.hear(transfer, Step.TAKE):
            return  # Repeated, or late.
        if transfer.num_published > transfer.num_descriptors:
            raise ProtocolError(
                f"{transfer.num_published} descriptors were published, and cannot be taken on fewer streams",
                field="num_streams",
                value=transfer.num_descriptors,
            )
        error = self._above_memory(take.resident.nbytes, "nbytes of resident")
        if error is not None:
            raise error
        self._book.hold(transfer, take.resident.nbytes)
        transfer.taken = True
        events.append(Taken(transfer.transfer_id, take))

    def _hear_commit(self, transfer: Transfer, commit: Commit, events: list[Event]) -> None:
        if transfer.state is TransferState.DONE:
            self._reply(TensorPutAck(), transfer.transfer_id)  # The acknowledgement seems to be lost.
        elif self._book.hear(transfer, Step.LAST_END):
            events.append(Committed(transfer.transfer_id, commit))

    def _fail_transfer(self, transfer: Transfer, error: HurrayError, now: float, events: list[Event]) -> None:
        if not self._book.say(transfer, Step.REFUSE):
            return
        self._reply(self._error_message(error), transfer.transfer_id)
        if transfer.is_open:
            transfer.stop = Abort(error_code(error), self._error_message(error).text)
            self._said(transfer, now)
        events.append(TransferFailed(transfer.transfer_id, error, transfer.granted))

    def _transfer_due(self, transfer: Transfer, now: float, events: list[Event]) -> None:
        if not self._may_repeat(transfer):
            self._book.schedule(transfer, now + self._retry_s)
        elif transfer.state is TransferState.STOPPING and transfer.stop is not None:
            # Until the client is quiet it is asked again, whoever began: the ABORT, or its QUIET, may be lost.
            self._stop(transfer, transfer.stop, now)
        elif transfer.state is TransferState.GRANTED:
            # All that the client takes was sent, and it does not say that it has it: an end may be lost.
            self._say_ends(transfer, transfer.num_carried, now)
