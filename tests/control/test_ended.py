"""ENDED: descriptors of a push that are complete together, told in one message, beside TENSOR_DATA_END for each."""

import random
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
    Message,
    Offer,
    Offered,
    Quiesced,
    SessionClosed,
    TransferFailed,
)
from hurray_rdma.control.codes import ErrorCode, LocalProtocolError
from hurray_rdma.control.exchange import Abort, Ended
from hurray_rdma.control.framing import FrameDecoder, encode
from hurray_rdma.control.messages import ErrorMessage, Ping, Pong, TensorDataEndMessage, TensorPutAck
from hurray_rdma.errors import GeometryError, ProtocolError
from hurray_rdma.testing.pair import ConnectionPair, Side

ALL = (0, 1, 2, 3)


def said(data: bytes) -> list[tuple[int, Message]]:
    """What bytes say, but for signs of life."""
    return [frame for frame in FrameDecoder(1 << 20).feed(data) if not isinstance(frame[1], Ping | Pong)]


def to_server(pair: ConnectionPair, message: Message, stream_id: int) -> tuple[list[Event], list[tuple[int, Message]]]:
    """The server's events of a message, and its answers."""
    events = pair.server.receive(encode(message, stream_id), pair.now)
    return events, said(pair.server.data_to_send())


def complete(pair: ConnectionPair, transfer_id: int) -> None:
    """Everything is written and acknowledged."""
    assert pair.client.data_end(transfer_id, *ALL, now=pair.now)
    pair.settle()
    assert pair.take("server") == [DescriptorsEnded(transfer_id, ALL), AllEnded(transfer_id)]
    assert pair.server.acknowledge(transfer_id, now=pair.now)
    pair.settle()
    assert pair.take("client") == [Acknowledged(transfer_id)]


# What the client says.


def test_ends_of_several_are_one_message_and_the_end_of_one_is_the_formats_own(
    pair: ConnectionPair, granted: int
) -> None:
    wire: list[tuple[int, Message]] = []

    def listen(sender: Side, messages: list[tuple[int, Message]]) -> list[tuple[int, Message]]:
        wire.extend(messages)
        return messages

    pair.spoil = listen
    for indices in ((2, 0), (1,), (3,)):
        assert pair.client.data_end(granted, *indices, now=pair.now)
        pair.settle()
        last: list[Event] = [AllEnded(granted)] if indices == (3,) else []
        assert pair.take("server") == [DescriptorsEnded(granted, indices), *last]
    assert wire == [
        (granted, Ended((2, 0))),
        (granted + 2, TensorDataEndMessage()),
        (granted + 4, TensorDataEndMessage()),
    ]


def test_all_of_a_push_end_at_once_and_are_said_again_whole(pair: ConnectionPair, granted: int) -> None:
    assert pair.client.data_end_of_all(granted, now=pair.now)
    data = pair.client.data_to_send()
    assert said(data) == [(granted, Ended(ALL))]
    for _ in range(2):  # the second time as if it were late
        pair.server.receive(data, pair.now)
    pair.settle()
    assert pair.server.acknowledge(granted, now=pair.now)
    pair.settle()
    assert pair.take("client") == [Acknowledged(granted)]
    assert not pair.client.data_end_of_all(granted, now=pair.now)


def test_all_cannot_end_before_the_grant_nor_after_some_have(pair: ConnectionPair, offered: int, grant: Grant) -> None:
    with pytest.raises(LocalProtocolError, match="not answered yet"):
        pair.client.data_end_of_all(offered, now=pair.now)
    pair.server.grant(offered, grant, now=pair.now)
    pair.settle()
    assert pair.client.data_end(offered, 1, now=pair.now)
    with pytest.raises(LocalProtocolError, match="some ended before"):
        pair.client.data_end_of_all(offered, now=pair.now)
    assert pair.client.data_end(offered, 0, 2, 3, now=pair.now)
    with pytest.raises(LocalProtocolError, match="some ended before"):
        pair.client.data_end_of_all(offered, now=pair.now)


def test_a_whole_snapshot_ends_in_one_message(pair: ConnectionPair, granted: int) -> None:
    complete(pair, granted)
    assert pair.num_open("client") == pair.num_open("server") == 0


