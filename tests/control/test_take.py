"""Pulls whose pages come in frames, message by message: who may say what when, and what a wrong word costs."""

from collections.abc import Callable

import numpy as np
import pytest

from hurray_rdma.control import (
    AbortRequested,
    Acknowledged,
    AllEnded,
    DescriptorsEnded,
    Event,
    Fetch,
    Fetched,
    FrameDecoder,
    Message,
    Offer,
    Pool,
    Published,
    PublishedHeard,
    Quiesced,
    SessionClosed,
    SessionConfig,
    Take,
    Taken,
    TensorData,
    TransferFailed,
    encode,
)
from hurray_rdma.control.codes import ErrorCode, LocalProtocolError, PeerBusyError
from hurray_rdma.control.messages import TensorDataEndMessage, TensorDataMessage
from hurray_rdma.errors import ConfigError, ProtocolError
from hurray_rdma.testing.pair import ConnectionPair, Side

MakePublished = Callable[..., Published]
NUM_DESCRIPTORS = 4
TAKE = Take(page_size=4, head_offset=0, num_heads=2)


def kinds(events: list[Event]) -> list[type]:
    return [type(event) for event in events]


def messages(data: bytes) -> list[tuple[int, Message]]:
    return list(FrameDecoder(2**32 - 1).feed(data))


def ask(pair: ConnectionPair, published: Published, *, num_streams: int = NUM_DESCRIPTORS) -> int:
    """A fetch that was answered."""
    fetch = Fetch(key="req-19", deadline_s=10.0, path="frames", num_streams=num_streams)
    transfer_id = pair.client.fetch(fetch, now=pair.now, timeout_s=10.0)
    pair.settle()
    assert pair.take("server") == [Fetched(transfer_id, fetch)]
    assert pair.server.publish(transfer_id, published, now=pair.now)
    pair.settle()
    assert kinds(pair.take("client")) == [PublishedHeard]
    return transfer_id


@pytest.fixture
def answered(pair: ConnectionPair, make_published: MakePublished) -> int:
    return ask(pair, make_published())


@pytest.fixture
def taken(pair: ConnectionPair, answered: int) -> int:
    assert pair.client.take(answered, TAKE, now=pair.now)
    pair.settle()
    assert kinds(pair.take("server")) == [Taken]
    return answered


def send_all(pair: ConnectionPair, transfer_id: int) -> None:
    for index in range(NUM_DESCRIPTORS):
        assert pair.server.tensor_data(transfer_id, index, 0, b"page bytes", now=pair.now)
        assert pair.server.data_end(transfer_id, index, now=pair.now)


# All of it.


def test_a_pull_in_frames_from_take_to_acknowledgement(pair: ConnectionPair, answered: int) -> None:
    take = Take(page_size=16, head_offset=1, num_heads=1, resident=np.array([True, False]))
    assert pair.client.take(answered, take, now=pair.now)
    pair.settle()
    (heard,) = pair.take("server")
    assert isinstance(heard, Taken)
    assert (heard.take.page_size, heard.take.head_offset, heard.take.num_heads) == (16, 1, 1)
    assert heard.take.resident.tolist() == [True, False]

    content = np.arange(600, dtype=np.uint8).tobytes()
    for index in (2, 0, 3, 1):
        for start, end in ((0, 100), (100, 599), (599, 600)):
            assert pair.server.tensor_data(answered, index, start, content[start:end], now=pair.now)
        assert pair.server.data_end(answered, index, now=pair.now)
        pair.settle()
        *data, ended = [e for e in pair.take("client") if not isinstance(e, AllEnded)]
        assert ended == DescriptorsEnded(answered, (index,))
        assert all(isinstance(event, TensorData) and event.descriptor_index == index for event in data)
        assert b"".join(bytes(event.data) for event in data if isinstance(event, TensorData)) == content
        assert [event.offset_nbytes for event in data if isinstance(event, TensorData)] == [0, 100, 599]
    assert pair.take("server") == []
    assert pair.client.read_end(answered, now=pair.now)
    pair.settle()
    assert pair.take("server") == [AllEnded(answered)]
    assert pair.server.acknowledge(answered, now=pair.now)
    pair.settle()
    assert pair.take("client") == [Acknowledged(answered)]
    assert pair.num_open("client") == pair.num_open("server") == 0


