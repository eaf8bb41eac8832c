"""Peers that do not read what they are sent, or that this side did not get to read.

Memory stays bounded, and nobody healthy is given up.
"""

from collections.abc import Callable

import numpy as np
import pytest

from hurray_rdma.control import (
    AbortRequested,
    Event,
    Granted,
    Offered,
    PoolsAnnounced,
    SessionClosed,
    SessionConfig,
    SessionOpened,
    TransferFailed,
)
from hurray_rdma.control.codes import ErrorCode, PeerBusyError
from hurray_rdma.control.exchange import Abort, Ended, Quiet
from hurray_rdma.control.framing import FrameDecoder, encode
from hurray_rdma.control.messages import ErrorMessage, Message, Ping, Pong, TensorDataEndMessage
from hurray_rdma.control.offers import Commit, Fetch, Grant, Offer, Published, Reserve
from hurray_rdma.control.outbox import MAX_REPLIES_NBYTES
from hurray_rdma.control.pools import Pool, PoolRegion
from hurray_rdma.errors import GeometryError, PeerLostError, ProtocolError
from hurray_rdma.testing.pair import ConnectionPair, commit_like

MakeOffer = Callable[..., Offer]
LAST_WORDS_NBYTES = 12 + 8 + 4000
"""An ERROR of 1000 characters in its frame, at most."""


def decode(data: bytes) -> list[Message]:
    return [message for _, message in FrameDecoder(2**32 - 1).feed(data)]


def to_server(pair: ConnectionPair, data: bytes) -> list[Event]:
    return pair.server.receive(data, pair.now)


def wait_unread(pair: ConnectionPair, seconds: float) -> None:
    """Let time pass at a server whose peer sends signs of life, and reads nothing."""
    for _ in range(round(seconds / 0.1)):
        pair.now += 0.1
        assert to_server(pair, encode(Pong(), 1)) == []
        assert pair.server.handle_timeout(pair.now) == []


def open_pair(client: SessionConfig, server: SessionConfig) -> ConnectionPair:
    pair = ConnectionPair(client, server)
    pair.settle()
    assert [type(event) for event in pair.take("client")] == [SessionOpened, PoolsAnnounced]
    pair.take("server")
    return pair


# Short replies.


def test_refusals_that_nobody_reads_end_the_session(pair: ConnectionPair, make_offer: MakeOffer) -> None:
    closed: list[Event] = []
    num_refused = 0
    for transfer_id in range(2, 200_000, 5):
        for event in to_server(pair, encode(make_offer(), transfer_id)):
            if isinstance(event, Offered):
                pair.server.refuse(event.transfer_id, GeometryError("x" * 300), now=pair.now)
                num_refused += 1
            else:
                closed.append(event)
        if closed:
            break
    # A refusal is 12 bytes of header, 8 of code and length, 300 of text: 320. 3277 of them are over 1 MiB.
    assert num_refused == MAX_REPLIES_NBYTES // 320 + 1 == 3277
    assert isinstance(closed[-1], SessionClosed)
    assert isinstance(closed[-1].error, ProtocolError)
    assert "the peer does not read" in str(closed[-1].error)
    assert len(pair.server.data_to_send()) <= MAX_REPLIES_NBYTES + LAST_WORDS_NBYTES


def test_a_session_that_overflows_by_a_call_ends_without_a_word_of_the_peer(
    make_config: Callable[..., SessionConfig], make_offer: MakeOffer
) -> None:
    pair = open_pair(make_config(), make_config(max_open_transfers=2000))
    ids = [pair.client.offer(make_offer(), now=0, timeout_s=9) for _ in range(1100)]
    pair.carry("client")
    pair.now = 0.125
    for transfer_id in ids:  # 1100 times 12 + 8 + 1000 bytes, at once.
        assert pair.server.refuse(transfer_id, GeometryError("x" * 1000), now=pair.now)
    due = pair.server.next_timeout()
    assert due is not None
    assert due <= pair.now
    (closed,) = pair.server.handle_timeout(pair.now)
    assert isinstance(closed, SessionClosed)
    assert isinstance(closed.error, ProtocolError)
    assert pair.server.next_timeout() is None
    assert len(pair.server.data_to_send()) <= MAX_REPLIES_NBYTES + LAST_WORDS_NBYTES


def test_broken_transfers_that_nobody_reads_of_end_the_session(pair: ConnectionPair, make_offer: MakeOffer) -> None:
    closed: list[Event] = []
    for transfer_id in range(2, 500_000, 2):
        # An END before its grant: an ERROR of some 80 bytes each.
        events = to_server(pair, encode(make_offer(1), transfer_id) + encode(TensorDataEndMessage(), transfer_id + 1))
        if isinstance(events[-1], SessionClosed):
            closed = events
            break
        assert [type(event) for event in events] == [Offered, TransferFailed]
    assert closed
    assert len(pair.server.data_to_send()) <= MAX_REPLIES_NBYTES + LAST_WORDS_NBYTES