def test_as_many_descriptors_as_an_offer_may_have_end_in_one_message(
    pair: ConnectionPair, make_offer: Callable[..., Offer], grant: Grant
) -> None:
    tiny = b"HRRY\x01\x00" + (20).to_bytes(4, "little") + bytes(10)
    transfer_id = pair.client.offer(make_offer(descriptors=tiny * 4096), now=pair.now, timeout_s=5)
    pair.settle()
    assert pair.server.grant(transfer_id, grant, now=pair.now)
    pair.settle()
    pair.take("server")
    assert pair.client.data_end(transfer_id, *range(4096), now=pair.now)
    assert said(data := pair.client.data_to_send()) == [(transfer_id, Ended(tuple(range(4096))))]
    assert pair.server.receive(data, pair.now) == [
        DescriptorsEnded(transfer_id, tuple(range(4096))),
        AllEnded(transfer_id),
    ]


@pytest.mark.parametrize("indices", [(), (0, 4), (-1, 0), (0, 0), (2, 0), (2,)], ids=str)
def test_of_ends_that_cannot_be_said_none_is(indices: tuple[int, ...], pair: ConnectionPair, granted: int) -> None:
    assert pair.client.data_end(granted, 2, now=pair.now)
    pair.settle()
    pair.take("server")
    with pytest.raises(LocalProtocolError):
        pair.client.data_end(granted, *indices, now=pair.now)
    assert pair.client.data_to_send() == b""
    assert pair.client.data_end(granted, 0, 1, 3, now=pair.now)
    pair.settle()
    assert pair.take("server") == [DescriptorsEnded(granted, (0, 1, 3)), AllEnded(granted)]


def test_ends_repeated_after_silence_are_one_message_in_any_case(
    pair: ConnectionPair, granted: int, make_offer: Callable[..., Offer], grant: Grant
) -> None:
    single = pair.client.offer(make_offer(1), now=pair.now, timeout_s=5)
    pair.settle()
    assert pair.server.grant(single, grant, now=pair.now)
    pair.settle()
    for index in ALL:
        pair.client.data_end(granted, index, now=pair.now)
    pair.client.data_end(single, 0, now=pair.now)
    pair.settle()
    pair.now += 0.6
    pair.client.handle_timeout(pair.now)
    assert sorted(said(pair.client.data_to_send()), key=lambda frame: frame[0]) == [
        (granted, Ended(ALL)),
        (single + 1, TensorDataEndMessage()),
    ]


def test_a_lost_message_is_made_up_for_by_all_ends_again(pair: ConnectionPair, granted: int) -> None:
    pair.spoil = lambda side, messages: [m for m in messages if m[1] != Ended((0, 1))]
    assert pair.client.data_end(granted, 0, 1, now=pair.now)
    pair.settle()
    assert pair.take("server") == []
    assert pair.client.data_end(granted, 3, 2, now=pair.now)
    pair.settle()
    assert pair.take("server") == [DescriptorsEnded(granted, (3, 2))]
    pair.advance(0.6)
    assert pair.take("server") == [DescriptorsEnded(granted, (0, 1)), AllEnded(granted)]


def test_nothing_is_said_of_a_transfer_that_is_ending(pair: ConnectionPair, granted: int) -> None:
    pair.server.abort(granted, ErrorCode.ABORTED, "s", now=pair.now)
    pair.settle()
    assert pair.take("client") == [AbortRequested(granted, "s", ErrorCode.ABORTED)]
    assert not pair.client.data_end(granted, *ALL, now=pair.now)
    pair.client.quiet(granted, now=pair.now)
    pair.settle()
    assert not pair.client.data_end(granted, *ALL, now=pair.now)
    assert pair.client.data_to_send() == b""


# What the server hears.


@pytest.mark.parametrize(
    ("heard", "events"),
    [
        ([(0, 0)], [(0,)]),
        ([(0, 0, 0, 0)], [(0,)]),
        ([(0, 1, 2, 2)], [(0, 1, 2)]),
        ([(3, 3, 0, 3)], [(3, 0)]),
        ([(0, 1), (1, 0)], [(0, 1)]),
        ([(0, 1), (2, 1, 0)], [(0, 1), (2,)]),
        ([(1,), (3, 2, 1, 0)], [(1,), (3, 2, 0), None]),
        ([(2, 3), (0, 3, 1, 0)], [(2, 3), (0, 1), None]),
        ([ALL, ALL, (3,), (0, 0)], [ALL, None]),
    ],
)
def test_each_descriptor_ends_once_however_often_it_is_told(
    heard: list[tuple[int, ...]], events: list[tuple[int, ...] | None], pair: ConnectionPair, granted: int
) -> None:
    """None stands for the event that all have ended."""
    found: list[Event] = []
    for indices in heard:
        more, answers = to_server(pair, Ended(indices), granted)
        assert answers == []
        found += more
    assert found == [AllEnded(granted) if indices is None else DescriptorsEnded(granted, indices) for indices in events]


