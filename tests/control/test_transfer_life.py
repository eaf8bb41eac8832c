"""A transfer between two joined sessions, from offer to acknowledgement, message by message."""

from collections.abc import Callable

import numpy as np
import pytest

from hurray_rdma.control import (
    Acknowledged,
    AllEnded,
    DescriptorsEnded,
    Fetch,
    Fetched,
    Grant,
    Granted,
    Message,
    Offer,
    Offered,
    Pool,
    PoolAnnounced,
    PoolsAnnounced,
    Published,
    PublishedHeard,
    SessionConfig,
    SessionOpened,
)
from hurray_rdma.control.messages import Ping, Pong
from hurray_rdma.testing.pair import ConnectionPair, Side


def test_session_opens_and_each_side_knows_the_other(make_config: Callable[..., SessionConfig]) -> None:
    prefill = make_config("prefill", token="s", process_id=b"41@1")
    decode = make_config("decode", token="s", process_id=b"\x00" * 128, dialects=("hurray-0.2",))
    pair = ConnectionPair(prefill, decode)
    pair.settle()
    (client_event, last), (server_event,) = pair.take("client"), pair.take("server")
    assert last == PoolsAnnounced()
    assert isinstance(client_event, SessionOpened)
    assert isinstance(server_event, SessionOpened)
    assert (client_event.peer.engine_name, server_event.peer.engine_name) == ("decode", "prefill")
    assert client_event.peer.worker_address == b"decode" * 3
    assert (client_event.peer.process_id, server_event.peer.process_id) == (b"\x00" * 128, b"41@1")
    assert client_event.peer.dialect == server_event.peer.dialect == "hurray-0.2"
    assert pair.client.peer == client_event.peer


def test_pool_reaches_the_client_whole(
    make_config: Callable[..., SessionConfig], make_pool: Callable[..., Pool]
) -> None:
    pair = ConnectionPair(make_config(), make_config())
    pair.settle()
    pair.take("client")
    pool = make_pool()
    pair.server.announce(pool, now=0)
    pair.settle()
    assert pair.take("client") == [PoolAnnounced(pool)]
    assert pair.client.pools == {7: pool}


def test_the_client_learns_when_it_has_heard_every_pool(
    make_config: Callable[..., SessionConfig], make_pool: Callable[..., Pool]
) -> None:
    pair = ConnectionPair(make_config(), make_config())
    while not pair.server.is_open:  # One message at a time, until the server's engine hears of the session.
        pair.carry("client")
        if not pair.server.is_open:
            pair.carry("server")
    pools = [make_pool(pool_id=pool_id, name=f"group {pool_id}") for pool_id in (9, 4)]
    for pool in pools:
        pair.server.announce(pool, now=0)
    pair.settle()
    opened, *rest = pair.take("client")
    assert isinstance(opened, SessionOpened)
    assert rest == [*map(PoolAnnounced, pools), PoolsAnnounced()]
    later = make_pool(pool_id=5)
    pair.server.announce(later, now=0)
    pair.advance(3)  # More heartbeats, and their answers.
    assert pair.take("client") == [PoolAnnounced(later)]


@pytest.mark.parametrize("lost", [Ping, Pong])
def test_a_lost_ping_delays_only_the_word_that_every_pool_was_heard(
    lost: type[Message], make_config: Callable[..., SessionConfig]
) -> None:
    pair = ConnectionPair(make_config(heartbeat_s=0.25), make_config(heartbeat_s=60, peer_timeout_s=600))
    num_lost = 0

    def lose_first(side: Side, messages: list[tuple[int, Message]]) -> list[tuple[int, Message]]:
        nonlocal num_lost
        kept = [m for m in messages if num_lost or not isinstance(m[1], lost)]
        num_lost += len(messages) - len(kept)
        return kept

    pair.spoil = lose_first
    pair.settle()
    assert num_lost == 1
    assert [type(event) for event in pair.take("client")] == [SessionOpened]
    pair.advance(0.3)
    assert pair.take("client") == [PoolsAnnounced()]


