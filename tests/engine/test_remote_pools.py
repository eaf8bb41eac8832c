"""A peer's pools: which one is meant is told without opening any, and only those that are used are opened."""

from __future__ import annotations

import asyncio
import logging
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from hurray_rdma import CacheSpec, Engine
from hurray_rdma.control import DeviceUnavailableError, FrameDecoder, Pool, PoolRegion, PoolSegment, encode
from hurray_rdma.engine import reception
from hurray_rdma.engine.compat import announced_layout, announcement
from hurray_rdma.engine.logs import EngineLog
from hurray_rdma.engine.remote_pool import RemotePool
from hurray_rdma.engine.remote_pools import RemotePools
from hurray_rdma.engine.tally import Tally
from hurray_rdma.errors import ConfigError, GeometryError
from hurray_rdma.transport import Endpoint, Path
from tests.hazards.scenes import SPEC, make_pool, run, snapshot_of

OTHER = replace(SPEC, layers=tuple(layer + 10 for layer in SPEC.layer_indices))
"""Other layers of the same model."""


@dataclass
class Heard:
    """Pools that were announced, and the endpoint over which they are reached."""

    remotes: RemotePools
    endpoint: Endpoint
    num_regions: int
    """Of each pool."""

    @property
    def num_opened(self) -> int:
        """Pools that are open."""
        assert len(self.endpoint._remote_memories) % self.num_regions == 0
        return len(self.endpoint._remote_memories) // self.num_regions


def told(*pools: Pool) -> RemotePools:
    remotes = RemotePools(EngineLog(logging.getLogger(__name__)), tally=Tally())
    for pool in pools:
        remotes.hear(pool)
    return remotes


@pytest.fixture
def heard() -> Iterator[Heard]:
    """Four pools: the first, two with other layers, and one that is said to be on a GPU."""
    with make_pool(SPEC, 8, "arrays") as pool:
        context = pool.regions[0].context
        worker = context.open_worker()
        endpoint = worker.connect(worker.address, timeout_s=10)
        first = announcement(pool, pool_id=0, generation=1, name="")
        others = [
            replace(first, pool_id=number, name=f"group {number}", layers=OTHER.layer_indices) for number in (1, 2)
        ]
        remotes = told(first, *others, replace(first, pool_id=3, name="gpu", device="cuda:0"))
        remotes.use(endpoint, None)
        assert len(first.regions) > 1
        yield Heard(remotes, endpoint, len(first.regions))
        remotes.clear()
        assert endpoint.close()
        worker.close()


def test_only_the_pool_that_takes_the_pages_is_opened(heard: Heard) -> None:
    for _ in range(2):
        assert heard.remotes.pool_for(OTHER, None, device="cpu").pool.pool_id == 1
        assert heard.num_opened == 1
    for _ in range(2):
        assert heard.remotes.pool_for(OTHER, "group 2", device="cpu").pool.pool_id == 2
        assert heard.num_opened == 2
    assert heard.remotes.pool_for(SPEC, "default", device="cpu").pool.pool_id == 0
    assert heard.num_opened == 3


def test_a_pool_that_none_fits_is_told_from_announcements(heard: Heard) -> None:
    elsewhere = replace(SPEC, layers=tuple(layer + 20 for layer in SPEC.layer_indices))
    with pytest.raises(GeometryError, match="pools with layers") as geometry:
        heard.remotes.pool_for(elsewhere, None, device="cpu")
    assert geometry.value.value == elsewhere.layer_indices
    layers = [SPEC.layer_indices, OTHER.layer_indices, OTHER.layer_indices, SPEC.layer_indices]
    assert str(layers) in str(geometry.value)
    with pytest.raises(GeometryError) as named:
        heard.remotes.pool_for(SPEC, "nobody's", device="cpu")
    assert "has pools ['default', 'group 1', 'group 2', 'gpu']" in str(named.value)
    with pytest.raises(DeviceUnavailableError, match=r"on \['cpu', 'cpu'\]") as device:
        heard.remotes.pool_for(OTHER, None, device="cuda:0")
    assert "pool='group 1'" in str(device.value)
    assert heard.num_opened == 0


