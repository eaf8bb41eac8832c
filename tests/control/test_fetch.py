"""What goes wrong in a fetch: refusals, aborts and their crossings, leases that run out, answers nobody may act on."""

from collections.abc import Callable

import numpy as np
import pytest

from hurray_rdma.control import (
    AbortRequested,
    AllEnded,
    Event,
    Fetch,
    Fetched,
    Grant,
    Message,
    Offer,
    Pool,
    Published,
    PublishedHeard,
    Quiesced,
    Refused,
    SessionClosed,
    SessionConfig,
    TransferFailed,
    encode,
)
from hurray_rdma.control.codes import (
    ErrorCode,
    LocalProtocolError,
    NotPublishedError,
    PeerBusyError,
    StaleGenerationError,
)
from hurray_rdma.control.exchange import Abort, Quiet
from hurray_rdma.control.framing import FrameDecoder
from hurray_rdma.control.messages import ErrorMessage, TensorDataEndMessage, TensorDataMessage, TensorPutAck
from hurray_rdma.errors import (
    ConfigError,
    DeadlineExceededError,
    GeometryError,
    HurrayError,
    LeaseExpiredError,
    ProtocolError,
    RegistrationError,
)
from hurray_rdma.testing.pair import ConnectionPair, Side

MakePublished = Callable[..., Published]
FETCH = Fetch(key="req-19", deadline_s=5.0)


def kinds(events: list[Event]) -> list[type]:
    return [type(event) for event in events]


# No answer, or a refusal.


@pytest.mark.parametrize(
    "error",
    [NotPublishedError("nothing is published as 'req-19'"), PeerBusyError("busy"), RegistrationError("pool closed")],
    ids=lambda error: type(error).__name__,
)
def test_a_refused_fetch_raises_in_the_servers_type(error: HurrayError, pair: ConnectionPair, fetched: int) -> None:
    assert pair.server.refuse(fetched, error, now=pair.now)
    pair.settle()
    (event,) = pair.take("client")
    assert isinstance(event, Refused)
    assert event.transfer_id == fetched
    assert type(event.error) is type(error)
    assert str(error) in str(event.error)
    assert pair.num_open("client") == pair.num_open("server") == 0


def test_a_fetch_nobody_answers_is_refused_at_its_deadline(
    pair: ConnectionPair, fetched: int, make_published: MakePublished
) -> None:
    pair.advance(9.9)
    assert pair.take("client") == []
    pair.advance(0.2)
    (event,) = pair.take("client")
    assert isinstance(event, Refused)
    assert isinstance(event.error, DeadlineExceededError)
    assert "fetch" in str(event.error)
    assert kinds(pair.take("server")) == [AbortRequested, Quiesced]
    assert not pair.server.publish(fetched, make_published(), now=pair.now)
    assert pair.server.data_to_send() == b""


def test_fetches_count_among_the_transfers_a_session_may_have(make_config: Callable[..., SessionConfig]) -> None:
    pair = ConnectionPair(make_config(), make_config(max_open_transfers=2))
    pair.settle()
    pair.take("client")
    ids = [pair.client.fetch(FETCH, now=0, timeout_s=9) for _ in range(3)]
    pair.settle()
    (event,) = pair.take("client")
    assert isinstance(event, Refused)
    assert event.transfer_id == ids[2]
    assert isinstance(event.error, PeerBusyError)


def test_an_answer_above_the_peers_maximum_leaves_the_fetch_waiting(
    make_config: Callable[..., SessionConfig], make_published: MakePublished
) -> None:
    pair = ConnectionPair(make_config(max_message_nbytes=65536), make_config())
    pair.settle()
    pair.take("client")
    transfer_id = pair.client.fetch(FETCH, now=0, timeout_s=9)
    pair.settle()
    large = make_published(block_table=np.zeros(20_000, np.uint32), seq_ptr=[0, 20_000], seq_lens=[80_000])
    with pytest.raises(ConfigError, match="65536") as caught:
        pair.server.publish(transfer_id, large, now=0)
    assert pair.server.data_to_send() == b""
    assert pair.server.refuse(transfer_id, caught.value, now=0)
    pair.settle()
    assert kinds(pair.take("client")) == [Refused]