@pytest.mark.parametrize("by_one", [True, False])
def test_acknowledgements_that_nobody_reads_end_the_session(pair: ConnectionPair, granted: int, by_one: bool) -> None:
    for index in range(4):
        pair.client.data_end(granted, index, now=pair.now)
    pair.settle()
    pair.server.acknowledge(granted, now=pair.now)
    # The last one again: it is acknowledged again, in 12 bytes.
    again = encode(TensorDataEndMessage(), granted + 4) if by_one else encode(Ended((3,)), granted)
    limit = MAX_REPLIES_NBYTES // 12
    assert to_server(pair, again * (limit - 1)) == []
    (closed,) = to_server(pair, again)
    assert isinstance(closed, SessionClosed)


# What is repeated.


def test_aborts_are_not_repeated_while_they_are_unsent(pair: ConnectionPair, make_offer: MakeOffer) -> None:
    ids = [pair.client.offer(make_offer(), now=pair.now, timeout_s=1000) for _ in range(300)]
    pair.carry("client")
    for transfer_id in ids:
        assert pair.server.abort(transfer_id, ErrorCode.LEASE_EXPIRED, "x" * 1000, now=pair.now)
    wait_unread(pair, 60)
    unsent = decode(pair.server.data_to_send())
    assert [type(message) for message in unsent].count(Abort) == 300
    assert sum(isinstance(message, Ping) for message in unsent) <= 1
    assert pair.server.is_open
    wait_unread(pair, 0.6)  # Now that they are sent, the client is asked again, once.
    repeated = decode(pair.server.data_to_send())
    assert repeated.count(Abort(ErrorCode.LEASE_EXPIRED, "x" * 1000)) == 300


def test_repeated_aborts_alone_never_end_a_session(pair: ConnectionPair, make_offer: MakeOffer) -> None:
    ids = [pair.client.offer(make_offer(), now=pair.now, timeout_s=1000) for _ in range(1024)]
    pair.carry("client")
    for transfer_id in ids:
        pair.server.abort(transfer_id, ErrorCode.ABORTED, "é" * 1000, now=pair.now)
        pair.server.data_to_send()
    wait_unread(pair, 5)  # 1024 times 2 kB would be 2 MiB.
    assert pair.server.is_open
    assert MAX_REPLIES_NBYTES // 2 < len(pair.server.data_to_send()) < MAX_REPLIES_NBYTES


def test_a_peer_does_not_choose_what_it_is_told_again(pair: ConnectionPair, granted: int) -> None:
    data = encode(Abort(ErrorCode.ABORTED, "chosen by the peer" * 50), granted)
    (asked,) = to_server(pair, data)
    assert isinstance(asked, AbortRequested)
    assert asked.reason == "chosen by the peer" * 50
    wait_unread(pair, 0.6)
    (repeated,) = [message for message in decode(pair.server.data_to_send()) if isinstance(message, Abort)]
    assert repeated == Abort(ErrorCode.ABORTED, "this is what the client asked for")


