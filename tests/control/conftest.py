"""Values the control tests share."""

from collections.abc import Callable

import numpy as np
import pytest

from hurray_rdma.control import (
    ClientSession,
    Fetch,
    Fetched,
    Grant,
    Granted,
    Offer,
    Offered,
    Pool,
    PoolRegion,
    PoolSegment,
    Published,
    PublishedHeard,
    Reserve,
    Reserved,
    SessionConfig,
)
from hurray_rdma.testing.pair import ConnectionPair


def _descriptor(tail: bytes) -> bytes:
    return b"HRRY\x01\x00" + (20 + len(tail)).to_bytes(4, "little") + bytes(10) + tail


@pytest.fixture
def make_config() -> Callable[..., SessionConfig]:
    def make(name: str = "prefill", **changes: object) -> SessionConfig:
        facts = {"engine_name": name, "host_id": b"host", "worker_address": name.encode() * 3} | changes
        return SessionConfig(**facts)  # type: ignore[arg-type]

    return make


@pytest.fixture
def make_pool() -> Callable[..., Pool]:
    # Two layers of key and value; a page is 4 tokens x 2 heads x 8 x 2 bytes = 128 bytes; 10 pages a tensor.
    def make(**changes: object) -> Pool:
        facts: dict[str, object] = {
            "pool_id": 7,
            "generation": 3,
            "num_pages": 10,
            "layers": (0, 1),
            "total_heads": 2,
            "num_heads": 2,
            "head_dim": 8,
            "page_size": 4,
            "dtype": "bfloat16",
            "roles": ("key", "value"),
            "regions": (PoolRegion(remote_addr=0x1000, nbytes=4 * 1280, rkey=b"rkey"),),
            "segments": tuple(PoolSegment(0, i * 1280, 128, 32, 16) for i in range(4)),
        }
        return Pool(**(facts | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def make_offer() -> Callable[..., Offer]:
    # Two sequences of 5 and 6 tokens over pages of 4, which share their first page.
    def make(num_descriptors: int = 4, **changes: object) -> Offer:
        facts: dict[str, object] = {
            "key": "req-17",
            "pool_id": 7,
            "generation": 3,
            "descriptors": b"".join(_descriptor(bytes([i])) for i in range(num_descriptors)),
            "block_table": np.array([7, 3, 7, 9], np.uint32),
            "seq_ptr": np.array([0, 2, 4], np.uint32),
            "seq_lens": np.array([5, 6], np.uint32),
            "deadline_s": 10.0,
        }
        return Offer(**(facts | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def make_published(make_offer: Callable[..., Offer]) -> Callable[..., Published]:
    # The snapshot of make_offer, but in the server's own pool.
    def make(**changes: object) -> Published:
        offer = make_offer()
        names = ("pool_id", "generation", "descriptors", "block_table", "seq_ptr", "seq_lens")
        facts: dict[str, object] = {name: getattr(offer, name) for name in names} | {"lease_s": 20.0}
        return Published(**(facts | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def grant() -> Grant:
    return Grant(generation=3, page_ids=np.array([4, 0, 9], np.uint32), lease_s=30.0)


@pytest.fixture
def pair(make_config: Callable[..., SessionConfig], make_pool: Callable[..., Pool]) -> ConnectionPair:
    """Two open sessions; the server's pool is announced, all events taken."""
    pair = ConnectionPair(make_config("prefill"), make_config("decode"))
    pair.settle()
    pair.server.announce(make_pool(), now=pair.now)
    pair.settle()
    pair.take("client")
    pair.take("server")
    return pair


@pytest.fixture
def offered(pair: ConnectionPair, make_offer: Callable[..., Offer]) -> int:
    """``pair`` with one offer that waits for its answer."""
    transfer_id = pair.client.offer(make_offer(), now=pair.now, timeout_s=10.0)
    pair.settle()
    assert [type(event) for event in pair.take("server")] == [Offered]
    assert isinstance(pair.client, ClientSession)
    return transfer_id


@pytest.fixture
def granted(pair: ConnectionPair, offered: int, grant: Grant) -> int:
    """``pair`` with one granted transfer of four descriptors."""
    assert pair.server.grant(offered, grant, now=pair.now)
    pair.settle()
    assert [type(event) for event in pair.take("client")] == [Granted]
    return offered


@pytest.fixture
def fetched(pair: ConnectionPair) -> int:
    """``pair`` with one fetch that waits for its answer."""
    transfer_id = pair.client.fetch(Fetch(key="req-19", deadline_s=10.0), now=pair.now, timeout_s=10.0)
    pair.settle()
    assert [type(event) for event in pair.take("server")] == [Fetched]
    return transfer_id


@pytest.fixture
def published(pair: ConnectionPair, fetched: int, make_published: Callable[..., Published]) -> int:
    """``pair`` with one fetch that was answered: the client may read."""
    assert pair.server.publish(fetched, make_published(), now=pair.now)
    pair.settle()
    assert [type(event) for event in pair.take("client")] == [PublishedHeard]
    return fetched


RESERVE = Reserve(pool_id=7, generation=3, num_pages=3, deadline_s=10.0, lane="cma", path="mapped")


@pytest.fixture
def reserved(pair: ConnectionPair) -> int:
    """``pair`` with one reservation that waits for its answer."""
    transfer_id = pair.client.reserve(RESERVE, now=pair.now, timeout_s=10.0)
    pair.settle()
    assert pair.take("server") == [Reserved(transfer_id, RESERVE)]
    return transfer_id


@pytest.fixture
def ahead(pair: ConnectionPair, reserved: int, grant: Grant) -> int:
    """``pair`` with three pages granted ahead."""
    assert pair.server.grant(reserved, grant, now=pair.now)
    pair.settle()
    assert [type(event) for event in pair.take("client")] == [Granted]
    return reserved
