"""Pages granted ahead: what is written into them is told by one message, and either side may give them up before."""

from collections.abc import Callable

import numpy as np
import pytest

from hurray_rdma.control import (
    AbortRequested,
    Acknowledged,
    Committed,
    Event,
    Fetch,
    Grant,
    Granted,
    Message,
    Offer,
    Offered,
    Pool,
    Prepare,
    Prepared,
    Published,
    Quiesced,
    Refused,
    Reserve,
    Reserved,
    SessionClosed,
    SessionConfig,
    TransferFailed,
    encode,
)
from hurray_rdma.control.codes import (
    ErrorCode,
    LocalProtocolError,
    PeerBusyError,
    StaleGenerationError,
)
from hurray_rdma.control.exchange import Abort, Quiet
from hurray_rdma.control.framing import FrameDecoder
from hurray_rdma.control.messages import ErrorMessage, TensorDataEndMessage, TensorDataMessage, TensorPutAck
from hurray_rdma.control.offers import Commit
from hurray_rdma.errors import (
    ConfigError,
    DeadlineExceededError,
    GeometryError,
    HurrayError,
    PoolExhaustedError,
    ProtocolError,
    TransferAbortedError,
)
from hurray_rdma.testing.pair import ConnectionPair, Side, commit_like

MakeOffer = Callable[..., Offer]
RESERVE = Reserve(pool_id=7, generation=3, num_pages=3, deadline_s=5.0)


def kinds(events: list[Event]) -> list[type]:
    return [type(event) for event in events]


def said(data: bytes) -> list[tuple[int, type]]:
    return [(stream_id, type(message)) for stream_id, message in FrameDecoder(1 << 20).feed(data)]


# The way it goes.


def test_a_snapshot_in_pages_granted_ahead_costs_one_message_each_way(
    pair: ConnectionPair, ahead: int, make_offer: MakeOffer
) -> None:
    pair.advance(60)  # It may lie ready for as long as the server likes.
    offer = make_offer(lane="cma", path="mapped", order="HND")
    assert pair.client.commit(ahead, commit_like(offer), now=pair.now)
    request = pair.client.data_to_send()
    assert said(request) == [(ahead, Commit)]
    (event,) = pair.server.receive(request, pair.now)
    assert isinstance(event, Committed)
    assert event.transfer_id == ahead
    for name in ("key", "descriptors", "order", "head_offset", "total_heads"):
        assert getattr(event.commit, name) == getattr(offer, name)
    for name in ("block_table", "seq_ptr", "seq_lens"):
        np.testing.assert_array_equal(getattr(event.commit, name), getattr(offer, name))

    assert pair.server.acknowledge(ahead, now=pair.now)
    answer = pair.server.data_to_send()
    assert said(answer) == [(ahead, TensorPutAck)]
    assert pair.client.receive(answer, pair.now) == [Acknowledged(ahead)]
    assert pair.num_open("client") == pair.num_open("server") == 0


def test_a_reservation_owns_one_stream(pair: ConnectionPair, make_offer: MakeOffer, grant: Grant) -> None:
    first = pair.client.reserve(RESERVE, now=0, timeout_s=5)
    offer = pair.client.offer(make_offer(4), now=0, timeout_s=5)
    second = pair.client.reserve(RESERVE, now=0, timeout_s=5)
    assert (first, offer, second) == (2, 3, 8)
    pair.settle()
    assert kinds(pair.take("server")) == [Reserved, Offered, Reserved]
    for transfer_id in (second, first, offer):
        pair.server.grant(transfer_id, grant, now=0)
    pair.settle()
    assert [event.transfer_id for event in pair.take("client")] == [8, 2, 3]  # type: ignore[union-attr]
    pair.client.commit(second, commit_like(make_offer()), now=0)
    pair.client.commit(first, commit_like(make_offer()), now=0)
    pair.settle()
    assert [event.transfer_id for event in pair.take("server")] == [8, 2]  # type: ignore[union-attr]