@pytest.mark.parametrize("forms", [("one",), ("several",), ("one", "several")], ids="+".join)
@pytest.mark.parametrize("seed", range(12))
def test_both_forms_in_any_order_and_with_repeats(
    seed: int, forms: tuple[str, ...], pair: ConnectionPair, granted: int
) -> None:
    dice = random.Random(seed)
    missing = set(ALL)
    while missing:
        if dice.choice(forms) == "one":
            indices = [dice.choice(ALL)]
            events, answers = to_server(pair, TensorDataEndMessage(), granted + 1 + indices[0])
        else:
            indices = dice.choices(ALL, k=dice.randint(1, 3))
            events, answers = to_server(pair, Ended(tuple(indices)), granted)
        new = sorted(missing.intersection(indices), key=indices.index)
        missing.difference_update(new)
        expected: list[Event] = [DescriptorsEnded(granted, tuple(new))] if new else []
        assert events == expected + ([AllEnded(granted)] if new and not missing else [])
        assert answers == []
    assert pair.server.acknowledge(granted, now=pair.now)


@pytest.mark.parametrize(
    ("indices", "again"),
    [
        ((3,), True),
        ((0, 3), True),
        ((3, 0), True),
        (ALL, True),
        ((3, 3), True),
        ((0,), False),
        ((0, 1, 2), False),
        ((4,), False),
    ],
    ids=str,
)
def test_after_the_acknowledgement_the_last_end_asks_for_it_again(
    indices: tuple[int, ...], again: bool, pair: ConnectionPair, granted: int
) -> None:
    complete(pair, granted)
    for _ in range(2):
        events, answers = to_server(pair, Ended(indices), granted)
        assert events == []
        assert answers == ([(granted, TensorPutAck())] if again else [])


@pytest.mark.parametrize("indices", [(0, 1), ALL, (0, 4)], ids=str)
def test_of_a_transfer_that_is_aborted_it_says_nothing(
    indices: tuple[int, ...], pair: ConnectionPair, granted: int
) -> None:
    pair.server.abort(granted, ErrorCode.ABORTED, "s", now=pair.now)
    assert said(pair.server.data_to_send()) == [(granted, Abort(ErrorCode.ABORTED, "s"))]
    assert to_server(pair, Ended(indices), granted) == ([], [])
    pair.client.abort(granted, ErrorCode.ABORTED, "c", now=pair.now)
    pair.client.quiet(granted, now=pair.now)
    assert pair.server.receive(pair.client.data_to_send(), pair.now) == [Quiesced(granted)]
    assert to_server(pair, Ended(indices), granted) == ([], [])


def test_of_a_transfer_that_was_refused_it_says_nothing(pair: ConnectionPair, offered: int) -> None:
    assert pair.server.refuse(offered, GeometryError("no"), now=pair.now)
    pair.settle()
    assert to_server(pair, Ended(ALL), offered) == ([], [])


# A peer that breaks the rules.


def fails(pair: ConnectionPair, message: Message, stream_id: int, transfer_id: int) -> TransferFailed:
    """A message that fails its transfer, and tells the peer so; the session goes on."""
    (failed,), ((stream, answer),) = to_server(pair, message, stream_id)
    assert isinstance(failed, TransferFailed)
    assert failed.transfer_id == transfer_id
    assert isinstance(failed.error, ProtocolError)
    assert stream == transfer_id
    assert isinstance(answer, ErrorMessage)
    assert answer.text == str(failed.error)
    pair.client_events += pair.client.receive(encode(answer, stream), pair.now)
    assert pair.server.is_open
    return failed


