"""What goes wrong in a transfer or a session: refusals, aborts, crossings, lost and repeated messages, silence."""

import pickle
from collections.abc import Callable

import numpy as np
import pytest

from hurray_rdma.control import (
    AbortRequested,
    Acknowledged,
    AllEnded,
    DescriptorsEnded,
    Event,
    Grant,
    Granted,
    Message,
    Offered,
    PoolAnnounced,
    PoolRemoved,
    Quiesced,
    Refused,
    SessionClosed,
    SessionConfig,
    TensorData,
    TransferFailed,
    encode,
    error_code,
    error_from_code,
)
from hurray_rdma.control.codes import ErrorCode, LocalProtocolError, PeerBusyError, StaleGenerationError
from hurray_rdma.control.exchange import Abort, Ended, Quiet
from hurray_rdma.control.framing import FrameDecoder
from hurray_rdma.control.messages import (
    ErrorMessage,
    Ping,
    Pong,
    TensorDataEndMessage,
    TensorDataMessage,
    TensorPutAck,
)
from hurray_rdma.control.offers import Offer
from hurray_rdma.control.pools import Pool
from hurray_rdma.errors import (
    ConfigError,
    DeadlineExceededError,
    DescriptorError,
    GeometryError,
    HurrayError,
    LeaseExpiredError,
    PeerLostError,
    PoolExhaustedError,
    ProtocolError,
    TransferAbortedError,
    TransportError,
)
from hurray_rdma.testing.pair import ConnectionPair, Side

MakeOffer = Callable[..., Offer]


def kinds(events: list[Event]) -> list[type]:
    return [type(event) for event in events]


def drop(kind: type[Message], sender: Side, count: int = 1) -> Callable[..., list[tuple[int, Message]]]:
    """Lose the first ``count`` messages of a kind from one side."""
    left = count

    def spoil(side: Side, messages: list[tuple[int, Message]]) -> list[tuple[int, Message]]:
        nonlocal left
        arriving = []
        for stream_id, message in messages:
            if side == sender and isinstance(message, kind) and left:
                left -= 1
            else:
                arriving.append((stream_id, message))
        return arriving

    return spoil


def finish(pair: ConnectionPair, transfer_id: int) -> None:
    """Write all four descriptors and acknowledge, as engines do."""
    for index in range(4):
        assert pair.client.data_end(transfer_id, index, now=pair.now)
    pair.settle()
    assert pair.take("server")[-1] == AllEnded(transfer_id)
    assert pair.server.acknowledge(transfer_id, now=pair.now)
    pair.settle()


# Refusals.