def test_a_connection_opens_the_first_pool_and_each_other_with_its_first_transfer() -> None:
    async def job() -> None:
        with (
            make_pool(SPEC, 8) as pool,
            make_pool(SPEC, 8) as own,
            make_pool(OTHER, 8) as second,
            make_pool(OTHER, 8) as third,
        ):
            async with Engine(own, listen="127.0.0.1:0") as receiver, Engine(pool) as sender:
                receiver.add_pool(second, name="second")
                receiver.add_pool(third, name="third")
                async with sender.connect(receiver.address) as peer:
                    assert peer.pools == ("", "second", "third")
                    connection = peer._open_connection()
                    endpoint = connection._endpoint
                    assert endpoint is not None
                    num_regions = len(own.regions)
                    for _ in range(2):
                        await peer.send(snapshot_of(pool, [1, 2]))
                        (await anext(receiver.arrivals())).abort()
                        assert len(endpoint._remote_memories) == num_regions
                    with make_pool(OTHER, 8) as source:
                        await peer.send(snapshot_of(source, [1, 2]), pool="third")
                        assert len(endpoint._remote_memories) == num_regions + len(third.regions)
                    assert set(connection._pools._open) == {0, 2}

    run(job())


@dataclass
class Memory:
    """A region, as UCX reaches it."""

    lane: str
    path: Path

    def lane_from(self, device: str) -> str:
        return self.lane

    def path_from(self, device: str) -> Path:
        return self.path


def test_a_slow_lane_is_warned_of_once_when_the_first_pool_over_it_is_opened(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memories = {0: Memory("sysv", Path.MAPPED), 1: Memory("tcp", Path.PUT), 2: Memory("tcp", Path.PUT)}
    opened: list[int] = []

    def opened_now(remotes: RemotePools, pool: Pool, layout: object) -> RemotePool:
        opened.append(pool.pool_id)
        return RemotePool(pool, layout, (memories[pool.pool_id],))  # type: ignore[arg-type]

    monkeypatch.setattr(RemotePools, "_opened", opened_now)
    with make_pool(SPEC, 8) as pool:
        first = announcement(pool, pool_id=0, generation=1, name="")
    remotes = told(*(replace(first, pool_id=number, name=f"pool {number}") for number in range(3)))
    remotes.warn_if_slow(same_host=True)
    assert (opened, caplog.text) == ([0], "")
    for number in (2, 1):
        remotes.pool_for(SPEC, f"pool {number}", device="cpu")
        (record,) = caplog.records
        assert "over tcp although the peer is on this host" in record.getMessage()
    assert opened == [0, 2, 1]


def test_an_engine_takes_no_more_pools_than_its_peers_can_hear_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "MAX_POOLS", 2)

    async def job() -> None:
        with make_pool(SPEC, 4) as own, make_pool(SPEC, 4) as second, make_pool(SPEC, 4) as third:
            async with Engine(own, listen="127.0.0.1:0", token="engine's") as engine:
                engine.add_pool(second, name="second")
                with pytest.raises(ConfigError, match="at most 2 that the same peers hear of") as caught:
                    engine.add_pool(third, name="third")
                assert (caught.value.field, caught.value.value) == ("number of pools", 3)
                engine.add_pool(third, name="tenant's", token="tenant's")
                engine.remove_pool("tenant's")
                engine.remove_pool("second")
                await asyncio.sleep(0)
                engine.add_pool(third, name="third")

    run(job())


def test_what_an_announcement_is_said_to_take_is_what_it_takes() -> None:
    spec = CacheSpec(num_layers=1024, num_heads=8, head_dim=128, page_size=16, dtype="bfloat16")
    page, num_tensors, far = 16 * 8 * 128 * 2, len(spec.tensors), 1 << 46
    pool = Pool(
        pool_id=0,
        generation=1,
        num_pages=1000,
        layers=spec.layer_indices,
        num_heads=8,
        head_dim=128,
        page_size=16,
        dtype="bfloat16",
        roles=spec.roles,
        total_heads=8,
        regions=tuple(PoolRegion(remote_addr=far + n, nbytes=far + n, rkey=bytes(64)) for n in range(num_tensors)),
        segments=tuple(PoolSegment(n, far // 2 + n, page, page // 16, 256) for n in range(num_tensors)),
    )
    data = encode(pool, 1)
    tracemalloc.start()
    try:
        ((_, told_of),) = FrameDecoder(1 << 24).feed(data)
        assert isinstance(told_of, Pool)
        layout = announced_layout(told_of)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert layout.num_pages == 1000
    assert taken < told_of.memory_nbytes < 3 * taken