def test_ends_that_are_said_together_are_one_message_each(pair: ConnectionPair, taken: int) -> None:
    for index in range(NUM_DESCRIPTORS):
        assert pair.server.tensor_data(taken, index, 0, b"page bytes", now=pair.now)
    assert pair.server.data_end(taken, *range(NUM_DESCRIPTORS), now=pair.now)
    heard = pair.client.receive(data := pair.server.data_to_send(), pair.now)
    assert [frame for frame in messages(data) if not isinstance(frame[1], TensorDataMessage)] == [
        (taken + 1 + index, TensorDataEndMessage()) for index in range(NUM_DESCRIPTORS)
    ]
    ends = [DescriptorsEnded(taken, (index,)) for index in range(NUM_DESCRIPTORS)]
    assert heard[NUM_DESCRIPTORS:] == [*ends, AllEnded(taken)]


def test_the_last_end_tells_that_all_came(pair: ConnectionPair, taken: int) -> None:
    send_all(pair, taken)
    pair.settle()
    heard = pair.take("client")
    assert kinds(heard) == [TensorData, DescriptorsEnded] * NUM_DESCRIPTORS + [AllEnded]


def test_a_pull_keeps_the_streams_that_its_fetch_says(
    pair: ConnectionPair, make_offer: Callable[..., Offer], make_published: MakePublished
) -> None:
    fetch = Fetch(key="k", deadline_s=5, num_streams=4)
    first = pair.client.fetch(fetch, now=0, timeout_s=5)
    assert (first, pair.client.offer(make_offer(2), now=0, timeout_s=5)) == (2, 7)
    assert pair.client.fetch(fetch, now=0, timeout_s=5) == 10
    pair.settle()
    assert [event.transfer_id for event in pair.take("server")] == [2, 7, 10]  # type: ignore[union-attr]


def test_a_reader_that_has_a_lane_ends_on_its_first_stream_and_takes_nothing(
    pair: ConnectionPair, answered: int
) -> None:
    assert pair.client.read_end(answered, now=pair.now)
    assert [(stream, type(m)) for stream, m in messages(pair.client.data_to_send())] == [
        (answered + 1, TensorDataEndMessage)
    ]


# What is lost.


def test_an_end_that_was_lost_alone_costs_two_heartbeats(pair: ConnectionPair, taken: int) -> None:
    send_all(pair, taken)
    pair.spoil = lambda side, found: [m for m in found if not isinstance(m[1], TensorDataEndMessage)]
    pair.settle()
    pair.spoil = None
    assert kinds(pair.take("client")) == [TensorData] * NUM_DESCRIPTORS
    pair.advance(0.6)
    assert kinds(pair.take("client")) == [DescriptorsEnded] * NUM_DESCRIPTORS + [AllEnded]
    assert pair.client.read_end(taken, now=pair.now)
    pair.settle()
    assert pair.take("server") == [AllEnded(taken)]
    pair.advance(3)
    assert pair.take("client") == []  # what came again and again is heard once
    assert pair.server.acknowledge(taken, now=pair.now)
    pair.settle()
    assert pair.take("client") == [Acknowledged(taken)]


def test_ends_that_are_unsent_are_not_said_again(pair: ConnectionPair, taken: int) -> None:
    send_all(pair, taken)
    for _ in range(30):
        pair.now += 0.1
        pair.server.receive(encode(TensorDataEndMessage(), 999), pair.now)  # a sign of life
        assert pair.server.handle_timeout(pair.now) == []
    unsent = [message for stream, message in messages(pair.server.data_to_send()) if taken < stream <= taken + 4]
    assert [type(message) for message in unsent].count(TensorDataEndMessage) == NUM_DESCRIPTORS


def test_a_readers_end_that_was_lost_is_said_again(pair: ConnectionPair, taken: int) -> None:
    send_all(pair, taken)
    pair.settle()
    pair.take("client")
    assert pair.client.read_end(taken, now=pair.now)
    pair.client.data_to_send()
    pair.advance(0.6)
    assert pair.take("server") == [AllEnded(taken)]


def test_a_take_that_comes_twice_is_heard_once(pair: ConnectionPair, taken: int) -> None:
    send_all(pair, taken)
    assert pair.server.receive(encode(TAKE, taken), pair.now) == []
    pair.server.data_to_send()
    pair.now += 0.6
    assert pair.server.handle_timeout(pair.now) == []
    ends = [m for _, m in messages(pair.server.data_to_send()) if isinstance(m, TensorDataEndMessage)]
    assert len(ends) == NUM_DESCRIPTORS, "the ends are said again all the same"


# A side that breaks the rules.