# Answers the client must not act on.


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pool_id": 8}, StaleGenerationError("pool 8, which is not announced")),
        ({"generation": 2}, StaleGenerationError("generation 2 of pool 7, which is at generation 3")),
        ({"generation": 4}, StaleGenerationError("generation 4 of pool 7, which is at generation 3")),
        ({"block_table": [7, 10, 7, 9]}, GeometryError("block_table[1] = 10: is not below num_pages 10 of pool 7")),
    ],
)
def test_pages_outside_an_announced_pool_are_never_seen_by_the_engine(
    changes: dict[str, object],
    expected: HurrayError,
    pair: ConnectionPair,
    fetched: int,
    make_published: MakePublished,
) -> None:
    pair.server.publish(fetched, make_published(**changes), now=pair.now)
    pair.settle()
    (event,) = pair.take("client")
    assert isinstance(event, TransferFailed)
    assert not event.granted
    assert type(event.error) is type(expected)
    assert str(expected) in str(event.error)
    assert kinds(pair.take("server")) == [AbortRequested, Quiesced]


def test_pages_of_a_pool_removed_meanwhile_are_stale(
    pair: ConnectionPair, fetched: int, make_published: MakePublished
) -> None:
    pair.server.announce(Pool(pool_id=7, generation=3, removed=True), now=pair.now)
    pair.server.publish(fetched, make_published(), now=pair.now)
    pair.settle()
    event = pair.take("client")[-1]
    assert isinstance(event, TransferFailed)
    assert isinstance(event.error, StaleGenerationError)


@pytest.mark.parametrize("crossed", ["a grant for a fetch", "a snapshot for an offer"])
def test_the_answer_to_another_question_fails_the_transfer(
    crossed: str,
    pair: ConnectionPair,
    make_offer: Callable[..., Offer],
    make_published: MakePublished,
    grant: Grant,
) -> None:
    answer: Message
    if crossed == "a grant for a fetch":
        transfer_id, answer = pair.client.fetch(FETCH, now=0, timeout_s=9), grant
    else:
        transfer_id, answer = pair.client.offer(make_offer(), now=0, timeout_s=9), make_published()
    pair.settle()
    pair.take("server")
    pair.client_events += pair.client.receive(encode(answer, transfer_id), pair.now)
    (failed,) = pair.take("client")
    assert isinstance(failed, TransferFailed)
    assert isinstance(failed.error, ProtocolError)
    assert not failed.granted
    pair.settle()
    assert kinds(pair.take("server")) == [AbortRequested, Quiesced]


# Aborts.


@pytest.mark.parametrize("when", ["asked", "reading", "read"])
@pytest.mark.parametrize("who", ["client", "server"])
def test_either_side_aborts_at_any_point(
    when: str, who: Side, pair: ConnectionPair, fetched: int, make_published: MakePublished
) -> None:
    if when != "asked":
        pair.server.publish(fetched, make_published(), now=pair.now)
        pair.settle()
    if when == "read":
        pair.client.read_end(fetched, now=pair.now)
    pair.settle()
    pair.take("client")
    pair.take("server")
    aborting = pair.client if who == "client" else pair.server
    assert aborting.abort(fetched, ErrorCode.LEASE_EXPIRED, "too slow", now=pair.now)
    assert not aborting.abort(fetched, ErrorCode.ABORTED, "again", now=pair.now)
    pair.settle()
    (asked,) = pair.take("server" if who == "client" else "client")
    assert asked == AbortRequested(fetched, "too slow", ErrorCode.LEASE_EXPIRED)
    assert pair.take("server") == []  # A read may be in flight: the source pages stay until QUIET.
    assert not pair.client.read_end(fetched, now=pair.now)
    assert not pair.server.acknowledge(fetched, now=pair.now)
    assert pair.client.quiet(fetched, now=pair.now)
    pair.settle()
    assert pair.take("server") == [Quiesced(fetched)]
    assert pair.num_open("client") == pair.num_open("server") == 0


