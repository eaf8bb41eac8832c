"""Pools that a server announces without end, late, and again: what a client keeps of them."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import pytest

from hurray_rdma.control import (
    Event,
    Pool,
    PoolAnnounced,
    PoolRegion,
    PoolRemoved,
    SessionClosed,
    SessionConfig,
    encode,
)
from hurray_rdma.control.announced import MAX_POOLS, MAX_POOLS_NBYTES
from hurray_rdma.control.codes import ErrorCode
from hurray_rdma.control.framing import FrameDecoder
from hurray_rdma.control.messages import ErrorMessage
from hurray_rdma.errors import ConfigError, ProtocolError
from hurray_rdma.testing.pair import ConnectionPair

MakePool = Callable[..., Pool]


@pytest.fixture
def pair(make_config: Callable[..., SessionConfig]) -> ConnectionPair:
    """Two open sessions; no pool is announced, all events and bytes are taken."""
    pair = ConnectionPair(make_config("prefill"), make_config("decode"))
    pair.settle()
    pair.take("client")
    pair.take("server")
    return pair


def removal(pool_id: int, generation: int = 3) -> Pool:
    return Pool(pool_id=pool_id, generation=generation, removed=True)


def heard(pair: ConnectionPair, *pools: Pool) -> list[Event]:
    """What a client reports of these messages of its server."""
    return [event for pool in pools for event in pair.client.receive(encode(pool, 1), pair.now)]


def cut_off(pair: ConnectionPair, *pools: Pool) -> ProtocolError:
    """The error with which the last of these ends the session; the server is told of it."""
    *before, closed = heard(pair, *pools)
    assert all(isinstance(event, PoolAnnounced) for event in before)
    assert isinstance(closed, SessionClosed)
    assert isinstance(closed.error, ProtocolError)
    assert pair.client.is_closed
    ((stream_id, told),) = FrameDecoder(1 << 20).feed(pair.client.data_to_send())
    assert (stream_id, told) == (1, ErrorMessage(ErrorCode.INVALID_MESSAGE, str(closed.error)))
    return closed.error


def large(make_pool: MakePool, pool_id: int, *, generation: int = 3) -> Pool:
    """A pool of about 8 MiB."""
    pool = make_pool(pool_id=pool_id, generation=generation)
    return replace(pool, regions=tuple(replace(pool.regions[0], rkey=bytes(1 << 16)) for _ in range(127)))


def test_a_session_knows_so_many_pools_and_is_ended_by_one_more(pair: ConnectionPair, make_pool: MakePool) -> None:
    assert len(heard(pair, *(make_pool(pool_id=pool_id) for pool_id in range(MAX_POOLS)))) == MAX_POOLS
    # One anew, and one in place of another, are no more than there were.
    assert len(heard(pair, make_pool(pool_id=0, generation=4), removal(1), make_pool(pool_id=MAX_POOLS))) == 3
    error = cut_off(pair, make_pool(pool_id=MAX_POOLS + 1))
    assert (error.field, error.value) == ("number of pools announced", MAX_POOLS + 1)
    assert f"at most {MAX_POOLS}" in error.rule
    assert error.fix is not None
    assert "Engine.remove_pool" in error.fix
    assert len(pair.client.pools) == MAX_POOLS


def test_a_session_keeps_so_many_bytes_of_pools_and_is_ended_by_more(pair: ConnectionPair, make_pool: MakePool) -> None:
    num_fitting = MAX_POOLS_NBYTES // large(make_pool, 0).memory_nbytes
    assert 2 < num_fitting < 10
    assert len(heard(pair, *(large(make_pool, pool_id) for pool_id in range(num_fitting)))) == num_fitting
    for generation in range(4, 20):  # Each in place of the last.
        assert len(heard(pair, large(make_pool, 0, generation=generation))) == 1
    for pool_id in range(num_fitting, 20):
        assert len(heard(pair, removal(pool_id - 1), large(make_pool, pool_id))) == 2
    assert len(heard(pair, make_pool(pool_id=20))) == 1
    error = cut_off(pair, large(make_pool, 21))
    assert error.field == "bytes of pools announced"
    assert isinstance(error.value, int)
    assert error.value > MAX_POOLS_NBYTES
    assert f"at most {MAX_POOLS_NBYTES} bytes" in error.rule
    assert error.fix is not None
    assert "PagePool.allocate" in error.fix
    assert 21 not in pair.client.pools


def test_a_pool_that_grows_anew_is_held_to_the_bytes_as_well(pair: ConnectionPair, make_pool: MakePool) -> None:
    num_fitting = MAX_POOLS_NBYTES // large(make_pool, 0).memory_nbytes
    heard(pair, make_pool(pool_id=99), *(large(make_pool, pool_id) for pool_id in range(num_fitting)))
    before = dict(pair.client.pools)
    assert cut_off(pair, large(make_pool, 99, generation=4)).field == "bytes of pools announced"
    assert pair.client.pools == before


def test_a_hostile_server_fills_no_memory(pair: ConnectionPair, make_pool: MakePool) -> None:
    one = make_pool()
    one = replace(one, regions=(replace(one.regions[0], rkey=bytes(8192)),))
    tracemalloc.start()
    try:
        for pool_id in range(20_000):
            pair.client.receive(encode(replace(one, pool_id=pool_id), 1), pair.now)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert pair.client.is_closed
    assert kept < MAX_POOLS_NBYTES // 4


def test_pools_that_come_and_go_for_ever_leave_nothing(pair: ConnectionPair, make_pool: MakePool) -> None:
    pool, nbytes = make_pool(pool_id=0), []
    assert len(heard(pair, pool)) == 1
    tracemalloc.start()
    try:
        for begin in range(1, 8000, 2000):
            for pool_id in range(begin, begin + 2000):
                heard(pair, replace(pool, pool_id=pool_id), removal(pool_id))
            nbytes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert nbytes[-1] - nbytes[0] < 16 * 1024
    assert pair.client.pools == {0: pool}


def test_no_pool_that_was_removed_comes_back_however_long_ago(pair: ConnectionPair, make_pool: MakePool) -> None:
    low = make_pool(pool_id=5)
    gone = [make_pool(pool_id=pool_id) for pool_id in range(10, 4000)]
    assert len(heard(pair, low)) == 1
    for pool in gone:
        assert len(heard(pair, pool, removal(pool.pool_id))) == 2
    assert heard(pair, *gone, *(removal(pool.pool_id) for pool in gone), low) == []
    assert heard(pair, *gone) == []
    # What has lived through all that goes on living, and ends once.
    anew = make_pool(pool_id=5, generation=4)
    assert heard(pair, anew, removal(5, 3), removal(5, 4), removal(5, 4), low, anew) == [
        PoolAnnounced(anew),
        PoolRemoved(5),
    ]
    late = [make_pool(pool_id=4001), make_pool(pool_id=4000)]
    assert heard(pair, *late) == [*map(PoolAnnounced, late)]


def test_an_end_that_comes_before_its_pool_is_heard_first(pair: ConnectionPair, make_pool: MakePool) -> None:
    assert heard(pair, removal(1, 3), make_pool(pool_id=1, generation=3)) == []
    anew = make_pool(pool_id=1, generation=4)
    assert heard(pair, anew) == [PoolAnnounced(anew)]


@pytest.mark.parametrize("name", ["dtype", "order", "scale_dtype", "device", "role"])
def test_no_name_in_an_announcement_is_longer_than_others(name: str, make_pool: MakePool) -> None:
    value = "x" * 257
    with pytest.raises(ConfigError, match=f"{name} has 257 characters"):
        make_pool(**({"roles": ("key", value)} if name == "role" else {name: value}))


def test_what_a_pool_takes_of_memory_grows_with_all_its_parts(make_pool: MakePool) -> None:
    pool = make_pool()
    (region,) = pool.regions
    for grown in (
        replace(pool, regions=(region, PoolRegion(remote_addr=0, nbytes=1, rkey=b""))),
        replace(pool, regions=(replace(region, rkey=region.rkey + b"x"),)),
        replace(pool, segments=(*pool.segments, pool.segments[0])),
        replace(pool, layers=(0, 1, 2)),
    ):
        assert grown.memory_nbytes > pool.memory_nbytes