def test_a_commit_is_said_again_until_it_is_acknowledged_as_it_was(
    pair: ConnectionPair, ahead: int, make_offer: MakeOffer
) -> None:
    table = np.array([7, 3, 7, 9], np.uint32)
    pair.client.commit(ahead, commit_like(make_offer(block_table=table)), now=pair.now)
    first = pair.client.data_to_send()
    table[:] = 0  # The caller's again.
    pair.client.handle_timeout(pair.now + 0.3)
    assert (ahead, Commit) not in said(pair.client.data_to_send())
    pair.client.handle_timeout(pair.now + 0.6)
    again = pair.client.data_to_send()
    assert first in again
    assert kinds(pair.server.receive(first, pair.now)) == [Committed]
    assert pair.server.receive(again, pair.now) == []
    assert pair.server.acknowledge(ahead, now=pair.now)
    assert (ahead, TensorPutAck) in said(pair.server.data_to_send())  # Lost.
    assert pair.server.receive(first, pair.now) == []
    assert said(pair.server.data_to_send()) == [(ahead, TensorPutAck)]


# What is told before it is true.


def prepare_like(offer: Offer) -> Prepare:
    prepare = commit_like(offer, Prepare)
    assert isinstance(prepare, Prepare)
    return prepare


def test_what_is_prepared_is_committed_by_a_bell_and_said_only_if_that_is_not_acknowledged(
    pair: ConnectionPair, ahead: int, make_offer: MakeOffer
) -> None:
    offer = make_offer()
    for _ in range(2):  # Repeated, it does no harm.
        assert pair.client.prepare(ahead, prepare_like(offer), now=pair.now)
    request = pair.client.data_to_send()
    assert said(request) == [(ahead, Prepare)] * 2
    prepared = pair.server.receive(request, pair.now)
    assert kinds(prepared) == [Prepared, Prepared]
    assert prepared[0].commit.block_table.tolist() == offer.block_table.tolist()  # type: ignore[union-attr]
    assert pair.client.commit(ahead, commit_like(offer), now=pair.now, rung=True)
    assert pair.client.data_to_send() == b""

    assert pair.server.hear_bell(ahead, now=pair.now)
    assert not pair.server.hear_bell(ahead, now=pair.now)
    assert pair.server.acknowledge(ahead, now=pair.now)
    assert not pair.server.hear_bell(ahead, now=pair.now)
    answer = pair.server.data_to_send()
    pair.client.handle_timeout(pair.now + 0.004)
    assert pair.client.data_to_send() == b""
    pair.client.handle_timeout(pair.now + 0.0051)
    late = pair.client.data_to_send()
    assert said(late) == [(ahead, Commit)]
    assert pair.client.receive(answer, pair.now) == [Acknowledged(ahead)]
    assert pair.server.receive(late, pair.now) == []
    assert pair.client.receive(pair.server.data_to_send(), pair.now) == []  # Acknowledged again.
    assert pair.num_open("client") == pair.num_open("server") == 0


def test_where_no_bell_is_heard_the_commit_is(pair: ConnectionPair, ahead: int, make_offer: MakeOffer) -> None:
    offer = make_offer()
    pair.client.prepare(ahead, prepare_like(offer), now=pair.now)
    pair.client.commit(ahead, commit_like(offer), now=pair.now, rung=True)
    pair.advance(0.01)
    assert kinds(pair.take("server")) == [Prepared, Committed]
    assert not pair.server.hear_bell(ahead, now=pair.now)
    assert pair.server.acknowledge(ahead, now=pair.now)
    pair.settle()
    assert pair.take("client") == [Acknowledged(ahead)]