def test_a_lease_that_runs_out_before_the_end_is_heard_is_never_acknowledged(
    pair: ConnectionPair, published: int
) -> None:
    pair.client.read_end(published, now=pair.now)
    pair.server.abort(published, ErrorCode.LEASE_EXPIRED, "the lease ran out", now=pair.now)
    pair.settle()
    assert pair.take("server") == []
    assert not pair.server.acknowledge(published, now=pair.now)
    (asked,) = pair.take("client")
    assert isinstance(asked, AbortRequested)
    assert isinstance(asked.error, LeaseExpiredError)
    pair.client.quiet(published, now=pair.now)
    pair.settle()
    assert pair.take("client") == []
    assert pair.take("server") == [Quiesced(published)]


def test_abort_crosses_the_answer(pair: ConnectionPair, fetched: int, make_published: MakePublished) -> None:
    assert pair.server.publish(fetched, make_published(), now=pair.now)
    pair.client.abort(fetched, ErrorCode.ABORTED, "changed my mind", now=pair.now)
    pair.settle()
    assert pair.take("client") == []
    assert kinds(pair.take("server")) == [AbortRequested]
    pair.client.quiet(fetched, now=pair.now)
    pair.settle()
    assert pair.take("server") == [Quiesced(fetched)]


def test_abort_crosses_the_acknowledgement(pair: ConnectionPair, published: int) -> None:
    pair.client.read_end(published, now=pair.now)
    pair.settle()
    assert pair.take("server") == [AllEnded(published)]
    pair.server.acknowledge(published, now=pair.now)
    pair.client.abort(published, ErrorCode.ABORTED, "late", now=pair.now)
    pair.settle()
    assert pair.take("client") == pair.take("server") == []
    assert pair.client.quiet(published, now=pair.now)
    pair.settle()
    assert pair.take("server") == []
    assert pair.num_open("client") == pair.num_open("server") == 0


# Calls the state does not allow.


def test_calls_out_of_turn_raise_and_send_nothing(
    pair: ConnectionPair, fetched: int, grant: Grant, make_published: MakePublished, make_offer: Callable[..., Offer]
) -> None:
    for call in (
        lambda: pair.client.read_end(fetched, now=0),
        lambda: pair.client.data_end(fetched, 0, now=0),
        lambda: pair.client.quiet(fetched, now=0),
        lambda: pair.client.read_end(999, now=0),
        lambda: pair.server.grant(fetched, grant, now=0),
        lambda: pair.server.acknowledge(fetched, now=0),
        lambda: pair.server.publish(999, make_published(), now=0),
    ):
        with pytest.raises(LocalProtocolError):
            call()
    offered = pair.client.offer(make_offer(), now=0, timeout_s=9)
    pair.server.publish(fetched, make_published(), now=0)
    pair.settle()
    for call in (
        lambda: pair.client.data_end(fetched, 0, now=0),
        lambda: pair.client.tensor_data(fetched, 0, 0, b"x", now=0),
        lambda: pair.client.read_end(offered, now=0),
        lambda: pair.server.publish(fetched, make_published(), now=0),
        lambda: pair.server.publish(offered, make_published(), now=0),
        lambda: pair.server.refuse(fetched, GeometryError("late"), now=0),
        lambda: pair.server.acknowledge(fetched, now=0),
    ):
        with pytest.raises(LocalProtocolError):
            call()
    pair.client.read_end(fetched, now=0)
    pair.settle()
    with pytest.raises(LocalProtocolError, match="ended before"):
        pair.client.read_end(fetched, now=0)
    assert pair.client.data_to_send() == pair.server.data_to_send() == b""


# Late messages, and a peer that breaks the rules.


def test_an_answer_that_comes_after_the_fetch_was_given_up_is_sent_back(
    pair: ConnectionPair, make_published: MakePublished
) -> None:
    pair.spoil = lambda side, messages: [m for m in messages if side == "server" or not isinstance(m[1], Abort | Quiet)]
    transfer_id = pair.client.fetch(FETCH, now=pair.now, timeout_s=0.1)
    pair.advance(0.2)
    assert kinds(pair.take("client")) == [Refused]
    assert pair.server.publish(transfer_id, make_published(), now=pair.now)
    pair.spoil = None
    pair.settle()
    assert kinds(pair.take("server")) == [Fetched, AbortRequested, Quiesced]
    assert pair.take("client") == []