@pytest.mark.parametrize(
    "error",
    [
        PoolExhaustedError("needs 9 pages, the pool has 4"),
        PeerBusyError("queue full"),
        GeometryError("head_dim differs", field="head_dim", value=64),
        StaleGenerationError("generation 3 is now 4"),
        DeadlineExceededError("no pages in time"),
        DescriptorError("bad", field="rank", value=4),
        TransferAbortedError("no"),
        LeaseExpiredError("late"),
        ConfigError("pool is read only"),
        TransportError("no lane"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_refusal_arrives_in_its_own_type(error: HurrayError, pair: ConnectionPair, offered: int) -> None:
    assert pair.server.refuse(offered, error, now=pair.now)
    pair.settle()
    (event,) = pair.take("client")
    assert isinstance(event, Refused)
    assert event.transfer_id == offered
    assert type(event.error) is type(error)
    assert str(error) in str(event.error)
    assert str(pickle.loads(pickle.dumps(event.error))) == str(event.error)
    assert pair.num_open("client") == pair.num_open("server") == 0


def test_codes_that_stand_for_no_other_class_are_protocol_errors() -> None:
    for code in (3, 99, 0xFD):
        error = error_from_code(code, "text")
        assert isinstance(error, ProtocolError)
        assert error.code == error_code(error) == code


def test_an_error_whose_class_says_what_it_is_needs_no_name_of_its_code() -> None:
    assert str(error_from_code(ErrorCode.UNKNOWN_TENSOR, "nothing is there")) == "the peer says: nothing is there"


def test_a_peers_text_cannot_drive_a_terminal() -> None:
    assert "\x1b" not in str(error_from_code(ErrorCode.ABORTED, "\x1b[2Jgone"))
    assert len(str(error_from_code(ErrorCode.ABORTED, "x" * 10_000))) < 2100


def test_an_offer_nobody_answers_is_refused_at_its_deadline(pair: ConnectionPair, offered: int) -> None:
    pair.advance(9.9)
    assert pair.take("client") == []
    pair.advance(0.2)
    (event,) = pair.take("client")
    assert isinstance(event, Refused)
    assert isinstance(event.error, DeadlineExceededError)
    assert kinds(pair.take("server")) == [AbortRequested, Quiesced]
    assert not pair.server.grant(offered, Grant(generation=3, page_ids=np.arange(3), lease_s=1), now=pair.now)
    assert not pair.server.refuse(offered, GeometryError("late"), now=pair.now)
    pair.settle()
    assert pair.take("client") == []


def test_offers_beyond_the_limit_are_refused_as_busy(
    make_config: Callable[..., SessionConfig], make_offer: MakeOffer
) -> None:
    pair = ConnectionPair(make_config(), make_config(max_open_transfers=2))
    pair.settle()
    pair.take("client")
    ids = [pair.client.offer(make_offer(), now=0, timeout_s=9) for _ in range(3)]
    pair.settle()
    (event,) = pair.take("client")
    assert isinstance(event, Refused)
    assert event.transfer_id == ids[2]
    assert isinstance(event.error, PeerBusyError)
    pair.server.refuse(ids[0], GeometryError("no"), now=0)
    pair.client.offer(make_offer(), now=0, timeout_s=9)
    pair.settle()
    assert kinds(pair.take("client")) == [Refused]
    assert pair.num_open("server") == 2


def test_tables_of_open_offers_are_bounded_in_bytes(
    make_config: Callable[..., SessionConfig], make_offer: MakeOffer
) -> None:
    pair = ConnectionPair(make_config(), make_config(max_message_nbytes=65536))
    pair.settle()
    pair.take("client")
    # 60,000 bytes of block table each; four messages of the greatest length are 262,144.
    large = make_offer(block_table=np.zeros(15_000, np.uint32), seq_ptr=[0, 15_000], seq_lens=[60_000])
    ids = [pair.client.offer(large, now=0, timeout_s=9) for _ in range(5)]
    pair.settle()
    (event,) = pair.take("client")
    assert isinstance(event, Refused)
    assert event.transfer_id == ids[4]
    assert isinstance(event.error, PeerBusyError)
    assert "262144" in str(event.error)
    pair.client.offer(make_offer(), now=0, timeout_s=9)  # there is room for a small one
    pair.settle()
    assert pair.take("client") == []
    pair.server.refuse(ids[0], GeometryError("no"), now=0)
    pair.client.offer(large, now=0, timeout_s=9)
    pair.settle()
    assert kinds(pair.take("client")) == [Refused]
    assert pair.num_open("server") == 5


def test_an_offer_above_the_peers_maximum_is_refused_here(
    make_config: Callable[..., SessionConfig], make_offer: MakeOffer
) -> None:
    pair = ConnectionPair(make_config(), make_config(max_message_nbytes=65536))
    pair.settle()
    large = make_offer(block_table=np.zeros(20_000, np.uint32), seq_ptr=[0, 20_000], seq_lens=[80_000])
    with pytest.raises(ConfigError, match="65536"):
        pair.client.offer(large, now=0, timeout_s=1)
    assert pair.num_open("client") == 0
    assert pair.client.data_to_send() == b""


# Grants the client must not act on.


def test_a_grant_beyond_the_pool_is_never_seen_by_the_engine(pair: ConnectionPair, offered: int) -> None:
    pair.server.grant(offered, Grant(generation=3, page_ids=np.array([1, 10, 2]), lease_s=1), now=pair.now)
    pair.settle()
    (event,) = pair.take("client")
    assert isinstance(event, TransferFailed)
    assert not event.granted
    assert "page_ids[1] = 10: is not below num_pages 10" in str(event.error)
    assert kinds(pair.take("server")) == [AbortRequested, Quiesced]


@pytest.mark.parametrize("case", ["granted at another generation", "announced anew", "removed"])
def test_a_grant_for_another_generation_is_stale(
    case: str, pair: ConnectionPair, offered: int, make_pool: Callable[..., Pool]
) -> None:
    if case == "announced anew":
        pair.server.announce(make_pool(generation=4), now=pair.now)
    elif case == "removed":
        pair.server.announce(Pool(pool_id=7, generation=3, removed=True), now=pair.now)
    generation = 4 if case == "granted at another generation" else 3
    pair.server.grant(offered, Grant(generation=generation, page_ids=np.arange(3), lease_s=1), now=pair.now)
    pair.settle()
    event = pair.take("client")[-1]
    assert isinstance(event, TransferFailed)
    assert isinstance(event.error, StaleGenerationError)
    assert kinds(pair.take("server")) == [AbortRequested, Quiesced]


# Aborts.


@pytest.mark.parametrize("when", ["offered", "granted", "writing", "ended"])
@pytest.mark.parametrize("who", ["client", "server"])
def test_either_side_aborts_at_any_point(
    when: str, who: Side, pair: ConnectionPair, offered: int, grant: Grant
) -> None:
    if when != "offered":
        pair.server.grant(offered, grant, now=pair.now)
        pair.settle()
    for index in range({"writing": 2, "ended": 4}.get(when, 0)):
        pair.client.data_end(offered, index, now=pair.now)
    pair.settle()
    pair.take("client")
    pair.take("server")
    aborting = pair.client if who == "client" else pair.server
    assert aborting.abort(offered, ErrorCode.LEASE_EXPIRED, "too slow", now=pair.now)
    assert not aborting.abort(offered, ErrorCode.ABORTED, "again", now=pair.now)
    pair.settle()
    other: Side = "server" if who == "client" else "client"
    (asked,) = pair.take(other)
    assert asked == AbortRequested(offered, "too slow", ErrorCode.LEASE_EXPIRED)
    assert isinstance(asked, AbortRequested)
    assert isinstance(asked.error, LeaseExpiredError)
    assert pair.take("server") == []  # Pages may still be written: nothing is over before QUIET.
    assert pair.client.quiet(offered, now=pair.now)
    pair.settle()
    assert pair.take("server") == [Quiesced(offered)]
    assert not pair.client.quiet(offered, now=pair.now)
    assert pair.num_open("client") == pair.num_open("server") == 0


def test_both_abort_at_once(pair: ConnectionPair, granted: int) -> None:
    pair.client.abort(granted, ErrorCode.ABORTED, "c", now=pair.now)
    pair.server.abort(granted, ErrorCode.ABORTED, "s", now=pair.now)
    pair.settle()
    assert pair.take("client") == pair.take("server") == []
    pair.client.quiet(granted, now=pair.now)
    pair.settle()
    assert pair.take("server") == [Quiesced(granted)]


def test_abort_crosses_the_grant(pair: ConnectionPair, offered: int, grant: Grant) -> None:
    pair.server.grant(offered, grant, now=pair.now)
    pair.client.abort(offered, ErrorCode.ABORTED, "changed my mind", now=pair.now)
    pair.settle()
    assert pair.take("client") == []
    assert kinds(pair.take("server")) == [AbortRequested]
    pair.client.quiet(offered, now=pair.now)
    pair.settle()
    assert pair.take("server") == [Quiesced(offered)]


def test_abort_crosses_the_acknowledgement(pair: ConnectionPair, granted: int) -> None:
    for index in range(4):
        pair.client.data_end(granted, index, now=pair.now)
    pair.settle()
    pair.take("server")
    pair.server.acknowledge(granted, now=pair.now)
    pair.client.abort(granted, ErrorCode.ABORTED, "late", now=pair.now)
    pair.settle()
    assert pair.take("server") == pair.take("client") == []
    assert pair.client.quiet(granted, now=pair.now)
    pair.settle()
    assert pair.take("server") == []  # It keeps the snapshot it acknowledged.
    assert pair.num_open("client") == pair.num_open("server") == 0


def test_ends_that_cross_the_servers_abort_change_nothing(pair: ConnectionPair, granted: int) -> None:
    pair.server.abort(granted, ErrorCode.ABORTED, "s", now=pair.now)
    for index in range(4):
        pair.client.data_end(granted, index, now=pair.now)
    pair.settle()
    assert pair.take("server") == []
    assert kinds(pair.take("client")) == [AbortRequested]
    assert not pair.client.tensor_data(granted, 0, 0, b"x", now=pair.now)


# Calls the state does not allow.


def test_calls_out_of_turn_raise_and_send_nothing(pair: ConnectionPair, offered: int, grant: Grant) -> None:
    for call in (
        lambda: pair.client.data_end(offered, 0, now=0),
        lambda: pair.client.tensor_data(offered, 0, 0, b"x", now=0),
        lambda: pair.client.quiet(offered, now=0),
        lambda: pair.client.data_end(999, 0, now=0),
        lambda: pair.server.acknowledge(offered, now=0),
        lambda: pair.server.grant(999, grant, now=0),
    ):
        with pytest.raises(LocalProtocolError):
            call()
    pair.server.grant(offered, grant, now=0)
    pair.settle()
    pair.client.data_end(offered, 1, now=0)
    pair.settle()
    for call in (
        lambda: pair.client.data_end(offered, 1, now=0),
        lambda: pair.client.data_end(offered, 4, now=0),
        lambda: pair.client.data_end(offered, -1, now=0),
        lambda: pair.client.data_end(offered, 0, 1, now=0),
        lambda: pair.client.data_end(offered, 0, 4, now=0),
        lambda: pair.client.data_end(offered, 2, -1, now=0),
        lambda: pair.client.data_end(offered, 3, 0, 3, now=0),
        lambda: pair.client.data_end(offered, now=0),
        lambda: pair.client.tensor_data(offered, 1, 0, b"x", now=0),
        lambda: pair.client.tensor_data(offered, 0, 1, b"x", now=0),
        lambda: pair.server.grant(offered, grant, now=0),
        lambda: pair.server.refuse(offered, GeometryError("late"), now=0),
        lambda: pair.server.acknowledge(offered, now=0),
    ):
        with pytest.raises(LocalProtocolError):
            call()
    assert pair.client.data_to_send() == pair.server.data_to_send() == b""


# Lost, repeated and late messages.


@pytest.mark.parametrize(
    ("kind", "sender"), [(TensorDataEndMessage, "client"), (TensorPutAck, "server")], ids=["end", "ack"]
)
def test_completion_survives_a_lost_message(
    kind: type[Message], sender: Side, pair: ConnectionPair, granted: int
) -> None:
    pair.spoil = drop(kind, sender)
    for index in range(4):
        pair.client.data_end(granted, index, now=pair.now)
    pair.settle()
    if pair.take("server")[-1] == AllEnded(granted):
        pair.server.acknowledge(granted, now=pair.now)
        pair.settle()
    assert pair.take("client") == []
    pair.advance(1.0)
    if pair.take("server"):
        pair.server.acknowledge(granted, now=pair.now)
        pair.settle()
    assert pair.take("client") == [Acknowledged(granted)]
    pair.advance(2.0)
    assert pair.take("server") == pair.take("client") == []


def test_ends_are_said_again_less_and_less_often(pair: ConnectionPair, granted: int) -> None:
    """Else a receiver with too many senders would hear the more of each the slower it is."""
    times: list[float] = []

    def spoil(sender: Side, messages: list[tuple[int, Message]]) -> list[tuple[int, Message]]:
        if any(isinstance(message, Ended) for _, message in messages):
            times.append(pair.now)
        return messages

    pair.spoil = spoil
    assert pair.client.data_end(granted, 0, 1, 2, 3, now=pair.now)
    pair.settle()
    pair.advance(40)  # the receiver hears all of it, and its answer takes so long
    waits = np.diff(times)
    assert len(waits) == 6
    assert np.allclose(waits[1:] / waits[:-1], 2)
    pair.server.acknowledge(granted, now=pair.now)
    pair.settle()
    assert pair.take("client") == [Acknowledged(granted)]
    pair.advance(40)
    assert len(times) == 7


def test_a_lost_offer_or_grant_ends_at_the_deadline(pair: ConnectionPair, make_offer: MakeOffer, grant: Grant) -> None:
    pair.spoil = drop(Offer, "client")
    pair.client.offer(make_offer(), now=pair.now, timeout_s=1)
    pair.advance(1.1)
    assert kinds(pair.take("client")) == [Refused]
    assert pair.take("server") == []
    pair.spoil = drop(Grant, "server")
    second = pair.client.offer(make_offer(), now=pair.now, timeout_s=1)
    pair.settle()
    pair.server.grant(second, grant, now=pair.now)
    pair.advance(1.1)
    assert kinds(pair.take("client")) == [Refused]
    assert kinds(pair.take("server")) == [Offered, AbortRequested, Quiesced]


def test_a_lost_abort_of_the_server_is_repeated(pair: ConnectionPair, granted: int) -> None:
    pair.spoil = drop(Abort, "server")
    pair.server.abort(granted, ErrorCode.ABORTED, "s", now=pair.now)
    pair.settle()
    assert pair.take("client") == []
    pair.advance(1)
    assert kinds(pair.take("client")) == [AbortRequested]


def test_a_lost_abort_of_the_client_is_made_up_by_quiet(pair: ConnectionPair, granted: int) -> None:
    pair.spoil = drop(Abort, "client")
    pair.client.abort(granted, ErrorCode.ABORTED, "c", now=pair.now)
    pair.client.quiet(granted, now=pair.now)
    pair.settle()
    assert kinds(pair.take("server")) == [AbortRequested, Quiesced]


@pytest.mark.parametrize("who", ["client", "server"])
def test_a_lost_quiet_is_asked_for_again(who: Side, pair: ConnectionPair, granted: int) -> None:
    pair.spoil = drop(Quiet, "client")
    aborting = pair.client if who == "client" else pair.server
    aborting.abort(granted, ErrorCode.ABORTED, "s", now=pair.now)
    pair.settle()
    pair.take("server")
    pair.client.quiet(granted, now=pair.now)
    pair.settle()
    assert pair.take("server") == []
    pair.advance(1)
    assert pair.take("server") == [Quiesced(granted)]


def test_every_message_twice_is_harmless(pair: ConnectionPair, make_offer: MakeOffer, grant: Grant) -> None:
    pair.spoil = lambda side, messages: [m for message in messages for m in (message, message)]
    transfer_id = pair.client.offer(make_offer(), now=pair.now, timeout_s=5)
    pair.settle()
    assert kinds(pair.take("server")) == [Offered]
    pair.server.grant(transfer_id, grant, now=pair.now)
    pair.settle()
    assert kinds(pair.take("client")) == [Granted]
    pair.client.tensor_data(transfer_id, 0, 0, b"abc", now=pair.now)
    for index in range(4):
        pair.client.data_end(transfer_id, index, now=pair.now)
    pair.settle()
    assert kinds(pair.take("server")) == [TensorData] + [DescriptorsEnded] * 4 + [AllEnded]
    pair.server.acknowledge(transfer_id, now=pair.now)
    pair.settle()
    assert pair.take("client") == [Acknowledged(transfer_id)]
    assert pair.take("server") == []


def test_a_grant_that_comes_after_the_offer_was_given_up_is_sent_back(
    pair: ConnectionPair, make_offer: MakeOffer, grant: Grant
) -> None:
    held: list[tuple[int, Message]] = []

    def hold_back(side: Side, messages: list[tuple[int, Message]]) -> list[tuple[int, Message]]:
        held.extend(m for m in messages if side == "client" and isinstance(m[1], Abort | Quiet))
        return [m for m in messages if m not in held]

    pair.spoil = hold_back
    transfer_id = pair.client.offer(make_offer(), now=pair.now, timeout_s=0.1)
    pair.advance(0.2)
    assert kinds(pair.take("client")) == [Refused]
    pair.server.grant(transfer_id, grant, now=pair.now)
    pair.spoil = None
    pair.settle()
    assert kinds(pair.take("server")) == [Offered, AbortRequested, Quiesced]
    assert pair.take("client") == []


def test_late_messages_of_transfers_long_forgotten_are_harmless(pair: ConnectionPair, make_offer: MakeOffer) -> None:
    first = pair.client.offer(make_offer(), now=pair.now, timeout_s=5)
    for _ in range(1100):
        last = pair.client.offer(make_offer(1), now=pair.now, timeout_s=5)
        pair.settle()
        pair.server.refuse(last, GeometryError("no"), now=pair.now)
    pair.server.refuse(first, GeometryError("no"), now=pair.now)
    for _ in range(1100):
        last = pair.client.offer(make_offer(1), now=pair.now, timeout_s=5)
        pair.settle()
        pair.server.refuse(last, GeometryError("no"), now=pair.now)
    pair.settle()
    pair.take("client")
    pair.take("server")
    for message, side in ((TensorPutAck(), "client"), (Abort(1, "x"), "client"), (TensorDataEndMessage(), "server")):
        session = pair.client if side == "client" else pair.server
        assert session.receive(encode(message, first), pair.now) == []
        assert session.receive(encode(message, first + 1), pair.now) == []
    assert not pair.client.quiet(first, now=pair.now)
    assert not pair.server.acknowledge(first, now=pair.now)
    pair.settle()
    assert pair.client.is_open
    assert pair.server.is_open


# A peer that breaks the rules.


def to_server(pair: ConnectionPair, message: Message, stream_id: int) -> list[tuple[int, Message]]:
    pair.server_events += pair.server.receive(encode(message, stream_id), pair.now)
    return list(FrameDecoder(1 << 20).feed(pair.server.data_to_send()))


@pytest.mark.parametrize(
    ("message", "offset"),
    [
        (TensorPutAck(), 0),
        (TensorDataEndMessage(), 0),
        (Quiet(), 1),
        (Ping(), 1),
        (TensorDataMessage(offset_nbytes=5, data=b"gap"), 2),
    ],
)
def test_a_wrong_message_fails_its_transfer_and_no_other(
    message: Message, offset: int, pair: ConnectionPair, granted: int, make_offer: MakeOffer
) -> None:
    other = pair.client.offer(make_offer(), now=pair.now, timeout_s=5)
    pair.settle()
    pair.server.grant(other, Grant(generation=3, page_ids=np.arange(3), lease_s=1), now=pair.now)
    pair.settle()
    pair.take("client")
    pair.take("server")
    answers = to_server(pair, message, granted + offset)
    assert [(stream_id, type(answer)) for stream_id, answer in answers] == [(granted, ErrorMessage)]
    (failed,) = pair.take("server")
    assert isinstance(failed, TransferFailed)
    assert (failed.transfer_id, failed.granted) == (granted, True)
    pair.client_events += pair.client.receive(encode(answers[0][1], granted), pair.now)
    assert kinds(pair.take("client")) == [AbortRequested]
    pair.client.quiet(granted, now=pair.now)
    pair.settle()
    assert pair.take("server") == [Quiesced(granted)]
    finish(pair, other)
    assert pair.take("client") == [Acknowledged(other)]


def test_an_end_before_the_grant_fails_the_transfer_for_good(pair: ConnectionPair, offered: int) -> None:
    answers = to_server(pair, TensorDataEndMessage(), offered + 1)
    assert isinstance(answers[0][1], ErrorMessage)
    (failed,) = pair.take("server")
    assert isinstance(failed, TransferFailed)
    assert not failed.granted
    assert pair.num_open("server") == 0


def test_an_undecodable_offer_is_answered_on_its_stream(pair: ConnectionPair) -> None:
    frame = (0xF2).to_bytes(4, "little") + (2).to_bytes(4, "little") + (1).to_bytes(4, "little") + b"\xc0"
    pair.server_events += pair.server.receive(frame, pair.now)
    ((stream_id, answer),) = FrameDecoder(1 << 20).feed(pair.server.data_to_send())
    assert stream_id == 2
    assert isinstance(answer, ErrorMessage)
    assert answer.code == ErrorCode.INVALID_MESSAGE
    assert pair.take("server") == []
    assert pair.server.is_open


def test_data_on_a_stream_nobody_owns(pair: ConnectionPair) -> None:
    ((stream_id, answer),) = to_server(pair, TensorDataEndMessage(), 50)
    assert stream_id == 50
    assert isinstance(answer, ErrorMessage)
    assert to_server(pair, answer, 50) == []  # An ERROR is never answered by an ERROR.


def test_an_offer_whose_id_does_not_ascend(pair: ConnectionPair, granted: int, make_offer: MakeOffer) -> None:
    assert to_server(pair, make_offer(1), granted + 1000) == []
    assert kinds(pair.take("server")) == [Offered]
    ((stream_id, answer),) = to_server(pair, make_offer(1), granted + 50)
    assert stream_id == granted + 50
    assert isinstance(answer, ErrorMessage)
    ((_, answer),) = to_server(pair, make_offer(4), 2**32 - 3)
    assert isinstance(answer, ErrorMessage)


@pytest.mark.parametrize("message", [TensorPutAck(), Quiet(), ErrorMessage(6, "x")])
def test_a_wrong_message_on_the_session_stream_ends_the_session(
    message: Message, pair: ConnectionPair, granted: int
) -> None:
    to_server(pair, message, 1)
    assert kinds(pair.take("server")) == [TransferFailed, SessionClosed]
    assert pair.server.is_closed


def test_a_grant_that_cannot_be_decoded_fails_the_transfer_at_once(pair: ConnectionPair, offered: int) -> None:
    frame = (0xF3).to_bytes(4, "little") + offered.to_bytes(4, "little") + (1).to_bytes(4, "little") + b"\xc0"
    pair.client_events += pair.client.receive(frame, pair.now)
    (failed,) = pair.take("client")
    assert isinstance(failed, TransferFailed)
    assert not failed.granted
    pair.settle()
    assert kinds(pair.take("server")) == [AbortRequested, Quiesced]


def test_an_acknowledgement_before_the_end_leaves_quiet_owed(pair: ConnectionPair, granted: int) -> None:
    pair.client_events += pair.client.receive(encode(TensorPutAck(), granted), pair.now)
    (failed,) = pair.take("client")
    assert isinstance(failed, TransferFailed)
    assert failed.granted
    pair.settle()
    assert kinds(pair.take("server")) == [AbortRequested]
    assert pair.client.quiet(granted, now=pair.now)
    pair.settle()
    assert pair.take("server") == [Quiesced(granted)]


def test_a_peer_that_never_reads_cannot_fill_our_memory(pair: ConnectionPair) -> None:
    pings = encode(Ping(), 1) * 10_000
    for _ in range(20):
        pair.server_events += pair.server.receive(pings, pair.now)
    assert kinds(pair.take("server")) == [SessionClosed]
    assert len(pair.server.data_to_send()) < 2 << 20


# Pools.


def test_pools_are_replaced_and_removed_in_place(pair: ConnectionPair, make_pool: Callable[..., Pool]) -> None:
    newer, other = make_pool(generation=4), make_pool(pool_id=8)
    for pool in (newer, other, Pool(pool_id=8, generation=3, removed=True)):
        pair.server.announce(pool, now=pair.now)
    pair.settle()
    assert pair.take("client") == [PoolAnnounced(newer), PoolAnnounced(other), PoolRemoved(8)]
    assert pair.client.pools == pair.server.pools == {7: newer}


def test_late_and_repeated_announcements_do_not_bring_a_pool_back(
    pair: ConnectionPair, make_pool: Callable[..., Pool]
) -> None:
    for late in (make_pool(generation=2), make_pool(generation=3)):
        assert pair.client.receive(encode(late, 1), pair.now) == []
    assert kinds(pair.client.receive(encode(Pool(pool_id=7, generation=3, removed=True), 1), pair.now)) == [PoolRemoved]
    assert pair.client.receive(encode(make_pool(generation=3), 1), pair.now) == []
    assert pair.client.pools == {}
    assert pair.client.is_open


# Time, and the end.


def test_idle_sessions_stay_alive_by_heartbeats(pair: ConnectionPair) -> None:
    pings = 0

    def count(side: Side, messages: list[tuple[int, Message]]) -> list[tuple[int, Message]]:
        nonlocal pings
        pings += sum(isinstance(message, Ping) for _, message in messages)
        return messages

    pair.spoil = count
    pair.advance(60)
    assert pair.client.is_open
    assert pair.server.is_open
    assert 200 < pings < 500  # One each 0.25 s, from whoever is first.


def test_a_silent_peer_is_lost_after_its_timeout(pair: ConnectionPair, granted: int) -> None:
    pair.spoil = lambda side, messages: []
    pair.advance(4.9)
    assert pair.take("client") == []
    pair.advance(0.2)
    failed, closed = pair.take("client")
    assert isinstance(failed, TransferFailed)
    assert failed.granted
    assert isinstance(failed.error, PeerLostError)
    assert isinstance(closed, SessionClosed)
    assert isinstance(closed.error, PeerLostError)
    assert pair.client.next_timeout() is None


def test_a_ping_is_answered_at_once(pair: ConnectionPair) -> None:
    assert to_server(pair, Ping(), 1) == [(1, Pong())]
    assert to_server(pair, Pong(), 1) == []


def test_a_lost_connection_fails_each_transfer_then_the_session(
    pair: ConnectionPair, granted: int, make_offer: MakeOffer
) -> None:
    waiting = pair.client.offer(make_offer(), now=pair.now, timeout_s=5)
    pair.settle()
    pair.take("server")
    pair.lose()
    for side in ("client", "server"):
        first, second, closed = pair.take(side)
        assert isinstance(first, TransferFailed)
        assert isinstance(second, TransferFailed)
        assert (first.transfer_id, first.granted) == (granted, True)
        assert (second.transfer_id, second.granted) == (waiting, False)
        assert isinstance(closed, SessionClosed)
        assert isinstance(closed.error, PeerLostError)
    assert not pair.client.quiet(granted, now=pair.now)
    assert not pair.client.data_end(granted, 0, now=pair.now)
    assert not pair.client.abort(granted, 1, "x", now=pair.now)
    assert not pair.server.acknowledge(granted, now=pair.now)


def test_closing_here_is_no_error_here(pair: ConnectionPair, granted: int) -> None:
    failed, closed = pair.client.close(pair.now)
    assert isinstance(failed, TransferFailed)
    assert isinstance(failed.error, TransferAbortedError)
    assert closed == SessionClosed(None)
    assert pair.client.close(pair.now) == []