@pytest.mark.parametrize("who", ["client", "server"])
def test_what_is_prepared_may_end_before_it_is_committed(
    who: Side, pair: ConnectionPair, ahead: int, make_offer: MakeOffer
) -> None:
    pair.client.prepare(ahead, prepare_like(make_offer()), now=pair.now)
    pair.settle()
    pair.take("server")
    (pair.client if who == "client" else pair.server).abort(ahead, ErrorCode.ABORTED, "no", now=pair.now)
    assert pair.client.prepare(ahead, prepare_like(make_offer()), now=pair.now) is (who == "server")
    pair.settle()
    assert kinds(pair.take("server" if who == "client" else "client")) == [AbortRequested]
    assert not pair.server.hear_bell(ahead, now=pair.now)
    assert not pair.client.commit(ahead, commit_like(make_offer()), now=pair.now, rung=True)
    pair.client.quiet(ahead, now=pair.now)
    pair.settle()
    assert pair.take("server") == [Quiesced(ahead)]
    assert pair.num_open("client") == pair.num_open("server") == 0


def test_a_prepare_before_the_grant_ends_the_reservation(
    pair: ConnectionPair, reserved: int, make_offer: MakeOffer
) -> None:
    with pytest.raises(LocalProtocolError):
        pair.client.prepare(reserved, prepare_like(make_offer()), now=pair.now)
    pair.server_events += pair.server.receive(encode(prepare_like(make_offer()), reserved), pair.now)
    (failed,) = pair.take("server")
    assert isinstance(failed, TransferFailed)
    assert "PREPARE cannot follow in state OFFERED" in str(failed.error)
    assert pair.server.is_open


# No answer, or a refusal.


@pytest.mark.parametrize(
    "error",
    [PoolExhaustedError("full"), PeerBusyError("busy"), StaleGenerationError("old")],
    ids=lambda e: type(e).__name__,
)
def test_a_refused_reservation_raises_in_the_servers_type(
    error: HurrayError, pair: ConnectionPair, reserved: int
) -> None:
    assert pair.server.refuse(reserved, error, now=pair.now)
    pair.settle()
    (event,) = pair.take("client")
    assert isinstance(event, Refused)
    assert type(event.error) is type(error)
    assert pair.num_open("client") == pair.num_open("server") == 0


def test_a_reservation_nobody_answers_is_refused_at_its_deadline(
    pair: ConnectionPair, reserved: int, grant: Grant
) -> None:
    pair.advance(10.1)
    (event,) = pair.take("client")
    assert isinstance(event, Refused)
    assert isinstance(event.error, DeadlineExceededError)
    assert "the reservation was not answered within 10 s" in str(event.error)
    assert kinds(pair.take("server")) == [AbortRequested, Quiesced]
    assert not pair.server.grant(reserved, grant, now=pair.now)
    assert pair.server.data_to_send() == b""


def test_reservations_count_among_the_transfers_a_session_may_have(make_config: Callable[..., SessionConfig]) -> None:
    pair = ConnectionPair(make_config(), make_config(max_open_transfers=2))
    pair.settle()
    pair.take("client")
    ids = [pair.client.reserve(RESERVE, now=0, timeout_s=9) for _ in range(3)]
    pair.settle()
    (event,) = pair.take("client")
    assert isinstance(event, Refused)
    assert event.transfer_id == ids[2]
    assert isinstance(event.error, PeerBusyError)