def test_happy_path(pair: ConnectionPair, make_offer: Callable[..., Offer], grant: Grant) -> None:
    offer = make_offer()
    transfer_id = pair.client.offer(offer, now=pair.now, timeout_s=5)
    pair.settle()
    (event,) = pair.take("server")
    assert isinstance(event, Offered)
    assert event.transfer_id == transfer_id == 2
    assert event.offer.key == "req-17"
    assert event.offer.descriptors == offer.descriptors
    np.testing.assert_array_equal(event.offer.block_table, [7, 3, 7, 9])
    np.testing.assert_array_equal(event.offer.seq_ptr, [0, 2, 4])
    np.testing.assert_array_equal(event.offer.seq_lens, [5, 6])

    assert pair.server.grant(transfer_id, grant, now=pair.now)
    pair.settle()
    (granted,) = pair.take("client")
    assert isinstance(granted, Granted)
    np.testing.assert_array_equal(granted.grant.page_ids, [4, 0, 9])

    for index in (2, 0, 3, 1):
        assert pair.client.data_end(transfer_id, index, now=pair.now)
        pair.settle()
        expected: list[object] = [DescriptorsEnded(transfer_id, (index,))]
        assert pair.take("server") == expected + ([AllEnded(transfer_id)] if index == 1 else [])
    assert pair.server.acknowledge(transfer_id, now=pair.now)
    pair.settle()
    assert pair.take("client") == [Acknowledged(transfer_id)]
    assert pair.num_open("client") == pair.num_open("server") == 0


def test_a_fetch_from_request_to_acknowledgement(
    pair: ConnectionPair, make_published: Callable[..., Published]
) -> None:
    keys = np.arange(4 * 16, dtype=np.uint8).reshape(4, 16)
    fetch = Fetch(key="req-19", deadline_s=5, lane="cma", path="mapped")
    transfer_id = pair.client.fetch(fetch, now=pair.now, timeout_s=5)
    pair.settle()
    assert pair.take("server") == [Fetched(transfer_id, fetch)]

    answer = make_published(order="HND", head_offset=2, total_heads=8, page_keys=keys)
    assert pair.server.publish(transfer_id, answer, now=pair.now)
    pair.settle()
    (heard,) = pair.take("client")
    assert isinstance(heard, PublishedHeard)
    assert heard.transfer_id == transfer_id
    for name in ("block_table", "seq_ptr", "seq_lens", "page_keys"):
        np.testing.assert_array_equal(getattr(heard.published, name), getattr(answer, name))
    for name in ("pool_id", "generation", "descriptors", "order", "head_offset", "total_heads", "lease_s"):
        assert getattr(heard.published, name) == getattr(answer, name)

    assert pair.client.read_end(transfer_id, now=pair.now)
    pair.settle()
    assert pair.take("client") == []
    assert pair.take("server") == [AllEnded(transfer_id)]
    assert pair.server.acknowledge(transfer_id, now=pair.now)
    pair.settle()
    assert pair.take("client") == [Acknowledged(transfer_id)]
    assert pair.num_open("client") == pair.num_open("server") == 0


def test_a_fetch_owns_two_streams_and_goes_beside_offers(
    pair: ConnectionPair, make_offer: Callable[..., Offer], grant: Grant, make_published: Callable[..., Published]
) -> None:
    fetch = Fetch(key="k", deadline_s=5)
    first = pair.client.fetch(fetch, now=0, timeout_s=5)
    offer = pair.client.offer(make_offer(4), now=0, timeout_s=5)
    second = pair.client.fetch(fetch, now=0, timeout_s=5)
    assert (first, offer, second) == (2, 4, 9)
    pair.settle()
    assert [event.transfer_id for event in pair.take("server")] == [2, 4, 9]  # type: ignore[union-attr]
    pair.server.publish(second, make_published(), now=0)
    pair.server.grant(offer, grant, now=0)
    pair.server.publish(first, make_published(), now=0)
    pair.settle()
    assert [type(event) for event in pair.take("client")] == [PublishedHeard, Granted, PublishedHeard]


def test_next_transfer_starts_after_the_streams_of_the_last(
    pair: ConnectionPair, make_offer: Callable[..., Offer]
) -> None:
    assert pair.client.offer(make_offer(4), now=0, timeout_s=5) == 2
    assert pair.client.offer(make_offer(1), now=0, timeout_s=5) == 7
    assert pair.client.offer(make_offer(1), now=0, timeout_s=5) == 9