def test_ends_and_commits_are_not_repeated_while_they_are_unsent(
    pair: ConnectionPair, granted: int, make_offer: MakeOffer, grant: Grant
) -> None:
    for index in range(4):
        pair.client.data_end(granted, index, now=pair.now)
    reserve = Reserve(pool_id=7, generation=3, num_pages=3, deadline_s=10.0)
    ahead = pair.client.reserve(reserve, now=pair.now, timeout_s=10)
    assert [type(event) for event in pair.client.receive(encode(grant, ahead), pair.now)] == [Granted]
    assert pair.client.commit(ahead, commit_like(make_offer()), now=pair.now)

    def wait(seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            pair.now += 0.1
            assert pair.client.receive(encode(Pong(), 1), pair.now) == []
            assert pair.client.handle_timeout(pair.now) == []

    wait(10)
    unsent = decode(pair.client.data_to_send())
    assert unsent.count(TensorDataEndMessage()) == 4
    assert [type(message) for message in unsent].count(Ended) == 0
    assert [type(message) for message in unsent].count(Commit) == 1
    wait(0.6)  # Said again it is one message, however the ends were said at first.
    repeated = decode(pair.client.data_to_send())
    assert repeated.count(TensorDataEndMessage()) == 0
    assert [message for message in repeated if isinstance(message, Ended)] == [Ended((0, 1, 2, 3))]
    assert [type(message) for message in repeated].count(Commit) == 1


# Long answers.


def test_grants_of_millions_of_pages_may_wait_to_be_sent(
    make_config: Callable[..., SessionConfig], make_pool: Callable[..., Pool], make_offer: MakeOffer
) -> None:
    pair = open_pair(make_config(), make_config())
    num_pages = 8 << 20
    regions = (PoolRegion(remote_addr=0, nbytes=2**40, rkey=b""),)
    pair.server.announce(make_pool(num_pages=num_pages, regions=regions), now=0)
    pair.settle()
    pair.take("client")
    ids = [pair.client.offer(make_offer(), now=0, timeout_s=9) for _ in range(8)]
    pair.carry("client")
    pages = np.arange(num_pages, dtype=np.uint32).reshape(8, -1)
    for transfer_id, page_ids in zip(ids, pages, strict=True):
        assert pair.server.grant(transfer_id, Grant(generation=3, page_ids=page_ids, lease_s=9), now=0)
    pair.settle()
    assert [type(event) for event in pair.take("client")] == [Granted] * 8


def test_answers_beyond_the_bound_are_refused_as_busy_until_some_are_sent(
    make_config: Callable[..., SessionConfig], make_published: Callable[..., Published]
) -> None:
    pair = open_pair(make_config(), make_config(max_message_nbytes=65536))
    ids = [pair.client.fetch(Fetch(key="k", deadline_s=9), now=0, timeout_s=9) for _ in range(5)]
    pair.carry("client")
    pair.take("server")
    table = np.arange(100_000, dtype=np.uint32)
    published = make_published(block_table=table, seq_ptr=np.array([0, 50_000, 100_000]))
    for transfer_id in ids[:3]:  # 400 kB each: at 0, 400 and 800 kB there is room, at 1.2 MB there is none.
        assert pair.server.publish(transfer_id, published, now=0)
    with pytest.raises(PeerBusyError, match="over 1048576"):
        pair.server.publish(ids[3], published, now=0)
    assert pair.server.is_open
    assert pair.server.refuse(ids[4], PeerBusyError("busy"), now=0)  # Short replies have a bound of their own.
    assert 1_200_000 < len(pair.server.data_to_send()) < 1_300_000
    assert pair.server.publish(ids[3], published, now=0)  # It still waited.


def test_announcements_that_nobody_reads_end_the_session(
    make_config: Callable[..., SessionConfig], make_pool: Callable[..., Pool]
) -> None:
    pair = open_pair(make_config(), make_config(max_message_nbytes=65536))
    large = (PoolRegion(remote_addr=0, nbytes=10**6, rkey=bytes(60_000)),) * 5
    for generation in range(50):
        assert pair.server.announce(make_pool(generation=generation, regions=large), now=0)
    (closed,) = pair.server.handle_timeout(0)
    assert isinstance(closed, SessionClosed)
    assert isinstance(closed.error, ProtocolError)
    # Of 300 kB each: at 0, 300, 600 and 900 kB there is room.
    pools = [message for message in decode(pair.server.data_to_send()) if isinstance(message, Pool)]
    assert [pool.generation for pool in pools] == [0, 1, 2, 3]
    assert not pair.server.announce(make_pool(generation=99), now=0)


# A loop that was busy.


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_side_that_was_busy_reads_before_it_gives_up_a_healthy_peer(pair: ConnectionPair, side: str) -> None:
    session = pair.client if side == "client" else pair.server
    assert session.handle_timeout(60.0) == []  # Nobody got to run for a minute; what the peer said is unread.
    due = session.next_timeout()
    assert due == 60.25  # One heartbeat on.
    assert session.receive(encode(Ping(), 1), 60.1) == []
    assert session.handle_timeout(60.25) == []
    assert session.is_open
    assert [type(message) for message in decode(session.data_to_send())] == [Ping, Pong]


def test_a_side_that_was_busy_gives_up_a_silent_peer_one_heartbeat_later(pair: ConnectionPair) -> None:
    assert pair.client.handle_timeout(60.0) == []
    assert pair.client.handle_timeout(60.2) == []
    (closed,) = pair.client.handle_timeout(60.25)
    assert isinstance(closed, SessionClosed)
    assert isinstance(closed.error, PeerLostError)
    assert "60.25 s" in str(closed.error)


def test_a_side_that_is_busy_again_waits_again(pair: ConnectionPair) -> None:
    assert pair.client.handle_timeout(60.0) == []
    assert pair.client.handle_timeout(70.0) == []
    assert pair.client.is_open
    assert len(pair.client.handle_timeout(70.25)) == 1


# What is kept of transfers that are over.


def test_nothing_by_the_descriptor_is_kept_of_a_finished_transfer(pair: ConnectionPair, granted: int) -> None:
    for index in range(4):
        pair.client.data_end(granted, index, now=pair.now)
    pair.settle()
    pair.server.acknowledge(granted, now=pair.now)
    pair.settle()
    for session in (pair.client, pair.server):
        transfer = session._book.get(granted)
        assert transfer is not None
        assert (transfer.ended, transfer.request, transfer.stop, transfer.next_offsets) == (b"", None, None, {})
    for offset in range(5):  # Late words are told from wrong ones all the same.
        message = Quiet() if offset == 0 else TensorDataEndMessage()
        assert to_server(pair, encode(message, granted + offset)) == []
    assert not any(isinstance(message, ErrorMessage) for message in decode(pair.server.data_to_send()))