# Grants that are not what was reserved.


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"page_ids": [4, 0]}, r"len\(page_ids\) = 2: must be the 3 of the reservation"),
        ({"page_ids": [4, 0, 9, 1]}, r"len\(page_ids\) = 4"),
        ({"resident": np.zeros(3, np.bool_)}, r"len\(resident\) = 3: must be 0"),
    ],
)
def test_a_server_grants_just_what_was_reserved(
    changes: dict[str, object], text: str, pair: ConnectionPair, reserved: int, grant: Grant
) -> None:
    facts: dict[str, object] = {"generation": 3, "page_ids": [4, 0, 9], "lease_s": 1.0}
    wrong = Grant(**(facts | changes))  # type: ignore[arg-type]
    with pytest.raises(GeometryError, match=text):
        pair.server.grant(reserved, wrong, now=pair.now)
    assert pair.server.data_to_send() == b""
    pair.client_events += pair.client.receive(encode(wrong, reserved), pair.now)  # A server that does not look.
    (failed,) = pair.take("client")
    assert isinstance(failed, TransferFailed)
    assert isinstance(failed.error, GeometryError)
    assert not failed.granted
    pair.settle()
    assert kinds(pair.take("server")) == [AbortRequested, Quiesced]
    assert not pair.server.grant(reserved, grant, now=pair.now)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"generation": 4}, StaleGenerationError("generation 4 of the pool, but asked for at 3")),
        ({"page_ids": [4, 10, 9]}, GeometryError("page_ids[1] = 10: is not below num_pages 10 of pool 7")),
        (
            {"bell_offset_nbytes": 5116, "bell_token": 1},
            GeometryError("bell_offset_nbytes = 5116: must be a multiple of 8 inside the 5120 bytes"),
        ),
        (
            {"bell_offset_nbytes": 5120, "bell_token": 1},
            GeometryError("bell_offset_nbytes = 5120: must be a multiple of 8 inside the 5120 bytes"),
        ),
    ],
)
def test_pages_and_bells_outside_the_announced_pool_are_never_seen_by_the_engine(
    changes: dict[str, object], expected: HurrayError, pair: ConnectionPair, reserved: int
) -> None:
    facts: dict[str, object] = {"generation": 3, "page_ids": [4, 0, 9], "lease_s": 1.0}
    pair.server.grant(reserved, Grant(**(facts | changes)), now=pair.now)  # type: ignore[arg-type]
    pair.settle()
    (failed,) = pair.take("client")
    assert isinstance(failed, TransferFailed)
    assert type(failed.error) is type(expected)
    assert str(expected) in str(failed.error)
    assert kinds(pair.take("server")) == [AbortRequested, Quiesced]


def test_pages_of_a_pool_removed_meanwhile_are_stale(pair: ConnectionPair, reserved: int, grant: Grant) -> None:
    pair.server.announce(Pool(pool_id=7, generation=3, removed=True), now=pair.now)
    pair.server.grant(reserved, grant, now=pair.now)
    pair.settle()
    event = pair.take("client")[-1]
    assert isinstance(event, TransferFailed)
    assert isinstance(event.error, StaleGenerationError)


# Aborts and recalls.


@pytest.mark.parametrize("when", ["asked", "granted", "committed"])
@pytest.mark.parametrize("who", ["client", "server"])
def test_either_side_gives_it_up_at_any_point(  # noqa: PLR0917 - the case, and what to make it of
    when: str, who: Side, pair: ConnectionPair, reserved: int, grant: Grant, make_offer: MakeOffer
) -> None:
    if when != "asked":
        pair.server.grant(reserved, grant, now=pair.now)
        pair.settle()
    if when == "committed":
        pair.client.commit(reserved, commit_like(make_offer()), now=pair.now)
        pair.settle()
    pair.take("client")
    pair.take("server")
    aborting = pair.client if who == "client" else pair.server
    assert aborting.abort(reserved, ErrorCode.ABORTED, "needed elsewhere", now=pair.now)
    assert not aborting.abort(reserved, ErrorCode.ABORTED, "again", now=pair.now)
    pair.settle()
    (asked,) = pair.take("server" if who == "client" else "client")
    assert asked == AbortRequested(reserved, "needed elsewhere", ErrorCode.ABORTED)
    assert pair.take("server") == []  # A write may be in flight: the pages stay until QUIET.
    assert not pair.client.commit(reserved, commit_like(make_offer()), now=pair.now)
    assert not pair.server.acknowledge(reserved, now=pair.now)
    assert pair.client.quiet(reserved, now=pair.now)
    pair.settle()
    assert pair.take("server") == [Quiesced(reserved)]
    assert pair.num_open("client") == pair.num_open("server") == 0


