"""A client keeps the lease of a push or pull alive for as long as it gave it, however long a layer or reading takes."""

from collections.abc import Callable

import pytest

from hurray_rdma.control import (
    Fetch,
    Granted,
    LeaseRenewed,
    Message,
    Offer,
    Published,
    SessionClosed,
    Take,
    TransferFailed,
    encode,
)
from hurray_rdma.control.exchange import Renew
from hurray_rdma.control.framing import FrameDecoder
from hurray_rdma.control.messages import Ping
from hurray_rdma.testing.pair import ConnectionPair, Side

LEASE_S = 30.0  # as the fixtures grant


def renewals(pair: ConnectionPair) -> list[object]:
    return [event for event in pair.take("server") if isinstance(event, LeaseRenewed)]


@pytest.fixture
def long_push(pair: ConnectionPair, make_offer: Callable[..., Offer], grant: Message) -> int:
    """A granted push that has 1000 seconds."""
    transfer_id = pair.client.offer(make_offer(deadline_s=1000.0), now=pair.now, timeout_s=1000.0)
    pair.settle()
    assert pair.server.grant(transfer_id, grant, now=pair.now)  # type: ignore[arg-type]
    pair.settle()
    assert [type(event) for event in pair.take("client")] == [Granted]
    pair.take("server")
    return transfer_id


def test_each_lease_is_renewed_four_times_also_between_layers(pair: ConnectionPair, long_push: int) -> None:
    pair.advance(LEASE_S)
    assert renewals(pair) == [LeaseRenewed(long_push)] * 4
    pair.client.data_end(long_push, 0, now=pair.now)
    pair.advance(10 * LEASE_S)
    assert renewals(pair) == [LeaseRenewed(long_push)] * 40


def test_a_push_is_kept_no_longer_than_it_was_given(pair: ConnectionPair, granted: int) -> None:
    pair.advance(9.0)  # of the 10 seconds that the fixture gave
    assert renewals(pair) == [LeaseRenewed(granted)]
    pair.advance(200.0)
    assert renewals(pair) == []


@pytest.mark.parametrize("how", ["ended", "aborted by the client", "aborted by the server"])
def test_what_has_ended_is_not_renewed(pair: ConnectionPair, long_push: int, how: str) -> None:
    match how:
        case "ended":
            for index in range(4):
                pair.client.data_end(long_push, index, now=pair.now)
            pair.settle()
            pair.server.acknowledge(long_push, now=pair.now)
        case "aborted by the client":
            pair.client.abort(long_push, 0xF6, "not wanted", now=pair.now)
        case _:
            pair.server.abort(long_push, 0xF6, "not wanted", now=pair.now)
    pair.settle()
    pair.take("server")
    pair.advance(3 * LEASE_S)
    assert renewals(pair) == []


@pytest.mark.parametrize("taken", [False, True])
def test_a_pull_is_renewed_while_it_is_read_or_taken_for_as_long_as_it_was_given(
    taken: bool, pair: ConnectionPair, make_published: Callable[..., Published]
) -> None:
    fetch = Fetch(key="req-19", deadline_s=1000.0, num_streams=4)
    transfer_id = pair.client.fetch(fetch, now=pair.now, timeout_s=1000.0)
    pair.settle()
    pair.advance(LEASE_S)
    assert renewals(pair) == [], "there is nothing yet"
    assert pair.server.publish(transfer_id, make_published(lease_s=LEASE_S), now=pair.now)
    pair.settle()
    if taken:
        assert pair.client.take(transfer_id, Take(page_size=4, head_offset=0, num_heads=2), now=pair.now)
    pair.advance(10 * LEASE_S)
    assert renewals(pair) == [LeaseRenewed(transfer_id)] * 40
    pair.advance(1000.0 - 11 * LEASE_S)
    assert len(renewals(pair)) == 89, "7.5 s apart, the last 997.5 s after it was asked for"
    pair.advance(3 * LEASE_S)
    assert renewals(pair) == []


def test_what_is_read_is_not_renewed(pair: ConnectionPair, published: int) -> None:
    assert pair.client.read_end(published, now=pair.now)
    pair.settle()
    pair.take("server")
    pair.advance(9.0)
    assert renewals(pair) == []


def test_pages_granted_ahead_have_the_time_they_were_given(pair: ConnectionPair, ahead: int) -> None:
    pair.advance(3 * LEASE_S)
    assert renewals(pair) == []


def test_renewals_of_a_peer_that_does_not_read_do_not_pile_up(pair: ConnectionPair, long_push: int) -> None:
    now, end = pair.now, pair.now + 20.0
    while now < end:  # nothing is carried, and the peer's pings keep the session alive
        now += 0.1
        pair.client.receive(encode(Ping(), 1), now)
        pair.client.handle_timeout(now)
    sent = [message for _, message in FrameDecoder(1 << 20).feed(pair.client.data_to_send())]
    assert sum(isinstance(message, Renew) for message in sent) == 1


def test_a_late_or_repeated_renewal_is_harmless_and_one_before_the_grant_ends_the_offer_alone(
    pair: ConnectionPair, long_push: int, make_offer: Callable[..., Offer]
) -> None:
    offered = pair.client.offer(make_offer(), now=pair.now, timeout_s=10.0)
    pair.settle()
    pair.take("server")

    def twice(sender: Side, messages: list[tuple[int, Message]]) -> list[tuple[int, Message]]:
        return [each for each in messages for _ in range(2)] if sender == "client" else messages

    pair.spoil = twice
    pair.advance(LEASE_S / 4)
    assert renewals(pair) == [LeaseRenewed(long_push)] * 2
    pair.spoil = None
    pair.server_events += pair.server.receive(encode(Renew(), offered), pair.now)
    pair.settle()
    assert [event.transfer_id for event in pair.take("server") if isinstance(event, TransferFailed)] == [offered]
    for index in range(4):
        pair.client.data_end(long_push, index, now=pair.now)
    pair.settle()
    pair.server.acknowledge(long_push, now=pair.now)
    pair.settle()
    pair.take("server")
    assert pair.server.receive(encode(Renew(), long_push), pair.now) == []
    assert pair.server.receive(encode(Renew(), 4000), pair.now) == []
    assert not any(isinstance(event, SessionClosed) for event in pair.take("client"))