def fail_client(pair: ConnectionPair, message: Message, stream_id: int) -> TransferFailed:
    (failed,) = pair.client.receive(encode(message, stream_id), pair.now)
    assert isinstance(failed, TransferFailed)
    assert isinstance(failed.error, ProtocolError)
    assert pair.client.quiet(failed.transfer_id, now=pair.now)
    pair.settle()
    assert kinds(pair.take("server"))[-2:] == [AbortRequested, Quiesced]
    assert pair.client.is_open
    assert pair.server.is_open
    assert pair.num_open("client") == pair.num_open("server") == 0
    return failed


@pytest.mark.parametrize(
    "message", [TensorDataMessage(offset_nbytes=0, data=b"x"), TensorDataEndMessage()], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("offset", [0, 1, NUM_DESCRIPTORS])
def test_frames_that_nobody_takes_fail_the_fetch(
    message: Message, offset: int, pair: ConnectionPair, answered: int
) -> None:
    assert fail_client(pair, message, answered + offset).granted


@pytest.mark.parametrize(
    "message", [TensorDataMessage(offset_nbytes=0, data=b"x"), TensorDataEndMessage()], ids=lambda m: type(m).__name__
)
def test_frames_before_the_answer_fail_the_fetch(message: Message, pair: ConnectionPair) -> None:
    fetch = Fetch(key="k", deadline_s=10.0, num_streams=4)
    transfer_id = pair.client.fetch(fetch, now=pair.now, timeout_s=10.0)
    pair.settle()
    (failed,) = pair.client.receive(encode(message, transfer_id + 1), pair.now)
    assert isinstance(failed, TransferFailed)
    assert not failed.granted


@pytest.mark.parametrize(
    ("offset_nbytes", "why"),
    [(11, "the next byte of descriptor 1 is 10"), (9, "the next byte of descriptor 1 is 10"), (2**64 - 1, "next byte")],
)
def test_frames_out_of_order_fail_the_fetch(offset_nbytes: int, why: str, pair: ConnectionPair, taken: int) -> None:
    assert pair.server.tensor_data(taken, 1, 0, b"page bytes", now=pair.now)
    pair.settle()
    pair.take("client")
    failed = fail_client(pair, TensorDataMessage(offset_nbytes=offset_nbytes, data=b"xy"), taken + 2)
    assert why in str(failed.error)


def test_frames_behind_their_end_fail_the_fetch(pair: ConnectionPair, taken: int) -> None:
    assert pair.server.tensor_data(taken, 1, 0, b"page bytes", now=pair.now)
    assert pair.server.data_end(taken, 1, now=pair.now)
    pair.settle()
    pair.take("client")
    fail_client(pair, TensorDataMessage(offset_nbytes=10, data=b"x"), taken + 2)


def test_frames_of_more_descriptors_than_were_published_fail_the_fetch(
    pair: ConnectionPair, make_published: MakePublished
) -> None:
    transfer_id = ask(pair, make_published(), num_streams=6)
    assert pair.client.take(transfer_id, TAKE, now=pair.now)
    failed = fail_client(pair, TensorDataMessage(offset_nbytes=0, data=b"x"), transfer_id + 5)
    assert "data of 4 descriptors" in str(failed.error)


def test_frames_that_come_again_are_heard_once(pair: ConnectionPair, taken: int) -> None:
    data = encode(TensorDataMessage(offset_nbytes=0, data=b"page bytes"), taken + 1)
    end = encode(TensorDataEndMessage(), taken + 1)
    assert kinds(pair.client.receive(data + data + end + data + end, pair.now)) == [TensorData, DescriptorsEnded]


@pytest.mark.parametrize("num_sent", [0, 3])
def test_a_reader_that_ends_before_it_has_all_fails_its_fetch(num_sent: int, pair: ConnectionPair, taken: int) -> None:
    for index in range(num_sent):
        assert pair.server.data_end(taken, index, now=pair.now)
    (failed,) = pair.server.receive(encode(TensorDataEndMessage(), taken + 1), pair.now)
    assert isinstance(failed, TransferFailed)
    assert "not before all was sent" in str(failed.error)
    assert not pair.server.data_end(taken, 3, now=pair.now)


@pytest.mark.parametrize("takes", [False, True])
def test_a_reader_that_ends_on_another_stream_fails_its_fetch(takes: bool, pair: ConnectionPair, answered: int) -> None:
    if takes:
        pair.client.take(answered, TAKE, now=pair.now)
        pair.settle()
        send_all(pair, answered)
        pair.take("server")
    (failed,) = pair.server.receive(encode(TensorDataEndMessage(), answered + 2), pair.now)
    assert isinstance(failed, TransferFailed)
    assert failed.granted


def test_a_take_on_too_few_streams_fails_the_fetch(pair: ConnectionPair, make_published: MakePublished) -> None:
    transfer_id = ask(pair, make_published(), num_streams=3)
    with pytest.raises(LocalProtocolError, match="4 descriptors were published; 3 streams were kept"):
        pair.client.take(transfer_id, TAKE, now=pair.now)
    (failed,) = pair.server.receive(encode(TAKE, transfer_id), pair.now)
    assert isinstance(failed, TransferFailed)
    assert "num_streams = 3: 4 descriptors were published" in str(failed.error)


def test_what_readers_say_they_have_is_bounded_for_a_session(
    make_config: Callable[..., SessionConfig], make_pool: Callable[..., Pool], make_published: MakePublished
) -> None:
    pair = ConnectionPair(make_config(), make_config(max_message_nbytes=65536))
    pair.settle()
    pair.server.announce(make_pool(), now=0)
    pair.settle()
    pair.take("client")
    pair.take("server")
    ids = [ask(pair, make_published()) for _ in range(6)]
    large = Take(page_size=4, head_offset=0, num_heads=2, resident=np.ones(60_000, np.bool_))
    for transfer_id in ids[:5]:  # 60 kB each: four fit into four messages of 64 KiB, the fifth does not.
        assert pair.client.take(transfer_id, large, now=pair.now)
    pair.settle()
    *heard, failed = pair.take("server")
    assert kinds(heard) == [Taken] * 4
    assert isinstance(failed, TransferFailed)
    assert isinstance(failed.error, PeerBusyError)
    assert "nbytes of resident = 60000" in str(failed.error)
    (told,) = pair.take("client")
    assert isinstance(told, AbortRequested)
    assert isinstance(told.error, PeerBusyError)
    assert pair.client.abort(ids[0], ErrorCode.ABORTED, "no more", now=pair.now)
    assert pair.client.quiet(ids[0], now=pair.now)
    assert pair.client.take(ids[5], large, now=pair.now)  # There is room again.
    pair.settle()
    assert kinds(pair.take("server")) == [AbortRequested, Quiesced, Taken]


def test_a_take_before_the_answer_fails_the_fetch(pair: ConnectionPair, fetched: int) -> None:
    (failed,) = pair.server.receive(encode(TAKE, fetched), pair.now)
    assert isinstance(failed, TransferFailed)
    assert not failed.granted


def test_a_take_of_what_is_offered_fails_the_offer(pair: ConnectionPair, granted: int) -> None:
    (failed,) = pair.server.receive(encode(TAKE, granted), pair.now)
    assert isinstance(failed, TransferFailed)
    assert "does not say Take" in str(failed.error)


def test_page_data_of_a_client_in_its_own_pull_fails_it(pair: ConnectionPair, taken: int) -> None:
    (failed,) = pair.server.receive(encode(TensorDataMessage(offset_nbytes=0, data=b"x"), taken + 1), pair.now)
    assert isinstance(failed, TransferFailed)


# Calls the state does not allow.


def test_calls_out_of_turn_raise_and_send_nothing(
    pair: ConnectionPair, make_published: MakePublished, make_offer: Callable[..., Offer]
) -> None:
    asked = pair.client.fetch(Fetch(key="k", deadline_s=9, num_streams=4), now=0, timeout_s=9)
    offered = pair.client.offer(make_offer(), now=0, timeout_s=9)
    pair.settle()
    for call in (
        lambda: pair.client.take(asked, TAKE, now=0),
        lambda: pair.client.take(offered, TAKE, now=0),
        lambda: pair.client.take(999, TAKE, now=0),
        lambda: pair.server.tensor_data(asked, 0, 0, b"x", now=0),
        lambda: pair.server.data_end(asked, 0, now=0),
        lambda: pair.server.data_end(offered, 0, now=0),
    ):
        with pytest.raises(LocalProtocolError):
            call()
    pair.server.publish(asked, make_published(), now=0)
    pair.settle()
    for call in (
        lambda: pair.server.tensor_data(asked, 0, 0, b"x", now=0),  # nobody takes it
        lambda: pair.server.data_end(asked, 0, now=0),
    ):
        with pytest.raises(LocalProtocolError, match="descriptor_index = 0"):
            call()
    assert pair.client.take(asked, TAKE, now=0)
    pair.settle()
    assert pair.server.tensor_data(asked, 0, 0, b"x", now=0)
    assert pair.server.data_end(asked, 1, now=0)
    pair.settle()
    for call in (
        lambda: pair.client.take(asked, TAKE, now=0),
        lambda: pair.client.read_end(asked, now=0),
        lambda: pair.server.tensor_data(asked, 0, 2, b"x", now=0),
        lambda: pair.server.tensor_data(asked, 1, 0, b"x", now=0),
        lambda: pair.server.tensor_data(asked, 4, 0, b"x", now=0),
        lambda: pair.server.data_end(asked, 1, now=0),
        lambda: pair.server.data_end(asked, -1, now=0),
    ):
        with pytest.raises(LocalProtocolError):
            call()
    assert pair.client.data_to_send() == pair.server.data_to_send() == b""


def test_a_take_and_frames_above_the_peers_maximum_are_not_sent(
    make_config: Callable[..., SessionConfig], make_pool: Callable[..., Pool], make_published: MakePublished
) -> None:
    pair = ConnectionPair(make_config(max_message_nbytes=65536), make_config(max_message_nbytes=65536))
    pair.settle()
    pair.server.announce(make_pool(), now=0)
    pair.settle()
    pair.take("client")
    pair.take("server")
    transfer_id = ask(pair, make_published())
    large = Take(page_size=4, head_offset=0, num_heads=2, resident=np.zeros(70_000, np.bool_))
    with pytest.raises(ConfigError, match="65536"):
        pair.client.take(transfer_id, large, now=0)
    assert pair.client.data_to_send() == b""
    assert pair.client.take(transfer_id, TAKE, now=0)  # It was not said.
    pair.settle()
    with pytest.raises(ConfigError, match="65536"):
        pair.server.tensor_data(transfer_id, 0, 0, bytes(65529), now=0)
    assert pair.server.tensor_data(transfer_id, 0, 0, bytes(65528), now=0)


# Early ends.


@pytest.mark.parametrize("when", ["taken", "half", "all sent", "read"])
@pytest.mark.parametrize("who", ["client", "server"])
def test_either_side_aborts_at_any_point(when: str, who: Side, pair: ConnectionPair, taken: int) -> None:
    if when == "half":
        pair.server.tensor_data(taken, 0, 0, b"x", now=pair.now)
    elif when != "taken":
        send_all(pair, taken)
    pair.settle()
    if when == "read":
        assert pair.client.read_end(taken, now=pair.now)
        pair.settle()
    pair.take("client")
    pair.take("server")
    aborting = pair.client if who == "client" else pair.server
    assert aborting.abort(taken, ErrorCode.LEASE_EXPIRED, "too slow", now=pair.now)
    pair.settle()
    assert pair.take("server" if who == "client" else "client") == [
        AbortRequested(taken, "too slow", ErrorCode.LEASE_EXPIRED)
    ]
    assert not pair.server.tensor_data(taken, 0, 1, b"x", now=pair.now)
    assert not pair.server.data_end(taken, 0, now=pair.now)
    assert not pair.client.read_end(taken, now=pair.now)
    assert not pair.client.take(taken, TAKE, now=pair.now)
    assert pair.client.quiet(taken, now=pair.now)
    pair.settle()
    assert pair.take("server") == [Quiesced(taken)]
    assert pair.num_open("client") == pair.num_open("server") == 0


def test_frames_that_cross_an_abort_are_not_heard(pair: ConnectionPair, taken: int) -> None:
    send_all(pair, taken)
    pair.client.abort(taken, ErrorCode.ABORTED, "changed my mind", now=pair.now)
    pair.client.quiet(taken, now=pair.now)
    pair.settle()
    assert pair.take("client") == []
    assert kinds(pair.take("server")) == [AbortRequested, Quiesced]
    assert not pair.server.tensor_data(taken, 0, 10, b"x", now=pair.now)


def test_a_lost_connection_fails_it_on_both_sides(pair: ConnectionPair, taken: int) -> None:
    pair.server.tensor_data(taken, 0, 0, b"x", now=pair.now)
    pair.lose()
    for side in ("client", "server"):
        failed, closed = pair.take(side)  # type: ignore[arg-type]
        assert isinstance(failed, TransferFailed)
        assert failed.granted
        assert isinstance(closed, SessionClosed)
    assert not pair.server.tensor_data(taken, 0, 1, b"x", now=pair.now)
    assert not pair.server.data_end(taken, 0, now=pair.now)
    assert not pair.client.take(taken, TAKE, now=pair.now)


# Silence.


def test_a_session_tells_how_long_its_peer_is_silent(pair: ConnectionPair) -> None:
    heard = pair.now
    assert pair.client.silent_s(heard + 0.125) == 0.125
    pair.now += 0.5
    pair.client_events += pair.client.receive(encode(TensorDataEndMessage(), 1)[:5], pair.now)  # part of a message
    assert 0.49 < pair.client.silent_s(pair.now) <= 0.5