def test_a_recall_is_repeated_until_the_client_is_quiet(pair: ConnectionPair, ahead: int) -> None:
    pair.server.abort(ahead, ErrorCode.ABORTED, "needed elsewhere", now=pair.now)
    assert (ahead, Abort) in said(pair.server.data_to_send())  # Lost.
    pair.advance(0.6)
    assert kinds(pair.take("client")) == [AbortRequested]
    pair.client.quiet(ahead, now=pair.now)
    pair.settle()
    assert pair.take("server") == [Quiesced(ahead)]


def test_a_recall_crosses_the_commit(pair: ConnectionPair, ahead: int, make_offer: MakeOffer) -> None:
    assert pair.server.abort(ahead, ErrorCode.ABORTED, "needed elsewhere", now=pair.now)
    assert pair.client.commit(ahead, commit_like(make_offer()), now=pair.now)
    pair.settle()
    assert pair.take("server") == []  # What was written is of no use any more.
    assert not pair.server.acknowledge(ahead, now=pair.now)
    (asked,) = pair.take("client")
    assert isinstance(asked, AbortRequested)
    assert isinstance(asked.error, TransferAbortedError)
    pair.advance(2)  # The commit is not said again.
    assert pair.take("server") == []
    assert pair.client.quiet(ahead, now=pair.now)
    pair.settle()
    assert pair.take("server") == [Quiesced(ahead)]
    assert pair.take("client") == []


def test_a_commit_that_cannot_be_is_aborted_in_the_servers_type(
    pair: ConnectionPair, ahead: int, make_offer: MakeOffer
) -> None:
    pair.client.commit(ahead, commit_like(make_offer()), now=pair.now)
    pair.settle()
    assert kinds(pair.take("server")) == [Committed]
    assert pair.server.abort(ahead, ErrorCode.GEOMETRY, "page_size 4 is not 8", now=pair.now)
    pair.settle()
    (asked,) = pair.take("client")
    assert isinstance(asked, AbortRequested)
    assert isinstance(asked.error, GeometryError)
    pair.client.quiet(ahead, now=pair.now)
    pair.settle()
    assert pair.take("server") == [Quiesced(ahead)]


def test_an_abort_of_the_client_crosses_the_acknowledgement(
    pair: ConnectionPair, ahead: int, make_offer: MakeOffer
) -> None:
    pair.client.commit(ahead, commit_like(make_offer()), now=pair.now)
    pair.settle()
    pair.take("server")
    pair.server.acknowledge(ahead, now=pair.now)
    pair.client.abort(ahead, ErrorCode.ABORTED, "late", now=pair.now)
    pair.settle()
    assert pair.take("client") == pair.take("server") == []
    assert pair.client.quiet(ahead, now=pair.now)
    pair.settle()
    assert pair.take("server") == []
    assert pair.num_open("client") == pair.num_open("server") == 0


# Calls the state does not allow.


