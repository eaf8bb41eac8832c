"""A transfer between two joined sessions, from offer to acknowledgement, message by message."""

from collections.abc import Callable

import numpy as np

from hurray_rdma.control import (
    Acknowledged,
    AllEnded,
    DescriptorEnded,
    Grant,
    Granted,
    Offer,
    Offered,
    Pool,
    PoolAnnounced,
    SessionConfig,
    SessionOpened,
)
from hurray_rdma.testing.pair import ConnectionPair


def test_session_opens_and_each_side_knows_the_other(make_config: Callable[..., SessionConfig]) -> None:
    prefill = make_config("prefill", token="s", process_id=b"41@1")
    decode = make_config("decode", token="s", process_id=b"\x00" * 128, dialects=("hurray-0.2",))
    pair = ConnectionPair(prefill, decode)
    pair.settle()
    (client_event,), (server_event,) = pair.take("client"), pair.take("server")
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
        expected: list[object] = [DescriptorEnded(transfer_id, index)]
        assert pair.take("server") == expected + ([AllEnded(transfer_id)] if index == 1 else [])
    assert pair.server.acknowledge(transfer_id, now=pair.now)
    pair.settle()
    assert pair.take("client") == [Acknowledged(transfer_id)]
    assert pair.client.num_open_transfers == pair.server.num_open_transfers == 0


def test_next_transfer_starts_after_the_streams_of_the_last(
    pair: ConnectionPair, make_offer: Callable[..., Offer]
) -> None:
    assert pair.client.offer(make_offer(4), now=0, timeout_s=5) == 2
    assert pair.client.offer(make_offer(1), now=0, timeout_s=5) == 7
    assert pair.client.offer(make_offer(1), now=0, timeout_s=5) == 9