@pytest.mark.parametrize(
    ("indices", "offset", "text"),
    [
        ((4,), 0, "the offer has 4 descriptors"),
        ((0, 1, 4), 0, "descriptor_index = 4"),
        ((4095, 0), 0, "descriptor_index = 4095"),
        ((0,), 1, "a client does not say Ended on a later stream of a PUSH"),
        ((3,), 4, "later stream"),
    ],
)
def test_a_wrong_one_fails_its_transfer_and_no_other(  # noqa: PLR0917 - the case, and what to make it of
    indices: tuple[int, ...],
    offset: int,
    text: str,
    pair: ConnectionPair,
    granted: int,
    make_offer: Callable[..., Offer],
) -> None:
    other = pair.client.offer(make_offer(), now=pair.now, timeout_s=5)
    pair.settle()
    assert [type(event) for event in pair.take("server")] == [Offered]
    pair.server.grant(other, Grant(generation=3, page_ids=np.arange(3), lease_s=1), now=pair.now)
    pair.settle()
    pair.take("client")

    failed = fails(pair, Ended(indices), granted + offset, granted)
    assert failed.granted
    assert text in str(failed.error)
    assert [type(event) for event in pair.take("client")] == [AbortRequested]
    pair.client.quiet(granted, now=pair.now)
    pair.settle()
    assert pair.take("server") == [Quiesced(granted)]
    complete(pair, other)


def test_before_the_grant_it_fails_the_transfer_for_good(pair: ConnectionPair, offered: int) -> None:
    failed = fails(pair, Ended(ALL), offered, offered)
    assert not failed.granted
    assert pair.num_open("server") == 0


@pytest.mark.parametrize("offset", [0, 1])
def test_of_a_pull_it_fails_the_transfer(offset: int, pair: ConnectionPair, published: int) -> None:
    failed = fails(pair, Ended((0,)), published + offset, published)
    assert "of a PULL" in str(failed.error)


def test_of_a_reservation_it_fails_the_transfer(pair: ConnectionPair, ahead: int) -> None:
    failed = fails(pair, Ended((0,)), ahead, ahead)
    assert "of a RESERVATION" in str(failed.error)


@pytest.mark.parametrize("kind", ["granted", "published", "ahead"])
def test_a_server_never_says_it(kind: str, pair: ConnectionPair, request: pytest.FixtureRequest) -> None:
    transfer_id = request.getfixturevalue(kind)
    (failed,) = pair.client.receive(encode(Ended((0,)), transfer_id), pair.now)
    assert isinstance(failed, TransferFailed)
    assert "a server does not say Ended" in str(failed.error)
    assert pair.client.is_open


def test_on_a_stream_that_nobody_owns(pair: ConnectionPair) -> None:
    events, ((stream_id, answer),) = to_server(pair, Ended(ALL), 50)
    assert (events, stream_id) == ([], 50)
    assert isinstance(answer, ErrorMessage)
    assert pair.server.is_open


def test_on_the_session_stream_it_ends_the_session(pair: ConnectionPair) -> None:
    (closed,) = pair.server.receive(encode(Ended((0,)), 1), pair.now)
    assert isinstance(closed, SessionClosed)
    assert isinstance(closed.error, ProtocolError)


@pytest.mark.parametrize("at", range(11))
def test_damaged_it_fails_its_transfer_or_ends_what_it_names(
    at: int, pair: ConnectionPair, make_offer: Callable[..., Offer], grant: Grant
) -> None:
    """Each byte of the payload, 91 c4 08 and two indices, with each of the values it may have come to."""
    data = encode(Ended((0, 1)), 2)
    assert len(data) == 12 + 11
    num_failed = 0
    for value in range(256):
        transfer_id = pair.client.offer(make_offer(), now=pair.now, timeout_s=5)
        pair.settle()
        assert pair.server.grant(transfer_id, grant, now=pair.now)
        pair.settle()
        pair.take("server")
        damaged = bytearray(encode(Ended((0, 1)), transfer_id))
        damaged[12 + at] = value
        (event,) = pair.server.receive(bytes(damaged), pair.now)
        if isinstance(event, DescriptorsEnded):
            named = {3: (value, 1), 7: (0, value)}.get(at, (0, 1))
            assert event == DescriptorsEnded(transfer_id, tuple(dict.fromkeys(named)))
        else:
            assert isinstance(event, TransferFailed)
            assert isinstance(event.error, ProtocolError)
            num_failed += 1
        pair.client.abort(transfer_id, ErrorCode.ABORTED, "c", now=pair.now)
        pair.client.quiet(transfer_id, now=pair.now)
        pair.settle()
    assert pair.server.is_open
    # Of an index's lowest byte 4 values are descriptors; of all others only what is right lets the payload be read.
    assert num_failed == (252 if at in {3, 7} else 255)