def test_calls_out_of_turn_raise_and_send_nothing(
    pair: ConnectionPair,
    reserved: int,
    grant: Grant,
    make_offer: MakeOffer,
    make_published: Callable[..., Published],
) -> None:
    offer = make_offer()
    early: list[Callable[[], object]] = [
        lambda: pair.client.commit(reserved, commit_like(offer), now=0),
        lambda: pair.client.commit(999, commit_like(offer), now=0),
        lambda: pair.client.quiet(reserved, now=0),
        lambda: pair.server.publish(reserved, make_published(), now=0),
        lambda: pair.server.acknowledge(reserved, now=0),
    ]
    for call in early:
        with pytest.raises(LocalProtocolError):
            call()
    offered = pair.client.offer(offer, now=0, timeout_s=9)
    fetched = pair.client.fetch(Fetch(key="k", deadline_s=9), now=0, timeout_s=9)
    pair.settle()
    for transfer_id in (reserved, offered):
        pair.server.grant(transfer_id, grant, now=0)
    pair.server.publish(fetched, make_published(), now=0)
    pair.settle()
    wrong: list[Callable[[], object]] = [
        lambda: pair.client.data_end(reserved, 0, now=0),
        lambda: pair.client.tensor_data(reserved, 0, 0, b"x", now=0),
        lambda: pair.client.read_end(reserved, now=0),
        lambda: pair.client.commit(offered, commit_like(offer), now=0),
        lambda: pair.client.commit(fetched, commit_like(offer), now=0),
        lambda: pair.server.grant(reserved, grant, now=0),
        lambda: pair.server.refuse(reserved, GeometryError("late"), now=0),
        lambda: pair.server.acknowledge(reserved, now=0),
    ]
    for call in wrong:
        with pytest.raises(LocalProtocolError):
            call()
    assert pair.client.commit(reserved, commit_like(offer), now=0)
    pair.settle()
    with pytest.raises(LocalProtocolError, match="committed before"):
        pair.client.commit(reserved, commit_like(offer), now=0)
    assert pair.client.data_to_send() == pair.server.data_to_send() == b""


def test_a_commit_above_the_peers_maximum_leaves_the_reservation(
    pair: ConnectionPair, ahead: int, make_offer: MakeOffer
) -> None:
    pair.client._peer_max_nbytes = 65536
    large = make_offer(block_table=np.zeros(20_000, np.uint32), seq_ptr=[0, 20_000], seq_lens=[80_000])
    with pytest.raises(ConfigError, match="65536"):
        pair.client.commit(ahead, commit_like(large), now=pair.now)
    assert pair.client.data_to_send() == b""
    assert pair.client.commit(ahead, commit_like(make_offer()), now=pair.now)


# Late messages, and a peer that breaks the rules.


def test_a_grant_that_comes_after_the_reservation_was_given_up_is_sent_back(pair: ConnectionPair, grant: Grant) -> None:
    pair.spoil = lambda side, messages: [m for m in messages if side == "server" or not isinstance(m[1], Abort | Quiet)]
    transfer_id = pair.client.reserve(RESERVE, now=pair.now, timeout_s=0.1)
    pair.advance(0.2)
    assert kinds(pair.take("client")) == [Refused]
    assert pair.server.grant(transfer_id, grant, now=pair.now)
    pair.spoil = None
    pair.settle()
    assert kinds(pair.take("server")) == [Reserved, AbortRequested, Quiesced]
    assert pair.take("client") == []


@pytest.mark.parametrize(
    "message",
    [
        TensorPutAck(),
        TensorDataEndMessage(),
        TensorDataMessage(offset_nbytes=0, data=b"x"),
        Fetch(key="k", deadline_s=1),
    ],
)
def test_a_wrong_message_fails_the_reservation_and_leaves_the_session(
    message: Message, pair: ConnectionPair, ahead: int
) -> None:
    pair.server_events += pair.server.receive(encode(message, ahead), pair.now)
    (failed,) = pair.take("server")
    assert isinstance(failed, TransferFailed)
    assert isinstance(failed.error, ProtocolError)
    assert (failed.transfer_id, failed.granted) == (ahead, True)
    pair.settle()
    assert kinds(pair.take("client")) == [AbortRequested]
    pair.client.quiet(ahead, now=pair.now)
    pair.settle()
    assert pair.take("server") == [Quiesced(ahead)]
    assert pair.server.is_open


def test_a_commit_before_the_grant_ends_the_reservation(
    pair: ConnectionPair, reserved: int, grant: Grant, make_offer: MakeOffer
) -> None:
    pair.server_events += pair.server.receive(encode(commit_like(make_offer()), reserved), pair.now)
    (failed,) = pair.take("server")
    assert isinstance(failed, TransferFailed)
    assert isinstance(failed.error, ProtocolError)
    assert "LAST_END cannot follow in state OFFERED" in str(failed.error)
    assert not failed.granted
    assert not pair.server.grant(reserved, grant, now=pair.now)
    pair.settle()
    assert kinds(pair.take("client")) == [Refused]
    assert pair.server.is_open