def test_an_answer_to_a_fetch_that_never_was_is_sent_back(pair: ConnectionPair, make_published: MakePublished) -> None:
    assert pair.client.receive(encode(make_published(), 77), pair.now) == []
    answers = list(FrameDecoder(1 << 20).feed(pair.client.data_to_send()))
    assert [(stream_id, type(answer)) for stream_id, answer in answers] == [(77, Abort), (77, Quiet)]


@pytest.mark.parametrize(
    ("message", "offset"),
    [
        (TensorPutAck(), 0),
        (TensorDataEndMessage(), 0),
        (TensorDataMessage(offset_nbytes=0, data=b"x"), 1),
        (FETCH, 1),
        (Quiet(), 1),
    ],
)
def test_a_wrong_message_fails_the_fetch_and_leaves_the_session(
    message: Message, offset: int, pair: ConnectionPair, published: int
) -> None:
    pair.server_events += pair.server.receive(encode(message, published + offset), pair.now)
    (failed,) = pair.take("server")
    assert isinstance(failed, TransferFailed)
    assert (failed.transfer_id, failed.granted) == (published, True)
    pair.settle()
    assert kinds(pair.take("client")) == [AbortRequested]
    pair.client.quiet(published, now=pair.now)
    pair.settle()
    assert pair.take("server") == [Quiesced(published)]
    assert pair.server.is_open


def test_an_offer_on_the_stream_of_a_fetch(
    pair: ConnectionPair, fetched: int, make_offer: Callable[..., Offer]
) -> None:
    pair.server_events += pair.server.receive(encode(make_offer(1), fetched), pair.now)
    (failed,) = pair.take("server")
    assert isinstance(failed, TransferFailed)
    assert not failed.granted
    pair.settle()
    assert kinds(pair.take("client")) == [Refused]


def test_a_fetch_said_twice_is_heard_once(pair: ConnectionPair, published: int) -> None:
    assert pair.server.receive(encode(FETCH, published), pair.now) == []
    assert pair.server.data_to_send() == b""


@pytest.mark.parametrize("kind", [0xF6, 0xF7])
def test_an_undecodable_message_is_answered_or_ends_the_transfer(kind: int, pair: ConnectionPair, fetched: int) -> None:
    if kind == 0xF6:
        frame = kind.to_bytes(4, "little") + (50).to_bytes(4, "little") + (1).to_bytes(4, "little") + b"\xc0"
        assert pair.server.receive(frame, pair.now) == []
        ((stream_id, answer),) = FrameDecoder(1 << 20).feed(pair.server.data_to_send())
        assert stream_id == 50
        assert isinstance(answer, ErrorMessage)
    else:
        frame = kind.to_bytes(4, "little") + fetched.to_bytes(4, "little") + (1).to_bytes(4, "little") + b"\xc0"
        (failed,) = pair.client.receive(frame, pair.now)
        assert isinstance(failed, TransferFailed)
        assert not failed.granted
        pair.settle()
        assert kinds(pair.take("server")) == [AbortRequested, Quiesced]


def test_a_lost_connection_fails_the_fetch_on_both_sides(
    pair: ConnectionPair, published: int, make_published: MakePublished
) -> None:
    waiting = pair.client.fetch(FETCH, now=pair.now, timeout_s=5)
    pair.settle()
    pair.take("server")
    pair.lose()
    for side in ("client", "server"):
        first, second, closed = pair.take(side)
        assert isinstance(first, TransferFailed)
        assert isinstance(second, TransferFailed)
        assert (first.transfer_id, first.granted) == (published, True)
        assert (second.transfer_id, second.granted) == (waiting, False)
        assert isinstance(closed, SessionClosed)
    assert not pair.client.read_end(published, now=pair.now)
    assert not pair.client.quiet(published, now=pair.now)
    assert not pair.server.acknowledge(published, now=pair.now)
    assert not pair.server.publish(waiting, make_published(), now=pair.now)


def test_published_heard_shows_no_arrays(pair: ConnectionPair, fetched: int, make_published: MakePublished) -> None:
    pair.server.publish(fetched, make_published(), now=pair.now)
    pair.settle()
    (heard,) = pair.take("client")
    assert isinstance(heard, PublishedHeard)
    assert "array" not in repr(heard.published)
    assert "HRRY" not in repr(heard)