@pytest.mark.parametrize("message", [Commit, Prepare])
@pytest.mark.parametrize("kind", ["push", "pull"])
def test_a_commit_on_another_kind_of_transfer_fails_it(
    kind: str, message: type[Commit], pair: ConnectionPair, make_offer: MakeOffer, request: pytest.FixtureRequest
) -> None:
    transfer_id = request.getfixturevalue({"push": "granted", "pull": "published"}[kind])
    pair.server_events += pair.server.receive(encode(commit_like(make_offer(), message), transfer_id), pair.now)
    (failed,) = pair.take("server")
    assert isinstance(failed, TransferFailed)
    assert isinstance(failed.error, ProtocolError)
    assert failed.granted
    assert pair.server.is_open


def test_a_commit_that_belongs_to_nothing_is_answered(pair: ConnectionPair, make_offer: MakeOffer) -> None:
    assert pair.server.receive(encode(commit_like(make_offer()), 50), pair.now) == []
    assert said(pair.server.data_to_send()) == [(50, ErrorMessage)]


def test_a_reservation_said_twice_is_heard_once(pair: ConnectionPair, ahead: int) -> None:
    assert pair.server.receive(encode(RESERVE, ahead), pair.now) == []
    assert pair.server.data_to_send() == b""


@pytest.mark.parametrize("kind", [0xF8, 0xF9, 0xFD])
def test_an_undecodable_message_is_answered_and_leaves_the_session(kind: int, pair: ConnectionPair) -> None:
    frame = kind.to_bytes(4, "little") + (50).to_bytes(4, "little") + (1).to_bytes(4, "little") + b"\xc0"
    assert pair.server.receive(frame, pair.now) == []
    assert said(pair.server.data_to_send()) == [(50, ErrorMessage)]
    assert pair.server.is_open


def test_a_lost_connection_fails_reservations_on_both_sides(
    pair: ConnectionPair, ahead: int, grant: Grant, make_offer: MakeOffer
) -> None:
    waiting = pair.client.reserve(RESERVE, now=pair.now, timeout_s=5)
    pair.settle()
    pair.take("server")
    pair.lose()
    for side in ("client", "server"):
        first, second, closed = pair.take(side)
        assert isinstance(first, TransferFailed)
        assert isinstance(second, TransferFailed)
        assert (first.transfer_id, first.granted) == (ahead, True)
        assert (second.transfer_id, second.granted) == (waiting, False)
        assert isinstance(closed, SessionClosed)
    assert not pair.client.commit(ahead, commit_like(make_offer()), now=pair.now)
    assert not pair.server.grant(waiting, grant, now=pair.now)
    assert not pair.server.acknowledge(ahead, now=pair.now)


def test_pushes_and_fetches_go_on_beside_reservations(
    pair: ConnectionPair, ahead: int, published: int, grant: Grant, make_offer: MakeOffer
) -> None:
    offered = pair.client.offer(make_offer(1), now=pair.now, timeout_s=5)
    pair.settle()
    pair.take("server")
    pair.server.grant(offered, grant, now=pair.now)
    pair.settle()
    assert kinds(pair.take("client")) == [Granted]
    pair.client.data_end(offered, 0, now=pair.now)
    pair.client.read_end(published, now=pair.now)
    pair.client.commit(ahead, commit_like(make_offer()), now=pair.now)
    pair.settle()
    pair.take("server")
    for transfer_id in (ahead, offered, published):
        assert pair.server.acknowledge(transfer_id, now=pair.now)
    pair.settle()
    assert pair.take("client") == [Acknowledged(i) for i in (ahead, offered, published)]
